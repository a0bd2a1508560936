"""Tiles of pairs that a mask touches, counted from who sees whom and not from any kernel.

Shape legend: B batch, Lq / Lk lengths. A tile is `rows` query rows by `keys` keys, aligned to the first row and key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.benchmark.attention.cases import Case

SIDE = 48  # of the tiles that time is counted by; the native kernels list their work in the same


def visited(case: Case, rows: int = SIDE, keys: int = SIDE) -> Tensor:
    """int64 (B, rows of tiles): how many tiles of that row have a visible pair."""
    first, stop = (end.expand(case.batch, -1) for end in case.pattern.ranges(case.sizes))
    first, stop = first.clamp(0, case.length_k), stop.clamp(0, case.length_k)
    seeing = (stop > first).int()
    bands, columns = -(-case.length_q // rows), -(-case.length_k // keys)
    # Each row adds 1 where its first tile begins and takes it away behind its last: sums along the keys count the rows.
    steps = torch.zeros(case.batch, bands, columns + 1, dtype=torch.int32)
    item = torch.arange(case.batch)[:, None].expand_as(first)
    band = (torch.arange(case.length_q) // rows).expand_as(first)
    steps.index_put_((item, band, first // keys), seeing, accumulate=True)
    steps.index_put_((item, band, (stop - 1).clamp(min=0) // keys + 1), -seeing, accumulate=True)
    return (steps.cumsum(-1)[..., :-1] > 0).sum(-1)


def visited_tiles(case: Case) -> int:
    """Tiles of 48 x 48 pairs, over the batch and all query heads, in which some query sees some key."""
    return case.heads * int(visited(case).sum())


def multiplied_pairs(case: Case, rows: int, keys: int) -> int:
    """Pairs of one head, over the batch, that a kernel must multiply whose smallest step is `rows` x `keys` pairs.

    Rows beyond the last are not counted, since a kernel may take fewer; keys beyond the last are.
    """
    bands = visited(case, rows, keys)
    heights = torch.full((bands.shape[-1],), rows)
    heights[-1] = case.length_q - rows * (bands.shape[-1] - 1)
    return int((bands * heights).sum()) * keys
