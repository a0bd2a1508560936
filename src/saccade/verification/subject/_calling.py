"""One call of a target: inputs and masks in its layout, results in Saccade's.

Shape legend: B batch, H heads, Lq / Lk lengths (Q, K in axes), D head width, E model width.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..findings._finding import Inapplicable, TargetError, UnreadableResult
from ..findings._locate import error_in_words, location_of
from ._inputs import NamedInputs
from ._reading import MaskReading, Reading

_DTYPES = {"bool": torch.bool, "int64": torch.int64, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class CallRequest:
    """The arguments of one call in a common form, as checks state them."""

    inputs: NamedInputs
    pairs: Tensor | None = None  # (Lq, Lk) or (B, H or 1, Lq, Lk), True = attend
    padding: Tensor | None = None  # (B, Lk), True = real
    flagged: bool | None = None


def call(target: Any, reading: Reading, given: CallRequest) -> tuple[Tensor, Tensor | None, Any]:
    """The output, the weights and the whole return value of a call. Raises the errors of `Subject.__call__`."""
    if "B" not in reading.layout and reading.form != "tokens":
        return _one_by_one(target, reading, given)
    return _whole(target, reading, given)


def _whole(target: Any, reading: Reading, given: CallRequest) -> tuple[Tensor, Tensor | None, Any]:
    """One call of the target."""
    returned = invoke(target, reading, given)
    out = picked(returned, reading.out)
    if not isinstance(out, Tensor):
        raise UnreadableResult(f"it returned {type(out).__name__} where a tensor was expected", None)
    out = _canonical(out, reading.out_layout or reading.layout, reading.form)
    if reading.form == "attention" and out.shape[-1] != (wide := given.inputs["value"].shape[-1]):
        raise TargetError(f"its output has the width {out.shape[-1]} where the values' {wide} was expected", None)
    return out, _weights(returned, reading), returned


def _weights(returned: Any, reading: Reading) -> Tensor | None:
    """The returned weights (B, H, Lq, Lk); None if the call returned none."""
    weights = None if reading.weights is None else picked(returned, reading.weights)
    if weights is None:
        return None
    if weights.dim() != len(reading.weights_axes):
        shape, axes = list(weights.shape), reading.weights_axes
        raise TargetError(f"its weights have the shape {shape} where {axes} was expected", None)
    return _aligned(weights, reading.weights_axes, "BHQK")


def invoke(target: Any, reading: Reading, given: CallRequest) -> Any:
    """Call the target with its own arguments and return its result."""
    return entered(target, reading, *arguments_of(reading, given))


def entered(target: Any, reading: Reading, places: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Call the target, or the adapter with it, with arguments in its own layout."""
    if reading.call is not None:
        return guarded(reading.call, target, *places, **keywords)
    return guarded(target, *places, **keywords)


