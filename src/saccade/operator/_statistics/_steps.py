"""Statistics of calls with one query per item, those of many steps together: alone, each takes longer than its kernels.

Shape legend: B items, Hq / Hkv query and key-value heads, n calls.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._backends.native import _statistics
from .._call import ObservedCall
from .._checks import make_call
from .._masks import Causal, as_mask
from . import _fused
from ._compute import assembled
from ._request import StatisticsRequest
from ._result import Statistics
from ._visibility import RowVisibility, row_visibility

_PLAIN = StatisticsRequest((), None, False, 0, frozenset())


class StepNumbers(NamedTuple):
    """The numbers of one call as the kernels give them, all of them finite."""

    made: _statistics.StatisticsMemory
    ranges: _statistics.NativeRanges
    norms: Tensor  # (B, Hq, 1), of the output
    sight: RowVisibility
    keys: int

    def alike(self) -> tuple[object, ...]:
        """Shapes that agree among the calls that `together` joins."""
        shapes = self.made.numbers, self.ranges.of_keys, self.sight.seen, self.sight.padded
        return tuple(tensor.shape for tensor in shapes)


def step_numbers(call: ObservedCall) -> StepNumbers | None:
    """The numbers of a call of one query per item, without gradients; None for a call that `statistics` has to read."""
    if call.query.shape[2] != 1 or call.real is not None:
        return None
    mask = None if type(call.mask) is Causal else as_mask(call.mask)  # it hides nothing from the last token
    options = {**call.scoring(), "mask": mask, "dropout": 0.0, "needs_lse": True}
    checked = make_call(call.query, call.key, call.value, **options)
    if _fused.refuses(checked, _PLAIN) is not None:
        return None
    sight = row_visibility(checked)
    made = _statistics.filled(checked, sight.standing, first=sight.first)
    ranges = _statistics.head_ranges(checked, made.rows(), sight.keys, True)
    norms = torch.linalg.vector_norm(call.out, dim=-1, dtype=torch.float32)
    if ranges is None or not math.isfinite(float(norms.sum())):
        return None
    return StepNumbers(made, ranges, norms, sight._replace(keys=None), call.key.shape[2])


def together(parts: Sequence[StepNumbers]) -> tuple[Statistics, Tensor]:
    """Statistics of calls that are `alike` as rows (B, Hq, n), and norms of outputs; numbers of heads are (H, n).

    `lse` is without the sink here.
    """
    made, first = copy.copy(parts[0].made), parts[0].sight
    made.numbers = torch.cat([part.made.numbers for part in parts], 3)
    made.places = torch.cat([part.made.places for part in parts], 3)
    ranges, sights = [part.ranges for part in parts], [part.sight for part in parts]
    of_queries, of_keys = (torch.stack([part[n] for part in ranges], 2) for n in (0, 1))
    seen, padded = torch.cat([sight.seen for sight in sights], 2), torch.cat([sight.padded for sight in sights], 2)
    rows = _fused.row_statistics(made.named(), None, ())
    counted = rows.lse != -torch.inf
    shape = (*rows.lse.shape, max(part.keys for part in parts))
    heads = _fused.named_ranges(_statistics.NativeRanges(of_queries, of_keys), True)
    norms = torch.where(counted, torch.cat([part.norms for part in parts], 2), 0.0).sum(0) / counted.sum(0)
    return assembled(shape, rows, first._replace(seen=seen, padded=padded), counted, heads), norms
