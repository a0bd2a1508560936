"""A decoder's step of one token as one native call: the computation of its modules, read from them.

Shape legend: R items, E width.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from operator import is_
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from .. import _observers
from .._derived import Unchanged
from .._masks import Causal
from .._native_step import Block, Matrix, NotNative, StepBlocks, StepMemory, StepNorm, check_bare, check_call, run
from .._products import rounds
from ..positions import Rotary
from ..positions.rotary import StoredRotary
from ._linear import Linear
from ._rounded import RoundedLinear
from .attention import MultiHeadAttention
from .blocks import DecoderBlock
from .cache import GrowingLayer, KVCache
from .cache.fitting import in_order
from .cache.new_rows import NewRows
from .config import GATED
from .feed_forward import FeedForward
from .masking import joined
from .norm import RMSNorm

_FORWARDS: dict[type[nn.Module], Any] = {
    kind: kind.forward
    for kind in (
        *(DecoderBlock, MultiHeadAttention, FeedForward, Linear, RoundedLinear, RMSNorm, Rotary, StoredRotary),
        *(nn.LayerNorm, nn.Identity, nn.Dropout),
    )
}


class _Read(NamedTuple):
    """The blocks of a decoder as its last native step has read them, and the positions of each."""

    children: tuple[Any, ...]
    blocks: StepBlocks
    positions: list[nn.Module | None]


_KNOWN: WeakKeyDictionary[nn.Module, _Read] = WeakKeyDictionary()  # which holds the parts of a decoder, and not itself


def native_step(x: Tensor, cache: KVCache, decoder: Any) -> Tensor | None:
    """x (R, 1, E), which continues the tokens in the cache, through the causal blocks of a `Decoder` and its last norm;
    None if these have to be called."""
    try:
        with torch._C.DisableTorchFunction():  # modes that only observe would follow each function of a step
            check_call(x)
            return _step(x, cache, decoder)
    except NotNative:
        return None


def _step(x: Tensor, cache: KVCache, decoder: Any) -> Tensor:
    layers: list[GrowingLayer] = []
    for layer in cache.layers:
        if type(layer) is not GrowingLayer or layer._key is None or layer._key.shape[0] != x.shape[0]:
            raise NotNative("a cache of another kind, or without tokens")
        layers.append(layer)
    before = layers[0].lengths()
    if any(layer.lengths().tobytes() != before.tobytes() for layer in layers[1:]):
        raise NotNative("the layers' lengths differ")
    held = [int(n) + 1 for n in before] * (x.shape[0] if before.size == 1 else 1)
    known = _KNOWN.get(decoder)
    if known is None or not _same(known.children, decoder) or not known.blocks.serve(x):
        known = _read(decoder, x)
    offset, most = layers[0].offset(1), max(held)
    waves = {positions: _waves(positions, x, offset) for positions in {*known.positions} if positions is not None}
    places = [StepMemory(*layer.room(most)) for layer in layers]
    for place, positions in zip(places, known.positions, strict=True):
        if positions is not None:
            place.waves, place.pairs = waves[positions]
    (out,) = run(x, held, [known.blocks], places)
    if _observers.THREAD.observers:
        _notify(decoder.blocks, known.blocks.blocks, places, before)
    _KNOWN[decoder] = known
    for layer in layers:
        layer.grow()
    return out


def _read(decoder: Any, x: Tensor) -> _Read:
    last, layers = _norm(decoder.norm, x), decoder._layers()
    blocks = [_block(block, positions, x) for block, positions in layers]
    modules = [module for module in decoder.modules() if module is not decoder]
    products = (getattr(module, "product", None) for module in modules)
    unchanged = Unchanged(modules, [vars(product) for product in products if product is not None])
    return _Read(_children(decoder), StepBlocks(blocks, last, x, unchanged), [positions for _, positions in layers])


def _children(decoder: nn.Module) -> tuple[Any, ...]:
    return *decoder._modules, *decoder._modules.values()


def _same(children: tuple[Any, ...], decoder: nn.Module) -> bool:
    now = _children(decoder)
    return len(now) == len(children) and all(map(is_, now, children))


def _notify(modules: Iterable[nn.Module], blocks: list[Block], places: list[StepMemory], before: np.ndarray) -> None:
    """Notify observers of each block's call, with the mask that its cache would give."""
    masks: dict[Any, Any] = {}
    held = int(before.max()) + 1
    for module, block, place in zip(modules, blocks, places, strict=True):
        attention = cast(DecoderBlock, module).attention
        window = attention.config.window
        if window not in masks:
            items = place.key_cache.shape[0]
            masks[window] = in_order(joined(Causal(), window), before, NewRows.of(None, 1), held, items)
        _observers.notify_step(attention, place.observed(block, held, "saccade.attention", mask=masks[window]))


