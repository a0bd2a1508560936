"""Lines of a module that keeps its cache inside: where it is written, and where it is not emptied."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ...findings._finding import Inapplicable, Location, TargetError
from ...subject._decoder import CachedDecoder, in_pieces
from ...subject._inputs import NamedInputs
from ...subject._source import source_of
from ...subject._subject import Subject

_OF_MODULES = vars(nn.Module())  # attributes that every module has
Held = dict[tuple[str, str], Any]  # by module and attribute


def written_line(subject: Subject, piece: NamedInputs) -> Location | None:
    """The last line that assigns an attribute which a call changes; None if calls change no attribute."""
    copy = subject.fresh()
    try:
        decoder = CachedDecoder(copy)
        before = held(copy.module)
        in_pieces(decoder, piece, (piece.length,))
    except (Inapplicable, TargetError):
        return None
    for owner, name in differing(before, held(copy.module)):
        lines = list(_lines(copy.target.get_submodule(owner), name, _resets(subject)))
        if lines:
            return lines[-1]
    return None


def not_emptied_line(subject: Subject, used: Subject) -> Location | None:
    """The line of the reset method that leaves something of `used`, which was reset; else the first line of that
    method."""
    cache = subject.reading.cache
    if cache is None or cache.kind != "inside" or cache.reset is None:
        return None
    fresh = subject.fresh()
    CachedDecoder(fresh)  # which resets it
    method = getattr(subject.target, cache.reset)
    for _, name in differing(held(fresh.module), held(used.module)):
        named = [line for line in _numbered(method) if re.search(rf"\b{re.escape(name)}\b", line.code)]
        if named:
            return named[-1]
    return next((line for line in _numbered(method) if line.code.startswith("def ")), None)


def _resets(subject: Subject) -> Sequence[str]:
    cache = subject.reading.cache
    return ("__init__", *([cache.reset] if cache is not None and cache.reset is not None else []))


def held(module: nn.Module | None) -> Held:
    """Attributes, parameters and buffers of a module and its parts; tensors as copies."""
    found: Held = {}
    for path, part in () if module is None else module.named_modules():
        own = {name: value for name, value in vars(part).items() if name not in _OF_MODULES}
        for name, value in (*own.items(), *part._buffers.items(), *part._parameters.items()):
            leaves, shape = tree_flatten(value)
            found[path, name] = (
                shape,
                [tensor.detach().clone() if isinstance(tensor, Tensor) else tensor for tensor in leaves],
            )
    return found


def differing(before: Held, after: Held) -> Iterator[tuple[str, str]]:
    for key in dict.fromkeys((*after, *before)):
        if key not in before or key not in after or not _same(before[key], after[key]):
            yield key


def _same(value: Any, other: Any) -> bool:
    if value[0] != other[0]:
        return False
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
        for a, b in zip(value[1], other[1], strict=True)
    )


def _lines(owner: nn.Module, name: str, without: Sequence[str]) -> Iterator[Location]:
    """Lines on which methods of the target's class change `self.<name>`, by assignment or in part."""
    wanted = rf"self\.{re.escape(name)}\b[^=()]*([-+*/]?=[^=]|\.\w+_\(|\.(append|update|extend)\()"
    for kind in type(owner).__mro__:
        for method, function in vars(kind).items():
            is_called = inspect.isfunction(function) and getattr(type(owner), method) is function
            if is_called and method not in without:
                yield from (line for line in _numbered(function) if re.search(wanted, line.code))


def _numbered(function: Any) -> list[Location]:
    """The lines of a function of the target's own."""
    source = source_of(function)
    places = () if source is None else map(source.location, range(len(source.lines)))
    return [replace(place, function=function.__name__) for place in places]
