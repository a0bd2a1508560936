"""Random calls, what they should give, and how far plain PyTorch in the same dtype is from that.

A result's error is its largest absolute error. It may be twice that of plain PyTorch (the formula as anyone would
write it, in the inputs' dtype) or a few roundings of what was summed to make it (`floors`), whichever is more: plain
PyTorch may be exact where a sum has one term or where two roundings cancel.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D and Dv widths.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import oracle
import saccade
from saccade.operator._backends.native import _kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


CHOSEN = slice(None)  # of the instruction sets, the widest first; conftest.py's `every_other_set` sets it


def each_set(without: tuple[str, ...] = ()) -> Iterator[str]:
    """Every instruction set of this machine, in use while the loop's body runs; conftest.py says which are hidden."""
    native = _kernels.module
    hidden = os.environ.get("SACCADE_TEST_HIDDEN_SETS", "").split(",")
    names = [*native.sets(), *(f"{name}!" for name in native.compiled_sets() if name in hidden)][::-1]
    before = native.active()
    try:
        for name in names[CHOSEN] or names:
            if name.rstrip("!") not in without:
                native.use(name)
                yield native.active()
    finally:
        native.use(f"{before}!")


@dataclasses.dataclass(repr=False)
class Draw:
    """A call: `leaves` are query, key, value and, where there, bias, slopes, table, sink, in any memory layout."""

    leaves: dict[str, Tensor]
    mask: Any = None
    offset: Any = None  # where the mask places the queries: None, an int, a list
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # scale, softcap, dropout
    relative: dict[str, Any] = dataclasses.field(default_factory=dict)  # bidirectional, max_distance
    seed: int = 0

    def __repr__(self) -> str:
        leaves = {name: (tuple(leaf.shape), leaf.stride(), leaf.dtype) for name, leaf in self.leaves.items()}
        return f"Draw({leaves}, {self.mask!r}, {self.offset}, {self.options}, {self.relative}, seed={self.seed})"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (*self.leaves["query"].shape[:3], self.leaves["key"].shape[2])

    def call(self, leaves: dict[str, Tensor], backend: str, lse: bool = True) -> tuple[Tensor, ...]:
        bias = leaves.get("bias")
        if "slopes" in leaves:
            bias = saccade.ALiBi(leaves["slopes"])
        elif "table" in leaves:
            bias = saccade.RelativeBias(leaves["table"], **self.relative)
        run = saccade.attention_with_lse if lse else saccade.attention
        found = run(
            leaves["query"],
            leaves["key"],
            leaves["value"],
            self.mask,
            bias=bias,
            sink=leaves.get("sink"),
            backend=backend,
            **self.options,
        )
        return found if lse else (found,)

    def dense(self, leaves: dict[str, Tensor]) -> Tensor | None:
        """The bias as a tensor, in the dtype of its parameter."""
        _, _, rows, keys = self.sizes
        if "bias" in leaves:
            return leaves["bias"]
        shift = keys - rows if self.offset is None else self.offset
        shifts = shift if isinstance(shift, list) else [shift]
        if "slopes" in leaves:
            positions = torch.arange(rows) + torch.tensor(shifts)[:, None]
            distance = (positions[:, None, :, None] - torch.arange(keys)).abs()
            return -leaves["slopes"][None, :, None, None] * distance.to(leaves["slopes"].dtype)
        if "table" in leaves:
            table, both, far = leaves["table"], self.relative["bidirectional"], self.relative["max_distance"]
            low = 1 - rows - max(shifts)
            buckets = [oracle.t5_bucket(n, len(table), both, far) for n in range(low, keys - min(shifts))]
            index = torch.arange(keys) - torch.arange(rows)[:, None] - torch.tensor(shifts)[:, None, None] - low
            return table[torch.tensor(buckets)[index]].permute(0, 3, 1, 2)
        return None

    def cotangents(self, lse: bool = True) -> list[Tensor]:
        """Normal, of the dtypes of the results."""
        query, value = self.leaves["query"], self.leaves["value"]
        draw = torch.Generator().manual_seed(self.seed)
        shape = (*query.shape[:3], value.shape[3])
        made = [torch.randn(shape, generator=draw).to(query.dtype)]
        if lse:
            made.append(torch.randn(shape[:3], generator=draw))
        return made


class Results(dict):
    """Each result and gradient by name."""

    @staticmethod
    def of(found: tuple[Tensor, ...], leaves: dict[str, Tensor], cotangents: list[Tensor]) -> Results:
        pairs = [(x, c.to(x.dtype)) for x, c in zip(found, cotangents, strict=True) if x.requires_grad]
        gradients: Any = [None] * len(leaves)
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(outputs, list(leaves.values()), given, allow_unused=True)
        named = Results(zip(("out", "lse"), (x.detach() for x in found), strict=False))
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            named["d " + name] = torch.zeros_like(leaf) if gradient is None else gradient
        return named


