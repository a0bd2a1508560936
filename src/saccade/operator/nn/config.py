"""Configurations of attention and blocks, as frozen values: two are equal if they describe the same module.

Shape legend: E model width, C width of a context, Hq / Hkv query and key-value heads, D key width, Dv value width of a
head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import NamedTuple

from .._masks import Window
from ..positions import AlibiConfig, RotaryConfig, T5Config
from ..variants import HeadSizes, MechanismConfig

PositionsConfig = RotaryConfig | AlibiConfig | T5Config

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "geglu", "geglu_tanh", "reglu", "swiglu")
GATED = {"geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu", "swiglu": "silu"}
HEAD_NORMS = ("layer", "rms")
NORMS = (*HEAD_NORMS, "batch")
PLACEMENTS = ("pre", "post", "parallel")


class AttentionShape(NamedTuple):
    """The numbers of an attention module, with the defaults put in."""

    query_heads: int  # as attention gets them; more than the heads of the output where a mechanism has several maps
    key_heads: int
    kv_heads: int  # of values
    context: int  # width of the tokens that keys are made from
    values: int  # width of the tokens that values are made from
    head: int  # D
    value_head: int  # Dv
    fused: bool
    output_bias: bool
    out: int  # width of the output


@dataclass(frozen=True, eq=False)
class AttentionConfig:
    """The configuration of a `MultiHeadAttention`.

    Args:
        width: E, of the tokens that ask.
        heads: query heads Hq.
        kv_heads: key/value heads Hkv; must divide `heads`; None is one for each query head.
        context_width: C, of the tokens that keys are made from; None is `width`.
        values_width: of the tokens that values are made from; None is `context_width`.
        head_width: D; None is `width / heads`.
        value_head_width: Dv; None is `head_width`.
        fused: one matrix for query, key and value (faster, and what checkpoints often hold); None is wherever all
            three are made from tokens of one width.
        bias: whether the projections to query, key and value have one.
        output_bias: whether the projection of the output has one; None is as `bias`.
        positions: a scheme in every head: `RotaryConfig`, `AlibiConfig`, `T5Config`; None adds none.
        qk_norm: "rms" or "layer" normalises each head's queries and keys, before rotary positions (Henry et al. 2020;
            Dehghani et al. 2023: logits cannot grow without bound); None does not.
        eps: of that norm; None is PyTorch's default.
        gate: multiplies each head's output by sigmoid(x Wg), before the output projection (Qiu et al. 2025).
        sink: one learned logit for each query head, in the denominator only, so that a head can attend to nothing
            (GPT-OSS).
        window: is always added to the mask: `Window(255, 0)` shows 256 keys, the token itself among them.
        scale: of the dot products; None is D ** -0.5.
        softcap: c > 0 turns a logit x into c * tanh(x / c) (Gemma 2).
        dropout: probability of dropping an attention weight in training.
        mechanism: replaces softmax attention: a value of `saccade.variants` such as `LinearConfig()`; None is softmax
            attention.
        out_width: of the output; None is `width`, which the residual stream of a block needs.

    Example:
        >>> import saccade
        >>> config = saccade.nn.AttentionConfig(64, heads=8, kv_heads=2, window=saccade.Window(255, 0), qk_norm="rms")
        >>> saccade.nn.MultiHeadAttention(config).projection.weight.shape  # rows: 8 + 2 + 2 heads of 8
        torch.Size([96, 64])
    """

    width: int
    heads: int
    kv_heads: int | None = None
    context_width: int | None = None
    values_width: int | None = None
    head_width: int | None = None
    value_head_width: int | None = None
    fused: bool | None = None
    bias: bool = False
    output_bias: bool | None = None
    positions: PositionsConfig | None = None
    qk_norm: str | None = None
    eps: float | None = None
    gate: bool = False
    sink: bool = False
    window: Window | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    mechanism: MechanismConfig | None = None
    out_width: int | None = None

    def __post_init__(self) -> None:
        for name in ("width", "heads"):
            check_positive(name, getattr(self, name))
        for name in ("kv_heads", "context_width", "values_width", "head_width", "value_head_width", "out_width"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_heads(self.width, self.heads, self.kv_heads, self.head_width)
        self._check_mechanism()
        for name in ("fused", "bias", "output_bias", "gate", "sink"):
            check_flag(name, getattr(self, name), optional=name in ("fused", "output_bias"))
        shape = self.shape
        if self.fused and not self.width == shape.context == shape.values:
            raise ValueError(
                f"fused: one projection needs one width, got width={self.width}, context_width={shape.context} "
                f"and values_width={shape.values}"
            )
        check_choice("qk_norm", self.qk_norm, (None, *HEAD_NORMS))
        check_eps(self.eps)
        check_share("dropout", self.dropout)
        self._check_logits()
        if self.window is not None and not isinstance(self.window, Window):
            raise TypeError(f"window: expected saccade.Window or None, got {type(self.window).__name__}")

    def _check_mechanism(self) -> None:
        """ValueError for options that the mechanism would silently ignore."""
        if self.mechanism is None:
            return
        if not isinstance(self.mechanism, MechanismConfig):
            raise TypeError(
                f"mechanism: expected a configuration of saccade.variants or None, got {type(self.mechanism).__name__}"
            )
        traits, name, shape = self.mechanism.traits, self.mechanism.name, self.shape
        biased = self.positions is not None and not isinstance(self.positions, RotaryConfig)
        logits = "it has no logits for that"
        asked: dict[str, tuple[bool, bool | str]] = {
            "positions": (biased and "bias" not in traits.takes, "it has no logits to add a bias to"),
            "kv_heads": (shape.kv_heads != self.heads, traits.grouped),
            "window": (self.window is not None, traits.masks),
            "sink": (bool(self.sink) and "sink" not in traits.takes, "it has no denominator to add one to"),
            "scale": (self.scale is not None and "scale" not in traits.takes, logits),
            "softcap": (self.softcap is not None and "softcap" not in traits.takes, logits),
            "dropout": (self.dropout != 0 and "dropout" not in traits.takes, "it has no weights that could be dropped"),
        }
        if self.mechanism.shares_key:
            shared = "keys are the queries"
            asked["kv_heads"] = asked["kv_heads"][0], shared
            asked["context_width"] = shape.context != self.width, shared
        for option, (wanted, able) in asked.items():
            if wanted and able is not True:
                raise ValueError(
                    f"{option}: not with the mechanism {name!r}, {reason(able)}; got {getattr(self, option)!r}"
                )
        if not self.width == shape.context == shape.values:
            check_cross(self)
        if self.head_width is None and self.width // self.heads % self.mechanism.maps:
            raise ValueError(
                f"heads: the mechanism {name!r} splits each head in {self.mechanism.maps}, but "
                f"{self.width} / {self.heads} = {self.width // self.heads}"
            )

    def _check_logits(self) -> None:
        """Check the options that change logits."""
        if self.positions is not None and not isinstance(self.positions, PositionsConfig):
            raise TypeError(
                "positions: expected RotaryConfig, AlibiConfig, T5Config or None, got "
                f"{type(self.positions).__name__}; positions that are added to the embedding are not set here"
            )
        turned = isinstance(self.positions, RotaryConfig) and self.positions.turned is None
        if turned and self.shape.head % 2:
            raise ValueError(
                "positions: rotary positions rotate pairs of features, so the head width must be even, got "
                f"{self.shape.head}"
            )
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            if value is not None:
                check_number(name, value)
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap: must be positive, got {self.softcap}")

    @property
    def shape(self) -> AttentionShape:
        """All sizes, with defaults filled in."""
        context = self.context_width or self.width
        maps = 1 if self.mechanism is None else self.mechanism.maps
        values, head = self.values_width or context, self.head_width or self.width // self.heads // maps
        kv_heads = self.kv_heads or self.heads
        return AttentionShape(
            query_heads=maps * self.heads,
            key_heads=maps * kv_heads,
            kv_heads=kv_heads,
            context=context,
            values=values,
            head=head,
            value_head=self.value_head_width or maps * head,
            fused=self.width == context == values if self.fused is None else self.fused,
            output_bias=self.bias if self.output_bias is None else self.output_bias,
            out=self.out_width or self.width,
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Features of all queries, of all keys (0 where keys are the queries), of all values: Hq D, Hkv D, Hkv Dv."""
        shape = self.shape
        keys = 0 if self.mechanism is not None and self.mechanism.shares_key else shape.key_heads * shape.head
        return shape.query_heads * shape.head, keys, shape.kv_heads * shape.value_head

    def heads_for_mechanism(self) -> HeadSizes:
        """The heads and widths for which a mechanism is built."""
        shape = self.shape
        return HeadSizes(self.width, shape.query_heads, shape.key_heads, shape.head, shape.value_head)

    def __eq__(self, other: object) -> bool:
        return self._described() == other._described() if isinstance(other, AttentionConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._described())

    def _described(self) -> tuple[object, ...]:
        """The configuration with defaults filled in, for comparisons."""
        logits = self.positions, self.qk_norm, self.eps, self.window, self.scale, self.softcap, self.mechanism
        return self.width, self.heads, self.shape, self.bias, self.gate, self.sink, self.dropout, *logits


