"""`Score`: attention scores computed by a function; and what it becomes in a call, a program or the function itself.

A modified score is no term: the logits of a tile are `apply(score, loads)`. `loads` are the entries of the captured
tensors that the tile reads, which are linear in the parameter; so a bias of this kind states them, their transpose, and
the function of score and loads, whose derivatives are PyTorch's.

Shapes of a tile: score (B, Hq, r, c); leaves b (B, 1, 1, 1), h (1, Hq, 1, 1), q (B|1, 1, r, 1), k (1, 1, 1, c), int64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._biases import PlacedBias, Placement
from .._programs._language import LEAVES, Builder, Node, Program
from .._programs._tracing import traced

Leaves = dict[str, Tensor]
Tensors = tuple[Tensor, ...]


class Score(PlacedBias):
    """A function of each attention score, after scale and softcap: FlexAttention's `score_mod`, on every device.

    Args:
        function: `function(score, b, h, q, k)` gives the new score of a pair from scalar tensors: the score, batch
            item, query head, query position and key index. Query row i stands at key index `i + Lk - Lq`, or where the
            mask or `.at` places it, so `q - k` is the distance in every call. It may read captured tensors by
            computed indices; gradients reach them. -inf hides a pair.

    The function is traced once into a program of the kernels; `explain` says what it is recognised as.

    Raises:
        TypeError: a function that cannot be called.

    Example:
        >>> import torch, saccade
        >>> slopes = torch.tensor([0.5, 0.25], requires_grad=True)
        >>> bias = saccade.Score(lambda score, b, h, q, k: score - slopes[h] * (q - k).abs())
        >>> query, key, value = torch.randn(3, 1, 2, 5, 16)
        >>> out = saccade.attention(query, key, value, saccade.Causal(), bias=bias)
        >>> alibi = saccade.attention(query, key, value, saccade.Causal(), bias=saccade.ALiBi(slopes))
        >>> torch.allclose(out, alibi, atol=1e-5)
        True
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise TypeError(f"Score: function must be callable as (score, b, h, q, k), got {type(function).__name__}")
        self.function = function
        self._argument = "Score: function"  # what errors call it
        self._traced: tuple[Program, Sequence[Tensor]] | None = None

    def _of_heads(self, numbers: Sequence[int]) -> Score:
        """The score of these heads alone, as after pruning."""
        chosen = copy.copy(self)
        if self._traced is not None:
            program, tables = self._traced
            chosen._traced = with_heads(program, len(tables)), [*tables, torch.tensor(list(numbers))]
        chosen.function = function_of_heads(self.function, numbers)
        return chosen

    def _standing(self, rows: Tensor, keys: Tensor) -> Score:
        """The score of a call whose row i stands at `rows[b, i]` and whose key j at `keys[b, j]`; int64 (1 or B, L)."""
        function = self.function

        def standing(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
            row, key = (x[0, at] if x.shape[0] == 1 else x[b, at] for x, at in ((rows, q), (keys, k)))
            return function(score, b, h, row, key)

        return Score(standing).at(0)

    def _trace(self) -> tuple[Program, Sequence[Tensor]]:
        """The program, the same object for every call, and the captured tensors as they are now.

        Raises:
            NotTraceable: the language cannot say what the function does.
        """
        return self._traced or traced(self.function, tuple(LEAVES), name=self._argument)

    @classmethod
    def _of_program(cls, program: Program, tables: Sequence[Tensor]) -> Score:
        """The score that a program with these tables computes."""
        made = cls(_no_function)
        made._traced = (program, tables)
        return made

    def __repr__(self) -> str:
        name = "a program" if self._traced is not None else getattr(self.function, "__name__", repr(self.function))
        return f"Score({name})"


def function_of_heads(function: Callable[..., Any], numbers: Sequence[int]) -> Callable[..., Any]:
    """`function` for some heads: head h of the result is head `numbers[h]` of `function`."""
    heads = torch.tensor(list(numbers))

    def chosen(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
        return function(score, b, heads[h], q, k)

    return chosen


def _no_function(*leaves: Tensor) -> Tensor:
    raise TypeError("Score: this value was made of a program and has no function")


def leaves_of(batch: tuple[int, int], heads: Tensor, rows: Tensor, keys: Tensor, placement: Placement) -> Leaves:
    """The leaves of a `Score` with the axes of a tile; `rows` and `keys` count in the whole problem."""
    placed = torch.as_tensor(placement, device=rows.device).view(-1, 1, 1, 1)
    return {
        "b": torch.arange(*batch, device=rows.device).view(-1, 1, 1, 1),
        "h": heads.view(1, -1, 1, 1),
        "q": rows.view(1, 1, -1, 1) + placed,
        "k": keys.view(1, 1, 1, -1),
    }


class ModifiedScores(PlacedBias):
    """A `Score` in a call: the logits of a tile are `apply(score, loads)`. Abstract."""

    @property
    def _may_hide(self) -> bool:
        """Whether a visible pair may get -inf by intent."""
        return True

    def _loads(self, parameter: Tensor, leaves: Leaves, visible: Tensor | None, dtype: torch.dtype) -> Tensors:
        """The parameter's entries that the tile reads, in `dtype`: linear in it. IndexError out of a table's range."""
        raise NotImplementedError

    def _pull_loads(self, cotangents: Tensors, parameter: Tensor, leaves: Leaves, visible: Tensor | None) -> Entries:
        """The transpose of `_loads`: entries of the parameter's gradient."""
        raise NotImplementedError

    def _apply(self, score: Tensor, loads: Tensors, leaves: Leaves, visible: Tensor | None) -> Tensor:
        """The new scores. Whatever score and loads hold at hidden pairs reaches nothing, derivatives included."""
        raise NotImplementedError

    def _value(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The new score of one pair, elementwise, for compilers."""
        raise NotImplementedError

    def _tile(self, *_: Any) -> Tensor:
        raise ValueError(f"bias: {self!r} modifies scores instead of adding to them, so it has no bias tensor")

    def _part(self, parameter: Tensor, rows: Tensor | None, keys: Tensor | None, heads: Tensor | None) -> Tensor:
        return parameter  # its leaves say which rows, keys and heads


@dataclass
class Entries:
    """Entries of a 1-D gradient: `values` to be added at `places`, and `whole` to all of it."""

    places: list[Tensor]
    values: list[Tensor]
    whole: list[Tensor]

    def extend(self, other: Entries) -> None:
        self.places += other.places
        self.values += other.values
        self.whole += other.whole

    def added_to(self, total: Tensor) -> Tensor:
        """One more in every run, with the same bits: PyTorch adds in order along a single axis."""
        for whole in self.whole:
            total = total + whole
        if not self.places:
            return total
        places, values = torch.cat(self.places), torch.cat(self.values).to(total.dtype)
        if not total.numel():
            return total
        places = places.clamp(max=total.numel() - 1)  # of an empty table, whose entries no visible pair reads
        if total.device.type == "cpu":
            return total.index_add(0, places, values)
        return total.index_put((places,), values, accumulate=True)  # sorted on CUDA, where index_add has no order


def with_heads(program: Program, table: int) -> Program:
    """The program in which the head index is replaced by the entry of a table at that index."""
    build = Builder()
    here: list[int] = []
    for node in program.nodes:
        args = tuple(here[arg] for arg in node.args)
        if node.op == "h":
            here.append(build.load(table, "int", build.leaf("h")))
        else:
            here.append(build.add(Node(node.op, args, node.kind, node.value)))
    return build.program(*(here[output] for output in program.outputs))
