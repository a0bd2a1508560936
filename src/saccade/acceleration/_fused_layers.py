"""Fused layers: modules of a model whose calls are computed faster.

A layer is recognised by what its module is made of, and is believed only after both ways have computed the same: from
the tensors of its first call, from numbers of all magnitudes, and again at calls that nobody can foresee. A module in
which a part is replaced is computed the plain way.

Shape legend: ... any axes, E and F widths.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as _of_all

from ..operator import _observers
from ..operator._backends.native._run import interrupted, is_plain
from ..operator._products import Joined, in_one_pass, layer_norm, unrounded
from ._effects import CHANGES, Effects, idle, same_random_numbers, shadow
from ._linears import PackedLinear, holds_rounded, is_linear
from ._methods import ReplacedMethod
from ._proof import next_proof, same, same_where_finite, samples, tells, unusual_samples
from ._structure import Structure
from ._thread import THREAD

NOT_CALLED, PROVED, OTHER = "no call for it yet", "taken", "gives something else than its structure says"
REPLACED = "a part of it was replaced inside the block"
GRADIENTS = "was called with gradients on; inference needs torch.no_grad()"
DROPOUT = "dropout is active; inference needs eval()"
ARGUMENTS = "was called with other arguments than are known"
_SILENT = "gives zeros or constants, which prove nothing"
INTERRUPTED = "was called under a compiler, a transform, a mode or autocast"
_PATCHED = "functions of PyTorch that modules call are replaced"


def _called() -> tuple[Any, ...]:
    """Functions that any module may call, and PyTorch's functions that are fused."""
    return nn.Module.__call__, nn.Module._call_impl, F.linear, F.gelu, F.relu, F.silu, F.layer_norm


_CALLED = nn.Module._wrapped_call_impl, *_called()[1:]  # the first may be replaced already


class FusedLayer(ReplacedMethod):
    """A module whose calls are computed by fused kernels.

    Attributes:
        name: of the module in its model.
        state: "no call for it yet", "taken", or why not.
        refused: of the last call that could not be taken, why; None if there was none.
        longest: terms of the longest sum that an entry of the output is.
        rounds: whether products inside are in 8 bits.
    """

    kind: ClassVar[str]
    rounds = False

    def __init__(self, name: str, module: nn.Module):
        super().__init__(module)
        self.name = name
        self.state = NOT_CALLED
        self.refused: str | None = None
        self.structure = Structure(self.parts(), is_replacement)
        self._watched = [part for part in module.modules() if part is not module]
        weights: Iterator[Any] = (part.weight for part in module.modules() if is_linear(part) or holds_rounded(part))
        self.longest = max((max(weight.shape) for weight in weights), default=1)
        self._calls_left = 0  # until it is proved again
        self._sizes: set[tuple[int, ...]] = set()  # of calls that were computed both ways

    def parts(self) -> list[nn.Module]:
        """Modules whose structure, not only their parameters, decides the output."""
        return list(self.module.modules())[1:]

    def status(self) -> str:
        """The state; if no call could be accelerated, the reason."""
        return self.refused or self.state if self.state == NOT_CALLED else self.state

    def _refuse(self, reason: str | None) -> None:
        if self.active and not torch.compiler.is_compiling():  # a graph would carry the assignment
            self.refused = reason

    def _accept(self, out: Any, expected: Any) -> bool:
        """Whether both computations agree on a call; the state records it."""
        first = expected[0] if isinstance(expected, tuple) else expected
        if not same(out, first, self.longest):
            self.state = OTHER
            return False
        if self.state != PROVED and not tells(first):
            self._refuse(_SILENT)
            return False
        return True

    def _observed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The original output of an observed call; the module's state is remembered, unless the call changes it."""
        self.structure.remember_values()
        effects = Effects(self.module, (*args, *kwargs.values()))
        expected = self.plain(*args, **kwargs)
        self._refuse(None)  # of an earlier call
        if self.structure.unknown is not None:
            self.state = self.structure.unknown
        elif effects.seen() or not self.structure.keeps_values():
            self.state = CHANGES
        return expected

    def _copy(self) -> Callable[..., Any]:
        """The original method of a copy, for calls that the model itself does not make."""
        copied = shadow(self.module, keep=lambda forward: isinstance(forward, FusedLinear))
        method: Callable[..., Any] = MethodType(getattr(type(copied), self.method), copied)
        return method

    def _settle(self, *size: int) -> None:
        self.state, self._calls_left, self._sizes = PROVED, next_proof(), set()
        self._new_size(*size)

    def _new_size(self, *size: int) -> bool:
        """Whether a call of this size, within a factor of two, is not proved yet; size 1 needs a separate proof."""
        rounded = tuple(map(int.bit_length, size))
        known = rounded in self._sizes
        self._sizes.add(rounded)
        return not known

    def _due(self) -> bool:
        """Whether this call repeats the proof; never while observers or edits are active, or roundings are measured."""
        if THREAD.held.measuring:
            return False
        self._calls_left -= 1
        return self._calls_left < 0 and (
            self.state == NOT_CALLED or not (_observers.THREAD.observers or _observers.THREAD.editor)
        )

    def _again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The original method, for a call that is counted already."""
        with THREAD.held.uncounted(), same_random_numbers():
            return self.plain(*args, **kwargs)

    def _prove_again(self, out: Any, expected: Any, new: bool = False) -> Any:
        """Repeat the proof on this call and return its output; `new` if it is the first call of its size."""
        first = expected[0] if isinstance(expected, tuple) else expected
        if same(out, first, self.longest):
            self._calls_left = next_proof()
            return out
        self.state = OTHER
        if new:
            return first
        warnings.warn(
            f"saccade.accelerate(): {self.name or 'the model'} ({self.kind}) gives something else than when it was "
            "proved. It is computed the plain way from now on; outputs since then may be wrong",
            RuntimeWarning,
            stacklevel=3,
        )
        return first

    def _why_not(self, args: tuple[Any, ...]) -> str | None:
        """The reason why a call with these arguments cannot be fused; None if it can."""
        if torch.is_grad_enabled():
            return GRADIENTS
        if interrupted():
            return INTERRUPTED
        return self.watched() if all(map(is_plain, args)) else "was called with what is no plain tensor on a CPU"

    def watched(self) -> str | None:
        """The reason to run the original module: hooks, dropout in training and the like; None if there is none."""
        outside = self.outside()
        if outside is not None:
            return outside
        for part in self._watched:
            before, after = part._forward_pre_hooks, part._forward_hooks
            if (before or after) and not idle(before, after):
                return "a forward hook is set inside"
            if isinstance(part, nn.Dropout) and part.training and part.p:
                return DROPOUT
        return None

    def outside(self) -> str | None:
        """A reason to run the original module that lies outside of it; None if there is none."""
        if not self.active:
            return "the block is over"
        if _of_all._global_forward_hooks or _of_all._global_forward_pre_hooks:
            return "forward hooks for all modules are set"
        return _PATCHED if _called() != _CALLED else None


def is_replacement(forward: Any) -> bool:
    """Whether acceleration put this method in place of a module's own."""
    return isinstance(forward, FusedLayer) and forward.active


