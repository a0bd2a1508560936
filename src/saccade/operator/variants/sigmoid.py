"""Sigmoid attention: the weight of each query-key pair is independent of other pairs, and rows are not normalised.

    out_i = sum_j sigmoid(scale q_i.k_j + bias_ij - log n_i) v_j        over the keys j that the mask shows to query i

Ramapuram, Danieli, Dhekane, Weers, Busbridge, Ablin, Likhomanenko, Digani, Gu, Shidani, Webb, "Theory, Analysis, and
Best Practices for Sigmoid Self-Attention" (2024), section 2; b = -log n is their recommended offset, and ALiBi their
recommended bias. With it the weights of a row whose logits are small sum to about 1, as softmax's do.

What n is. The paper trains at one length and takes n for that length. Here n_i is, unless `length` fixes it, the number
of keys that the mask shows to row i. That is the same number in a padded batch and alone, in causal training and when
decoding token by token, so all of them agree exactly; and a row early in a causal sequence is not shrunk by keys that
it never sees. A key whose bias is -inf is not shown and does not count.

Time O(L^2 D), less what the mask hides in whole tiles; memory O(L D), forward and backward: tiles are recomputed. The
native kernels (`native/`) compute it where they compute softmax attention. Tiles in plain PyTorch do everywhere else:
in float64, on other devices, under compilers and transforms, and where a gradient needs a graph itself.

Shape legend: B batch, Hq / Hkv query and key-value heads (query head h reads h // (Hq // Hkv)), Lq / Lk lengths, D key
width, Dv value width, r x c a tile of rows by keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .._backends.native import _kernels, _run
from .._backends.native._kernels import KernelSettings
from .._biases import Bias, Parts, Span, TensorBias
from .._call import CheckedCall, without_autocast
from .._checks import make_call
from .._dropout import Dropout
from .._masks import Mask
from .._masks._data import whole
from .._scores._score import ModifiedScores
from .._tiles import (
    NEGATIVE,
    TileProblem,
    TileVisibility,
    any_in,
    by_group,
    collect,
    look,
    poison,
    products,
    seen_bad,
    spread,
    weigh,
)
from .._unknown_arguments import advised
from ._mechanism import HeadSizes, Mechanism, MechanismConfig, Traits


@advised
def sigmoid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    length: int | None = None,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    dropout: float | Dropout = 0.0,
) -> Tensor:
    """Attention whose weights are `sigmoid(scale q.k + bias - log n)`: rows are not normalised.

    Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention" (2024), section 2.

    Args:
        query: (B, Hq, Lq, D), float32, bfloat16, float16 or float64; sums are float32 at least.
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, Dv).
        mask: any mask, as in `saccade.attention`; True = attend.
        length: n of the offset -log n. None: the number of keys that each row sees.
        bias: added to the logits: a tensor (-inf hides a key), `ALiBi` or `RelativeBias`; gradients reach it.
        scale: factor of the dot products; None is D ** -0.5.
        dropout: probability of dropping a weight, or `Dropout(p, seed)`.

    Returns:
        (B, Hq, Lq, Dv) in the input dtype. Rows that see no key are 0, and so are their gradients. A hidden key changes
        neither the output nor a gradient, even if it is NaN or Inf; a visible one that is gives NaN.

    Raises:
        TypeError, ValueError: as `saccade.attention`; a length below 1 or not an int. A second derivative raises
            RuntimeError.

    Example:
        >>> import torch, saccade
        >>> query, value = torch.zeros(1, 1, 3, 4), torch.ones(1, 1, 3, 1)
        >>> out = saccade.variants.sigmoid_attention(query, query, value)
        >>> torch.allclose(out, torch.tensor(0.75))  # three weights sigmoid(-log 3) = 1/4
        True
    """
    if length is not None:
        whole(length, "length", least=1)
    call = make_call(query, key, value, mask, bias=bias, scale=scale, softcap=None, sink=None, dropout=dropout)
    if call.softcap is not None or isinstance(call.bias, ModifiedScores):
        raise ValueError(f"sigmoid_attention: bias {bias!r} changes scores; expected one that is added to them")
    if _run.refuses(call) is None and not _run.watched():
        return _by_kernels(call, length)
    problem = TileProblem.of(call)
    parameter = None if call.bias is None else call.bias.parameter
    with without_autocast(call.device):
        offset = _log_lengths(problem, parameter, length)
        out: Tensor = _Sigmoid.apply(problem, call.query, call.key, call.value, parameter, offset)
    return out


# --- by the native kernels --------------------------------------------------------------------------------------------


def _by_kernels(call: CheckedCall, length: int | None) -> Tensor:
    query, key, value = call.query, call.key, call.value
    parameter = None if call.bias is None else call.bias.parameter
    settings = KernelSettings.of(call, _run.lowered(call.mask, query, key))
    counts = _kernels.key_counts(settings, query, key, parameter)
    if length is not None:
        counts = torch.where(counts > 0, float(length), 0.0)
    given = (query, key, value, parameter)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        out: Tensor = _NativeSigmoid.apply(settings, *given, counts)
        return out
    return _kernels.forward(replace(settings, counts=counts), False, query, key, value, parameter, None)[0]


class _NativeSigmoid(torch.autograd.Function):
    """(query, key, value, parameter, counts) -> out; of the old form, see `_run.py`."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: KernelSettings,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        parameter: Tensor | None,
        counts: Tensor,
    ) -> Tensor:
        ctx.settings = settings
        ctx.save_for_backward(query, key, value, parameter, counts)
        return _kernels.forward(replace(settings, counts=counts), False, query, key, value, parameter, None)[0]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *given, counts = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:5]
        if torch.is_grad_enabled() or not _run.ordinary(d_out):
            problem = TileProblem.with_settings(ctx.settings, given[0], given[1]).guard_if(*given)
            return None, *_pull_by_tiles(problem, wanted[3], *given, counts.clamp(min=1).log(), d_out), None
        settings = replace(ctx.settings, counts=counts)
        return None, *_kernels.backward(settings, [*given, None], (*wanted, False), None, None, d_out, None)[:4], None


