"""Masks and biases as plain values and tensors, for files that are safe to read: no code is stored or run.

Shape legend: B batch, Hq query heads, Lq / Lk lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...operator._biases import ALiBi, Bias, RelativeBias, RelativeScores, TensorBias
from ...operator._masks import FromTensor, Mask, mask_classes
from ...operator._masks._data import OwnedTensor, Subset
from ...operator._scores._score import ModifiedScores, Score
from ...operator._scores._terms import RelativeLine

MOST_BITS = 1 << 26  # largest number of booleans stored for a mask without a form as plain values

Tensors = dict[str, Tensor]


class UnstorableMask(ValueError):
    """A mask or bias that cannot be stored; the message has the reason."""


def stored_mask(mask: Mask | None, name: str, sizes: tuple[int, int, int, int], tensors: Tensors) -> Any:
    """A mask as values for JSON; its tensors are added to `tensors` under names that begin with `name`.

    A function, or an unknown kind of mask, is stored as its booleans if their number, (B, Hq, Lq, Lk) `sizes`, is
    small.

    Raises:
        UnstorableMask: their number is too large.
    """
    if mask is None:
        return None
    try:
        return _stored(mask, name, tensors)
    except UnstorableMask as unknown:
        batch, heads = mask._batch_and_heads()
        bits = batch * heads * sizes[2] * sizes[3]
        if bits > MOST_BITS:
            raise UnstorableMask(f"{unknown}, and too large to be stored as {bits} booleans") from None
        return _stored(FromTensor(mask.dense(sizes[2], sizes[3])), name, tensors)


def _stored(value: Any, name: str, tensors: Tensors) -> Any:
    if isinstance(value, Mask):
        kind = type(value)
        if mask_classes().get(kind.__name__) is not kind:
            raise UnstorableMask(f"the mask is a {type(value).__name__}, which has no form as plain values")
        return {
            "mask": type(value).__name__,
            **{f: _stored(getattr(value, f), f"{name}.{f}", tensors) for f in kind.fields},
        }
    if isinstance(value, Subset):
        value = value.table
    if isinstance(value, OwnedTensor):
        value = value.values
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().contiguous()
        return {"stored": name}
    if isinstance(value, (list, tuple)):
        return [_stored(entry, f"{name}.{place}", tensors) for place, entry in enumerate(value)]
    return value


def read_mask(value: Any, tensors: Tensors) -> Any:
    """The inverse of `stored_mask`. ValueError or KeyError for other values."""
    if isinstance(value, list):
        return tuple(read_mask(entry, tensors) for entry in value)
    if not isinstance(value, dict):
        return value
    if "stored" in value:
        return tensors[value["stored"]]
    kind = mask_classes()[value["mask"]]
    if set(value) != {"mask", *kind.fields}:
        raise ValueError(f"cannot read a {value['mask']} with the fields {', '.join(sorted(value))}")
    made = {field: read_mask(value[field], tensors) for field in kind.fields}
    return kind._from_fields(**made)


def stored_bias(bias: Bias | None, name: str, tensors: Tensors) -> Any:
    """A bias as values for JSON. UnstorableMask for an unknown kind."""
    if bias is None:
        return None
    if type(bias) not in (TensorBias, ALiBi, RelativeBias, RelativeLine):
        name = "Score" if isinstance(bias, (Score, ModifiedScores)) else type(bias).__name__
        raise UnstorableMask(f"the bias is a {name}, which has no form as plain values")
    tensors[name] = bias.parameter.detach().cpu().contiguous()
    own = {key: getattr(bias, key) for key in ("bidirectional", "max_distance", "first") if hasattr(bias, key)}
    offset = bias.offset.tolist() if isinstance(bias.offset, Tensor) else bias.offset
    return {"bias": type(bias).__name__, "parameter": name, "offset": offset, **own}


def read_bias(value: Any, tensors: Tensors) -> Bias | None:
    """The inverse of `stored_bias`."""
    if value is None:
        return None
    parameter = tensors[value["parameter"]]
    if value["bias"] == "TensorBias":
        return TensorBias(parameter)
    bias: RelativeScores
    if value["bias"] == "ALiBi":
        bias = ALiBi(parameter)
    elif value["bias"] == "RelativeLine":
        bias = RelativeLine(parameter, int(value["first"]))
    elif value["bias"] == "RelativeBias":
        bias = RelativeBias(parameter, bool(value["bidirectional"]), int(value["max_distance"]))
    else:
        raise ValueError(f"cannot read a bias of kind {value['bias']!r}")
    offset = value["offset"]
    if offset is None:
        return bias
    return bias.at(offset if isinstance(offset, int) else torch.tensor(offset))
