"""Windows of tokens: the sequences that a language model is trained on.

A window has `context + 1` tokens: the start token and `context` tokens of the text. All but the last are the model's
input, all but the first are its targets.

Shape legend: N tokens of the text, B batch, L context.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def draw_windows(
    tokens: Tensor, *, start: int, context: int, batch: int, seed: int, step: int, repeats: float = 0.0
) -> Tensor:
    """Draw the windows of one training step. Equal arguments give equal windows.

    Args:
        tokens: (N,) int64, the text.
        start: the start token, which each window begins with.
        context: L, tokens of the text in a window.
        batch: B. Positions are drawn uniformly, with replacement.
        seed, step: of the random draws.
        repeats: the probability that a window contains a copied span: 16 to L / 2 tokens that are directly repeated.

    Returns:
        (B, L + 1) int64.

    Raises:
        ValueError: a text shorter than the context.

    Example:
        >>> import torch, saccade
        >>> windows = saccade.training.draw_windows(torch.arange(1, 100), start=0, context=4, batch=3, seed=0, step=0)
        >>> windows.shape, windows[:, 0]
        (torch.Size([3, 5]), tensor([0, 0, 0]))
    """
    check_length(tokens, context)
    random = np.random.default_rng((seed, step))
    places = random.integers(0, tokens.shape[0] - context + 1, size=batch)
    windows = torch.full((batch, context + 1), start, dtype=torch.int64)
    for window, place in zip(windows, places.tolist(), strict=True):
        window[1:] = tokens[place : place + context]
        if random.random() < repeats:
            _repeat(window, random)
    return windows


def _repeat(window: Tensor, random: np.random.Generator) -> None:
    context = window.shape[0] - 1
    length = int(random.integers(min(16, context // 2), context // 2, endpoint=True))
    first = int(random.integers(1, context + 1 - 2 * length, endpoint=True))
    window[first + length : first + 2 * length] = window[first : first + length].clone()


def draw_copying(vocabulary: int, *, start: int, context: int, batch: int, seed: int, step: int) -> Tensor:
    """Random tokens repeated periodically, (B, min(L, 64) + 1), which only a model that copies can predict.

    After the start token, 4 to 24 random tokens (fewer in a small context) repeat until the window is full. Equal
    arguments give equal windows.
    """
    random = np.random.default_rng((seed, step, 1))
    length = min(context, 64)
    longest = max(min(24, length // 2), 1)
    windows = np.full((batch, length + 1), start, dtype=np.int64)
    for window in windows:
        period = int(random.integers(min(4, longest), longest, endpoint=True))
        drawn = random.integers(vocabulary - 1, size=period)
        window[1:] = np.resize(drawn + (drawn >= start), length)
    return torch.from_numpy(windows)


def whole_windows(tokens: Tensor, *, start: int, context: int) -> Tensor:
    """Cut a text into adjacent windows, so that each token is predicted once.

    Tokens after the last whole window are left out.

    Args:
        tokens: (N,) int64, the text.
        start: the start token, which each window begins with.
        context: L, tokens of the text in a window.

    Returns:
        (N // L, L + 1) int64.

    Raises:
        ValueError: a text shorter than the context.

    Example:
        >>> import torch, saccade
        >>> saccade.training.whole_windows(torch.arange(1, 8), start=0, context=3)
        tensor([[0, 1, 2, 3],
                [0, 4, 5, 6]])
    """
    check_length(tokens, context)
    count = tokens.shape[0] // context
    body = tokens[: count * context].view(count, context)
    return torch.cat((torch.full((count, 1), start, dtype=torch.int64), body), dim=1)


def check_length(tokens: Tensor, context: int) -> None:
    if tokens.shape[0] < context:
        raise ValueError(f"text: {tokens.shape[0]} tokens are too short for one window of {context} (the context)")
