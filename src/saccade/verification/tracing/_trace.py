"""Traces the attention that a target forms inside: scores, softmax and weights, with their source lines.

`measured` is what checks use: the weights of attention proper are read from its outputs, whatever it does inside; a
module's are traced.

Shape legend: B batch, Hq / Hkv heads, Lq / Lk lengths, D / Dv head widths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...operator import _observers
from ..findings._finding import Location, Unmeasured
from ..subject._inputs import NamedInputs
from ..subject._subject import CallResult, Subject
from ._fused import told
from ._mode import ElementwiseFactor, TraceMode, TraceStep, step_line
from ._probe import copied, probed
from ._units import TokenOwners, TracedAttention, attentions

__all__ = ["TraceStep", "TracedAttention", "TracedCall", "measured", "step_line", "traced"]


@dataclass(frozen=True, eq=False)
class TracedCall:
    """A traced call of the target."""

    result: CallResult
    attentions: tuple[TracedAttention, ...]
    steps: tuple[TraceStep, ...]
    kernels: tuple[str, ...] = ()  # attention kernels that were called by themselves, which nobody can look into
    factors: tuple[ElementwiseFactor, ...] = ()
    tokens: TokenOwners | None = None

    def line(self, *names: str) -> Location | None:
        """The line of the last call with one of these names."""
        return step_line(reversed(self.steps), names)


def traced(
    subject: Subject, inputs: NamedInputs, *, pairs: Tensor | None = None, padding: Tensor | None = None
) -> TracedCall:
    """Call the target and trace its attention, in the order of computation.

    `attentions` is empty where none could be followed: a kernel of its own, or none at all. Keys that do not stand in
    the inputs (a cache, a learned one) make Lk larger than the inputs' own.

    Raises:
        Inapplicable: the target takes no mask that can say this.
        TargetError: the target raised.
    """
    inputs = copied(inputs)
    tokens, looking = TokenOwners(inputs), TraceMode()
    for tensor, shadow in tokens:
        looking.know(tensor, shadow)
    # with gradients, so that what depends on a parameter says so
    with torch.enable_grad(), _observers.observed_by(lambda call: looking.told(told, call)), looking:
        result = subject(inputs, pairs=pairs, padding=padding)
    with torch.no_grad():
        computed = attentions(looking.scores, tokens, inputs.batch)
    return TracedCall(result, computed, tuple(looking.steps), tuple(looking.kernels), tuple(looking.factors), tokens)


def measured(
    subject: Subject, inputs: NamedInputs, *, pairs: Tensor | None = None, padding: Tensor | None = None
) -> tuple[TracedAttention, ...]:
    """The attention of one call, probed or traced.

    Raises:
        Inapplicable: neither could be done; the message says what was missing.
        TargetError: the target raised.
    """
    looked = traced(subject, inputs, pairs=pairs, padding=padding)
    if subject.form == "attention":
        with torch.no_grad():
            probe = probed(subject, inputs, looked.result.out.detach(), pairs=pairs, padding=padding)
        if probe is not None:
            return (_with_what_was_seen(probe, looked.attentions),)
    if looked.attentions:
        return looked.attentions
    why = f": it calls {looked.kernels[0]}" if looked.kernels else ""
    raise Unmeasured(f"no product of queries and keys with a softmax after it could be followed in it{why}")


def _with_what_was_seen(probe: TracedAttention, calls: tuple[TracedAttention, ...]) -> TracedAttention:
    """The traced attention with the probe's weights, if its own are equal; else the probe with its lines."""
    if len({attention.lines.get("scores") for attention in calls}) != 1:
        return probe
    call, weights = calls[0], probe.weights
    if len(calls) > 1 or call.weights.shape != weights.shape:
        return replace(probe, lines=call.lines)
    if not torch.allclose(call.weights.to(weights.dtype), weights, rtol=1e-3, atol=1e-4, equal_nan=True):
        return replace(probe, lines=call.lines)
    normalised = probe.normalised if call.normalised == "unknown" else call.normalised
    return replace(call, weights=weights, value=probe.value, normalised=normalised, source="probed")
