"""The tensors of a few rows in one run of a model made of Saccade's blocks.

Shape legend: L tokens, R recorded rows, E model width, V vocabulary, Hq / Hkv query and key-value heads, Dv value width
of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...interception._hooks import hooked
from ...operator._call import ObservedCall
from ...operator.nn.blocks import EncoderBlock
from ...operator.nn.stacks import Stack
from ...support._evaluating import evaluating
from ..inspection import weights_of
from ..inspection._models import LayerObserver
from ._steps import Step, exact


class Embedding(NamedTuple):
    """The modules that turn token ids into the input of the first block.

    Attributes:
        tokens: the token embedding.
        places: adds positions (`Learned`, `Sinusoidal`) or is their embedding; None if no positions are added.
        kind: (E,) the embedding of the token type that all tokens have; None without types.
        norm, project: a norm and a linear layer after the sum.
    """

    tokens: nn.Embedding
    places: nn.Module | None = None
    kind: Tensor | None = None
    norm: nn.Module | None = None
    project: nn.Linear | None = None


class Vocabulary(NamedTuple):
    """The modules that turn the stack's output into logits: `weight f(x) + bias`.

    Attributes:
        weight, bias: (V, .) and (V,) or None.
        logits: computes them as the model does, (1, E) to (1, V), in its dtype.
        steps: f as steps, at x (E,) in float64.
        fixed: the factors of f that are held fixed.
    """

    weight: Tensor
    bias: Tensor | None
    logits: Callable[[Tensor], Tensor]
    steps: Callable[[Tensor], list[Step]] = lambda x: []
    fixed: tuple[str, ...] = ()


class ResidualModel(NamedTuple):
    """A model whose residual stream is that of a stack of Saccade's blocks.

    Attributes:
        run: reads ids (1, L), and calls an observer with every attention call of the stack.
        vocabulary: None without a language-modelling head; `no_logits` is the reason.
    """

    module: nn.Module
    stack: Stack
    embedding: Embedding
    run: Callable[[Tensor, LayerObserver], object]
    vocabulary: Vocabulary | None
    no_logits: str = ""

    @property
    def blocks(self) -> list[EncoderBlock]:
        return list(self.stack.blocks)  # type: ignore[arg-type]  # a stack holds nothing else

    @property
    def heads(self) -> tuple[int, ...]:
        """The number of query heads of each layer."""
        return tuple(block.attention.config.heads for block in self.blocks)


class Sources(NamedTuple):
    """The weights and values of one layer's heads, for one row."""

    weights: Tensor  # (Hq, L), float64
    values: Tensor  # (Hkv, L, Dv), in the model's dtype


@dataclass(frozen=True)
class Recorded:
    """Inputs and outputs of modules at some rows, (R, width) by module in float64; sources by layer."""

    rows: tuple[int, ...]
    read: dict[nn.Module, Tensor] = field(default_factory=dict)
    gave: dict[nn.Module, Tensor] = field(default_factory=dict)
    sources: dict[int, Sources] = field(default_factory=dict)


class _Enough(Exception):
    """Everything has been recorded."""


def record(
    model: ResidualModel,
    ids: Tensor,
    rows: tuple[int, ...],
    *,
    until: int | None = None,
    observe: LayerObserver | None = None,
    sources: bool = False,
) -> Recorded:
    """Read ids (1, L) and keep these rows of everything that writes into the residual stream. Computes no logits.

    Args:
        until: the layer whose attention ends the run; None is the end of the stack.
        observe: is also called with each attention call.
        sources: whether to keep the weights of the first row, and all values.
    """
    recorded = Recorded(rows)

    def tell(layer: int, call: ObservedCall) -> None:
        if observe is not None:
            observe(layer, call)
        if sources:
            weights = weights_of(call, rows=[rows[0]])[0, :, 0]
            recorded.sources[layer] = Sources(exact(weights), call.value[0].detach().clone())
        if layer == until:
            raise _Enough

    device = next(model.module.parameters()).device
    with evaluating(model.module), torch.no_grad(), _recording(model, recorded), suppress(_Enough):
        model.run(ids.to(device), tell)
    return recorded


@contextmanager
def _recording(model: ResidualModel, record: Recorded) -> Iterator[None]:
    """Keep the rows, and end the run after the stack: logits of a long text would fill memory."""
    rows = list(record.rows)

    def reads(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        record.read[module] = exact(given[0][0, rows])

    def gives(module: nn.Module, out: Tensor) -> None:
        record.gave[module] = exact(out[0, rows])
        if module is model.stack:
            raise _Enough

    with hooked(_read(model), before=reads), hooked(_given(model), after=gives):
        yield


def _read(model: ResidualModel) -> Iterator[nn.Module]:
    """The modules whose input is recorded."""
    places, norm = model.embedding.places, model.embedding.norm
    yield from (part for part in (places, norm) if part is not None and not isinstance(part, nn.Embedding))
    yield model.stack.norm
    for block in model.blocks:
        yield from (block, block.attention, block.attention.output, block.attention_norm)
        if block.feed_forward is not None and block.config.placement != "parallel":
            yield block.feed_forward_norm


def _given(model: ResidualModel) -> Iterator[nn.Module]:
    """The modules whose output is recorded."""
    yield model.stack
    if model.embedding.places is not None:
        yield model.embedding.places
    for block in model.blocks:
        yield from (part for part in (block.feed_forward, block.attention.gate) if part is not None)
