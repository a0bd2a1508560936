"""Statistics by the compiled kernels, where these take the call.

Shape legend: B items, Hq query heads, Lq / Lk lengths, G named groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._backends.native import _statistics
from .._biases import Placement
from .._call import CheckedCall
from ._heads import Numbers, nowhere
from ._request import StatisticsRequest
from ._rows import RowStatistics


def refuses(call: CheckedCall, asked: StatisticsRequest) -> str | None:
    """Why the kernels cannot do this call, or None."""
    return _statistics.refuses(call, asked.top)


def rows(call: CheckedCall, asked: StatisticsRequest, standing: Placement, first: Tensor) -> RowStatistics:
    groups = None if asked.members is None else asked.members.transpose(0, 1)
    made = _statistics.filled(call, standing, first=first, groups=groups, received=asked.received, top=asked.top)
    return row_statistics(made.named(), call.sink, asked.groups)


def row_statistics(numbers: _statistics.NativeStatistics, sink: Tensor | None, groups: Sequence[str]) -> RowStatistics:
    lse = numbers.lse if sink is None else _with_sink(numbers.lse, sink)
    mass = {"self": numbers.own, "previous": numbers.previous, "next": numbers.next, "first": numbers.first}
    mass |= {"sink": numbers.sink, **dict(zip(groups, numbers.groups.unbind(0), strict=True))}
    top_weights, top_keys = numbers.top_weights, numbers.top_keys
    return RowStatistics(
        lse=lse,
        entropy=numbers.entropy,
        largest=numbers.largest,
        largest_at=numbers.largest_at,
        smallest=numbers.smallest,
        distance=numbers.distance,
        mass=mass,
        low=numbers.lowest,
        high=numbers.highest,
        bad=numbers.nonfinite,
        bad_at=numbers.nonfinite_at,
        top_weights=lse.new_empty(*lse.shape, 0) if top_weights is None else top_weights,
        top_keys=numbers.nonfinite.new_empty(*lse.shape, 0) if top_keys is None else top_keys,
        pivot=None,
        rest=lse,
        received=numbers.received,
    )


def per_head(call: CheckedCall, rows: RowStatistics, keys: Tensor | None, has_value: bool) -> dict[str, Numbers] | None:
    """As `_heads.per_head` without histograms, in one pass; None if something is not finite.

    Args:
        keys: bool (B|1, Hkv|1, Lk), seen by some row; None: all are.
    """
    addresses = (row.data_ptr() for row in (rows.lse, rows.smallest, rows.largest, rows.low, rows.high, rows.bad))
    found = _statistics.head_ranges(call, tuple(addresses), keys, has_value)
    return None if found is None else named_ranges(found, has_value)


def named_ranges(ranges: _statistics.NativeRanges, has_value: bool) -> dict[str, Numbers]:
    *of_queries, none = ranges.of_queries.unbind(0)
    *of_keys, none_of_keys = ranges.of_keys.unbind(0)
    bad = {"nonfinite": none, "nonfinite_at": nowhere(none)}
    bad_keys = (
        bad if none.shape == none_of_keys.shape else {"nonfinite": none_of_keys, "nonfinite_at": nowhere(none_of_keys)}
    )
    numbers = {"query": dict(zip(("min", "max", "norm"), of_queries, strict=False)) | bad}
    numbers["key"] = dict(zip(("min", "max", "norm"), of_keys, strict=False)) | bad_keys
    if has_value:
        numbers["value"] = dict(zip(("min", "max", "norm"), of_keys[3:], strict=True)) | bad_keys
    numbers["logits"] = {"min": of_queries[3], "max": of_queries[4]} | bad
    numbers["weights"] = {"min": of_queries[5], "max": of_queries[6]} | bad
    return numbers


def _with_sink(lse: Tensor, sink: Tensor) -> Tensor:
    """The lse of the whole denominator, with the sink; rows that see no key keep -inf."""
    return torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sink.to(lse.dtype)[None, :, None]))
