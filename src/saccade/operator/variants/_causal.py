"""Causal attention of features: o_i = sum_{j <= i} (phi_i . psi_j) v_j / sum_{j <= i} phi_i . psi_j, in linear memory.

Chunks of C tokens: those of the own chunk are read through the masked product of their features, all earlier ones
through the state S = sum psi_j [v_j, 1]^T, which does not hold the own chunk (Katharopoulos et al., 2020, equations 9
to 12, by chunks as in Hua et al., 2022, "Transformer Quality in Linear Time", section 3.3). The column of ones makes
the denominator a value like the others.

The backward pass recomputes: with g_i the gradient of numerator and denominator,
    d phi_i = sum_{j <= i} (g_i . [v_j, 1]) psi_j
    d psi_j = sum_{i >= j} (g_i . [v_j, 1]) phi_i
    d v_j   = sum_{i >= j} (phi_i . psi_j) g_i
by the same chunks, the last one first, with dS = sum phi_i g_i^T of all later ones.

Work: 2 C (M + Dv) + 4 M Dv FLOP forward and 2 C (3 M + 2 Dv) + 10 M Dv backward, per token and query head. Memory:
what comes in and goes out, and M x Dv numbers for every segment of `SEGMENT` tokens.

Shape legend: B batch, H query heads, Hkv key-value heads (query head h reads h // G, G = H // Hkv), L length, M
features, Dv value width, C tokens in a chunk, N = B Hkv, n chunks in a segment.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _causal_native
from ._causal_padding import zero_padding

CHUNK = 64
SEGMENT = 512  # tokens that are taken at once, for fewer and larger products


class LinearState(NamedTuple):
    """The sums that linear attention keeps: float32, or float64 for float64 inputs.

    Args:
        sums: (B, Hkv, M, Dv): sum_j psi_j v_j^T.
        weights: (B, Hkv, M): sum_j psi_j.

    Example:
        >>> import torch, saccade
        >>> x = torch.ones(1, 2, 5, 4)
        >>> out, state = saccade.variants.linear_step(x, x, x)
        >>> state.sums.shape, state.weights.shape
        (torch.Size([1, 2, 4, 4]), torch.Size([1, 2, 4]))
    """

    sums: Tensor
    weights: Tensor


def read_causally(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    state: LinearState | None = None,
    *,
    normalise: bool = True,
    log_scale: Tensor | None = None,
    state_scale: Tensor | None = None,
    known_finite: bool = False,
    least: float | None = None,
) -> tuple[Tensor, LinearState]:
    """The output and the new state: each token reads itself, the tokens before it and the state.

    With `log_scale` the features of key j stand for exp(log_scale_j) psi_j. Everything is then computed in units of the
    running maximum c_i of log_scale up to i, which only looks back: weights are exp(log_scale_j - c_i) <= 1. The unit
    cancels where `normalise`; without it, row i is in units of exp(c_i). The state that is returned is in units of
    exp(c_L). No gradient flows to scales.

    Args:
        queries: features (B, H, L, M), float32 or float64.
        keys: features (B, Hkv, L, M).
        values: (B, Hkv, L, Dv).
        state: of the earlier tokens.
        normalise: divide by the sum of weights. Where its magnitude is below `least` the row is 0.
        log_scale: (B, Hkv, L).
        state_scale: (B, Hkv), the logarithm of the unit that `state` is in.
        known_finite: queries, keys and values hold neither NaN nor infinity, which need not be looked for.
        least: None is `least_weight`.

    Returns:
        (out (B, H, L, Dv), the state after these tokens).
    """
    if not (known_finite or finite(queries, keys, values)):
        taint = NonFiniteTokens.of(queries, keys, values)
        scales: dict[str, Any] = dict(log_scale=log_scale, state_scale=state_scale, least=least)
        given = taint.without(queries, keys, values)
        return taint.over(*read_causally(*given, state, normalise=normalise, known_finite=True, **scales))
    sums = _joined(state, keys, values.shape[-1])
    if log_scale is not None:
        first = log_scale.new_full(log_scale.shape[:2], -torch.inf) if state_scale is None else state_scale
        log_scale = torch.cat([first[..., None], log_scale], -1).detach()
    least = least_weight(queries.dtype) if least is None else least
    if queries.dtype == torch.float32 and _causal_native.takes(queries, keys, values):
        told = _causal_native.CausalKernelSettings(_causal_native.IDENTITY, normalise, least)
        return _state_apart(*_causal_native.read(told, queries, keys, values, sums, log_scale))
    return _state_apart(*_Causal.apply(queries, keys, values, sums, log_scale, normalise, least))


def read_elu_plus_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LinearState | None,
    rows: Tensor | None,
    kept: Tensor | None,
    normalise: bool,
) -> tuple[Tensor, LinearState] | None:
    """`read_causally` of elu(query) + 1 and elu(key) + 1 without forming them; None if that is not possible.

    Args:
        rows, kept: bool (B or 1, L), real queries and real keys: the features of others are 0.
    """
    if not _causal_native.takes(query, key, value):
        return None
    if not finite(query, key, value):
        query, key, value = zero_padding(query, rows), zero_padding(key, kept), zero_padding(value, kept)
        taint = NonFiniteTokens.of(query, key, value)
        read = read_elu_plus_one(*taint.without(query, key, value), state, rows, kept, normalise)
        return None if read is None else taint.over(*read)
    told = _causal_native.CausalKernelSettings(
        _causal_native.ELU_PLUS_ONE, normalise, least_weight(torch.float32), rows, kept
    )
    return _state_apart(*_causal_native.read(told, query, key, value, _joined(state, key, value.shape[-1]), None))


def _joined(state: LinearState | None, keys: Tensor, width: int) -> Tensor:
    """Sums and weights of a state side by side: (B, Hkv, M, Dv + 1)."""
    if state is None:
        return torch.zeros(*keys.shape[:2], keys.shape[-1], width + 1, dtype=wide(keys), device=keys.device)
    return torch.cat([state.sums, state.weights[..., None]], -1)


def _state_apart(out: Tensor, sums: Tensor) -> tuple[Tensor, LinearState]:
    return out, LinearState(sums[..., :-1], sums[..., -1])


def read_all(
    queries: Tensor, keys: Tensor, values: Tensor, *, normalise: bool = True, least: float | None = None
) -> Tensor:
    """The output (B, H, Lq, Dv) if every query (B, H, Lq, M) reads every key (B, Hkv, Lk, M) and value (B, Hkv, Lk,
    Dv)."""
    return read_state(queries, summed(keys, values), normalise=normalise, least=least)


def summed(keys: Tensor, values: Tensor) -> LinearState:
    """The state after these tokens, and nothing before them."""
    return LinearState(keys.mT @ values, keys.sum(-2))


def read_state(queries: Tensor, state: LinearState, *, normalise: bool = True, least: float | None = None) -> Tensor:
    """The output (B, H, L, Dv) of queries (B, H, L, M) that read the state."""
    batch, heads, length, width = queries.shape
    kv_heads = state.weights.shape[1]
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads * length, width)
    out = grouped @ state.sums
    if normalise:
        out = divided(out, grouped @ state.weights[..., None], least)
    return out.reshape(batch, heads, length, out.shape[-1])


def divided(numerator: Tensor, denominator: Tensor, least: float | None = None) -> Tensor:
    """The quotient; 0 with gradient 0 if no weight is left."""
    least = least_weight(denominator.dtype) if least is None else least
    live = ~(denominator.abs() < least)  # NaN stays NaN
    return (numerator / denominator.where(live, 1.0)).where(live, 0.0)


def least_weight(dtype: torch.dtype) -> float:
    """The floor of a row's sum of weights before a division: the root of the smallest normal number (float32: 1.1e-19).

    Less is as good as nothing, and its reciprocal would leave no room for gradients, which are products with it.
    """
    return math.sqrt(torch.finfo(dtype).tiny)


class NonFiniteTokens(NamedTuple):
    """Marks non-finite tokens. They are replaced by 0 during the computation, because 0 * NaN in a chunk's product
    would spread to rows that cannot see them. Afterwards NaN is written into the rows that can, and earlier rows stay
    unchanged bit for bit."""

    rows: Tensor  # (B, H, L): NaN where a query was not finite, otherwise 0
    keys: Tensor  # (B, Hkv, L): NaN where a key or its value was not

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> NonFiniteTokens:
        return cls(poison_of(query), poison_of(key) + poison_of(value))

    def without(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value with 0 instead of poisoned tokens."""
        return unpoisoned(query, self.rows), unpoisoned(key, self.keys), unpoisoned(value, self.keys)

    def over(self, out: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
        """The causal output (B, H, L, Dv) and the state, NaN where they include a non-finite token."""
        seen = self.keys.cumsum(-1).repeat_interleave(out.shape[1] // self.keys.shape[1], 1)
        summed = self.keys.sum(-1)[..., None].to(state.weights)
        sums, weights = state.sums + summed[..., None], state.weights + summed
        return out + (self.rows + seen)[..., None].to(out), LinearState(sums, weights)


@torch.no_grad()
def poison_of(tensor: Tensor) -> Tensor:
    """(B, H, L, n) to (B, H, L): NaN where something is not finite, otherwise 0."""
    return (tensor * 0).sum(-1)


def unpoisoned(tensor: Tensor, poison: Tensor) -> Tensor:
    """The tensor with 0 in rows of poison: in a chunk's product 0 * NaN would spread to rows that do not see them."""
    return tensor.masked_fill(poison.isnan()[..., None], 0.0)


def finite(*tensors: Tensor) -> bool:
    """Whether the tensors hold neither NaN nor infinity. Their sum would be quicker to check, but can overflow."""
    return all(math.isfinite(end) for tensor in tensors for end in _ends(tensor))


def within(most: float, *tensors: Tensor) -> bool:
    """Whether every number is from -most to most, and none is NaN."""
    return all(-most <= end <= most for tensor in tensors for end in _ends(tensor))


def _ends(tensor: Tensor) -> tuple[float, ...]:
    """The least and the greatest number; NaN if the tensor has one; () for an empty tensor."""
    return tuple(map(float, tensor.detach().aminmax())) if tensor.numel() else ()


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class _ChunkPlan(NamedTuple):
    """The cut of tokens into segments of chunks."""

    chunk: int
    groups: int  # G
    length: int

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor) -> _ChunkPlan:
        length = queries.shape[2]
        return cls(max(1, min(CHUNK, length)), queries.shape[1] // keys.shape[1], length)

    @property
    def segments(self) -> list[slice]:
        step = max(self.chunk, SEGMENT // self.chunk * self.chunk)
        return [slice(start, min(start + step, self.length)) for start in range(0, self.length, step)]

    def cut(self, tensor: Tensor, segment: slice, groups: int = 1) -> Tensor:
        """(B, Hkv g, L, X) -> (N, n, g C, X) of one segment, 0 past the last token."""
        part = tensor[:, :, segment]
        part = F.pad(part, (0, 0, 0, -part.shape[2] % self.chunk))
        batch, heads, length, width = part.shape
        items, n = batch * heads // groups, length // self.chunk
        part = part.reshape(items, groups, n, self.chunk, width).transpose(1, 2)
        return part.reshape(items, n, groups * self.chunk, width)

    def paste(self, part: Tensor, to: Tensor, segment: slice, groups: int = 1) -> None:
        """The way back, into `to`."""
        batch, heads, _, width = to.shape
        n = part.shape[1]
        part = part.reshape(batch * heads // groups, n, groups, self.chunk, width).transpose(1, 2)
        part = part.reshape(batch, heads, n * self.chunk, width)
        to[:, :, segment] = part[:, :, : segment.stop - segment.start]


class _Scales(NamedTuple):
    """Factors that convert between the units of chunks, rows and keys; None if all have one unit."""

    pairs: Tensor | None  # (N, n, 1, C, C): of key j in row i's
    rows: Tensor | None  # (N, n, G C, 1): of the state's before the chunk in row i's
    keys: Tensor | None  # (N, n, C, 1): of key j in the state's after the chunk
    states: Tensor | None  # (N, n, 1, 1): of the state's before the chunk in the state's after it

    @classmethod
    def of(cls, plan: _ChunkPlan, segment: slice, log_scale: Tensor | None) -> _Scales:
        if log_scale is None:
            return cls(None, None, None, None)
        running = log_scale.cummax(-1).values.flatten(0, 1)[:, segment.start : segment.stop + 1]
        own = log_scale.flatten(0, 1)[:, segment.start + 1 : segment.stop + 1]
        missing = (segment.start - segment.stop) % plan.chunk
        keys = F.pad(own, (0, missing)).unflatten(1, (-1, plan.chunk))
        rows = torch.cat([running[:, 1:], running[:, -1:].expand(-1, missing)], -1).unflatten(1, (-1, plan.chunk))
        before, after = running[:, : -1 : plan.chunk, None], rows[..., -1:]
        return cls(
            _factor(keys[..., None, :], rows[..., :, None])[:, :, None].tril_(),
            _factor(before, rows).repeat(1, 1, plan.groups)[..., None],
            _factor(keys, after)[..., None],
            _factor(before, after)[..., None],
        )


def _factor(unit: Tensor, other: Tensor) -> Tensor:
    """exp(unit - other), 0 where there is nothing yet: -inf - -inf would be NaN."""
    return (unit - other).clamp(max=0).masked_fill(unit == -torch.inf, -torch.inf).exp()


def _scaled(tensor: Tensor, factor: Tensor | None) -> Tensor:
    return tensor if factor is None else tensor * factor


def _pairs(left: Tensor, right: Tensor, plan: _ChunkPlan, scales: _Scales) -> Tensor:
    """Products (N, n, G C, C) of rows and keys of a chunk, 0 for later keys."""
    products = left @ right.mT
    grouped = products.unflatten(2, (plan.groups, plan.chunk))
    if scales.pairs is None:
        grouped.tril_()
    else:
        grouped *= scales.pairs
    return products


def _states(products: Tensor, first: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """States (N, n, M, Dv + 1) before each chunk and (N, M, Dv + 1) after the last one, from what each chunk adds."""
    states = torch.empty_like(products)
    state = first
    for n in range(products.shape[1]):
        states[:, n] = state
        kept = state if factors is None else state * factors[:, n]
        state = kept + products[:, n]
    return states, state


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        sums: Tensor,
        log_scale: Tensor | None,
        normalise: bool,
        least: float,
    ) -> tuple[Tensor, Tensor]:
        plan = _ChunkPlan.of(queries, keys)
        out = values.new_empty(*queries.shape[:3], values.shape[-1])
        denominators = values.new_empty(*queries.shape[:3], 1)
        state, before = sums.flatten(0, 1), []
        for segment in plan.segments:
            before.append(state)
            q, k, v = _operands(plan, segment, queries, keys, values)
            scales = _Scales.of(plan, segment, log_scale)
            states, state = _states(_scaled(k, scales.keys).mT @ v, state, scales.states)
            read = _pairs(q, k, plan, scales) @ v
            read += _scaled(q, scales.rows) @ states
            numerator, denominator = read[..., :-1], read[..., -1:]
            plan.paste(divided(numerator, denominator, least) if normalise else numerator, out, segment, plan.groups)
            plan.paste(denominator, denominators, segment, plan.groups)
        ctx.plan, ctx.normalise, ctx.least = plan, normalise, least
        ctx.save_for_backward(queries, keys, values, log_scale, out, denominators, *before)
        return out, state.view_as(sums)

    @staticmethod
    def backward(ctx: Any, g_out: Tensor, g_sums: Tensor) -> tuple[Tensor | None, ...]:
        _causal_native.refuse_second_derivatives()
        queries, keys, values, log_scale, out, denominators, *before = ctx.saved_tensors
        plan: _ChunkPlan = ctx.plan
        g_queries, g_keys, g_values = torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(values)
        g_state = g_sums.flatten(0, 1)
        for segment, state in zip(reversed(plan.segments), reversed(before), strict=True):
            q, k, v = _operands(plan, segment, queries, keys, values)
            g, read, weight = (plan.cut(t, segment, plan.groups) for t in (g_out, out, denominators))
            g = _cotangent(g, read, weight, ctx.least if ctx.normalise else None)
            scales = _Scales.of(plan, segment, log_scale)
            scaled_q, scaled_k = _scaled(q, scales.rows), _scaled(k, scales.keys)
            states, _ = _states(scaled_k.mT @ v, state, scales.states)
            # The same recurrence the other way round gives the gradient of the state after each chunk.
            turned = None if scales.states is None else scales.states.flip(1)
            g_states, g_state = _states((scaled_q.mT @ g).flip(1), g_state, turned)
            g_states = g_states.flip(1)
            pairs, g_pairs = _pairs(q, k, plan, scales), _pairs(g, v, plan, scales)
            plan.paste(g_pairs @ k + _scaled(g @ states.mT, scales.rows), g_queries, segment, plan.groups)
            plan.paste(g_pairs.mT @ q + _scaled(v @ g_states.mT, scales.keys), g_keys, segment)
            plan.paste((pairs.mT @ g + scaled_k @ g_states)[..., :-1], g_values, segment)
        return g_queries, g_keys, g_values, g_state.view_as(g_sums), None, None, None


def _operands(plan: _ChunkPlan, segment: slice, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """The factors of one segment: (N, n, G C, M), (N, n, C, M) and (N, n, C, Dv + 1), with a column of ones."""
    q, k, v = plan.cut(queries, segment, plan.groups), plan.cut(keys, segment), plan.cut(values, segment)
    return q, k, F.pad(v, (0, 1), value=1.0)


def _cotangent(g_out: Tensor, out: Tensor, denominator: Tensor, least: float | None) -> Tensor:
    """(N, n, G C, Dv + 1): gradients of numerator and denominator."""
    if least is None:
        return F.pad(g_out, (0, 1))
    g = torch.cat([g_out, -(g_out * out).sum(-1, keepdim=True)], -1)
    return divided(g, denominator, least)
