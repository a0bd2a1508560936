"""The base class of text encoders: from padded batches to hidden states and the output of a head.

Shape legend: B batch, L length, T computed tokens, E width.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from ....operator._observers import wants_padding_in_place
from ....operator.nn import Encoder
from ....operator.nn.stacks import LayerObserver
from ..inputs import check_ids
from ..model import Model
from ..output import ModelOutput
from ..output_heads import ItemHead, SpanHead, TokenHead, refuse_labels
from ..token_layout import TokenLayout, token_layout


class TextEncoder(Model):
    """A text encoder: an embedding, a stack of encoder blocks, and an optional head. Abstract.

    Padding is not computed: the real tokens of all items are packed in one row. With a mechanism other than softmax
    attention, batches stay padded.

    Attributes:
        tokens: the token embedding.
        encoder: the stack of blocks.
        head: None, a `TokenHead`, an `ItemHead` or a `SpanHead`.
        longest: maximum number of tokens of an item; None if unlimited.
    """

    tokens: nn.Embedding
    encoder: Encoder
    head: nn.Module | None
    longest: int | None

    @abstractmethod
    def embed(
        self, input_ids: Tensor, layout: TokenLayout, token_type_ids: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        """Input of the first layer, (B, L, E), or (1, T, E) if packed."""

    def pool(self, x: Tensor, layout: TokenLayout) -> Tensor | None:
        """A vector (B, E) of each item, if the family defines one, such as BERT's pooler output; else None."""
        return None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        logits_of: Tensor | None = None,
        hidden_states: bool = False,
        observe: LayerObserver | None = None,
    ) -> ModelOutput:
        """The hidden states of a batch of texts, and the output of the head.

        Args:
            input_ids: (B, L) ints.
            attention_mask: (B, L), 1 for real tokens and 0 for padding; None: all are real.
            token_type_ids: (B, L), the sentence of each token, in families that use it; None: the first.
            position_ids: (B, L) or (1, L); None: the family's positions, counted from the first real token.
            labels: for the head: (B, L) ints, -100 for tokens without a loss; for whole items (B,) or (B, K).
            start_positions, end_positions: (B,), columns of answers, in place of labels.
            logits_of: (B, L) bool, real tokens to compute logits for, with a head for tokens: logits are then (N, K),
                concatenated over items, and the others cost nothing. None: all.
            hidden_states: whether to return the input of each layer and the output of the last one.
            observe: `observe(layer, observation)` is called in each layer.

        Raises:
            TypeError, ValueError: ids outside the vocabulary, too many tokens, other shapes; labels without a loss in
                the head; `logits_of` with another head, or together with labels.
        """
        self._check_labels(labels, start_positions, end_positions)
        batch, length = check_ids("input_ids", input_ids, self.tokens.num_embeddings, self.longest)
        self._check_logits_of(logits_of, (batch, length), labels)
        layout = token_layout(batch, length, attention_mask, packed=self.request.mechanism is None)
        x = self.embed(input_ids, layout, token_type_ids, position_ids)
        states: list[Tensor] | None = [] if hidden_states else None
        x = self.encoder(x, layout.mask, padding=layout.padding, observe=observe, hidden_states=states)
        pooled = self.pool(x, layout)
        if isinstance(self.head, TokenHead) and logits_of is not None:
            read = self.head.of_some(x, layout, logits_of)
        else:
            read = self._read(x, layout, pooled, labels, (start_positions, end_positions))
        return ModelOutput(
            last_hidden_state=layout.put(x),
            hidden_states=None if states is None else tuple(map(layout.put, states)),
            pooler_output=pooled,
            **read,
        )

    def packed_states(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, TokenLayout]:
        """The last hidden states (1, T, E) of the real tokens, concatenated over items.

        No tensor of the model's width has padding, not even the result. The layout locates each item:
        `layout.mean(states)` is (B, E).

        Raises:
            TypeError, ValueError: as of `forward`; a mechanism other than softmax attention.
        """
        if self.request.mechanism is not None:
            raise ValueError(f"packed_states: needs softmax attention, not {self.request.mechanism!r}")
        batch, length = check_ids("input_ids", input_ids, self.tokens.num_embeddings, self.longest)
        layout = token_layout(batch, length, attention_mask)
        if layout.padding is None and not wants_padding_in_place():
            layout = layout.packed(input_ids.device)
        x = self.encoder(self.embed(input_ids, layout, token_type_ids, None), layout.mask, padding=layout.padding)
        packed = layout.packed(input_ids.device)
        return x if packed is layout else packed.take(x), packed

    def _check_labels(self, labels: Tensor | None, start: Tensor | None, end: Tensor | None) -> None:
        """Check that the head has a loss for the labels, and that answers have both ends."""
        spans, head = isinstance(self.head, SpanHead), self.request.head if self.head is not None else None
        if spans or head is None:
            refuse_labels(head, labels=labels)
        if not spans:
            refuse_labels(head, start_positions=start, end_positions=end)
        elif (start is None) != (end is None):
            missing = "start_positions" if start is None else "end_positions"
            raise ValueError(f"{missing}: missing; the loss of an answer needs its first and its last column")

    def _check_logits_of(self, wanted: Tensor | None, shape: tuple[int, int], labels: Tensor | None) -> None:
        if wanted is None:
            return
        if not isinstance(self.head, TokenHead):
            raise ValueError(f"logits_of: the head {self.request.head!r} has no logits of tokens")
        if labels is not None:
            raise ValueError("logits_of: give it without labels, whose loss needs the logits of all labelled tokens")
        if wanted.dtype != torch.bool or tuple(wanted.shape) != shape:
            raise ValueError(f"logits_of: expected bool of shape {shape}, got {wanted.dtype} {tuple(wanted.shape)}")

    def _read(
        self,
        x: Tensor,
        layout: TokenLayout,
        pooled: Tensor | None,
        labels: Tensor | None,
        answer: tuple[Tensor | None, Tensor | None],
    ) -> dict[str, Any]:
        if self.head is None:
            return {}
        if isinstance(self.head, ItemHead):
            return self.head(layout.first(x) if pooled is None else pooled, labels)
        if isinstance(self.head, SpanHead):
            return self.head(x, layout, None if None in answer else answer)
        return self.head(x, layout, labels)
