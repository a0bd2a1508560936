"""Splits a text into batches with labels, for models that predict tokens.

Shape legend: L tokens of a window, special ones included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...support._restored import evaluating
from ..models import Model
from ..models.decoding.generating import GeneratingModel

Batch = dict[str, Tensor]
MASKED = 0.15  # share of masked tokens, as in BERT's training
IGNORED = -100
LONGEST = 256


def text_windows(model: Model, text: str, *, most: int) -> list[Batch]:
    """Windows of a text, each a batch of one item, with labels: next tokens or masked tokens.

    A window has 256 tokens, or the model's maximum. The masked tokens (15 %, all replaced by the mask token) depend
    only on the text, so that two models get the same.

    Args:
        model: predicts the next token (GPT-2, Llama, Saccade's own), or masked tokens (head "masked-lm").
        text: to read.
        most: maximum number of tokens to read.

    Raises:
        ValueError: another model, or a text with fewer than two tokens.
    """
    causal = predicts_next(model)
    tokenizer: Any = model.tokenizer
    before = (tokenizer.start,) if hasattr(tokenizer, "start") else tokenizer.before
    after = () if causal else tokenizer.after
    room = min(LONGEST, model.context or LONGEST) - len(before) - len(after)
    ids = tokenizer.encode(text).ids[:most]
    if len(ids) < 2:
        raise ValueError(f"data: the text has {len(ids)} tokens, expected at least two")
    pieces = [ids[start : start + room] for start in range(0, len(ids), room)]
    windows = [torch.tensor([[*before, *piece, *after]]) for piece in pieces if len(piece) > 1]
    if causal:
        return [{"input_ids": window, "labels": window} for window in windows]
    mask = tokenizer.named.get("mask")
    if mask is None:
        raise ValueError("data: the tokenizer has no mask token, which a masked language model needs")
    return list(_masked(windows, len(before), len(after), mask))


def predicts_next(model: Model) -> bool:
    """True for causal language models, False for masked ones. ValueError for other models."""
    head = model.request.head
    if isinstance(model, GeneratingModel) and head == "causal-lm":
        return True
    if head == "masked-lm":
        return False
    raise ValueError(
        f"data: {model.family.name} with the head {head!r} does not predict tokens of a text; expected 'causal-lm' or "
        "'masked-lm': name the heads with --heads, without --data, or rank them in Python with "
        "saccade.head_importance(..., loss=...)"
    )


@torch.no_grad()
def mean_loss(model: Model, batches: Sequence[Batch], progress: Callable[[], None] = lambda: None) -> float:
    """Mean loss per predicted token, in nats, without dropout. `progress` is called after each batch."""
    total, count = 0.0, 0
    with evaluating(model):
        for batch in batches:
            labels = batch["labels"]
            predicted = labels.shape[1] - 1 if labels is batch["input_ids"] else int((labels != IGNORED).sum())
            total += float(model(**batch).loss) * predicted
            count += predicted
            progress()
    return total / count


def perplexity(loss: float) -> float:
    """exp(loss); infinite on overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def _masked(windows: list[Tensor], before: int, after: int, mask: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    for window in windows:
        inside = window.shape[1] - before - after
        chosen = before + torch.randperm(inside, generator=generator)[: max(1, round(MASKED * inside))]
        labels = torch.full_like(window, IGNORED)
        labels[0, chosen] = window[0, chosen]
        yield {"input_ids": window.index_fill(1, chosen, mask), "labels": labels}
