"""How far a model's outputs with rounded layers are from those without, on the user's samples and by a metric.

Shape legend: B batch, L length, R real tokens or items, V classes, E width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Outputs = tuple[Tensor | None, Tensor]

_SAME = 1e-6  # what a cosine may be below 1 if the same is computed in two ways
_AT_ONCE = 2**22  # numbers in float64
_DECODER = ("decoder_attention_mask",)
_ENCODER = ("attention_mask", "src_key_padding_mask")


@dataclasses.dataclass(frozen=True)
class OutputError:
    """Distance of a model's outputs from those of the float model, over all real tokens or items of the samples.

    A figure is None where the outputs do not give it or its argument is missing.

    Attributes:
        kl: mean divergence KL(float || int8) of the distributions by the logits, in nats.
        agreement: share of tokens or items whose largest logit stays the same one.
        cosine: mean cosine of the last hidden states; of the logits in models that return nothing else.
        worst_cosine: the smallest of these cosines.
        drop: the metric of the float model minus the metric now.
    """

    kl: float | None = None
    agreement: float | None = None
    cosine: float | None = None
    worst_cosine: float | None = None
    drop: float | None = None

    def __str__(self) -> str:
        return ", ".join(self.parts())

    def parts(self) -> list[str]:
        """The figures in words."""
        parts = []
        if self.kl is not None:
            parts += [f"KL {self.kl:.2e} nats", f"same top class {self.agreement:.2%}"]
        if self.worst_cosine is not None:
            parts += [f"worst cosine {self.worst_cosine:.6f}", f"mean {self.cosine:.6f}"]
        return parts if self.drop is None else [*parts, f"metric lower by {self.drop:.4g}"]


class Samples:
    """The user's inputs of a model.

    Args:
        inputs: dicts of keyword arguments of the model, or tensors that are its only argument.
        as_logits: whether an output without names, a tensor or a tuple, is logits, and logits are needed.
    """

    def __init__(self, inputs: list[Any], as_logits: bool):
        self.inputs = inputs
        self._as_logits = as_logits
        self._now: Any = None  # the sample that the model reads

    def error(self, exact: Iterable[Outputs], rounded: Iterable[Outputs]) -> OutputError:
        """The distance of the rounded model's outputs from the float model's."""
        divergence, agreeing, cosines = 0.0, 0, []
        for (exact_logits, exact_vectors), (logits, vectors) in zip(exact, rounded, strict=True):
            cosines += [_cosines(*rows) for rows in _in_parts(exact_vectors, vectors)]
            if exact_logits is not None and logits is not None:
                for a, b in _in_parts(exact_logits, logits):
                    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
                    divergence += float((p.exp() * (p - q)).where(p > -math.inf, 0.0).sum())
                    agreeing += int((a.argmax(-1) == b.argmax(-1)).sum())
        cosine = torch.cat(cosines)
        error = OutputError(cosine=float(cosine.mean()), worst_cosine=float(cosine.min()))
        if exact_logits is None:
            return error
        kl = max(divergence, 0.0) / len(cosine)  # in this order NaN stays
        return dataclasses.replace(error, kl=kl, agreement=agreeing / len(cosine))

    def check_equal(self, first: list[Outputs], second: list[Outputs]) -> None:
        """ValueError unless these outputs of the float model can be compared with others."""
        for place, (pair, again) in enumerate(zip(first, second, strict=True)):
            vectors = pair[1]
            if bool(vectors.isnan().any()):
                raise ValueError(f"samples[{place}]: the model gives NaN in float")
            if not len(vectors):
                raise ValueError(f"samples[{place}]: expected real tokens, but the mask hides all of them")
            far = 1 - (self.error([pair], [again]).worst_cosine or 0.0)
            if not far <= max(_SAME, torch.finfo(vectors.dtype).eps):
                raise ValueError(
                    f"samples[{place}]: expected the same outputs at each call, but in float the second call's have a "
                    f"cosine of {1 - far:.6f} to the first one's. A cache inside the sample is a known cause"
                )

    def real_rows(self, x: Tensor) -> Tensor:
        """The rows (R, E) at real tokens of an activation x (..., E) of the sample that the model reads."""
        rows = x.reshape(-1, x.shape[-1])
        real = _real(self._now, x.shape[:-1], (*_DECODER, *_ENCODER))
        return rows if real is None else rows[real]

    def outputs(self, model: nn.Module) -> Iterator[Outputs]:
        """Logits (R, V), if there are any, and vectors (R, E) of each sample, without padding."""
        for place, sample in enumerate(self.inputs):
            self._now = sample
            try:
                out = model(**sample) if isinstance(sample, Mapping) else model(sample)
            except Exception as error:
                raise ValueError(f"samples[{place}]: the model raises {type(error).__name__}: {error}") from error
            finally:
                self._now = None
            logits, vectors = self._of(out, place)
            decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
            masks = _DECODER if decodes or _names_decoder(sample) else _ENCODER
            kept = _rows(vectors, sample, masks)
            yield (None if logits is None else kept if logits is vectors else _rows(logits, sample, masks)), kept

    def _of(self, out: Any, place: int) -> tuple[Tensor | None, Tensor]:
        """Logits and vectors among a model's outputs."""
        logits, hidden = _named(out, "logits"), _named(out, "last_hidden_state")
        bare = isinstance(out, Tensor | tuple | list)
        if logits is None and hidden is None:
            parts: Any = [out] if isinstance(out, Tensor) else out
            if not bare:
                parts = (out if isinstance(out, Mapping) else getattr(out, "__dict__", {})).values()
            hidden = next((x for x in parts if isinstance(x, Tensor) and x.dim() > 1 and x.is_floating_point()), None)
            logits = hidden if bare and self._as_logits else None
        vectors = logits if hidden is None else hidden
        if vectors is None:
            raise ValueError(
                f"samples[{place}]: expected logits, last_hidden_state or a tensor of two axes or more as the model's "
                f"output, got {type(out).__name__}"
            )
        if self._as_logits and logits is None:
            raise ValueError(f"max_kl: expected a model with logits, got {type(out).__name__} without; use min_cosine")
        if self._as_logits and logits is not None and logits.shape[-1] < 2:
            raise ValueError("max_kl: expected logits of two classes or more, got one; use max_drop with a metric")
        return logits, vectors


