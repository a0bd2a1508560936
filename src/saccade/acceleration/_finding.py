"""Finds the modules of a model that can be fused, by their structure."""

from __future__ import annotations

import functools
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._decoder_caches import GrowingBuffers, SharedArguments
from ._decoder_forms import parts_of
from ._decoder_layers import DecoderLayer
from ._fused_layers import Activated, FusedFeedForward, FusedLayer, FusedLinear, Gated, Residual, TorchFeedForward
from ._joined_projections import JoinedProjections, joinable
from ._linears import PackedLinear, activation_of, holds_rounded, large
from ._norms import NormedFeedForward, RootMeanSquare
from ._padded import LayerStack, Padded, PaddedLayer
from ._self_attention import FusedSelfAttention
from ._structure import has_own_forward
from ._tokens import mixes_tokens

_ACTIVATIONS = F.gelu, F.relu, F.silu, torch.relu


def fused_layers(model: nn.Module, weights: str | None) -> list[FusedLayer]:
    """The fusible modules of a model, outer modules before inner ones."""
    linears = {module: PackedLinear(module, weights) for module in model.modules() if large(module)}
    inside: set[nn.Module] = set()  # of attention modules, which read their parts' weights themselves
    padded = Padded()
    stacks: dict[nn.Module, LayerStack] = {}
    buffers, shared = GrowingBuffers(), SharedArguments()
    for part in model.modules():
        if isinstance(part, nn.ModuleList):
            stacks |= dict.fromkeys(_layers(part, linears), LayerStack(padded))
    found: list[FusedLayer] = []
    for name, module in model.named_modules():
        if has_own_forward(module):  # whatever it does, its module's structure does not say
            continue
        if module in stacks:
            parts = parts_of(module, linears)
            if parts is None:
                found.append(PaddedLayer(name, module, stacks[module]))
            else:
                found.append(DecoderLayer(name, module, stacks[module], parts, buffers, shared))
        if module in inside:
            continue
        if isinstance(module, nn.MultiheadAttention):
            inside.update(module.modules())
            if _knows(module):
                found.append(FusedSelfAttention(name, module, weights))
            continue
        layer = _of(name, module, linears)
        if layer is None and weights == "int8":
            layer = _normed_feed_forward(name, module, linears)
        if layer is not None:
            found.append(layer)
    _join(model, found, linears)
    rounds = weights == "int8" or any(map(holds_rounded, model.modules()))
    for layer in found:
        layer.rounds = rounds
    return found


def _join(model: nn.Module, fused: list[FusedLayer], linears: dict[nn.Module, PackedLinear]) -> None:
    """Let linear layers that are children of one module share one product, unless another fused layer contains them."""
    linear_of = {layer.module: layer for layer in fused if isinstance(layer, FusedLinear)}
    taken = {layer.module for layer in fused if not isinstance(layer, PaddedLayer)}
    for module in model.modules():
        beside = [linear_of[child] for child in module.children() if child in linear_of]
        if module in taken or not joinable([layer.linear for layer in beside]):
            continue
        joined = JoinedProjections([layer.linear for layer in beside])
        for place, layer in enumerate(beside):
            layer.beside = functools.partial(joined, place)


def _layers(parts: nn.ModuleList, linears: dict[nn.Module, PackedLinear]) -> list[nn.Module]:
    """Sequences of layers of one class in which only the attention mixes tokens."""
    layers = list(parts)
    alike = len({type(layer) for layer in layers}) == 1
    return layers if alike and all(_may_be_packed(layer, linears) for layer in layers) else []


def _may_be_packed(layer: nn.Module, linears: dict[nn.Module, PackedLinear]) -> bool:
    own = mixes_tokens(layer) or has_own_forward(layer)
    return not own and any(part in linears or holds_rounded(part) for part in layer.modules())


def _knows(module: nn.MultiheadAttention) -> bool:
    weight = module.in_proj_weight
    if type(module).forward is not nn.MultiheadAttention.forward:
        return False
    own = weight is not None and module.bias_k is None and not module.add_zero_attn and module.batch_first
    return own and large(module.out_proj)


