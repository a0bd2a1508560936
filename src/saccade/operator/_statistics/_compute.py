"""`statistics`: checks the call, chooses a backend and combines the results.

Shape legend: B items, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv widths of key and value.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._biases import Bias
from .._call import CheckedCall, without_autocast
from .._checks import make_call
from .._masks import Mask
from .._masks._data import of_vmap, unwrapped
from .._surroundings import uncompiled
from .._unknown_arguments import named, refused
from . import _dense, _fused, _tiled
from ._heads import HeadVectors, per_head
from ._request import StatisticsRequest, make_request
from ._result import Statistics
from ._rows import RowStatistics
from ._visibility import RowVisibility, row_visibility

BACKENDS: dict[str, Any] = {"native": _fused, "chunked": _tiled, "reference": _dense}


@uncompiled("saccade.statistics looks at the values of tensors, which a graph cannot: call it outside")
@named
def statistics(
    query: Tensor,
    key: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    value: Tensor | None = None,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    groups: Mapping[str, Tensor] | None = None,
    received: bool = True,
    top: int = 0,
    histograms: Collection[str] | bool | None = None,
    backend: str = "auto",
    **unknown: NoReturn,
) -> Statistics:
    """Exact statistics of the attention weights of one call, in memory linear in its lengths.

        p_ij = exp(s_ij) / (exp(sink) + sum_j' exp(s_ij'))      s_ij = softcap(scale * q_i.k_j) + bias_ij

    The sum runs over the keys j that the mask shows to query i. These are the weights that `attention` multiplies the
    values by, before any dropout. Results have no graph; `Statistics` gives their formulas. torch.compile breaks its
    graph here and goes on after it. `query`, `key`, `mask`, `bias`, `scale`, `softcap` and `sink` are as in
    `attention`.

    Args:
        value: (B, Hkv, Lk, Dv), used only for its range and norms.
        groups: named sets of keys, boolean (Lk,) or (B, Lk), whose masses are wanted.
        received: whether to sum what each key receives, which takes a second pass over the keys.
        top: how many keys with the largest weights to keep of each row. In a tie the first key comes first; where
            a row sees fewer, the rest is weight 0 and key -1.
        histograms: which of "query", "key", "value", "logits", "weights"; True is all. The last two take another pass,
            in plain PyTorch. Bins are 64 even ones from min to max; for weights the octaves 0, 2^-32, 2^-31, ..., 1.
        backend: "native" (float32, bfloat16, float16 on a CPU), "chunked" (tiles in plain PyTorch: any dtype and
            device), "reference" (dense, O(Lq Lk) memory: the specification), or "auto": the first that takes the call.

    Raises:
        TypeError: as in `attention`; groups that are not boolean tensors by name, a top that is not an int.
        ValueError: as in `attention`; a group of another shape or with a reserved name, a negative top, an unknown
            histogram, an unknown backend or one that cannot do this call (the message says why).

    Example:
        >>> import torch, saccade
        >>> query = key = torch.zeros(1, 2, 4, 16)  # every row spreads evenly over the keys it sees
        >>> saccade.statistics(query, key, saccade.Causal())
        Statistics of 1 items, 2 heads, 4 queries, 4 keys; rows: 8 counted
        head  entropy  evenness  largest  distance   self  previous   next  first  max logit
           0    0.795     1.000    0.521     0.750  0.521     0.271  0.000  0.521      0.000
           1    0.795     1.000    0.521     0.750  0.521     0.271  0.000  0.521      0.000
    """
    if unknown:
        raise refused(statistics, unknown)
    with torch.no_grad():
        call = make_call(
            query,
            key,
            _value_or_none(key, value),
            mask,
            bias=bias,
            scale=scale,
            softcap=softcap,
            sink=sink,
            dropout=0.0,
            needs_lse=True,
        )
        if call.device.type == "meta":
            raise ValueError("statistics: query is on meta, where tensors have no values")
        call = _alone(call)
        asked = make_request(call, groups, received, top, histograms)
        module = choose(call, asked, backend)
        if torch._C._is_any_autocast_enabled():  # to enter it costs as much as all else of a small call
            with without_autocast(call.device):
                return _statistics(call, asked, module, value is not None)
        return _statistics(call, asked, module, value is not None)


def _value_or_none(key: Tensor, value: Tensor | None) -> Tensor:
    """A value of width 1 without memory, if none is passed; errors about its length then name the key."""
    if value is not None:
        return value
    fits = isinstance(key, Tensor) and key.dim() == 4 and key.layout is torch.strided
    return key.new_zeros(()).expand(*key.shape[:3], 1) if fits else key


def _alone(call: CheckedCall) -> CheckedCall:
    """The tensor's values without forward-mode tangents and torch.func wrappers."""
    if forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active():
        return call
    bias = call.bias
    if bias is not None:
        bias = copy.copy(bias)
        bias.parameter = _bare(bias.parameter, "bias")
    sink = None if call.sink is None else _bare(call.sink, "sink")
    query, key, value = (_bare(getattr(call, name), name) for name in ("query", "key", "value"))
    return replace(call, query=query, key=key, value=value, bias=bias, sink=sink)


