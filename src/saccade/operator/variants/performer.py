"""Performer: softmax attention estimated through random features, in linear time (FAVOR+).

    out_i = phi(x_i) . sum_j phi(y_j) v_j^T / phi(x_i) . sum_j phi(y_j),     x = s q, y = s k, s = sqrt(scale): D^-1/4

since E[phi(x).phi(y)] = exp(x.y): features and their errors are in `random_features`. Choromanski et al., "Rethinking
Attention with Performers" (2020), sections 2.2 to 2.4 and algorithm 1; causally by prefix sums, appendix B.1.

Time O(L r (D + Dv)), memory O(L (r + Dv)), for r features; decoding keeps r (Dv + 1) + 1 numbers per head. Neither
L x L nor L x r x D is formed.

The relative error of a weight grows as exp(|x + y|^2 / 2).

Nothing overflows. Scales are taken out of the exponentials where they cancel between numerator and denominator:

- of a query, its own largest exponent;
- of keys, when all are seen, the largest exponent of each feature over the real keys of the head. The query's
  exponents take it on before their own largest is found, so that one product of the denominator is exactly 1 or more;
- of keys, causally, the largest exponent so far, one per head and position. One over all keys would let the future
  decide what of the past is rounded away.

So there is no eps, and positive and hyperbolic features have positive denominators. Causally one can still underflow
(float32: below e^-80 of what the norms of query and keys allow); such a row is 0. Sums of trigonometric features may be
0 or negative: where a denominator is no larger than the rounding error of one weight, the row is 0. Where it is little
larger, the row is finite but wildly wrong: why the paper left these features behind (section 2.3).

Shape legend: B batch, Hq / Hkv query and key-value heads (query head h reads h // (Hq // Hkv)), Lq / Lk lengths, D key
width, Dv value width, m vectors, r features (m, or 2m where each vector gives two).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._call import without_autocast
from .._checks import _scale, check_inputs
from .._masks import Mask
from .._masks._data import whole
from .._unknown_arguments import advised, refused
from ._causal import (
    LinearState,
    NonFiniteTokens,
    finite,
    read_all,
    read_causally,
    read_state,
    summed,
    unpoisoned,
    within,
)
from ._causal_padding import CausalPadding, causal_padding_of, padding_of_step, zero_padding
from ._mechanism import HeadSizes, MechanismConfig, Recurrent, Traits, check_state
from ._random_features import (
    check_kind,
    draw_projection,
    exponentials,
    exponentials_over_keys,
    half_square,
    signed,
    usual_features,
    vectors_for,
    waves,
)

_NO_PAIRS = "it forms no pairs that a mask could hide"
_ROOM = 20.0  # features of a causal row go up to exp(20), so that products may fall to exp(-40) before 1 is left


class PerformerState(NamedTuple):
    """The sums that Performer keeps: float32, or float64 for float64 inputs.

    Args:
        sums: (B, Hkv, r, Dv): sum_j phi(y_j) v_j^T / exp(level).
        weights: (B, Hkv, r): sum_j phi(y_j) / exp(level).
        level: (B, Hkv): the largest exponent so far, -inf at first.

    Example:
        >>> import torch, saccade
        >>> sizes = saccade.variants.HeadSizes(width=8, heads=2, kv_heads=2, head=4, value_head=4)
        >>> mechanism = saccade.variants.PerformerConfig(features=6).build(sizes)
        >>> x = torch.ones(1, 2, 5, 4)
        >>> out, state = mechanism.step(x, x, x)
        >>> state.sums.shape, state.weights.shape, state.level.shape
        (torch.Size([1, 2, 6, 4]), torch.Size([1, 2, 6]), torch.Size([1, 2]))
    """

    sums: Tensor
    weights: Tensor
    level: Tensor


@advised
def performer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    projection: Tensor | None = None,
    features: int | None = None,
    seed: int = 0,
    kind: str = "positive",
    scale: float | None = None,
) -> Tensor:
    """Performer: estimate softmax attention through random features, in linear time (FAVOR+).

    Choromanski et al., "Rethinking Attention with Performers" (2020), sections 2.2 to 2.4 and algorithm 1.

    Args:
        query: (B, Hq, Lq, D).
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, Dv).
        mask: `Causal()`, `Padding(...)` or both; None shows everything.
        projection: (Hkv or 1, m, D), the vectors, as `draw_projection` gives them. None draws orthogonal vectors for
            each head.
        features: r, the number of features to draw; None is D log D in whole blocks of D.
        seed: of the drawn vectors: equal seeds give equal vectors.
        kind: "positive", "trigonometric" or "hyperbolic".
        scale: of the logits that are estimated; None is D ** -0.5.

    Returns:
        (B, Hq, Lq, Dv) in the input dtype, computed in float32 at least. Rows that see no key are 0.

    Raises:
        TypeError: not a tensor, a wrong or mixed dtype.
        ValueError: sizes that do not fit, an unknown kind, another mask, both `features` and `projection`.

    Example:
        >>> import torch, saccade
        >>> x = torch.eye(4)[None, None]
        >>> out = saccade.variants.performer_attention(x, x, x, features=4096)
        >>> torch.allclose(out, saccade.attention(x, x, x), atol=0.02)
        True
    """
    query, key, value = check_inputs(query, key, value)
    check_kind(kind)
    scale = _scale(scale, query.shape[3])
    if projection is None:
        projection = _draw_vectors(features, seed, kind, key.shape[1], key.shape[3])
    elif features is not None:
        raise ValueError(
            f"features: the projection sets their number; pass only one of the two, got features={features}"
        )
    else:
        _check_projection(projection, key)
    seen = causal_padding_of(mask, query.shape[0], query.shape[2], key.shape[2], query.device, "performer", _NO_PAIRS)
    with without_autocast(query.device):
        given = _WideInputs.of(query, key, value, seen, scale)
        estimate = _Estimate(projection.to(query.device), kind)
        out = estimate.causally(given)[0] if seen.causal else estimate.everywhere(given)
        return zero_padding(out, seen.rows).to(query.dtype)


class _WideInputs(NamedTuple):
    """Inputs as the sums take them: in a wide dtype, with half of the scale each, padding filled with 0."""

    query: Tensor  # (B, Hq, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    kept: Tensor | None  # (B or 1, Lk), the real keys
    # (B, Hq, Lq) and (B, Hkv, Lk): NaN where a query, or a key or value, was not finite; None: there is no such
    poison: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, padding: CausalPadding, scale: float) -> _WideInputs:
        dtype = torch.promote_types(query.dtype, torch.float32)
        # Squares and products of what is kept stay finite; exponents of such norms tell nothing but the largest apart.
        most = torch.finfo(dtype).max ** 0.5 / (16 * query.shape[3])
        root = abs(scale) ** 0.5
        query, key, value = (
            zero_padding(query, padding.rows),
            zero_padding(key, padding.keys),
            zero_padding(value, padding.keys),
        )
        if within(most / max(root, 1), query, key) and finite(value):  # what is below would change no bit
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            return cls(query * (root if scale >= 0 else -root), key * root, value, padding.keys, None)
        rows, keys = NonFiniteTokens.of(query, key, value)
        return cls(
            unpoisoned(query, rows).to(dtype).mul(root if scale >= 0 else -root).clamp(-most, most),
            unpoisoned(key, keys).to(dtype).mul(root).clamp(-most, most),
            unpoisoned(value, keys).to(dtype),
            padding.keys,
            (rows.to(dtype), keys.to(dtype)),
        )

    def tainted(self, read: Tensor, taint: Tensor) -> Tensor:
        """The output with NaN in rows whose own query, or `taint` (B, Hkv, Lq or 1) of their visible keys, is NaN."""
        assert self.poison is not None
        rows, keys = self.poison
        return read + (rows + taint.repeat_interleave(rows.shape[1] // keys.shape[1], 1))[..., None]


@dataclass(frozen=True)
class _Estimate:
    """Attention of (scaled) queries, keys and values through features of one kind."""

    projection: Tensor  # (Hkv or 1, m, D)
    kind: str

    def everywhere(self, given: _WideInputs) -> Tensor:
        """The output if every query reads every real key."""
        query = _grouped(given.query, given.key.shape[1])
        if self.kind == "trigonometric":
            keys, queries = self._waves_of_keys(given), waves(query, self.projection)
        else:
            vectors = signed(self.projection, self.kind)
            keys, level = exponentials_over_keys(given.key, vectors, given.kept)
            queries, _ = exponentials(query, vectors, level)
        out = read_all(queries, keys, given.value, least=self._least(query.dtype))
        out = out.reshape(*given.query.shape[:3], given.value.shape[3])
        return out if given.poison is None else given.tainted(out, given.poison[1].sum(-1, keepdim=True))

    def causally(self, given: _WideInputs, state: PerformerState | None = None) -> tuple[Tensor, PerformerState]:
        """Causal attention with a state: the queries are the last rows, and read the real keys up to their own
        position, and the state."""
        query = _grouped(given.query, given.key.shape[1])
        half = half_square(given.key.detach())
        if self.kind == "trigonometric":
            keys, level = waves(given.key, self.projection, squares=True), half
            queries = waves(query, self.projection)
        else:
            vectors = signed(self.projection, self.kind)
            keys, top = exponentials(given.key, vectors, squares=True, room=_ROOM)
            queries, level = exponentials(query, vectors, room=_ROOM)[0], top - half
        keys, level = zero_padding(keys, given.kept), _hidden(level, given.kept)
        queries = queries.reshape(*given.query.shape[:3], keys.shape[3])
        one = given.query.shape[2] == given.key.shape[2] == 1
        read = _read_one if one else _read
        out, state = read(queries, keys, given.value, level[..., 0], state, self._least(query.dtype))
        if given.poison is None:
            return out, state
        ahead = keys.shape[2] - queries.shape[2]
        taint = F.pad(given.poison[1].cumsum(-1), (-ahead, 0))
        sums = state.sums + given.poison[1].sum(-1)[..., None, None]
        return given.tainted(out, taint), state._replace(sums=sums)

    def _waves_of_keys(self, given: _WideInputs) -> Tensor:
        """Features over exp(the largest |y|^2 / 2 of the real keys of the head), 0 for padded keys."""
        half = _hidden(half_square(given.key), given.kept)
        level = half.detach().amax(-2, keepdim=True) if half.shape[2] else half.detach()
        return waves(given.key, self.projection) * (half - _finite_level(level)).exp()

    def _least(self, dtype: torch.dtype) -> float | None:
        """Sums of trigonometric weights may be no more than the rounding error of one weight, which is up to m."""
        return torch.finfo(dtype).eps * self.projection.shape[1] if self.kind == "trigonometric" else None


def _grouped(query: Tensor, kv_heads: int) -> Tensor:
    """(B, Hq, L, D) with the queries of one key-value head below each other: (B, Hkv, G L, D)."""
    return query.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _hidden(exponents: Tensor, kept: Tensor | None) -> Tensor:
    return exponents if kept is None else exponents.masked_fill(~kept[:, None, :, None], -torch.inf)


def _finite_level(level: Tensor) -> Tensor:
    """0 for the level of nothing."""
    return level.masked_fill(level == -torch.inf, 0.0)


def _read(
    queries: Tensor, keys: Tensor, values: Tensor, level: Tensor, state: PerformerState | None, least: float | None
) -> tuple[Tensor, PerformerState]:
    """Outputs (B, Hq, Lq, n) of queries, aligned bottom-right, over keys up to their place; and the carried state."""
    ahead, behind = max(0, keys.shape[2] - queries.shape[2]), max(0, queries.shape[2] - keys.shape[2])
    if ahead:
        assert state is None
        state = _remembered(keys[:, :, :ahead], values[:, :, :ahead], level[..., :ahead])
    read, after = read_causally(
        queries[:, :, behind:],
        keys[:, :, ahead:],
        values[:, :, ahead:],
        None if state is None else LinearState(state.sums, state.weights),
        least=least,
        log_scale=level[..., ahead:],
        state_scale=None if state is None else state.level,
        known_finite=True,
    )
    highest = level.new_full((*level.shape[:2], 1), -torch.inf) if state is None else state.level[..., None]
    highest = torch.cat([highest, level[..., ahead:]], -1).amax(-1)
    return F.pad(read, (0, 0, behind, 0)), PerformerState(*after, highest)


def _read_one(
    queries: Tensor, keys: Tensor, values: Tensor, level: Tensor, state: PerformerState | None, least: float | None
) -> tuple[Tensor, PerformerState]:
    """As `_read` for a single token without chunks. The token may read the state to which it is added."""
    added = _remembered(keys, values, level)
    if state is not None:
        added = _joined(state, added)
    return read_state(queries, LinearState(added.sums, added.weights), least=least), added


def _joined(state: PerformerState, other: PerformerState) -> PerformerState:
    """The state after the tokens of both."""
    level = torch.maximum(state.level, other.level)
    ours, theirs = ((part.level - _finite_level(level)).exp()[..., None] for part in (state, other))
    sums = state.sums * ours[..., None] + other.sums * theirs[..., None]
    return PerformerState(sums, state.weights * ours + other.weights * theirs, level)


def _remembered(keys: Tensor, values: Tensor, level: Tensor) -> PerformerState:
    """The state after these keys."""
    highest = level.amax(-1)
    scales = (level - _finite_level(highest)[..., None]).exp()
    return PerformerState(*summed(keys * scales[..., None], values), highest)


def _draw_vectors(features: int | None, seed: int, kind: str, heads: int, width: int) -> Tensor:
    """(heads, m, D), float32 on the CPU."""
    features = usual_features(width) if features is None else whole(features, "features", least=1)
    generator = torch.Generator().manual_seed(seed)
    return draw_projection(vectors_for(features, kind), width, heads=heads, generator=generator)


def _check_projection(projection: object, key: Tensor) -> None:
    if not isinstance(projection, Tensor) or not projection.is_floating_point():
        raise TypeError(f"projection: expected a floating-point tensor (Hkv or 1, m, D), got {_kind(projection)}")
    heads, width = key.shape[1], key.shape[3]
    shape = tuple(projection.shape)
    if len(shape) != 3 or shape[0] not in (1, heads) or shape[1] < 1 or shape[2] != width:
        raise ValueError(f"projection: expected shape ({heads} or 1, at least 1, {width}), got {shape}")


def _kind(thing: object) -> str:
    return str(thing.dtype) if isinstance(thing, Tensor) else type(thing).__name__


@dataclass(frozen=True)
class PerformerConfig(MechanismConfig):
    """`performer_attention` as the mechanism of `saccade.nn`.

    Args:
        features: r, numbers that stand for each query and key; None is D log D in whole blocks of D: 256 at D = 64.
            Each vector gives one feature if the kind is "positive", otherwise two.
        kind: "positive", "trigonometric" or "hyperbolic".
        orthogonal: vectors within blocks of D; otherwise they are independent.
        redraw_every: after so many forward passes in training, vectors are drawn anew, so that weights cannot adapt to
            the errors of one draw; None keeps the first. Evaluation and decoding never draw.
        vector_length: c, so that all vectors are c sqrt(D) long; None leaves them as long as Gaussian ones. Where c < 1
            the weights are near exp(c^2 x.y - (1 - c^2) (|x|^2 + |y|^2) / 2), not softmax's, and their relative
            error grows as exp(c^2 |x + y|^2 / 2). For models that are trained with it from the start; 0.5 is tried.

    Raises:
        TypeError, ValueError: an unknown kind, or a number outside of these ranges.

    Example:
        >>> import torch, saccade
        >>> mechanism = saccade.variants.PerformerConfig(features=16)
        >>> config = saccade.nn.AttentionConfig(width=8, heads=2, mechanism=mechanism)
        >>> saccade.nn.MultiHeadAttention(config)(torch.ones(1, 5, 8), mask=saccade.Causal()).shape
        torch.Size([1, 5, 8])
    """

    name: ClassVar[str] = "performer"
    traits: ClassVar[Traits] = Traits(
        paper=(
            "Choromanski, Likhosherstov, Dohan, Song, Gane, Sarlos, Hawkins, Davis, Mohiuddin, Kaiser, Belanger, "
            "Colwell, Weller, Rethinking Attention with Performers, 2020"
        ),
        computes="approximation",
        time="O(L r d), r features",
        memory="O(L (r + d))",
        choose="A model of softmax attention with small logits has to read sequences too long for L^2.",
        avoid="One token among many has to be found: errors grow as the exponential of the norms of query and key.",
        masks=_NO_PAIRS,
        recurrent=True,
    )

    features: int | None = None
    kind: str = "positive"
    orthogonal: bool = True
    redraw_every: int | None = None
    vector_length: float | None = None

    def __post_init__(self) -> None:
        check_kind(self.kind)
        if self.features is not None:
            vectors_for(whole(self.features, "features", least=1), self.kind)
        if not isinstance(self.orthogonal, bool):
            raise TypeError(f"orthogonal: expected True or False, got {type(self.orthogonal).__name__}")
        if self.redraw_every is not None:
            whole(self.redraw_every, "redraw_every", least=1)
        length = self.vector_length
        if length is not None and (isinstance(length, bool) or not isinstance(length, Real)):
            raise TypeError(f"vector_length: expected a number or None, got {type(length).__name__}")
        if length is not None and not 0 < length < math.inf:
            raise ValueError(f"vector_length: expected a positive number, got {length}")

    def build(self, heads: HeadSizes) -> PerformerAttention:
        """The module, with random vectors drawn for each key-value head."""
        return PerformerAttention(self, heads)


class PerformerAttention(Recurrent):
    """`performer_attention` as a module that keeps its vectors. It has no parameters; `PerformerConfig.build` makes it.

    Vectors depend on `seed` and on how often they were drawn. Both are saved with the module, so that training that is
    resumed from a checkpoint draws the same vectors. A forward pass that is recomputed during backward (activation
    checkpointing) counts once and uses the same vectors: a number from PyTorch's generator, whose state checkpointing
    restores, identifies each pass.
    """

    projection: Tensor  # (Hkv, m, D), float32 unless the module was cast
    seed: Tensor  # int64
    passes: Tensor  # int64, forward passes in training; counted where vectors are redrawn

    def __init__(self, config: PerformerConfig, heads: HeadSizes):
        super().__init__()
        self.config, self.heads = config, heads
        features = usual_features(heads.head) if config.features is None else config.features
        vectors = vectors_for(features, config.kind)
        self.register_buffer("projection", torch.zeros(heads.kv_heads, vectors, heads.head))
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self._draws: dict[int, int] = {}  # of the latest passes: its number, and which draw it saw
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors anew, from a new seed."""
        self.seed.fill_(_random_number())
        self.passes.zero_()
        self._draws.clear()
        if not self.seed.is_meta:  # which holds no seed
            self.projection = self._draw(0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None = None, **options: Any) -> Tensor:
        """As `performer_attention`, with the vectors of this module; the scale is D ** -0.5."""
        if options:
            raise refused(performer_attention, options)
        return performer_attention(query, key, value, mask, projection=self._current(), kind=self.config.kind)

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, state: PerformerState | None = None, mask: Mask | None = None
    ) -> tuple[Tensor, PerformerState]:
        """As `Recurrent.step`."""
        query, key, value = check_inputs(query, key, value)
        batch, length = query.shape[0], query.shape[2]
        if key.shape[2] != length:
            raise ValueError(
                f"key has length (axis 2) {key.shape[2]}, expected query's {length}: a step reads new tokens"
            )
        _check_projection(self.projection, key)
        seen = padding_of_step(mask, batch, length, query.device, "performer", _NO_PAIRS)
        real = seen.keys if seen.rows is None else seen.rows if seen.keys is None else seen.rows & seen.keys
        with without_autocast(query.device):
            given = _WideInputs.of(query, key, value, CausalPadding(True, real, real), query.shape[3] ** -0.5)
            heads, features = given.value.shape[:2], self.projection.shape[1] * (1 + (self.config.kind != "positive"))
            shapes = [(*heads, features, given.value.shape[-1]), (*heads, features), heads]
            check_state(state, PerformerState, shapes, given.value.dtype, given.value.device)
            out, state = _Estimate(self.projection, self.config.kind).causally(given, state)
            return zero_padding(out, real).to(query.dtype), state

    def extra_repr(self) -> str:
        kind, (heads, vectors, width) = self.config.kind, self.projection.shape
        return f"{kind}, vectors={vectors}, heads={heads}, width={width}"

    def _draw(self, draw: int) -> Tensor:
        heads, vectors, width = self.projection.shape
        generator = torch.Generator().manual_seed((int(self.seed) + draw) % 2**63)
        drawn = draw_projection(vectors, width, heads=heads, orthogonal=self.config.orthogonal, generator=generator)
        if self.config.vector_length is not None:
            drawn *= self.config.vector_length * width**0.5 / drawn.norm(dim=-1, keepdim=True)
        return drawn.to(self.projection)

    def _current(self) -> Tensor:
        """The vectors of this forward pass."""
        every = self.config.redraw_every
        if every is None or not self.training:
            return self.projection
        number, passes = _random_number(), int(self.passes)
        if torch._C._current_graph_task_id() != -1:  # within backward: a pass that was there before
            latest = max(0, passes - 1) // every
            draw = self._draws.get(number, latest)
            return self.projection if draw == latest else self._draw(draw)
        draw = passes // every
        if passes and passes % every == 0:
            self.projection = self._draw(draw)  # not in place: an earlier pass may still need the old ones
        self.passes += 1
        self._draws[number] = draw
        if len(self._draws) > _PASSES_KNOWN:
            del self._draws[next(iter(self._draws))]
        return self.projection


_PASSES_KNOWN = 1024  # forward passes whose backward may be yet to come


def _random_number() -> int:
    """One of 2^63, from PyTorch's generator."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))
