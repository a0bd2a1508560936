"""Values of arguments that are not inputs: constants, or values made for each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...findings._finding import Undecided
from ._signature import TargetArgument

INPUTS = ("query", "key", "value", "x", "context", "key_value", "packed")
LATER = ("mask", "lengths", "flag", "cache", "use_cache")  # found by trying once it can be called


@dataclass(frozen=True)
class PositionalCall:
    """Calls the target with arguments that cannot be given by name at their places."""

    arguments: tuple[TargetArgument, ...]

    def __call__(self, target: Any, *places: Any, **keywords: Any) -> Any:
        given = list(places)
        for argument in self.arguments:
            if argument.name not in keywords:
                continue
            at = len(places) if argument.place is None else argument.place
            earlier = {other.place: other.default for other in self.arguments}
            given += [earlier.get(place) for place in range(len(given), at)]
            given.insert(at, keywords.pop(argument.name))
        return target(*given, **keywords)


@dataclass(frozen=True)
class FilledCall:
    """Calls the target with arguments that depend on the lengths of the call: `makers` by argument."""

    makers: Mapping[str, Callable[[Tensor, Any], Any]]
    entering: PositionalCall | None = None

    def __call__(self, target: Any, *places: Any, **keywords: Any) -> Any:
        first = next(tensor for tensor in (*places, *keywords.values()) if isinstance(tensor, Tensor))
        made = {name: make(first, target) for name, make in self.makers.items() if name not in keywords}
        if self.entering is not None:
            return self.entering(target, *places, **keywords, **made)
        return target(*places, **keywords, **made)


def constants(
    arguments: tuple[TargetArgument, ...], given: Mapping[str, Any], width: int, heads: int | None
) -> dict[str, Any]:
    """Keywords of every call: the user's, flags that return weights, and required arguments.

    Raises:
        Undecided: an argument that must be given and whose name says nothing.
    """
    made = {name: value for name, value in given.items() if any(argument.name == name for argument in arguments)}
    for argument in arguments:
        if argument.name in made or argument.role in INPUTS:
            continue
        if argument.role == "weights_flag" and not argument.default:
            made[argument.name] = True
        elif argument.role == "averaged" or (argument.role == "training" and argument.default):
            made[argument.name] = False
        elif argument.role == "dropout" and isinstance(argument.default, float) and argument.default > 0:
            made[argument.name] = 0.0  # that it drops unasked is told by its own check
        elif argument.required and argument.role not in (*LATER, *_MADE):
            made[argument.name] = _value(argument, width, heads)
        elif argument.required and argument.role == "flag":
            made[argument.name] = False
        elif argument.required and argument.role in ("mask", "cache", "lengths"):
            made[argument.name] = None
        elif argument.role == "use_cache" and (argument.required or argument.default is True):
            made[argument.name] = False  # what is kept of one trial is not to reach the next
    return made


def makers(arguments: tuple[TargetArgument, ...]) -> dict[str, Callable[[Tensor, Any], Any]]:
    """Functions that make arguments for each call."""
    return {
        argument.name: _MADE[argument.role] for argument in arguments if argument.role in _MADE and argument.required
    }


def by_place(arguments: tuple[TargetArgument, ...]) -> PositionalCall | None:
    """The call that gives arguments without a name by their place; None if all arguments but the inputs have names."""
    placed = tuple(argument for argument in arguments if argument.by_place and argument.role not in INPUTS)
    return PositionalCall(placed) if placed else None


def _value(argument: TargetArgument, width: int, heads: int | None) -> Any:
    head_width = width // heads if heads else width
    simple: dict[str, Any] = {
        "dropout": 0.0,
        "scale": max(head_width, 1) ** -0.5,
        "temperature": head_width**0.5,
        "training": False,
        "inference": True,
        "head_width": head_width,
        "width": width,
        "gqa": False,
        "groups": 1,
        "window": None,
        "start": 0,
        "head_mask": None,
        "heads": heads or 4,
        "kv_heads": heads or 4,
        "weights_flag": True,
    }
    if argument.role in simple:
        return simple[argument.role]
    if argument.role.startswith("matrix"):
        generator = torch.Generator().manual_seed(sum(map(ord, argument.name)))
        columns = 3 * width if argument.role == "matrix_qkv" else width
        return torch.randn(width, columns, generator=generator) * width**-0.5
    raise Undecided(
        f"the argument {argument.name!r} must be given and its name does not show what it is",
        [(f"give {argument.name} in every call", f"--arg {argument.name}=VALUE")],
    )


def _positions(first: Tensor, target: Any) -> Tensor:
    return torch.arange(first.shape[1], device=first.device)[None].expand(first.shape[0], -1)


def _angles(first: Tensor, target: Any) -> Tensor:
    """(L, D / 2) in radians: position times 10000^(-2 i / D), as in RoFormer, arXiv 2104.09864."""
    width = _head_width(first, target)
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.outer(torch.arange(first.shape[1], dtype=torch.float64), rates).to(first.device)


def _head_width(first: Tensor, target: Any) -> int:
    from . import _sizes

    if isinstance(target, nn.Module):
        named = next(_sizes._numbers(target, ("head_dim", "head_size", "d_head", "dim_head", "d_k")), None)
        heads = _sizes.heads(target)
        return named or first.shape[-1] // (heads or 1)
    return first.shape[-1]


def _cos_sin(first: Tensor, target: Any) -> tuple[Tensor, Tensor]:
    """Cosines and sines in the form of transformers: (1, L, D) each, the halves repeated."""
    angles = _angles(first, target)
    twice = torch.cat([angles, angles], -1)[None].expand(first.shape[0], -1, -1)
    return twice.cos().to(first.dtype), twice.sin().to(first.dtype)


def _freqs(first: Tensor, target: Any) -> Tensor:
    angles = _angles(first, target)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


_MADE: dict[str, Callable[[Tensor, Any], Any]] = {
    "positions": _positions,
    "cos_sin": _cos_sin,
    "cos": lambda first, target: _cos_sin(first, target)[0],
    "sin": lambda first, target: _cos_sin(first, target)[1],
    "freqs": _freqs,
}
