"""A mask given as a boolean tensor, and what `mask=` takes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._data import block_counts, dense, describe, lasting, of_vmap, unwrapped, zeros_and_ones
from ._intervals import Kind, Region
from ._mask import Mask, MaskProblem
from ._program import Opcode, ProgramScope, ProgramWriter

_BLOCK = 32


class FromTensor(Mask):
    """A mask given as a boolean tensor, True = attend.

    Rows and keys are counted from 0 in the problem, whatever `.at` says.

    Args:
        tensor: bool, (Lq, Lk), or (B, H, Lq, Lk) in which any axis may be 1. Other ranks raise an error: (B, L) and
            (H, L, L) cannot be told apart. The mask owns a copy.

    Raises:
        TypeError: a tensor that is not boolean. Additive scores go into `bias=`.
        ValueError: another rank; when the mask is used, sizes that do not fit.

    Example:
        >>> import torch, saccade
        >>> saccade.FromTensor(torch.tensor([[True, False], [False, True]])) | saccade.Causal()
        FromTensor([[True, False], [False, True]]) | Causal()
    """

    fields = ("tensor",)
    tensor: Tensor
    sizes: tuple[int, ...]
    _summary: tuple[np.ndarray, np.ndarray] | None
    positional = False

    def __init__(self, tensor: Tensor):
        if not isinstance(tensor, Tensor):
            tensor = torch.from_numpy(np.asarray(tensor))
        tensor = unwrapped(_checked(tensor))
        # One mask for each of what torch.vmap runs over: such a tensor lives within the transform only.
        copy = _compact(tensor) if of_vmap(tensor) else _lasting_copy(tensor)
        self._set(tensor=copy, sizes=tuple(tensor.shape), _summary=None)

    def _own_batch_and_heads(self) -> tuple[int, int]:
        return (1, 1) if len(self.sizes) == 2 else (self.sizes[0], self.sizes[1])

    def tables(self) -> tuple[Any, ...]:
        return (_TensorByContents(self.tensor),)

    def moved(self, device: torch.device | str) -> Mask:
        move = self.tensor.to
        return self.replaced(tensor=move(device) if of_vmap(self.tensor) else lasting(move)(device))

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        places = (b, h, row, key)
        return self.tensor[tuple(p if n > 1 else p.clamp(0, 0) for p, n in zip(places, self.tensor.shape, strict=True))]

    def region_kind(self, region: Region) -> Kind:
        summary = self._blocks()
        if summary is None:
            return "partial"
        blocks = []
        for span, length in zip((region.rows, region.keys), self.tensor.shape[2:], strict=True):
            start, stop = span if length > 1 else (0, 1)
            blocks.append((start // _BLOCK, (stop - 1) // _BLOCK + 1))
        (top, bottom), (left, right) = blocks
        some, every = (s[bottom, right] - s[top, right] - s[bottom, left] + s[top, left] for s in summary)
        size = (bottom - top) * (right - left)
        return "empty" if some == 0 else "full" if every == size else "partial"

    def _blocks(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Running counts of the blocks with some and with only True; made once, and only where the host can see."""
        visible = self.tensor.device.type == "cpu" and self.tensor.numel() and not of_vmap(self.tensor)
        if self._summary is None and visible:
            self._set(_summary=_summarised(self.tensor))
        return self._summary

    def fits(self, problem: MaskProblem) -> None:
        rows, keys = self.sizes[-2:]
        free = (1,) if len(self.sizes) == 4 else ()
        fitting = [
            have == need or have in free or (have > need and not problem.exact)
            for have, need in ((rows, problem.rows), (keys, problem.keys))
        ]
        if not all(fitting):
            per_item = "; for the real keys of each batch item (B, Lk) write saccade.Padding(mask)"
            raise ValueError(
                f"mask: a mask of shape {self.sizes} for {problem.rows} queries and {problem.keys} keys, expected "
                f"(Lq, Lk) or (B, H, Lq, Lk){per_item if fitting == [False, True] and len(self.sizes) == 2 else ''}"
            )

    def _value(self) -> tuple[Hashable, ...]:
        return (_TensorByContents(self.tensor), self.sizes)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_summary": None}

    @classmethod
    def _from_fields(cls, **fields: Any) -> Mask:
        return cls(fields["tensor"])

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.TENSOR, program.table(self.tensor))

    def __repr__(self) -> str:
        if self.tensor.numel() <= 16 and self.tensor.device.type == "cpu":
            return f"FromTensor({self.tensor.expand(_four(self.sizes)).reshape(self.sizes).tolist()})"
        return f"FromTensor(<{' x '.join(map(str, self.sizes))} bool>)"


