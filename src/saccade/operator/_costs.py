"""The cost of a call on a backend, for `explain`. Each backend estimates its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._call import CheckedCall

BY_CHUNKED = "forward mode and torch.func go through chunked when backend is 'auto'"


@dataclass(frozen=True)
class Costs:
    """The cost of one call on one backend."""

    work: float  # share of the Lq x Lk rectangle that is computed, in [0, 1]
    peak_bytes: int  # extra memory of the forward pass, the output included
    derivatives: tuple[str, ...] = ()  # what derivatives do where they take another path than the forward
    lacks: tuple[str, ...] = ()  # what the contract promises and the backend does not keep


def share_of_tiles(call: CheckedCall, rows: int, keys: int) -> float:
    """Share of the Lq x Lk pairs that lie in tiles which are not empty, of at most 128 x 128 tiles."""
    length_q, length_k = call.length_q, call.length_k
    if call.mask is None or not (length_q and length_k):
        return 1.0
    rows, keys = max(rows, -(-length_q // 128)), max(keys, -(-length_k // 128))
    area = 0
    for i in range(0, length_q, rows):
        row = (i, min(i + rows, length_q))
        for j in range(0, length_k, keys):
            column = (j, min(j + keys, length_k))
            if call.mask.kind(row, column, length_q, length_k) != "empty":
                area += (row[1] - row[0]) * (column[1] - column[0])
    return area / (length_q * length_k)


def output_bytes(call: CheckedCall) -> int:
    """Bytes of the output, in the input dtype."""
    return call.batch * call.heads * call.length_q * call.value.shape[3] * call.query.element_size()


def lse_bytes(call: CheckedCall) -> int:
    """Bytes of one float32 for each row."""
    return call.batch * call.heads * call.length_q * 4


def wide_bytes(call: CheckedCall) -> int:
    """Bytes of one number in the accumulator's dtype."""
    return torch.finfo(call.accumulator).bits // 8


def lacks_of_pytorch(call: CheckedCall) -> tuple[str, ...]:
    """Promises of the contract that PyTorch's own kernels break."""
    steady = "the last bits of a result may depend on the number of threads and on batch mates"
    poison = "a NaN or Inf in a key or value that some queries see reaches those that may not see it, too"
    return (steady,) if call.mask is None else (steady, poison)


DERIVATIVES_OF_PYTORCH = (
    BY_CHUNKED,
    "a second derivative (create_graph=True) is not implemented by PyTorch's kernel: name backend='chunked'",
)
