"""`ModelOutput`, the result of a model's call.

Shape legend: B batch, L length, E model width, V vocabulary, K labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...operator.nn import KVCache


@dataclass
class ModelOutput:
    """The result of a model's call. A field is None if the model or the call does not provide it.

    In padded batches, rows of padding are 0.

    Attributes:
        last_hidden_state: (B, L, E), the output of the last layer; for a series (B, channels, patches, E).
        logits: of the head: (B, L, V) of a language model, (B, K) or (B, L, K) of a classifier.
        loss: the mean loss over the given labels; a scalar.
        hidden_states: with `hidden_states=True`: the input of each layer, and the output of the last; each (B, L, E).
        pooler_output: (B, E), BERT's projection of its first token.
        start_logits, end_logits: (B, L), for the first and the last token of an answer.
        prediction_outputs: (B, steps, channels), the forecast of a series, in its original units.
        cls_logits, distillation_logits: (B, K), of DeiT's two classifiers.
        cache: the cache given to the call, with its tokens appended.
        others: outputs of a model of transformers that have no field here, by name, such as CLIP's `text_embeds`.
        encoder_last_hidden_state, encoder_hidden_states: of the encoder, in encoder-decoders; all other fields are then
            of the decoder.

    Example:
        >>> import torch, saccade
        >>> output = saccade.models.load()(torch.tensor([[0, 1883, 277]]), hidden_states=True)
        >>> output.logits.shape, output.loss
        (torch.Size([1, 3, 2048]), None)
        >>> output.hidden_states[-1].shape == output.last_hidden_state.shape
        True
    """

    last_hidden_state: Tensor | None = None
    logits: Tensor | None = None
    loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    pooler_output: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    prediction_outputs: Tensor | None = None
    cls_logits: Tensor | None = None
    distillation_logits: Tensor | None = None
    cache: KVCache | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def decoder_hidden_states(self) -> tuple[Tensor, ...] | None:
        """`hidden_states` by their published name in encoder-decoders."""
        return self.hidden_states
