"""A trace in progress: every call of PyTorch that a function makes, as nodes or as a step that is kept.

A step is an operation on captured tensors alone. It runs again at every call with the tensors as they are then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._surroundings import describe
from ._arrays import Symbol, name_of
from ._language import Builder, Program
from ._symbols import DESCRIBING, applied
from ._values import Array, NotTraceable, kind_of

_RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal poisson rrelu "
    "dropout alpha_dropout feature_dropout bernoulli_ uniform_ normal_ random_ exponential_".split()
)
_COMPARED = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)
_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_STATIC = frozenset("dtype device ndim dim ndimension is_floating_point".split())  # part of the key of a function
_PROGRAMS: weakref.WeakValueDictionary[Any, Program] = weakref.WeakValueDictionary()


class Slot(NamedTuple):
    """Stands for a tensor among the arguments of a step: of the captured ones, or what an earlier step gave."""

    number: int


class RecordedStep(NamedTuple):
    """An operation on captured tensors."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[int, int | None], ...]  # slots, each with its place in a result of several
    answer: Any = None  # what it said to Python, if it gave no tensor
    asks: bool = False
    nested: bool = False  # whether tensors stand in lists or among the named arguments

    def run(self, held: dict[int, Tensor]) -> Any:
        if not self.nested:
            args = [held[part.number] if type(part) is Slot else part for part in self.args]
            return self.function(*args, **self.kwargs)
        args, kwargs = (_mapped(part, Slot, lambda slot: held[slot.number]) for part in (self.args, self.kwargs))
        return self.function(*args, **kwargs)

    def needs(self) -> set[int]:
        found: set[int] = set()
        _mapped((self.args, self.kwargs), Slot, lambda slot: found.add(slot.number))
        return found


class Trace(NamedTuple):
    program: Program | None  # None: the function cannot be traced
    reason: str
    constants: dict[int, Tensor]  # slots of tensors that depend on nothing
    steps: tuple[RecordedStep, ...]
    tables: tuple[int, ...]  # slots

    def read(self, captured: list[Tensor]) -> list[Tensor] | None:
        """The tables with their current values, or None if a step returns another answer than in the trace."""
        if not self.steps and not self.constants:
            return [captured[slot] for slot in self.tables]
        held: dict[int, Tensor] = dict(enumerate(captured))
        held.update(self.constants)
        for step in self.steps:
            result = step.run(held)
            if step.asks:
                if type(result) is not type(step.answer) or result != step.answer:
                    return None
                continue
            for slot, place in step.results:
                held[slot] = result if place is None else result[place]
        return [held[slot] for slot in self.tables]


