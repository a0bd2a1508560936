"""The parts of a module, from its tree: shapes and parameter counts that add up to the module's total.

A parameter counts at its first part; others that share it say so. Equal layers are one part, "N x".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ....make.models import DecoderLM, LanguageModel
from ....make.models.graphs.attention import GraphAttention
from ....make.models.text.decoder import TextDecoder
from ....operator.nn import DecoderBlock, EncoderBlock, FeedForward, MultiHeadAttention
from ....operator.nn.config import GATED
from ....operator.nn.stacks import Stack
from ....operator.positions import AlibiConfig, RotaryConfig, T5Config
from ....support._numbers import counted

_NORMS = {"LayerNorm": "Layer norm", "RMSNorm": "RMS norm", "BatchNorm": "Batch norm", "GroupNorm": "Group norm"}
_ACTIVATIONS = {
    "gelu": "GELU", "gelu_tanh": "GELU", "relu": "ReLU", "silu": "SiLU",
    "geglu": "GEGLU", "geglu_tanh": "GEGLU", "reglu": "ReGLU", "swiglu": "SwiGLU",
}  # fmt: skip
_SCHEMES = {RotaryConfig: "rotary positions", AlibiConfig: "ALiBi", T5Config: "relative positions"}
_CLASSES = {  # labels of classes, whatever their names
    "T5Bias": "Relative positions",
    "Learned": "Position embedding",
    "Sinusoidal": "Sinusoidal positions",
    "ConvolutionalPositions": "Convolutional positions",
    "SpecAugment": "Mask vector",
}
_EMBEDDINGS = {
    "Token embedding": ("tokens", "embedding", "wte", "word_embeddings", "embed_tokens", "shared", "token_embedding"),
    "Position embedding": ("places", "wpe", "position_embeddings", "embed_positions", "positions"),
    "Segment embedding": ("types", "token_type_embeddings"),
    "Class token": ("class_token", "cls_token", "cls"),
    "Patch embedding": ("patches", "embeddings"),
    "Target embedding": ("target_tokens",),
    "Embedding of degrees in": ("into",),
    "Embedding of degrees out": ("out_of",),
    "Bias by distance": ("hops",),
    "Bias by edges": ("steps",),
    "Virtual node": ("virtual",),
    "Bias of the virtual node": ("virtual_bias",),
}
_ATOMIC = re.compile(r"Attention$|MLP$|Mlp$|FeedForward|SelfAttention|LayerFF")


@dataclass
class DiagramPart:
    """A box of a picture.

    Attributes:
        kind: "attention", "cross", "feed-forward", "norm", "embedding", "head", "other"; with parts: "block", "stack",
            "side".
        parameters: of all repeats together, without those counted in other parts.
        placement: of a block: "pre", "post", "parallel"; "" if unknown.
    """

    kind: str
    label: str
    details: list[str] = field(default_factory=list)
    parameters: int = 0
    parts: list[DiagramPart] = field(default_factory=list)
    repeat: int = 1
    placement: str = ""
    name: str = ""
    shared: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def total(self) -> int:
        """The parameters of this part and its parts, which add up to the module's."""
        return self.parameters if self.kind != "side" else sum(part.total() for part in self.parts)


def bare(module: nn.Module) -> nn.Module:
    """The network itself, for models that hold it together with a tokenizer."""
    return module.model if isinstance(module, LanguageModel) else module


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def tree_of(module: nn.Module) -> list[DiagramPart]:
    """The parts of a model in the order of registration."""
    module = bare(module)
    parts = _PartReader().read(module, "")
    table = _table_of_logits(module)
    if table is not None:
        details = [_shape_of(table, turned=True) + ", the token embedding again"]
        parts.append(DiagramPart("head", "Linear to vocabulary", details, 0, name="head", shared=True))
    return parts


def _table_of_logits(module: nn.Module) -> nn.Embedding | None:
    """The embedding that is also the output matrix of a decoder without a head module."""
    if isinstance(module, DecoderLM):
        return module.embedding
    if isinstance(module, TextDecoder) and module.head is None and module.request.head is not None:
        return module.tokens
    return None


def is_block(module: nn.Module) -> bool:
    return isinstance(module, EncoderBlock | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)


