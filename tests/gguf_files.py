"""GGUF files of tiny models, written by the specification: LFM2, which transformers reads without the package gguf, and
Qwen2, for which it needs the package."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

F32, Q8_0 = 0, 8
# Names in llama.cpp: the first of each pair is replaced by the second.
NAMES = (
    ("model.embed_tokens.", "token_embd."),
    ("model.embedding_norm.", "token_embd_norm."),
    ("model.layers.", "blk."),
    (".operator_norm.", ".attn_norm."),
    (".self_attn.q_proj.", ".attn_q."),
    (".self_attn.k_proj.", ".attn_k."),
    (".self_attn.v_proj.", ".attn_v."),
    (".self_attn.out_proj.", ".attn_output."),
    (".self_attn.q_layernorm.", ".attn_q_norm."),
    (".self_attn.k_layernorm.", ".attn_k_norm."),
    (".feed_forward.w1.", ".ffn_gate."),
    (".feed_forward.w3.", ".ffn_up."),
    (".feed_forward.w2.", ".ffn_down."),
    (".conv.in_proj.", ".shortconv.in_proj."),
    (".conv.out_proj.", ".shortconv.out_proj."),
    (".conv.conv.", ".shortconv.conv."),
    ("model.norm.", "output_norm."),
    (".input_layernorm.", ".attn_norm."),
    (".self_attn.o_proj.", ".attn_output."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".mlp.gate_proj.", ".ffn_gate."),
    (".mlp.up_proj.", ".ffn_up."),
    (".mlp.down_proj.", ".ffn_down."),
)


def tiny(hidden: int = 64, inner: int = 96) -> transformers.Lfm2ForCausalLM:
    config = transformers.Lfm2Config(
        vocab_size=261,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        max_position_embeddings=128,
        conv_L_cache=3,
        tie_word_embeddings=True,
        bos_token_id=258,
        eos_token_id=259,
        pad_token_id=260,
    )
    torch.manual_seed(3)
    model = transformers.Lfm2ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def qwen2(hidden: int = 64, inner: int = 96) -> transformers.Qwen2ForCausalLM:
    sizes = dict(
        vocab_size=261, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=4
    )
    ends = dict(bos_token_id=258, eos_token_id=259, pad_token_id=260)
    rest = dict(num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True)
    torch.manual_seed(3)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **ends, **rest)).eval()


def metadata(kind: str = "lfm2") -> dict[str, Any]:
    letters = list(bytes_to_unicode().values())
    ends = {"bos_token_id": 258, "eos_token_id": 259, "padding_token_id": 260}
    return {
        "general.architecture": kind,
        f"{kind}.context_length": 128,
        f"{kind}.embedding_length": 64,
        f"{kind}.feed_forward_length": 96,
        f"{kind}.block_count": 2,
        f"{kind}.attention.head_count": 4,
        f"{kind}.attention.layer_norm_rms_epsilon": 1e-5 if kind == "lfm2" else 1e-6,
        f"{kind}.rope.freq_base": 1e6 if kind == "lfm2" else 1e4,
        **(
            {"lfm2.attention.head_count_kv": [0, 2], "lfm2.shortconv.l_cache": 3}
            if kind == "lfm2"
            else {"qwen2.attention.head_count_kv": 2, "qwen2.rope.scaling.factor": 4.0}
        ),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": [*letters, "th", "the", "<s>", "</s>", "<pad>"],
        "tokenizer.ggml.token_type": [1] * 258 + [3] * 3,
        "tokenizer.ggml.merges": ["t h", "th e"],
        **{f"tokenizer.ggml.{name}": token for name, token in ends.items()},
    }


def write(path: Path, model: Any, *, quantised: bool = True, version: int = 3, **changes: Any) -> Path:
    """Write a model; with `quantised` its matrices as Q8_0, whose values it has afterwards. None removes an entry."""
    tensors = []
    for name, parameter in model.named_parameters():
        for old, new in NAMES:
            name = name.replace(old, new)
        in_blocks = quantised and parameter.dim() == 2
        if in_blocks:
            scales, whole = blocks(parameter.detach())
            parameter.data = (scales.float()[..., None] * whole).flatten(-2)
            parts = torch.cat((scales[..., None].view(torch.uint8), whole.view(torch.uint8)), -1)
        data = parts.contiguous().numpy().tobytes() if in_blocks else parameter.detach().numpy().tobytes()
        shape = [n for n in parameter.shape if n != 1 or "conv.conv" not in name]
        tensors.append((name, shape, Q8_0 if in_blocks else F32, data))
    entries = {
        name: value for name, value in (metadata(model.config.model_type) | changes).items() if value is not None
    }
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    head += b"".join(text(name) + value(entry) for name, entry in entries.items())
    body = b""
    for name, shape, kind, data in tensors:
        body += b"\0" * (-len(body) % 32)
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(body))
        body += data
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return path


def blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Q8_0: of each 32 numbers a float16 scale, and int8 multiples of it."""
    rows = matrix.unflatten(-1, (-1, 32))
    scales = (rows.abs().amax(-1) / 127).half()
    return scales, (rows / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8)


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words.encode())) + words.encode()


def value(entry: Any) -> bytes:
    if isinstance(entry, str):
        return struct.pack("<I", 8) + text(entry)
    if isinstance(entry, float):
        return struct.pack("<If", 6, entry)
    if isinstance(entry, int):
        return struct.pack("<II", 4, entry)
    inner = 8 if not entry or isinstance(entry[0], str) else 4
    packed = b"".join(text(each) if inner == 8 else struct.pack("<I", each) for each in entry)
    return struct.pack("<IIQ", 9, inner, len(entry)) + packed
