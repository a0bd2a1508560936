"""A new wav2vec 2.0 for a few thousand short sounds: its sizes, and convolutions that begin as a filter bank.

The published model learns to hear from hundreds of hours. Here its first convolution begins as band-pass filters
evenly spaced in mel, as in Zeghidour et al., "Learning Filterbanks from Raw Speech for Phone Recognition" (2018), and
its second one as means over time. Both go on learning.

Shape legend: C channels of features, K places of a kernel, E width.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...models import Model
from ...models.checkpoints.settings import PROCESSOR
from ...models.families.wav2vec2 import Wav2Vec2
from ...models.loading import new_model
from ._mfcc import mel

FILTERS, FEATURES = 64, 128  # channels of the first convolution, and of those after it
WINDOW, HOP = 0.016, 0.0025  # seconds of the first convolution
LOWEST = 60.0  # hertz of the first filter
LOUDNESS = 0.3  # of the filters: the norm after them leaves what is far quieter than the sound's mean quiet
PLACES = 31  # frames of the positions' convolution


@dataclasses.dataclass(frozen=True)
class SoundModelSizes:
    """Sizes of a new model for sounds.

    Args:
        mask_time, mask_channels: share of frames, of channels, that are masked while learning (SpecAugment).
    """

    layers: int
    heads: int
    width: int
    dropout: float
    mask_time: float
    mask_channels: float

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("dropout", "mask_time", "mask_channels"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}: must be in [0, 1), got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"heads: must divide the width, got heads={self.heads} and width={self.width}")


def new_sound_model(folder: Path, sizes: SoundModelSizes, rate: int, head: str, labels: Sequence[str]) -> Model:
    """A new model with a frame every 10 ms; weights are drawn with PyTorch's generator.

    Args:
        folder: gets preprocessor_config.json.
        labels: the classes, or the tokens of a CTC head.
    """
    write_processor(folder, rate)
    drop = ("hidden_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout")
    model = new_model(
        folder,
        head=head,
        labels=labels,
        model_type="wav2vec2",
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=4 * sizes.width,
        **dict.fromkeys(drop, sizes.dropout),
        activation_dropout=0.0,
        layerdrop=0.0,
        **_convolutions(rate),
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        num_conv_pos_embeddings=PLACES,
        num_conv_pos_embedding_groups=math.gcd(sizes.width, 16),
        apply_spec_augment=True,
        mask_time_prob=sizes.mask_time,
        mask_time_length=5,
        mask_time_min_masks=0,
        mask_feature_prob=sizes.mask_channels,
        mask_feature_length=max(sizes.width // 16, 1),
        mask_feature_min_masks=0,
        classifier_proj_size=sizes.width,
        ctc_loss_reduction="sum",
        initializer_range=round(sizes.width**-0.5, 4),
    )
    assert isinstance(model, Wav2Vec2)
    _begin(model, rate)
    return model


def _convolutions(rate: int) -> dict[str, Any]:
    return {
        "conv_dim": [FILTERS, FEATURES, FEATURES],
        "conv_kernel": [max(round(WINDOW * rate), 2), 8, 3],
        "conv_stride": [max(round(HOP * rate), 1), 4, 1],
        "num_feat_extract_layers": 3,
        "conv_bias": True,
    }


@torch.no_grad()
def _begin(model: Wav2Vec2, rate: int) -> None:
    first, second, *rest = model.features.convolutions
    first.weight.copy_(torch.from_numpy(mel_bank(FILTERS, first.kernel_size[0], rate))[:, None])
    # Each channel a random sum of the filters' means over time.
    mixed = torch.randn(FEATURES, FILTERS, 1) * FILTERS**-0.5
    second.weight.copy_(mixed.expand_as(second.weight) / second.kernel_size[0])
    for conv in rest:
        torch.nn.init.kaiming_normal_(conv.weight)
    places = model.positions.direction
    places.normal_(std=2 * (places.shape[0] * places.shape[2]) ** -0.5)  # as the published model begins
    model.positions.scale.copy_(torch.linalg.vector_norm(places, dim=(0, 1), keepdim=True))


def mel_bank(filters: int, kernel: int, rate: int) -> np.ndarray:
    """(C, K) float32: waves under Hann windows, from `LOWEST` hertz to nearly half the rate, evenly spaced in mel.

    A window is as long as the kernel where neighbours are close, and shorter where they are far apart. Every other one
    is a sine. Higher ones are louder, since speech has less power there (pre-emphasis).
    """
    marks = np.linspace(mel(LOWEST), mel(0.48 * rate), filters + 1)
    frequencies = 700 * np.expm1(marks / 1127)
    centres, gaps = frequencies[:-1, None], np.diff(frequencies)[:, None]
    time = (np.arange(kernel) - (kernel - 1) / 2) / rate
    half = np.minimum(kernel / rate, 2 / gaps) / 2
    window = np.where(np.abs(time) < half, 0.5 + 0.5 * np.cos(np.pi * time / half), 0)
    waves = window * np.cos(2 * np.pi * centres * time - np.pi / 2 * (np.arange(filters)[:, None] % 2))
    emphasis = np.abs(1 - 0.97 * np.exp(-2j * np.pi * centres / rate))
    scaled = LOUDNESS * emphasis * waves / np.linalg.norm(waves, axis=1, keepdims=True)
    return np.asarray(scaled, np.float32)


def write_processor(folder: Path, rate: int) -> None:
    """Write the preprocessing settings as published models store them."""
    settings = {
        "feature_extractor_type": "Wav2Vec2FeatureExtractor",
        "feature_size": 1,
        "sampling_rate": rate,
        "padding_side": "right",
        "padding_value": 0.0,
        "do_normalize": True,
        "return_attention_mask": True,
    }
    (folder / PROCESSOR).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
