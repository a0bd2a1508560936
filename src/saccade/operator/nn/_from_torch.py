"""From `torch.nn`'s attention and transformer modules to Saccade's, with their weights.

Shape legend: B batch, H heads, L / S lengths of queries and keys, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._torch_checks import check_theirs, differences, join
from .attention import MultiHeadAttention
from .blocks import DecoderBlock, EncoderBlock
from .config import AttentionConfig, BlockConfig
from .norm import make_norm
from .stacks import Decoder, Encoder, Stack
from .transformer import Transformer

StackKind = TypeVar("StackKind", bound=Stack)


class SubmodulePlace(NamedTuple):
    """A module inside another, and its path there."""

    path: str
    module: Any


Pair = tuple[SubmodulePlace, SubmodulePlace]  # (theirs, ours): the same part on both sides

# theirs -> ours; norm2 is the second norm of an encoder layer and the norm before the context of a decoder layer.
ENCODER_LAYER = {
    "self_attn": "attention",
    "norm1": "attention_norm",
    "norm2": "feed_forward_norm",
    "linear1": "feed_forward.up",
    "linear2": "feed_forward.down",
    "dropout": "feed_forward.dropout",
    "dropout1": "dropout",
    "dropout2": "dropout",
}
DECODER_LAYER = {
    **ENCODER_LAYER,
    "multihead_attn": "cross",
    "norm2": "cross_norm",
    "norm3": "feed_forward_norm",
    "dropout3": "dropout",
}
COUNTERPARTS: dict[type[nn.Module], dict[str, str]] = {
    nn.TransformerEncoderLayer: ENCODER_LAYER,
    nn.TransformerDecoderLayer: DECODER_LAYER,
    nn.Transformer: {"encoder": "encoder", "decoder": "decoder"},
}
WITH_WEIGHTS = (nn.MultiheadAttention, MultiHeadAttention, nn.Linear, nn.LayerNorm)


def from_torch(module: nn.Module) -> nn.Module:
    """The Saccade module that computes what `module` computes, with copies of its weights.

        nn.MultiheadAttention       -> MultiHeadAttention       nn.TransformerDecoderLayer  -> DecoderBlock
        nn.TransformerEncoderLayer  -> EncoderBlock             nn.TransformerDecoder       -> Decoder
        nn.TransformerEncoder       -> Encoder                  nn.Transformer              -> Transformer

    Outputs and gradients are equal to rounding. Ours are always batch-first, (B, L, E), whatever `batch_first` said.
    Dtype and device are kept, and for each part dropout, training mode, and which weights are trained. Masks mean the
    opposite: see `masks_from_torch`. Decoders are causal unless `decoder.causal` is set to False.

    Args:
        module: exactly one of the six classes, made of exactly PyTorch's parts (a subclass, a parametrization or a hook
            may compute something else).

    Raises:
        TypeError: any other module, or one with other parts. The message names the part by its path.
        ValueError: what has no counterpart: `add_bias_kv`, `add_zero_attn`, an activation other than ReLU, GELU and
            SiLU, a last norm unlike the layers', layers of one stack that differ; and what would be lost: hooks,
            weights used in two places, mixed dtypes or devices. The message names it.

    Example:
        >>> import torch, saccade
        >>> theirs = torch.nn.TransformerEncoderLayer(16, nhead=4, batch_first=True).eval()
        >>> block, x = saccade.nn.from_torch(theirs), torch.randn(2, 5, 16)
        >>> type(block).__name__, torch.allclose(block(x), theirs(x), atol=1e-5)
        ('EncoderBlock', True)
    """
    make = _MAKERS.get(type(module))
    if make is None:
        known = ", ".join(f"nn.{kind.__name__}" for kind in _MAKERS)
        raise TypeError(
            f"module: expected one of {known}; got {type(module).__name__} (convert the parts of a larger model)"
        )
    check_theirs(module)
    ours = make(module)
    parameter = next(module.parameters())
    ours.to(device=parameter.device, dtype=parameter.dtype)
    take_over(pairs(module, ours))
    return ours


def pairs(theirs: Any, ours: Any, there: str = "", here: str = "") -> Iterator[Pair]:
    """A module of PyTorch with its counterpart in Saccade, then each pair of their parts, outer parts first."""
    yield SubmodulePlace(there, theirs), SubmodulePlace(here, ours)
    for one, other in _counterparts(theirs):
        yield from pairs(theirs.get_submodule(one), ours.get_submodule(other), join(there, one), join(here, other))


def _counterparts(theirs: Any) -> Iterator[tuple[str, str]]:
    yield from COUNTERPARTS.get(type(theirs), {}).items()
    if isinstance(theirs, nn.TransformerEncoder | nn.TransformerDecoder):
        yield from ((f"layers.{number}", f"blocks.{number}") for number in range(len(theirs.layers)))
        if theirs.norm is not None:
            yield "norm", "norm"


def take_over(parts: Iterable[Pair]) -> None:
    """Copy mode and weights, and which weights are trained, from the first module of each pair to the second."""
    for source, target in parts:
        target.module.train(source.module.training)
        if isinstance(source.module, WITH_WEIGHTS):
            _copy(source, target)


@torch.no_grad()
def _copy(source: SubmodulePlace, target: SubmodulePlace) -> None:
    given, wanted = tensors(source.module), tensors(target.module)
    shapes = [{name: tuple(tensor.shape) for name, tensor in found.items()} for found in (given, wanted)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"module: {source.path or 'it'} holds {_listed(shapes[0])}; expected {_listed(shapes[1])}, which fit the "
            "parts around it"
        )
    trained: dict[Tensor, bool] = {}  # a parameter of which a part is trained is trained
    for name, tensor in given.items():
        wanted[name].copy_(tensor)
        parameter = _viewed_parameter(wanted[name])
        trained[parameter] = trained.get(parameter, False) or _viewed_parameter(tensor).requires_grad
    for parameter, wants in trained.items():
        parameter.requires_grad_(wants)


def _viewed_parameter(tensor: Tensor) -> Tensor:
    """The parameter of which a tensor is a view."""
    return tensor if tensor._base is None else tensor._base


def _listed(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "no weights"


def tensors(layer: Any) -> dict[str, Tensor]:
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
    both = zip(("query", "key", "value", "output"), [*parts, (output.weight, output.bias)], strict=True)
    named = {f"{name}.{what}": tensor for name, of in both for what, tensor in zip(("weight", "bias"), of, strict=True)}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


# From theirs: what each is made of, as a configuration.


def _attention_config(theirs: nn.MultiheadAttention, path: str) -> AttentionConfig:
    if theirs.bias_k is not None:
        raise ValueError(
            f"module: {path or 'it'} has add_bias_kv=True, a learned key and value in every sequence, which has no "
            "counterpart"
        )
    if theirs.add_zero_attn:
        raise ValueError(
            f"module: {path or 'it'} has add_zero_attn=True, which has no counterpart (it is a sink at 0: see "
            "AttentionConfig.sink)"
        )
    return AttentionConfig(
        theirs.embed_dim,
        theirs.num_heads,
        context_width=theirs.kdim,
        values_width=theirs.vdim,
        bias=theirs.in_proj_bias is not None,
        output_bias=theirs.out_proj.bias is not None,
        dropout=theirs.dropout,
    )


def _block_config(theirs: Any, path: str) -> BlockConfig:
    decoder = isinstance(theirs, nn.TransformerDecoderLayer)
    numbers = (1, 2, 3) if decoder else (1, 2)
    dropouts = [theirs.get_submodule(f"dropout{number}") for number in numbers]
    _common_value(path, "dropouts", [layer.p for layer in dropouts])
    _common_value(path, "dropouts' training modes", [layer.training for layer in dropouts if layer.p])
    eps = _common_value(path, "norm epsilons", [theirs.get_submodule(f"norm{number}").eps for number in numbers])
    return BlockConfig(
        _attention_config(theirs.self_attn, join(path, "self_attn")),
        cross=_attention_config(theirs.multihead_attn, join(path, "multihead_attn")) if decoder else None,
        hidden=theirs.linear1.out_features,
        activation=_activation(theirs.activation, path),
        norm="layer",
        placement="pre" if theirs.norm_first else "post",
        dropout=dropouts[0].p,
        feed_forward_dropout=theirs.dropout.p,
        bias=theirs.linear1.bias is not None,
        eps=eps,
    )


def _common_value(path: str, what: str, values: list[Any]) -> Any:
    """The value that all have; ValueError if they differ."""
    if any(value != values[0] for value in values):
        raise ValueError(f"module: {path or 'it'} has {what} that differ, {values}; ours has one")
    return values[0] if values else None


def _activation(function: Any, path: str) -> str:
    """The name of PyTorch's function or module; ValueError for an activation that Saccade lacks."""
    kind = type(function)
    if function is F.relu or function is torch.relu or kind is nn.ReLU:
        return "relu"
    if function is F.gelu or kind is nn.GELU:
        return "gelu_tanh" if kind is nn.GELU and function.approximate == "tanh" else "gelu"
    if function is F.silu or kind is nn.SiLU:
        return "silu"
    raise ValueError(
        f"module: {join(path, 'activation')} {function!r} has no counterpart; ours has relu, gelu, gelu_tanh and silu"
    )


