"""Runs `verify` on one tiny random model of every family of transformers that reads tokens, and prints its errors.

    python tests/verification/zoo.py [FAMILY ...] [--stacks] [--full]

With --stacks `verify_stack` runs instead: the model with padding, its own caches, `generate` in batches, and packs of
`DataCollatorWithFlattening` where its mask reads position_ids.

Families whose models cannot be made tiny here are left out with the reason. What docs/verify-models.md explains is
marked; the exit status is 1 where there are other errors. All families take some 20 minutes, and 8 with --stacks.
"""

from __future__ import annotations

import argparse
import inspect
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

import saccade
from saccade.verification import Report, StackReport, checks

HEADS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "d_model": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_heads": 4,
    "d_kv": 8,
    "d_ff": 37,
    "intermediate_size": 40,
    "ffn_dim": 37,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "max_position_embeddings": 96,
    "head_dim": 8,
    "sliding_window": 5,
    "attention_window": 6,
    "embedding_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "layers": 2,
    "d_inner": 37,
    "depth": 2,
    "embed_dim": 32,
    "image_size": 16,
    "patch_size": 8,
    "num_mel_bins": 16,
    "output_hidden_size": 32,
    "out_hidden_size": 32,
    "projection_dim": 32,
    "projector_hidden_size": 32,
    "vision_output_dim": 32,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "audio_hidden_size": 32,
    "entity_vocab_size": 31,
    "entity_emb_size": 16,
}
MORE: dict[str, dict[str, Any]] = {
    **{
        name: {"layer_types": ["linear_attention", "full_attention"]}
        for name in "bailing_hybrid qwen3_5_text qwen3_5_moe_text qwen3_next olmo_hybrid".split()
    },
    **{
        name: {"layer_types": ["sliding_attention", "full_attention"]}
        for name in "gemma3_text gemma4_unified_text gpt_oss vaultgemma beam modernbert".split()
    },
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "codegen": {"n_embd": 32, "n_head": 4, "rotary_dim": 4, "head_dim": None},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 8,
        "share_att_key": True,
    },
    "dots1": {"num_key_value_heads": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense", "dense"],
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 16},
    "esmc": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["linear_attention", "full_attention"]},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "global_head_dim": 8,
    },
    "gptj": {"n_embd": 32, "n_head": 4, "rotary_dim": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "funnel": {"block_sizes": [1, 1], "num_hidden_layers": None, "pad_token_id": None, "d_head": 8, "n_head": 4},
    "kimi_linear": {"num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "moshi": {"ffn_dim": 40},
    "moshi_depth": {"ffn_dim": 40},
    "blt": {"encoder_hash_byte_group_vocab": 53, "patching_mode": "space", "tie_word_embeddings": False},
    "blt_local_encoder": {"hidden_size_global": 64},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_global_transformer": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": None},
    "perceiver": {
        "d_model": 32,
        "d_latents": 32,
        "num_latents": 7,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "qk_channels": 32,
        "v_channels": 32,
    },
    "dbrx": {
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 96},
    "neomme": {"head_dim": 16},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "max_position_embeddings": 128,  # it pads to whole chunks of 64
        "attention_head_size": 8,
        "is_decoder": False,
    },
    "roc_bert": {"pronunciation_vocab_size": 31, "shape_vocab_size": 37},
    "squeezebert": {"hidden_size": 64, "embedding_size": 64, "num_attention_heads": 4},
    "xlnet": {"d_head": 8, "n_head": 4},
    "xlm": {"n_words": 97, "pad_index": 1},
    "flaubert": {"n_words": 97, "pad_index": 1},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "xlstm": {"hidden_size": 64, "qk_dim_factor": 1.0},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "xmod": {"default_language": "en_XX"},
    "fsmt": {"src_vocab_size": 89},
    "recurrent_gemma": {"num_hidden_layers": 2, "block_types": ["recurrent", "attention"], "lru_width": 32},
    "zaya": {"num_experts_per_tok": 1},
}

# Errors that say something true: family -> checks; docs/verify-models.md has the words.
EXPLAINED: dict[str, set[str]] = {
    "bamba": {"model"},
    "blt": {"padding", "model"},
    "convbert": {"padding", "model"},
    "cpmant": {"causal-leak", "mask-meaning", "model"},
    "dots3_note": {"mixing"},
    "dots3_note_text": {"mixing"},
    "falcon": {"causal-leak", "dropout", "model"},
    "fsmt": {"causal-leak", "model"},
    "hrm_text": {"gradients"},
    "inkling2_text": {"dtype and device"},
    "minimax": {"softmax"},
    "mobilebert": {"padding", "model"},
    "moshi": {"model"},
    "mra": {"dtype and device", "model"},
    "nemo_speechlm": {"model"},
    "nemotron_h": {"model"},
    "nystromformer": {"dropout", "model"},
    "pegasus_x": {"dropout"},
    "phimoe": {"gradients"},
    "prophetnet": {"mixing", "model"},
    "recurrent_gemma": {"padding", "model"},
    "reformer": {"gradients"},
    "rwkv": {"mask-meaning", "robustness"},
    "encoder-decoder": {"causal-leak", "model"},
    "funnel": {"mixing", "robustness", "model"},
    "zamba2": {"model"},
    "yoso": {"softmax", "gradients", "model"},
}

