"""Explains how a call would be computed, without computing it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor

from . import _unknown_arguments
from ._attention import BACKENDS, choose
from ._backends.native import _kernels
from ._backends.native._run import watched
from ._biases import Bias
from ._call import CheckedCall
from ._checks import make_call
from ._costs import Costs
from ._dropout import Dropout
from ._masks import Mask, Predicate, empty_rows


@dataclass(frozen=True)
class Plan:
    """How one call would run; `explain` returns it.

    Attributes:
        backend: the backend that would compute it.
        reason: why that backend.
        work: share of the Lq x Lk rectangle that is computed, in [0, 1].
        flops: multiplications and additions of the forward pass, 2 (D + Dv) per pair computed.
        peak_bytes: estimated extra memory of the forward pass, the output included.
        refused: for each backend that cannot do this call, why.
        derivatives: what derivatives will do where they take another path than the forward.
        lacks: what the contract promises and this backend does not keep.
        instructions: the instruction set that `native` uses on this machine; None if there is no working build of
            it, and then `refused` says why.
        empty_rows: the number of rows that see no key, and the number of all rows, over the batch items and heads for
            which the mask differs; (0, 0) without a mask, and if counting them would take long.
        score: what a `Score` became in this call; None without one.
        predicates: what each `Predicate` of the mask became: another mask, a program, or calls for each pair.

    Example:
        >>> import torch, saccade
        >>> query, key, value = torch.randn(3, 1, 2, 1024, 16)
        >>> plan = saccade.explain(query, key, value, saccade.Window(63, 0), backend="chunked")
        >>> plan.backend, plan.work, plan.refused["flex"]
        ('chunked', 0.4375, 'FlexAttention is used on CUDA only, and query is on cpu')
    """

    backend: str
    reason: str
    work: float
    flops: int
    peak_bytes: int
    refused: dict[str, str] = field(default_factory=dict)
    derivatives: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    instructions: str | None = None
    empty_rows: tuple[int, int] = (0, 0)
    score: str | None = None
    predicates: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.backend}: {self.reason}" + (f" ({self.instructions})" if self.backend == "native" else ""),
            f"  computes {self.work:.1%} of the Lq x Lk pairs, {self.flops / 1e9:.3g} GFLOP forward",
            f"  about {self.peak_bytes / 2**20:.3g} MiB of extra memory, output included",
        ]
        if self.score is not None:
            lines.append(f"  Score: {self.score}")
        lines += [f"  Predicate: {reading}" for reading in self.predicates]
        if self.empty_rows[0]:
            empty, rows = self.empty_rows
            lines.append(
                f"  {empty:,} of {rows:,} rows see no key: their output is 0; is the mask inverted (True = attend)?"
            )
        lines += [f"  derivatives: {line}" for line in self.derivatives]
        lines += [f"  lacks: {line}" for line in self.lacks]
        lines += [f"  not {name}: {why}" for name, why in self.refused.items()]
        return "\n".join(lines)


@_unknown_arguments.named
def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float | Dropout = 0.0,
    backend: str = "auto",
    lse: bool = False,
    **unknown: NoReturn,
) -> Plan:
    """Which backend `attention` would take for these arguments, and why.

    Arguments and errors are those of `attention`. Nothing is computed; printing the plan gives a few readable lines.

    Args:
        lse: True explains `attention_with_lse`.

    Example:
        >>> import torch, saccade
        >>> query, key, value = torch.randn(3, 1, 2, 1024, 16)
        >>> print(saccade.explain(query, key, value, saccade.Window(63, 0), backend="chunked"))
        chunked: named by the caller
          computes 43.8% of the Lq x Lk pairs, 0.0587 GFLOP forward
          about 3.14 MiB of extra memory, output included
        ...
    """
    if unknown:
        raise _unknown_arguments.refused(explain, unknown)
    if isinstance(dropout, float) and 0.0 < dropout < 1.0:
        dropout = Dropout(dropout, 0)  # explaining a call must not draw from the caller's generator
    call = make_call(
        query, key, value, mask, bias=bias, scale=scale, softcap=softcap, sink=sink, dropout=dropout, needs_lse=lse
    )
    module, name, reason = choose(call, backend)
    costs: Costs = module.costs(call)
    pairs = costs.work * call.batch * call.heads * call.length_q * call.length_k
    flops = int(2 * pairs * (call.query.shape[3] + call.value.shape[3]))
    refused = {other: why for other, one in BACKENDS.items() if (why := one.refuses(call)) is not None}
    return Plan(
        name,
        reason,
        costs.work,
        flops,
        costs.peak_bytes,
        refused,
        costs.derivatives,
        costs.lacks,
        _kernels.instructions(),
        _empty_rows(call),
        call.score,
        () if call.mask is None else tuple(_readings(call.mask, call.length_k)),
    )


def _readings(mask: Mask, keys: int) -> Iterator[str]:
    if isinstance(mask, Predicate):
        yield mask._reading(keys)
    for part in mask._children():
        yield from _readings(part, keys)


def _empty_rows(call: CheckedCall) -> tuple[int, int]:
    # Of traces, transforms and the meta device nobody sees the values.
    if call.mask is None or call.device.type == "meta" or call.transformed or watched():
        return 0, 0
    return empty_rows(call.mask, call.length_q, call.length_k)
