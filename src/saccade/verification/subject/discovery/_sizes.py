"""The sizes a module was built with: widths its input may have, its heads, the longest input it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_WIDTHS = (
    "embed_dim d_model hidden_size n_embd dim emb_dim embed_size embedding_dim model_dim d_in input_dim query_dim "
    "in_features in_dim num_hiddens hidden_dim all_head_size width channels d dim_in in_channels features hidden E "
    "C n_state emb_size model_size qdim q_dim"
).split()
_CONTEXT = (
    "context_dim cross_attention_dim kdim d_context d_cross cond_dim kv_dim key_dim d_cond context_size cross_dim "
    "memory_dim d_kv_in encoder_dim enc_dim d_encoder key_size dim_context"
).split()
_HEADS = (
    "num_heads n_heads nhead n_head heads num_attention_heads h nheads head_num H num_query_heads n_q_heads nh "
    "n_local_heads"
).split()
_KV_HEADS = "num_kv_heads n_kv_heads num_key_value_heads kv_heads n_kv_head n_local_kv_heads num_kv_groups".split()
_LENGTHS = (
    "block_size context_length max_len max_seq_len max_length max_position_embeddings n_positions max_seq_length "
    "seq_len max_positions ctx_len n_ctx context_len"
).split()
_USUAL = (16, 32, 64, 24, 8, 12, 128, 48, 256, 96, 4, 512, 768, 384, 1024, 6, 20, 10, 3)


def widths(module: Any, count: int | None = None) -> Iterator[int]:
    """Widths that the input may have, the most probable first."""
    if count is not None:
        yield count
        return
    given: set[int] = set()
    for width in (*_numbers(module, _WIDTHS), *_entered(module), *_USUAL):
        if width not in given:
            given.add(width)
            yield width


def context_widths(module: Any, width: int) -> Iterator[int | None]:
    """Widths that the context may have; None is the input's."""
    given: set[int | None] = set()
    for other in (*_numbers(module, _CONTEXT), None, *_entered(module)):
        other = None if other == width else other
        if other not in given:
            given.add(other)
            yield other


def heads(module: Any) -> int | None:
    listed = getattr(module, "heads", None)
    if isinstance(listed, nn.ModuleList):
        return len(listed)
    return next(iter(_numbers(module, _HEADS)), None)


def kv_heads(module: Any) -> int | None:
    return next(iter(_numbers(module, _KV_HEADS)), None)


def longest(module: Any) -> int | None:
    """The longest input by the target's own numbers and the buffers of its mask; None if it has neither."""
    named = list(_numbers(module, _LENGTHS))
    planes = [buffer for buffer in module.buffers() if buffer.dim() >= 2]
    squares = [buffer.shape[-1] for buffer in planes if buffer.shape[-1] == buffer.shape[-2] > 1 and _is_mask(buffer)]
    return min([*named, *squares], default=None)


def lengths(module: Any) -> list[int]:
    """Lengths that the target names. They are tried if it takes no other length."""
    return [length for length in {*_numbers(module, _LENGTHS)} if length <= 1024]


def batches(module: Any) -> list[int]:
    """Batch sizes among the attributes of the target."""
    named = _numbers(module, ("batch_size", "batch", "bs", "B", "b", "n_batch", "batchsize"))
    return list(dict.fromkeys(length for length in named if length <= 512))


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == 1) | (tensor == float("-inf"))).all())


def _numbers(module: Any, names: Sequence[str]) -> Iterator[int]:
    """Whole numbers under these names: attributes of the module and its configuration, then of the parts."""
    parts = list(module.modules()) if isinstance(module, nn.Module) else [module]
    for part in parts:
        for holder in (part, getattr(part, "config", None), getattr(part, "cfg", None), getattr(part, "args", None)):
            for name in names:
                value = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    yield value


def _entered(module: Any) -> Iterator[int]:
    """Input widths of a module's layers and matrices."""
    if not isinstance(module, nn.Module):
        return
    for part in module.modules():
        if isinstance(part, nn.Linear):
            yield part.in_features
        elif isinstance(part, nn.LayerNorm):
            yield int(part.normalized_shape[-1])
        elif isinstance(part, (nn.Conv1d, nn.Conv2d)):
            yield part.in_channels
    for parameter in module.parameters():
        if parameter.dim() >= 2:
            yield parameter.shape[-2]
            yield parameter.shape[-1]


def projected(module: Any) -> Iterator[int]:
    """Output widths of a module's linear layers, the narrowest first."""
    if isinstance(module, nn.Module):
        yield from sorted({part.out_features for part in module.modules() if isinstance(part, nn.Linear)})


def head_widths(module: Any) -> Iterator[int]:
    """Head widths that a module states: by the names of its numbers, else by its factor of the logits."""
    if not isinstance(module, nn.Module):
        return
    yield from _numbers(module, ("head_dim", "head_size", "d_head", "dim_head", "d_k", "dk", "key_dim"))
    for name in ("scale", "scaling", "temperature", "scale_factor", "softmax_scale", "sqrt_dim", "sqrt_d_k"):
        factor = getattr(module, name, None)
        if isinstance(factor, (int, float)) and factor > 0:
            width = factor**2 if factor > 1 else factor**-2
            if abs(width - round(width)) < 1e-3 and 1 < width <= 1024:
                yield round(width)
