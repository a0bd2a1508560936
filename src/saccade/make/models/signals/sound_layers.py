"""Layers of sound encoders: feature convolutions, convolutional positions, SpecAugment, and heads.

Shape legend: B batch, S samples, L frames, C channels, E width, V vocabulary, K labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..output_heads import IGNORED, ItemHead
from ..token_layout import TokenLayout, token_layout

Activation = Callable[[Tensor], Tensor]


def check_sounds(values: object, attention_mask: Any, least: int) -> list[int] | None:
    """Check a batch (B, S). Returns the number of samples of each item, or None without a mask.

    Args:
        least: minimum number of samples of an item.

    Raises:
        TypeError: not a tensor of floats. ValueError: another shape, a sound that is too short, padding elsewhere.
    """
    if not isinstance(values, Tensor) or not values.is_floating_point():
        dtype = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"input_values: expected a tensor of floats, from model.prepare(sounds), got {dtype}")
    if values.ndim != 2 or not values.numel():
        raise ValueError(f"input_values: expected shape (batch, samples), got {tuple(values.shape)}")
    batch, samples = values.shape
    real = token_layout(batch, samples, attention_mask, packed=False).real
    lengths: list[int] = [samples] * batch if real is None else real.sum(1).tolist()
    if real is not None and not all(bool(row[:n].all()) for row, n in zip(real, lengths, strict=True)):
        raise ValueError("attention_mask: expected padding on the right, after all samples of an item")
    shortest = min(lengths)
    if shortest < least:
        raise ValueError(
            f"input_values: item {lengths.index(shortest)} has {shortest} samples, expected at least {least}"
        )
    return None if real is None else lengths


class SoundLayer(nn.Module):
    """activation(norm(conv(x))): (B, C, S) -> (B, C', S').

    Args:
        norm: "time" normalises each channel over all samples, "channels" each sample over its channels; None.
    """

    def __init__(self, sizes: tuple[int, int], kernel: int, stride: int, norm: str | None, bias: bool):
        super().__init__()
        width = sizes[1]
        self.conv = nn.Conv1d(*sizes, kernel, stride, bias=bias)
        self.norm = None if norm is None else nn.GroupNorm(width, width) if norm == "time" else nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, S) to (B, C', S')."""
        x = self.conv(x)
        if isinstance(self.norm, nn.LayerNorm):
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x if self.norm is None else self.norm(x)


class SoundFeatures(nn.Module):
    """Convolutions over samples: (B, S) -> (B, L, C). Baevski et al. (2020), section 2.

    Args:
        channels, kernels, strides: of each convolution.
        over_time: whether to normalise the first over time and the others not at all; otherwise each over its channels.
    """

    def __init__(
        self,
        channels: Sequence[int],
        kernels: Sequence[int],
        strides: Sequence[int],
        activation: Activation,
        *,
        bias: bool,
        over_time: bool,
    ):
        super().__init__()
        self.kernels, self.strides, self.over_time, self.activation = (
            tuple(kernels),
            tuple(strides),
            over_time,
            activation,
        )
        norms = ["time", *[None] * (len(channels) - 1)] if over_time else ["channels"] * len(channels)
        sizes = zip((1, *channels), channels, strict=False)
        self.layers = nn.ModuleList(
            SoundLayer(*layer, bias) for layer in zip(sizes, kernels, strides, norms, strict=True)
        )

    @property
    def convolutions(self) -> list[nn.Conv1d]:
        return [layer.conv for layer in self.layers if isinstance(layer, SoundLayer)]

    def frames(self, samples: int) -> int:
        """Number of frames L for S samples; below 1 if there are too few."""
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            samples = (samples - kernel) // stride + 1
        return samples

    @property
    def least(self) -> int:
        """Number of samples for one frame."""
        samples = 1
        for kernel, stride in zip(reversed(self.kernels), reversed(self.strides), strict=True):
            samples = (samples - 1) * stride + kernel
        return samples

    def forward(self, samples: Tensor) -> Tensor:
        """(B, S) to (B, L, C)."""
        x = samples[:, None]
        for layer in self.layers:
            x = self.activation(layer(x))
        return x.transpose(1, 2)


