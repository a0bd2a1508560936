"""Reads the source of a target: its lines, without docstrings and comments. Files, and notebooks through
`linecache`."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..findings._finding import Location
from ..findings._locate import is_own
from ._subject import Subject


@dataclass(frozen=True)
class Source:
    """The lines of one class or function."""

    path: str
    first: int
    lines: tuple[str, ...]
    name: str

    def location(self, at: int) -> Location:
        """The location of the line with this index."""
        return Location(self.path, self.first + at, self.lines[at].strip(), self.name)


def sources(target: Any) -> tuple[Source, ...]:
    """The classes of a module and of its parts, or a function, without the definitions of PyTorch, Python and
    Saccade."""
    every = [source for part in _parts(target) for source in _sources(part)]
    return tuple(dict.fromkeys(every))


def line_with(subject: Subject, pattern: str) -> Location | None:
    """The first line of code (no comment, no docstring) of the target that matches a regular expression."""
    for source in sources(subject.target):
        skipped = _without_code(source)
        for at, line in enumerate(source.lines):
            if at not in skipped and re.search(pattern, line.partition("#")[0]):
                return source.location(at)
    return None


def _parsed(subject: Subject) -> Iterator[tuple[Source, ast.Module]]:
    """The target's sources that Python can parse by themselves."""
    for source in sources(subject.target):
        with contextlib.suppress(SyntaxError):
            yield source, parsed_by(ast.parse, textwrap.dedent("\n".join(source.lines)))


def return_of_several(subject: Subject) -> Location | None:
    """The last `return a, b` of the target's own call: its `forward`, or the function."""
    for source, tree in _parsed(subject):
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for function in sorted(functions, key=lambda node: node.name not in ("forward", "__call__")):
            returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
            tuples = [node for node in returns if isinstance(node.value, ast.Tuple)]
            if tuples:
                return source.location(tuples[-1].lineno - 1)
    return None


def thrown_away(subject: Subject) -> Location | None:
    """A line that computes something and does nothing with it: a submodule that is called, an operation of tensors."""
    parts: set[str] = set()
    for module in subject.module.modules() if subject.module is not None else ():
        parts |= set(module._modules)
    for source, tree in _parsed(subject):
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and _computes(node.value, parts):
                return source.location(node.lineno - 1)
    return None


def _computes(node: ast.expr, parts: set[str]) -> bool:
    if isinstance(node, (ast.BinOp, ast.Compare, ast.UnaryOp)):
        return True
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name, owner = node.func.attr, node.func.value
    if isinstance(owner, ast.Name) and owner.id == "self":
        return name in parts
    return name in _PURE


# No names that sets, modules and the like have, too: `seen.add(1)` and `module.to(device)` do something.
_PURE = ("masked_fill", "transpose", "permute", "view", "reshape", "contiguous", "softmax", "mul", "div")


def taken_twice(subject: Subject) -> list[tuple[str, Location]]:
    """Names that are given the same part of something, with their lines: k = qkv[1], v = qkv[1]."""
    pairs_of: list[tuple[str, Location]] = []
    for source, tree in _parsed(subject):
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            given: dict[str, dict[str, int]] = {}
            for name, value in _assigned(function):
                if any(isinstance(node, (ast.Subscript, ast.Call)) for node in ast.walk(value)):
                    given.setdefault(ast.dump(value), {})[name] = value.lineno - 1
            twice = (names for names in given.values() if len(names) > 1)
            pairs_of += [(name, source.location(at)) for names in twice for name, at in names.items()]
    return pairs_of