def inputs_of(samples: Any) -> list[Any]:
    """The samples as a list; TypeError or ValueError if they are none."""
    if isinstance(samples, Mapping | Tensor | str) or not isinstance(samples, Iterable):
        raise TypeError(f"samples: expected a list of dicts or of tensors, got {type(samples).__name__}")
    inputs = list(samples)
    if not inputs:
        raise ValueError("samples: expected at least one input of the model, got none")
    for place, sample in enumerate(inputs):
        if not isinstance(sample, Mapping | Tensor):
            raise TypeError(
                f"samples[{place}]: expected a dict of keyword arguments or a tensor, got {type(sample).__name__}"
            )
    return inputs


def metric_of(model: nn.Module, metric: Callable[[Any], float]) -> float:
    """The metric as a finite number."""
    value = metric(model)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"metric: expected a number of the model, got {type(value).__name__}") from None
    if not math.isfinite(number):
        raise ValueError(f"metric: expected a finite number, got {number}")
    return number


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    """Cosines of the rows; 1 for equal rows, those of zeros among them."""
    return F.cosine_similarity(a.double(), b.double(), dim=-1).where((a != b).any(-1), 1.0)


def _in_parts(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    count = max(1, _AT_ONCE // a.shape[-1])
    return zip(a.split(count), b.split(count), strict=True)


def _rows(x: Tensor, sample: Any, masks: tuple[str, ...]) -> Tensor:
    """x (B, L, E) as its rows at real tokens; all rows of outputs that have no place for each token."""
    real = _real(sample, x.shape[:-1], masks)
    rows = x.flatten(0, -2)
    return rows if real is None else rows[real]


def _real(sample: Any, shape: torch.Size, names: tuple[str, ...]) -> Tensor | None:
    """Which of B * L rows are real tokens, by the first of the masks (B, L) that has as many; None if there is none."""
    for name in names:
        mask = sample.get(name) if isinstance(sample, Mapping) else None
        if isinstance(mask, Tensor) and mask.dim() == 2 and shape in (mask.shape, (mask.numel(),), (1, mask.numel())):
            if name == "src_key_padding_mask":  # which says what is hidden
                return (~mask if mask.dtype == torch.bool else mask != -math.inf).flatten()
            return (mask != 0).flatten()
    return None


def _names_decoder(sample: Any) -> bool:
    return isinstance(sample, Mapping) and any(name.startswith("decoder_") for name in sample)


def _named(out: Any, name: str) -> Tensor | None:
    value = out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)
    return value if isinstance(value, Tensor) else None