# The same of probes, with --stacks.
EXPLAINED_STACKS: dict[str, set[str]] = {
    "afmoe": {"packing"},
    "bert-generation": {"packing"},
    "biogpt": {"packing"},
    "blt": {"batch", "packing", "cache"},
    "convbert": {"batch"},
    "cpmant": {"causality", "batch", "cache"},
    "encoder-decoder": {"causality", "source"},
    "falcon": {"packing"},
    "funnel": {"batch"},
    "git": {"cache"},
    "gpt_oss": {"packing"},
    "mobilebert": {"batch"},
    "moshi": {"cache", "reach"},
    "mra": {"reach"},
    "nemo_speechlm": {"cache"},
    "nemotron_h": {"cache"},
    "nystromformer": {"batch"},
    "opt": {"packing"},
    "prophetnet": {"causality", "batch"},
    "recurrent_gemma": {"batch"},
    "rwkv": {"batch"},
    "trocr": {"batch", "cache"},
    "whisper": {"batch", "cache"},
    "xglm": {"packing"},
    "yoso": {"batch"},
    "zamba2": {"cache"},
}


def families() -> list[str]:
    """Every family with a class that gives logits for tokens."""
    tables = [vars(modeling_auto)[f"MODEL_FOR_{head}_MAPPING_NAMES"] for head in HEADS]
    return sorted({name for table in tables for name in table})


def tiny(family: str) -> nn.Module:
    """A model of two layers with weights of variance 1 / width."""
    kind = transformers.CONFIG_MAPPING[family]
    config = kind(**sized(kind))
    autos = (
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForCausalLM,
    )
    auto = next(auto for auto in autos if kind in auto._model_mapping)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > 20_000_000:
        raise ValueError(f"{size:,} parameters")
    model: nn.Module = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=32**-0.5)
    return model


def sized(kind: Any) -> dict[str, Any]:
    """Small sizes for a configuration, and for its parts: a text decoder behind a reader of images or sounds."""
    sizes = {name: value for name, value in SIZES.items() if name in fields(kind)}
    for name, part in kind.sub_configs.items():
        part = part if part is not transformers.AutoConfig else type(getattr(kind(), name))
        if issubclass(part, transformers.PreTrainedConfig):
            sizes[name] = part(**sized(part))
    sizes |= MORE.get(kind.model_type, {})
    if "qk_rope_head_dim" in sizes:
        sizes["num_key_value_heads"] = 4
    return {name: value for name, value in sizes.items() if value is not None or name != "num_hidden_layers"}


def fields(kind: Any) -> set[str]:
    names = {name for one in kind.__mro__ for name in getattr(one, "__annotations__", {})}
    return names | set(inspect.signature(kind.__init__).parameters) | set(kind.attribute_map)


def run(family: str, only: Sequence[str] | None = None) -> Report:
    torch.manual_seed(5)
    names = only or [one.name for one in checks.CHECKS if one.name != "compile"]
    return saccade.verify(tiny(family), checks=names)


def run_stack(family: str) -> Report:
    torch.manual_seed(5)
    model = tiny(family)
    return saccade.verify_stack(model, pack=flattened if packs(model) else None)


def packs(model: nn.Module) -> bool:
    """Whether the model is a decoder that makes its masks by transformers' functions, which can tell documents apart
    by position_ids, and no layer carries a state from token to token."""
    source = inspect.getsource(inspect.getmodule(type(model)))  # type: ignore[arg-type]
    reads = "create_causal_mask(" in source and "position_ids" in inspect.signature(model.forward).parameters
    carries = any(word in source for word in ("Mamba", "mamba", "linear_attention", "ShortConv", "recurrent"))
    return reads and not carries and model.can_generate() and not model.config.is_encoder_decoder


def flattened(documents: list[list[int]]) -> dict[str, Any]:
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt")
    return dict(collator([{"input_ids": document} for document in documents]))


def unexplained(family: str, report: Report) -> list[str]:
    """The errors that the page of models does not explain."""
    table = EXPLAINED_STACKS if isinstance(report, StackReport) else EXPLAINED
    return [finding.message for finding in report.errors if finding.check not in table.get(family, ())]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--stacks", action="store_true")
    parser.add_argument("--full", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    failed = False
    for family in given.families or families():
        start = time.perf_counter()
        try:
            report = run_stack(family) if given.stacks else run(family)
        except Exception as error:
            print(f"{family:22} left out: {type(error).__name__} {' '.join(str(error).split())[:200]}", flush=True)
            continue
        new = unexplained(family, report)
        failed |= bool(new)
        words = "ERRORS" if new else "ok" if report.ok else "explained"
        print(f"{family:22} {words} {time.perf_counter() - start:.1f} s", flush=True)
        for finding in report.errors:
            print(f"    [{finding.check}] {finding.message[:400]}", flush=True)
        if given.full:
            print(report)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
