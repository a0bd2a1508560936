"""The objects that a function uses besides its arguments: the key of its trace, and the tensors that it captured.

A function's trace is used again only while everything that it reaches is the same: values of closure cells, globals,
defaults and attributes that its code names, functions that it calls, elements of containers. Tensors count by dtype,
rank and device; they are read anew at every call. What cannot be compared (an object of foreign code, `getattr`) makes
the function `guarded = False`: it is traced at every call.

Not noticed: names of PyTorch, NumPy and the standard library that are bound to something else.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

# Their functions always mean the same, and give the same for the same arguments.
_TRUSTED = frozenset(
    "torch math cmath operator functools itertools builtins typing collections numpy enum dataclasses numbers types "
    "abc typing_extensions _operator _functools _collections".split()
)
_DYNAMIC = frozenset(
    "getattr vars eval exec globals locals __dict__ attrgetter methodcaller __import__ import_module".split()
)
_MADE_ONCE = frozenset("__init__ __new__ __repr__ __str__ __init_subclass__ __setattr__ __delattr__".split())
_MODULE_STATE = ("_parameters", "_buffers", "_modules")
_MOST = 4096  # values that are compared at every call
_MISSING = object()


class Reached(NamedTuple):
    """Values that a function reaches."""

    key: tuple[Any, ...]
    tensors: list[Tensor]  # in the order of the walk; each once
    guarded: bool  # whether equal keys mean equal programs
    writes: str | None  # a variable outside of the function that it binds
    lists: list[tuple[list[Any], int]]  # with their lengths


class _Code(NamedTuple):
    """Names in a code object, its inner functions included."""

    globals: tuple[str, ...]
    modules: tuple[str, ...]  # imported inside
    names: frozenset[str]
    writes: str | None


@lru_cache(maxsize=4096)
def _named(code: types.CodeType) -> _Code:
    names = set(code.co_names)
    read: dict[str, None] = {}
    imported: dict[str, None] = {}
    writes = None
    for instruction in dis.get_instructions(code):
        operation, name = instruction.opname, instruction.argval
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            read[name] = None
        elif operation == "IMPORT_NAME":
            imported[name] = None
        elif operation == "STORE_GLOBAL" or (operation == "STORE_DEREF" and name in code.co_freevars):
            writes = name
    for inner in (const for const in code.co_consts if isinstance(const, types.CodeType)):
        part = _named(inner)
        names |= part.names
        read.update(dict.fromkeys(part.globals))
        imported.update(dict.fromkeys(part.modules))
        local = part.writes in code.co_cellvars or part.writes in code.co_varnames
        writes = writes or (None if local else part.writes)
    return _Code(tuple(read), tuple(imported), frozenset(names), writes)


_NAMES: dict[Any, frozenset[str]] = {}  # by the code of the function: attributes that it and what it calls name


def reached(fn: Callable[..., Any]) -> Reached:
    """Walk through what `fn` reaches."""
    root = _root(fn)
    while True:
        names = _NAMES.get(root, frozenset())
        walk = _Walk(names)
        walk.visit(fn)
        wider = names.union(*(code.names for code in walk.codes))
        if wider == names:
            break
        if len(_NAMES) > 4096:
            _NAMES.clear()
        _NAMES[root] = wider
    guarded = walk.guarded and not (names & _DYNAMIC)
    writes = next((code.writes for code in walk.codes if code.writes), None)
    return Reached(tuple(walk.key), walk.tensors, guarded, writes, walk.lists)


def _root(fn: Any) -> Any:
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, types.MethodType):
            fn = fn.__func__
        else:
            return fn.__code__ if isinstance(fn, types.FunctionType) else type(fn)


@lru_cache(maxsize=4096)
def _is_trusted(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _TRUSTED and not module.startswith("numpy.random")


class _Walk:
    """One walk; `key` grows by what it passes."""

    def __init__(self, names: frozenset[str]):
        self.names = names
        self.key: list[Any] = [names]
        self.tensors: list[Tensor] = []
        self.lists: list[tuple[list[Any], int]] = []
        self.codes: dict[_Code, None] = {}
        self.guarded = True
        self._passed: dict[int, tuple[int, Any]] = {}  # the object too: its id must not be used again

    def visit(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.key += (kind, value)
            return
        place = self._passed.get(id(value))
        if place is not None:
            self.key += (_MISSING, place[0])
            return
        self._passed[id(value)] = (len(self._passed), value)
        if len(self.key) > _MOST:
            self.guarded = False
            return
        handler = _HANDLERS.get(kind) or _handler(kind)
        handler(self, value)

    def number(self, value: float | complex) -> None:
        self.key += (type(value), repr(value))

    def same(self, value: Any) -> None:
        """Compared by identity."""
        self.key.append(value)

    def unknown(self, value: Any) -> None:
        self.guarded = False
        self.key.append(type(value))

    def tensor(self, value: Tensor) -> None:
        self.key += (type(value), value.dtype, value.dim(), value.device)
        self.tensors.append(value)

    def sequence(self, value: Any) -> None:
        self.key += (type(value), len(value))
        if isinstance(value, list):
            self.lists.append((value, len(value)))
        for element in value:
            self.visit(element)

    def slice(self, value: slice) -> None:
        self.key.append(slice)
        for end in (value.start, value.stop, value.step):
            self.visit(end)

    def dictionary(self, value: dict[Any, Any]) -> None:
        self.key += (type(value), len(value))
        for name, element in value.items():
            self.visit(name)
            self.visit(element)

    def members(self, value: Any) -> None:
        if all(type(member) in _PLAIN for member in value):
            self.key += (type(value), frozenset(value))
        else:
            self.unknown(value)

    def function(self, value: types.FunctionType) -> None:
        code = value.__code__
        if _is_trusted(value.__module__):
            self.key.append(code if value.__closure__ else value)
            self._cells(value)  # PyTorch's `and_masks` holds functions of the user
            return
        named = _named(code)
        self.codes[named] = None
        self.key.append(code)
        outside = value.__globals__
        for name in named.globals:
            held = outside.get(name, _MISSING)
            if held is not _MISSING:  # else of the builtins
                self.key.append(name)
                self.visit(held)
        for name in named.modules:
            self.visit(sys.modules.get(name))
        self._cells(value)
        if value.__defaults__:
            self.visit(value.__defaults__)
        if value.__kwdefaults__:
            self.visit(value.__kwdefaults__)
        if value.__dict__:
            self._named_in(value.__dict__)

    def _cells(self, value: types.FunctionType) -> None:
        for cell in value.__closure__ or ():
            try:
                self.visit(cell.cell_contents)
            except ValueError:
                self.key.append(_MISSING)

    def _outside(self, value: types.FunctionType) -> None:
        """Globals that the code names, and modules that it imports."""
        named = _named(value.__code__)
        self.codes[named] = None
        for name in named.globals:
            held = value.__globals__.get(name, _MISSING)
            if held is not _MISSING:  # else of the builtins
                self.key.append(name)
                self.visit(held)
        for name in named.modules:
            self.visit(sys.modules.get(name))

    def method(self, value: types.MethodType) -> None:
        self.key.append(types.MethodType)
        self.visit(value.__func__)
        self.visit(value.__self__)

    def partial(self, value: functools.partial[Any]) -> None:
        self.key.append(functools.partial)
        for part in (value.func, value.args, value.keywords):
            self.visit(part)

    def builtin(self, value: Any) -> None:
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType | type):
            module = getattr(value, "__module__", None) or getattr(owner, "__name__", "builtins")
            self.guarded &= _is_trusted(module)
            self.key.append(value)
        else:
            self.key += (types.BuiltinMethodType, value.__name__)
            self.visit(owner)

    def module(self, value: types.ModuleType) -> None:
        self.key.append(value)
        if _is_trusted(value.__name__):
            return
        if value.__name__.partition(".")[0] in sys.stdlib_module_names:
            self.guarded = False  # random, time, os
            return
        self._named_in(vars(value))

    def kind(self, value: type) -> None:
        self.key.append(value)
        if not _is_trusted(value.__module__):
            for base in value.__mro__:
                if not _is_trusted(base.__module__):
                    self._named_in(vars(base))

    def object(self, value: Any) -> None:
        """An object of a class written in Python: attributes that the code names."""
        kind = type(value)
        self.key.append(kind)
        own = getattr(value, "__dict__", {})
        self._named_in(own)
        if isinstance(value, nn.Module):
            if any(hooks for name, hooks in own.items() if name.endswith("_hooks")):
                self.guarded = False
            for state in _MODULE_STATE:
                self._named_in(own.get(state, {}))
        for base in kind.__mro__:
            if not _is_trusted(base.__module__):
                self._of_class(value, base)

    def _of_class(self, value: Any, base: type) -> None:
        for name, held in tuple(vars(base).items()):
            special = name.startswith("__") and name.endswith("__")
            if name in ("__getattr__", "__getattribute__"):
                self.guarded = False
            elif isinstance(held, types.FunctionType):
                if (special and name not in _MADE_ONCE) or name in self.names or name == "forward":
                    self.key.append(name)
                    self.visit(held)
            elif name in self.names and not special:
                self.key.append(name)
                self.visit(getattr(value, name, None) if isinstance(held, types.MemberDescriptorType) else held)

    def layer(self, value: nn.Module) -> None:
        """Walk through a module of PyTorch: its type, its parameters, buffers and submodules, and its public
        attributes."""
        self.key.append(type(value))
        for name, held in value.__dict__.items():
            if name.endswith("_hooks"):
                self.guarded &= not held
            elif not (name.startswith("_") and name not in _MODULE_STATE):
                self.key.append(name)
                self.visit(held)

    def descriptor(self, value: Any) -> None:
        self.key.append(type(value))
        functions = (getattr(value, name, None) for name in ("fget", "func", "__func__"))
        self.visit(next((function for function in functions if function is not None), None))

    def _named_in(self, held: Any) -> None:
        for name in self.names if len(self.names) < len(held) else tuple(held):
            if name in self.names and name in held:
                self.key.append(name)
                self.visit(held[name])


_PLAIN = frozenset((int, bool, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, range, torch.Size))
_PLAIN |= frozenset((torch.layout, torch.memory_format))
_HANDLERS: dict[type, Callable[[_Walk, Any], None]] = {
    types.FunctionType: _Walk.function,
    Tensor: _Walk.tensor,
    nn.Parameter: _Walk.tensor,
}


def _handler(kind: type) -> Callable[[_Walk, Any], None]:
    """How values of a class are passed, remembered."""
    made = _chosen(kind)
    if len(_HANDLERS) < 4096:
        _HANDLERS[kind] = made
    return made


_BY_BASE: tuple[tuple[Any, Callable[[_Walk, Any], None]], ...] = (
    ((float, complex, np.generic), _Walk.number),
    ((enum.Enum, torch.finfo, torch.iinfo), _Walk.same),
    (slice, _Walk.slice),
    (Tensor, _Walk.tensor),
    ((tuple, list), _Walk.sequence),
    (dict, _Walk.dictionary),
    ((set, frozenset), _Walk.members),
    (types.MethodType, _Walk.method),
    (functools.partial, _Walk.partial),
    ((types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType), _Walk.builtin),
    ((types.ClassMethodDescriptorType, types.MethodWrapperType), _Walk.builtin),
    (types.ModuleType, _Walk.module),
    (type, _Walk.kind),
    ((property, staticmethod, classmethod, functools.cached_property), _Walk.descriptor),
)


def _chosen(kind: type) -> Callable[[_Walk, Any], None]:
    for bases, handler in _BY_BASE:
        if issubclass(kind, bases):
            return handler
    if issubclass(kind, nn.Module):
        return _Walk.layer if _is_trusted(kind.__module__) else _Walk.object
    if kind is types.SimpleNamespace or (not _is_trusted(kind.__module__) and _in_python(kind)):
        return _Walk.object
    return _Walk.unknown


def _in_python(kind: type) -> bool:
    """Whether objects of this class hold nothing but attributes."""
    return kind.__flags__ & (1 << 9) != 0 and all(
        base is object or (base.__flags__ & (1 << 9) and not _is_trusted(base.__module__)) for base in kind.__mro__
    )