def _assigned(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Pairs of assigned names and values; `a, b = c, d` gives two."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=False))
        yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def block_around(subject: Subject, line: Location, *names: str) -> Location | None:
    """The nearest `with` around a line that names one of these: `with torch.no_grad():`."""
    for source, _, around in _nodes_around(subject, line, ast.With):
        for node in around:
            if any(name in source.lines[node.lineno - 1] for name in names):
                return source.location(node.lineno - 1)
    return None


def return_after(subject: Subject, line: Location) -> Location | None:
    """The `return` that follows a line in its function."""
    for source, at, around in _nodes_around(subject, line, ast.FunctionDef):
        returns = [node.lineno for node in _returns(around[0]) if (node.end_lineno or 0) > at] if around else []
        if returns:
            return source.location(min(returns) - 1)
    return None


def _nodes_around(
    subject: Subject, line: Location, kind: type[ast.stmt]
) -> Iterator[tuple[Source, int, list[ast.stmt]]]:
    """The sources that hold a line, its place in each, and the nodes of a kind around it, the nearest first."""
    for source, tree in _parsed(subject):
        at = line.line - source.first
        if source.path == line.path and 0 <= at < len(source.lines):
            nodes = [node for node in ast.walk(tree) if isinstance(node, kind)]
            around = [node for node in nodes if node.lineno - 1 <= at < (node.end_lineno or node.lineno)]
            yield source, at, sorted(around, key=lambda node: -node.lineno)


def _returns(node: ast.AST) -> Iterator[ast.Return]:
    """The `return` statements of a function, without those of nested functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _returns(child)


def _parts(target: Any) -> Iterator[Any]:
    """Classes and functions that make up a target, itself first."""
    target = _plain(target)
    if isinstance(target, nn.Module):
        for part in target.modules():
            yield from (kind for kind in type(part).__mro__ if kind not in (object, nn.Module))
    elif inspect.isclass(target):
        yield from (kind for kind in target.__mro__ if kind not in (object, nn.Module))
    elif inspect.isroutine(target):
        yield target
    else:
        yield type(target)


def _plain(target: Any) -> Any:
    """The function inside functools.partial and decorators."""
    while isinstance(target, functools.partial):
        target = target.func
    return inspect.unwrap(target) if callable(target) and not isinstance(target, nn.Module) else target


def _sources(value: Any) -> list[Source]:
    """The sources of a class's functions, if its module is not loaded any more."""
    whole = source_of(value)
    if whole is not None or not inspect.isclass(value):
        return [] if whole is None else [whole]
    return [
        source for own in vars(value).values() if inspect.isfunction(own) and (source := source_of(own)) is not None
    ]


def source_of(value: Any) -> Source | None:
    """The source of one class or function of the target's own."""
    try:
        path = inspect.getsourcefile(value) or inspect.getfile(value)
        if not is_own(path):  # before its file is parsed
            return None
        lines, first = parsed_by(inspect.getsourcelines, value)
    except (OSError, TypeError, IndentationError):
        return None
    return Source(path, max(1, first), tuple(line.rstrip("\n") for line in lines), getattr(value, "__qualname__", ""))


def _tokens(source: Source) -> list[tokenize.TokenInfo]:
    text = "\n".join(inspect.cleandoc("\n".join(["", *source.lines])).split("\n")) + "\n"
    try:
        return list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return []


def _prose(source: Source) -> Iterator[tokenize.TokenInfo]:
    quiet = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT)
    before, depth = tokenize.NEWLINE, 0
    for token in _tokens(source):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and before in quiet and not depth):
            yield token
        if token.type == tokenize.OP:  # a string on a line of its own within brackets is an argument
            depth += (token.string in "([{") - (token.string in ")]}")
        before = token.type


def _without_code(source: Source) -> set[int]:
    """Places of lines that are all comment or docstring."""
    lines: set[int] = set()
    for token in _prose(source):
        if token.type == tokenize.STRING or not token.line.partition("#")[0].strip():
            lines |= set(range(token.start[0] - 1, token.end[0]))
    return lines


@dataclass(frozen=True)
class DropoutRate:
    """A place where the target keeps a dropout rate."""

    owner: str  # the submodule's path, "" for the target itself
    name: str  # the attribute, "" for a dropout module
    value: float

    def __str__(self) -> str:
        return ".".join(part for part in (self.owner, self.name) if part)


def rates_of(subject: Subject) -> tuple[DropoutRate, ...]:
    """Every dropout module, and every number between 0 and 1 that is named as one."""
    rates = []
    for path, module in (subject.module or nn.Module()).named_modules():
        if isinstance(module, _DropoutNd):
            rates.append(DropoutRate(path, "", module.p))
            continue
        for name, value in vars(module).items():
            if "drop" in name.lower() and type(value) in (float, int) and 0 <= value < 1:
                rates.append(DropoutRate(path, name, float(value)))
    return tuple(rates)


def with_rates(subject: Subject, rates: tuple[DropoutRate, ...], rate: float) -> Subject:
    """A copy with these dropout rates set to another one."""
    new = subject.fresh()
    for place in rates:
        assert new.module is not None
        setattr(new.module.get_submodule(place.owner), place.name or "p", rate)
    return new


def attribute_line(owner: nn.Module | None, name: str, last: bool = False) -> Location | None:
    """The first or last line `self.<name> = ...` of the owner's class or of one it is derived from."""
    own = rf"self\.{re.escape(name)}"
    wanted = rf"{own}\b[^=()]*=[^=]|{own}\.\w+_\("
    for source in map(source_of, () if owner is None else type(owner).__mro__):
        numbered = list(enumerate(source.lines)) if source is not None else []
        for at, line in reversed(numbered) if last else numbered:
            if source is not None and (re.search(wanted, line) or f'"{name}"' in line):
                return replace(source.location(at), function="__init__")
    return None


def function_line(function: Any) -> Location | None:
    """The first line of a function in the target's own code."""
    source = source_of(function)
    if source is None:
        return None
    at = next((at for at, line in enumerate(source.lines) if line.lstrip().startswith("def ")), 0)
    return replace(source.location(at), function=function.__name__)


T = TypeVar("T")


def parsed_by(parse: Callable[..., T], *given: Any) -> T:
    """`parse(*given)`, where parse is ast.parse or one of inspect's functions that use it.

    Some releases of Python 3.11 and 3.12 now and then raise "SystemError: AST constructor recursion depth mismatch" for
    source that is well (github.com/python/cpython/issues/106905). Asked once more, they parse it.
    """
    try:
        return parse(*given)
    except SystemError:
        return parse(*given)
