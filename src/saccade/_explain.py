"""What a call will do, before it does it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from . import _foreign
from ._attention import BACKENDS, choose
from ._backends import _kernels
from ._backends._tiles import GROUP, KEYS, ROWS
from ._biases import Bias, RelativeScores
from ._call import Call
from ._checks import make_call
from ._dropout import Dropout
from ._masks import Causal, FromTensor, Mask, Padding

_GRAIN = 64  # rows and keys of the blocks that the native kernels leave out or compute (about: it depends on the set)


@dataclass(frozen=True)
class Plan:
    """How one call would run.

    Attributes:
        backend: which backend, and `reason`, why.
        refused: what the other backends say of this call.
        work: share of the Lq x Lk rectangle that is computed, in [0, 1].
        flops: multiplications and additions of the forward pass, 2 (D + Dv) per pair computed.
        peak_bytes: estimated extra memory of the forward pass, the output included.
        derivatives: what derivatives will do where they take another path than the forward.
        lacks: what the contract promises and this backend does not keep.
        instructions: the instruction set that `native` uses on this machine; None where there is no working build of
            it, and then `refused` says why.
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

    def __str__(self) -> str:
        lines = [
            f"{self.backend}: {self.reason}" + (f" ({self.instructions})" if self.backend == "native" else ""),
            f"  computes {self.work:.1%} of the Lq x Lk pairs, {self.flops / 1e9:.3g} GFLOP forward",
            f"  about {self.peak_bytes / 2**20:.3g} MiB of extra memory, output included",
        ]
        lines += [f"  derivatives: {line}" for line in self.derivatives]
        lines += [f"  lacks: {line}" for line in self.lacks]
        lines += [f"  not {name}: {why}" for name, why in self.refused.items()]
        return "\n".join(lines)


@_foreign.named
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
    """Which backend `attention` (with `lse=True`: `attention_with_lse`) would take for these arguments, and why.

    Args and errors: as `attention`. Nothing is computed; printing the plan gives a few readable lines.
    """
    if unknown:
        raise _foreign.refused(explain, unknown)
    if isinstance(dropout, float) and 0.0 < dropout < 1.0:
        dropout = Dropout(dropout, 0)  # explaining a call must not draw from the caller's generator
    call = make_call(
        query, key, value, mask, bias=bias, scale=scale, softcap=softcap, sink=sink, dropout=dropout, needs_lse=lse
    )
    _, name, reason = choose(call, backend)
    work = _work(call, name)
    pairs = work * call.batch * call.heads * call.length_q * call.length_k
    flops = int(2 * pairs * (call.query.shape[3] + call.value.shape[3]))
    refused = {other: why for other, module in BACKENDS.items() if (why := module.refuses(call)) is not None}
    return Plan(
        name,
        reason,
        work,
        flops,
        _peak_bytes(call, name),
        refused,
        _derivatives(name),
        _lacks(call, name),
        _kernels.instructions(),
    )


def _work(call: Call, name: str) -> float:
    """Share of the rectangle in tiles that are not empty; on large problems on a grid of at most 128 x 128."""
    length_q, length_k = call.length_q, call.length_k
    if call.mask is None or name == "reference" or not (length_q and length_k):
        return 1.0
    if name == "sdpa":
        return (length_q + 1) / (2 * length_q) if isinstance(call.mask, Causal) and length_q > 1 else 1.0
    sides = (_GRAIN, _GRAIN) if name == "native" else (ROWS, KEYS)
    rows, keys = (max(side, -(-length // 128)) for side, length in zip(sides, (length_q, length_k), strict=True))
    area = 0
    for i in range(0, length_q, rows):
        row = (i, min(i + rows, length_q))
        for j in range(0, length_k, keys):
            column = (j, min(j + keys, length_k))
            if call.mask.kind(row, column, length_q, length_k) != "empty":
                area += (row[1] - row[0]) * (column[1] - column[0])
    return area / (length_q * length_k)


def _peak_bytes(call: Call, name: str) -> int:
    size = call.query.element_size()
    rows = call.batch * call.heads * call.length_q
    out = rows * call.value.shape[3] * size
    if name == "reference":
        # Query, key and value selected pair by pair, and their products.
        wide = torch.finfo(call.accumulator).bits // 8
        return rows * call.length_k * (3 * call.query.shape[3] + 2 * call.value.shape[3] + 4) * wide
    if name == "chunked":
        wide = torch.finfo(call.accumulator).bits // 8
        tile = min(GROUP, call.batch * call.heads * min(ROWS, call.length_q) * min(KEYS, call.length_k))
        return rows * (call.value.shape[3] + 2) * wide + 6 * tile * wide + (out if size != wide else 0)
    if name == "sdpa":
        return out + rows * 4 + _sdpa_bytes(call)
    if name == "native":
        return out + rows * 4 + _native_bytes(call)
    return out + rows * 4


def _native_bytes(call: Call) -> int:
    """Of the kernels beside their output: keys and values in the order they are read, and one score per distance."""
    # bf16 products take bf16; everything else is packed as float32.
    size = 2 if call.query.dtype == torch.bfloat16 and _kernels.instructions() == "avx512_bf16" else 4
    packed = call.batch * call.kv_heads * call.length_k * (call.query.shape[3] + call.value.shape[3]) * size
    line = call.heads * (call.length_q + call.length_k) * 4 if isinstance(call.bias, RelativeScores) else 0
    return packed + line


def _sdpa_bytes(call: Call) -> int:
    """Of F.sdpa beside its output: cleaned copies of what a mask or bias hides, and scores where it is not fused."""
    size, pairs = call.query.element_size(), call.batch * call.heads * call.length_q * call.length_k
    hidden = 0
    if call.bias is not None or isinstance(call.mask, (FromTensor, Padding)):
        hidden = sum(tensor.numel() for tensor in (call.query, call.key, call.value)) * size
    learns_bias = call.bias is not None and call.bias.parameter.requires_grad
    fused = call.query.shape[3] == call.value.shape[3] and not learns_bias
    return hidden if fused else hidden + 2 * pairs * size


def _derivatives(name: str) -> tuple[str, ...]:
    if name in ("sdpa", "flex"):
        return (
            "forward mode and torch.func go through chunked when backend is 'auto'",
            "a second derivative (create_graph=True) is not implemented by PyTorch's kernel: name backend='chunked'",
        )
    if name == "native":
        return (
            "forward mode and torch.func go through chunked when backend is 'auto'",
            "a gradient that has derivatives itself (create_graph=True) is computed by chunked from the inputs",
        )
    return ()


def _lacks(call: Call, name: str) -> tuple[str, ...]:
    if name not in ("sdpa", "flex"):
        return ()
    steady = "the last bits of a result may depend on the number of threads and on batch mates"
    poison = "a NaN or Inf in a key or value that some queries see reaches those that may not see it, too"
    return (steady,) if call.mask is None else (steady, poison)