class _PartReader:
    """Walks a tree once, and remembers the counted parameters."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._positions: str | None = None  # of the current stack, which holds them for its layers

    def read(self, module: nn.Module, name: str) -> list[DiagramPart]:
        if is_block(module):
            block = self.block(module, name)
            return [] if block is None else [block]
        if name == "head" or self._is_atomic(module):
            return self._leaf(module, name)
        if isinstance(module, Stack):
            self._positions = _SCHEMES.get(type(module.config.attention.positions))
        if isinstance(module, nn.ModuleList | nn.Sequential):
            return self._list(module, name)
        parts = [self._parameter(key, value) for key, value in module._parameters.items() if value is not None]
        for key, child in module._modules.items():  # including repeated ones, unlike named_children
            if child is not None:
                inner = self.read(child, f"{name}.{key}" if name else key)
                parts += self._side(key, inner)
        return parts

    @staticmethod
    def _side(key: str, inner: list[DiagramPart]) -> list[DiagramPart]:
        """An encoder or a decoder with a stack of layers is one part."""
        if key in ("encoder", "decoder") and any(part.kind == "stack" for part in inner):
            return [DiagramPart("side", key.capitalize(), parts=inner, name=key)]
        return inner

    def block(self, module: nn.Module, name: str) -> DiagramPart | None:
        if isinstance(module, EncoderBlock):
            return self._own_block(module, name)
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            return self._torch_block(module, name)
        return None

    # --- blocks ---------------------------------------------------------------------------------------------------

    def _own_block(self, module: EncoderBlock, name: str) -> DiagramPart:
        config = module.config
        parts = [self._attention(module.attention, "attention", norm=module.attention_norm)]
        if isinstance(module, DecoderBlock) and config.cross is not None:
            parts.append(self._attention(module.cross, "cross", norm=module.cross_norm))
        if module.feed_forward is not None:
            parts.append(self._feed_forward(module.feed_forward))
            if config.placement != "parallel":
                parts[-1].parts = self._norm(module.feed_forward_norm, "norm")
        decodes = "decoder" in name or (isinstance(module, DecoderBlock) and "encoder" not in name)
        label = "Decoder block" if decodes else "Encoder block"
        facts = {"width": config.width}
        total = sum(part.parameters + sum(norm.parameters for norm in part.parts) for part in parts)
        return DiagramPart("block", label, [], total, parts, placement=config.placement, name=name, facts=facts)

    def _torch_block(self, module: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, name: str) -> DiagramPart:
        parts = [self._torch_attention(module.self_attn, "attention", module.norm1)]
        last = module.norm2
        if isinstance(module, nn.TransformerDecoderLayer):
            parts.append(self._torch_attention(module.multihead_attn, "cross", module.norm2))
            last = module.norm3
        width, hidden = module.linear1.in_features, module.linear1.out_features
        activation = getattr(module.activation, "__name__", type(module.activation).__name__)
        facts = {
            "gated": False,
            "activation": _ACTIVATIONS.get(activation, activation),
            "width": width,
            "hidden": hidden,
        }
        details = [f"{width:,} → {hidden:,} → {width:,}, {facts['activation']}"]
        count = self._count(module.linear1) + self._count(module.linear2)
        inner = DiagramPart("feed-forward", "Feed-forward", details, count, self._norm(last, "norm"), facts=facts)
        label = "Decoder block" if isinstance(module, nn.TransformerDecoderLayer) else "Encoder block"
        placement = "pre" if module.norm_first else "post"
        parts.append(inner)
        total = sum(part.parameters + sum(norm.parameters for norm in part.parts) for part in parts)
        return DiagramPart("block", label, [], total, parts, placement=placement, name=name, facts={"width": width})

    def _torch_attention(self, module: nn.MultiheadAttention, kind: str, norm: nn.Module) -> DiagramPart:
        heads, width = module.num_heads, module.head_dim
        details = [f"{counted(heads, 'head')} × {width}"]
        facts = {"heads": heads, "kv_heads": heads, "head": width, "width": module.embed_dim, "positions": None}
        label = "Cross-attention" if kind == "cross" else "Self-attention"
        return DiagramPart(kind, label, details, self._count(module), self._norm(norm, "norm"), facts=facts)

    def _attention(self, module: MultiHeadAttention, kind: str, norm: nn.Module | None = None) -> DiagramPart:
        config, shape = module.config, module.config.shape
        details = [f"{counted(config.heads, 'head')} × {shape.head}"]
        if shape.kv_heads != config.heads:
            details[0] += f", {shape.kv_heads} of keys and values"
        more = []
        if config.mechanism is not None:
            more.append(config.mechanism.name)
        positions = None if kind == "cross" else _SCHEMES.get(type(config.positions), self._positions)
        more += [positions] if positions else []
        more += ["window"] if config.window is not None else []
        facts = {
            "heads": config.heads,
            "kv_heads": shape.kv_heads,
            "head": shape.head,
            "width": config.width,
            "context": shape.context,
            "positions": positions,
        }
        label = "Cross-attention" if kind == "cross" else "Self-attention"
        inner = [] if norm is None else self._norm(norm, "norm")
        return DiagramPart(kind, label, [", ".join([*details, *more])], self._count(module), inner, facts=facts)

    def _feed_forward(self, module: FeedForward) -> DiagramPart:
        width, hidden = module.down.out_features, module.down.in_features
        name = _ACTIVATIONS.get(module.activation, module.activation)
        gate = _ACTIVATIONS[GATED[module.activation]] if module.gated else name
        facts = {"gated": module.gated, "activation": gate, "width": width, "hidden": hidden}
        details = [f"{width:,} → {hidden:,} → {width:,}, {name}"]
        label = "Gated feed-forward" if module.gated else "Feed-forward"
        return DiagramPart("feed-forward", label, details, self._count(module), facts=facts)

    def _norm(self, module: nn.Module, name: str) -> list[DiagramPart]:
        if isinstance(module, nn.Identity):
            return []
        return [DiagramPart("norm", _norm_name(module), [], self._count(module), name=name)]

    # --- all else -------------------------------------------------------------------------------------------------

    def _list(self, module: nn.Module, name: str) -> list[DiagramPart]:
        out: list[DiagramPart] = []
        last = None
        for key, child in module._modules.items():
            if child is None:
                continue
            form = _form(child)
            if form == last and form[1]:
                added = self._count(child)
                out[-1].repeat += 1
                out[-1].parameters += added
                continue
            inner = self.read(child, f"{name}.{key}")
            last = form
            if inner:
                title = inner[0].label if len(inner) == 1 else _words(type(child).__name__)
                out.append(DiagramPart("stack", title, [], sum(part.total() for part in inner), inner, name=name))
            else:
                last = None
        # A single layer needs no frame, unless it is a block.
        return [
            part for stack in out
            for part in ([stack] if stack.repeat > 1 or stack.parts[0].kind == "block" else stack.parts)
        ]  # fmt: skip

    def _is_atomic(self, module: nn.Module) -> bool:
        kinds = MultiHeadAttention | FeedForward | nn.MultiheadAttention
        bare = not any(child is not None for child in module._modules.values())
        return bare or isinstance(module, kinds) or bool(_ATOMIC.search(type(module).__name__))

    def _leaf(self, module: nn.Module, name: str) -> list[DiagramPart]:
        if isinstance(module, MultiHeadAttention):
            return [self._attention(module, "attention")]
        if isinstance(module, FeedForward):
            return [self._feed_forward(module)]
        everything = list(module.parameters())
        again = _tied_embedding(module)
        if not everything and again is None:
            shown = _CLASSES.get(type(module).__name__)
            return (
                [] if shown is None else [DiagramPart("embedding", shown, ["nothing to learn"], name=name, shared=True)]
            )
        tied = again is not None or any(p.ndim > 1 and id(p) in self._seen for p in everything)
        count, short = self._count(module), name.rpartition(".")[2]
        kind, label = ("head", _head_name(module)) if short in ("head", "lm_head") else _named(module, short, name)
        details = [_head_shape(module) if kind == "head" else _shape_of(module)]
        if type(module).__name__ == "T5Bias":
            details[0] += ", added to the logits of all layers"
        if tied:
            details[0] += ", the token embedding again" if kind == "head" else ", shared"
        facts = _facts_of_graph(module) if isinstance(module, GraphAttention) else {}
        return [
            DiagramPart(
                kind, label, [d for d in details if d], count, name=name, shared=tied and not count, facts=facts
            )
        ]

    def _parameter(self, name: str, parameter: nn.Parameter) -> DiagramPart:
        count = 0 if id(parameter) in self._seen else parameter.numel()
        self._seen.add(id(parameter))
        label = next((label for label, names in _EMBEDDINGS.items() if name in names), _words(name))
        return DiagramPart("embedding", label, [" × ".join(f"{n:,}" for n in parameter.shape)], count, name=name)

    def _count(self, module: nn.Module) -> int:
        fresh = [p for p in module.parameters() if id(p) not in self._seen]
        self._seen.update(id(p) for p in fresh)
        return sum(p.numel() for p in fresh)


def _form(module: nn.Module) -> tuple[type, tuple[tuple[str, tuple[int, ...]], ...]]:
    return type(module), tuple((name, tuple(p.shape)) for name, p in module.named_parameters())


def _named(module: nn.Module, short: str, name: str) -> tuple[str, str]:
    kind, above = type(module).__name__, name.split(".")[-2] if short.isdigit() and "." in name else short
    if kind in _CLASSES:
        return "embedding", _CLASSES[kind]
    if "Norm" in kind:
        return "norm", _norm_name(module)
    known = next((label for label, names in _EMBEDDINGS.items() if above in names), None)
    if known or isinstance(module, nn.Embedding):
        return "embedding", known or f"Embedding: {_words(short).lower()}"
    if "Attention" in kind:
        return "attention", "Graph attention" if "Graph" in kind else "Attention"
    if re.search(r"MLP|Mlp|FeedForward|LayerFF", kind):
        return "feed-forward", "Feed-forward"
    if isinstance(module, nn.Linear):
        return "other", f"Linear: {_words(above).lower()}"
    return ("other", "Convolution") if "Conv" in kind else ("other", _words(kind))


def _head_name(module: nn.Module) -> str:
    """The label of a model's head."""
    kinds = [type(part).__name__ for part in module.modules()]
    if isinstance(module, GraphAttention):
        return "Graph attention"
    if any("Vocabulary" in kind or "NextToken" in kind for kind in kinds) or isinstance(module, nn.Embedding):
        return "Linear to vocabulary"
    named = {"Ctc": "Linear to characters", "Forecast": "Linear to forecast", "Span": "Linear to spans"}
    label = next((text for part, text in named.items() if part in kinds[0]), None)
    return label or ("Classifier" if len(kinds) > 1 else "Linear to vocabulary")


