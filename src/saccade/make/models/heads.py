"""Heads: what reads the hidden states of a text model, with the losses that train it.

Each is called with x as it is computed, its layout, and labels, and gives fields of `ModelOutput`.

Shape legend: B batch, L length, T tokens as they are computed, E width, K labels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...operator.nn._linear import Linear
from .token_layout import TokenLayout

IGNORED = -100  # a label that counts for nothing, as everywhere in PyTorch


def refuse_labels(head: object, **given: object) -> None:
    """ValueError where something to learn from is given, by its argument's name, to a head that does not learn from it.

    Args:
        head: the name of the head; None is the body alone.
    """
    for name, value in given.items():
        if value is not None and head is None:
            raise ValueError(f"{name}: the model has no head that learns from them; give head= when loading")
        if value is not None:
            raise ValueError(f"{name}: the head {head!r} does not learn from them")


def classification_loss(logits: Tensor, labels: Tensor, problem: str | None = None) -> Tensor:
    """The loss of labels of whole items, as transformers has it.

    Args:
        logits: (B, K).
        labels: (B,) ints: one of K; (B, K) floats: each label on its own; with K = 1 (B,) floats: a number to predict.
        problem: "single_label_classification", "multi_label_classification" or "regression"; None: by the labels.
    """
    if problem is None:
        whole = not labels.is_floating_point()
        problem = "regression" if logits.shape[-1] == 1 else "single_label" if whole else "multi_label"
    if problem.startswith("regression"):
        return F.mse_loss(logits.flatten(), labels.to(logits).flatten())
    if problem.startswith("single_label"):
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits))


def next_token_loss(logits: Tensor, labels: Tensor, layout: TokenLayout) -> Tensor:
    """The mean cross-entropy of each token's successor.

    Args:
        logits: (B, L, V) or (1, T, V), as they are computed.
        labels: (B, L), the tokens themselves; -100 and padding count for nothing. They are moved by one here.
    """
    moved = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if layout.real is not None:
        later = F.pad(layout.real[:, 1:], (0, 1), value=False)
        moved = moved.masked_fill(~(later & layout.real), IGNORED)
    return F.cross_entropy(logits.flatten(0, -2), layout.take(moved).flatten(), ignore_index=IGNORED)


class TokenHead(nn.Module):
    """Logits of every token from its hidden state; `labels` (B, L), -100 where nothing is to be learned."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def of_some(self, x: Tensor, layout: TokenLayout, wanted: Tensor) -> dict[str, Any]:
        """`logits` (N, K) of the tokens wanted, (B, L) bool, one text's behind the other's."""
        return {"logits": self.inner(x[layout.take(wanted)])}

    def forward(self, x: Tensor, layout: TokenLayout, labels: Tensor | None = None) -> dict[str, Any]:
        """`logits` (B, L, K) and `loss`."""
        logits = self.inner(x)
        loss = None
        if labels is not None:
            wanted = layout.take(labels).flatten()
            loss = F.cross_entropy(logits.flatten(0, -2), wanted, ignore_index=IGNORED)
        return {"logits": layout.put(logits), "loss": loss}


class ItemHead(nn.Module):
    """Logits of every item from one vector of it, such as that of its first token; `labels` (B,) or (B, K)."""

    def __init__(self, inner: nn.Module, problem: str | None = None):
        super().__init__()
        self.inner, self.problem = inner, problem

    def forward(self, vectors: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        """(B, E) to `logits` (B, K) and `loss`."""
        logits = self.inner(vectors)
        loss = None if labels is None else classification_loss(logits, labels, self.problem)
        return {"logits": logits, "loss": loss}


class SpanHead(nn.Module):
    """Logits of an answer's first and last token; `labels` two tensors (B,) of their columns.

    Padding is no answer, so a padded text has the loss that it has alone.
    """

    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__()
        self.inner, self.dropout = nn.Linear(width, 2), nn.Dropout(dropout)

    def forward(self, x: Tensor, layout: TokenLayout, labels: tuple[Tensor, Tensor] | None = None) -> dict[str, Any]:
        """`start_logits` and `end_logits` (B, L), -inf in the padding, and `loss`. ValueError: an answer in padding."""
        ends = layout.put(self.inner(self.dropout(x)), -torch.inf).unbind(-1)
        loss = None
        if labels is not None:
            # As published: columns beyond the text count for nothing.
            columns = [column.clamp(0, layout.length) for column in labels]
            _check_answers(columns, layout)
            first, last = (
                F.cross_entropy(e, c, ignore_index=layout.length) for e, c in zip(ends, columns, strict=True)
            )
            loss = (first + last) / 2
        return {"start_logits": ends[0], "end_logits": ends[1], "loss": loss}


def _check_answers(columns: list[Tensor], layout: TokenLayout) -> None:
    if layout.real is None or torch.compiler.is_compiling():
        return
    counted = F.pad(layout.real, (0, 1), value=True)  # the column behind counts for nothing
    for name, column in zip(("start_positions", "end_positions"), columns, strict=True):
        wrong = ~counted[torch.arange(layout.batch, device=column.device), column]
        if bool(wrong.any()):
            item = int(wrong.nonzero()[0, 0])
            raise ValueError(
                f"{name}: expected columns of real tokens, got {int(column[item])} of item {item}, padding"
            )


class Classifier(nn.Module):
    """`out(dropout(x))`, after `activation(dense(dropout(x)))` where there is one."""

    def __init__(
        self,
        width: int,
        labels: int,
        dropout: float,
        activation: Callable[[Tensor], Tensor] | None = None,
        *,
        bias: bool = True,
    ):
        super().__init__()
        self.activation = activation
        self.dense = None if activation is None else nn.Linear(width, width)
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(width, labels, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) to (..., K)."""
        if self.dense is not None and self.activation is not None:
            x = self.activation(self.dense(self.dropout(x)))
        return self.out(self.dropout(x))


class VocabularyHead(nn.Module):
    """Logits of the vocabulary: `norm(activation(dense(x))) W^T + b`, W the token embedding unless it has its own.

    Args:
        embedding: (V, D) token embedding, which W is when tied.
        tied: whether it is.
        published_bias: of a head of its own, where b is published: with W as "out", apart as "bias", or "both", of
            which the second is read by nothing.
    """

    def __init__(
        self,
        width: int,
        embedding: nn.Embedding,
        activation: Callable[[Tensor], Tensor],
        eps: float,
        *,
        tied: bool,
        published_bias: Literal["out", "bias", "both"] = "both",
    ):
        super().__init__()
        vocabulary, inner = embedding.num_embeddings, embedding.embedding_dim
        self.activation = activation
        self.dense, self.norm = Linear(width, inner), nn.LayerNorm(inner, eps)
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if tied or published_bias != "out" else None
        self.out = None if tied else Linear(inner, vocabulary, bias=published_bias != "bias")
        self._embedding = (embedding,)  # in a tuple: it is another module's, and not saved here

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) to (..., V)."""
        x = self.norm(self.activation(self.dense(x)))
        if self.out is None:
            return F.linear(x, self._embedding[0].weight, self.bias)
        return self.out(x) if self.out.bias is not None else F.linear(x, self.out.weight, self.bias)
