"""Attention over a sequence that is shared by several processes (context parallelism), on torch.distributed.

    plan = saccade.distributed.plan(mask, length)                       # who holds which rows, balanced by the mask
    query, key, value = (plan.shard(x) for x in (query, key, value))    # this rank's rows
    out = saccade.distributed.attention(query, key, value, plan=plan)   # and gradients, as in one process

Begin with `_attention.py`. `_blocks.py` reads the mask in blocks, `_dealing.py` deals them, `_plan.py` is the result,
in spans of rows (`_spans.py`); `_exchange.py` sends and receives, `_faults.py` names a rank that fails, `_tiles.py`
computes rectangles by the operator, `_sums.py` adds them up, and `_ring.py` and `_ulysses.py` are the ways to do a
call. `_costs.py` and `_prediction.py` are the cost of a layout, `_speed.py` measures what it depends on.
`_statistics.py` measures weights, and `_decoding.py` has a cache on shards. `_models.py` puts attention into models:
`_transformers.py` into those of transformers, `_modules.py` into Saccade's; `_running.py` is common to both,
`_caches.py` has their caches, and `_batches.py` cuts inputs. Imports the operator with positions, variants and caches,
and what reads the calls of transformers.
"""

from __future__ import annotations

from ._attention import attention, attention_with_lse
from ._batches import shard
from ._costs import CallSizes
from ._decoding import ShardedCache, decode
from ._faults import RankFailed
from ._models import context_parallel
from ._plan import SequencePlan, plan
from ._statistics import attention_weights, statistics

__all__ = [
    "CallSizes",
    "RankFailed",
    "SequencePlan",
    "ShardedCache",
    "attention",
    "attention_weights",
    "attention_with_lse",
    "context_parallel",
    "decode",
    "plan",
    "shard",
    "statistics",
]
