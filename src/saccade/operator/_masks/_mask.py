"""The mask: a small immutable value, a relation between a query position and a key index.

Shape legend: B batch, H query heads, Lq / Lk numbers of queries and keys, r x c a tile of rows by keys.
True means attend. Query row i stands at position `i + (Lk - Lq)` unless `.at(offset)` says `i + offset`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ._data import bounded, describe, zeros_and_ones
from ._intervals import Kind, Region, Span

if TYPE_CHECKING:
    from ._picture import MaskPicture
    from ._program import ProgramScope, ProgramWriter

Lengths = tuple[int, int]
Where = slice | range | tuple[int, int]
# Of methods and traits that have an underscore now, which a user's own mask may define.
_UNDERSCORED = frozenset(
    {"attends", "batch_and_heads", "check_fit", "children", "from_fields", "grid", "origin", "own_batch_and_heads"}
    | {"remember", "remembered", "required_lengths", "tables_reach_back", "throughout"}
)


@dataclass(frozen=True)
class MaskProblem:
    """The sizes that a mask must fit; if `exact` is false, there may be more rows and keys."""

    rows: int
    keys: int
    positions: Span
    exact: bool = True
    batch: int | None = None  # None: not known
    heads: int | None = None

    def standing(self, positions: Span) -> MaskProblem:
        return replace(self, positions=positions)


@dataclass(frozen=True)
class Tile:
    """The visible pairs in a rectangle of rows by keys; `Mask.tile` returns it.

    Attributes:
        kind: "empty" (no pair attends), "full" (every pair does, in every batch item and head) or "partial".
        bits: bool (B or 1, H or 1, rows, keys), True = attend; None unless partial.

    Example:
        >>> import saccade
        >>> saccade.Causal().tile((2, 4), (0, 2), 4, 4)
        Tile(kind='full', bits=None)
        >>> saccade.Causal().tile((2, 4), (2, 4), 4, 4).bits[0, 0]
        tensor([[ True, False],
                [ True,  True]])
    """

    kind: Kind
    bits: Tensor | None = None


class Mask(ABC):
    """Which keys each query may attend to: a value that composes, instead of an Lq x Lk tensor.

    `a & b` keeps the pairs that both keep, `a | b` those that either keeps, `~a` the others. Masks are immutable,
    compare and hash by value, can be pickled, and own copies of the tensors they were made from.

    Positions. Query row i stands at position `i + (Lk - Lq)`: the last query beside the last key (bottom-right).
    `mask.at(offset)` places the queries elsewhere, for the whole expression.

    Subclasses define `fields`, `allows` (the definition of the mask), `region_kind` (what is known of a rectangle),
    `write` (the program for the native kernels) and the traits. Backends and caches call `check`, `kind`, `placement`
    and the methods with an underscore, which work for every mask.

    Example:
        >>> import saccade
        >>> mask = saccade.Window(1, 0) | saccade.Causal() & saccade.Global([0])
        >>> mask.picture(4, 5)
        Window(1, 0) | (Causal() & Global([0]))
          0        4
        0 ████······
        1 ██████····
        2 ██··████··
        3 ██····████
        4 queries down, 5 keys across; █ attends, · masked
        >>> mask.dense(4, 5).shape
        torch.Size([1, 1, 4, 5])
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Methods that a class defines under old names are renamed: ignored, they would make another mask."""
        super().__init_subclass__(**options)
        for name in sorted(_UNDERSCORED & vars(cls).keys()):
            text = f"{cls.__name__}.{name}: define it as _{name}; the old name goes in 0.4"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            setattr(cls, f"_{name}", vars(cls)[name])

    @abstractmethod
    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        """Whether the pair attends: elementwise, on int64 tensors that broadcast. The definition of the mask."""

    @abstractmethod
    def region_kind(self, region: Region) -> Kind:
        """The kind of a rectangle that is not empty in rows or keys, on the host; "partial" where not known."""

    fields: ClassVar[tuple[str, ...]] = ()
    """The arguments that make another one like it, which are attributes, too."""

    def _value(self) -> tuple[Hashable, ...]:
        """The mask's fields, for equality and hashing."""
        return tuple(getattr(self, name) for name in self.fields)

    @classmethod
    def _from_fields(cls, **fields: Any) -> Mask:
        """A mask of the same class, from the values of its fields."""
        return cls(**fields)

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        """Write the mask's part of the program for the native kernels. The mask of a class without `write` is computed
        in tiles."""
        raise NotImplementedError

    def _children(self) -> tuple[Mask, ...]:
        """The masks that this one is made of."""
        return ()

    def _own_batch_and_heads(self) -> tuple[int, int]:
        return 1, 1

    def fits(self, problem: MaskProblem) -> None:  # noqa: B027
        """ValueError if the mask's own data does not fit; parts, batch and heads are checked elsewhere."""

    def tables(self) -> tuple[Any, ...]:
        """The mask's own tables (objects with `.device` and `.on`), without those of its parts."""
        return ()

    def moved(self, device: torch.device | str) -> Mask:
        return self

    # What a mask says of itself. Masks made of masks ask their parts where that is the same.
    positional = True  # whether the answer depends on where the queries stand
    pairwise = False  # made of masks: a pair's answer is a function of its parts' answers for that pair
    by_distance = False  # ... of key - position alone
    by_position = False  # ... of the two positions alone, without data about the rows of one batch
    endless = False  # it holds for any position: no data of its own that positions could leave
    _tables_reach_back = False  # the kernels make tables of all keys up to the last of a slice, and lists of all rows
    by_lengths = False  # its program is made for the rows and keys of a call

    @property
    def sees_itself(self) -> bool:
        """Whether the query at position p is sure to see key p."""
        return False

    @property
    def widens(self) -> bool:
        """Whether each row sees at least the keys of the row before it, so that the last row determines which keys are
        seen."""
        return self.by_key

    @property
    def by_key(self) -> bool:
        """Whether all rows see the same keys."""
        return False

    def _throughout(self, trait: str) -> bool:
        """Whether the mask, or each part of a mask made of masks, has a trait, such as `by_distance` or `endless`."""
        return all(part._throughout(trait) for part in self._children()) if self.pairwise else getattr(self, trait)

    _memos: Mapping[str, tuple[Lengths, Hashable, Any]] = MappingProxyType({})

    def _reads(self) -> Hashable:
        """State that the mask depends on besides its value: tensors that a function captured. None if there is none."""
        parts = tuple(part._reads() for part in self._children())
        return None if all(part is None for part in parts) else parts

    def _in_kernels(self, scope: ProgramScope) -> Mask:
        """The mask whose program the kernels get at these rows and keys."""
        return self

    def _remembered(self, what: str, lengths: Lengths) -> Any:
        """The last value given to `remember` under this name, if it was for these lengths; else None."""
        held = self._memos.get(what)
        if held is None or held[0] != lengths or (held[1] is not None and held[1] != self._reads()):
            return None
        return held[2]

    def _remember(self, what: str, lengths: Lengths, value: Any) -> None:
        """Cache a result for (Lq, Lk), since one mask serves every layer of a model. Copies of the mask start without
        it."""
        self._set(_memos={**self._memos, what: (lengths, self._reads(), value)})

    def __and__(self, other: Any) -> Mask:
        from ._algebra import And

        return And.of(self, _operand(other, "&"))

    def __or__(self, other: Any) -> Mask:
        from ._algebra import Or

        return Or.of(self, _operand(other, "|"))

    def __invert__(self) -> Mask:
        from ._algebra import Not

        return Not.of(self)

    def __rand__(self, other: Any) -> Mask:
        return _operand(other, "&") & self

    def __ror__(self, other: Any) -> Mask:
        return _operand(other, "|") | self

    def __bool__(self) -> bool:
        raise TypeError("a mask is neither true nor false: combine masks with & | ~, not with and, or, not")

    def at(self, offset: int | Sequence[int] | Tensor) -> Mask:
        """The same mask with query row i at position `i + offset`.

        An offset of 0 is "top-left"; a cache of which item b holds `lengths[b]` keys, padded on the right, needs
        `mask.at(lengths - Lq)`. The placement holds for the whole expression: write `(a & b).at(n)`.

        Args:
            offset: an int, or one int per batch item as a list or an integer tensor (B,).

        Raises:
            TypeError: booleans or floats.
            ValueError: the mask, or a part of it, is placed already.

        ::

            Causal(), 2 queries, 4 keys      Causal().at(0)      Causal().at(1)
                1 1 1 .                          1 . . .             1 1 . .
                1 1 1 1                          1 1 . .             1 1 1 .
        """
        from ._placement import At

        return At.of(self, offset)

    def slice(self, rows: Where, keys: Where, *, lengths: Lengths | None = None) -> Mask:
        """The mask of the smaller problem made of those query rows and those keys, each at its old position.

        Attention that is split over keys and merged again must use it: row 0 of a slice is not row 0 of the whole.

        Args:
            rows, keys: `slice`, `range` or `(start, stop)`, step 1, within the whole problem.
            lengths: (Lq, Lk) of the whole problem. Not needed where the positions are known without it: after
                `.at`, for a slice of a slice, or where the mask does not depend on positions.

        Raises:
            ValueError: lengths missing or contradicting, or a range that leaves the problem.
        """
        from ._placement import Slice

        return Slice.of(self, rows, keys, lengths)

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on `device`."""
        return self.moved(device)

    def dense(self, Lq: int, Lk: int, *, device: torch.device | str | None = None) -> Tensor:
        """The whole mask as a bool tensor (B or 1, H or 1, Lq, Lk), True = attend. For small problems and tests.

        Raises:
            ValueError: the mask does not fit these lengths.
        """
        mask, place = self._settled(Lq, Lk, device)
        return mask._grid(torch.arange(Lq, device=place), torch.arange(Lk, device=place), Lq, Lk).contiguous()

    def tile(self, rows: Where, keys: Where, Lq: int, Lk: int, *, device: torch.device | str | None = None) -> Tile:
        """The visible pairs in a rectangle of the problem (Lq, Lk); nothing larger than the rectangle is formed.

        Args:
            rows, keys: `slice`, `range` or `(start, stop)`, step 1, within (Lq, Lk).

        Raises:
            ValueError: the mask does not fit these lengths, or a range leaves them.
        """
        mask, place = self._settled(Lq, Lk, device)
        row_span, key_span = span(rows, Lq, "rows"), span(keys, Lk, "keys")
        kind = mask.kind(row_span, key_span, Lq, Lk)
        if kind != "partial":
            return Tile(kind)
        bits = mask._grid(torch.arange(*row_span, device=place), torch.arange(*key_span, device=place), Lq, Lk)
        if not bits.any():
            return Tile("empty")
        return Tile("full") if bits.all() else Tile("partial", bits.contiguous())

    def picture(self, Lq: int, Lk: int, *, to: str | Path | None = None, **options: Any) -> MaskPicture | str | Path:
        """A drawing of one batch item and head, sampled where the mask is large: Lq x Lk is never formed.

        Args:
            to: None for an object that shows itself as text in a terminal and as an image in a notebook; "text" or
                "svg" for a string; or a path ending in .txt, .svg, .png or .pdf (the last two: extra `plot`).
            options: `item=0`, `head=0`, `cells=None` (at most so many across and down), `overwrite=False`.

        Raises:
            ValueError: the mask does not fit, no such item or head, or another ending.
            FileExistsError: the file is there already, and `overwrite` is not set.
        """
        from ._picture import picture

        return picture(self, Lq, Lk, to=to, **options)

    def _repr_html_(self) -> str:
        from ._picture import in_notebook

        return in_notebook(self)

    def _settled(self, Lq: int, Lk: int, device: torch.device | str | None) -> tuple[Mask, torch.device]:
        bounded(Lq, "Lq", least=0), bounded(Lk, "Lk", least=0)
        mask = self if device is None else self.to(device)
        place = torch.device(device) if device is not None else self._device() or torch.device("cpu")
        mask.check(None, None, Lq, Lk, None)
        return mask, place

    def _attends(self, b: Tensor, h: Tensor, row: Tensor, key: Tensor, Lq: int, Lk: int) -> Tensor:
        """Whether query row `row` attends to `key` in item b and head h: elementwise, broadcastable int64 tensors."""
        self._check_sizes(Lq, Lk)
        return self.allows(b, h, row, row + (Lk - Lq), key)

    def _grid(self, rows: Tensor, keys: Tensor, Lq: int, Lk: int) -> Tensor:
        """The rule on a grid: rows (r,) and keys (c,) int64 in any order -> bool (B or 1, H or 1, r, c)."""
        batch, heads = self._batch_and_heads()
        b = torch.arange(batch, device=rows.device).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=rows.device).view(1, -1, 1, 1)
        bits = self._attends(b, h, rows.view(1, 1, -1, 1), keys.view(1, 1, 1, -1), Lq, Lk)
        return bits.expand(bits.shape[0], bits.shape[1], rows.numel(), keys.numel())

    def kind(
        self, rows: Span, keys: Span, Lq: int, Lk: int, *, item: int | None = None, head: int | None = None
    ) -> Kind:
        """Whether a rectangle is "empty" or "full" for all batch items and heads, or the one named; else "partial"."""
        self._check_sizes(Lq, Lk)
        if rows[0] >= rows[1] or keys[0] >= keys[1]:
            return "empty"
        offset = Lk - Lq
        return self.region_kind(Region(rows, (rows[0] + offset, rows[1] + offset), keys, item, head))

    def check(self, B: int | None, Hq: int | None, Lq: int, Lk: int, device: torch.device | None) -> None:
        """Raise a ValueError that names the part that does not fit these sizes. B, Hq and device are None if
        unknown."""
        self._check_sizes(Lq, Lk)
        batch, heads = self._batch_and_heads()
        if B is not None and batch not in (1, B):
            raise ValueError(f"mask: made for a batch of {batch}, the query has a batch of {B}: {self!r}")
        if Hq is not None and heads not in (1, Hq):
            raise ValueError(f"mask: made for {heads} heads, the query has {Hq} heads: {self!r}")
        if device is not None:
            self._check_device(torch.device(device))
        self._check_fit(MaskProblem(Lq, Lk, (Lk - Lq, Lk), batch=B, heads=Hq))

    def _check_sizes(self, Lq: int, Lk: int) -> None:
        fixed = self._required_lengths()
        if fixed not in (None, (Lq, Lk)):
            raise ValueError(f"a slice of {fixed} queries and keys cannot stand in a problem of {(Lq, Lk)}: {self!r}")

    def _required_lengths(self) -> Lengths | None:
        """(Lq, Lk) of the only problem that a slice may be evaluated on; None for other masks."""
        return None

    def _check_fit(self, problem: MaskProblem) -> None:
        self.fits(problem)
        for part in self._children():
            part._check_fit(problem)

    def _check_device(self, device: torch.device) -> None:
        for table in self.tables():
            if table.device is not None and table.device != device:
                raise ValueError(
                    f"mask: {type(self).__name__} is on device {table.device}, the query on {device}: "
                    f"use mask.to({str(device)!r})"
                )
            table.on(device)
        for part in self._children():
            part._check_device(device)

    def _device(self) -> torch.device | None:
        """The device of the mask's tensors; None if it has none."""
        own: list[torch.device | None] = [table.device for table in self.tables()]
        held = [device for device in (*own, *(part._device() for part in self._children())) if device is not None]
        return held[0] if held else None

    def _origin(self) -> tuple[int, int]:
        """(row, key) of the whole problem where row 0 and key 0 of this one are: (0, 0) unless sliced."""
        origins = (part._origin() for part in self._children())
        return next((origin for origin in origins if origin != (0, 0)), (0, 0))

    def _batch_and_heads(self) -> tuple[int, int]:
        """(B or 1, H or 1): whether the mask differs by batch item and by head."""
        batch, heads = self._own_batch_and_heads()
        for part in self._children():
            b, h = part._batch_and_heads()
            batch = common(batch, b, "batch items")
            heads = common(heads, h, "heads")
        return batch, heads

    def placement(self) -> Hashable:
        """How the mask is placed. None: it does not depend on positions. "open": it uses the positions of the call. Any
        other value: its position is fixed by `.at` or `.slice`."""
        from ._placement import shared

        return shared(self._children()) if self._children() else ("open" if self.positional else None)

    def _set(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def replaced(self, **fields: Any) -> Mask:
        """A copy with other fields."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__getstate__(), **fields)
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_memos"}

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: make a new mask instead of setting {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        return type(self) is type(other) and self._value() == other._value()

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._value()))


@cache
def mask_classes() -> dict[str, type[Mask]]:
    """Every class of mask in this package that writes its own program, by name."""
    found: dict[str, type[Mask]] = {}

    def look(kind: type[Mask]) -> None:
        for one in kind.__subclasses__():
            if "write" in vars(one) and one.__module__.startswith(f"{__package__}."):
                found[one.__name__] = one
            look(one)

    look(Mask)  # type: ignore[type-abstract]
    return found


def fixed_lengths(masks: Sequence[Mask]) -> Lengths | None:
    """The sizes that slices among masks to be combined prescribe."""
    known = (mask._required_lengths() for mask in masks)
    return next((lengths for lengths in known if lengths is not None), None)


def common(left: int, right: int, what: str) -> int:
    """The size of an axis that broadcasts. ValueError where two sizes do not agree."""
    if left != right and 1 not in (left, right):
        raise ValueError(f"masks made for {left} and for {right} {what} cannot be combined")
    return right if left == 1 else left


def span(where: Where, length: int | None, name: str) -> Span:
    """(start, stop) of a slice, range or pair. ValueError unless 0 <= start <= stop <= length and the step is 1."""
    if isinstance(where, slice | range) and where.step not in (1, None):
        raise ValueError(f"{name} must have step 1, got {where!r}")
    if isinstance(where, range):
        start, stop = where.start, where.stop
    elif isinstance(where, slice):
        if length is None and (where.stop is None or where.stop < 0 or (where.start or 0) < 0):
            raise ValueError(f"{name}={where!r} is relative to a length: give lengths=(Lq, Lk)")
        start = bounded(0 if where.start is None else where.start, name)
        stop = bounded(length if where.stop is None else where.stop, name)
        start, stop = (x + length if x < 0 and length is not None else x for x in (start, stop))
    elif isinstance(where, Sequence) and len(where) == 2:
        start, stop = bounded(where[0], name), bounded(where[1], name)
    else:
        raise TypeError(f"{name} must be a slice, a range or (start, stop), got {describe(where)}")
    if not 0 <= start <= stop or (length is not None and stop > length):
        raise ValueError(f"{name} {start}:{stop} leaves the problem, which has {length} {name}")
    return start, stop


def _operand(other: Any, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    if isinstance(other, Tensor) and other.dtype == torch.bool:
        raise TypeError(f"mask {sign} tensor: wrap the tensor, FromTensor(tensor)")
    if isinstance(other, Tensor) and zeros_and_ones(other):
        raise TypeError(
            f"mask {sign} {describe(other)}: all its values are 0 and 1: write FromTensor(tensor.bool()) (1 = attend)"
        )
    raise TypeError(f"mask {sign} {describe(other)}: a mask combines with masks")