class ProvedLayer(FusedLayer):
    """A module whose arguments and result are tensors, computed in fewer passes over memory."""

    @abstractmethod
    def compute(self, *args: Any) -> Tensor | None:
        """The module's output; None for arguments that are not supported."""

    def parts(self) -> list[nn.Module]:
        return list(self.module.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.state not in (NOT_CALLED, PROVED):
            return self.plain(*args, **kwargs)
        refused = ARGUMENTS if kwargs else self._why_not(args)
        if refused is None and not self.structure.intact():
            refused = self.state = REPLACED
        if refused is not None:
            self._refuse(refused)
            return self.plain(*args, **kwargs)
        if self.state == PROVED and not self.structure.keeps_values():
            self.state, self._calls_left = NOT_CALLED, 0
        if self.state == NOT_CALLED:
            return self._prove(args) if self._due() else self.plain(*args)
        out = self.compute(*args)
        if out is None:
            return self.plain(*args)
        new = self._new_size(*args[0].shape[:-1])
        if not (self._due() or new):
            return out
        if not self.rounds:
            return self._prove_again(out, self._again(args, {}), new)
        with unrounded():
            exact = self.compute(*args)
            proved = self._prove_again(exact, self._again(args, {}), new)
        return out if proved is exact else self._again(args, {})

    def _prove(self, args: tuple[Any, ...]) -> Any:
        """Compute the call both ways and return the original output. A layer that fails is not fused any more."""
        expected = self._observed(args, {})
        if self.state != NOT_CALLED:
            return expected
        try:
            with same_random_numbers(), unrounded():
                exact = self._again(args, {}) if self.rounds else expected
                if self._agrees(args, exact):
                    self._settle(*args[0].shape[:-1])
            if self.refused == _SILENT:
                self._calls_left = next_proof()
        except Exception as error:  # whatever it is: the model shall not notice
            self.state = f"raises {type(error).__name__}"
        return expected

    def _agrees(self, args: tuple[Tensor, ...], expected: Any) -> bool:
        out = self.compute(*args)
        if out is None or any(x.dim() < 2 for x in args):
            self._refuse(self.refused or ARGUMENTS)
            return False
        if not self._accept(out, expected):
            return False
        plain = self._copy()
        effects = Effects(plain)
        if not all(self._accept(self.compute(*sample), plain(*sample)) for sample in samples(args)):
            return False
        for sample in unusual_samples(args):
            if not same_where_finite(self.compute(*sample), plain(*sample), self.longest):
                self.state = OTHER
                return False
        if effects.seen():
            self.state = CHANGES
        return self.state == NOT_CALLED


class FusedLinear(FusedLayer):
    """Computes x W^T + b with a packed copy of W."""

    kind = "linear"

    def __init__(self, name: str, module: nn.Module, linear: PackedLinear):
        super().__init__(name, module)
        self.linear, self._forward = linear, type(module).forward
        self.beside: Callable[[Tensor], Tensor | None] | None = None  # its part of a joint product

    def uncopied(self) -> str | None:
        dropped = f"{self.name or 'model'}: its weight was dropped (keep_weights=False); leave the block to copy it"
        return None if self.linear.held is None else dropped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer without a proof: its class is known. A call that records gradients uses the packed product,
        too."""
        if not self.active:
            return self.plain(*args, **kwargs)
        linear, weight = self.linear, self.linear.weight
        known = len(args) == 1 and not kwargs and is_plain(args[0]) and args[0].dtype == weight.dtype
        known = known and type(self.module).forward is self._forward and F.linear is _CALLED[2]
        grad = torch.is_grad_enabled()
        if not known or grad or interrupted():
            if linear.held is not None:
                raise RuntimeError(
                    f"{self.name}: its weight was dropped (keep_weights=False), so only plain calls without gradients "
                    "are possible (torch.no_grad()); leave the block for others"
                )
            self._refuse(GRADIENTS if grad else INTERRUPTED if interrupted() else ARGUMENTS)
            return linear.product(args[0], weight, linear.bias) if known else self.plain(*args, **kwargs)
        self.state = PROVED
        out = None if self.beside is None or linear.held is not None else self.beside(args[0])
        return linear(args[0]) if out is None else out


class Activated(ProvedLayer):
    """f(x W^T + b)."""

    kind = "linear and activation"

    def __init__(self, name: str, module: nn.Module, linear: PackedLinear, activation: str):
        super().__init__(name, module)
        self.linear, self.activation = linear, activation

    def compute(self, *args: Any) -> Tensor | None:
        return self.linear(args[0], self.activation) if len(args) == 1 else None


class Residual(ProvedLayer):
    """norm(x W^T + b + y) or x W^T + b + y."""

    kind = "linear, sum and norm"

    def __init__(self, name: str, module: nn.Module, linear: PackedLinear, norm: nn.Module | None):
        super().__init__(name, module)
        self.linear, self.norm = linear, norm

    def compute(self, *args: Any) -> Tensor | None:
        if len(args) != 2 or args[1].shape != (*args[0].shape[:-1], self.linear.weight.shape[0]):
            return None
        if args[1].dtype != args[0].dtype:
            return None
        norm = layer_norm(self.norm)
        joined: Joined = "add", args[1]
        out = None if norm is None else in_one_pass([self.linear], args[0], None, joined, norm)
        if out is not None:
            return out
        out = self.linear(args[0], joined=joined)
        return out if self.norm is None else self.norm(out)


class FusedFeedForward(ProvedLayer):
    """f(x W1^T + b1) W2^T + b2."""

    kind = "feed-forward"

    def __init__(self, name: str, module: nn.Module, up: PackedLinear, down: PackedLinear, activation: str):
        super().__init__(name, module)
        self.up, self.down, self.activation = up, down, activation

    def compute(self, *args: Any) -> Tensor | None:
        if len(args) != 1:
            return None
        out = in_one_pass([self.up, self.down], args[0], self.activation)
        return self.down(self.up(args[0], self.activation)) if out is None else out


class TorchFeedForward(FusedFeedForward):
    """The feed-forward method of `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`."""

    kind, method = "feed-forward", "_ff_block"

    def parts(self) -> list[nn.Module]:
        names = "linear1", "linear2", "activation", "dropout", "dropout2", "dropout3"
        return [self.module, *(part for name, part in self.module.named_children() if name in names)]


class Gated(ProvedLayer):
    """(f(x Wg^T) * (x Wu^T)) Wd^T, with the layers' biases, if any."""

    kind = "gated feed-forward"

    def __init__(
        self, name: str, module: nn.Module, gate: PackedLinear, up: PackedLinear, down: PackedLinear, activation: str
    ):
        super().__init__(name, module)
        self.gate, self.up, self.down, self.activation = gate, up, down, activation

    def compute(self, *args: Any) -> Tensor | None:
        if len(args) != 1:
            return None
        return self.down(self.up(args[0], joined=("mul", self.gate(args[0], self.activation))))