# --- by tiles ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _log_lengths(problem: TileProblem, parameter: Tensor | None, length: int | None) -> Tensor:
    """log n of each row, (B|1, H|1, Lq)."""
    if length is not None:
        return torch.full((1, 1, problem.length_q), math.log(length), dtype=problem.dtype, device=problem.device)
    if problem.mask is None and not isinstance(problem.bias, TensorBias):
        n = max(problem.length_k, 1)
        return torch.full((1, 1, problem.length_q), math.log(n), dtype=problem.dtype, device=problem.device)
    key_spans = problem.key_spans()
    counts = [torch.zeros(1, 1, 0, dtype=torch.int64, device=problem.device)]
    counts += [_keys_seen(problem, parameter, rows, key_spans) for rows in problem.row_spans()]
    shape = torch.broadcast_shapes(*(count.shape[:2] for count in counts))
    seen = torch.cat([count.expand(*shape, -1) for count in counts], 2)
    return seen.clamp(min=1).to(problem.dtype).log()


def _keys_seen(problem: TileProblem, parameter: Tensor | None, rows: Span, key_spans: list[Span]) -> Tensor:
    """The number of keys that each row of the block sees, int64 (B|1, H|1, r)."""
    total = torch.zeros(1, 1, len(rows), dtype=torch.int64, device=problem.device)
    for _, keys, kind in problem.tiles(rows, key_spans):
        seen = problem.visible(rows, keys, kind)
        if isinstance(problem.bias, TensorBias):
            scores = problem.bias_tiles(parameter, rows, keys)
            shown = (scores[0] != NEGATIVE).expand(-1, -1, len(rows), len(keys))
            seen = shown if seen is None else seen & shown
        total = total + (seen.sum(-1) if seen is not None else len(keys))
    return total