def as_mask(mask: Any) -> Mask | None:
    """The argument `mask` of `attention` as a mask: a bool tensor is wrapped, a Mask and None are returned unchanged.

    Raises:
        TypeError: anything else; a float tensor belongs into `bias=`.
    """
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return FromTensor(mask)
    if isinstance(mask, type) and issubclass(mask, Mask):
        raise TypeError(f"mask: got the class {mask.__name__}, write {mask.__name__}(...)")
    hints = {"BlockMask": "saccade.flex_attention takes it", "Score": "pass it as bias="}
    hint = hints.get(type(mask).__name__, "wrap it: saccade.Predicate(function)" if callable(mask) else "")
    raise TypeError(f"mask must be a Mask, a bool tensor or None, got {describe(mask)}{hint and f'; {hint}'}")


class _TensorByContents:
    """A tensor that is part of a mask's value, compared by its contents."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.device = tensor.device

    def on(self, device: torch.device) -> Tensor:
        return self.tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TensorByContents) and torch.equal(self.tensor.cpu(), other.tensor.cpu())

    def __hash__(self) -> int:
        return hash(tuple(self.tensor.shape))


def _checked(tensor: Tensor) -> Tensor:
    dense(tensor, "mask")
    if tensor.dtype != torch.bool:
        hint = "additive scores go into bias=" if tensor.dtype.is_floating_point else "convert it with .bool()"
        if tensor.dtype.is_floating_point and zeros_and_ones(tensor):
            hint = f"all its values are 0 and 1: write .bool() (1 = attend); {hint}"
        raise TypeError(f"mask must be a bool tensor (True = attend), got {describe(tensor)}: {hint}")
    if tensor.dim() not in (2, 4):
        raise ValueError(
            f"mask must be (Lq, Lk) or 4-D (B, H, Lq, Lk), got {describe(tensor)}: other ranks cannot be told apart; "
            "write mask[:, None] for a mask of each batch item, mask[None] for one of each head"
        )
    return tensor


def _four(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (1, 1, *sizes) if len(sizes) == 2 else sizes


def _compact(tensor: Tensor) -> Tensor:
    """An own 4-D copy in which expanded axes are stored once."""
    whole_shape = tensor.reshape(_four(tuple(tensor.shape))) if tensor.dim() == 2 else tensor
    for axis in range(4):
        if whole_shape.shape[axis] > 1 and whole_shape.stride(axis) == 0:
            whole_shape = whole_shape.narrow(axis, 0, 1)
    return whole_shape.detach().clone(memory_format=torch.contiguous_format)


_lasting_copy = lasting(_compact)


def _summarised(tensor: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Running counts (rows of blocks + 1, columns of blocks + 1) of the blocks with some, and with only, True."""
    values = tensor.view(torch.uint8).flatten(0, 1).numpy()
    some, every = (_by_blocks(reduce, values) for reduce in (np.bitwise_or.reduce, np.bitwise_and.reduce))
    return block_counts(some), block_counts(every)


def _by_blocks(reduce: Callable[..., np.ndarray], values: np.ndarray) -> np.ndarray:
    """(items, Lq, Lk) bytes to (row blocks, key blocks)."""
    # Bitwise and block by block: these run over whole vectors, `logical_or` and `reduceat` element by element.
    _, rows, keys = values.shape
    by_row = np.stack([reduce(values[:, at : at + _BLOCK], axis=(0, 1)) for at in range(0, rows, _BLOCK)])
    padding = np.repeat(by_row[:, -1:], -keys % _BLOCK, axis=1)
    return reduce(np.concatenate([by_row, padding], axis=1).reshape(len(by_row), -1, _BLOCK), axis=2)
