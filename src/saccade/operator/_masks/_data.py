"""The parts of masks: checked numbers, and copies of tensors that callers cannot modify."""

from __future__ import annotations

import operator
import zlib
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._surroundings import describe as describe, lasting as lasting, no_transform
from ._intervals import Kind, Span

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
# How far positions and lengths reach. Sums and differences of hundreds of them are exact in int64 and stay below the
# open ends of the native kernels (2**60), and a float64 holds each exactly.
FURTHEST = 2**53


def whole(value: Any, name: str, *, least: int | None = None) -> int:
    """`value` as an int. TypeError for bool, float and the rest; ValueError below `least`."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, Tensor) and value.dtype not in INTEGERS):
        raise TypeError(f"{name} must be an int, got {describe(value)}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {describe(value)}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def from_zero(value: Any, name: str) -> int:
    """One of several numbers that count from 0, such as heads: as `whole`, and ValueError below 0."""
    number = whole(value, name)
    if number < 0:
        raise ValueError(f"{name} count from 0, got {number}")
    return number


def bounded(value: Any, name: str, *, least: int | None = None) -> int:
    """`value` as a position or a length: as `whole`, and ValueError beyond `FURTHEST`."""
    number = whole(value, name, least=least)
    if not -FURTHEST <= number <= FURTHEST:
        raise _too_far(name, number)
    return number


def bounded_table(source: Any, name: str, wanted: str, *, booleans: bool = False) -> OwnedTensor:
    """`OwnedTensor.of` positions or lengths; ValueError beyond `FURTHEST`. Not read while compiling."""
    try:
        table = OwnedTensor.of(source, name, wanted, booleans=booleans, integers=True)
    except TypeError:
        beyond = _beyond_int64(source)
        if beyond is None:
            raise
        raise _too_far(name, beyond) from None
    if table.values.dtype != torch.bool and table.values.numel() and not torch.compiler.is_compiling():
        for number in (int(table.host.min()), int(table.host.max())):
            bounded(number, name)
    return table


def _beyond_int64(source: Any) -> int | None:
    """The first int of a list that exceeds int64, which NumPy would convert to a float or an object; None if there is
    none."""
    if not isinstance(source, list | tuple):
        return None
    return next((n for n in source if isinstance(n, int) and not -(2**63) <= n < 2**63), None)


def _too_far(name: str, number: int) -> ValueError:
    return ValueError(f"{name} must lie between -2**53 and 2**53, got {number}")


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers of torch.func's derivatives, which integers and booleans do not need."""
    while not torch.compiler.is_compiling() and torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def of_vmap(tensor: Tensor) -> bool:
    """Whether torch.vmap batches the tensor: it represents one tensor for each mapped element, and its values cannot be
    read."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def dense(tensor: Tensor, name: str) -> Tensor:
    """The tensor itself.

    Raises:
        TypeError: a sparse or nested tensor, or one in the memory format of a library: nothing here reads those.
    """
    if tensor.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor, got a nested one: give nested.to_padded_tensor(0.0) and Padding"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}: give tensor.to_dense()")
    return tensor


def traced() -> bool:
    """Whether torch.jit.trace records."""
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None


def plain(tensor: Tensor) -> bool:
    """Whether the values can be read: no compiler, transform, mode or tracer is active, and it is not on `meta`."""
    if torch.compiler.is_compiling() or traced() or not no_transform():
        return False
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type != "meta"


def zeros_and_ones(tensor: Tensor) -> bool:
    """Whether a tensor of another dtype is a boolean mask: every value 0 or 1, and some 1. False if it has no data."""
    return plain(tensor) and bool(((tensor == 0) | (tensor == 1)).all()) and bool((tensor == 1).any())


class OwnedTensor:
    """A tensor that a mask owns: a clone of what was given, and a copy on the host for interval arithmetic.

    One made from a list belongs to no device: it is copied to each device that asks (`portable`). One made while a
    compiler looks on has no values yet, so that nothing is copied to the host and nothing about them is checked.
    """

    __slots__ = ("_copies", "_host", "portable", "values")

    def __init__(self, values: Tensor, *, portable: bool, host: np.ndarray | None = None):
        self.values = values
        self.portable = portable
        self._host = values.cpu().numpy() if host is None and not torch.compiler.is_compiling() else host
        self._copies: dict[torch.device, Tensor] = {}

    @classmethod
    @lasting
    def of(cls, source: Any, name: str, wanted: str, *, booleans: bool, integers: bool) -> OwnedTensor:
        """A table of what was given: a tensor, an array or (nested) lists of int64 or bool.

        Raises:
            TypeError: another dtype than those asked for; the message says `wanted`.
            ValueError: a tensor that torch.vmap runs over.
        """
        if isinstance(source, Tensor):
            given = unwrapped(dense(source, name))
            if of_vmap(given):
                raise ValueError(f"{name}: torch.vmap runs over it, and a mask needs its values; loop over it instead")
        elif isinstance(source, (list, tuple, range)) and len(source) == 0:
            given = torch.from_numpy(np.empty(0, dtype=np.int64 if integers else np.bool_))
        else:
            try:
                given = torch.from_numpy(np.asarray(source))
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(f"{name} must be {wanted}, got {describe(source)}") from None
        if booleans and given.dtype == torch.bool:
            values = given.clone(memory_format=torch.contiguous_format)
        elif integers and given.dtype in INTEGERS:
            values = given.to(torch.int64, copy=True, memory_format=torch.contiguous_format)
        else:
            hint = " (uint8 is neither: convert it with .bool() or .long())" if given.dtype == torch.uint8 else ""
            raise TypeError(f"{name} must be {wanted}, got {describe(given)}{hint}")
        return cls(values, portable=not isinstance(source, Tensor))

    @classmethod
    @lasting
    def holding(cls, host: np.ndarray, device: torch.device | None) -> OwnedTensor:
        """A table of numbers that the host has computed. If `device` is None, the table can move to any device."""
        host = np.ascontiguousarray(host)
        values = torch.from_numpy(host)
        return cls(values if device is None else values.to(device), portable=device is None, host=host)

    @property
    def host(self) -> np.ndarray:
        if self._host is None:
            self._host = self.values.cpu().numpy()
        return self._host

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def on(self, device: torch.device) -> Tensor:
        """The values on `device`; only a portable table is ever copied there."""
        if self.values.device == device or not self.portable:
            return self.values
        if device not in self._copies:
            self._copies[device] = self.moved(device)
        return self._copies[device]

    def to(self, device: torch.device | str) -> OwnedTensor:
        moved = self.values if self.portable else self.moved(device)
        return self if moved is self.values else OwnedTensor(moved, portable=False, host=self.host)

    @lasting
    def moved(self, device: torch.device | str) -> Tensor:
        return self.values.to(device)

    @property
    def device(self) -> torch.device | None:
        """The device this table is bound to, None when it goes anywhere."""
        return None if self.portable else self.values.device

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OwnedTensor):
            return NotImplemented
        return self.host.dtype == other.host.dtype and np.array_equal(self.host, other.host)

    def __hash__(self) -> int:
        return hash((self.shape, self.host.dtype.str, zlib.crc32(np.ascontiguousarray(self.host).tobytes())))

    def __repr__(self) -> str:
        if self.host.size <= 16:
            return repr(self.host.tolist())
        kind = "bool" if self.host.dtype == np.bool_ else "int"
        return f"<{' x '.join(map(str, self.shape))} {kind}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.values, self.portable)


def _restore(values: Tensor, portable: bool) -> OwnedTensor:
    return OwnedTensor(values, portable=portable)


class Subset:
    """A set of indices for each batch item: those below a length, or those a boolean row marks.

    Nothing outside the boolean row (before 0, or after its end) is a member.
    """

    def __init__(self, table: OwnedTensor):
        self.table = table
        self.by_length = table.values.dtype != torch.bool
        self.batch = table.shape[0]
        self.size = None if self.by_length else table.shape[1]

    @cached_property
    def extent(self) -> tuple[int, int]:
        """The least and the greatest length."""
        return extent(self.table, None) if self.by_length else (0, 0)

    @cached_property
    def _sums(self) -> np.ndarray | None:
        return None if self.by_length else running_count(self.table.host)

    def contains(self, b: Tensor, index: Tensor) -> Tensor:
        values = self.table.on(index.device)
        item = b if self.batch != 1 else torch.zeros_like(b)
        if self.size is None:
            return index < values[item]
        if self.size == 0:
            return torch.zeros_like(index, dtype=torch.bool)
        inside = (index >= 0) & (index < self.size)
        return values[item, index.clamp(0, self.size - 1)] & inside

    def marks(self, length: int, device: torch.device) -> Tensor:
        """Whether each of the first `length` indices is a member: (B or 1, length)."""
        values = self.table.on(device)
        return torch.arange(length, device=device) < values[:, None] if self.by_length else values[:, :length]

    def everywhere(self, length: int) -> bool:
        """Whether each item is sure to have a member below `length`; a compiled graph must not depend on values."""
        if length == 0 or torch.compiler.is_compiling():
            return False
        return self.extent[0] > 0 if self.by_length else bool(self.table.host[:, :length].any(1).all())

    def count(self, span: Span, item: int | None) -> tuple[int, int]:
        """Least and greatest number of members in `span`, over the batch items."""
        start, stop = span
        if self.by_length:
            least, most = self.extent if item is None else extent(self.table, item)
            return min(max(least, start), stop) - start, min(max(most, start), stop) - start
        assert self._sums is not None and self.size is not None
        sums = self._sums if item is None or self.batch == 1 else self._sums[item : item + 1]
        low, high = min(max(start, 0), self.size), min(max(stop, 0), self.size)
        counts = sums[:, high] - sums[:, low]
        return (int(counts.min()), int(counts.max())) if counts.size else (0, 0)

    def kind(self, span: Span, item: int | None) -> Kind:
        least, most = self.count(span, item)
        if most == 0:
            return "empty"
        return "full" if least == span[1] - span[0] else "partial"

    def to(self, device: torch.device | str) -> Subset:
        moved = self.table.to(device)
        return self if moved is self.table else Subset(moved)

    def __eq__(self, other: object) -> bool:
        return self.table == other.table if isinstance(other, Subset) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.table)

    def __repr__(self) -> str:
        return repr(self.table)


def running_count(flags: np.ndarray) -> np.ndarray:
    """(..., L) booleans to (..., L + 1) counts of True before each index."""
    counts = np.zeros((*flags.shape[:-1], flags.shape[-1] + 1), dtype=np.int64)
    np.cumsum(flags, axis=-1, out=counts[..., 1:])
    return counts


def block_counts(flags: np.ndarray) -> np.ndarray:
    """(..., n, m) booleans to (..., n + 1, m + 1) counts of True above and left of each corner."""
    counts = np.zeros((*flags.shape[:-2], flags.shape[-2] + 1, flags.shape[-1] + 1), dtype=np.int64)
    np.cumsum(np.cumsum(flags, axis=-2), axis=-1, out=counts[..., 1:, 1:])
    return counts


def numbers(value: Any, name: str, *, least: int | None = None) -> int | OwnedTensor:
    """An int, or a table of one int per batch item. ValueError as `bounded`, or for a shape other than (B,)."""
    if getattr(value, "ndim", 0) == 0 and hasattr(value, "__index__"):
        return bounded(value, name, least=least)
    table = bounded_table(value, name, "an int or ints (B,)")
    if len(table.shape) != 1:
        raise ValueError(f"{name} must be an int or ints (B,), got shape {table.shape}")
    if least is not None and not torch.compiler.is_compiling() and (table.host < least).any():
        raise ValueError(f"{name} must be at least {least}, got {int(table.host.min())}")
    return table


def per_item(value: int | OwnedTensor, b: Tensor) -> Tensor | int:
    """The number of each batch item b."""
    if isinstance(value, int):
        return value
    values = value.on(b.device)
    return values[b] if values.numel() != 1 else values[0]


def extent(value: int | OwnedTensor, item: int | None) -> tuple[int, int]:
    """Least and greatest of the numbers of all batch items, or of one."""
    if isinstance(value, int):
        return value, value
    if not value.host.size:
        return 0, 0
    if item is None or value.shape[0] == 1:
        return int(value.host.min()), int(value.host.max())
    return int(value.host[item]), int(value.host[item])
