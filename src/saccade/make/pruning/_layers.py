"""Finds the attention layers of a model, with their heads, their parts and the function that removes heads.

Shape legend: D width of a head's queries and keys, Dv of its values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...operator.nn import MultiHeadAttention
from ...operator.nn._cuts import Cut
from ...operator.nn._fewer_heads import cut_heads
from ..models.graphs.attention import GraphAttention
from ..models.pruned_heads import layer_names, layer_numbers
from . import _torch, _transformers

_GRAPH = "its heads are concatenated without a projection, so the width of the next layer depends on their number"


@dataclass(frozen=True, eq=False)
class PrunableLayer:
    """One attention layer of a model.

    Attributes:
        path: in `model.named_modules()`.
        name: the layer's number; if several have it (encoder and decoder), "decoder.4", "cross.4", or the path.
        number: the first number in the path, as counted by `saccade.watch`.
        module: the attention module.
        heads, kv_heads: query and key-value heads.
        key_width, value_width: D and Dv.
        maps: attention maps for each head of values (differential attention: 2).
        output: the projection of the concatenated heads.
        parts: all modules with weights.
        cut: returns the change that keeps only some heads.
        refusal: why no head can be removed; "" if they can.
    """

    path: str
    name: str
    number: int
    module: nn.Module
    heads: int = 0
    kv_heads: int = 0
    key_width: int = 0
    value_width: int = 0
    maps: int = 1
    output: nn.Module | None = None
    parts: tuple[nn.Module, ...] = ()
    cut: Callable[[Sequence[int]], Cut] | None = None
    refusal: str = ""

    @property
    def projection_weights(self) -> int:
        """Number of entries of the projection matrices."""
        if isinstance(self.module, nn.MultiheadAttention):
            matrices = [parameter for parameter in self.module.parameters() if parameter.dim() > 1]
        else:
            matrices = [part.weight for part in self.parts if isinstance(part.weight, nn.Parameter)]
        return sum(parameter.numel() for parameter in matrices)

    def per_pair(self) -> int:
        """Multiplications and additions for a query-key pair, over all heads."""
        return 2 * self.heads * self.maps * (self.key_width + self.value_width)


def attention_layers(model: nn.Module) -> list[PrunableLayer]:
    """All attention layers in the order of `model.named_modules()`, including those that cannot be pruned."""
    modules = dict(model.named_modules())
    read = {path: _read(module, modules.get(path.rpartition(".")[0])) for path, module in modules.items()}
    attributes = {path: values for path, values in read.items() if values is not None}
    inner = [
        path
        for path in attributes
        if not any(other.startswith(f"{path}." if path else "") for other in attributes if other != path)
    ]
    places = zip(inner, layer_names(inner), layer_numbers(inner), strict=True)
    return [PrunableLayer(path, name, number, modules[path], **attributes[path]) for path, name, number in places]


def _read(module: nn.Module, parent: nn.Module | None) -> dict[str, Any] | None:
    """Attributes of `PrunableLayer` for a module; None if it is not attention."""
    if isinstance(module, MultiHeadAttention):
        return _own(module)
    if isinstance(module, nn.MultiheadAttention):
        return _of_torch(module)
    if isinstance(module, GraphAttention):
        return {"refusal": _GRAPH}
    return _of_transformers(module, parent) if _transformers.is_theirs(module) else None


def _own(module: MultiHeadAttention) -> dict[str, Any]:
    config, shape = module.config, module.shape
    names = ("projection",) if shape.fused else ("query", "key", "value")
    layers = [getattr(module, name, None) for name in (*names, "gate", "output")]
    return {
        "heads": config.heads,
        "kv_heads": shape.kv_heads,
        "key_width": shape.head,
        "value_width": shape.value_head,
        "maps": shape.query_heads // config.heads,
        "output": module.output,
        "parts": tuple(layer for layer in layers if layer is not None),
        "cut": functools.partial(cut_heads, module),
    }


def _of_torch(module: nn.MultiheadAttention) -> dict[str, Any]:
    if type(module) not in (nn.MultiheadAttention, _torch.PrunedMultiheadAttention):
        return {"refusal": f"{type(module).__name__}, a subclass of nn.MultiheadAttention, may compute something else"}
    heads, width = module.num_heads, int(module.head_dim)
    return {
        "heads": heads,
        "kv_heads": heads,
        "key_width": width,
        "value_width": width,
        "output": module.out_proj,
        "cut": functools.partial(_torch.cut_heads, module),
    }


def _of_transformers(module: nn.Module, parent: nn.Module | None) -> dict[str, Any] | None:
    read = _transformers.read_attention(module, parent)
    if read is None or isinstance(read, str):
        return None if read is None else {"refusal": read}
    return {
        "heads": read.heads,
        "kv_heads": read.kv_heads,
        "key_width": read.width,
        "value_width": read.width,
        "output": read.output,
        "parts": (*read.projections, read.output),
        "cut": read.cut,
    }


def prunable(model: nn.Module) -> list[PrunableLayer]:
    """The layers that can be pruned. ValueError with the reasons if there are none."""
    layers = attention_layers(model)
    able = [layer for layer in layers if not layer.refusal]
    if not able:
        reasons = "; ".join(sorted({f"{type(layer.module).__name__}: {layer.refusal}" for layer in layers}))
        known = "saccade.nn, nn.MultiheadAttention, and transformers' BERT-, GPT-2- and Llama-like modules"
        raise ValueError(
            f"model: {type(model).__name__} has no attention whose heads can be removed, expected {known}"
            + (f" ({reasons})" if reasons else "")
        )
    return able


def listed(layers: Sequence[PrunableLayer]) -> str:
    """The layers as a list for an error message."""
    return ", ".join(_shown(layers))


def _shown(layers: Sequence[PrunableLayer], most: int = 12) -> Iterator[str]:
    for layer in layers[:most]:
        yield layer.name if layer.name == layer.path else f"{layer.name} ({layer.path or 'the model itself'})"
    if len(layers) > most:
        yield f"and {len(layers) - most} more"
