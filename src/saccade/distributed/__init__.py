"""Attention over a sequence that is shared by several processes (context parallelism), on torch.distributed.

    plan = saccade.distributed.plan(mask, length)                       # who holds which rows, balanced by the mask
    query, key, value = (plan.shard(x) for x in (query, key, value))    # this rank's rows
    out = saccade.distributed.attention(query, key, value, plan=plan)   # and gradients, as in one process

Begin with `_attention.py`. `_blocks.py` reads the mask in blocks, `_dealing.py` deals them, `_plan.py` is the result;
`_exchange.py` sends and receives, `_faults.py` names a rank that fails, `_tiles.py` computes rectangles by the
operator, `_sums.py` adds them up, and `_ring.py` and `_ulysses.py` are the ways to do a call. `_models.py` puts them
into decoders of transformers. Imports the operator, its masks, and what reads the calls of transformers.
"""

from __future__ import annotations

from ._attention import attention, attention_with_lse
from ._batches import shard
from ._faults import RankFailed
from ._models import context_parallel
from ._plan import SequencePlan, plan

__all__ = ["RankFailed", "SequencePlan", "attention", "attention_with_lse", "context_parallel", "plan", "shard"]
