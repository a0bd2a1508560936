"""Llama and those that followed it: decoders of text. Touvron et al., "LLaMA" (2023); Llama 2 (2023); Dubey et al.,
"The Llama 3 Herd of Models" (2024); Jiang et al., "Mistral 7B" (2023); Qwen2 (2024), Qwen3 (2025); SmolLM.

The block with its norm first, x = x + attention(norm(x)), x = x + feed_forward(norm(x)), and one more norm at the end;
RMS norms, SwiGLU, rotary positions, fewer key/value heads than query heads, and a head of its own or the embedding's.
What differs is a value of the configuration: biases, norms of queries and keys (Qwen3), windows of some layers, layers
without positions (SmolLM3), and how rotary frequencies are stretched.

Shape legend: B batch, L length, T tokens as they are computed, E width.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ....operator._masks import Window
from ....operator.nn import AttentionConfig, BlockConfig, Decoder
from ....operator.positions import LinearScaling, Llama3Scaling, Offset, RotaryConfig, YaRNScaling
from ....operator.positions.scaling import Scaling
from ..checkpoints.keys import Key, KeyMap
from ..checkpoints.settings import CheckpointSettings
from ..model import Family, Request
from ..text.decoder import TextDecoder
from .gpt2 import decoder_head, decoder_keys

TYPES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
HEADS = {"causal-lm": "ForCausalLM", "sequence-classification": "ForSequenceClassification"}
ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}  # of the gate
SCALINGS = ("default", "linear", "dynamic", "yarn", "llama3")
LAYER_TYPES = {"full_attention": False, "sliding_attention": True}  # whether there is a window


class Llama(TextDecoder):
    """Llama, Mistral, Qwen2, Qwen3 or SmolLM with the head of a language model, a classifier of its last token, or
    none."""

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        layers = settings.layers("num_hidden_layers")
        block, width = llama_block(settings, request), settings.count("hidden_size")
        windows, turned = _windows(settings, layers), _turned(settings, layers)
        positions, self.longest = rotary(settings)
        self.tokens = nn.Embedding(settings.count("vocab_size"), width)
        self.decoder = Decoder(
            [
                replace(
                    block,
                    attention=replace(
                        block.attention, window=windows[layer], positions=positions if turned[layer] else None
                    ),
                )
                for layer in range(layers)
            ]
        )
        self.tied = settings.flag("tie_word_embeddings", settings.get("model_type") == "smollm3")
        self.head = decoder_head(settings, request, self.tokens, tied=self.tied)

    @property
    def context(self) -> int | None:
        """`max_position_embeddings`, on which it was trained; rotary positions go on beyond."""
        return self.settings.count("max_position_embeddings", 2048)

    def embed(self, input_ids: Tensor, offset: Offset) -> Tensor:
        return self.tokens(input_ids)


def llama_block(settings: CheckpointSettings, request: Request) -> BlockConfig:
    """The block of all layers, without positions and windows."""
    kind = settings.get("model_type")
    width, heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    biased = kind != "mistral" and settings.flag("attention_bias", False)
    eps = settings.eps("rms_norm_eps", 1e-6)
    attention = AttentionConfig(
        width,
        heads,
        kv_heads=settings.count("num_key_value_heads", heads),
        head_width=settings.count("head_dim", 128 if kind == "qwen3" else max(1, width // heads)),
        bias=biased or kind == "qwen2",
        output_bias=biased,
        qk_norm="rms" if kind == "qwen3" else None,
        eps=eps,
        dropout=request.weight_dropout(settings, "attention_dropout", 0.0),
        mechanism=request.mechanism,
    )
    return BlockConfig(
        attention,
        hidden=settings.count("intermediate_size"),
        activation=settings.choice("hidden_act", ACTIVATIONS, "silu"),
        norm="rms",
        bias=kind in ("llama", "smollm3") and settings.flag("mlp_bias", False),
        eps=eps,
    )


def rotary(settings: CheckpointSettings) -> tuple[RotaryConfig, int | None]:
    """Rotary positions, and the number of tokens that they support; None for any number.

    Folders of today have `rope_parameters`, older ones `rope_theta` and `rope_scaling`.
    """
    field = "rope_parameters" if "rope_parameters" in settings else "rope_scaling"
    values = settings.get(field, {})
    if not isinstance(values, dict):
        raise settings.error(field, "an object")
    usual = 2_000_000.0 if settings.get("model_type") == "smollm3" else 10_000.0
    inside = CheckpointSettings(
        {**values, "rope_theta": values.get("rope_theta", settings.get("rope_theta", usual))}, settings.path
    )
    inside.values.setdefault("partial_rotary_factor", settings.get("partial_rotary_factor"))
    inside.only("partial_rotary_factor", 1)
    inside.values.setdefault("rope_type", inside.values.get("type", "default"))
    kind = inside.choice("rope_type", {name: name for name in SCALINGS})
    scaling, longest = _scaling(kind, inside, settings)
    return RotaryConfig(inside.theta("rope_theta"), scaling=scaling), longest


def _scaling(kind: str, inside: CheckpointSettings, settings: CheckpointSettings) -> tuple[Scaling | None, int | None]:
    if kind == "default":
        return None, None
    longest = settings.count("max_position_embeddings", 2048)
    original = inside.count(
        "original_max_position_embeddings", settings.count("original_max_position_embeddings", longest)
    )
    if kind == "dynamic":
        return None, original  # frequencies follow the length of the text, but within this length they do not
    if kind == "linear":
        return LinearScaling(inside.number("factor")), None
    if kind == "llama3":
        low, high = (inside.number(f"{end}_freq_factor") for end in ("low", "high"))
        return Llama3Scaling(inside.number("factor"), original, low, high), None
    inside.only("truncate", True)
    factor = inside.number("factor", longest / original)
    grown = inside.number("attention_factor") if "attention_factor" in inside else None
    scales = [inside.number(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    if grown is None and all(scales):  # DeepSeek's
        above, below = (0.1 * scale * math.log(max(factor, 1.0)) + 1.0 for scale in scales)
        grown = above / below
    fast, slow = inside.number("beta_fast", 32.0), inside.number("beta_slow", 1.0)
    return YaRNScaling(factor, original, fast, slow, grown), None


def _windows(settings: CheckpointSettings, layers: int) -> list[Window | None]:
    """The window of each layer; None for a layer without one."""
    kind = settings.get("model_type")
    if kind == "mistral":
        settings.values.setdefault("sliding_window", 4096)  # absent is not null, which means none
    if kind in ("llama", "mistral"):
        if kind == "llama" and "sliding_window" in settings:
            raise settings.error("sliding_window", "null, since Llama has no windows")
        slides = [kind == "mistral" and "sliding_window" in settings] * layers
        if _by_layer(settings, layers, slides) != slides:
            raise settings.error("layer_types", "the same in all layers")
    elif not settings.flag("use_sliding_window", False):
        slides = _by_layer(settings, layers, [False] * layers)
    elif kind == "smollm3":
        slides = _by_layer(settings, layers, [not turned for turned in _turned(settings, layers)])
    else:
        first = settings.count("max_window_layers", 28, least=0)
        slides = _by_layer(settings, layers, [layer >= first for layer in range(layers)])
    if not any(slides):
        return [None] * layers
    window = Window(settings.count("sliding_window") - 1, 0)
    return [window if slide else None for slide in slides]


def _by_layer(settings: CheckpointSettings, layers: int, usual: list[bool]) -> list[bool]:
    """Which layers `layer_types` gives a window."""
    values: Any = settings.get("layer_types")
    if values is None:
        return usual
    known = isinstance(values, list) and len(values) == layers and all(isinstance(value, str) for value in values)
    if not known or not LAYER_TYPES.keys() >= set(values):
        raise settings.error("layer_types", f"one of {', '.join(map(repr, LAYER_TYPES))} for each of {layers} layers")
    return [LAYER_TYPES[value] for value in values]


def _turned(settings: CheckpointSettings, layers: int) -> list[bool]:
    """Which layers have rotary positions."""
    if settings.get("model_type") != "smollm3":
        return [True] * layers
    given: Any = settings.get("no_rope_layers")  # 1 where there are positions, whatever the name says
    if given is None:
        interval = settings.count("no_rope_layer_interval", 4)
        return [bool((layer + 1) % interval) for layer in range(layers)]
    if not isinstance(given, list) or len(given) != layers or not all(turned in (0, 1) for turned in given):
        raise settings.error("no_rope_layers", f"1 or 0 for each of {layers} layers")
    return [bool(turned) for turned in given]


BLOCK, LAYER = "decoder.blocks.{n}", "layers.{n}"


def _keys(model: Llama) -> KeyMap:
    projections = tuple(f"{LAYER}.self_attn.{part}_proj" for part in "qkv")
    return decoder_keys(
        model.request.head,
        (
            Key("tokens", "embed_tokens"),
            Key(f"{BLOCK}.attention_norm", f"{LAYER}.input_layernorm"),
            Key(
                f"{BLOCK}.attention.projection",
                projections,
                rows=tuple(config.attention.sizes for config in model.decoder.configs),
            ),
            Key(f"{BLOCK}.attention.query_norm", f"{LAYER}.self_attn.q_norm"),
            Key(f"{BLOCK}.attention.key_norm", f"{LAYER}.self_attn.k_norm"),
            Key(f"{BLOCK}.attention.output", f"{LAYER}.self_attn.o_proj"),
            Key(f"{BLOCK}.feed_forward_norm", f"{LAYER}.post_attention_layernorm"),
            Key(f"{BLOCK}.feed_forward.gate_up", (f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj")),
            Key(f"{BLOCK}.feed_forward.down", f"{LAYER}.mlp.down_proj"),
            Key("decoder.norm", "norm"),
        ),
        prefix="model.",
        tied=model.tied,
        derived=(f"{LAYER}.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"),
    )


FAMILY = Family("Llama", TYPES, HEADS, Llama, _keys, ("sequence-classification",), own_head_width=True)
