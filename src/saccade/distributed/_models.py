"""Models on shards: `context_parallel`.

`_transformers.py` has those of transformers and `_modules.py` Saccade's own; both are a `RunningModel` (`_running.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ._modules import RunningModules
from ._plan import SequencePlan, check_plan
from ._transformers import RunningTransformers, models_of_transformers


@contextmanager
def context_parallel(model: nn.Module, plan: SequencePlan) -> Iterator[None]:
    """A block in which a model computes this rank's rows of a sequence that all ranks share.

    Self-attention of this thread's calls goes over all ranks by `saccade.distributed.attention`; everything else sees
    this rank's rows only. Each layer uses the plan's mask and its own (causal, sliding window, or given to it, of the
    whole sequence) together. The plan's mask stands where `attention_mask` does otherwise: padding and documents belong
    into it. Give the model what `saccade.distributed.shard` returns. Every rank calls the model, and runs the backward
    pass if one does; it may be outside of the block. Layers that torch.utils.checkpoint computes again there are on
    shards, too. The gradients of the weights are this rank's share: add them over ranks, or multiply the loss by
    `plan.ranks` where they are averaged over these.

    Args:
        model: a decoder or an encoder of transformers, or a module that has one inside; with any `attn_implementation`.
            Or a language model or an encoder of `saccade.models`, or any module that attends by `saccade.nn` or
            `saccade.attention`. There, positions that count from the first token count from this rank's rows. A decoder
            continues a prompt, with the same new tokens on every rank. One of transformers is called with shards of the
            prompt and `use_cache=True`, then with new tokens and the `past_key_values` that it returned. One of
            Saccade, or a module, is called with an empty `saccade.nn.KVCache` of growing layers, then with the same
            cache. Encoders have no head, or one for masked tokens or token classification; they return no pooled
            vector. A RoBERTa model counts positions as in one process, unless `shard` was given others than
            0 ... L - 1.
        plan: of `saccade.distributed.plan`; each rank must have rows.

    Raises:
        TypeError: a model of transformers or Saccade that is not known to be right on shards (the message names those
            that are), a head that pools rows, or a module with a layer that mixes rows otherwise: a convolution, say.
        ValueError: the plan leaves ranks without rows. At the model's call: inputs are not this rank's rows,
            `position_ids` are missing (transformers), or what cannot be done on shards: cross-attention, padding
            outside of the plan, losses of an encoder's head that are no cross-entropy, labels of decoders that are not
            shifted or of encoders that are, attention weights, layers that are left out at random, rotary positions
            scaled by the sequence's length, tokens dropped by their share, edits of calls. With a cache: one of another
            kind or plan, a plan's mask other than None, causal and windows; and behind a prompt labels, gradients, a
            model in training, integer arguments that differ by rank (embeddings are not compared). A layer whose mask
            is not known is named. The model calls F.scaled_dot_product_attention or flex_attention itself, or makes
            fewer calls of attention than it has layers.

    Example:
        >>> import torch, torch.distributed as dist, transformers, saccade
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> ids = torch.arange(12)[None]
        >>> plan = saccade.distributed.plan(saccade.Causal(), 12)
        >>> with saccade.distributed.context_parallel(model, plan):
        ...     loss = model(**saccade.distributed.shard({"input_ids": ids, "labels": ids}, plan)).loss
        >>> torch.allclose(loss, model(ids, labels=ids).loss, atol=1e-5)  # of two ranks: the sum of their losses
        True
        >>> dist.destroy_process_group()
    """
    check_plan(plan)
    empty = [rank for rank in range(plan.ranks) if plan.held(rank) == 0]
    if empty:
        raise ValueError(
            f"context_parallel: the plan leaves ranks {empty} without rows: share {plan.length} among fewer"
        )
    parts = models_of_transformers(model)
    running = RunningTransformers(model, plan, parts) if parts else RunningModules(model, plan)
    with running.entered():
        yield
