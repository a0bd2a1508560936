"""Faults in attention on shards."""

from __future__ import annotations

from ..fault import Fault

CALL, RING, SUMS, TILES, HEADS, MODELS = (
    f"src/saccade/distributed/_{name}.py" for name in ("attention", "ring", "sums", "tiles", "ulysses", "models")
)
TESTS = ("tests/distributed/test_attention.py",)

FAULTS = (
    Fault(
        "shards-half-precision",
        TILES,
        "not whole and call.length_k <= _ONE_TILE",
        "False",
        TESTS,
        "Kernels of half precision take a row's sums from the few keys of a rectangle.",
    ),
    Fault(
        "shards-placed-bias",
        TILES,
        "bias.offset = bias.offset + rows[0] - keys[0]",
        "pass",
        TESTS,
        "A bias placed by `.at` counts from the rectangle's first row.",
    ),
    Fault(
        "shards-empty-rows-with-sink",
        RING,
        "torch.where(lse == EMPTY, EMPTY, whole)",
        "whole",
        TESTS,
        "Rows that see nothing are read in the backward pass where there is a sink.",
    ),
    Fault(
        "shards-gradients-from-others",
        RING,
        "received[2 * n : 2 * n + 2]",
        "received[:2]",
        TESTS,
        "The first rank's gradients stand for those of all.",
    ),
    Fault(
        "shards-dropout-positions",
        CALL,
        "(call.bias is not None or drawn is not None)",
        "call.bias is not None",
        TESTS,
        "Without a mask, dropout counts rows and keys from the rectangle.",
    ),
    Fault(
        "shards-dropout-seed",
        CALL,
        "found[0] if found and seed is not None",
        "None if found and seed is not None",
        TESTS,
        "Each rank drops weights by a seed of its own.",
    ),
    Fault(
        "shards-some-rows",
        SUMS,
        "x[:, :, rows[0] - span[0] : rows[1] - span[0]]",
        "x[:, :, : rows[1] - rows[0]]",
        TESTS,
        "Keys that only later rows of a span see are merged into its first rows.",
    ),
    Fault(
        "shards-mask-of-heads",
        HEADS,
        "h + self.first",
        "h",
        TESTS,
        "Every rank has the masks of the first heads.",
    ),
    Fault(
        "shards-shared-key-heads",
        HEADS,
        "total[:, list(of[rank])] +=",
        "total[:, list(of[rank])] =",
        TESTS,
        "Of ranks that share a key head, the last one's gradient stands for all.",
    ),
    Fault(
        "shards-mask-of-layers",
        MODELS,
        "plan=self.plan._narrowed(own)",
        "plan=self.plan",
        ("tests/distributed/test_models.py",),
        "A layer's own mask, such as a sliding window, is dropped.",
    ),
)