def guarded(function: Callable[..., Any], *places: Any, **keywords: Any) -> Any:
    """`function(...)`; its errors become TargetError with their location. A forked copy of this process ends here: if
    it went on, each copy would fork again in the next call."""
    own = os.getpid()
    try:
        return function(*places, **keywords)
    except (Inapplicable, TargetError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # classes of the target's own, too
        raise TargetError(error_in_words(error), location_of(error)) from error
    finally:
        if os.getpid() != own:
            os._exit(0)


def arguments_of(reading: Reading, given: CallRequest) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one call in the target's own layout."""
    tensors = [_native(tensor, reading) for tensor in given.inputs.tensors.values()]
    keywords = dict(reading.constants)
    places: dict[int, Any] = {}
    if reading.names:
        keywords |= dict(zip(reading.names, tensors, strict=True))
    else:
        places |= dict(enumerate(tensors))
    for argument, mask in _masks(reading, given):
        (places if isinstance(argument, int) else keywords)[argument] = mask  # type: ignore[index]
    if reading.causal_flag is not None and given.flagged is not None:
        keywords[reading.causal_flag] = given.flagged
    return tuple(places.get(at) for at in range(max(places, default=-1) + 1)), keywords


def _masks(reading: Reading, given: CallRequest) -> list[tuple[str | int, Tensor]]:
    """The mask arguments of one call. If one argument cannot express a mask, another argument does; padding is added to
    a mask by pair only if no mask by key fits."""
    pairs = None if given.pairs is None else _four(given.pairs)
    by_pair = None if pairs is None else _first_that_says(reading.masks, pairs)
    made: dict[str | int, Tensor] = {}
    if given.padding is not None:
        padding = given.padding[:, None, None, :]
        alike = bool((given.padding == given.padding[:1]).all())
        fits = (mask for mask in reading.masks if not mask.by_pair and (alike or "B" in mask.axes))
        own = next(fits, None)
        if own is not None and (by_pair is None or own.argument != by_pair.argument):
            made[own.argument] = mask_tensor(own, padding, given.inputs)
        else:
            spread = padding.expand(-1, 1, given.inputs.length, -1)
            pairs = spread if pairs is None else pairs & spread
            by_pair = _first_that_says(reading.masks, pairs)
    if pairs is not None and by_pair is not None:
        made[by_pair.argument] = mask_tensor(by_pair, pairs, given.inputs)
    for mask in reading.masks:
        if mask.required and mask.argument not in made:
            nothing_hidden = torch.ones(1, 1, 1, 1, dtype=torch.bool)
            made[mask.argument] = mask_tensor(mask, nothing_hidden, given.inputs)
    return list(made.items())


def _first_that_says(masks: tuple[MaskReading, ...], pairs: Tensor) -> MaskReading:
    by_item, by_head = pairs.shape[0] > 1, pairs.shape[1] > 1
    for mask in masks:
        if mask.by_pair and (not by_item or "B" in mask.axes) and (not by_head or "H" in mask.axes):
            return mask
    which = [word for word, asked in (("batch item", by_item), ("head", by_head)) if asked]
    raise Inapplicable("it takes no mask by query" + (f" for each {' and '.join(which)}" if which else ""))


def mask_tensor(mask: MaskReading, attend: Tensor, inputs: NamedInputs) -> Tensor:
    """The mask `attend` (B or 1, H or 1, Lq or 1, Lk), True = attend, in the form that this argument expects."""
    if mask.axes == "B":
        there = next(iter(inputs.tensors.values())).device
        return _real_lengths(attend, inputs).to(there, _DTYPES[mask.dtype])
    shape = {"B": inputs.batch, "H": attend.shape[1], "Q": inputs.length, "K": inputs.key_length}
    if "H" in mask.axes and "query" in inputs.tensors and inputs["query"].dim() == 4:
        shape["H"] = inputs["query"].shape[1]
    shape["H"] = mask.merged or shape["H"]
    whole = attend.expand(*(shape[axis] if axis in mask.axes else attend.shape[at] for at, axis in enumerate("BHQK")))
    kept = whole[tuple(slice(None) if axis in mask.axes else 0 for axis in "BHQK")]
    order = [letter for letter in "BHQK" if letter in mask.axes]
    kept = kept.permute([order.index(letter) for letter in mask.axes if letter != "1"])
    for at, letter in enumerate(mask.axes):
        if letter == "1":
            kept = kept.unsqueeze(at)
    kept = kept.flatten(0, 1) if mask.merged else kept
    kept = kept.contiguous().to(next(iter(inputs.tensors.values())).device)
    dtype = next((tensor.dtype for tensor in inputs.tensors.values() if tensor.is_floating_point()), torch.float32)
    if mask.meaning == "additive":
        fill = mask.fill if math.isinf(mask.fill) else max(mask.fill, torch.finfo(dtype).min)
        return torch.zeros(kept.shape, dtype=dtype, device=kept.device).masked_fill(~kept, fill)
    # a mask of numbers that came in float32 would make float32 of all that it meets
    return (kept if mask.meaning == "attend" else ~kept).to(dtype if mask.dtype == "float32" else _DTYPES[mask.dtype])


def _real_lengths(attend: Tensor, inputs: NamedInputs) -> Tensor:
    """(B,) numbers of real keys. Inapplicable unless the real keys of each item come first."""
    real = attend.expand(inputs.batch, 1, 1, inputs.key_length)[:, 0, 0]
    lengths = real.sum(-1)
    if not torch.equal(real, torch.arange(inputs.key_length, device=real.device) < lengths[:, None]):
        raise Inapplicable("it takes lengths, which hide only keys at the end")
    return lengths


def _native(tensor: Tensor, reading: Reading) -> Tensor:
    """An input in the target's layout, from Saccade's."""
    if reading.form == "tokens":
        return tensor if reading.layout == "BL" else tensor.T
    return _aligned(tensor, "BHLD" if reading.form == "attention" else "BLD", reading.layout)


def _canonical(tensor: Tensor, layout: str, form: str) -> Tensor:
    """An output in Saccade's layout, from the target's."""
    if form == "tokens":
        return tensor if layout == "BL" else tensor.transpose(0, 1)
    ours = "BHLD" if form == "attention" else "BLD"
    if tensor.dim() != len(layout):
        raise TargetError(f"its output has the shape {list(tensor.shape)} where {layout} was expected", None)
    return _aligned(tensor, layout, ours)


def _aligned(tensor: Tensor, axes: str, wanted: str) -> Tensor:
    """Permute axes by letters. Missing axes get size 1; surplus axes must have size 1."""
    for letter in axes:
        if letter not in wanted:
            at = axes.index(letter)
            if tensor.shape[at] != 1:
                raise Inapplicable(f"it takes one {'head' if letter == 'H' else 'item'} at a time")
            tensor, axes = tensor.squeeze(at), axes.replace(letter, "")
    tensor = tensor.permute([axes.index(letter) for letter in wanted if letter in axes])
    for at, letter in enumerate(wanted):
        if letter not in axes:
            tensor = tensor.unsqueeze(at)
    return tensor


def _one_by_one(target: Any, reading: Reading, given: CallRequest) -> tuple[Tensor, Tensor | None, Any]:
    """A target without a batch axis, called for each item; of a layout without heads, for each head, too."""
    split = reading.form == "attention" and "H" not in reading.layout
    outs, weights, returned = [], [], []
    for item in range(given.inputs.batch):
        own = given.inputs.items([item])
        heads = range(own["query"].shape[1]) if split else [None]
        parts = [_single(target, reading, given, own, item, head) for head in heads]
        outs.append(torch.cat([part[0] for part in parts], 1) if split else parts[0][0])
        kept = [part[1] for part in parts if part[1] is not None]
        weights += [torch.cat(kept, 1)] if kept else []
        returned.append([part[2] for part in parts])
    return torch.cat(outs), torch.cat(weights) if weights else None, returned


def _single(
    target: Any, reading: Reading, given: CallRequest, own: NamedInputs, item: int, head: int | None
) -> tuple[Tensor, Tensor | None, Any]:
    def narrowed(tensor: Tensor) -> Tensor:
        return tensor if head is None else tensor[:, head : head + 1]

    pairs = None if given.pairs is None else _four(given.pairs)
    if pairs is not None:
        pairs = pairs[item : item + 1] if pairs.shape[0] > 1 else pairs
        pairs = narrowed(pairs) if pairs.shape[1] > 1 else pairs
    if given.padding is not None:
        real = given.padding[item][None, None, None].expand(1, 1, own.length, -1)
        pairs = real if pairs is None else pairs & real
    inputs = own.map(narrowed) if head is not None else own
    request = CallRequest(inputs, pairs, None, given.flagged)
    return _whole(target, reading, request)


def _four(pairs: Tensor) -> Tensor:
    return pairs[None, None] if pairs.dim() == 2 else pairs


def picked(returned: Any, where: int | str | None) -> Any:
    """The part of a result at `where`: an index, a key or an attribute. If `where` is None, the whole result."""
    if where is None:
        return returned
    try:
        named = isinstance(where, str) and not isinstance(returned, dict)
        return getattr(returned, str(where)) if named else returned[where]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise UnreadableResult(f"it returned {type(returned).__name__} without a {where!r}", None) from error
