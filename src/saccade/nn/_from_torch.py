"""From `torch.nn`'s attention and transformer modules to Saccade's, with their weights.

Shapes: B batch, H heads, L / S lengths of queries and keys, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import MultiHeadAttention
from .blocks import DecoderBlock, EncoderBlock
from .config import AttentionConfig, BlockConfig
from .norm import make_norm
from .stacks import Decoder, Encoder, Stack
from .transformer import Transformer

StackKind = TypeVar("StackKind", bound=Stack)
Pair = tuple[nn.Module, nn.Module]  # (theirs, ours): the same layer on both sides

# theirs -> ours; norm2 is the second norm of an encoder layer and the norm before the context of a decoder layer.
ENCODER_LAYER = {
    "self_attn": "attention",
    "norm1": "attention_norm",
    "norm2": "feed_forward_norm",
    "linear1": "feed_forward.up",
    "linear2": "feed_forward.down",
}
DECODER_LAYER = {**ENCODER_LAYER, "multihead_attn": "cross", "norm2": "cross_norm", "norm3": "feed_forward_norm"}


def from_torch(module: nn.Module) -> nn.Module:
    """The Saccade module that computes what `module` computes, with copies of its weights.

        nn.MultiheadAttention       -> MultiHeadAttention       nn.TransformerDecoderLayer  -> DecoderBlock
        nn.TransformerEncoderLayer  -> EncoderBlock             nn.TransformerDecoder       -> Decoder
        nn.TransformerEncoder       -> Encoder                  nn.Transformer              -> Transformer

    Outputs and gradients are equal to rounding. Ours are always batch-first, (B, L, E), whatever `batch_first` said;
    dtype, device (those of the first weight), dropout and training mode are taken over, and layers of which nothing is
    trained stay frozen. Masks have other meanings there: see `masks_from_torch`. Decoders are causal unless a mask is
    given, as `Window(None, None)`, which shows everything.

    Args:
        module: exactly one of the six classes (a subclass may compute something else).

    Raises:
        TypeError: any other module.
        ValueError: what has no counterpart: `add_bias_kv`, `add_zero_attn`, an activation other than ReLU, GELU and
            SiLU, a last norm that is no LayerNorm, layers of one stack that differ, parametrized weights. The message
            names it.
    """
    make = _MAKERS.get(type(module))
    if make is None:
        known = ", ".join(f"nn.{kind.__name__}" for kind in _MAKERS)
        raise TypeError(
            f"module: expected one of {known}; got {type(module).__name__} (convert the parts of a larger model)"
        )
    ours = make(module)
    parameter = next(module.parameters())
    ours.to(device=parameter.device, dtype=parameter.dtype)
    copy(pairs(module, ours))
    return ours.train(module.training)


def pairs(theirs: Any, ours: Any) -> Iterator[Pair]:
    """The layers with weights of a module of theirs, each with its counterpart in ours."""
    if isinstance(theirs, nn.Transformer):
        yield from pairs(theirs.encoder, ours.encoder)
        yield from pairs(theirs.decoder, ours.decoder)
    elif isinstance(theirs, nn.TransformerEncoder | nn.TransformerDecoder):
        for one, other in zip(theirs.layers, ours.blocks, strict=True):
            yield from pairs(one, other)
        if theirs.norm is not None:
            yield theirs.norm, ours.norm
    elif isinstance(theirs, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        names = ENCODER_LAYER if isinstance(theirs, nn.TransformerEncoderLayer) else DECODER_LAYER
        for one, other in names.items():
            yield theirs.get_submodule(one), ours.get_submodule(other)
    else:
        yield theirs, ours


@torch.no_grad()
def copy(layers: Iterable[Pair]) -> None:
    """Copy every tensor of the first of each pair to the second; a layer that is frozen stays so."""
    for source, target in layers:
        given, wanted = _tensors(source), _tensors(target)
        if given.keys() != wanted.keys():
            raise ValueError(
                f"module: {type(source).__name__} holds {', '.join(given)}; expected {', '.join(wanted)} "
                "(remove parametrizations first)"
            )
        for name, tensor in given.items():
            wanted[name].copy_(tensor)
        if not any(parameter.requires_grad for parameter in source.parameters()):
            target.requires_grad_(False)


def _tensors(layer: Any) -> dict[str, Tensor]:
    """A layer's tensors by name, views into its parameters; attention's are named alike on both sides."""
    if isinstance(layer, nn.MultiheadAttention):
        separate = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
        weights = separate if layer.in_proj_weight is None else layer.in_proj_weight.chunk(3)
        biases = [None] * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
        parts: list[tuple[Tensor, Tensor | None]] = [*zip(weights, biases, strict=True)]
        output: nn.Linear = layer.out_proj
    elif isinstance(layer, MultiHeadAttention):
        parts, output = layer.matrices(), layer.output
    else:
        return dict(layer.named_parameters())
    named = {}
    for name, (weight, bias) in zip(
        ("query", "key", "value", "output"), [*parts, (output.weight, output.bias)], strict=True
    ):
        named[f"{name}.weight"] = weight
        if bias is not None:
            named[f"{name}.bias"] = bias
    return named


# From theirs: what each is made of, as a configuration.


def _attention_config(theirs: nn.MultiheadAttention) -> AttentionConfig:
    if theirs.bias_k is not None:
        raise ValueError("module: add_bias_kv=True has no counterpart (a learned key and value in every sequence)")
    if theirs.add_zero_attn:
        raise ValueError("module: add_zero_attn=True has no counterpart (it is a sink at 0: see AttentionConfig.sink)")
    return AttentionConfig(
        theirs.embed_dim, theirs.num_heads, context_width=theirs.kdim, values_width=theirs.vdim,
        bias=theirs.in_proj_bias is not None, output_bias=theirs.out_proj.bias is not None, dropout=theirs.dropout,
    )  # fmt: skip


def _block_config(theirs: Any) -> BlockConfig:
    decoder = isinstance(theirs, nn.TransformerDecoderLayer)
    dropouts = [layer.p for name, layer in theirs.named_children() if name in ("dropout1", "dropout2", "dropout3")]
    norms = [layer for name, layer in theirs.named_children() if name in ("norm1", "norm2", "norm3")]
    for what, values in (("dropout", dropouts), ("norm eps", [norm.eps for norm in norms])):
        if len(set(values)) > 1:
            raise ValueError(f"module: its {what}s differ inside one layer, {values}; ours has one")
    return BlockConfig(
        _attention_config(theirs.self_attn), cross=_attention_config(theirs.multihead_attn) if decoder else None,
        hidden=theirs.linear1.out_features, activation=_activation(theirs.activation), norm="layer",
        placement="pre" if theirs.norm_first else "post", dropout=dropouts[0], feed_forward_dropout=theirs.dropout.p,
        bias=theirs.linear1.bias is not None, eps=norms[0].eps,
    )  # fmt: skip


def _activation(function: Any) -> str:
    """The name of PyTorch's function or module; ValueError for one that ours lacks."""
    if function is F.relu or function is torch.relu or isinstance(function, nn.ReLU):
        return "relu"
    if function is F.gelu or isinstance(function, nn.GELU):
        return "gelu_tanh" if getattr(function, "approximate", "none") == "tanh" else "gelu"
    if function is F.silu or isinstance(function, nn.SiLU):
        return "silu"
    raise ValueError(f"module: activation {function!r} has no counterpart; ours has relu, gelu, gelu_tanh and silu")


