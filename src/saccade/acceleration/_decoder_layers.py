"""A layer of a decoder of transformers as one native call, for a step of one token with a cache.

Known are layers of self-attention with rotary positions and a gated feed-forward layer, their norms first (Llama,
Mistral, Qwen, Gemma and those built alike). What a layer is made of says what it might compute; it is believed after
both ways have computed the same, now and again, and computed by its modules as soon as anybody changes or hooks a part.

Shape legend: R items, E width, Hkv key-value heads, K keys, D width of a head.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..operator._native_step import ACTIVATIONS, Block, Matrix, Norm, NotNative, check_call, run
from ..operator._products import unrounded
from ._effects import CHANGES, same_random_numbers
from ._fused_layers import NOT_CALLED, OTHER, PROVED, REPLACED
from ._linears import PackedLinear, activation_of, is_linear
from ._padded import LayerStack, PaddedLayer
from ._proof import next_proof, same, tells
from ._structure import has_own_forward
from ._thread import THREAD, counted

_ATTENTION, _FEED_FORWARD = "self_attn", "mlp"
_PROJECTIONS, _HEAD_NORMS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_norm", "k_norm")
_MLP = "gate_proj", "up_proj", "down_proj"
_NORMS = (
    ("input_layernorm", "post_attention_layernorm"),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_FREE = "position_ids", "cache_position", "use_cache"  # arguments that a layer does not compute with
_TRIALS = 3  # random inputs beside those of the call that is compared


class Parts(NamedTuple):
    """The parts of a layer, and the numbers by which they are put together."""

    linears: tuple[PackedLinear, ...]  # query, key, value, output, gate, up, down
    norms: tuple[nn.Module, ...]  # as in `_NORMS`
    head_norms: tuple[nn.Module, ...]
    activation: str
    plus: tuple[float, ...]  # of the norms, then of the heads' norms: what is added to their weights


def parts_of(layer: nn.Module, linears: dict[nn.Module, PackedLinear]) -> Parts | None:
    """The parts of a layer that may be computed natively; None for any other module."""
    children = layer._modules
    attention, feed_forward = children.get(_ATTENTION), children.get(_FEED_FORWARD)
    names = next((names for names in _NORMS if {*names, _ATTENTION, _FEED_FORWARD} == set(children)), None)
    if (
        names is None
        or attention is None
        or feed_forward is None
        or not type(layer).__module__.startswith("transformers.")
    ):
        return None
    head_norms = tuple(name for name in _HEAD_NORMS if name in attention._modules)
    functions = [name for name in feed_forward._modules if name not in _MLP]
    own = (layer, attention, feed_forward)
    if (
        set(attention._modules) != {*_PROJECTIONS, *head_norms}
        or len(head_norms) == 1
        or not {*_MLP} <= set(feed_forward._modules)
        or len(functions) != 1
        or any(module._parameters or module._buffers for module in own)
    ):
        return None
    found = [attention._modules[name] for name in _PROJECTIONS] + [feed_forward._modules[name] for name in _MLP]
    activation = activation_of(feed_forward._modules[functions[0]])
    norms = tuple(children[name] for name in names)
    inside = tuple(attention._modules[name] for name in head_norms)
    plus = [_plus(norm) for norm in (*norms, *inside)]
    parts = [part for part in found if part is not None and is_linear(part)]
    if activation not in ACTIVATIONS or len(parts) < len(found) or None in plus:
        return None
    packed = tuple(linears.get(part) or PackedLinear(part, None) for part in parts)
    if any(linear.turned for linear in packed):
        return None
    return Parts(packed, norms, inside, activation, tuple(plus))  # type: ignore[arg-type]


def _plus(norm: Any) -> float | None:
    """0 or 1 for an RMS norm that multiplies by its weight or by 1 + weight; None for another module."""
    weight, eps = getattr(norm, "weight", None), _eps(norm)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None or len(list(norm.parameters())) != 1:
        return None
    x = torch.randn(1, 1, len(weight), generator=torch.Generator().manual_seed(0))
    if has_own_forward(norm):
        return None
    try:
        with torch.no_grad():
            got = type(norm).forward(norm, x.to(weight.dtype)).float()
    except Exception:  # whatever it is, it is no norm
        return None
    if got.shape != x.shape:
        return None
    expected = [torch.rms_norm(x, weight.shape, weight.detach().float() + plus, eps) for plus in (0.0, 1.0)]
    errors = [float((got - one).abs().max()) for one in expected]
    near = 8 * torch.finfo(weight.dtype).eps * float(got.abs().max())
    return float(errors.index(min(errors))) if min(errors) <= near else None


def _eps(norm: Any) -> float | None:
    found = [getattr(norm, name, None) for name in ("variance_epsilon", "eps", "epsilon")]
    return next((eps for eps in found if isinstance(eps, float)), None)


class GrowingBuffers:
    """Keys and values of the cache layers of transformers, in buffers with room for the tokens to come.

    A layer of transformers' cache makes new tensors at each token. Here it gets views of a buffer, which is used again
    only while the layer still holds the very views that it was given: whatever else is put there is copied first.
    """

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[Any, _Buffer] = weakref.WeakKeyDictionary()

    def room(self, layer: Any) -> _Buffer:
        """A buffer that holds the layer's keys and values, and has room for one more token.

        Raises:
            NotNative: for a layer of another kind, and for an empty one.
        """
        kind = type(layer)
        sliding = kind.__name__ == "DynamicSlidingWindowLayer"
        if kind.__module__ != "transformers.cache_utils" or not (sliding or kind.__name__ == "DynamicLayer"):
            raise NotNative("a cache of another kind")
        if not layer.is_initialized or layer.keys.dim() != 4 or (sliding and layer.record_past):
            raise NotNative("a cache without tokens, or one that keeps what is behind its window")
        known = self._held.get(layer)
        if known is not None and known.keys is layer.keys and known.values is layer.values and known.stop < known.size:
            return known
        return _Buffer(layer.keys, layer.values, layer.sliding_window - 1 if sliding else None)

    def grow(self, layer: Any, buffer: _Buffer) -> None:
        """Give the layer the token that was written into its buffer."""
        buffer.grow(layer)
        self._held[layer] = buffer


class _Buffer:
    """Tokens `start` to `stop` of two buffers (R, Hkv, size, D) are those of the layer."""

    def __init__(self, keys: Tensor, values: Tensor, most: int | None):
        self.start, self.stop, self.most = 0, keys.shape[2], most
        self.size = 2 * self.stop + 16
        self._whole = tuple(_grown(tensor, self.size) for tensor in (keys, values))
        self.keys, self.values = keys, values

    def with_new(self) -> tuple[Tensor, Tensor]:
        """Views (R, Hkv, K + 1, D) of all tokens and the next one's slot."""
        key, value = (whole[:, :, self.start : self.stop + 1] for whole in self._whole)
        return key, value

    def grow(self, layer: Any) -> None:
        """Give the layer the new token."""
        self.stop += 1
        if self.most is not None:
            self.start = max(self.start, self.stop - self.most)
            layer.cumulative_length += 1
        self.keys, self.values = (whole[:, :, self.start : self.stop] for whole in self._whole)
        layer.keys, layer.values = self.keys, self.values


