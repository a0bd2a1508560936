"""Tiny random models of the families that `attn_implementation="saccade"` is held to, and batches for them.

Sizes are primes wherever the architecture lets them be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 61
LENGTH = 13


@dataclass(frozen=True)
class Family:
    """How to make one model, and what it reads."""

    name: str
    config: Callable[[], Any]
    model: str  # a class of transformers
    reads: str = "tokens"  # "tokens", "pixels", "sound"
    encoder_decoder: bool = False
    generates: bool = False
    causal: bool = False


def _text(kind: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, kind)(vocab_size=VOCABULARY, **more)

    return make


BERT = {
    "hidden_size": 33,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 41,
}
LLAMA = {
    "hidden_size": 42,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "num_hidden_layers": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 59,
    "pad_token_id": 0,
}
PLAIN = {"rope_type": "default", "rope_theta": 150000.0}


def _vit() -> Any:
    import transformers

    return transformers.ViTConfig(
        hidden_size=33,
        num_attention_heads=3,
        num_hidden_layers=2,
        intermediate_size=37,
        image_size=21,
        patch_size=7,
        num_labels=5,
    )


FAMILIES = [
    Family("bert", _text("BertConfig", **BERT), "BertForMaskedLM"),
    Family("roberta", _text("RobertaConfig", **BERT, pad_token_id=0), "RobertaForMaskedLM"),
    Family(
        "gpt2",
        _text("GPT2Config", n_embd=33, n_head=3, n_layer=2, n_positions=41, eos_token_id=59, bos_token_id=1),
        "GPT2LMHeadModel",
        generates=True,
        causal=True,
    ),
    Family("llama", _text("LlamaConfig", **LLAMA), "LlamaForCausalLM", generates=True, causal=True),
    Family(
        "mistral", _text("MistralConfig", **LLAMA, sliding_window=5), "MistralForCausalLM", generates=True, causal=True
    ),
    Family(
        "gemma2",
        _text("Gemma2Config", **LLAMA, sliding_window=5, attn_logit_softcapping=1.5, query_pre_attn_scalar=11),
        "Gemma2ForCausalLM",
        generates=True,
        causal=True,
    ),
    Family(
        "gpt-oss",
        _text(
            "GptOssConfig",
            **LLAMA,
            sliding_window=5,
            num_local_experts=3,
            num_experts_per_tok=2,
            rope_parameters=PLAIN,
        ),
        "GptOssForCausalLM",
        generates=True,
        causal=True,
    ),
    Family("vit", _vit, "ViTForImageClassification", reads="pixels"),
    Family(
        "whisper",
        _text(
            "WhisperConfig",
            d_model=42,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=3,
            decoder_attention_heads=3,
            encoder_ffn_dim=37,
            decoder_ffn_dim=37,
            num_mel_bins=11,
            max_source_positions=17,
            max_target_positions=41,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=59,
            decoder_start_token_id=2,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        "WhisperForConditionalGeneration",
        reads="sound",
        encoder_decoder=True,
        generates=True,
        causal=True,
    ),
    Family(
        "t5",
        _text(
            "T5Config",
            d_model=33,
            d_kv=11,
            d_ff=37,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=3,
            pad_token_id=0,
            eos_token_id=59,
            decoder_start_token_id=2,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=11,
        ),
        "T5ForConditionalGeneration",
        encoder_decoder=True,
        generates=True,
        causal=True,
    ),
]
BY_NAME = {family.name: family for family in FAMILIES}


def make(family: Family, implementation: str, *, dtype: torch.dtype = torch.float32, seed: int = 7) -> Any:
    """The family's model with the same random weights whatever computes its attention."""
    import transformers

    torch.manual_seed(seed)
    config = family.config()
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped product of experts wants widths of 16 bytes
    model = getattr(transformers, family.model)(config)
    with torch.no_grad():  # larger than any initialisation: attention far from uniform, sinks and biases not zero
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.2) + (parameter.dim() == 1)
            )
    model.set_attn_implementation(implementation)
    return model.to(dtype).eval()


def batch(family: Family, *, side: str = "right", length: int = LENGTH) -> dict[str, Tensor]:
    """Two samples; the second one's padding is at the `side` ("right", "left", or "none")."""
    torch.manual_seed(3)
    if family.reads == "pixels":
        return {"pixel_values": torch.randn(2, 3, 21, 21)}
    made: dict[str, Tensor] = {}
    if family.reads == "sound":
        made["input_features"] = torch.randn(2, 11, 34)
    else:
        made["input_ids"] = torch.randint(3, VOCABULARY - 3, (2, length))
        made["attention_mask"] = padding(length, side)
    if family.encoder_decoder:
        made["decoder_input_ids"] = torch.randint(3, VOCABULARY - 3, (2, 7))
        made["decoder_attention_mask"] = padding(7, side)
    return made


def padding(length: int, side: str) -> Tensor:
    kept = torch.ones(2, length, dtype=torch.int64)
    if side == "right":
        kept[1, length - 3 :] = 0
    elif side == "left":
        kept[1, :3] = 0
    return kept


def real(family: Family, given: dict[str, Tensor]) -> Tensor | None:
    """(2, L) bool: the rows of the output that are tokens."""
    mask = given.get("decoder_attention_mask" if family.encoder_decoder else "attention_mask")
    return None if mask is None else mask.bool()


def streams(family: Family, given: dict[str, Tensor]) -> list[tuple[str, Tensor | None]]:
    """The names of the hidden states that the model returns, with the rows of each that are tokens."""
    kept = real(family, given)
    if not family.encoder_decoder:
        return [("hidden_states", kept)]
    encoder = given.get("attention_mask")
    return [("encoder_hidden_states", None if encoder is None else encoder.bool()), ("decoder_hidden_states", kept)]


def assert_as_good(ours: Tensor, theirs: Tensor, exact: Tensor, kept: Tensor | None = None) -> None:
    """Ours is at most twice as far from `exact` as theirs (and a rounding of the result), over the rows kept."""
    ours, theirs, exact = (x.double() if kept is None else x[kept].double() for x in (ours, theirs, exact))
    assert ours.isfinite().all() and exact.norm() > 0
    rounding = exact.norm() * torch.finfo(torch.float32).eps
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + rounding