def ours(draw: Draw, lse: bool = True, cotangents: list[Tensor] | None = None, backend="native") -> Results:
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in draw.leaves.items()}
    return Results.of(draw.call(leaves, backend, lse), leaves, cotangents or draw.cotangents(lse))


def truth(draw: Draw, lse: bool = True, cotangents: list[Tensor] | None = None) -> Results:
    """The reference in float64, on exactly the values that the inputs have."""
    leaves = {name: leaf.detach().double().clone().requires_grad_() for name, leaf in draw.leaves.items()}
    return Results.of(draw.call(leaves, "reference", lse), leaves, cotangents or draw.cotangents(lse))


# --- plain PyTorch ------------------------------------------------------------------------------------------------


def seen_by(draw: Draw, dense: Tensor | None) -> Tensor:
    """bool (B, Hq, Lq, Lk)."""
    rows, keys = draw.sizes[2:]
    mask = draw.mask
    if mask is None:
        seen = torch.ones((), dtype=torch.bool)
    else:
        seen = mask if isinstance(mask, Tensor) else mask.dense(rows, keys)
    seen = seen.expand(draw.sizes)
    return seen if dense is None else seen & (dense.detach() != -math.inf)


def scale_of(draw: Draw) -> float:
    scale = draw.options.get("scale")
    return draw.leaves["query"].shape[3] ** -0.5 if scale is None else scale