def _grown(tensor: Tensor, size: int) -> Tensor:
    batch, heads, length, width = tensor.shape
    whole = tensor.new_empty(batch, heads, size, width)
    whole[:, :, :length] = tensor
    return whole


class SharedMask:
    """The first key that each item sees, by the mask that all layers of a step are given."""

    def __init__(self) -> None:
        self._known: tuple[Tensor, int, Tensor] | None = None

    def first(self, mask: Tensor, items: int, keys: int) -> Tensor:
        """int64 (R,).

        Raises:
            NotNative: if the mask shows anything but a last run of the keys.
        """
        known = self._known
        if known is None or known[0] is not mask or known[1] != mask._version:
            if mask.dtype is not torch.bool or mask.dim() != 4 or mask.shape[1:3] != (1, 1):
                raise NotNative("a mask of another form")
            seen = mask[:, 0, 0]
            first = seen.shape[1] - seen.sum(1)
            whole = seen == (torch.arange(seen.shape[1]) >= first[:, None])
            if not bool(whole.all()) or not bool(seen[:, -1].all()):
                raise NotNative("a mask that hides more than first keys")
            self._known = known = mask, mask._version, first.expand(items).contiguous()
        if mask.shape[3] != keys or len(known[2]) != items:
            raise NotNative("a mask of other keys")
        return known[2]


