"""A `Score` whose function cannot be traced: it runs by vmap over the visible pairs of each tile."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ._score import Entries, Leaves, ModifiedScores, Tensors, function_of_heads


class FunctionBias(ModifiedScores):
    """Scores changed by a function as it is. `parameter` is 1-D: the captured tensors that it learns, flattened.

    Args:
        captured: floating-point tensors that the function reaches.
        reason: why it cannot be traced.
    """

    def __init__(
        self, function: Callable[..., Any], captured: Sequence[Tensor], reason: str, like: Tensor, dtype: torch.dtype
    ) -> None:
        self.function, self.reason = function, reason
        self.captured = [tensor for tensor in captured if tensor.is_floating_point()]
        flat = [tensor.to(like.device, dtype).reshape(-1) for tensor in self.captured]
        self.parameter = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=like.device)

    def _of_heads(self, numbers: Sequence[int]) -> FunctionBias:
        chosen = copy.copy(self)
        chosen.function = function_of_heads(self.function, numbers)
        return chosen

    def _loads(self, parameter: Tensor, leaves: Leaves, visible: Tensor | None, dtype: torch.dtype) -> Tensors:
        return (parameter.to(dtype),)

    def _pull_loads(self, cotangents: Tensors, parameter: Tensor, leaves: Leaves, visible: Tensor | None) -> Entries:
        return Entries([], [], list(cotangents))

    def _apply(self, score: Tensor, loads: Tensors, leaves: Leaves, visible: Tensor | None) -> Tensor:
        pairs = torch.arange(score.numel(), device=score.device)
        if visible is not None:
            pairs = visible.expand(score.shape).flatten().nonzero()[:, 0]
        if not len(pairs):
            return torch.zeros_like(score)
        given = [leaves[name].expand(score.shape).reshape(-1)[pairs] for name in ("b", "h", "q", "k")]
        new = self._run(score.reshape(-1).index_select(0, pairs), given, loads[0])
        return torch.zeros_like(score).reshape(-1).index_add(0, pairs, new).view(score.shape)

    def _value(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        new: Tensor = self.function(score, b, h, q, k)
        return new

    def check(self, like: Tensor) -> None:
        """Run the function on one pair.

        Raises:
            RuntimeError: torch.vmap cannot run it. TypeError, ValueError: it does not return one float.
        """
        zero = torch.zeros(1, dtype=torch.int64, device=like.device)
        with contextlib.suppress(IndexError):  # this pair may be hidden
            self._run(zero.to(self.parameter.dtype), [zero] * 4, self.parameter)

    def _run(self, score: Tensor, indices: list[Tensor], parameter: Tensor) -> Tensor:
        """The new scores (n,) of n pairs."""
        sizes = [tensor.numel() for tensor in self.captured]
        values = [part.view(one.shape) for part, one in zip(parameter.split(sizes), self.captured, strict=True)]
        try:
            with _Replaced(self.captured, values):
                new = torch.vmap(self.function)(score, *indices)
        except IndexError as error:
            raise IndexError(f"Score: {error}") from error
        except RuntimeError as error:
            random = self.reason.startswith("random numbers")
            fix = (
                "draw them before the call and capture the tensor, or use dropout="
                if random
                else ("write it with operations of PyTorch, such as torch.where instead of `if`")
            )
            raise RuntimeError(
                f"Score: the function cannot be traced ({self.reason}), and torch.vmap cannot run it either; {fix}"
            ) from error
        if not isinstance(new, Tensor) or not new.is_floating_point():
            came = new.dtype if isinstance(new, Tensor) else type(new).__name__
            raise TypeError(f"Score: the function must return a floating-point tensor, got {came}")
        if new.shape != score.shape:
            raise ValueError(f"Score: the function must return one number, got shape {tuple(new.shape[1:])}")
        return new.to(score.dtype)

    def __repr__(self) -> str:
        return f"Score(a function run by vmap, not traced: {self.reason})"


class _Replaced(TorchFunctionMode):
    """Operations on captured tensors read `values` in their place, so that these have their derivatives."""

    def __init__(self, captured: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        super().__init__()
        self.values = {id(tensor): value for tensor, value in zip(captured, values, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def value(tensor: Tensor) -> Tensor:
            known = self.values.get(id(tensor))
            if known is not None:
                return known
            ordinary = not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            if ordinary and tensor.is_leaf and tensor.requires_grad:
                raise ValueError(
                    f"Score: the function reads a tensor {tuple(tensor.shape)} that requires a gradient and is out of "
                    "sight; capture it by a closure, or as an attribute"
                )
            return tensor

        args, kwargs = tree_map_only(Tensor, value, (args, kwargs or {}))
        return func(*args, **kwargs)
