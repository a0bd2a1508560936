"""Output heads of text models: logits from hidden states, and their losses.

Each is called with hidden states x (packed or padded), their layout and labels, and returns fields of `ModelOutput`.

Shape legend: B batch, L length, T computed tokens, E width, K labels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...operator.nn._linear import Linear
from .token_layout import TokenLayout

IGNORED = -100  # label of positions without a loss, as in PyTorch


def refuse_labels(head: object, **given: object) -> None:
    """ValueError if labels are given, by argument name, to a head without a loss for them.

    Args:
        head: the name of the head; None for a model without one.
    """
    for name, value in given.items():
        if value is not None and head is None:
            raise ValueError(f"{name}: the model has no head with a loss for them; give head= when loading")
        if value is not None:
            raise ValueError(f"{name}: the head {head!r} has no loss for them")


def classification_loss(logits: Tensor, labels: Tensor, problem: str | None = None) -> Tensor:
    """The loss of labels for whole items, as in transformers.

    Args:
        logits: (B, K).
        labels: (B,) ints: one of K classes; (B, K) floats: K independent labels; with K = 1 (B,) floats: a regression
            target.
        problem: "single_label_classification", "multi_label_classification" or "regression"; None infers it from
            `labels`.
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
    """The mean cross-entropy of the next tokens.

    Args:
        logits: (B, L, V) or (1, T, V), for all computed tokens.
        labels: (B, L), the input tokens; -100 and padding are ignored. They are shifted by one inside.
    """
    moved = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if layout.real is not None:
        later = F.pad(layout.real[:, 1:], (0, 1), value=False)
        moved = moved.masked_fill(~(later & layout.real), IGNORED)
    return F.cross_entropy(logits.flatten(0, -2), layout.take(moved).flatten(), ignore_index=IGNORED)


class TokenHead(nn.Module):
    """Classifies every token; `labels` (B, L), -100 for tokens without a loss."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def of_some(self, x: Tensor, layout: TokenLayout, wanted: Tensor) -> dict[str, Any]:
        """`logits` (N, K) of the tokens selected by `wanted`, (B, L) bool, concatenated over items."""
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
    """Classifies every item from one vector, such as that of its first token; `labels` (B,) or (B, K)."""

    def __init__(self, inner: nn.Module, problem: str | None = None):
        super().__init__()
        self.inner, self.problem = inner, problem

    def forward(self, vectors: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        """(B, E) to `logits` (B, K) and `loss`."""
        logits = self.inner(vectors)
        loss = None if labels is None else classification_loss(logits, labels, self.problem)
        return {"logits": logits, "loss": loss}


class SpanHead(nn.Module):
    """Logits of the first and the last token of an answer; `labels` are their columns, two tensors (B,).

    Padding has logits of -inf, so the loss does not depend on it.
    """

    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__()
        self.inner, self.dropout = nn.Linear(width, 2), nn.Dropout(dropout)

    def forward(self, x: Tensor, layout: TokenLayout, labels: tuple[Tensor, Tensor] | None = None) -> dict[str, Any]:
        """`start_logits` and `end_logits` (B, L), -inf at padding, and `loss`. ValueError: an answer in the padding."""
        ends = layout.put(self.inner(self.dropout(x)), -torch.inf).unbind(-1)
        loss = None
        if labels is not None:
            # As published: columns beyond the text are ignored.
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
    counted = F.pad(layout.real, (0, 1), value=True)  # one more column, for ignored labels
    for name, column in zip(("start_positions", "end_positions"), columns, strict=True):
        wrong = ~counted[torch.arange(layout.batch, device=column.device), column]
        if bool(wrong.any()):
            item = int(wrong.nonzero()[0, 0])
            raise ValueError(
                f"{name}: expected columns of real tokens, got {int(column[item])}, which is padding in item {item}"
            )


class Classifier(nn.Module):
    """A linear classifier: `out(dropout(x))`, optionally after `activation(dense(dropout(x)))`."""

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
    """Logits of the vocabulary: `norm(activation(dense(x))) W^T + b`, with the token embedding or another matrix as W.

    Args:
        embedding: (V, D) token embedding, used as W if tied.
        tied: whether W is the token embedding.
        published_bias: the name of b in published files with a separate W: "out", stored with W; "bias", stored alone;
            "both", of which only "out" is used.
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
        self._embedding = (embedding,)  # a tuple hides it from `parameters()`: another module has and saves it

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) to (..., V)."""
        x = self.norm(self.activation(self.dense(x)))
        if self.out is None:
            return F.linear(x, self._embedding[0].weight, self.bias)
        return self.out(x) if self.out.bias is not None else F.linear(x, self.out.weight, self.bias)