def _tied_embedding(module: nn.Module) -> nn.Embedding | None:
    """The embedding of another module whose matrix the head uses, if any."""
    for part in module.modules():
        held = getattr(part, "_embedding", None)
        if isinstance(held, tuple) and getattr(part, "out", None) is None:
            return held[0] if isinstance(held[0], nn.Embedding) else None
    return None


def _head_shape(module: nn.Module) -> str:
    maps = [part for part in module.modules() if isinstance(part, nn.Linear)]
    again = _tied_embedding(module)
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)] + ([again] if again else [])
    weights = [p for p in module.parameters() if p.ndim > 1]
    if isinstance(module, GraphAttention) or not (maps or tables or weights):
        return _shape_of(module)
    if tables:
        return _shape_of(tables[0], turned=True)
    if not maps:  # the embedding's matrix, held as a parameter
        return f"{weights[-1].shape[1]:,} → {weights[-1].shape[0]:,}"
    return " → ".join(f"{n:,}" for n in (maps[0].in_features, *(m.out_features for m in maps)))


def _norm_name(module: nn.Module) -> str:
    return next((label for kind, label in _NORMS.items() if kind in type(module).__name__), "Norm")


def _shape_of(module: nn.Module, *, turned: bool = False) -> str:
    if isinstance(module, GraphAttention):
        return f"{module.value.in_features:,} → {counted(module.heads, 'head')} × {module.head_width}"
    if isinstance(module, nn.Linear):
        return f"{module.in_features:,} → {module.out_features:,}"
    if isinstance(module, nn.Embedding):
        sizes = module.num_embeddings, module.embedding_dim
        return f"{sizes[1]:,} → {sizes[0]:,}" if turned else f"{sizes[0]:,} × {sizes[1]:,}"
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight", max(parameters.values(), key=lambda p: p.numel()))
    return " × ".join(f"{n:,}" for n in weight.shape)


def _facts_of_graph(module: GraphAttention) -> dict[str, Any]:
    return {
        "graph": module.kind,
        "heads": module.heads,
        "head": module.head_width,
        "width": module.value.in_features,
        "concat": module.concat,
    }


def _words(name: str) -> str:
    """The words of names such as ``ClassifierHead`` and ``pair_bias``."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name.strip("_")).replace("_", " ")
    return apart[:1].upper() + apart[1:].lower()


def walk(parts: list[DiagramPart]) -> Iterator[DiagramPart]:
    for part in parts:
        yield part
        yield from walk(part.parts)
