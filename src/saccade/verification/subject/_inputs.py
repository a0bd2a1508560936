"""Inputs of a target in one form, whatever its own: batch is axis 0, positions are axis -2 (tokens: the last).

Shape legend: B batch, H heads, Lq / Lk lengths, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Side = Literal["both", "query", "key"]
QUERY_SIDE = ("query", "x", "tokens")
KEY_SIDE = ("key", "value", "x", "context", "tokens")


@dataclass(frozen=True, eq=False)
class NamedInputs:
    """Named tensors: "query" "key" "value", or "x", or "x" "context", or "tokens".

    attention proper (B, H, L, D); modules (B, L, E); tokens (B, L).
    """

    tensors: dict[str, Tensor]
    vocabulary: int = 0

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def batch(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    @property
    def length(self) -> int:
        """Lq."""
        return self._lengths(QUERY_SIDE)

    @property
    def key_length(self) -> int:
        """Lk."""
        return self._lengths(KEY_SIDE[::-1] if "context" in self.tensors else KEY_SIDE)

    def on(self, side: Side) -> tuple[str, ...]:
        """The names of the inputs of a side, queries or keys; with a context, "x" belongs to the queries only."""
        if side == "both":
            return tuple(self.tensors)
        wanted = QUERY_SIDE if side == "query" else KEY_SIDE
        if side == "key" and "context" in self.tensors:
            return ("context",)
        return tuple(name for name in self.tensors if name in wanted)

    def map(self, change: Callable[[Tensor], Tensor], names: Sequence[str] | None = None) -> NamedInputs:
        """Inputs with `change` applied to each tensor, or to those in `names`: once to one that has several names."""
        chosen = self.tensors if names is None else names
        own = {id(tensor): tensor for name, tensor in self.tensors.items() if name in chosen}
        made = {key: change(tensor) for key, tensor in own.items()}
        return replace(self, tensors={k: made[id(v)] if k in chosen else v for k, v in self.tensors.items()})

    def changed(self, positions: Sequence[int] | slice, side: Side = "both", *, item: int | None = None) -> NamedInputs:
        """Fresh random content at `positions` of a side, of one batch item or all; every token becomes another one."""
        generator = torch.Generator().manual_seed(1)

        def change(tensor: Tensor) -> Tensor:
            new = tensor.detach().clone()
            items = slice(None) if item is None else slice(item, item + 1)
            if self.vocabulary:
                old = new[items, positions]
                # from the vocabulary without the old token, and without its first four, which may be special
                step = torch.randint(1, self.vocabulary - 4, old.shape, generator=generator)
                new[items, positions] = (old - 4 + step) % (self.vocabulary - 4) + 4
            else:
                old = new[items, ..., positions, :]
                fresh = torch.randn(old.shape, generator=generator, dtype=torch.float64)
                # twice the size, so that the change is no small one wherever it lands
                new[items, ..., positions, :] = (2 * fresh).to(new.device, new.dtype)
            return new

        return self.map(change, self.on(side))

    def cut(self, rows: slice, side: Side = "both") -> NamedInputs:
        """The inputs with only some positions of a side."""
        return self.map(lambda t: t[:, rows].contiguous() if self.vocabulary else t[..., rows, :], self.on(side))

    def items(self, chosen: Sequence[int]) -> NamedInputs:
        """The inputs with only some batch items, in this order."""
        return self.map(lambda t: t[list(chosen)])

    def permuted(self, order: Sequence[int], side: Side = "both") -> NamedInputs:
        """Positions of a side in another order."""
        return self.map(lambda t: t[:, list(order)] if self.vocabulary else t[..., list(order), :], self.on(side))

    def to(self, dtype: torch.dtype) -> NamedInputs:
        """Floating tensors in another dtype; tokens stay."""
        return self.map(lambda t: t.to(dtype) if t.is_floating_point() else t)

    def leaves(self) -> NamedInputs:
        """Copies that collect gradients."""
        return self.map(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()))

    def _lengths(self, names: Sequence[str]) -> int:
        tensor = next(self.tensors[name] for name in names if name in self.tensors)
        return tensor.shape[1] if self.vocabulary else tensor.shape[-2]
