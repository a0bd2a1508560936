"""The rounding of a stack, measured before anything is compared, and the bound that follows from it.

Shape legend: L length, V width of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ...support._restored import seeded
from ..findings._finding import Inapplicable, TargetError
from ._documents import Documents, drawn, exchanged
from ._stack import Stack
from ._state import attributes, kept

LARGEST = 2**33  # bytes of parameters in a wider dtype: a copy of more is not made
# Rounding differs between inputs; faults of a mask, a position or a cache are thousands of times larger.
_TIMES = 64
# In half precision they are not: there the bound is a few times what one unit in each layer's output changes.
_TIMES_HALF = 4
# Models keep norms, softmax and angles in float32 whatever their dtype, and change kernels with the shape.
_LEAST = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}

# Servers compute in half precision, and round in other ways with each size of a batch.
_SERVED, _SERVED_NOISE = 1e-3, 5e-3


class Difference(NamedTuple):
    """The largest difference of two outputs (L, V)."""

    position: int
    size: float
    relative: float  # to the largest output
    differing: tuple[int, ...]  # the positions beyond the bound


@dataclass(frozen=True)
class Measure:
    """The smallest difference that counts: more than `bound` times the largest output."""

    bound: float
    dtype: torch.dtype
    effect: float = float("inf")  # of another token on outputs that are not its own
    least: float = 0.0  # of the size of outputs: small log probabilities come from logits that are not

    @property
    def hides(self) -> str:
        """Why faults may be within the bound, "" where they cannot: most are as large as the effect of a token."""
        if self.bound <= self.effect / 2:
            return ""
        wide = self.dtype in (torch.float64, torch.float32)
        cause = "noise" if wide else f"rounding in {str(self.dtype).removeprefix('torch.')}"
        return f"{cause} may hide faults: up to {self.bound:.2g}, and a token's effect is {self.effect:.2g}"

    def compare(self, out: Tensor, reference: Tensor) -> Difference | None:
        """The difference of two outputs (L, V), None within the bound. NaN counts as infinite beside a number."""
        apart = (out.double() - reference.double()).abs().nan_to_num(nan=float("inf"))
        apart = apart.masked_fill(out.isnan() & reference.isnan(), 0.0).amax(-1)
        size = max(float(reference.double().nan_to_num(0.0, 0.0, 0.0).abs().max()), self.least) or 1.0
        bound = max(self.bound, _least(out.dtype), _least(reference.dtype))  # code beside PyTorch has its own dtype
        beyond = (apart > bound * size).nonzero().flatten().tolist()
        if not beyond:
            return None
        at = int(apart.argmax())
        return Difference(at, float(apart[at]), float(apart[at]) / size, tuple(beyond))


def _least(dtype: torch.dtype) -> float:
    return _LEAST.get(dtype, _LEAST[torch.bfloat16])


def measured(stack: Stack) -> Measure:
    """The bound for this stack: the same documents twice, in another order, and in batches of other sizes; in half
    precision, also with each layer's output one unit larger or smaller."""
    documents = drawn(stack.vocabulary, [stack.length(7)] * 3)
    if stack.is_served:
        return _measured_served(stack, documents)
    with seeded(0):
        first = stack.outputs(documents)
        dtype = _dtype(stack, first[0])
        others = [stack.outputs(documents), stack.outputs(documents[::-1])[::-1]]
        others.append([stack.outputs([document])[0] for document in documents])
    again, *changed = (largest_gap(first, outs) for outs in others)
    # A row that depends on its neighbours is no rounding: what other orders and sizes change counts up to a limit.
    rounding = max(again, min(max(changed), _least(dtype)))
    if dtype in (torch.float64, torch.float32) and _TIMES * rounding <= _least(dtype):
        return Measure(_least(dtype), dtype)
    times = _TIMES
    if dtype not in (torch.float64, torch.float32):
        times = _TIMES_HALF
        with seeded(0), _shaken(stack):
            rounding = max(rounding, largest_gap(first, stack.outputs(documents)))
    [other] = stack.outputs([exchanged(documents[0], stack.vocabulary, 2, 3)])
    kept_rows = [at for at in range(len(documents[0])) if at != 2]
    effect = largest_gap([first[0][kept_rows]], [other[kept_rows]])
    return Measure(max(_least(dtype), times * rounding), dtype, effect)