def factor_of(draw: Draw, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies each weight by."""
    dropout = draw.options.get("dropout")
    if dropout is None:
        return torch.ones(draw.sizes, dtype=dtype)
    return dropout.factor(*(torch.arange(n) for n in draw.sizes), dtype)


def formula(draw: Draw, leaves: dict[str, Tensor], order: Tensor) -> tuple[Tensor, ...]:
    """out, lse, weights and logits (B, Hq, Lq, Lk) as anyone would write them, the keys in `order`."""
    query = leaves["query"]
    group = query.shape[1] // leaves["key"].shape[1]
    key, value = (leaves[name].repeat_interleave(group, 1)[:, :, order] for name in ("key", "value"))
    cap = draw.options.get("softcap")
    logits = query @ key.mT * scale_of(draw)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    dense = draw.dense(leaves)
    seen = seen_by(draw, dense)[..., order]
    if dense is not None:
        dense = torch.where(dense == -math.inf, 0.0, dense)
        logits = logits + (dense[..., order] if dense.shape[-1] > 1 else dense).to(logits.dtype)
    empty = ~seen.any(-1, keepdim=True)
    logits = torch.where(empty, 0.0, logits.masked_fill(~seen, -math.inf))
    if "sink" in leaves:
        sink = leaves["sink"].to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
        lse = torch.where(empty, sink, torch.logsumexp(torch.cat([logits, sink], -1), -1, keepdim=True))
        weights = torch.softmax(torch.cat([logits, sink], -1), -1)[..., :-1]
    else:
        lse = torch.where(empty, -math.inf, torch.logsumexp(logits, -1, keepdim=True))
        weights = torch.softmax(logits, -1)
    weights = weights.masked_fill(empty, 0.0)
    kept = weights * factor_of(draw, weights.dtype)[..., order]
    return kept @ value, lse[..., 0], weights, logits


def plain_errors(draw: Draw, dtype: torch.dtype, want: Results, lse: bool, given: list[Tensor]) -> dict[str, float]:
    """The largest error of plain PyTorch in `dtype`, the keys in their own order and in the opposite one.

    Two orders, because of a few numbers the roundings of one may happen to cancel.
    """
    worst = dict.fromkeys(want, 0.0)
    keys = torch.arange(draw.sizes[3])
    for order in (keys, keys.flip(0)):
        leaves = {name: leaf.detach().to(dtype).clone().requires_grad_() for name, leaf in draw.leaves.items()}
        found = formula(draw, leaves, order)[: 2 if lse else 1]
        for name, one in Results.of(found, leaves, given).items():
            worst[name] = max(worst[name], error(one, want[name]))
    return worst


def error(got: Tensor, want: Tensor) -> float:
    """The largest absolute difference; equal infinities differ by nothing, a NaN by everything."""
    if got.numel() == 0:
        return 0.0
    rounded = want.to(got.dtype)  # an infinity where the dtype ends
    got, want = got.double(), torch.where(rounded.isinf(), rounded.double(), want.double())
    apart = torch.where(got == want, 0.0, (got - want).abs())
    return apart.nan_to_num(nan=math.inf).max().item()


# --- what rounding may do ------------------------------------------------------------------------------------------


def floors(draw: Draw, lse: bool, given: list[Tensor]) -> dict[str, float]:
    """What the error of each result may be, whatever plain PyTorch's is. u = eps / 2 is the error of one rounding.

    M is the largest sum of absolute values behind a result: of its terms, not of itself, since they may cancel.
    4 u M in the dtype of the result: the result is rounded, and so are the output in delta and, where products are of
    bf16, weights and slopes. In float32 the same 4 stand for exponential, sum, quotient and product.
    2 u S M in float32, S the largest logit + |lse|: a weight is the exponential of their difference, to whose error
    the rounding of each adds u S together, and that of the difference, in units of log 2, as much again. A logit counts
    with the absolute values of its products, which may cancel, too.
    One step of the dtype's smallest numbers comes on top.
    """
    eps = {"lse": torch.finfo(torch.float32).eps}
    sizes, largest = magnitudes(draw, lse, given)
    for name, leaf in draw.leaves.items():
        eps["d " + name] = torch.finfo(leaf.dtype).eps
    eps["out"], least = eps["d query"], torch.finfo(draw.leaves["query"].dtype)
    # A float32 parameter's gradient is made of the same delta and weights as the others.
    eps = {name: x if name == "lse" else max(x, eps["d query"]) for name, x in eps.items()}
    return {
        name: size * (2 * eps[name] + largest * eps["lse"]) + least.smallest_normal * least.eps
        for name, size in sizes.items()
    }


def magnitudes(draw: Draw, lse: bool, given: list[Tensor]) -> tuple[dict[str, float], float]:
    """M of each result, and S; see `floors`."""
    leaves = {name: leaf.detach().double() for name, leaf in draw.leaves.items()}
    query, key, value = (leaves[name].abs() for name in ("query", "key", "value"))
    group = query.shape[1] // key.shape[1]
    scale = abs(scale_of(draw))
    _, total, weights, logits = formula(draw, leaves, torch.arange(draw.sizes[3]))
    kept = weights * factor_of(draw, weights.dtype)
    wide_key, wide_value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    d_out = given[0].double().abs()
    d_lse = given[1].double().abs() if lse else torch.zeros(draw.sizes[:3])
    out = kept @ wide_value
    rest = ((d_out * out).sum(-1) + d_lse)[..., None]
    slopes = kept * (d_out @ wide_value.mT) + weights * rest
    exponents = logits.abs().clamp(min=scale * (query @ wide_key.mT)) + total.abs()[..., None]
    top = exponents[exponents.isfinite()].max().item() if exponents.isfinite().any() else 0.0
    found = {
        "out": out,
        "lse": torch.where(total.isfinite(), total.abs(), 0.0) + 1.0,
        "d query": scale * slopes @ wide_key,
        "d key": (scale * slopes.mT @ query).unflatten(1, (-1, group)).sum(2),
        "d value": (kept.mT @ d_out).unflatten(1, (-1, group)).sum(2),
    }
    if "sink" in leaves:
        share = torch.exp(leaves["sink"][None, :, None] - total)[..., None]
        found["d sink"] = (share * rest).sum((0, 2, 3))
    found |= parameter_size(draw, slopes)
    return {name: x.max().item() if x.numel() else 0.0 for name, x in found.items() if lse or name != "lse"}, top


def parameter_size(draw: Draw, slopes: Tensor) -> dict[str, Tensor]:
    """The same for a bias's parameter, on which scores depend linearly and with one sign."""
    for name in ("bias", "slopes", "table"):
        if name in draw.leaves:
            leaf = draw.leaves[name].detach().double().requires_grad_()
            dense = draw.dense({name: leaf})
            finite = torch.where(dense == -math.inf, 0.0, dense)
            return {"d " + name: torch.autograd.grad((finite * slopes).sum(), leaf)[0].abs()}
    return {}


# --- the comparison ------------------------------------------------------------------------------------------------


def check(draw: Draw, lse: bool = True, cotangents: list[Tensor] | None = None, without: tuple[str, ...] = ()) -> None:
    """Every result and gradient on every instruction set of this machine."""
    given = draw.cotangents(lse) if cotangents is None else cotangents
    want = truth(draw, lse, given)
    least = floors(draw, lse, given)
    proof = plain_errors(draw, torch.float64, want, lse, given)
    for name, far in proof.items():  # or the yardstick would measure nothing
        assert far <= 1e-9 * max(least[name] / 1e-7, 1e-30), (
            f"{name}: the formula in float64 is not the reference: {far}"
        )
    theirs = plain_errors(draw, draw.leaves["query"].dtype, want, lse, given)
    if not all(map(math.isfinite, theirs.values())):  # it overflows where the kernels need not
        wider = plain_errors(draw, torch.float32, want, lse, given)
        theirs = {name: far if math.isfinite(far) else wider[name] for name, far in theirs.items()}
    for instructions in each_set(without):
        for name, result in ours(draw, lse, given).items():
            far, allowed = error(result, want[name]), max(2 * theirs[name], least[name])
            plain = f"plain PyTorch's {theirs[name]:.3g}, floor {least[name]:.3g}"
            assert far <= allowed, f"{name} on {instructions}: error {far:.3g}, {plain}: {draw}"