def _stack(theirs: Any, kind: type[StackKind]) -> StackKind:
    configs = [_block_config(layer) for layer in theirs.layers]
    if any(config != configs[0] for config in configs):
        raise ValueError("module: its layers differ; convert them one by one")
    ours = kind(configs[0], len(configs), final_norm=theirs.norm is not None)
    if theirs.norm is not None:
        if type(theirs.norm) is not nn.LayerNorm or (theirs.norm.bias is not None) != configs[0].bias:
            raise ValueError(
                f"module: its last norm {theirs.norm} has no counterpart; expected nn.LayerNorm like its layers'"
            )
        ours.norm = make_norm("layer", configs[0].width, bias=configs[0].bias, eps=theirs.norm.eps)
    return ours


def _transformer(theirs: nn.Transformer) -> Transformer:
    encoder, decoder = _stack(theirs.encoder, Encoder), _stack(theirs.decoder, Decoder)
    ours = Transformer(encoder.config, (len(encoder.blocks), len(decoder.blocks)), decoder=decoder.config)
    ours.encoder, ours.decoder = encoder, decoder
    return ours


_MAKERS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    nn.MultiheadAttention: lambda theirs: MultiHeadAttention(_attention_config(theirs)),
    nn.TransformerEncoderLayer: lambda theirs: EncoderBlock(_block_config(theirs)),
    nn.TransformerDecoderLayer: lambda theirs: DecoderBlock(_block_config(theirs)),
    nn.TransformerEncoder: lambda theirs: _stack(theirs, Encoder),
    nn.TransformerDecoder: lambda theirs: _stack(theirs, Decoder),
    nn.Transformer: _transformer,
}
