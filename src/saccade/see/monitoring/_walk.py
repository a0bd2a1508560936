"""The current step, module and call of a model on one thread.

A step is an outermost forward of the model or, outside of one, of a module within it (an encoder that `generate` runs
by itself). Hooks on modules with submodules, or that are not PyTorch's own, keep a stack of running modules.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ...operator import _observers
from ...operator._observers import PassiveHook
from ...operator.variants import Mechanism
from ._layers import layers_without_attention
from ._record import CallSite
from .calls import _thread
from .calls._calls_mode import AttentionCallsMode
from .calls._transformers import attention_functions

COMPILED = "compiled by torch.compile, which hides the calls inside: run the module it was made from"
SCRIPTED = "TorchScript, which hides its calls"
TRACED = "being traced by torch.jit, and a watch would be part of the trace"
MECHANISM = "a mechanism instead of softmax attention, which has no weights of that kind"
ELSEWHERE = "a forward on another thread than that of the watch"


class WalkPlace(NamedTuple):
    """The position of a model in its forward."""

    stack: tuple[tuple[str, nn.Module], ...]
    calls: Counter[str]
    visits: Counter[str]
    outermost: nn.Module | None


class StepWatcher(_thread.CallWatcher, Protocol):
    """Receives the calls of observed steps, and counts steps and unobserved calls."""

    steps: int
    observed: int

    def missed(self, name: str, reason: str) -> None: ...


class ModuleWalk:
    """The steps of a watched model on the thread that calls `install`, and the names of the calls in them.

    Args:
        model: the watched model.
        every: steps 0, every, 2 * every, ... are observed.
        watcher: receives the calls of observed steps.
    """

    def __init__(self, model: nn.Module, every: int, watcher: StepWatcher) -> None:
        self._model, self._every, self._watcher = model, every, watcher
        self._open: ExitStack | None = None
        self._undo: list[Callable[[], None]] = []
        self._scripted: list[str] = []
        self._thread = 0
        self._elsewhere: dict[int, nn.Module] = {}  # the outermost running module of each other thread
        self._stack: list[tuple[str, nn.Module]] = []
        self._calls: Counter[str] = Counter()  # by path, in this step
        self._visits: Counter[str] = Counter()
        self.observing = False
        self.inside: int | None = None  # the thread, while a step runs
        self.repeating = False
        self._skipping = False
        self._outermost: nn.Module | None = None  # of the running step
        self._sites: dict[str, CallSite] = {}
        self.ran: set[str] = set()  # paths of modules that ran in observed steps

    def enter(self, name: str, *around: AbstractContextManager[Any]) -> ExitStack:
        """Begin the block of the function `name`, within other contexts; returns the stack that `leave` closes."""
        if self._open is not None:
            raise RuntimeError(f"{name}: this block is on already; for one inside of it, call {name} again")
        with ExitStack() as stack:
            for context in (*around, attention_functions()):
                stack.enter_context(context)
            stack.callback(self.remove)
            self.install()
            self._open = stack.pop_all()
        return self._open

    def leave(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def install(self) -> None:
        """Register hooks on the model, for this thread."""
        self._thread = threading.get_ident()
        for path, module in _worth_following(self._model):
            if isinstance(module, torch.jit.ScriptModule):
                self._scripted.append(path)
            elif is_compiled(module):
                self._undo.append(_wrap(module, self._around(path, module)))
            else:
                self._undo.append(module.register_forward_pre_hook(ModuleHook(self.begin, path, self)).remove)
                self._undo.append(
                    module.register_forward_hook(ModuleHook(self.end, path, self), always_call=True).remove
                )

    def remove(self) -> None:
        """Remove the hooks; an interrupted step ends."""
        while self._undo:
            self._undo.pop()()
        self._scripted.clear()
        self._stop()

    @property
    def path(self) -> str:
        """The path of the innermost running module."""
        return self._stack[-1][0] if self._stack else ""

    @property
    def module(self) -> nn.Module | None:
        """The innermost running module."""
        return self._stack[-1][1] if self._stack else None

    def layers_without_attention(self, unknown: Iterable[str]) -> dict[str, str]:
        """As `layers_without_attention`, of the observed steps; `unknown`: names of unobserved calls."""
        paths = {name.partition(": ")[0] for name in unknown}
        return layers_without_attention(self._model, self.ran, {site.path for site in self._sites.values()}, paths)

    @property
    def here(self) -> bool:
        """Whether this thread's calls are observed now, or a forward has just ended."""
        return not torch.compiler.is_compiling() and threading.get_ident() == self._thread and not self._passes()

    def _passes(self) -> bool:
        return recomputing() and not self.repeating

    def place(self) -> WalkPlace:
        return WalkPlace(tuple(self._stack), self._calls.copy(), self._visits.copy(), self._outermost)

    @contextmanager
    def repeat(self, place: WalkPlace) -> Iterator[None]:
        """Follow the forward pass that a backward pass repeats (checkpointing), from `place` on, without counting its
        calls."""
        before = dict(vars(self))
        installed = bool(self._undo)
        if not installed:
            self.install()
        self.repeating, self._skipping, self._thread = True, False, threading.get_ident()
        self._stack, self._outermost = list(place.stack), place.outermost
        self._calls, self._visits = place.calls.copy(), place.visits.copy()
        self.observing = place.outermost is not None
        if self.observing:
            _thread.begin(self._watcher, AttentionCallsMode)
        try:
            yield
        finally:
            self._stop()
            if not installed:
                self.remove()
            vars(self).update(before)

    @property
    def hidden(self) -> bool:
        """Whether a mechanism runs whose inner attention calls are not those of the model's queries and keys."""
        return any(_hides_maps(module) for _, module in self._stack)

    def site(self, source: str) -> CallSite:
        """The place of the current call."""
        path = self.path
        self._calls[path] += 1
        order = self._calls[path]
        name = path if order == 1 else f"{path}#{order}"
        if name not in self._sites:
            self._sites[name] = CallSite(name, path, order, self._layer(path), source)
        return self._sites[name]

    def _layer(self, path: str) -> int:
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
        first = int(number[1]) if number else len({site.path for site in self._sites.values()} - {path})
        return first + max(0, self._visits[path] - 1)

    def begin(self, path: str, module: nn.Module, *_: Any) -> None:
        """Hook at the beginning of a module's forward."""
        if torch.compiler.is_compiling():
            return
        anew = module is self._model or module is self._outermost  # its end may be missing after an interrupt
        apart = self.observing and not _observers.THREAD.observers  # a call is computed that is reported as a whole
        if ((self._skipping or apart) and not anew) or self._passes():
            return
        if threading.get_ident() != self._thread:
            if self._elsewhere.setdefault(threading.get_ident(), module) is module:
                self._watcher.missed(path, ELSEWHERE)
            return
        if torch._C._get_tracing_state() is not None:
            if anew or not self._stack:
                self._watcher.missed(path, TRACED)
            return
        if anew or self._outermost is None:
            self._stop()
            self._start(module)
        if self.observing:
            self._stack.append((path, module))
            self._visits[path] += 1
            self.ran.add(path)
            if _hides_maps(module):
                self._watcher.missed(path, MECHANISM)

    def end(self, path: str, module: nn.Module, *_: Any) -> None:
        """Hook at the end of a module's forward, also after an exception."""
        if self._elsewhere and self._elsewhere.get(threading.get_ident()) is module:
            del self._elsewhere[threading.get_ident()]
        if torch.compiler.is_compiling() or (self._skipping and module is not self._outermost) or self._passes():
            return
        if threading.get_ident() != self._thread:
            return
        if module is self._outermost:
            self._stop()
        elif any(running is module for _, running in self._stack):
            while self._stack.pop()[1] is not module:
                pass

    def _start(self, module: nn.Module) -> None:
        self.observing = self.repeating or self._watcher.steps % self._every == 0
        self._skipping, self._outermost, self.inside = not self.observing, module, self._thread
        self._watcher.steps += not self.repeating
        if self._skipping:
            return
        self._calls.clear()
        self._visits.clear()
        self._watcher.observed += not self.repeating
        for path in self._scripted:
            self._watcher.missed(path, SCRIPTED)
        _thread.begin(self._watcher, AttentionCallsMode)

    def _stop(self) -> None:
        if self.observing:
            self.observing = False
            _thread.end(self._watcher)
        self._skipping, self._outermost, self.inside = False, None, None
        self._stack.clear()

    def _around(self, path: str, module: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A wrapper of a compiled module's forward, inside which nothing is watched."""

        def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling() or self._passes() or threading.get_ident() != self._thread:
                    return call(*args, **kwargs)
                self.begin(path, module)
                try:
                    if self.observing:
                        self._watcher.missed(path, COMPILED)
                    with _thread.suspended():
                        return call(*args, **kwargs)
                finally:
                    self.end(path, module)

            return run

        return wrapped


class ModuleHook(PassiveHook):
    """A hook of one module. Copies and pickles of the module get an inactive hook, because they are not watched."""

    def __init__(self, call: Callable[..., None], path: str, walk: ModuleWalk | None = None) -> None:
        self._call, self._path, self._walk = call, path, walk

    @property
    def awaits(self) -> bool:
        return self._walk is not None and self._walk.inside != threading.get_ident()

    def __call__(self, *args: Any) -> None:
        self._call(self._path, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_ignore, "")


def _ignore(*args: Any) -> None:
    pass


def recomputing() -> bool:
    """Whether a backward pass runs on this thread: a forward within it repeats a checkpointed one."""
    return torch._C._current_graph_task_id() != -1


def is_compiled(module: nn.Module) -> bool:
    """Whether the module was made by torch.compile, or its `compile()` was called."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _wrap(module: nn.Module, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Wrap the forward of a compiled module; returns a function that undoes it."""
    name = "_compiled_call_impl" if module._compiled_call_impl is not None else "forward"
    before = getattr(module, name)
    setattr(module, name, wrapped(before))
    return lambda: setattr(module, name, before)


def _hides_maps(module: nn.Module) -> bool:
    return isinstance(module, Mechanism) and not module.calls_are_maps


def _worth_following(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that may contain attention calls, and the model; without the inside of modules that hide their calls."""
    visited: set[int] = set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        own = type(module).__module__.startswith("torch.nn.modules.")
        if module is model or not own or module._modules:
            yield path, module
        if not (isinstance(module, torch.jit.ScriptModule) or is_compiled(module)):
            children = [
                (f"{path}.{name}" if path else name, child)
                for name, child in module._modules.items()
                if child is not None
            ]
            waiting.extend(reversed(children))