def _measured_served(stack: Stack, documents: Documents) -> Measure:
    first, again = ([stack.outputs([document])[0] for document in documents] for _ in range(2))
    rounding = largest_gap(first, again)
    with suppress(TargetError):  # which the probe of batches meets again
        rounding = max(rounding, min(largest_gap(first, stack.outputs(documents)), _SERVED_NOISE))
    return Measure(max(_SERVED, 8 * rounding), first[0].dtype, least=8.0)


def served_alike(measure: Measure, out: Tensor, reference: Tensor) -> bool:
    """Whether two answers (R, L, 1) of a server to one request differ by rounding alone."""
    return replace(measure, bound=8 * _SERVED_NOISE).compare(out.flatten(0, 1), reference.flatten(0, 1)) is None


def _dtype(stack: Stack, out: Tensor) -> torch.dtype:
    """The dtype with the largest unit among parameters and output; some return float32 whatever they compute in."""
    used = {own.dtype for module in stack.modules for own in module.parameters() if own.is_floating_point()}
    used |= {out.dtype} if not used or _least(out.dtype) > _least(torch.float32) else set()
    return max(used, key=_least)


@contextmanager
def _shaken(stack: Stack) -> Iterator[None]:
    """Within, each output of an innermost module is one unit of its dtype larger or smaller."""
    generator = torch.Generator().manual_seed(0)

    def shake(tensor: Tensor) -> Tensor:
        signs = torch.randint(2, tensor.shape, generator=generator).to(tensor) * 2 - 1
        return tensor * (1 + torch.finfo(tensor.dtype).eps * signs) if tensor.is_floating_point() else tensor

    inner = [part for module in stack.modules for part in module.modules() if not any(part.children())]
    with ExitStack() as hooks:
        for part in inner:
            hooks.enter_context(part.register_forward_hook(lambda _, __, out: tree_map_only(Tensor, shake, out)))
        yield


def largest_gap(outs: list[Tensor], others: list[Tensor]) -> float:
    """The largest difference, relative to the largest output."""
    size = max(float(out.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) for out in outs) or 1.0
    gaps = [
        (out.double() - other.double()).abs().nan_to_num(0.0, 0.0, 0.0) for out, other in zip(outs, others, strict=True)
    ]
    return max(float(gap.max()) for gap in gaps) / size


@contextmanager
def exact(stack: Stack, *, cast: bool = True) -> Iterator[None]:
    """Within, the stack's modules are in eval mode and, with `cast`, in float64, or at least float32, where that works.

    The user's functions reach the modules themselves, so these are changed in place, and given back afterwards.
    """
    with ExitStack() as within:
        within.enter_context(kept(*stack.holders))
        for module in stack.modules:
            module.eval()
        _draw_zeros(stack)
        wider = [dtype for dtype in (torch.float64, torch.float32) if cast and _can_be(stack, dtype)]
        if wider:
            with kept(*stack.holders):
                usual = _finite(stack)
        for dtype in wider:
            change = within.enter_context(ExitStack())
            change.enter_context(in_dtype(stack, dtype))
            if _finite(stack) == usual:
                break
            change.close()
        yield


def _draw_zeros(stack: Stack) -> None:
    """Draw the weights that are all 0: projections and gates that begin so hide everything before them."""
    for _, weight in stack.zeros():
        generator = torch.Generator().manual_seed(weight.numel())
        drawn = torch.randn(weight.shape, generator=generator) / max(weight.shape[-1:].numel(), 1) ** 0.5
        weight.data = drawn.to(weight)


