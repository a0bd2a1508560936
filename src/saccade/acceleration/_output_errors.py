"""How far a model's outputs with rounded layers are from those without, on the user's samples and by a metric.

Shape legend: B batch, L length, R real tokens or items, V classes, E width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Outputs = tuple[Tensor | None, Tensor]

_SAME = 1e-3  # relative difference of outputs that are computed in two ways
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

    Example:
        >>> from saccade.acceleration import OutputError
        >>> print(OutputError(kl=2e-4, agreement=0.99))
        KL 2.00e-04 nats, same top class 99.00%
    """

    kl: float | None = None
    agreement: float | None = None
    cosine: float | None = None
    worst_cosine: float | None = None
    drop: float | None = None

    def __str__(self) -> str:
        parts = []
        if self.kl is not None:
            parts += [f"KL {self.kl:.2e} nats", f"same top class {self.agreement:.2%}"]
        if self.worst_cosine is not None:
            parts += [f"worst cosine {self.worst_cosine:.6f}", f"mean {self.cosine:.6f}"]
        return ", ".join(parts if self.drop is None else [*parts, f"metric lower by {self.drop:.4g}"])


class Samples:
    """The user's inputs of a model.

    Args:
        inputs: dicts of keyword arguments of the model, or tensors that are its only argument.
        as_logits: whether an output without names, a tensor or a tuple, is logits, and logits are needed.
    """

    def __init__(self, inputs: Sequence[Any], as_logits: bool):
        self.inputs = inputs
        self._as_logits = as_logits
        self._now: Any = None  # the sample that the model reads

    def error(self, exact: Iterable[Outputs], rounded: Iterable[Outputs]) -> OutputError:
        """The distance of the rounded model's outputs from the float model's."""
        divergences, agreeing, cosines = [], [], []
        for (exact_logits, exact_vectors), (logits, vectors) in zip(exact, rounded, strict=True):
            # Equal rows have a cosine of 1, those of zeros, too.
            cosines += [
                F.cosine_similarity(a.double(), b.double(), dim=-1).where((a != b).any(-1), 1.0)
                for a, b in _in_parts(exact_vectors, vectors)
            ]
            if exact_logits is not None and logits is not None:
                for a, b in _in_parts(exact_logits, logits):
                    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
                    divergences.append((p.exp() * (p - q)).where(p > -math.inf, 0.0).sum(-1))
                    agreeing.append(a.argmax(-1) == b.argmax(-1))
        cosine = torch.cat(cosines)
        error = OutputError(cosine=float(cosine.mean()), worst_cosine=float(cosine.min()))
        if not divergences:
            return error
        kl = float(torch.cat(divergences).mean().clamp(min=0))
        return dataclasses.replace(error, kl=kl, agreement=float(torch.cat(agreeing).double().mean()))

    def check_equal(self, first: Iterable[Outputs], second: Iterable[Outputs]) -> None:
        """ValueError unless these outputs of the float model can be compared with others."""
        for place, ((_, vectors), (_, again)) in enumerate(zip(first, second, strict=True)):
            if bool(vectors.isnan().any()):
                raise ValueError(f"samples[{place}]: the model gives NaN in float")
            if not len(vectors):
                raise ValueError(f"samples[{place}]: expected real tokens, but the mask hides all of them")
            off, size = (again - vectors).where(again != vectors, 0.0).double().norm(), vectors.double().norm()
            if not off <= size * max(_SAME, 8 * torch.finfo(vectors.dtype).eps):
                raise ValueError(
                    f"samples[{place}]: expected the same outputs at each call, but in float a second call's differ by "
                    f"{off / size:.1e} of their norm. A cache inside of the sample is a known cause"
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
            decodes = decodes or (isinstance(sample, Mapping) and "decoder_input_ids" in sample)
            masks = _DECODER if decodes else _ENCODER
            kept = _rows(vectors, sample, masks)
            yield (kept if logits is vectors else None if logits is None else _rows(logits, sample, masks)), kept

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
        if vectors is None or vectors.shape[-1] < 2:  # of a single number the softmax is 1, and the cosine its sign
            raise ValueError(
                f"samples[{place}]: expected logits, last_hidden_state or a tensor with rows of two numbers or more as "
                f"output, got {type(out).__name__}; a metric= without samples measures any model"
            )
        if self._as_logits and logits is None:
            raise ValueError(f"max_kl: expected a model with logits, got {type(out).__name__} without; use min_cosine")
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


def _in_parts(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    count = max(1, _AT_ONCE // a.shape[-1])
    return zip(a.split(count), b.split(count), strict=True)


def _rows(x: Tensor, sample: Any, masks: tuple[str, ...]) -> Tensor:
    """x (B, L, E) as its rows at real tokens; all rows of outputs that have no place for each token."""
    real = _real(sample, x.shape[:-1], masks)
    rows = x.detach().flatten(0, -2)
    return rows.clone() if real is None else rows[real]  # a model may use its memory again


def _real(sample: Any, shape: torch.Size, names: tuple[str, ...]) -> Tensor | None:
    """Which of B * L rows are real tokens, by the first of the masks (B, L) that has as many; None if there is none."""
    for name in names:
        mask = sample.get(name) if isinstance(sample, Mapping) else None
        if isinstance(mask, Tensor) and mask.dim() == 2 and shape in (mask.shape, (mask.numel(),), (1, mask.numel())):
            if name == "src_key_padding_mask":  # which says what is hidden
                return (~mask if mask.dtype == torch.bool else mask != -math.inf).flatten()
            return (mask != 0).flatten()
    return None


def _named(out: Any, name: str) -> Tensor | None:
    value = out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)
    return value if isinstance(value, Tensor) else None
