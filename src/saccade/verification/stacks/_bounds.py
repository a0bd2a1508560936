"""The rounding of a stack, measured before anything is compared, and the bound that follows from it.

Shape legend: L length, V width of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...support._seeding import seeded
from ..findings._finding import Inapplicable, TargetError
from ..subject._shortened import size_of
from ._documents import Documents, drawn, located
from ._stack import Stack
from ._state import kept

LARGEST = 2**31  # bytes of parameters: a larger module is not cast, as a copy in float64 is needed
# Rounding differs between inputs; faults of a mask, a position or a cache are thousands of times larger.
_TIMES = 64
# Models keep norms, softmax and angles in float32 whatever their dtype, and change kernels with the shape.
_LEAST = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


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
    rounding: float  # as measured

    def compare(self, out: Tensor, reference: Tensor) -> Difference | None:
        """The difference of two outputs (L, V), None within the bound. NaN counts as infinite beside a number."""
        apart = (out.double() - reference.double()).abs().nan_to_num(nan=float("inf"))
        apart = apart.masked_fill(out.isnan() & reference.isnan(), 0.0).amax(-1)
        size = float(reference.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) or 1.0
        beyond = (apart > self.bound * size).nonzero().flatten().tolist()
        if not beyond:
            return None
        at = int(apart.argmax())
        return Difference(at, float(apart[at]), float(apart[at]) / size, tuple(beyond))


def measured(stack: Stack, *, cast: bool) -> Measure:
    """The bound for this stack: the same documents twice, in another order, and in batches of other sizes."""
    documents = drawn(stack.vocabulary, [stack.length(7)] * 3)
    with seeded(0):
        first = _outputs(stack, documents)
        dtype = torch.float64 if cast else first[0].dtype  # some models return float32 whatever they compute in
        others = [_outputs(stack, documents), _outputs(stack, documents[::-1])[::-1]]
        others.append([_outputs(stack, [document])[0] for document in documents])
    size = max(float(out.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) for out in first) or 1.0
    again, *changed = (max(_gap(out, other) / size for out, other in zip(outs, first, strict=True)) for outs in others)
    # A row that depends on its neighbours is no rounding: what other orders and sizes change counts up to a limit.
    rounding = max(again, min(max(changed), _LEAST[dtype]))
    return Measure(max(_LEAST[dtype], _TIMES * rounding), dtype, rounding)


def _outputs(stack: Stack, documents: Documents) -> list[Tensor]:
    inputs = stack.batch(documents)
    out = stack.run(inputs)
    return [out[place.row, place.columns] for place in located(inputs, documents)]


def _gap(out: Tensor, other: Tensor) -> float:
    return float((out.double() - other.double()).abs().nan_to_num(0.0, 0.0, 0.0).max())


@contextmanager
def exact(stack: Stack, *, cast: bool = True) -> Iterator[bool]:
    """Within, the stack's modules are in eval mode and, with `cast`, in float64 where that works: True then.

    The user's functions reach the modules themselves, so these are changed in place, and given back afterwards.
    """
    with ExitStack() as within:
        within.enter_context(kept(*stack.holders))
        for module in stack.modules:
            module.eval()
        sizes = sum(map(size_of, stack.modules))
        if not cast or not 0 < sizes <= LARGEST:
            yield False
            return
        with kept(*stack.holders):
            usual = _finite(stack)
        double = within.enter_context(ExitStack())
        double.enter_context(in_dtype(stack, torch.float64))
        works = _finite(stack) == usual
        if not works:
            double.close()
        yield works


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
    return finite


@contextmanager
def training(stack: Stack) -> Iterator[None]:
    """Within, the stack's modules are in train mode, and dropout and left out layers do nothing. Rates of dropout are
    as they are: some models choose another path of attention by them."""
    parts = [part for module in stack.modules for part in module.modules()]
    modes = [(part, part.training) for part in parts]
    rates = [(part, name, value) for part in parts for name, value in vars(part).items() if _leaves_out(name, value)]
    for part in parts:
        part.training = True
    for part, name, _ in rates:
        setattr(part, name, 0.0)
    try:
        with NoDropout():
            yield
    finally:
        for part, name, value in rates:
            setattr(part, name, value)
        for part, mode in modes:
            part.training = mode


def _leaves_out(name: str, value: object) -> bool:
    """Whether a module's attribute is a rate of whole layers, paths or noise, which are drawn without F.dropout."""
    plain = name.lower().replace("_", "")
    return isinstance(value, float) and any(word in plain for word in ("layerdrop", "droppath", "dropprob", "jitter"))


@contextmanager
def without_dropout(stack: Stack) -> Iterator[None]:
    """Within, the modules' rates of dropout, LayerDrop and jitter are 0, also where a checkpoint is computed again: no
    mode of functions, such as that of `training`, is active in the backward pass."""
    kept = [
        (part, name, value)
        for module in stack.modules
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, float) and (name == "p" or "drop" in name or "jitter" in name)
    ]
    for part, name, _ in kept:
        setattr(part, name, 0.0)
    try:
        yield
    finally:
        for part, name, value in kept:
            setattr(part, name, value)


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
