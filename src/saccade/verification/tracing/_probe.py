"""The weights of attention proper, read from its outputs: with unit vectors as values, the outputs are the weights.

Shape legend: B batch, Hq / Hkv heads, Lq / Lk lengths, D / Dv head widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..subject._inputs import NamedInputs
from ..subject._subject import Subject
from ._units import TracedAttention, summed_axis


def probed(
    subject: Subject, inputs: NamedInputs, out: Tensor, *, pairs: Tensor | None = None, padding: Tensor | None = None
) -> TracedAttention | None:
    """The attention of a call that gave `out`, None if its outputs are not `weights @ value`."""
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    length, width = value.shape[-2:]
    parts = []
    for start in range(0, length, width):
        block = torch.eye(length, dtype=value.dtype, device=value.device)[:, start : start + width]
        units = torch.nn.functional.pad(block, (0, width - block.shape[1])).expand(value.shape).contiguous()
        given = inputs.map(lambda _, units=units: units, ["value"])  # type: ignore[misc]
        parts.append(subject(copied(given), pairs=pairs, padding=padding).out[..., : block.shape[1]])
    weights = torch.cat(parts, -1)
    heads = query.shape[1]
    if weights.shape != (inputs.batch, heads, inputs.length, length) or heads % key.shape[1]:
        return None
    key, value = (tensor.repeat_interleave(heads // key.shape[1], 1) for tensor in (key, value))
    if not torch.allclose(weights @ value, out, rtol=1e-3, atol=1e-4, equal_nan=True):
        return None
    return TracedAttention(query, key, value, weights.log(), weights, summed_axis(weights), "probed")


def copied(inputs: NamedInputs) -> NamedInputs:
    """A copy in separate memory, for targets that write to their inputs."""
    return inputs.map(Tensor.clone)
