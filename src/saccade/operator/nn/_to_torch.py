"""Saccade's modules as modules of `torch.nn`, with their weights, if these have all features in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ._from_torch import pairs, take_over
from ._torch_checks import check_kind, check_layers, check_made, check_names, check_plain, join
from .attention import MultiHeadAttention
from .blocks import DecoderBlock, EncoderBlock
from .config import AttentionConfig, BlockConfig
from .stacks import Decoder, Encoder, Stack
from .transformer import Transformer

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": nn.GELU("tanh"),
    "silu": F.silu,
}


def to_torch(module: nn.Module) -> nn.Module:
    """The `torch.nn` module (batch-first) that computes what `module` computes, with copies of its weights.

    The inverse of `from_torch`, for modules that use only features of PyTorch's. PyTorch's decoders have no causal mask
    of their own: give them one.

    Raises:
        TypeError: not one of the classes `from_torch` makes, or parts of other classes than their configuration says.
        ValueError: the first feature that PyTorch's module does not have, by name: kv_heads, positions, rms norms,
            gated feed-forward layers, ...; parts that differ from their configuration; and, as in `from_torch`, hooks,
            weights used in two places, mixed dtypes or devices.

    Example:
        >>> import torch, saccade
        >>> layer = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4)).eval()
        >>> theirs, x = saccade.nn.to_torch(layer), torch.randn(2, 5, 16)
        >>> torch.allclose(theirs(x, x, x)[0], layer(x), atol=1e-5)
        True
    """
    make = _MAKERS.get(type(module))
    if make is None:
        known = ", ".join(kind.__name__ for kind in _MAKERS)
        raise TypeError(f"module: expected one of {known}; got {type(module).__name__}")
    theirs = make(module)
    check_plain(module)
    parameter = next(module.parameters())
    theirs.to(device=parameter.device, dtype=parameter.dtype)
    take_over((ours, yours) for yours, ours in pairs(theirs, module))
    return theirs


def _only(**features: tuple[object, object]) -> None:
    """ValueError for the first feature that differs from PyTorch's module: name=(ours, theirs)."""
    for name, (ours, theirs) in features.items():
        if ours != theirs:
            raise ValueError(f"{name}: {ours!r} here, and PyTorch's module has {theirs!r} only")


def _attention(module: MultiHeadAttention) -> nn.MultiheadAttention:
    theirs = _theirs(module.config, module.config.positions)
    check_made("", module, module.config)
    return theirs


def _theirs(config: AttentionConfig, positions: object) -> nn.MultiheadAttention:
    shape = config.shape
    _only(
        mechanism=(config.mechanism, None),
        kv_heads=(shape.kv_heads, config.heads),
        head_width=(shape.head, config.width / config.heads),
        value_head_width=(shape.value_head, config.width / config.heads),
        output_bias=(shape.output_bias, config.bias),
        out_width=(shape.out, config.width),
        positions=(positions, None),
        qk_norm=(config.qk_norm, None),
        gate=(config.gate, False),
        sink=(config.sink, False),
        window=(config.window, None),
        scale=(config.scale, None),
        softcap=(config.softcap, None),
    )
    return nn.MultiheadAttention(
        config.width, config.heads, config.dropout, config.bias, kdim=shape.context, vdim=shape.values, batch_first=True
    )


def _layer(config: BlockConfig) -> Any:
    attention = _theirs(config.attention, config.attention.positions)
    _only(
        norm=(config.norm, "layer"),
        placement=(config.placement, "pre" if config.placement == "pre" else "post"),
        activation=(config.activation, config.activation if config.activation in ACTIVATIONS else "relu"),
        attention_bias=(config.attention.bias, config.bias),
    )
    if not config.hidden_width:
        raise ValueError("hidden: 0 here, and PyTorch's layers always have a feed-forward layer")
    kind = nn.TransformerEncoderLayer if config.cross is None else nn.TransformerDecoderLayer
    layer: Any = kind(
        config.width,
        config.attention.heads,
        config.hidden_width,
        config.dropout,
        ACTIVATIONS[config.activation],
        1e-5 if config.eps is None else config.eps,
        batch_first=True,
        norm_first=config.placement == "pre",
        bias=config.bias,
    )
    layer.self_attn, layer.dropout.p = attention, config.feed_forward_dropout
    if config.cross is not None:
        layer.multihead_attn = _theirs(config.cross, None)
    return layer


def _stack(module: Stack, path: str = "") -> Any:
    config = module.config
    layer = _layer(config)
    if isinstance(module, Decoder) and config.cross is None:
        raise ValueError("cross: None here, and PyTorch's decoder always reads a context")
    _check_stack(module, path)
    bare = isinstance(module.norm, nn.Identity)
    eps: Any = getattr(module.norm, "eps", None)
    norm = None if bare else nn.LayerNorm(config.width, eps=eps, bias=config.bias)
    if isinstance(module, Encoder):
        return nn.TransformerEncoder(layer, len(module.blocks), norm, enable_nested_tensor=False)
    return nn.TransformerDecoder(layer, len(module.blocks), norm)


def _check_stack(module: Stack, path: str) -> None:
    """Check that each part has the module that the stack's configuration describes."""
    check_names(path, module, ("blocks", "norm"))
    check_layers(join(path, "blocks"), module.blocks)
    for number, block in enumerate(module.blocks):
        here = join(path, f"blocks.{number}")
        check_kind(here, block, (module.block,))
        check_made(here, block, module.config.without_positions())
    check_kind(join(path, "norm"), module.norm, (nn.LayerNorm, nn.Identity))


def _transformer(module: Transformer) -> nn.Transformer:
    check_names("", module, ("encoder", "decoder"))
    check_kind("encoder", module.encoder, (Encoder,))
    check_kind("decoder", module.decoder, (Decoder,))
    encoder, decoder = _stack(module.encoder, "encoder"), _stack(module.decoder, "decoder")
    config = module.encoder.config
    return nn.Transformer(
        config.width, config.attention.heads, custom_encoder=encoder, custom_decoder=decoder, batch_first=True
    )


def _block(module: EncoderBlock) -> Any:
    if isinstance(module, DecoderBlock) and module.config.cross is None:
        raise ValueError("cross: None here, and PyTorch's decoder layer always reads a context")
    theirs = _layer(module.config)
    check_made("", module, module.config)
    return theirs


_MAKERS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    MultiHeadAttention: _attention,
    EncoderBlock: _block,
    DecoderBlock: _block,
    Encoder: _stack,
    Decoder: _stack,
    Transformer: _transformer,
}
