"""What a model returns.

Shape legend: B batch, L length, E model width, V vocabulary, K labels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..nn import KVCache


@dataclass
class ModelOutput:
    """What a model's call gives; None where the model or the call has none of it.

    Where a batch was padded, rows of padding are 0.

    Attributes:
        last_hidden_state: (B, L, E), what the last layer gives; of a series (B, channels, patches, E).
        logits: of the head: (B, L, V) of a language model, (B, K) or (B, L, K) of a classifier.
        loss: the mean over the labels that were given; a scalar.
        hidden_states: with `hidden_states=True`: what each layer reads, and what the last one gives; each (B, L, E).
        pooler_output: (B, E), BERT's summary of its first token.
        start_logits, end_logits: (B, L), of the first and the last token of an answer.
        prediction_outputs: (B, steps, channels), the forecast of a series, in its own units.
        cls_logits, distillation_logits: (B, K), of DeiT's two classifiers.
        cache: the one the call was given, longer by its tokens.
        encoder_last_hidden_state, encoder_hidden_states: of the encoder, where there is a decoder beside it, whose
            all others are.
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

    @property
    def decoder_hidden_states(self) -> tuple[Tensor, ...] | None:
        """`hidden_states` by their published name in encoder-decoders."""
        return self.hidden_states