@dataclass(frozen=True, eq=False)
class BlockConfig:
    """The configuration of an `EncoderBlock` or `DecoderBlock`. The defaults are like Llama's; `from_torch` shows
    PyTorch's.

    Args:
        attention: of the tokens to each other.
        cross: to a context; for decoder blocks of an encoder-decoder. None is none.
        hidden: F, width inside the feed-forward layer; None is 4 E, or where it is gated 8/3 E (as many parameters)
            rounded up to a multiple of 32; 0 leaves out that layer and its norm: attention alone.
        activation: "gelu", "gelu_tanh", "relu", "silu", or gated: "geglu", "geglu_tanh", "reglu", "swiglu" (Shazeer
            2020).
        norm: "layer" (Ba et al. 2016), "rms" (Zhang and Sennrich 2019) or "batch" (Ioffe and Szegedy 2015), which in
            training joins all tokens of a batch, padding and later ones too.
        placement: "pre", x + f(norm(x)) (Xiong et al. 2020); "post", norm(x + f(x)) (Vaswani et al. 2017); or
            "parallel", x + attention(norm(x)) + feed_forward(norm(x)) (GPT-J; Chowdhery et al. 2022).
        dropout: on what is added to the residual stream, in training. Attention weights have `attention.dropout`.
        feed_forward_dropout: inside the feed-forward layer, after the activation.
        bias: whether feed-forward layers and layer norms have one.
        eps: of the norms; None is PyTorch's default for each.

    Example:
        >>> import saccade
        >>> attention = saccade.nn.AttentionConfig(16, heads=4)
        >>> saccade.nn.BlockConfig(attention, activation="gelu", norm="layer", placement="post").hidden_width
        64
    """

    attention: AttentionConfig
    cross: AttentionConfig | None = None
    hidden: int | None = None
    activation: str = "swiglu"
    norm: str = "rms"
    placement: str = "pre"
    dropout: float = 0.0
    feed_forward_dropout: float = 0.0
    bias: bool = False
    eps: float | None = None

    def __post_init__(self) -> None:
        for name in ("attention", "cross"):
            value = getattr(self, name)
            if not isinstance(value, AttentionConfig) and not (name == "cross" and value is None):
                raise TypeError(f"{name}: expected AttentionConfig, got {type(value).__name__}")
        shape = self.attention.shape
        if not self.width == shape.context == shape.values:
            raise ValueError(
                f"attention: expected keys and values made from the block's tokens, {self.width} wide, got widths "
                f"{shape.context} and {shape.values}; a context of another width is read by `cross`"
            )
        self._check_out("attention", self.attention)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("norm", self.norm, NORMS)
        check_choice("placement", self.placement, PLACEMENTS)
        if self.hidden is not None:
            check_count("hidden", self.hidden)
        check_share("dropout", self.dropout)
        check_share("feed_forward_dropout", self.feed_forward_dropout)
        if self.hidden == 0 and self.feed_forward_dropout:
            raise ValueError(
                f"feed_forward_dropout: without a feed-forward layer (hidden=0) there is none, got "
                f"{self.feed_forward_dropout}"
            )
        check_flag("bias", self.bias)
        check_eps(self.eps)
        if self.cross is not None:
            self._check_cross(self.cross)

    @property
    def hidden_width(self) -> int:
        """F, with the default put in; 0 without a feed-forward layer."""
        return default_hidden(self.width, gated=self.activation in GATED) if self.hidden is None else self.hidden

    def __eq__(self, other: object) -> bool:
        return self._described() == other._described() if isinstance(other, BlockConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._described())

    def _described(self) -> tuple[object, ...]:
        activation = self.activation if self.hidden_width else None
        layers = self.attention, self.cross, self.hidden_width, activation, self.norm, self.placement
        return *layers, self.dropout, self.feed_forward_dropout, self.bias, self.eps

    @property
    def width(self) -> int:
        """E."""
        return self.attention.width

    def _check_out(self, name: str, part: AttentionConfig) -> None:
        if part.shape.out != self.width:
            raise ValueError(
                f"{name}: its out_width is {part.shape.out}, and the residual stream of a block {self.width} wide"
            )

    def _check_cross(self, cross: AttentionConfig) -> None:
        if cross.width != self.width:
            raise ValueError(f"cross: its width {cross.width} is not attention's {self.width}")
        self._check_out("cross", cross)
        check_cross(cross, "cross")
        if cross.positions is not None:
            raise ValueError("cross: cross-attention has two sequences and takes no positions; leave positions out")
        if self.placement == "parallel":
            raise ValueError("cross: parallel blocks have one norm and no cross-attention; use 'pre' or 'post'")

    def without_positions(self) -> BlockConfig:
        """The same block, for a stack that holds the positions of all its layers."""
        return replace(self, attention=replace(self.attention, positions=None))

    def at_depth(self, layer: int) -> BlockConfig:
        """The same block for layer `layer` of a stack, counted from 0: some mechanisms start differently in each."""

        def deep(attention: AttentionConfig) -> AttentionConfig:
            mechanism = attention.mechanism
            return attention if mechanism is None else replace(attention, mechanism=mechanism.at_depth(layer))

        cross = None if self.cross is None else deep(self.cross)
        return replace(self, attention=deep(self.attention), cross=cross)