class ConvolutionalPositions(nn.Module):
    """Position embeddings from a grouped convolution over frames: (B, L, E) -> (B, L, E). Padding must be 0.

    The weight is `scale_k direction_k / |direction_k|` for each position k of the kernel (Salimans and Kingma, "Weight
    Normalization", 2016). Mohamed et al. (2019) use convolutions in place of position embeddings.
    """

    def __init__(self, width: int, kernel: int, groups: int, activation: Activation):
        super().__init__()
        self.groups, self.activation = groups, activation
        self.scale = nn.Parameter(torch.empty(1, 1, kernel))
        self.direction = nn.Parameter(torch.empty(width, width // groups, kernel))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Position embeddings (B, L, E), to be added to x."""
        kernel = self.scale.shape[-1]
        weight = self.scale * (self.direction / torch.linalg.vector_norm(self.direction, dim=(0, 1), keepdim=True))
        x = F.conv1d(x.transpose(1, 2), weight, self.bias, padding=kernel // 2, groups=self.groups)
        return self.activation(x[..., : x.shape[-1] - 1 + kernel % 2]).transpose(1, 2)  # even kernels add a frame


class SpecAugment(nn.Module):
    """Replaces spans of frames by a learned vector and spans of channels by 0. Park et al., "SpecAugment" (2019).

    Args:
        time, channels: (share, span, least): the share of an item covered by spans, overlaps counted twice; the number
            of frames or channels of a span; the minimum number of spans. A share of 0 masks nothing.
    """

    def __init__(self, width: int, time: tuple[float, int, int], channels: tuple[float, int, int]):
        super().__init__()
        self.vector = nn.Parameter(torch.empty(width))
        self.time, self.channels = time, channels

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Mask x, (1, T, E) if packed."""
        frames, width = layout.length, x.shape[-1]
        lengths = [frames] * layout.batch if layout.real is None else layout.real.sum(1).tolist()
        if self.time[0]:
            masked = _spans(lengths, frames, *self.time).to(x.device)
            x = torch.where(layout.take(masked)[..., None], self.vector, x)
        if self.channels[0]:
            masked = _spans([width] * layout.batch, width, *self.channels).to(x.device)
            x = x.masked_fill(layout.take(masked[:, None].expand(-1, frames, -1)), 0.0)
        return x


def _spans(lengths: Sequence[int], most: int, share: float, span: int, least: int) -> Tensor:
    """Mask (B, most) of random spans in rows of these lengths; their number follows from `share`, rounded at random."""
    masked, rounding = torch.zeros(len(lengths), most, dtype=torch.bool), torch.rand(()).item()
    for row, length in zip(masked, lengths, strict=True):
        starts = length - span + 1
        count = min(max(int(share * length / span + rounding), least), most // span, max(starts, 0))
        for start in torch.randperm(max(starts, 0))[:count].tolist():
            row[start : start + span] = True
    return masked


class CtcHead(nn.Module):
    """Logits of every frame, with the CTC loss (Graves et al., "Connectionist Temporal Classification", 2006).

    Args:
        blank: id of the blank.
        reduction: "sum" over the items' losses, or "mean", each divided by its number of labels first.
        zero_infinity: whether items with more labels than frames are ignored; otherwise their loss is infinite.
    """

    def __init__(self, width: int, vocabulary: int, dropout: float, blank: int, reduction: str, *, zero_infinity: bool):
        super().__init__()
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(width, vocabulary)
        self.blank, self.reduction, self.zero_infinity = blank, reduction, zero_infinity

    def forward(self, x: Tensor, layout: TokenLayout, labels: Tensor | None = None) -> dict[str, Any]:
        """`logits` (B, L, V) and `loss`; labels (B, U), padded with -100 or the blank."""
        logits = layout.put(self.out(self.dropout(x)))
        return {"logits": logits, "loss": None if labels is None else self._loss(logits, layout, labels)}

    def _loss(self, logits: Tensor, layout: TokenLayout, labels: Tensor) -> Tensor:
        vocabulary = logits.shape[-1]
        if labels.ndim != 2 or len(labels) != layout.batch:
            raise ValueError(f"labels: expected shape ({layout.batch}, length), got {tuple(labels.shape)}")
        meant = (labels != IGNORED) & (labels != self.blank)
        if bool((meant & ((labels < 0) | (labels >= vocabulary))).any()):
            raise ValueError(f"labels: expected tokens from 0 to {vocabulary - 1}, or {IGNORED}")
        whole = torch.full((layout.batch,), layout.length, device=logits.device)
        # At least float32: the loss multiplies probabilities over all frames.
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        return F.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1),
            labels.to(logits.device)[meant],
            whole if layout.real is None else layout.real.sum(1),
            meant.sum(1),
            blank=self.blank,
            reduction=self.reduction,
            zero_infinity=self.zero_infinity,
        )


class MeanHead(nn.Module):
    """Classifies every item by the mean of its projected frames."""

    def __init__(self, width: int, inner: int, labels: int):
        super().__init__()
        self.dense, self.items = nn.Linear(width, inner), ItemHead(nn.Linear(inner, labels), "single_label")

    def forward(self, x: Tensor, layout: TokenLayout, labels: Tensor | None = None) -> dict[str, Any]:
        """`logits` (B, K) and `loss`; labels (B,)."""
        return self.items(layout.mean(self.dense(x)), labels)