class Refused(Exception):
    """Raised while a function is traced: it ends the trace and holds the error to raise."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


class Recorder(TorchFunctionMode):
    """One trace in progress: sees every call of PyTorch that the function makes."""

    def __init__(self, captured: Sequence[Tensor], name: str, fill: int = 1):
        super().__init__()
        self.build = Builder()
        self.fill = fill
        self.dtypes: set[torch.dtype] = set()
        self.guarded = True
        self.name = name
        self._captured = len(captured)
        self._held: dict[int, Tensor] = {}  # by slot: keeps them, so that no other tensor gets their id
        self._slots: dict[int, int] = {}  # by id
        self._constants: set[int] = set()  # slots of what depends on nothing
        self._foreign: set[int] = set()
        self._sized: set[int] = set()
        self._steps: list[RecordedStep] = []
        self.unknown: list[Tensor] = []  # that the walk did not meet
        self._stand_ins: dict[int, Tensor] = {}  # of tensors of torch.func, which has no values here
        for tensor in captured:
            self._new_slot(tensor)
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                self._stand_ins[id(tensor)] = torch.ones(tensor.shape, dtype=tensor.dtype)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        symbols, tensors = _parted(args, kwargs)
        for tensor in tensors:
            if id(tensor) not in self._slots:
                self._unguarded(tensor)
        called = getattr(func, "__name__", "")
        if called in _RANDOM:
            raise NotTraceable(f"random numbers (torch.{called})")
        if not torch.is_grad_enabled():
            raise NotTraceable("a part without gradients (torch.no_grad, or an autograd.Function); .detach() works")
        self._check_writes(func, called, args, kwargs)
        if not symbols:
            return self._step(func, args, kwargs)
        return applied(self, func, args, kwargs)

    # --- for symbols

    def table(self, tensor: Tensor) -> Array:
        """An ordinary tensor as values of the program: loads, or a constant."""
        slot, build, kind = self._slots[id(tensor)], self.build, kind_of(tensor.dtype)
        if slot in self._constants and not tensor.dim():
            node = build.const(tensor.item(), kind)
            return Array((), kind, lambda _: node)
        return Array(tuple(tensor.shape), kind, lambda index: build.load(slot, kind, *index))

    def sized(self, tensor: Tensor) -> None:
        """The shape of an ordinary tensor matters to the program."""
        slot = self._slots[id(tensor)]
        if slot not in self._sized:
            self._sized.add(slot)
            self._ask(RecordedStep(_SHAPE, (Slot(slot),), {}, ()), tensor.shape)

    def written(self, tensor: Tensor) -> None:
        slot = self._slots.get(id(tensor), self._captured)
        if slot < self._captured:
            which = f"it writes to a captured tensor, {describe(tensor)}"
            raise Refused(ValueError(f"{self.name} must not have side effects: {which}"))

    def output(self, result: Any, score: bool) -> int:
        """The node of what the function returned."""
        wanted = "a float tensor" if score else "a bool tensor"
        if not isinstance(result, Tensor):
            raise TypeError(f"{self.name} must return {wanted} of shape (), got {describe(result)}")
        if result.dtype != torch.bool if not score else not result.dtype.is_floating_point:
            raise TypeError(f"{self.name} must return {wanted} of shape (), got {_described(result)}")
        if result.dim():
            raise ValueError(f"{self.name} must return {wanted} of shape (), got {_described(result)}")
        if not isinstance(result, Symbol) and id(result) not in self._slots:
            self._unguarded(result)
        node = result.array.at(()) if isinstance(result, Symbol) else self.table(result).at(())
        if not score:
            self._check_precision()
        return node

    def _check_precision(self) -> None:
        """A mask has no rounding to spare: floats must have the one dtype in which they are computed later."""
        tables = {self._held[int(node.value or 0)].dtype for node in self.build.nodes if node.op == "load"}
        floats = {dtype for dtype in tables if dtype.is_floating_point}
        one = torch.float64 if torch.float64 in floats else torch.float32
        for dtype in (self.dtypes | floats) - {one}:
            if dtype != torch.float32 or dtype in self.dtypes:
                raise NotTraceable(f"{dtype} beside {one} in a mask")

    def trace(self, node: int | None, reason: str = "") -> Trace:
        """The trace to keep: the program, and the steps that tables and answers need."""
        program, tables = (None, ()) if node is None else _numbered(self.build.program(node))
        needed, steps = set(tables), []
        for step in reversed(self._steps):
            if step.asks or any(slot in needed for slot, _ in step.results):
                needed |= step.needs()
                steps.append(step)
        constants = {slot: self._held[slot] for slot in needed & (self._constants | self._foreign)}
        return Trace(program, reason, constants, tuple(reversed(steps)), tuple(tables))

    # --- for captured tensors

    def _new_slot(self, tensor: Tensor) -> int:
        slot = len(self._held)
        self._held[slot] = tensor
        self._slots[id(tensor)] = slot
        return slot

    def _unguarded(self, tensor: Tensor) -> None:
        """Handle a tensor that the walk did not find: it is kept, and the function is traced again at the next call."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise NotTraceable("torch.func inside the function")
        self.guarded = False
        self.unknown.append(tensor)
        self._foreign.add(self._new_slot(tensor))

    def _check_writes(self, func: Any, called: str, args: Any, kwargs: Any) -> None:
        in_place = called.endswith("_") and not called.endswith("__")
        in_place |= called in ("__setitem__", "__set__")
        in_place |= called.startswith("__i") and called[3:-2] in _OPERATORS
        changed = kwargs.get("out") if kwargs.get("out") is not None else args[0] if in_place and args else None
        if isinstance(changed, Tensor) and not isinstance(changed, Symbol):
            self.written(changed)
            raise NotTraceable(f"{called} in place")

    def _step(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._stand_ins:
            stand_in = lambda tensor: self._stand_ins.get(id(tensor), tensor)  # noqa: E731
            result = func(*_mapped(tuple(args), Tensor, stand_in), **_mapped(kwargs, Tensor, stand_in))
        else:
            result = func(*args, **kwargs)
        stored_args, stored_kwargs = (_mapped(part, Tensor, self._slot_of) for part in (tuple(args), kwargs))
        tensors = [result] if isinstance(result, Tensor) else []
        several = isinstance(result, list | tuple) and any(isinstance(part, Tensor) for part in result)
        if several:
            tensors = [part for part in result if isinstance(part, Tensor)]
        nested = [part for part in stored_args if type(part) is not Slot], stored_kwargs
        step = RecordedStep(func, stored_args, stored_kwargs, (), nested=_mapped(nested, Slot, str) != nested)
        if not tensors:
            if name_of(func) not in _STATIC:
                self._ask(step, result)
            return result
        constant = all(slot in self._constants for slot in step.needs())
        self.guarded &= constant or _is_plain((args, kwargs))
        places = enumerate(result) if several else ((None, result),)
        slots = []
        for place, tensor in places:
            if isinstance(tensor, Tensor) and id(tensor) not in self._slots:
                slots.append((self._new_slot(tensor), place))
        if constant:
            self.guarded &= _is_plain((args, kwargs))
            self._constants.update(slot for slot, _ in slots)
        else:
            self._steps.append(step._replace(results=tuple(slots)))
        return result

    def _ask(self, step: RecordedStep, answer: Any) -> None:
        """Something that the function learned about captured tensors."""
        needs = step.needs()
        if not needs or all(slot in self._constants for slot in needs):
            return
        if self._stand_ins and name_of(step.function) not in DESCRIBING:
            raise NotTraceable("the value of a captured tensor is needed, and torch.func runs over it")
        if not _is_plain(answer):
            self.guarded = False
            return
        self._steps.append(step._replace(answer=answer, asks=True))

    def _slot_of(self, tensor: Tensor) -> Slot:
        return Slot(self._slots[id(tensor)])


_OPERATORS = frozenset("add sub mul div truediv floordiv mod pow and or xor lshift rshift".split())


def _described(tensor: Tensor) -> str:
    if not isinstance(tensor, Symbol):
        return describe(tensor)
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"


def _numbered(program: Program) -> tuple[Program, tuple[int, ...]]:
    """The program with tables numbered from 0, and the slots of these. Equal programs are one object."""
    tables: dict[Any, int] = {}
    nodes = tuple(
        replace(node, value=tables.setdefault(node.value, len(tables))) if node.op == "load" else node
        for node in program.nodes
    )
    key = tuple((node.op, node.args, node.kind, repr(node.value)) for node in nodes), program.outputs
    known = _PROGRAMS.get(key)
    if known is None:
        known = _PROGRAMS[key] = Program(nodes, program.outputs)
    return known, tuple(tables)


def _parted(args: Any, kwargs: Any) -> tuple[bool, list[Tensor]]:
    """Whether there are symbols among the arguments, and the ordinary tensors."""
    symbols, tensors = False, []
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Symbol):
            symbols = True
        elif isinstance(arg, Tensor):
            tensors.append(arg)
        elif isinstance(arg, list | tuple):
            inner, more = _parted(arg, {})
            symbols |= inner
            tensors += more
        elif isinstance(arg, slice):
            if any(isinstance(end, Tensor) for end in (arg.start, arg.stop, arg.step)):
                raise NotTraceable("a slice whose ends are tensors")
        elif isinstance(arg, dict):
            inner, more = _parted(arg.values(), {})
            symbols |= inner
            tensors += more
    return symbols, tensors


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A copy of nested arguments in which what is of that kind is changed."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)([_mapped(part, kind, change) for part in value])
    if type(value) is dict:
        return {name: _mapped(part, kind, change) for name, part in value.items()}
    return value


def _is_plain(value: Any) -> bool:
    """Whether a value cannot change, and can be compared."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, slice):
        return _is_plain((value.start, value.stop, value.step))
    return isinstance(value, (*_COMPARED, Tensor, torch.memory_format, type, type(Ellipsis)))
