"""Faults in attention on shards."""

from __future__ import annotations

from ..fault import Fault

CALL, RING, SUMS, TILES, SWAP, HEADS, PLAN, MODELS, NUMBERS, CACHE = (
    f"src/saccade/distributed/_{name}.py"
    for name in ("attention", "ring", "sums", "tiles", "ulysses", "heads", "plan", "running", "statistics", "decoding")
)
TESTS = ("tests/distributed/test_attention.py",)
MEASURED = ("tests/distributed/test_statistics.py",)
DECODED = ("tests/distributed/test_decoding.py",)

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
        RING,
        "(bias is not None or call.dropout is not None)",
        "bias is not None",
        TESTS,
        "Without a mask, dropout counts rows and keys from the rectangle.",
    ),
    Fault(
        "shards-dropout-seed",
        CALL,
        "first_seed if seed is not None",
        "None if seed is not None",
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
        SWAP,
        "total[:, mine[0] : done] +=",
        "total[:, mine[0] : done] =",
        TESTS,
        "Of ranks that share a key head, the last one's gradient stands for all.",
    ),
    Fault(
        "shards-mask-of-layers",
        MODELS,
        "plan=self.plan._narrowed(mask)",
        "plan=self.plan",
        ("tests/distributed/test_models.py",),
        "A layer's own mask, such as a sliding window, is dropped.",
    ),
    Fault(
        "shards-dropout-heads",
        SWAP,
        "HeadsDropout(drawn.p, drawn.seed, mine[0])",
        "HeadsDropout(drawn.p, drawn.seed, 0)",
        TESTS,
        "Every rank drops the weights of the first heads.",
    ),
    Fault(
        "shards-column-of-a-grid",
        PLAN,
        "self.peers[self.rank % width :: width]",
        "self.peers[:: width]",
        TESTS,
        "Each column of a grid gets the keys of the first column's heads.",
    ),
    Fault(
        "shards-rows-of-a-grid",
        PLAN,
        "tuple(within(dealt.held[rank], dealt.joined(width).held[row]) for rank in ranks)",
        "tuple(((n * size(self.rows[first]), (n + 1) * size(self.rows[first])),) for n in range(width))",
        TESTS,
        "Rows of a grid are joined rank after rank, not in the order of the sequence.",
    ),
    Fault(
        "shards-lengths-of-cross-attention",
        PLAN,
        "lengths = (self.length, self.key_length)",
        "lengths = (self.length, self.length)",
        TESTS,
        "A mask takes the last row's position for that of cross-attention's last key.",
    ),
    Fault(
        "shards-keys-of-cross-attention",
        PLAN,
        "holder = (dealt.joined(width).owner for dealt in (rows, keys))",
        "holder = (dealt.joined(width).owner for dealt in (rows, rows))",
        TESTS,
        "The owners of rows stand for those of keys in what a plan says of its traffic.",
    ),
    Fault(
        "shards-first-key",
        NUMBERS,
        "sight._replace(first=first)",
        "sight",
        MEASURED,
        "Each rank takes the first key of its own heads for that of all.",
    ),
    Fault(
        "shards-keys-of-a-group",
        NUMBERS,
        "plan.ranks, whole_groups=differ)",
        "plan.ranks)",
        MEASURED,
        "Norms of keys are over those that some query heads of a group see.",
    ),
    Fault(
        "shards-order-of-weights",
        NUMBERS,
        "[order.index(head) for head in at_heads]",
        "order",
        MEASURED,
        "Weights have the order in which heads were dealt.",
    ),
    Fault(
        "shards-merged-step",
        CACHE,
        "every.insert(plan.rank, packed)",
        "every.insert(0, packed)",
        DECODED,
        "Each rank merges its own part first, and ranks differ in the last bits.",
    ),
    Fault(
        "shards-step-slices",
        CACHE,
        "mask.slice(rows, keys, lengths=lengths)",
        "mask.slice(rows, (0, keys[1] - keys[0]), lengths=lengths)",
        DECODED,
        "The keys of a span are taken for the first ones of the sequence.",
    ),
    Fault(
        "shards-rollback",
        CACHE,
        "self._layer.rollback(before - self.held[self.plan.rank])",
        "self._layer.rollback(min(before, count))",
        DECODED,
        "Every rank forgets as many tokens as the sequence.",
    ),
)
