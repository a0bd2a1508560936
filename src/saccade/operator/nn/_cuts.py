"""Parameters made smaller in place: planned as values, checked as a whole, and only then done.

A model keeps its modules; a parameter is replaced by a smaller one in every module that holds it, in the optimizers,
and their state of it is cut alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class WeightSlice(NamedTuple):
    """The entries along an axis that a parameter or buffer of a module keeps."""

    module: nn.Module
    name: str
    dim: int
    kept: tuple[int, ...]


class Change(NamedTuple):
    """An attribute and its new value."""

    owner: Any
    name: str
    value: Any


class Cut(NamedTuple):
    """The changes that make one module smaller."""

    slices: list[WeightSlice]
    changes: list[Change]


class _CutTensor(NamedTuple):
    old: Tensor
    new: Tensor
    dim: int
    kept: Tensor


def linear_cut(layer: nn.Module, *, rows: Sequence[int] | None = None, columns: Sequence[int] | None = None) -> Cut:
    """The cut of a linear layer (out, in) that keeps these rows of its output, or columns of its input.

    Raises:
        ValueError: another layer, or one whose weight is no plain parameter: adapted, quantised, parametrised.
    """
    if not isinstance(layer, nn.Linear) or not _plain(layer):
        raise ValueError(
            f"a projection is a {type(layer).__module__}.{type(layer).__name__}, expected a linear layer with its own "
            "weight (out_features, in_features); merge adapters, remove parametrisations, or prune before"
        )
    slices, changes = [], []
    if rows is not None:
        slices += [WeightSlice(layer, name, 0, tuple(rows)) for name in ("weight", "bias") if _holds(layer, name)]
        changes.append(Change(layer, "out_features", len(rows)))
    if columns is not None:
        slices.append(WeightSlice(layer, "weight", 1, tuple(columns)))
        changes.append(Change(layer, "in_features", len(columns)))
    return Cut(slices, changes)


def head_rows(heads: Iterable[int], width: int) -> list[int]:
    """The rows of these heads, each `width` of them."""
    return [head * width + row for head in heads for row in range(width)]


def commit(model: nn.Module, cuts: Sequence[Cut], optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
    """Apply all cuts, or raise an error and change nothing.

    Raises:
        ValueError: a parameter that a part outside of the cuts holds too, or that two cuts would make different; hooks
            on a parameter; an optimizer's state that cannot be cut.
    """
    slices = [one for cut in cuts for one in cut.slices]
    made = list(_replacements(slices))
    _check_owners(model, slices)
    states = [_states(optimizer, made) for optimizer in optimizers]
    new = {id(one.old): one.new for one in made}
    for module, name in {(one.module, one.name): None for one in slices}:
        held = module._parameters if name in module._parameters else module._buffers
        held[name] = new[id(held[name])]  # type: ignore[assignment]
    for owner, name, value in (change for cut in cuts for change in cut.changes):
        setattr(owner, name, value)
    for optimizer, state in zip(optimizers, states, strict=True):
        _replace_in(optimizer, made, state)


def _plain(layer: nn.Linear) -> bool:
    weight = layer._parameters.get("weight")
    return weight is not None and tuple(weight.shape) == (layer.out_features, layer.in_features)


def _holds(module: nn.Module, name: str) -> bool:
    return module._parameters.get(name) is not None or module._buffers.get(name) is not None


@torch.no_grad()
def _replacements(slices: Sequence[WeightSlice]) -> Iterator[_CutTensor]:
    """Yield one smaller tensor for each tensor that is cut. A tensor that several modules share is yielded once."""
    seen: dict[int, WeightSlice] = {}
    for one in slices:
        old = getattr(one.module, one.name)
        first = seen.setdefault(id(old), one)
        if (first.dim, first.kept) != (one.dim, one.kept):
            raise ValueError(
                f"heads: {type(one.module).__name__} and {type(first.module).__name__} share {one.name}, of which they "
                "would keep different parts; remove the same heads in both"
            )
        if first is not one:
            continue
        if getattr(old, "_backward_hooks", None) or getattr(old, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"model: {one.name} of a {type(one.module).__name__} has gradient hooks, which a smaller parameter "
                "would not have; remove them first"
            )
        index = torch.tensor(one.kept, dtype=torch.int64, device=old.device)
        new: Tensor = old.index_select(one.dim, index).contiguous()
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__)
            if old.grad is not None:
                new.grad = old.grad.index_select(one.dim, index).contiguous()
        yield _CutTensor(old, new, one.dim, index)


def _check_owners(model: nn.Module, slices: Sequence[WeightSlice]) -> None:
    """ValueError if a part keeps its size, but holds a tensor that is cut."""
    cut = {(id(one.module), one.name) for one in slices}
    tensors = {id(getattr(one.module, one.name)) for one in slices}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) in tensors and (id(module), name) not in cut:
                raise ValueError(
                    f"model: {path or 'it'}.{name} is tied to a projection that would get smaller, and {path or 'it'} "
                    "keeps its size; untie it first"
                )


def _states(optimizer: torch.optim.Optimizer, made: Sequence[_CutTensor]) -> dict[int, dict[str, Any]]:
    """The optimizer's state of each replaced parameter, by the old one's id, cut as it."""
    if isinstance(optimizer, torch.optim.LBFGS) and optimizer.state:
        raise ValueError("optimizer: LBFGS has one history of all parameters, which cannot be cut; make it anew")
    found = {}
    for one in made:
        state = optimizer.state.get(one.old)
        if state is not None:
            found[id(one.old)] = {name: _cut_state(name, value, one) for name, value in state.items()}
    return found


def _cut_state(name: str, value: Any, replacement: _CutTensor) -> Any:
    """Cut one entry of an optimizer's state like its parameter. A moment has the parameter's shape, a factored moment
    (Adafactor) has size 1 along one axis, and a step count is a scalar."""
    if isinstance(value, (list, tuple, dict)):
        raise ValueError(f"optimizer: its state {name!r} is a {type(value).__name__}, which cannot be cut by heads")
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value
    sizes = tuple(replacement.old.shape)
    if value.dim() != len(sizes) or any(size not in (1, full) for size, full in zip(value.shape, sizes, strict=True)):
        raise ValueError(
            f"optimizer: its state {name!r} has shape {tuple(value.shape)}, expected {sizes}, as its parameter has, or "
            "a 1 along an axis"
        )
    return (
        value
        if value.shape[replacement.dim] == 1
        else value.index_select(replacement.dim, replacement.kept.to(value.device)).contiguous()
    )


def _replace_in(
    optimizer: torch.optim.Optimizer, made: Sequence[_CutTensor], states: dict[int, dict[str, Any]]
) -> None:
    new = {id(one.old): one.new for one in made}
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(id(parameter), parameter) for parameter in group["params"]]
    for one in made:
        if optimizer.state.pop(one.old, None) is not None:
            optimizer.state[one.new] = states[id(one.old)]