def _block(block: nn.Module, positions: nn.Module | None, x: Tensor) -> Block:
    children, config = _bare(block, DecoderBlock), cast(DecoderBlock, block).config
    attention, feed_forward = children["attention"], cast(DecoderBlock, block).feed_forward
    if config.placement == "post" or config.cross is not None or not _idle(children["dropout"]):
        raise NotNative("norms after the layers, cross-attention or dropout")
    parts = _bare(attention, MultiHeadAttention)
    options, sizes = attention.config, attention.shape
    window = 0 if options.window is None or options.window.left is None else options.window.left + 1
    if not sizes.fused or options.mechanism is not None or not attention.sizes[1] or attention.gate is not None:
        raise NotNative("attention with a mechanism, a gate or projections of its own")
    if attention.positions is not None or (options.dropout and attention.training):
        raise NotNative("positions of a layer alone, or dropout")
    made = Block(
        attention_norm=_norm(children["attention_norm"], x),
        query=_matrix(parts["projection"], x),
        output=_matrix(parts["output"], x),
        heads=attention.sizes[0] // sizes.head,
        kv_heads=attention.sizes[1] // sizes.head,
        width=sizes.head,
        value_width=sizes.value_head,
        scale=sizes.head**-0.5 if options.scale is None else float(options.scale),
        query_norm=_norm(parts["query_norm"], x),
        key_norm=_norm(parts["key_norm"], x),
        parallel=config.placement == "parallel",
        window=window,
        sink=attention.sink,
        softcap=float(options.softcap or 0.0),
    )
    if attention.sizes[2] != made.kv_heads * made.value_width:
        raise NotNative("keys and values of different heads")
    if positions is not None:
        if not isinstance(positions, Rotary) or type(positions) not in _FORWARDS:
            raise NotNative("positions other than rotary ones")
        _bare(positions, type(positions))
        made.interleaved = positions.layout == "interleaved"
    if feed_forward is not None:
        inside = _bare(feed_forward, FeedForward)
        if not _idle(inside["dropout"]):
            raise NotNative("dropout")
        gated = feed_forward.gated
        made.feed_forward_norm = StepNorm() if made.parallel else _norm(children["feed_forward_norm"], x)
        made.up, made.down = _matrix(inside["gate_up" if gated else "up"], x), _matrix(inside["down"], x)
        made.activation = GATED[feed_forward.activation] if gated else feed_forward.activation
    return made


def _waves(positions: nn.Module, x: Tensor, offset: Any) -> tuple[tuple[Tensor, Tensor], int]:
    rotary = cast(Rotary, positions)
    cos, sin = (wave.flatten(0, -2).float().contiguous() for wave in rotary.waves(x, offset))
    return (cos, sin), rotary.turned // 2


def _bare(module: nn.Module, kind: type[nn.Module]) -> dict[str, Any]:
    return check_bare(module, kind, _FORWARDS[kind])


def _idle(dropout: nn.Module) -> bool:
    """Whether a dropout layer returns what it gets."""
    _bare(dropout, nn.Dropout)
    return not (dropout.training and dropout.p)


def _matrix(layer: nn.Module, x: Tensor) -> Matrix:
    if type(layer) is RoundedLinear:
        _bare(layer, RoundedLinear)
        return Matrix(layer.readable(), layer._parameters.get("bias"), memory=layer.memory() if rounds() else None)
    _bare(layer, Linear)
    tensors, product = layer._parameters, cast(Linear, layer).product
    if product.users:
        raise NotNative("packed weights promise the same bits for one row and for many")
    weight = tensors.get("weight")
    if weight is None:
        raise NotNative("a weight that is no parameter")
    again = partial(product.integers, weight, x.new_empty(x.shape))
    rounded = again()
    return Matrix(rounded or weight, tensors.get("bias"), None if rounded is None else again)


def _norm(module: nn.Module, x: Tensor) -> StepNorm:
    kind = type(module)
    if kind not in (RMSNorm, nn.LayerNorm, nn.Identity):
        raise NotNative(f"a norm of the kind {kind.__name__}")
    _bare(module, kind)
    if kind is nn.Identity:
        return StepNorm()
    tensors: Any = module._parameters
    eps: Any = module.eps
    if eps is None and x.dtype is not torch.float32:
        raise NotNative("a norm without eps")
    return StepNorm(
        1 if kind is RMSNorm else 2,
        tensors.get("weight"),
        tensors.get("bias"),
        torch.finfo(torch.float32).eps if eps is None else eps,
    )
