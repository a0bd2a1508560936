"""One tile of attention: the keys that a row sees, its logits, and products that keep NaN and infinity in their rows.

A *guarded* problem may hold NaN or Inf where not everybody may look. Its operands are cleaned (non-finite entries set
to 0, remembered in `bad`), and NaN is put back into exactly those results that saw such an entry: no product of 0 and
NaN is ever formed, and the derivatives stay clean as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._biases import Span, TensorBias
from ._call import CallSettings, CheckedCall, accumulator_of
from ._scores._score import Leaves, ModifiedScores, leaves_of

# Tile sizes depend on nothing in the call: a sample's bits must not depend on its batch mates.
ROWS, KEYS = 256, 256
# Scores held at once over all batch items of a group; more batch items are taken in turn.
GROUP = 2**22

NEGATIVE = float("-inf")
Tensors = tuple[Tensor, ...]
PARAMETER = 3  # where a bias's parameter, or its gradient, stands among tensors: after query, key and value


@dataclass(frozen=True)
class TileProblem(CallSettings):
    """The part of a call that is not differentiated, possibly for some rows, heads and batch items only."""

    length_q: int
    length_k: int
    dtype: torch.dtype  # accumulation
    device: torch.device
    guarded: bool = False
    rows: tuple[int, ...] | None = None  # query rows, None: all
    heads: tuple[int, ...] | None = None  # query heads, None: all
    head_count: int = 0  # query heads of the call
    batch: tuple[int, int] = (0, 0)
    pulls_bias: bool = True  # whether anyone asks for the parameter's gradient

    @classmethod
    def of(cls, call: CheckedCall) -> TileProblem:
        return cls.with_settings(call.settings(CallSettings), call.query, call.key).guard_if(*call.tensors())

    @classmethod
    def with_settings(cls, settings: CallSettings, query: Tensor, key: Tensor) -> TileProblem:
        """The unguarded problem of all rows, heads and items."""
        return cls(
            settings.mask,
            settings.bias,
            settings.placement,
            settings.scale,
            settings.softcap,
            settings.dropout,
            query.shape[2],
            key.shape[2],
            accumulator_of(query),
            query.device,
            batch=(0, query.shape[0]),
            head_count=query.shape[1],
        )

    def group(self, start: int, stop: int) -> TileProblem:
        placement = self.placement
        if isinstance(placement, Tensor):
            placement = placement[start:stop]
        return replace(self, batch=(start, stop), placement=placement)

    def guard_if(self, *tensors: Tensor | None) -> TileProblem:
        """The same problem, guarded if entries that some queries may not see can be non-finite.

        On a CPU that is looked up (a sum costs a fiftieth of a scan); on a GPU that would be a synchronisation and
        under a transform or a compiler it is impossible, so there a problem with a mask or a bias is always guarded.
        """
        if self.guarded or (self.mask is None and self.bias is None):
            return self
        given = [tensor for tensor in tensors if tensor is not None]
        cannot_look = self.device.type != "cpu" or torch._C._are_functorch_transforms_active()
        if cannot_look or torch.compiler.is_compiling():
            return replace(self, guarded=True)
        if any(torch._C._functorch.is_legacy_batchedtensor(tensor) for tensor in given):
            return replace(self, guarded=True)
        with torch.no_grad():
            # float32 at least: finite half-precision entries overflow their own sum.
            sums = (tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in given)
            return self if all(bool(torch.isfinite(total)) for total in sums) else replace(self, guarded=True)

    # --- the walk -------------------------------------------------------------------------------------------------

    def row_spans(self) -> list[Span]:
        count = self.length_q if self.rows is None else len(self.rows)
        return [self._row_span(start, min(start + ROWS, count)) for start in range(0, count, ROWS)]

    def _row_span(self, start: int, stop: int) -> Span:
        if self.rows is None:
            return Span(start, stop, torch.arange(start, stop, device=self.device))
        return Span(start, stop, torch.tensor(self.rows[start:stop], device=self.device), unbroken=False)

    def key_spans(self) -> list[Span]:
        # Few rows, as in decoding: wider tiles, as large as the others.
        rows = self.length_q if self.rows is None else len(self.rows)
        width = KEYS * (ROWS // min(ROWS, max(ALIGNED, rows)))
        edges = [(start, min(start + width, self.length_k)) for start in range(0, self.length_k, width)]
        return [Span(start, stop, torch.arange(start, stop, device=self.device)) for start, stop in edges]

    def tiles(self, rows: Span, key_spans: list[Span]) -> Iterator[tuple[int, Span, str]]:
        """The key blocks that some row of the block sees: (number, keys, "full" or "partial")."""
        hull = (rows.start, rows.stop)
        if self.rows is not None:
            chosen = self.rows[rows.start : rows.stop]
            hull = (min(chosen), max(chosen) + 1)
        for number, keys in enumerate(key_spans):
            kind = "full"
            if self.mask is not None:
                kind = self.mask.kind(hull, (keys.start, keys.stop), self.length_q, self.length_k)
            if kind != "empty":
                yield number, keys, kind

    # --- one tile -------------------------------------------------------------------------------------------------

    def visible(self, rows: Span, keys: Span, kind: str) -> Tensor | None:
        """Boolean (B|1, H|1, r, c); None when every row sees every key of the tile."""
        if kind == "full" or self.mask is None:
            return None
        bits = self.mask._grid(rows.index, keys.index, self.length_q, self.length_k)
        if bits.shape[0] > 1:
            bits = bits[self.batch[0] : self.batch[1]]
        return bits[:, list(self.heads)] if self.heads is not None and bits.shape[1] > 1 else bits

    def bias_tiles(self, parameter: Tensor | None, rows: Span, keys: Span, kind: str = "partial") -> Tensors:
        """The entries of the bias that the tile needs, linear in its parameter, in the accumulator's dtype.

        The scores (B|1, H|1, r, c) of a bias that is added; the entries that a `Score` loads; nothing without a bias.
        """
        if self.bias is None or parameter is None:
            return ()
        if isinstance(self.bias, ModifiedScores):
            return self.bias._loads(parameter, self.leaves(rows, keys), self.visible(rows, keys, kind), self.dtype)
        return (self.bias._tile(parameter, rows, keys, self.placement, self.dtype),)

    def leaves(self, rows: Span, keys: Span) -> Leaves:
        """Batch item, head, query position and key index of a tile, as a `Score` gets them."""
        heads = torch.arange(self.head_count) if self.heads is None else torch.tensor(self.heads, dtype=torch.int64)
        key = 0 if self.mask is None else self.mask._origin()[1]
        return leaves_of(self.batch, heads.to(self.device), rows.index + key, keys.index + key, self.placement)

    def dropped(self, rows: Span, keys: Span, heads: int) -> Tensor | None:
        """The dropout factor of each weight, (B, Hq, r, c), by absolute indices; None without dropout."""
        if self.dropout is None:
            return None
        assert self.heads is None
        row, key = (0, 0) if self.mask is None else self.mask._origin()
        batch = torch.arange(*self.batch, device=self.device)
        head = torch.arange(heads, device=self.device)
        return self.dropout.factor(batch, head, rows.index + row, keys.index + key, self.dtype)

    def block(self, tensor: Tensor, span: Span) -> tuple[Tensor, Tensor | None]:
        """(a block of a tensor in the accumulator's dtype, where it was not finite); cleaned when guarded."""
        block = tensor.narrow(2, span.start, len(span)).to(self.dtype)
        if not self.guarded:
            return block, None
        finite = torch.isfinite(block)
        return torch.where(finite, block, 0.0), ~finite


@dataclass(frozen=True)
class TileVisibility:
    """Which pairs of one tile are visible, and where non-finite entries are; constant under every derivative."""

    visible: Tensor | None  # (B|1, H|1, r, c), None: everything
    factor: Tensor | None  # dropout, (B, Hq, r, c)
    marks: Tensor | None  # logits that a non-finite query or key went into, (B, Hq, r, c)
    bad_v: Tensor | None  # (B, Hkv, c, Dv)
    leaves: Leaves | None = None  # of a `Score`

    def only(self, tile: Tensor) -> Tensor:
        """The tile where visible, 0 elsewhere, whatever stood there."""
        return tile if self.visible is None else torch.where(self.visible, tile, 0.0)


def look(
    problem: TileProblem,
    rows: Span,
    keys: Span,
    kind: str,
    scores: Tensors,
    bad: tuple[Tensor | None, ...],
    heads: int,
) -> TileVisibility:
    """The visibility of a tile: `scores` are of its bias, `bad` where its queries, keys and values are not finite."""
    visible = problem.visible(rows, keys, kind)
    bad_q, bad_k, bad_v = bad
    marks = None
    if bad_q is not None and bad_k is not None:
        marks = any_in(bad_q)[..., :, None] | spread(any_in(bad_k), heads)[..., None, :]
        if scores and isinstance(problem.bias, TensorBias):
            # Not only its value: whatever stands behind a -inf must not be read either. At the tile's size, because a
            # broadcast bias speaks of every key, and who reads `visible` counts them.
            allowed = (scores[0].detach() != NEGATIVE).expand(-1, -1, len(rows), len(keys))
            visible = allowed if visible is None else visible & allowed
    leaves = problem.leaves(rows, keys) if isinstance(problem.bias, ModifiedScores) else None
    return TileVisibility(visible, problem.dropped(rows, keys, heads), marks, bad_v, leaves)


@dataclass(frozen=True)
class LogitsDerivative:
    """The derivative of a tile's logits with respect to `scale q.k` and to the tiles of its bias."""

    tanh: Tensor | None  # of the capped products
    modified: Callable[..., Tensor] | None  # (score, *tiles) to the logits of a `Score`; None: tiles are added
    score: Tensor
    tiles: Tensors

    def pull(self, d_logits: Tensor) -> tuple[Tensor, Tensors]:
        """Cotangents of the products and of the bias's tiles."""
        d_score, d_tiles = d_logits, tuple(d_logits for _ in self.tiles)
        if self.modified is not None:
            d_score, *loads = torch.func.vjp(self.modified, self.score, *self.tiles)[1](d_logits)
            d_tiles = tuple(loads)
        return (d_score if self.tanh is None else d_score * (1 - self.tanh * self.tanh)), d_tiles

    def push(self, d_products: Tensor, d_tiles: Tensors) -> Tensor:
        """The tangent of the logits."""
        d_score = d_products if self.tanh is None else d_products * (1 - self.tanh * self.tanh)
        if self.modified is None:
            return d_score + d_tiles[0] if d_tiles else d_score
        # The transpose of the transpose: nested forward mode is not supported by PyTorch inside a dual level.
        logits, transpose, *_ = torch.func.vjp(self.modified, self.score, *self.tiles)
        _, again, *_ = torch.func.vjp(transpose, torch.zeros_like(logits))
        moved: Tensor = again((d_score, *d_tiles))[0]
        return moved


def logits_of(
    problem: TileProblem, sight: TileVisibility, query: Tensor, key: Tensor, scores: Tensors
) -> tuple[Tensor, LogitsDerivative]:
    """Masked logits (B, Hq, r, c), -inf where nothing is seen, and their derivative."""
    logits, tanh = products(query * problem.scale, key), None
    if problem.softcap is not None:
        tanh = torch.tanh(logits / problem.softcap)
        logits = problem.softcap * tanh
    score, modified, bias = logits, None, problem.bias
    if isinstance(bias, ModifiedScores):
        leaves = sight.leaves
        assert leaves is not None
        score = poison(score, sight.marks)

        def modified(score: Tensor, *loads: Tensor) -> Tensor:
            return bias._apply(score, loads, leaves, sight.visible)

        logits = modified(score, *scores)
    else:
        logits = poison(logits + scores[0] if scores else logits, sight.marks)
    seen = logits if sight.visible is None else torch.where(sight.visible, logits, NEGATIVE)
    return seen, LogitsDerivative(tanh, modified, score, scores)


def shown(problem: TileProblem, scores: Tensors, logits: Tensor) -> Tensor | None:
    """Which pairs the bias does not hide by -inf; None if there is no bias."""
    if not isinstance(problem.bias, ModifiedScores):
        return scores[0] != NEGATIVE if scores else None
    return logits != NEGATIVE


# --- grouped-query products ---------------------------------------------------------------------------------------


def fold(tensor: Tensor, kv_heads: int) -> Tensor:
    """(B, Hq, r, n) to (B, Hkv, G*r, n): the query heads of one key head become more rows of one product."""
    batch, heads, rows, width = tensor.shape
    return tensor if heads == kv_heads else tensor.reshape(batch, kv_heads, heads // kv_heads * rows, width)


def unfold(tensor: Tensor, heads: int) -> Tensor:
    """The inverse of `fold`."""
    batch, kv_heads, rows, width = tensor.shape
    return tensor if heads == kv_heads else tensor.reshape(batch, heads, rows * kv_heads // heads, width)


def spread(tensor: Tensor, heads: int) -> Tensor:
    """(B, Hkv, ...) to (B, Hq, ...): query head h reads key head h // G."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


ALIGNED = 16  # entries; every matrix then begins on a 64-byte line


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """(B, H, n, k) times (B, H, k, m), item by item, with the sizes filled up by zeros to a multiple of 16.

    The libraries under torch.matmul choose their kernels by the number of matrices and by their alignment, and split
    odd sizes by the number of threads; those kernels round differently. One product over the whole batch would make a
    sample's bits depend on its batch mates, and odd sizes on the threads.
    """
    rows, columns = left.shape[2], right.shape[3]
    if left.shape[0] == 0:
        return left.new_zeros(0, left.shape[1], rows, columns)
    left, right = _filled(left), _filled(right)
    items = [torch.matmul(a, b) for a, b in zip(left.unbind(0), right.unbind(0), strict=True)]
    product = items[0][None] if len(items) == 1 else torch.stack(items)
    return product[:, :, :rows, :columns]


def _filled(matrix: Tensor) -> Tensor:
    down, right = -matrix.shape[2] % ALIGNED, -matrix.shape[3] % ALIGNED
    return torch.nn.functional.pad(matrix, (0, right, 0, down)) if down or right else matrix


def products(rows: Tensor, key: Tensor) -> Tensor:
    """x_i.k_j: (B, Hq, r, n) with (B, Hkv, c, n) to (B, Hq, r, c)."""
    return unfold(matmul(fold(rows, key.shape[1]), key.transpose(-1, -2)), rows.shape[1])


def weigh(weights: Tensor, value: Tensor) -> Tensor:
    """sum_j w_ij v_j: (B, Hq, r, c) with (B, Hkv, c, n) to (B, Hq, r, n)."""
    return unfold(matmul(fold(weights, value.shape[1]), value), weights.shape[1])


def collect(weights: Tensor, rows: Tensor, kv_heads: int) -> Tensor:
    """sum_i w_ij x_i over rows and the query heads of each key head: to (B, Hkv, c, n)."""
    return matmul(fold(weights, kv_heads).transpose(-1, -2), fold(rows, kv_heads))


def by_kv_head(visible: Tensor, kv_heads: int) -> Tensor:
    """(B|1, Hq|1, ...) to (B|1, Hkv|1, ...): whether some query head of the group sees."""
    if visible.shape[1] in (1, kv_heads):
        return visible
    # The group's size is given: of a tensor without entries it cannot be inferred.
    return visible.view(visible.shape[0], kv_heads, visible.shape[1] // kv_heads, *visible.shape[2:]).any(2)


# --- poison -------------------------------------------------------------------------------------------------------


def any_in(bad: Tensor) -> Tensor:
    """(B, H, n, width) to (B, H, n): rows with any bad entry."""
    return bad.any(-1)


def poison(result: Tensor, hit: Tensor | None) -> Tensor:
    """NaN where `hit`."""
    if hit is None:
        return result
    return torch.where(hit, float("nan"), result)


def seen_bad(sight: TileVisibility, heads: int, dtype: torch.dtype) -> Tensor | None:
    """True for output entries whose sum includes a value that is not finite at a visible key: (B, Hq, r|1, Dv)."""
    bad = sight.bad_v
    if bad is None:
        return None
    if sight.visible is None:
        return spread(bad.any(-2, keepdim=True), heads)
    seen = sight.visible.to(dtype).expand(bad.shape[0], heads, *sight.visible.shape[2:])
    return weigh(seen, bad.to(dtype)) > 0


# --- batch groups -------------------------------------------------------------------------------------------------


def by_group(
    function: Callable[..., tuple[Tensor, ...]], problem: TileProblem, *tensors: Tensor | None
) -> tuple[Tensor, ...]:
    """`function(problem, *tensors)` over groups of batch items in turn, so that memory does not grow with the batch.

    A tensor whose first axis is not the batch (slopes, a table, a bias shared by the batch) goes to every group whole,
    and where the function returns its gradient, the groups' are added.
    """
    query, parameter = tensors[0], tensors[3]
    assert query is not None
    batch = query.shape[0]
    tile = query.shape[1] * min(ROWS, max(1, query.shape[2])) * min(KEYS, max(1, problem.length_k))
    size = max(1, GROUP // max(1, tile))
    if batch <= size:
        return function(problem, *tensors)
    # All else is 3-D or 4-D and has the batch axis; a bias's parameter, and what has its shape, may lack it.
    shared = parameter is not None and (parameter.dim() <= 2 or parameter.shape[0] == 1)
    parts = []
    for start in range(0, batch, size):
        stop = min(start + size, batch)
        cut = [x if x is None or x.dim() <= 2 or x.shape[0] == 1 else x[start:stop] for x in tensors]
        parts.append(function(problem.group(start, stop), *cut))
    return tuple(
        torch.stack(pieces).sum(0) if shared and number == PARAMETER else torch.cat(pieces)
        for number, pieces in enumerate(zip(*parts, strict=True))
    )