def _can_be(stack: Stack, dtype: torch.dtype) -> bool:
    """Whether a parameter has a smaller dtype, and a copy of all in this one is not too large."""
    parameters = [own for module in stack.modules for own in module.parameters() if own.is_floating_point()]
    needed = sum(own.numel() for own in parameters) * dtype.itemsize
    return needed <= LARGEST and any(own.dtype.itemsize < dtype.itemsize for own in parameters)


@contextmanager
def in_dtype(stack: Stack, dtype: torch.dtype) -> Iterator[None]:
    """Within, the stack's parameters and buffers of floating-point numbers have this dtype."""
    with kept(*stack.holders):
        _change(stack, lambda tensor: tensor.to(dtype))
        yield


@contextmanager
def nudged(stack: Stack, unit: float) -> Iterator[None]:
    """Within, each parameter is `unit` times itself larger or smaller: its rounding in a dtype of this unit."""
    generator = torch.Generator().manual_seed(0)

    def moved(tensor: Tensor) -> Tensor:
        signs = torch.randint(2, tensor.shape, generator=generator).to(tensor) * 2 - 1
        return tensor * (1 + unit * signs)

    with kept(*stack.holders):
        _change(stack, moved)
        yield


def _change(stack: Stack, change: Callable[[Tensor], Tensor]) -> None:
    tensors = {id(tensor): tensor for module in stack.modules for tensor in (*module.parameters(), *module.buffers())}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.data = change(tensor.data)


def _finite(stack: Stack) -> list[list[bool] | None]:
    """Which outputs of a padded batch, and of a pack, are finite; None for what raises.

    Some models mask with the least number of float64, which is -inf in the float32 of their softmax.
    """
    documents = drawn(stack.vocabulary, [stack.length(length) for length in (5, 11, 2, 7)])
    documents = documents if stack.takes_padding else [documents[3]] * 2
    finite: list[list[bool] | None] = []
    for make in (stack.batch, stack.pack):
        try:
            finite.append(None if make is None else stack.run(make(documents)).isfinite().all(-1).flatten().tolist())
        except (Inapplicable, TargetError):
            finite.append(None)
    return finite + (_finite(stack.second) if stack.second is not None else [])


@contextmanager
def training(stack: Stack) -> Iterator[None]:
    """Within, the stack's modules are in train mode, and dropout and left out layers do nothing. Rates of dropout are
    as they are: some models choose another path of attention by them."""
    parts = [part for module in stack.modules for part in module.modules()]
    rates = [(part, name, 0.0) for part in parts for name, value in vars(part).items() if _leaves_out(name, value)]
    with attributes([*((part, "training", True) for part in parts), *rates]), NoDropout():
        yield


def evaluating(stack: Stack) -> AbstractContextManager[None]:
    """Within, the stack's modules are in eval mode."""
    return attributes((part, "training", False) for module in stack.modules for part in module.modules())


def mixed_by(stack: Stack) -> str:
    """The module that normalises by the mean of the batch in train mode, "" if there is none: each output then depends
    on all tokens by design."""
    named = (item for module in stack.modules for item in module.named_modules())
    return next((f"{name} ({type(part).__name__})" for name, part in named if isinstance(part, _BatchNorm)), "")


def _leaves_out(name: str, value: object) -> bool:
    """Whether a module's attribute is a rate of whole layers, paths or noise, which are drawn without F.dropout."""
    plain = name.lower().replace("_", "")
    return isinstance(value, float) and any(word in plain for word in ("layerdrop", "droppath", "dropprob", "jitter"))


def without_dropout(stack: Stack) -> AbstractContextManager[None]:
    """Within, the modules' rates of dropout, LayerDrop and jitter are 0, also where a checkpoint is computed again: no
    mode of functions, such as that of `training`, is active in the backward pass."""
    return attributes(
        (part, name, 0.0)
        for module in stack.modules
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, float) and (name == "p" or "drop" in name or "jitter" in name)
    )


_DROPOUT = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
}


class NoDropout(TorchFunctionMode):
    """Calls of dropout give their input, and attention drops no weight."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        if func is functional.multi_head_attention_forward:
            kwargs = {**kwargs, "training": False}  # it has no other use
        return func(*args, **kwargs)
