"""The base class of sound encoders: from padded waveforms to frames, logits and text.

Shape legend: B batch, S samples, L frames, T computed frames, C channels of features, E width.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ....operator.nn import Encoder
from ....operator.nn.stacks import LayerObserver
from ..decoding.ctc import CtcVocabulary, beam_search, greedy
from ..model import Model
from ..output import ModelOutput
from ..output_heads import refuse_labels
from ..token_layout import TokenLayout, token_layout
from .sound import SoundInputs, each_sound
from .sound_layers import ConvolutionalPositions, CtcHead, MeanHead, SoundFeatures, SpecAugment, check_sounds


class SoundEncoder(Model):
    """A sound encoder: convolutions, positions, a stack of encoder blocks, and an optional head.

    Padding on the right, marked by `attention_mask`, is not computed, with one exception: if the first convolution is
    normalised over time, the norm includes padding, as published, and a padded item gives other results than the item
    alone. With a mechanism other than softmax attention, padding is computed.

    Attributes:
        stable: whether the blocks are pre-norm, with `norm` after them; otherwise `norm` is before them.
        augment: masking in training; None if the settings do not use it.
        augmented: whether to use `augment`.
        head: None, a `CtcHead` or a `MeanHead`.
    """

    features: SoundFeatures
    features_norm: nn.LayerNorm
    projection: nn.Linear
    projection_dropout: nn.Dropout
    positions: ConvolutionalPositions
    norm: nn.LayerNorm
    dropout: nn.Dropout
    encoder: Encoder
    stable: bool
    augment: SpecAugment | None
    augmented: bool
    head: CtcHead | MeanHead | None

    @cached_property
    def vocabulary(self) -> CtcVocabulary:
        """The vocabulary of the CTC head, from vocab.json beside the weights."""
        return CtcVocabulary.of_folder(self.folder)

    def prepare(self, sounds: Any, rate: int | None = None) -> dict[str, Tensor]:
        """`input_values`, and `attention_mask` if the model uses one: `model(**model.prepare(x))`.

        Args:
            sounds: a file, an array (S,) of floats, or a list of such.
            rate: sample rate of arrays; None: the model's.

        Raises:
            FileNotFoundError, TypeError, ValueError: as in `saccade.models.signals.sound.SoundInputs`.
        """
        return {name: x.to(self.device) for name, x in SoundInputs.of_folder(self.folder)(sounds, rate).items()}

    @torch.no_grad()
    def transcribe(self, sounds: Any, rate: int | None = None, *, beams: int | None = None) -> list[str]:
        """Transcribe each sound to text.

        Args:
            sounds, rate: as in `prepare`.
            beams: None takes the most probable token of every frame; a number searches for the most probable text with
                so many beams.

        Raises:
            FileNotFoundError: vocab.json or preprocessor_config.json is missing. ValueError: no CTC head; and as in
                `prepare`.
        """
        if not isinstance(self.head, CtcHead):
            raise ValueError(f"transcribe: needs the head 'ctc', this model has {self.request.head!r}")
        reader = SoundInputs.of_folder(self.folder)
        listed = each_sound(sounds)
        # Without a mask the model would process padding, so sounds are transcribed one by one.
        batches = [listed] if reader.masked else [[sound] for sound in listed]
        alignments = [tokens for batch in batches for tokens in self._searched(self.head, reader(batch, rate), beams)]
        return [self.vocabulary.text(tokens) for tokens in alignments]

    def _searched(self, head: CtcHead, inputs: dict[str, Tensor], beams: int | None) -> list[tuple[int, ...]]:
        logits = self(**{name: x.to(self.device) for name, x in inputs.items()}).logits
        mask = inputs.get("attention_mask")
        lengths = None if mask is None else [self.frames(n) for n in mask.sum(1).tolist()]
        if beams is None:
            return greedy(logits, lengths, blank=head.blank)
        return [best[0].tokens for best in beam_search(logits, lengths, blank=head.blank, beams=beams)]

    def frames(self, samples: int) -> int:
        """Number of frames for a sound with so many samples."""
        return self.features.frames(samples)

    def forward(
        self,
        input_values: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        hidden_states: bool = False,
        observe: LayerObserver | None = None,
    ) -> ModelOutput:
        """The hidden states of a batch of sounds, a row for each frame, and the output of the head.

        Args:
            input_values: (B, S) floats, as `prepare` makes them.
            attention_mask: (B, S), 1 for samples and 0 for padding on the right; None: all are samples.
            labels: for the CTC head (B, U) ints, padded with -100 or the blank; for the classifier (B,).
            hidden_states: whether to return the input of each layer and the output of the last one.
            observe: `observe(layer, observation)` is called in each layer.

        Raises:
            TypeError, ValueError: other shapes, a sound shorter than one frame, padding elsewhere than on the right.
        """
        if self.head is None:
            refuse_labels(None, labels=labels)
        lengths = check_sounds(input_values, attention_mask, self.features.least)
        frames = None if lengths is None else [self.frames(n) for n in lengths]
        batch, longest = len(input_values), self.frames(input_values.shape[1])
        counts = None if frames is None else torch.tensor(frames, device=input_values.device)
        real = None if counts is None else torch.arange(longest, device=counts.device) < counts[:, None]
        layout = token_layout(batch, longest, real, packed=self.request.mechanism is None)
        x = self._features(input_values.to(self.projection.weight.dtype), lengths, layout)
        x = self.projection_dropout(self.projection(self.features_norm(x)))
        if self.training and self.augmented and self.augment is not None:
            x = self.augment(x, layout)
        x = x + self._places(x, frames, layout)
        x = self.dropout(x if self.stable else self.norm(x))
        states: list[Tensor] | None = [] if hidden_states else None
        x = self.encoder(x, layout.mask, padding=layout.padding, observe=observe, hidden_states=states)
        x = self.norm(x) if self.stable else x
        return ModelOutput(
            last_hidden_state=layout.put(x),
            hidden_states=None if states is None else tuple(map(layout.put, states)),
            **({} if self.head is None else self.head(x, layout, labels)),
        )

    def _features(self, values: Tensor, lengths: list[int] | None, layout: TokenLayout) -> Tensor:
        """Convolutional features of (B, S), without padding unless a norm runs over time."""
        if lengths is None or self.features.over_time or layout.places is None:
            return layout.take(self.features(values))
        return torch.cat([self.features(row[None, :n]) for row, n in zip(values, lengths, strict=True)], 1)

    def _places(self, x: Tensor, frames: list[int] | None, layout: TokenLayout) -> Tensor:
        """Position embeddings of the frames, (1, T, E) if packed; each item on its own."""
        if frames is None or layout.places is None:
            return self.positions(layout.put(x))
        return torch.cat([self.positions(item) for item in x.split(frames, 1)], 1)
