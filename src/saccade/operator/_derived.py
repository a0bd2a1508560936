"""Caches of values derived from tensors (packed, rounded and joined weights), and whether tensors or modules have
changed.

PyTorch counts in-place writes in `_version`, but not those of fused optimizers, through `.data`, or by other libraries
in the same memory. So a snapshot holds the memory itself, which keeps its address from being used again, and digests of
its contents. Each check reads a few lines of the memory, different lines every time (`native/digest.h`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ._backends.native import _kernels

T = TypeVar("T")

_LINE = 64  # bytes
_SMALL = 2**20  # bytes
WHOLE = 2**16  # rows of a product beside which reading the whole weight costs under 1 % of the time
_BANDS, _TALL = 8, 512  # bands of a matrix, and rows from which it has them
_STRIDE = 251  # of the entries compared where there are no native kernels


class _OptimizerSteps:
    """Counts optimizer steps in this process: fused optimizers do not increase version counters."""

    def __init__(self) -> None:
        self.count = 0
        self._watched = False

    def watch(self) -> None:
        if not self._watched:
            self._watched = True
            register_optimizer_step_post_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


_OPTIMIZERS = _OptimizerSteps()


class Snapshot:
    """A tensor's identity, memory and contents at one moment.

    Args:
        tensor: rows of numbers (R, E), or of any other shape.
        brief: whether it is soon checked for the last time: then one line of each row is enough, and it is one part.
    """

    def __init__(self, tensor: Tensor, brief: bool = False):
        _OPTIMIZERS.watch()
        self._origin = origin(tensor)
        self._memory = tensor.detach()
        self._version = _version(tensor)
        self._steps_made = _OPTIMIZERS.count
        rows, row_bytes, stride = _matrix(self._memory)
        lines = -(-row_bytes // _LINE)
        period = max(1, min(lines, rows))  # a check reads every row: a token's embedding is one of them
        self._parts = 1 if brief else period  # that are ever read
        size = -(-rows // (_BANDS if rows >= _TALL and not brief else 1))
        self._bands = [(first, min(size, rows - first)) for first in range(0, rows, max(size, 1))]
        self._layout = row_bytes, stride, period
        self._next = self._band = 0
        self._digests = [self._read(band, 0, self._parts) * 2 for band in self._bands]

    def holds(self, tensor: Tensor, rows: int, one_band: bool = False) -> bool:
        """Whether this is the same tensor with the same contents, by a sample of its rows.

        Args:
            rows: of the product that the tensor is read for. The more there are, the more lines are read.
            one_band: of an eighth of a tall matrix's rows, at each call of others: a write to all of it is noticed at
                once, and one to a few rows or columns within eight calls.
        """
        if not self.counts(tensor):
            return False
        count = min(self._parts, 1 + self._parts * rows // WHOLE)
        if self._steps_made != _OPTIMIZERS.count:
            count, one_band, self._steps_made = self._parts, False, _OPTIMIZERS.count
        bands, first = range(len(self._bands)), self._next
        if one_band and bands:
            bands, self._band = range(self._band, self._band + 1), (self._band + 1) % len(self._bands)
        if not (one_band and self._band):  # all bands of a part before the next part
            self._next = (first + count) % self._parts
        return all(
            self._read(self._bands[band], first, count) == self._digests[band][first : first + count] for band in bands
        )

    def counts(self, tensor: Tensor) -> bool:
        """Whether this is the same tensor, unwritten according to its version counter."""
        memory = self._memory
        return (
            tensor.data_ptr() == memory.data_ptr()
            and tensor.shape == memory.shape
            and tensor.stride() == memory.stride()
            and tensor.dtype == memory.dtype
            and _version(tensor) == self._version
            and origin(tensor) is self._origin
        )

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is the same tensor, with the same contents or not."""
        return origin(tensor) is self._origin

    def _read(self, band: tuple[int, int], first: int, count: int) -> list[Any]:
        if not self._memory.numel():
            return [0] * count
        begin, rows = band
        row_bytes, stride, period = self._layout
        if _kernels.module is not None:
            digests: list[Any] = _kernels.module.digests(
                self._memory.data_ptr() + begin * stride,
                *(rows, row_bytes, stride, period),
                *((first + begin) % period, count, torch.get_num_threads()),  # bands go on through the lines
            )
            return digests
        size = self._memory.element_size()
        entries = (stride * (rows - 1) + row_bytes) // size
        offset = self._memory.storage_offset() + begin * stride // size
        sample = self._memory.as_strided((-(-entries // _STRIDE),), (_STRIDE,), offset)
        return [hash(sample.contiguous().view(torch.uint8).numpy().tobytes())] * count


class Derived(Generic[T]):
    """A value computed from tensors, and computed again after they have changed.

    Tensors that are replaced by others get a value at their second use: those of `functional_call` and of
    parametrizations are new at every call, and deriving anything from them would be wasted.
    """

    def __init__(self) -> None:
        self._known: tuple[T, tuple[Snapshot, ...]] | None = None  # in one piece: other threads read it
        self._last: tuple[weakref.ref[Tensor], ...] = ()  # tensors used once, of which nothing is derived yet

    @property
    def value(self) -> T | None:
        known = self._known
        return None if known is None else known[0]

    def of(
        self,
        tensors: Sequence[Tensor],
        rows: int,
        make: Callable[[], T],
        read: int | None = None,
        one_band: bool = False,
    ) -> T | None:
        """The result of `make` for these tensors, kept until they change; None at the first use of new tensors.

        Args:
            rows, one_band: see `Snapshot.holds`.
            read: how many of the tensors are read. Of the others the count of writes must do; `holds` reads them later.
        """
        known, last = self._known, self._last
        if known is not None:
            value, snapshots = known
            pairs = list(zip(snapshots, tensors, strict=True))
            if all(s.holds(x, rows, one_band) for s, x in pairs[:read]) and (
                read is None or all(s.counts(x) for s, x in pairs[read:])
            ):
                return value
            same = all(s.is_of(x) for s, x in pairs)
            self.clear()
        else:
            same = not last or all(ref() is origin(x) for ref, x in zip(last, tensors, strict=True))
        if not same:
            self._last = tuple(weakref.ref(origin(x)) for x in tensors)
            return None
        snapshots = tuple(map(Snapshot, tensors))  # first: a write from now on is noticed
        value = make()
        self._known = value, snapshots
        return value

    def holds(self, place: int, tensor: Tensor, rows: int) -> bool:
        """Whether the tensor with this index is unchanged since the last use; if not, the value is dropped."""
        known = self._known
        if known is not None and known[1][place].holds(tensor, rows):
            return True
        self.clear()
        return False

    def clear(self) -> None:
        self._known, self._last = None, ()


def state(tensor: Tensor) -> Any:
    """A value that changes with every write to a small CPU tensor; None if no such value exists."""
    version = None if tensor.is_inference() else tensor._version
    return (version, _contents(tensor)) if tensor.device.type == "cpu" else version


def _contents(tensor: Tensor) -> Any:
    """A digest of a tensor's whole contents."""
    memory = tensor.detach()
    if not memory.numel():
        return 0
    if _kernels.module is None:
        return hash(memory.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    size = memory.nbytes
    if size < _SMALL and memory.is_contiguous():  # to wake other threads, or to begin at each number, costs more
        return _kernels.module.digests(memory.data_ptr(), 1, size, size, 1, 0, 1, 1)[0]
    return _kernels.module.digests(memory.data_ptr(), *_matrix(memory), 1, 0, 1, torch.get_num_threads())[0]


def origin(tensor: Tensor) -> Tensor:
    """The tensor itself, or if it is a view, its base: a transpose is a new object at every call."""
    base = None if tensor.is_inference() else tensor._base
    return tensor if base is None else base


def _version(tensor: Tensor) -> int:
    """A tensor's version counter; -1 for an inference tensor, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def _matrix(memory: Tensor) -> tuple[int, int, int]:
    """Rows, bytes of a row and bytes from row to row of the memory that a tensor spans."""
    axes = sorted((stride, size) for size, stride in zip(memory.shape, memory.stride(), strict=True) if size > 1)
    stride, rows = axes.pop() if axes else (0, 1)
    inner = 1 + sum((size - 1) * step for step, size in axes)
    return rows, inner * memory.element_size(), stride * memory.element_size()


class Unchanged:
    """The types and attributes of modules, compared by identity, and the entries of dictionaries among the attributes:
    children, parameters, buffers and hooks, in their order.

    Numbers that are written into a tensor, its memory, and what other attributes hold inside are not compared. The
    compiled module compares: a step of decoding asks for hundreds of modules. The modules are kept alive: an owner that
    is one of them, or held by one, is part of a cycle.

    Args:
        beside: more dictionaries, attributes of other objects among them.
    """

    def __init__(self, modules: Iterable[nn.Module], beside: Iterable[Mapping[str, Any]] = ()):
        parts = list(modules)
        self._objects = tuple(x for part in parts for x in (part, type(part), vars(part)))
        kinds: set[Any] = set(map(type, parts))
        self._methods = {kind: (kind.forward, kind.__call__) for kind in kinds}
        inside = (value for part in parts for value in vars(part).values() if isinstance(value, dict))
        dicts = [*map(vars, parts), *inside, *beside]
        self._entries = tuple(x for entry in dicts for x in (entry, (*entry,), (*entry.values(),)))
        self._same = _kernels.module.Unchanged(self._objects, self._entries)  # which only points at these tuples

    def __call__(self) -> bool:
        """Whether all is as it was."""
        for kind, (forward, call) in self._methods.items():
            if kind.forward is not forward or kind.__call__ is not call:
                return False
        return bool(self._same.holds())
