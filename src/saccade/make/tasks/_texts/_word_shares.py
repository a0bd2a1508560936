"""The contribution of each word to a classifier's output: integrated gradients.

Sundararajan, Taly and Yan, "Axiomatic Attribution for Deep Networks" (2017). The embedding of every token is moved in a
straight line from the mean of all embeddings to its own; the gradient along the way, times the way, is the token's
share. Shares are signed and add up to the difference that the words make. Special tokens stay as they are.

Shape legend: L tokens of the text, the special ones included, P points of the way, E width of the embeddings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ....see.inspection._words import split_words
from ....support._restored import evaluating
from ...models import Model

POINTS, ROUNDS = 16, 12  # of the way that are looked at, at first and in each round; rounds
EXACT = 0.01  # how far the sum may be from what it has to be, as a share of it


@dataclasses.dataclass(frozen=True)
class WordShares:
    """The words of a text that were read, with the contribution of each.

    Attributes:
        words: in their order.
        shares: of each, float64.
        total: by what the value differs from that of the text without words.
    """

    words: tuple[str, ...]
    shares: tuple[float, ...]
    total: float


def word_shares(
    model: Model, text: str, ids: Sequence[int], value: Callable[[Tensor], Tensor], first: int = 0
) -> WordShares | None:
    """The contribution of each word to an output.

    Args:
        ids: of the tokens that the model reads, special ones included; fewer than the text has where it was cut.
        value: the number for each row of `input_ids` (P, L).
        first: how many of the text's tokens stand before those.

    Returns:
        None if the model has no embedding of its tokens that could be moved.
    """
    before, spans = _spans(model, text, ids, first)
    ordinary = torch.zeros(len(ids), dtype=torch.bool)
    ordinary[before : before + len(spans)] = True
    found = token_shares(model, ids, ordinary, value)
    if found is None:
        return None
    shares, total = found
    read = (spans[0][0], spans[-1][1]) if spans else (0, 0)
    words = [(begin, end) for begin, end in split_words(text) if begin < read[1] and end > read[0]]
    sums = np.zeros(len(words))
    starts = [end for _, end in words]
    for share, (_, stop) in zip(shares[ordinary.numpy()].tolist(), spans, strict=True):
        sums[min(int(np.searchsorted(starts, stop)), len(words) - 1)] += share
    return WordShares(tuple(text[begin:end] for begin, end in words), tuple(sums.tolist()), total)


def token_shares(
    model: Model, ids: Sequence[int], ordinary: Tensor, value: Callable[[Tensor], Tensor]
) -> tuple[np.ndarray, float] | None:
    """The shares (L,) of tokens, 0 for those that are not `ordinary`; and the sum that they must have.

    The trapezoidal rule, whose intervals are halved where it is wrong: a model that is sure of itself changes its mind
    in a small part of the way.
    """
    at = np.linspace(0.0, 1.0, POINTS + 1)
    looked = _along(model, ids, ordinary, value, at)
    if looked is None:
        return None
    values, slopes = looked
    total = float(values[-1] - values[0])
    for _ in range(ROUNDS):
        widths = np.diff(at)
        wrong = np.abs(np.diff(values) - widths * (slopes[1:] + slopes[:-1]).sum(1) / 2)
        if wrong.sum() <= EXACT * max(abs(total), 1.0):
            break
        worst = np.sort(np.argsort(-wrong)[:POINTS])
        middles = at[worst] + widths[worst] / 2
        looked = _along(model, ids, ordinary, value, middles)
        assert looked is not None
        at, values = np.insert(at, worst + 1, middles), np.insert(values, worst + 1, looked[0])
        slopes = np.insert(slopes, worst + 1, looked[1], axis=0)
    return (np.diff(at)[:, None] * (slopes[1:] + slopes[:-1]) / 2).sum(0), total


def _along(
    model: Model, ids: Sequence[int], ordinary: Tensor, value: Callable[[Tensor], Tensor], at: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """The value (P,) at points of the path, and its derivative along the path for each token (P, L), float64."""
    embedding: Any = getattr(model, "tokens", None)
    if not isinstance(embedding, nn.Embedding):
        return None
    way = torch.tensor(at, device=model.device)[:, None, None]
    moved: list[tuple[Tensor, Tensor]] = []

    def move(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        if output.shape[:2] != (len(at), len(ids)):
            return output
        step = torch.where(ordinary.to(output.device)[:, None], output - embedding.weight.mean(0), 0.0).detach()
        placed = (output.detach() - (1 - way).to(output.dtype) * step).requires_grad_()
        moved.append((placed, step))
        return placed

    with embedding.register_forward_hook(move), evaluating(model), torch.enable_grad():
        found = value(torch.tensor(ids, device=model.device).expand(len(at), -1))
        if len(moved) != 1:  # of an encoder-decoder, which reads the text twice
            return None
        (placed, step) = moved[0]
        (gradient,) = torch.autograd.grad(found.sum(), placed)
    slopes = (gradient.double() * step.double()).sum(-1)
    return found.detach().double().cpu().numpy(), slopes.cpu().numpy()


def _spans(model: Model, text: str, ids: Sequence[int], first: int) -> tuple[int, list[tuple[int, int]]]:
    """The number of special tokens before the text, and the characters of each token that is read."""
    tokenizer = model.tokenizer
    before, after = len(tokenizer.before), len(tokenizer.after)
    return before, list(tokenizer.encode(text).spans)[first : first + len(ids) - before - after]