def reason(able: bool | str) -> str:
    """Why a mechanism lacks an ability, as the end of a sentence."""
    return f"since {able}" if isinstance(able, str) else "which cannot do that"


def check_cross(config: AttentionConfig, argument: str = "context") -> None:
    """ValueError if the mechanism does not support cross-attention."""
    mechanism = config.mechanism
    if mechanism is not None and mechanism.traits.cross is not True:
        why = f", {reason(mechanism.traits.cross)}" if mechanism.traits.cross else ""
        raise ValueError(f"{argument}: the mechanism {mechanism.name!r} supports only self-attention{why}")


def check_causal(config: AttentionConfig) -> None:
    """ValueError if the mechanism cannot be causal."""
    mechanism = config.mechanism
    if mechanism is not None and mechanism.traits.causal is not True:
        raise ValueError(f"mechanism: {mechanism.name!r} cannot be causal, {reason(mechanism.traits.causal)}")


def default_hidden(width: int, *, gated: bool = True) -> int:
    """The hidden width: 4 E; of a gated layer, which has two input matrices, 8/3 E rounded up to a multiple of 32."""
    return -(-8 * width // (3 * 32)) * 32 if gated else 4 * width


def check_heads(width: int, heads: int, kv_heads: int | None, head_width: int | None = None) -> None:
    """ValueError unless the heads divide the width (or have a given head width) and kv_heads divide the heads."""
    check_positive("width", width)
    if heads < 1 or (head_width is None and width % heads):
        raise ValueError(f"heads: must divide the width, got heads={heads} and width={width}")
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        raise ValueError(f"kv_heads: must divide the heads, got kv_heads={kv_heads} and heads={heads}")


def check_positive(name: str, value: object) -> None:
    check_count(name, value, least=1)


def check_count(name: str, value: object, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: must be at least {least}, got {value}")


def check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: must be a number, got {value!r}")
    try:
        finite = math.isfinite(value)
    except OverflowError:
        raise ValueError(f"{name}: must be finite, got a whole number too large for a float") from None
    if not finite:
        raise ValueError(f"{name}: must be finite, got {value}")


def check_share(name: str, value: object) -> None:
    check_number(name, value)
    if not 0.0 <= value < 1.0:  # type: ignore[operator]
        raise ValueError(f"{name}: must be in [0, 1), got {value}")


def check_eps(value: object) -> None:
    if value is not None:
        check_number("eps", value)
        if value <= 0:  # type: ignore[operator]
            raise ValueError(f"eps: must be positive, got {value}")


def check_flag(name: str, value: object, *, optional: bool = False) -> None:
    if not isinstance(value, bool) and not (optional and value is None):
        raise TypeError(f"{name}: must be True or False, got {value!r}")


def check_choice(name: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        listed = ", ".join("None" if choice is None else repr(choice) for choice in choices)
        raise ValueError(f"{name}: expected one of {listed}; got {value!r}")
