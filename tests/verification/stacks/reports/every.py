"""All cases."""

from __future__ import annotations

from stacks.reports import (
    batches,
    caches,
    empty_rows,
    left_padding,
    masks,
    packing,
    positions,
    shards,
    training,
    windows,
)
from stacks.reports.case import Case

MODULES = (packing, positions, left_padding, windows, caches, masks, empty_rows, batches, shards, training)
CASES: tuple[Case, ...] = tuple(case for module in MODULES for case in module.CASES)
UNREAD = {"huggingface/trl#6843", "hiyouga/LlamaFactory#10787", "axolotl-ai-cloud/axolotl#3867"}
