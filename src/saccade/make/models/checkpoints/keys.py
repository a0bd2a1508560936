"""Key maps: the published name of each parameter, declared once and used to load and to save.

Maps are checked on both sides: every tensor of the files must be used and every parameter must be filled, otherwise an
error lists the missing, the unused and those of another shape.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

_SHOWN = 20  # lines of an error


@dataclass(frozen=True)
class Key:
    """The name of a module or tensor in Saccade and in published files. `{n}` stands for the number of a layer.

    A name also matches all longer names below it: `Key("norm", "ln_f")` maps weight and bias.

    Args:
        ours: the name in Saccade's modules.
        published: the name in the files; several names are stacked rows, such as query, key and value in one
            projection.
        rows: number of rows of each published tensor, by layer; () if all have equally many.
        transposed: whether the files store matrices as (in, out), like the Conv1D of GPT-2.
        also: alternative published names, accepted when loading; saving writes `published`.
    """

    ours: str
    published: str | tuple[str, ...]
    rows: tuple[tuple[int, ...], ...] = ()
    transposed: bool = False
    also: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The published names as a tuple."""
        return (self.published,) if isinstance(self.published, str) else self.published

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Regular expression for Saccade's names, with layer numbers and the remaining name as groups."""
        return _pattern(self.ours)


@dataclass(frozen=True)
class KeyMap:
    """The key map of a model.

    Args:
        keys: of the body; in files their names may begin with `prefix`.
        head: of the output head, always without the prefix.
        prefix: of the body's names in files of models with a head, such as "bert.".
        tied: published tensor -> published tensor with the same values; files may omit the first, and saving does.
        derived: published names that follow from the settings and are not read, such as position tables.
        unused: published names of other heads: not read, but listed in the report.
        endings: old endings of names and their replacements, such as {"gamma": "weight"}.
        anew: Saccade's names of parts of the body that are initialised randomly together with a new head, if the files
            have neither.
    """

    keys: tuple[Key, ...]
    head: tuple[Key, ...] = ()
    prefix: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    derived: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    endings: Mapping[str, str] = field(default_factory=dict)
    anew: tuple[str, ...] = ()


class Piece(NamedTuple):
    """A published tensor, and the rows of Saccade's tensor that it fills; `rows` of None means all."""

    published: str
    ours: str
    start: int
    rows: int | None
    transposed: bool

    def of(self, tensor: Tensor) -> Tensor:
        """This piece's part of Saccade's tensor, in the shape of the file."""
        part = tensor if self.rows is None else tensor.narrow(0, self.start, self.rows)
        return part.t() if self.transposed else part

    def shape(self, ours: torch.Size) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        shape = tuple(ours) if self.rows is None else (self.rows, *ours[1:])
        return shape[::-1] if self.transposed else shape


class KeyPlan(NamedTuple):
    """Which stored tensors fill which parameters."""

    pieces: list[Piece]
    new: list[str]  # parameters without a stored tensor, to be initialised randomly
    unused: list[str]
    tied: list[tuple[str, str]]  # pairs of stored tensors that must be equal


def pieces_of(keys: KeyMap, ours: Mapping[str, torch.Size], *, prefixed: bool) -> dict[str, list[Piece]]:
    """The published tensors that make up each of Saccade's tensors, by primary names.

    Raises:
        KeyError: the map has no entry for a tensor, which is a bug in the map.
    """
    pieces_by_name: dict[str, list[Piece]] = {}
    for name, shape in ours.items():
        for key, prefix in (*((key, keys.prefix if prefixed else "") for key in keys.keys), *_plain(keys.head)):
            match = key.pattern.fullmatch(name)
            if match is not None:
                pieces_by_name[name] = list(_pieces(key, prefix, name, shape, match))
                break
        else:
            raise KeyError(name)
    return pieces_by_name


