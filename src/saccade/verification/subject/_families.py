"""The scale of attention of model families, from their configuration: the head width does not determine it.

Sources: the papers; for a family without a paper, the documentation of its configuration in transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ._reading import Promise

# model_type -> the factor of the logits, from (configuration, index of the layer)
SCALES: dict[str, Callable[[Any, int], float]] = {
    # Raffel et al. 2020, "Exploring the Limits of Transfer Learning": the factor is in the initial weights instead.
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "pix2struct", "udop"), lambda *_: 1.0
    ),
    # Black et al. 2021, GPT-Neo: weights of its training code, without a factor.
    "gpt_neo": lambda *_: 1.0,
    # Gemma 2 report 2024: the 27B model divides by the square root of width / heads, not of the head's width.
    **dict.fromkeys(
        ("gemma2", "gemma3", "gemma3_text", "vaultgemma", "t5gemma", "t5gemma2"),
        lambda config, _: text_config(config).query_pre_attn_scalar ** -0.5,
    ),
    # Queries and keys are normalised, and the learned factor of that is all: Gemma 4, Gemma 3n.
    **dict.fromkeys(
        ("gemma4", "gemma4_text", "gemma4_unified_text", "gemma3n", "gemma3n_text", "diffusion_gemma"), lambda *_: 1.0
    ),
    # Yang et al. 2022, "Tensor Programs V" (muP): a multiplier of its own, as IBM's Granite has it.
    **dict.fromkeys(
        ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid", "granite_swa", "granitemoe_swa"),
        lambda config, _: config.attention_multiplier,
    ),
    # Glorioso et al. 2024, "Zamba": heads are twice as wide, of the hidden state and the first embedding.
    **dict.fromkeys(("zamba", "zamba2"), lambda config, _: (config.attention_head_dim / 2) ** -0.5),
    # He et al. 2021, DeBERTa (equation 4): content and each relative term are of variance 1.
    **dict.fromkeys(
        ("deberta", "deberta-v2"),
        lambda config, _: (config.hidden_size // config.num_attention_heads * _terms(config)) ** -0.5,
    ),
    # LongCat-Flash report 2025: queries and keys of low rank are scaled up to the variance of the hidden state.
    "longcat_flash": lambda config, _: config.qk_head_dim**-0.5 * (config.hidden_size / config.q_lora_rank) ** 0.5,
    # Mistral's "scale_attn_by_inverse_layer_idx" for GPT-2: configuration of transformers, Karamcheti et al. 2021.
    **dict.fromkeys(
        ("gpt2", "imagegpt", "gpt_bigcode"),
        lambda config, layer: (
            ((config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0)
            / (layer + 1 if getattr(config, "scale_attn_by_inverse_layer_idx", False) else 1)
        ),
    ),
}


def _terms(config: Any) -> int:
    kinds = (config.pos_att_type or ()) if config.relative_attention else ()
    return 1 + sum(kind in kinds for kind in ("c2p", "p2c"))


def promised(module: nn.Module, config: Any, promise: Promise) -> Promise:
    """`promise`, with the scale of the module's family if the user gives none. A scale that differs by layer is
    promised for one layer, not for a model of several."""
    rule = SCALES.get(getattr(config, "model_type", ""))
    if rule is None:  # a reader of images or sounds before a decoder of such a family
        config = text_config(config)
        rule = SCALES.get(getattr(config, "model_type", ""))
    if promise.scale is not None or rule is None:
        return promise
    parts: list[Any] = list(module.modules())
    layers = {int(part.layer_idx) for part in parts if isinstance(getattr(part, "layer_idx", None), int)} or {0}
    scales = {rule(config, at) for at in layers}
    return replace(promise, scale=scales.pop()) if len(scales) == 1 else promise


def text_config(config: Any) -> Any:
    """The configuration of the part that reads text, or the whole."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config
