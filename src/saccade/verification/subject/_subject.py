"""The target with one way to be called, whatever its own way is. Every check uses it.

Shape legend: B batch, H heads, Lq / Lk lengths, D / Dv head widths, E model width. Masks are boolean, True = attend.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..findings._finding import Inapplicable, Unmeasured
from ._calling import CallRequest, call
from ._inputs import NamedInputs
from ._reading import Promise, Reading, own_part


@dataclass(frozen=True, eq=False)
class CallResult:
    """The result of a call. attention proper: out (B, H, Lq, Dv); modules: (B, Lq, E)."""

    out: Tensor
    weights: Tensor | None = None  # (B, H, Lq, Lk) as returned, where weights are; H = 1 if they are averaged
    returned: Any = None  # all that the target returned, as it came


@dataclass(frozen=True, eq=False)
class Subject:
    """A target, its reading, and its author's promises. It is in eval mode unless a check changes the mode."""

    target: Any
    reading: Reading
    promise: Promise = field(default_factory=Promise)
    flagged: bool | None = None  # what the causal flag is given, where there is one
    again: Callable[[], nn.Module] | None = None  # makes another of its class, with other random numbers
    measured: dict[str, Any] = field(default_factory=dict, init=False)  # what `_influence` has found already

    @property
    def module(self) -> nn.Module | None:
        return self.target if isinstance(self.target, nn.Module) else None

    @property
    def form(self) -> str:
        return self.reading.form

    def inputs(
        self,
        batch: int = 2,
        length: int = 7,
        key_length: int | None = None,
        *,
        seed: int = 0,
        spread: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> NamedInputs:
        """Random normal inputs of standard deviation `spread`, in the target's dtype and on its device; of
        `Reading.only_length` positions where it takes no other length.

        Form "qkv" gives three different tensors; `one_sequence` makes them the same one, as self-attention does.

        Raises:
            Inapplicable: a key length of its own for form "self" or "tokens".
        """
        reading, key_length = self.reading, key_length or length
        if reading.only_length is not None:
            length = key_length = reading.only_length
        generator = torch.Generator().manual_seed(seed)
        if reading.form in ("self", "tokens") and key_length != length:
            raise Inapplicable("queries and keys are of one sequence")
        if reading.form == "tokens":
            low = min(4, reading.vocabulary - 1)  # the first few may be special
            tokens = torch.randint(low, reading.vocabulary, (batch, length), generator=generator)
            return NamedInputs({"tokens": tokens.to(self.device)}, reading.vocabulary)
        drawn = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).mul(spread)
            for name, shape in self._shapes(batch, length, key_length).items()
        }
        return NamedInputs({name: tensor.to(self.device, dtype or self.dtype) for name, tensor in drawn.items()})

    def __call__(
        self, inputs: NamedInputs, *, pairs: Tensor | None = None, padding: Tensor | None = None
    ) -> CallResult:
        """Call the target. `pairs` (Lq, Lk) or (B, H or 1, Lq, Lk) and `padding` (B, Lk): True = attend / is real.

        Raises:
            Inapplicable: the target takes no mask that can say this.
            TargetError: the target raised.
        """
        first = next(iter(inputs.tensors.values()))
        reading = self.reading
        if self.module is None and not inputs.vocabulary:
            # A function has no parameters that say a dtype: what it is given in every call goes with its inputs.
            reading = _as(reading, first.dtype, first.device)
        return CallResult(*call(self.target, reading, CallRequest(inputs, pairs, padding, self.flagged)))

    def takes(self, axes: str) -> bool:
        """Whether the target accepts a mask that varies along these axes ("B", "H", "Q"): "Q" is needed for a causal
        mask, "B" for padding."""
        return any(all(letter in mask.axes for letter in axes) for mask in self.reading.masks)

    def masks(self, inputs: NamedInputs) -> Iterator[dict[str, Tensor]]:
        """A causal mask, and padding of the first item, each where the target takes such a mask."""
        if self.takes("Q"):
            yield {"pairs": torch.ones(inputs.length, inputs.key_length, dtype=torch.bool).tril()}
        if self.takes("B"):
            padding = torch.ones(inputs.batch, inputs.key_length, dtype=torch.bool)
            padding[0, -3:] = False
            yield {"padding": padding}

    @cached_property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self._parameters() if p.is_floating_point()), torch.float32)

    @cached_property
    def device(self) -> torch.device:
        return next((p.device for p in self._parameters()), torch.device("cpu"))

    @contextmanager
    def training(self) -> Iterator[None]:
        """Train mode within."""
        if self.module is None:
            yield
            return
        modes = {name: module.training for name, module in self.module.named_modules()}
        self.module.train()
        try:
            yield
        finally:
            for name, module in self.module.named_modules():
                module.training = modes.get(name, False)

    def fresh(self) -> Subject:
        """A copy that may be changed: dtype, training steps, hooks. Functions are not copied."""
        return replace(self, target=_copied(self.module) if self.module is not None else self.target)

    def remade(self) -> Subject | None:
        """Another instance of the class, with other random numbers; None if it is unknown how the target was made."""
        if self.again is None:
            return None
        made = self.again()
        return replace(self, target=made.eval()) if type(made) is type(self.target) else None

    def to(self, dtype: torch.dtype | None = None, device: str | None = None) -> Subject:
        """A copy whose parameters, and tensors that are given in every call, have another dtype or device."""
        new = self.fresh()
        if new.module is not None:
            new.module.to(device, dtype)
        return replace(new, reading=_as(new.reading, dtype, device))

    def with_constants(self, **more: Any) -> Subject:
        """The subject called with further arguments."""
        constants = {**self.reading.constants, **more}
        return replace(self, reading=replace(self.reading, constants=constants))

    def with_flag(self, value: bool) -> Subject:
        """The subject called with its causal flag.

        Raises:
            Inapplicable: it has none.
        """
        if self.reading.causal_flag is None:
            raise Inapplicable("it has no causal flag")
        return replace(self, flagged=value, promise=replace(self.promise, causal=value))

    def with_and_without_flag(self) -> list[Subject]:
        """The subject; then, if it has a causal flag that is not set yet, the subject with the flag set."""
        has_flag = self.reading.causal_flag is not None and self.flagged is None
        return [self, self.with_flag(True)] if has_flag else [self]

    def one_sequence(self, inputs: NamedInputs) -> NamedInputs:
        """Self-attention of form "qkv": the query tensor is key and value, too. Other forms are unchanged, and so are
        keys or values of another width."""
        if self.form != "qkv" or len({tensor.shape[-1] for tensor in inputs.tensors.values()}) > 1:
            return inputs
        return replace(inputs, tensors=dict.fromkeys(inputs.tensors, inputs["query"]))

    @cached_property
    def own_part(self) -> Subject | None:
        """For form "cross": the attention over the queries' own sequence, with the context filled in; None without
        masks for it.

        Of form "self", with `Reading.own_masks` as its masks.
        """
        return replace(self, reading=own_part(self.reading)) if self.reading.own_masks else None

    def _parameters(self) -> Iterator[Tensor]:
        return iter(()) if self.module is None else iter([*self.module.parameters(), *self.module.buffers()])

    def _shapes(self, batch: int, length: int, key_length: int) -> dict[str, tuple[int, ...]]:
        reading = self.reading
        if reading.form == "self":
            return {"x": (batch, length, reading.width)}
        other = reading.context_width or reading.width
        if reading.form == "cross":
            return {"x": (batch, length, reading.width), "context": (batch, key_length, other)}
        if reading.form == "qkv":
            values = (key_length, reading.value_width or other)
            sides = {"query": (length, reading.width), "key": (key_length, other), "value": values}
            return {name: (batch, *shape) for name, shape in sides.items()}
        heads = reading.heads or 1
        kv_heads = reading.kv_heads or heads
        return {
            "query": (batch, heads, length, reading.width),
            "key": (batch, kv_heads, key_length, reading.width),
            "value": (batch, kv_heads, key_length, reading.value_width or reading.width),
        }


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copied(module)
    except Exception as error:  # what a target's own __deepcopy__ may raise is not known
        raise Unmeasured(f"it cannot be copied ({type(error).__name__}: {error})") from error