class DecoderLayer(PaddedLayer):
    """A layer of a decoder: a step of one token by a native call, padded batches in one row."""

    kind = "decoder layer"

    def __init__(
        self, name: str, module: nn.Module, stack: LayerStack, parts: Parts, buffers: GrowingBuffers, mask: SharedMask
    ):
        super().__init__(name, module, stack)
        self._parts, self._buffers, self._mask = parts, buffers, mask
        self.step_state, self._steps_left = NOT_CALLED, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = None
        if self.step_state in (NOT_CALLED, PROVED) and not torch.compiler.is_compiling() and THREAD.held.on:
            x = args[0] if args else kwargs.get("hidden_states")
            cached = getattr(kwargs.get("past_key_values"), "layers", None) and kwargs.get("position_embeddings")
            if cached and isinstance(x, Tensor) and x.dim() == 3 and x.shape[1] == 1 and len(args) < 2:
                out = self._step(x, args, kwargs)
        return super().__call__(*args, **kwargs) if out is None else out

    def status(self) -> str:
        """The state of both ways."""
        if self.step_state == PROVED:
            return PROVED if self.state == NOT_CALLED else f"{self.state}; steps of decoding in one call"
        return super().status()

    def _step(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output, by the native step or, where that is to be proved, by the modules; None: neither."""
        try:
            check_call(x)
            if self.watched() is not None:
                return None
            if not self.structure.intact():
                self.step_state = REPLACED
                return None
            self._steps_left -= 1
            if self.step_state == PROVED and self._steps_left >= 0 and self.structure.keeps_values():
                layer, buffer, out = self._native(x, kwargs)
                self._buffers.grow(layer, buffer)
                counted("native", "", False)
                return out
            alike = self._is_same(x, args, kwargs)
        except NotNative:
            return None
        return self._settled(alike, args, kwargs)

    def _native(self, x: Tensor, kwargs: dict[str, Any]) -> tuple[Any, _Buffer, Tensor]:
        if any(value is not None and value is not False and name not in _TAKEN for name, value in kwargs.items()):
            raise NotNative("other arguments")
        parts, attention = self._parts, self.module._modules[_ATTENTION]
        assert attention is not None
        if attention.config._attn_implementation != "sdpa" or getattr(attention, "attn_logit_softcapping", None):  # type: ignore[union-attr]
            raise NotNative("attention of another implementation")
        layer = kwargs["past_key_values"].layers[attention.layer_idx]
        buffer = self._buffers.room(layer)
        key, value = buffer.with_new()
        cos, sin = kwargs["position_embeddings"]
        mask, head = kwargs.get("attention_mask"), int(attention.head_dim)  # type: ignore[arg-type]
        norms = [_norm(norm, plus) for norm, plus in zip((*parts.norms, *parts.head_norms), parts.plus, strict=True)]
        query, key_matrix, values, output, gate, up, down = (_matrix(linear, x) for linear in parts.linears)
        count = len(parts.norms)
        block = Block(
            attention_norm=norms[0],
            query=query,
            key=key_matrix,
            value=values,
            output=output,
            gate=gate,
            up=up,
            down=down,
            heads=query.weight.shape[0] // head,
            kv_heads=key_matrix.weight.shape[0] // head,
            width=head,
            value_width=head,
            scale=float(attention.scaling),  # type: ignore[arg-type]
            key_cache=key,
            value_cache=value,
            activation=parts.activation,
            waves=(cos.flatten(0, -2), sin.flatten(0, -2)),
            pairs=cos.shape[-1] // 2,
            first=None if mask is None else self._mask.first(mask, x.shape[0], key.shape[2]),
        )
        if parts.head_norms:
            block.query_norm, block.key_norm = norms[count:]
        if count == 2:
            block.feed_forward_norm = norms[1]
        else:
            block.after_attention, block.feed_forward_norm, block.after_feed_forward = norms[1:count]
        return layer, buffer, run(x, [key.shape[2]] * x.shape[0], [block], Norm())

    def _settled(self, alike: bool | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's own output; from now on the state tells whether the native one is the same."""
        self.structure.remember_values()
        out = self.plain(*args, **kwargs)
        if self.structure.unknown is not None or not self.structure.keeps_values():
            self.step_state = self.structure.unknown or CHANGES
        elif alike is not True:
            self.step_state = alike or OTHER
        else:
            self.step_state, self._steps_left = PROVED, next_proof()
        return out

    def _is_same(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | str:
        """Whether both ways give the same for x and for random inputs, or what the modules raised."""
        generator = torch.Generator().manual_seed(0)
        size = x.float().square().mean().sqrt().clamp(1e-3, 1e3)
        drawn = [(torch.randn(x.shape, generator=generator) * size).to(x.dtype) for _ in range(_TRIALS)]
        with THREAD.held.uncounted(), same_random_numbers(), unrounded():
            try:
                return all(self._same_step(sample, args, kwargs) for sample in (*drawn, x))
            except NotNative:
                raise
            except Exception as error:  # whatever it is: the model shall not notice
                return f"raises {type(error).__name__}"

    def _same_step(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether both ways give the same output, key and value; the cache stays as it is."""
        layer, buffer, got = self._native(x, kwargs)
        own = kwargs | {"past_key_values": _copied(kwargs)}
        expected = self.plain(x, **own) if args else self.plain(**own | {"hidden_states": x})
        cache = own["past_key_values"].layers[kwargs["past_key_values"].layers.index(layer)]
        key, value = buffer.with_new()
        new = ((key[:, :, -1], cache.keys[:, :, -1]), (value[:, :, -1], cache.values[:, :, -1]))
        return (
            isinstance(expected, Tensor)
            and tells(expected)
            and same(got, expected, self.longest)
            and all(same(ours.flatten(1), theirs.flatten(1), self.longest) for ours, theirs in new)
        )


_TAKEN = {"hidden_states", "attention_mask", "past_key_values", "position_embeddings", *_FREE}


def _copied(kwargs: dict[str, Any]) -> Any:
    """A copy of the cache that shares its tensors: a layer of it makes new ones when it grows."""
    cache = copy.copy(kwargs["past_key_values"])
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    return cache


def _norm(module: nn.Module, plus: float) -> Norm:
    return Norm(1, module.weight, None, _eps(module) or 0.0, plus)  # type: ignore[arg-type]


def _matrix(linear: PackedLinear, x: Tensor) -> Matrix:
    """The weight that the layer multiplies by, rounded or not."""
    if linear.held is not None:
        raise NotNative("its weights are dropped")
    weight, bias = linear.module._parameters["weight"], linear.module._parameters["bias"]
    assert weight is not None
    if linear.weights == "bfloat16" and x.dtype is torch.float32:
        return Matrix(linear.rounded_weight(x), bias)
    return Matrix(weight, bias, linear.product.integers(weight, x))