class _Sigmoid(torch.autograd.Function):
    """(query, key, value, parameter) -> out, with the tiles computed again for the derivative."""

    @staticmethod
    def forward(
        problem: TileProblem, query: Tensor, key: Tensor, value: Tensor, parameter: Tensor | None, offset: Tensor
    ) -> Tensor:
        return by_group(_forward, problem, query, key, value, parameter, offset)[0].to(query.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.problem = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_pull_by_tiles(ctx.problem, ctx.needs_input_grad[4], *ctx.saved_tensors, d_out), None


def _pull_by_tiles(problem: TileProblem, pulls_bias: bool, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value and parameter. `inputs`: these four tensors, offset and d_out."""
    problem = replace(problem, pulls_bias=pulls_bias).guard_if(inputs[-1])
    grads: tuple[Tensor | None, ...] = _SigmoidBackward.apply(problem, *inputs)
    return grads if pulls_bias else (*grads, None)


class _SigmoidBackward(torch.autograd.Function):
    """(query, key, value, parameter, offset, d_out) -> (dq, dk, dv[, dparameter]), without a second derivative."""

    @staticmethod
    def forward(problem: TileProblem, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        return by_group(_backward, problem, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        raise RuntimeError("sigmoid_attention has only first derivatives; a second derivative was requested")


class _Tile(NamedTuple):
    """One tile that some row sees, in the accumulator's dtype."""

    number: int  # of the key block
    keys: Span
    query: Tensor  # (B, Hq, r, D)
    key: Tensor  # (B, Hkv, c, D)
    value: Tensor  # (B, Hkv, c, Dv)
    weights: Tensor  # (B, Hq, r, c), 0 where nothing is seen
    sight: TileVisibility


def _tiles(
    problem: TileProblem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameter: Tensor | None,
    offset: Tensor,
    rows: Span,
    key_spans: list[Span],
) -> Iterator[_Tile]:
    """The tiles of a block of rows, with their weights."""
    (q, bad_q), shift = problem.block(query, rows), offset.narrow(2, rows.start, len(rows))[..., None]
    against = q * -problem.scale
    for number, keys, kind in problem.tiles(rows, key_spans):
        (k, bad_k), (v, bad_v) = problem.block(key, keys), problem.block(value, keys)
        scores = problem.bias_tiles(parameter, rows, keys)
        sight = look(problem, rows, keys, kind, scores, (bad_q, bad_k, bad_v), q.shape[1])
        logits = products(against, k)  # negative ones, until the sigmoid
        if scores:
            logits -= scores[0]
        # torch.sigmoid rounds an entry in another way where it stands in a vector's tail; these three do not.
        weights = poison(logits.add_(shift), sight.marks).exp_().add_(1.0).reciprocal_()
        if sight.visible is not None:
            weights.masked_fill_(~sight.visible, 0.0)
        yield _Tile(number, keys, q, k, v, weights, sight)


def _forward(
    problem: TileProblem, query: Tensor, key: Tensor, value: Tensor, parameter: Tensor | None, offset: Tensor
) -> tuple[Tensor]:
    key_spans = problem.key_spans()
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=problem.dtype, device=query.device)
    for rows in problem.row_spans():
        block = out.narrow(2, rows.start, len(rows))
        for tile in _tiles(problem, query, key, value, parameter, offset, rows, key_spans):
            factor = tile.sight.factor
            block += weigh(tile.weights if factor is None else tile.weights * factor, tile.value)
            hit = seen_bad(tile.sight, query.shape[1], problem.dtype)
            if hit is not None:
                block.masked_fill_(hit, float("nan"))
    return (out,)


def _backward(
    problem: TileProblem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameter: Tensor | None,
    offset: Tensor,
    d_out: Tensor,
) -> tuple[Tensor, ...]:
    """dz_ij = w_ij (1 - w_ij) do_i.v_j;  dq_i = scale sum_j dz_ij k_j, dk_j likewise, dv_j = sum_i w_ij do_i."""
    row_spans, key_spans = problem.row_spans(), problem.key_spans()
    dq, dk, dv = (torch.zeros_like(x, dtype=problem.dtype) for x in (query, key, value))
    parts: Parts = [[None] * len(key_spans) for _ in row_spans]
    for i, rows in enumerate(row_spans):
        do, bad_do = problem.block(d_out, rows)
        dq_i = dq.narrow(2, rows.start, len(rows))
        for tile in _tiles(problem, query, key, value, parameter, offset, rows, key_spans):
            kept, dz = _pull(tile, do, bad_do)
            dq_i += weigh(dz, tile.key)
            dk.narrow(2, tile.keys.start, len(tile.keys)).add_(collect(dz, tile.query, key.shape[1]))
            dv.narrow(2, tile.keys.start, len(tile.keys)).add_(collect(kept, do, key.shape[1]))
            if problem.pulls_bias and problem.bias is not None and parameter is not None:
                parts[i][tile.number] = problem.bias._pull(dz, parameter, rows, tile.keys, problem.placement)
    dq *= problem.scale
    dk *= problem.scale
    grads = tuple(grad.to(x.dtype) for grad, x in ((dq, query), (dk, key), (dv, value)))
    if not (problem.pulls_bias and problem.bias is not None and parameter is not None):
        return grads
    widths = [len(span) for span in row_spans], [len(span) for span in key_spans]
    return *grads, problem.bias._gather(parts, parameter, widths).to(parameter.dtype)


def _pull(tile: _Tile, d_out: Tensor, bad_do: Tensor | None) -> tuple[Tensor, Tensor]:
    """Backward of one tile: the weights after dropout, and the gradient of the logits, each (B, Hq, r, c). `bad_do`
    marks non-finite entries of `d_out`."""
    kept, dw = tile.weights, products(d_out, tile.value)
    if tile.sight.factor is not None:
        kept, dw = kept * tile.sight.factor, dw * tile.sight.factor
    dz = torch.ops.aten.sigmoid_backward(dw, tile.weights)
    if bad_do is not None and tile.sight.bad_v is not None:
        row, column = any_in(bad_do)[..., :, None], any_in(tile.sight.bad_v)[..., None, :]
        dz = tile.sight.only(poison(dz, row | spread(column, dz.shape[1])))
        kept = tile.sight.only(poison(kept, row))
    return kept, dz


_WHY_NOT_RECURRENT = "each weight is a nonlinear function of its own pair, so no state of fixed size sums the past"


@dataclass(frozen=True)
class SigmoidConfig(MechanismConfig):
    """`sigmoid_attention` as the mechanism of `saccade.nn`.

    Args:
        length: n of the offset -log n; None: the number of keys that each row sees.

    Raises:
        TypeError, ValueError: not an int, or below 1.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.AttentionConfig(width=8, heads=2, mechanism=saccade.variants.SigmoidConfig())
        >>> saccade.nn.MultiHeadAttention(config)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    length: int | None = None

    name: ClassVar[str] = "sigmoid"
    traits: ClassVar[Traits] = Traits(
        paper='Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention" (2024)',
        computes="other",
        time="O(L^2 d)",
        memory="O(L d)",
        choose="Heads should attend to nothing, or to many keys at once, without one key taking from another.",
        avoid="Speed at length is wanted: every pair is computed.",
        recurrent=_WHY_NOT_RECURRENT,
        takes=("bias", "scale", "dropout"),
    )

    def __post_init__(self) -> None:
        if self.length is not None:
            whole(self.length, "length", least=1)

    def build(self, heads: HeadSizes) -> SigmoidAttention:
        return SigmoidAttention(self)


class SigmoidAttention(Mechanism):
    """`sigmoid_attention` as a module. It has no parameters; `SigmoidConfig.build` makes it."""

    def __init__(self, config: SigmoidConfig):
        super().__init__()
        self.config = config

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None = None, **options: Any) -> Tensor:
        """As `sigmoid_attention`, which takes the options `bias`, `scale` and `dropout`."""
        return sigmoid_attention(query, key, value, mask, length=self.config.length, **options)

    def extra_repr(self) -> str:
        return f"length={self.config.length}"
