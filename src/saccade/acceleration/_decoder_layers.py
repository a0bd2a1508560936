"""A layer of a decoder of transformers as one native call, for a step of one token with a cache.

The names of a layer's parts say what it might compute (`_decoder_forms.py`). It is believed after both ways have
computed the same, now and again, and computed by its modules as soon as anybody changes or hooks a part.

Shape legend: R items, E width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..interception._hooks.transformers import meaning_of
from ..operator import _observers
from ..operator._derived import Unchanged
from ..operator._native_step import (
    Block,
    Matrix,
    NotNative,
    StepBlocks,
    StepMemory,
    StepNorm,
    check_call,
    has_own_call,
    run,
)
from ..operator._products import rounds, unrounded
from . import _ahead as ahead
from ._ahead import LayerStep
from ._decoder_caches import Buffer, GrowingBuffers, SharedArguments
from ._decoder_forms import Linear, Parts, eps_of
from ._effects import CHANGES, captures, idle, same_random_numbers
from ._fused_layers import NOT_CALLED, OTHER, PROVED, REPLACED
from ._linears import PackedLinear, by_kind
from ._padded import LayerStack, PaddedLayer
from ._proof import next_proof, same, tells
from ._thread import THREAD, counted

_FREE = "position_ids", "cache_position", "use_cache"  # arguments that a layer does not compute with
_HEAD = "head_dim", "head_size"  # of most, and of those with projections by head
_CACHES = "past_key_values", "layer_past"
_TAKEN = {"attention_mask", "position_embeddings", *_CACHES, *_FREE}
_APART = 64  # steps of a layer whose step was computed ahead and not called for
_TRIALS = 3  # random inputs beside those of the call that is compared


class DecoderLayer(PaddedLayer):
    """A layer of a decoder: a step of one token by a native call, padded batches in one row."""

    kind = "decoder layer"

    def __init__(
        self,
        name: str,
        module: nn.Module,
        stack: LayerStack,
        parts: Parts,
        buffers: GrowingBuffers,
        shared: SharedArguments,
    ):
        super().__init__(name, module, stack)
        self._parts, self._buffers, self._shared = parts, buffers, shared
        self.step_state, self._steps_left = NOT_CALLED, 0
        self._read: tuple[StepBlocks, int] | None = None  # of the last native step
        self._follows = False  # whether its last step had the output and the arguments of the layer before
        self._awaited, self._alone = False, 0  # computed ahead and not called yet; steps until that is tried again
        self._cache = next((name for name in _CACHES if name in self.names), _CACHES[0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = None
        if self.step_state in (NOT_CALLED, PROVED) and not torch.compiler.is_compiling() and THREAD.held.on:
            named = dict(zip(self.names, args, strict=False)) | kwargs
            x = named.pop("hidden_states", None)
            cached = len(args) <= len(self.names) and getattr(named.get(self._cache), "layers", None)
            if cached and isinstance(x, Tensor):
                out = self._step(x, named)
        return super().__call__(*args, **kwargs) if out is None else out

    def uninstall(self) -> None:
        super().uninstall()
        self._read = None

    def _observed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.step_state == PROVED:  # of what is remembered anew steps have to be proved again
            self.step_state, self._read = NOT_CALLED, None
        return super()._observed(args, kwargs)

    def status(self) -> str:
        """The state of both ways."""
        if self.step_state == PROVED:
            return PROVED if self.state == NOT_CALLED else f"{self.state}; steps of decoding in one call"
        return super().status()

    def _step(self, x: Tensor, named: dict[str, Any]) -> Any:
        """The output, by the native step or, where that is to be proved, by the modules; None: neither."""
        try:
            with torch._C.DisableTorchFunction():  # modes that only observe would follow each function of a step
                follows = ahead.follows(x, self.stack, self.place, named)
                step, expected, self._awaited = ahead.take(x, follows, named), self._awaited, False
                observed = bool(_observers.THREAD.observers)  # whose functions may have changed the layer
                if (
                    step is not None
                    and observed == (step.used.seen is not None)
                    and not (observed and not self._stays(x))
                ):
                    return self._taken(step, x, named, follows)
                if expected:
                    self._alone = _APART
                check_call(x)
                if x.dim() != 3 or x.shape[1] != 1:
                    return None
                if self._stays(x):
                    return self._taken(self._native(x, named), x, named, follows)
                if self.module.training or self.watched() is not None:
                    return None
                if not self.structure.intact():
                    self.step_state = REPLACED
                    return None
                if self.step_state == PROVED and self._steps_left > 0 and self.structure.keeps_values():
                    self._read = self._read_anew(x)
                    return self._taken(self._native(x, named), x, named, follows)
                with _observers.aside():
                    alike = self._is_same(x, named)
        except NotNative:
            return None
        return self._settled(alike, x, named)

    def _stays(self, x: Tensor) -> bool:
        """Whether a step with x is computed natively from what the last one read."""
        return (
            self.step_state == PROVED
            and self._steps_left > 0
            and self._read is not None
            and self.outside() is None
            and not captures()
            and self.structure.keeps_lists()
            and self._read[0].serve(x)
        )

    def _taken(self, step: LayerStep, x: Tensor, named: dict[str, Any], follows: bool) -> Tensor:
        """The output of a native step, which now has happened."""
        self._steps_left -= 1
        self._alone -= self._alone > 0
        self._follows = follows and not self._alone
        self._buffers.grow(step.layer, step.buffer)
        if step.used.seen is not None:
            self._notify(step.used, named.get("attention_mask"))
        counted("native", "", False)
        if ahead.FOLLOWED not in step.out.__dict__:
            self._mark(step.out, named)
        return step.out

    def _mark(self, out: Tensor, named: dict[str, Any]) -> None:
        """Note whose output a hidden state is; that of the last layer leaves the model without."""
        if self.place + 1 < len(self.stack.layers):
            ahead.mark(out, self.stack, self.place, named)

    def _notify(self, place: StepMemory, mask: Any) -> None:
        """Notify observers of the call that transformers' attention function would report."""
        attention, held = self.module._modules[self._parts.form.attention], place.key_cache.shape[2]
        assert place.seen is not None and self._read is not None
        block = self._read[0].blocks[0]
        meaning = meaning_of(attention, place.seen[0], place.key_cache, place.value_cache, mask, scaling=block.scale)
        asked = {"mask": meaning.mask, "bias": meaning.bias, "real": meaning.real, "module": attention}
        _observers.notify_step(attention, place.observed(block, held, "transformers sdpa_attention_forward", **asked))

    def _native(self, x: Tensor, named: dict[str, Any]) -> LayerStep:
        """A step, and ahead of their calls those of the layers that have followed this one."""
        layers, places = [self], [self._place(x, named)]
        held = places[0][1].held()
        for after in self._followers(x):
            if self._buffers.ready(after._cache_layer(named)) != held:
                break
            layers.append(after)
            places.append(after._place(x, named))
        parts = [cast(tuple[StepBlocks, int], layer._read)[0] for layer in layers]
        try:
            outs = run(x, [held] * x.shape[0], parts, [place for *_, place in places])
        except NotNative:
            for layer in layers:  # one of them is the reason
                layer._alone = _APART
            raise
        steps = [LayerStep(*read, out) for read, out in zip(places, outs, strict=True)]
        for layer, step, after, next_step in zip(layers, steps, layers[1:], steps[1:], strict=False):
            ahead.mark(step.out, self.stack, layer.place, named, next_step)
            after._awaited = True
        return steps[0]

    def _followers(self, x: Tensor) -> Iterator[DecoderLayer]:
        """The layers that are computed together with this one, if their caches agree."""
        before = self
        for after in self.stack.layers[self.place + 1 :]:
            if not isinstance(after, DecoderLayer):
                return
            if after._awaited:  # and was not called
                after._awaited, after._alone = False, _APART
            bare = idle(before.module._forward_pre_hooks, before.module._forward_hooks)
            if not (bare and after._follows and not after._alone and after._stays(x)):
                return
            if before is self and not ahead.called_by_its_model():
                return
            yield after
            before = after

    def _place(self, x: Tensor, named: dict[str, Any]) -> tuple[Any, Buffer, StepMemory]:
        """Where a step reads and writes: the layer of the cache, the buffer with room, and their place."""
        if any(value is not None and value is not False and name not in _TAKEN for name, value in named.items()):
            raise NotNative("other arguments")
        layer = self._cache_layer(named)
        if layer is None:
            raise NotNative("a cache of another kind, or without tokens")
        buffer = self._buffers.room(layer)
        place = StepMemory(*buffer.with_new())
        waves, mask = named.get("position_embeddings"), named.get("attention_mask")
        if mask is not None:
            place.first = self._shared.first(mask, x.shape[0], buffer.held())
        if waves is not None:
            place.waves, place.pairs = self._shared.waves(waves), waves[0].shape[-1] // 2
        return layer, buffer, place

    def _cache_layer(self, named: dict[str, Any]) -> Any:
        """The layer of the cache that is this layer's; None if the cache has none, or a way of its own to grow."""
        cache = named[self._cache]
        known = self._read is not None and type(cache).__module__ == "transformers.cache_utils"
        return cache.layers[self._read[1]] if known and self._read[1] < len(cache.layers) else None  # type: ignore[index]

    def _read_anew(self, x: Tensor) -> tuple[StepBlocks, int]:
        """The layer as it is now, and which layer of a cache is its own."""
        if any(map(has_own_call, self.module.modules())):
            raise NotNative("a module with a call of its own")
        parts, attention = self._parts, cast(Any, self.module._modules[self._parts.form.attention])
        index, scaling, head = (
            getattr(attention, name, None) for name in ("layer_idx", "scaling", _HEAD[parts.form.by_head])
        )
        kind = getattr(getattr(attention, "config", None), "_attn_implementation", None)
        if kind != "sdpa" or getattr(attention, "attn_logit_softcapping", None) or not (head and scaling):
            raise NotNative("attention of another implementation")
        if index is None:
            raise NotNative("a layer without a place in a cache")
        output, up, down = (_matrix(linear, x) for linear in (parts.output, parts.up, parts.down))
        heads = output.shape[1] // head
        query, *others = (_matrix(linear, x, heads if parts.form.by_head else None) for linear in parts.projections)
        norms = [
            StepNorm() if norm is None else _norm(norm, module)
            for norm, module in zip(parts.norms, parts.norm_modules, strict=True)
        ]
        block = Block(
            attention_norm=norms[0],
            query=query,
            key=others[0] if others else None,
            value=others[1] if others else None,
            output=output,
            gate=None if parts.gate is None else _matrix(parts.gate, x),
            up=up,
            down=down,
            heads=heads,
            kv_heads=(others[0].shape[0] if others else (query.shape[0] - heads * head) // 2) // head,
            width=head,
            value_width=head,
            scale=float(scaling),
            activation=parts.activation,
            parallel=getattr(self.module, "use_parallel_residual", parts.form.parallel),
            after_attention=norms[1],
            feed_forward_norm=norms[2],
            after_feed_forward=norms[3],
            query_norm=norms[4],
            key_norm=norms[5],
        )
        products = [vars(part.product) for part in parts.linears() if isinstance(part, PackedLinear)]
        beside = [*self.structure.inside(), *products]
        return StepBlocks([block], StepNorm(), x, Unchanged(self.module.modules(), beside)), index

    def _settled(self, alike: bool | str, x: Tensor, named: dict[str, Any]) -> Any:
        """The layer's own output; from now on the state tells whether the native one is the same."""
        self.structure.remember_values()
        out = self.plain(hidden_states=x, **named)
        if isinstance(out, Tensor):
            self._mark(out, named)
        self._read = None  # read for the proof, from weights in floats
        if self.structure.unknown is not None or not self.structure.keeps_values():
            self.step_state = self.structure.unknown or CHANGES
        elif alike is not True:
            self.step_state = alike or OTHER
        else:
            self.step_state, self._steps_left = PROVED, next_proof()
        return out

    def _is_same(self, x: Tensor, named: dict[str, Any]) -> bool | str:
        """Whether both ways give the same for x, and at first for random inputs; or what the modules raised."""
        trials = _TRIALS if self.step_state == NOT_CALLED else 0
        generator = torch.Generator().manual_seed(0)
        size = x.float().square().mean().sqrt().clamp(1e-3, 1e3)
        drawn = [(torch.randn(x.shape, generator=generator) * size).to(x.dtype) for _ in range(trials)]
        with THREAD.held.uncounted(), same_random_numbers(), unrounded():
            try:
                return all(self._same_step(sample, named) for sample in (*drawn, x))
            except NotNative:
                raise
            except Exception as error:  # whatever it is: the model shall not notice
                return f"raises {type(error).__name__}"

    def _same_step(self, x: Tensor, named: dict[str, Any]) -> bool:
        """Whether both ways give the same output, key and value; the cache stays as it is."""
        self._read = self._read_anew(x)
        layer, buffer, place = self._place(x, named)
        (got,) = run(x, [buffer.held()] * x.shape[0], [self._read[0]], [place])
        own = _copied(named[self._cache])
        expected = self.plain(hidden_states=x, **named | {self._cache: own})
        cache = own.layers[named[self._cache].layers.index(layer)]
        key, value = buffer.with_new()
        new = ((key[:, :, -1], cache.keys[:, :, -1]), (value[:, :, -1], cache.values[:, :, -1]))
        return (
            isinstance(expected, Tensor)
            and tells(expected)
            and same(got, expected, self.longest)
            and all(same(ours.flatten(1), theirs.flatten(1), self.longest) for ours, theirs in new)
        )


def _copied(cache: Any) -> Any:
    """A copy of the cache that shares its tensors: a layer of it makes new ones when it grows."""
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied


def _norm(norm: StepNorm, module: Any) -> StepNorm:
    tensors = module._parameters
    eps = module.eps if "eps" in module.__dict__ else eps_of(module)
    return StepNorm(norm.kind, tensors.get("weight"), tensors.get("bias"), eps or 0.0, norm.plus)


def _matrix(linear: Linear, x: Tensor, heads: int | None = None) -> Matrix:
    """The weight that the layer multiplies by, rounded or not; `heads` as in `readable_weight`."""
    if not isinstance(linear, PackedLinear):
        if heads is not None:
            raise NotNative("integers of a projection by heads")
        held = cast(Any, linear)
        return Matrix(held.readable(), linear._parameters.get("bias"), memory=held.memory() if rounds() else None)
    if linear.held is not None:
        raise NotNative("its weights are dropped")
    weight, bias, x = linear.weight, linear.module._parameters.get("bias"), x.new_empty(x.shape)
    again: Callable[[], Any] = partial(linear.product.integers, weight, x)
    read = again()
    if read is not None and heads is not None:
        raise NotNative("integers of a projection by heads")
    if read is not None:
        return Matrix(read, bias, again)
    read = linear.readable_weight(x, heads)
    if heads is None or bias is None:
        return Matrix(read, bias, None if read is weight else partial(linear.readable_weight, x, heads))
    turned = by_kind(bias, heads)
    return Matrix(read, turned, lambda: torch.equal(by_kind(bias, heads), turned) and linear.readable_weight(x, heads))