def _of(name: str, module: nn.Module, linears: dict[nn.Module, PackedLinear]) -> FusedLayer | None:
    if module in linears:
        return FusedLinear(name, module, linears[module])
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        activation = activation_of(module.activation)
        if activation is None or not {module.linear1, module.linear2} <= linears.keys():
            return None
        return TorchFeedForward(name, module, linears[module.linear1], linears[module.linear2], activation)
    children = [child for child in module.children() if not isinstance(child, nn.Dropout | nn.Identity)]
    if not children:
        return _norm(name, module)
    if isinstance(module, nn.Sequential | nn.ModuleList) or module._parameters or module._buffers:
        return None  # a scale of its own may be 1 now and something else later
    parts = [linears[child] for child in children if child in linears]
    norms = [child for child in children if getattr(type(child), "forward", None) is nn.LayerNorm.forward]
    functions = _functions(module, [child for child in children if child not in linears and child not in norms])
    others = len(children) - len(parts) - len(norms)
    if functions is None or others > len(functions) or not parts:
        return None
    if len(functions) == 1 and not norms:
        return _activated(name, module, parts, functions[0])
    if not functions and len(parts) == 1 and len(norms) <= 1 and _arguments(module) == 2:
        return Residual(name, module, parts[0], norms[0] if norms else None)
    return None


def _functions(module: nn.Module, children: list[nn.Module]) -> list[str] | None:
    """The activations among a module's children and attributes; None if another kind of child is present."""
    names = [activation_of(child) if _bare(child) else None for child in children]
    if None in names:
        return None
    # Of functions only PyTorch's own are tried: whatever else a module holds may do something when it is called.
    held = [value for value in vars(module).values() if any(value is known for known in _ACTIVATIONS)]
    return [name for name in (*names, *map(activation_of, held)) if name is not None]


def _bare(module: nn.Module) -> bool:
    """Whether a module has neither parameters nor buffers nor children, so that it may be an activation."""
    return all(next(parts, None) is None for parts in (module.parameters(), module.buffers(), module.children()))


def _activated(name: str, module: nn.Module, parts: list[PackedLinear], activation: str) -> FusedLayer | None:
    shapes = [tuple(part.weight.shape) for part in parts]
    if len(parts) == 1:
        return Activated(name, module, parts[0], activation)
    if len(parts) == 2 and shapes[0] == shapes[1][::-1]:
        return FusedFeedForward(name, module, parts[0], parts[1], activation)
    if len(parts) == 3:
        down = [part for part in parts if shapes.count(tuple(part.weight.shape)) == 1]
        if len(down) == 1:
            gate, up = (part for part in parts if part is not down[0])
            if tuple(gate.weight.shape) == tuple(down[0].weight.shape)[::-1]:
                return Gated(name, module, gate, up, down[0], activation)
    return None


def _normed_feed_forward(name: str, module: nn.Module, linears: dict[nn.Module, PackedLinear]) -> FusedLayer | None:
    """The feed-forward method of transformers' layers after BERT's; None for other modules."""
    parts = (getattr(module, part, None) for part in ("intermediate", "output"))
    inner, outer = (_of(name, part, linears) if isinstance(part, nn.Module) else None for part in parts)
    known = hasattr(module, "feed_forward_chunk") and isinstance(inner, Activated) and isinstance(outer, Residual)
    return NormedFeedForward(name, module, inner, outer) if known else None  # type: ignore[arg-type]


def _norm(name: str, module: nn.Module) -> FusedLayer | None:
    """A fused RMS norm for a module, not PyTorch's nor ours, with a weight per feature and an epsilon; else None."""
    weights = list(module.parameters())
    names = ("variance_epsilon", "eps", "epsilon")
    eps = next((name for name in names if isinstance(getattr(module, name, None), float)), None)
    fast = type(module).__module__.startswith("torch.") or isinstance(module, nn.RMSNorm)
    if fast or eps is None or len(weights) != 1 or module._buffers:
        return None
    own = isinstance(getattr(module, "weight", None), Tensor) and weights[0].dim() == 1
    return RootMeanSquare(name, module, eps) if own else None


def _arguments(module: nn.Module) -> int:
    """Number of required positional arguments of a module's `forward`."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = inspect.signature(module.forward).parameters.values()
    return sum(one.kind in kinds and one.default is inspect.Parameter.empty for one in given)
