"""PyTorch's attention masks: broadcast to the call, and as Saccade masks that all layers of a model share.

A mask value is computed from the whole tensor, and a model gives the same tensor to each layer. So
the last values are remembered: by the tensor, or what it is a view of, by the count of in-place edits that PyTorch
keeps of it, and on a CPU by a digest of what it holds: `tensor.data` and NumPy write without being counted, and tensors
made in inference mode have no count. To read a mask costs a hundredth of the attention.

Shape legend: `...` leading axes, B batch, H query heads, Lq / Lk lengths.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...operator._derived import origin, state
from ...operator._masks import FromTensor, Mask, Padding
from ...support._threads import PerThread

_MOST = 8  # values remembered by a thread: a model has one mask for each kind of layer


class _CachedMask(NamedTuple):
    source: weakref.ref[Tensor]
    state: Any
    mask: Mask


_THREAD: PerThread[dict[Any, _CachedMask]] = PerThread(dict)


def broadcast(mask: Tensor, whole: tuple[int, ...]) -> Tensor | str:
    """A mask that broadcasts to `whole` (..., Hq, Lq, Lk), as one that broadcasts to (B, Hq, Lq, Lk); or why it does
    not.

    `...` is what the caller counts as batch: no axis, one, or several that are one here.
    """
    axes, least = mask.dim(), len(whole) - mask.dim()
    if axes < 2 or least < 0 or any(n not in (1, m) for n, m in zip(mask.shape, whole[least:], strict=True)):
        return f"attn_mask of shape {tuple(mask.shape)} does not broadcast to {tuple(whole)}"
    if axes == 4 == len(whole):
        return mask
    mask = mask[(None,) * (max(len(whole), 4) - axes)]
    if mask.dim() == 4:
        return mask
    if math.prod(mask.shape[:-3]) != 1:
        mask = mask.expand(*whole[:-3], *mask.shape[-3:])
    return mask.flatten(0, -4)


def mask_of(given: Tensor, whole: tuple[int, ...]) -> Mask | str:
    """The Saccade mask of a boolean tensor that broadcasts to `whole`, (..., Hq, Lq, Lk), or why it has none."""
    mask = _remembered(given, whole, _made)
    assert mask is not None
    return mask


def hiding(given: Tensor, whole: tuple[int, ...]) -> Mask | str | None:
    """The Saccade mask of a float tensor that only hides keys (it holds 0 and -inf); None for any other tensor.

    `nn.MultiheadAttention` makes such ones of boolean masks. It is looked for where looking is cheap beside attention:
    one line for all queries, or one table for all heads.
    """
    if given.requires_grad or given.device.type != "cpu" or torch.compiler.is_compiling() or not given.numel():
        return None
    return _remembered(given, whole, _hides)


def _hides(given: Tensor, whole: tuple[int, ...]) -> Mask | str | None:
    tensor = broadcast(given, whole)
    if isinstance(tensor, str):
        return tensor
    tensor = _told_once(tensor)
    if tensor.shape[2] == 1 and bool((tensor == tensor[:, :1]).all()):
        tensor = tensor[:, :1]
    line = tensor[0, 0, 0]
    if tensor.shape[1] > 1 or not bool(_only_hides(line)) or not bool(_only_hides(tensor)):
        return None
    return _made(tensor == 0, (*tensor.shape[:2], *whole[-2:]))


def _only_hides(tensor: Tensor) -> Tensor:
    return ((tensor == 0) | (tensor == -math.inf)).all()


def _remembered(
    given: Tensor, whole: tuple[int, ...], make: Callable[[Tensor, tuple[int, ...]], Mask | str | None]
) -> Mask | str | None:
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    if traced or torch._C._functorch.is_functorch_wrapped_tensor(given):
        return make(given, whole)
    source, now = origin(given), state(given)
    where = (id(source), given.dtype, given.storage_offset(), given.shape, given.stride(), whole)
    entries = _THREAD.held
    entry = entries.get(where)
    if entry is not None and now is not None and entry.source() is source and entry.state == now:
        return entry.mask
    mask = make(given, whole)
    if isinstance(mask, Mask):
        while len(entries) >= _MOST:
            entries.pop(next(iter(entries)), None)
        entries[where] = _CachedMask(weakref.ref(source, lambda _: entries.pop(where, None)), now, mask)
    return mask


def _made(given: Tensor, whole: tuple[int, ...]) -> Mask | str:
    tensor = broadcast(given, whole)
    if isinstance(tensor, str):
        return tensor
    if torch.compiler.is_compiling():
        return FromTensor(tensor)
    tensor = _told_once(tensor)
    if tensor.shape[1] == tensor.shape[2] == 1 and tensor.shape[3] == whole[-1] and tensor.device.type == "cpu":
        return Padding(tensor[:, 0, 0])
    return FromTensor(tensor)


def _told_once(tensor: Tensor) -> Tensor:
    """The tensor without axes that `expand` repeats: transformers expands (B, 1, 1, Lk) to (B, 1, Lq, Lk)."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor
