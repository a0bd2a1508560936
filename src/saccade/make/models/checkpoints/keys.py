"""Key maps: which published tensor is which parameter of ours, declared once and used to load and to save.

A map is held against both sides: every tensor of the files has a place, every parameter is filled, or the error lists
what is missing, unused, or of another shape.
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
    """One module or tensor, by its name here and as published. `{n}` stands for the number of a layer in both.

    A name means itself and all that begins with it and a point: `Key("norm", "ln_f")` is weight and bias.

    Args:
        ours: in our modules.
        published: in the files; several are rows one below the other, such as query, key and value in one projection.
        rows: how many rows each of them has, in each layer; () where all have as many.
        transposed: whether the files hold matrices (in, out), as the Conv1D of GPT-2 does.
        also: other names that files have instead of `published`; saving writes `published`.
    """

    ours: str
    published: str | tuple[str, ...]
    rows: tuple[tuple[int, ...], ...] = ()
    transposed: bool = False
    also: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The published names, one or several."""
        return (self.published,) if isinstance(self.published, str) else self.published

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """What our names of it match, with the numbers of layers and the rest behind it as groups."""
        return _pattern(self.ours)


@dataclass(frozen=True)
class KeyMap:
    """All names of one model.

    Args:
        keys: of the body, whose published names may begin with `prefix`.
        head: of the head; never with the prefix.
        prefix: of the body's names in files of models with a head, such as "bert.".
        tied: published tensor -> published tensor that it equals; a file may leave the first out, and saving does.
        derived: published names that follow from the settings and are not read, such as tables of positions.
        unused: published names of other heads: not read, and told in the report.
        endings: old endings of names and what they are now, such as {"gamma": "weight"}.
        anew: our names of parts of the body that start with random weights together with a head, where the files
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
    """A published tensor and the rows of one of our tensors that it is; without a number of rows it is all of it."""

    published: str
    ours: str
    start: int
    rows: int | None
    transposed: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Its part of our tensor, in the shape that the file has."""
        part = tensor if self.rows is None else tensor.narrow(0, self.start, self.rows)
        return part.t() if self.transposed else part

    def shape(self, ours: torch.Size) -> tuple[int, ...]:
        """The shape it has in the file."""
        shape = tuple(ours) if self.rows is None else (self.rows, *ours[1:])
        return shape[::-1] if self.transposed else shape


class KeyPlan(NamedTuple):
    """What a file's tensors are used for."""

    pieces: list[Piece]
    new: list[str]  # our tensors that the files lack and a caller asked to begin anew
    unused: list[str]
    tied: list[tuple[str, str]]  # published tensors that are to be equal, both in the files


def pieces_of(keys: KeyMap, ours: Mapping[str, torch.Size], *, prefixed: bool) -> dict[str, list[Piece]]:
    """For each of our tensors the published ones it is made of, by their primary names.

    Raises:
        KeyError: a tensor that the map does not know: a fault of the map.
    """
    found: dict[str, list[Piece]] = {}
    for name, shape in ours.items():
        for key, prefix in (*((key, keys.prefix if prefixed else "") for key in keys.keys), *_plain(keys.head)):
            match = key.pattern.fullmatch(name)
            if match is not None:
                found[name] = list(_pieces(key, prefix, name, shape, match))
                break
        else:
            raise KeyError(name)
    return found


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
    """How to fill our tensors from the stored ones, by names and shapes alone.

    Args:
        new_head: whether a head that the files lack starts with random weights.
        relabelled: whether what is of another size in such a head does, too: it told other labels apart.
        drawn: our tensors of such a head that do in any case.
        where: begins the error.

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
    absent = {name for name, (_, found) in resolved.items() if not any(found)}
    headless = new_head and all(name in absent for name in resolved if name.startswith("head."))
    anew = ("head.", *(f"{part}." for part in keys.anew if headless))
    for name, (pieces, found) in resolved.items():
        if new_head and name in absent and name.startswith(anew):
            result.new.append(name)
            continue
        for piece, there in zip(pieces, found, strict=True):
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
    """Some of the lines: of names that the files lack and of names that only they have, at least half as many each."""
    if len(wrong) <= _SHOWN:
        return wrong
    unused = [line for line in wrong if line.startswith("unused")]
    others = [line for line in wrong if not line.startswith("unused")]
    first = others[: max(_SHOWN // 2, _SHOWN - len(unused))]
    return [*first, *unused[: _SHOWN - len(first)], f"and {len(wrong) - _SHOWN} more"]


def _place(
    name: str, keys: KeyMap, prefixed: bool, names: dict[str, str], result: KeyPlan, wrong: list[str], shape: object
) -> None:
    """Where a tensor belongs that no parameter is filled from."""
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
    """The name under which a piece is in the files, or None."""
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
