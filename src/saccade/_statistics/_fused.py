"""Statistics by the compiled kernels, where these take the call.

Shape legend: B items, Hq query heads, Lq / Lk lengths, G named groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._backends import _native_statistics
from .._backends._native_statistics import MOST_TOP, NativeStatistics
from .._biases import Placement
from .._call import Call
from ._asked import Asked
from ._rows import Rows


def refuses(call: Call, asked: Asked) -> str | None:
    """Why the kernels cannot do this call, or None."""
    if asked.top > MOST_TOP:
        return f"the native kernels keep at most {MOST_TOP} keys of each row, and top is {asked.top}"
    return _native_statistics.refuses(call, asked.top)


def rows(call: Call, asked: Asked, standing: Placement, first: Tensor) -> Rows:
    found = _native_statistics.run(
        call,
        standing,
        first=first.expand(call.batch),
        groups=None if asked.members is None else asked.members.transpose(0, 1),
        received=asked.received,
        top=asked.top,
    )
    lse = found.lse if call.sink is None else _with_sink(found.lse, call.sink)
    none = found.lse.new_zeros(*found.lse.shape, 0)
    return Rows(
        lse=lse,
        entropy=found.entropy,
        largest=found.largest,
        largest_at=found.largest_at,
        smallest=found.smallest,
        distance=found.distance,
        mass=_mass(found, asked),
        low=found.lowest,
        high=found.highest,
        bad=found.nonfinite,
        bad_at=found.nonfinite_at,
        top_weights=none if found.top_weights is None else found.top_weights,
        top_keys=none.long() if found.top_keys is None else found.top_keys,
        pivot=torch.zeros((), device=lse.device),
        rest=lse,
        received=found.received,
    )


def _with_sink(lse: Tensor, sink: Tensor) -> Tensor:
    """The whole denominator's; rows that see no key keep -inf."""
    return torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sink.to(lse.dtype)[None, :, None]))


def _mass(found: NativeStatistics, asked: Asked) -> dict[str, Tensor]:
    mass = {"self": found.own, "previous": found.previous, "next": found.next, "first": found.first}
    mass["sink"] = found.sink
    return mass | {name: found.groups[number] for number, name in enumerate(asked.groups)}