def _bare(tensor: Tensor, name: str) -> Tensor:
    tensor = unwrapped(tensor)
    if of_vmap(tensor):
        raise ValueError(f"{name}: torch.vmap runs over it, and statistics are of its values; loop over it instead")
    return forward_ad.unpack_dual(tensor).primal if forward_ad._current_level >= 0 else tensor


def choose(call: CheckedCall, asked: StatisticsRequest, backend: str) -> Any:
    """The backend module that computes the call."""
    if backend == "auto":
        return _tiled if _fused.refuses(call, asked) else _fused
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}; got {backend!r}")
    reason = BACKENDS[backend].refuses(call, asked)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot do this call: {reason}")
    return BACKENDS[backend]


def _statistics(
    call: CheckedCall, asked: StatisticsRequest, module: Any, has_value: bool, sight: RowVisibility | None = None
) -> Statistics:
    """`sight` is that of the call, where it is known."""
    sight = row_visibility(call) if sight is None else sight
    rows: RowStatistics = module.rows(call, asked, sight.standing, sight.first)
    counted = rows.lse != -torch.inf
    if asked.top:
        spoiled = torch.isnan(rows.lse)[..., None]
        top_weights = torch.where(spoiled, torch.nan, rows.top_weights)
        rows = replace(rows, top_weights=top_weights, top_keys=torch.where(spoiled, -1, rows.top_keys))
    shape = (call.batch, call.heads, call.length_q, call.length_k)
    return assembled(shape, rows, sight, counted, _per_head(call, asked, module, rows, counted, sight, has_value))


def assembled(
    shape: tuple[int, int, int, int],
    rows: RowStatistics,
    sight: RowVisibility,
    counted: Tensor,
    heads: dict[str, dict[str, Tensor]],
) -> Statistics:
    return Statistics(
        shape=shape,
        lse=rows.lse,
        entropy=rows.entropy,
        largest=rows.largest,
        largest_at=rows.largest_at,
        distance=rows.distance,
        keys_seen=sight.seen,
        counted=counted,
        padded=sight.padded,
        mass=rows.mass,
        top_weights=rows.top_weights,
        top_keys=rows.top_keys,
        received=rows.received,
        heads=heads,
    )


def _per_head(
    call: CheckedCall,
    asked: StatisticsRequest,
    module: Any,
    rows: RowStatistics,
    counted: Tensor,
    sight: RowVisibility,
    has_value: bool,
) -> dict[str, dict[str, Tensor]]:
    keys = sight.keys
    if keys is not None and keys.shape[1] > 1:
        keys = keys.unflatten(1, (call.kv_heads, -1)).any(2)
    found = None
    if module is _fused and not asked.histograms & {"query", "key", "value"}:
        found = _fused.per_head(call, rows, keys, has_value)
    if found is None:
        vectors = {
            "query": HeadVectors.of(call.query, None if bool(counted.all()) else counted),
            "key": HeadVectors.of(call.key, keys),
        }
        if has_value:
            vectors["value"] = HeadVectors.of(call.value, keys)
        found = per_head(vectors, asked.histograms, rows, counted, sight.seen)
    if asked.histograms & {"logits", "weights"}:
        _tiled.add_histograms(call, asked, rows, found)
    return found