def _as(reading: Reading, dtype: torch.dtype | None, device: torch.device | str | None) -> Reading:
    """The reading with its floating-point constants of a dtype, and all its tensors on a device."""
    if not any(isinstance(tensor, Tensor) for tensor in reading.constants.values()):
        return reading
    constants = {
        name: tensor.to(device, dtype if tensor.is_floating_point() else None) if isinstance(tensor, Tensor) else tensor
        for name, tensor in reading.constants.items()
    }
    return replace(reading, constants=constants)


_PLAIN = (bool, int, float, str, type(None))


def copied(module: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """A copy, in which `shared` tensors are the module's own.

    What a module keeps with a graph (the weights of its last call, say) is copied without it.

    A function that a module keeps, and that reaches the module's parts as its variables, reaches the copy's:
    `copy.deepcopy` leaves functions as they are, and the copy would compute with parts of the original.
    """
    kept = [value for part in module.modules() for value in vars(part).values() if type(value) not in _PLAIN]
    # Most of a module is hooks that it does not have: copying those one by one takes longer than copying the rest.
    empty = [item for item in kept if type(item) in (dict, OrderedDict) and not item]
    memo: dict[int, Any] = {id(item): type(item)() for item in empty}
    held = tree_leaves([item for item in kept if id(item) not in memo])
    memo |= {
        id(tensor): tensor.detach().clone() for tensor in held if isinstance(tensor, Tensor) and not tensor.is_leaf
    }
    memo |= {id(tensor): tensor for tensor in shared}
    new = copy.deepcopy(module, memo)
    for part in new.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, FunctionType) and any(_kept(cell, memo) for cell in value.__closure__ or ()):
                object.__setattr__(part, name, _rebound(value, memo))
    return new


def _kept(cell: CellType, memo: dict[int, Any]) -> bool:
    """Whether a variable of a function holds a module or tensor that was copied."""
    try:
        value = cell.cell_contents
    except ValueError:  # it is not bound
        return False
    return isinstance(value, (nn.Module, Tensor)) and id(value) in memo


def _rebound(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """The function with the copies in place of its modules and tensors."""
    cells = tuple(
        CellType(memo[id(cell.cell_contents)]) if _kept(cell, memo) else cell for cell in function.__closure__ or ()
    )
    new = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    new.__kwdefaults__ = function.__kwdefaults__
    return new