def plan(
    keys: KeyMap,
    ours: Mapping[str, torch.Size],
    stored: Mapping[str, tuple[int, ...]],
    *,
    new_head: bool,
    relabelled: bool = False,
    drawn: Collection[str] = (),
    where: str,
) -> KeyPlan:
    """How to fill the parameters from the stored tensors. Uses only names and shapes.

    Args:
        new_head: whether to initialise a missing head randomly.
        relabelled: whether to do so for tensors of another shape in the head as well: its labels are others.
        drawn: names of head tensors to initialise randomly in any case.
        where: beginning of the error message.

    Raises:
        ValueError: lists every tensor that is missing, unused or of another shape.
    """
    names = {_modern(name, keys.endings): name for name in stored}
    prefixed = bool(keys.prefix) and any(name.startswith(keys.prefix) for name in names)
    taken: set[str] = set()
    result, wrong = KeyPlan([], [], [], []), []
    others = {primary: _others(key, keys.prefix if prefixed else "") for key, primary in _primaries(keys, prefixed)}
    resolved = {
        name: (pieces, [_resolve(piece, names, others) for piece in pieces])
        for name, pieces in pieces_of(keys, ours, prefixed=prefixed).items()
    }
    absent = {name for name, (_, stored_names) in resolved.items() if not any(stored_names)}
    headless = new_head and all(name in absent for name in resolved if name.startswith("head."))
    anew = ("head.", *(f"{part}." for part in keys.anew if headless))
    for name, (pieces, stored_names) in resolved.items():
        if new_head and name in absent and name.startswith(anew):
            result.new.append(name)
            continue
        for piece, there in zip(pieces, stored_names, strict=True):
            expected = piece.shape(ours[name])
            if there is None:
                wrong.append(f"missing: {piece.published} {expected}, which is {name}")
                continue
            given = stored[names[there]]
            taken.add(there)
            if new_head and (name in drawn or (given != expected and relabelled and name.startswith("head."))):
                result.new.append(name)
                result.unused.append(names[there])
                continue
            if given != expected:
                wrong.append(
                    f"of another shape: {piece.published}, which is {name}: found {given}, expected {expected}"
                )
            result.pieces.append(piece._replace(published=names[there]))
    for name in sorted(names.keys() - taken):
        _place(name, keys, prefixed, names, result, wrong, stored[names[name]])
    if wrong:
        raise ValueError("\n".join([f"{where}: does not fit:", *(f"  {line}" for line in _shown(wrong))]))
    return result


def _shown(wrong: list[str]) -> list[str]:
    """The first lines of a long list: at least half for missing tensors and half for unused ones."""
    if len(wrong) <= _SHOWN:
        return wrong
    unused = [line for line in wrong if line.startswith("unused")]
    others = [line for line in wrong if not line.startswith("unused")]
    first = others[: max(_SHOWN // 2, _SHOWN - len(unused))]
    return [*first, *unused[: _SHOWN - len(first)], f"and {len(wrong) - _SHOWN} more"]


def _place(
    name: str, keys: KeyMap, prefixed: bool, names: dict[str, str], result: KeyPlan, wrong: list[str], shape: object
) -> None:
    """Handle a stored tensor that fills no parameter: tied, derived, unused or an error."""
    prefix = keys.prefix if prefixed else ""
    for tied, other in keys.tied.items():
        if name == tied and (same := next((n for n in (other, prefix + other) if n in names), None)) is not None:
            result.tied.append((names[name], names[same]))
            return
    bare = name.removeprefix(prefix)
    if any(_pattern(pattern).fullmatch(n) for pattern in keys.derived for n in (name, bare)):
        return
    if any(_pattern(pattern).fullmatch(n) for pattern in keys.unused for n in (name, bare)):
        result.unused.append(names[name])
        return
    wrong.append(f"unused: {name} {shape}")


def _pieces(key: Key, prefix: str, name: str, shape: torch.Size, match: re.Match[str]) -> Iterator[Piece]:
    rest, layers = match["rest"], match.groupdict()
    transposed = key.transposed and len(shape) == 2
    parts = [prefix + _filled(part, layers) + rest for part in key.parts]
    if len(parts) == 1:
        yield Piece(parts[0], name, 0, None, transposed)
        return
    start = 0
    sizes = key.rows[int(layers["n"])] if key.rows else (shape[0] // len(parts),) * len(parts)
    for part, rows in zip(parts, sizes, strict=True):
        yield Piece(part, name, start, rows, transposed)
        start += rows


def _resolve(piece: Piece, names: Mapping[str, str], others: Mapping[str, tuple[str, ...]]) -> str | None:
    """The stored name of a piece, by its primary or an alternative name; None if it is missing."""
    if piece.published in names:
        return piece.published
    for primary, also in others.items():
        match = _pattern(primary).fullmatch(piece.published)
        if match is not None:
            for other in also:
                candidate = _filled(other, match.groupdict()) + match["rest"]
                if candidate in names:
                    return candidate
    return None


def _primaries(keys: KeyMap, prefixed: bool) -> Iterator[tuple[Key, str]]:
    prefix = keys.prefix if prefixed else ""
    yield from ((key, prefix + key.parts[0]) for key in keys.keys if key.also)
    yield from ((key, key.parts[0]) for key in keys.head if key.also)


def _others(key: Key, prefix: str) -> tuple[str, ...]:
    return tuple(name for also in key.also for name in (prefix + also, also))


def _plain(keys: Iterable[Key]) -> Iterator[tuple[Key, str]]:
    return ((key, "") for key in keys)


def _pattern(name: str) -> re.Pattern[str]:
    layers = re.sub(r"\\{(\w)\\}", r"(?P<\1>\\d+)", re.escape(name))
    return re.compile(rf"{layers}(?P<rest>(\..+)?)")


def _filled(name: str, layers: Mapping[str, str | None]) -> str:
    return re.sub(r"\{(\w)\}", lambda found: str(layers[found[1]]), name)


def _modern(name: str, endings: Mapping[str, str]) -> str:
    head, _, last = name.rpartition(".")
    return f"{head}.{endings[last]}" if last in endings else name