def _stack(theirs: Any, kind: type[StackKind], path: str) -> StackKind:
    configs = [_block_config(layer, join(path, f"layers.{number}")) for number, layer in enumerate(theirs.layers)]
    for number, config in enumerate(configs):
        if config != configs[0]:
            raise ValueError(
                f"module: {join(path, f'layers.{number}')} differs from the first, "
                f"{'; '.join(differences(config, configs[0]))}; convert them one by one"
            )
    ours = kind(configs[0], len(configs), final_norm=theirs.norm is not None)
    if theirs.norm is not None:
        if (theirs.norm.bias is not None) != configs[0].bias:
            raise ValueError(f"module: {join(path, 'norm')} has no counterpart: in ours it has a bias if the layers do")
        ours.norm = make_norm("layer", configs[0].width, bias=configs[0].bias, eps=theirs.norm.eps)
    return ours


def _transformer(theirs: nn.Transformer) -> Transformer:
    encoder, decoder = _stack(theirs.encoder, Encoder, "encoder"), _stack(theirs.decoder, Decoder, "decoder")
    ours = Transformer(encoder.config, (len(encoder.blocks), len(decoder.blocks)), decoder=decoder.config)
    ours.encoder, ours.decoder = encoder, decoder
    return ours


_MAKERS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    nn.MultiheadAttention: lambda theirs: MultiHeadAttention(_attention_config(theirs, "")),
    nn.TransformerEncoderLayer: lambda theirs: EncoderBlock(_block_config(theirs, "")),
    nn.TransformerDecoderLayer: lambda theirs: DecoderBlock(_block_config(theirs, "")),
    nn.TransformerEncoder: lambda theirs: _stack(theirs, Encoder, ""),
    nn.TransformerDecoder: lambda theirs: _stack(theirs, Decoder, ""),
    nn.Transformer: _transformer,
}
