"""Named attention problems, each stated twice: as saccade's arguments and as the oracle's sets and dense tensors.

B batch, Hq/Hkv query/kv heads, Lq/Lk lengths, D key width, Dv value width. Sizes are distinct (primes, but for Hq,
which Hkv divides), so that a swapped axis cannot pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
import saccade
from looped import looped
from saccade.operator._backends.native import _kernels

NATIVE = pytest.param("native", marks=pytest.mark.skipif(_kernels.module is None, reason="no native build"))
CUDA = torch.cuda.is_available()

# What problems are stated in: float32 for backends without float64 (see operator/conftest.py). Tolerances follow it.
DTYPE = torch.float64


@dataclasses.dataclass
class Problem:
    """`tensors` are what gradients are asked for: query, key, value and, where there, bias, slopes, table, sink."""

    tensors: dict[str, Tensor]
    see: Any = None  # the oracle's bool array
    mask: Any = None  # the same for saccade
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # scale, softcap
    to_bias: Callable[[dict[str, Tensor]], Any] = lambda tensors: tensors.get("bias")
    to_dense: Callable[[dict[str, Tensor]], Tensor | None] = lambda tensors: tensors.get("bias")

    def ours(self, tensors=None, backend="chunked", **more) -> tuple[Tensor, Tensor]:
        tensors = self.tensors if tensors is None else tensors
        return saccade.attention_with_lse(
            tensors["query"],
            tensors["key"],
            tensors["value"],
            self.mask,
            bias=self.to_bias(tensors),
            sink=tensors.get("sink"),
            backend=backend,
            **self.options,
            **more,
        )

    def out(self, tensors=None, backend="chunked", **more) -> Tensor:
        tensors = self.tensors if tensors is None else tensors
        return saccade.attention(
            tensors["query"],
            tensors["key"],
            tensors["value"],
            self.mask,
            bias=self.to_bias(tensors),
            sink=tensors.get("sink"),
            backend=backend,
            **self.options,
            **more,
        )

    def truth(self, tensors=None, factor=None) -> oracle.Attended:
        tensors = self.tensors if tensors is None else tensors
        dense = self.to_dense(tensors)
        return oracle.attend(
            tensors["query"],
            tensors["key"],
            tensors["value"],
            self.see,
            factor=factor,
            bias=None if dense is None else dense,
            sink=tensors.get("sink"),
            **self.options,
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        query, key = self.tensors["query"], self.tensors["key"]
        return (*query.shape[:3], key.shape[2])

    def seen(self) -> np.ndarray:
        """bool (B, Hq, Lq, Lk): the mask and every bias of -inf."""
        seen = np.broadcast_to(np.asarray(True if self.see is None else self.see), self.shape)
        dense = self.to_dense(self.tensors)
        return seen if dense is None else seen & (dense.detach().expand(self.shape).numpy() != -math.inf)


def tensors(batch=2, heads=6, kv_heads=3, rows=11, keys=13, width=5, value_width=7, *, dtype=None, seed=0):
    """query, key, value, normal."""
    dtype = DTYPE if dtype is None else dtype
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=draw).to(dtype)

    return {
        "query": normal(batch, heads, rows, width),
        "key": normal(batch, kv_heads, keys, width),
        "value": normal(batch, kv_heads, keys, value_width),
    }


def leaves(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in named.items()}


def pull(outputs, inputs, cotangents, **options) -> list[Tensor]:
    """The gradient of every input; zeros where there is none."""
    inputs = list(inputs.values() if isinstance(inputs, dict) else inputs)
    kept = [(x, c) for x, c in zip(outputs, cotangents, strict=True) if x.requires_grad]
    if not kept:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad([x for x, _ in kept], inputs, [c for _, c in kept], allow_unused=True, **options)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def _normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def _random_bits(*shape, seed=2):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.6


CASES: dict[str, Callable[[], Problem]] = {}


def case(make):
    CASES[make.__name__] = make
    return make


@case
def plain():
    return Problem(tensors(heads=3))


@case
def grouped_heads():
    return Problem(tensors())


@case
def one_kv_head():
    return Problem(tensors(heads=5, kv_heads=1), options={"scale": 0.37})


@case
def softcap():
    return Problem(tensors(), options={"softcap": 1.3})


@case
def square_causal():
    return Problem(tensors(rows=13), oracle.causal(13, 13), saccade.Causal())


@case
def wide_causal():
    return Problem(tensors(), oracle.causal(11, 13), saccade.Causal())


@case
def tall_causal_has_empty_rows():
    return Problem(tensors(rows=17), oracle.causal(17, 13), saccade.Causal())


@case
def causal_placed_at_zero():
    return Problem(tensors(), oracle.causal(11, 13, 0), saccade.Causal().at(0))


@case
def causal_placed_per_item():
    return Problem(tensors(), oracle.causal(11, 13, [-3, 5]), saccade.Causal().at(torch.tensor([-3, 5])))


@case
def window():
    return Problem(tensors(), oracle.window(11, 13, 3, 1), saccade.Window(3, 1))


@case
def keys_padded():
    return Problem(tensors(), oracle.key_lengths([7, 13], 13), saccade.Padding(torch.tensor([7, 13])))


@case
def no_keys_in_one_item():
    return Problem(tensors(), oracle.key_lengths([0, 11], 13), saccade.Padding(torch.tensor([0, 11])))


@case
def queries_padded():
    see = oracle.key_lengths([5, 13], 13) & oracle.query_lengths([3, 11], 11)
    return Problem(tensors(), see, saccade.Padding(torch.tensor([5, 13]), queries=torch.tensor([3, 11])))


@case
def cache():
    lengths = torch.tensor([5, 12])
    see = oracle.key_lengths(lengths, 13) & oracle.causal(3, 13, (lengths - 3).tolist())
    return Problem(tensors(rows=3), see, (saccade.Padding(lengths) & saccade.Causal()).at(lengths - 3))


@case
def causal_documents():
    ids = torch.tensor([[0] * 4 + [1] * 6 + [2] * 3, [5] * 1 + [3] * 5 + [4] * 7])
    see = oracle.causal(13, 13) & oracle.same_document(ids)
    return Problem(tensors(rows=13), see, saccade.Causal() & saccade.Documents(ids))


@case
def boolean_matrix():
    bits = _random_bits(11, 13)
    bits[4] = False
    return Problem(tensors(), bits.numpy(), bits)


@case
def boolean_per_item_and_head():
    bits = _random_bits(2, 6, 11, 13)
    return Problem(tensors(), bits.numpy(), bits)


@case
def window_or_first_key():
    see = oracle.window(11, 13, 2, 0) | oracle.pairs(11, 13, lambda p, j: j == 0 or p == 0)
    return Problem(tensors(), see, saccade.Window(2, 0) | saccade.Global([0]))


@case
def bias_matrix():
    return Problem(tensors() | {"bias": _normal(11, 13)})


@case
def bias_with_hidden_pairs():
    bias = _normal(2, 1, 11, 13).masked_fill(~_random_bits(2, 1, 11, 13), -math.inf)
    bias[1, :, 6] = -math.inf  # a whole row
    return Problem(tensors() | {"bias": bias}, oracle.causal(11, 13), saccade.Causal())


@case
def alibi():
    return Problem(
        tensors() | {"slopes": _normal(6).abs()},
        oracle.causal(11, 13),
        saccade.Causal(),
        to_bias=lambda t: saccade.ALiBi(t["slopes"]),
        to_dense=lambda t: oracle.alibi(t["slopes"], 11, 13),
    )


@case
def relative_both_ways():
    return Problem(
        tensors() | {"table": _normal(8, 6)},
        to_bias=lambda t: saccade.RelativeBias(t["table"], bidirectional=True, max_distance=11),
        to_dense=lambda t: oracle.relative_bias(t["table"], 11, 13, True, 11),
    )


@case
def relative_backwards():
    return Problem(
        tensors() | {"table": _normal(5, 6)},
        oracle.causal(11, 13),
        saccade.Causal(),
        to_bias=lambda t: saccade.RelativeBias(t["table"], bidirectional=False, max_distance=7),
        to_dense=lambda t: oracle.relative_bias(t["table"], 11, 13, False, 7),
    )


@case
def sink():
    return Problem(tensors() | {"sink": _normal(6)})


@case
def sink_with_empty_rows():
    return Problem(tensors(rows=17) | {"sink": _normal(6)}, oracle.causal(17, 13), saccade.Causal())


@case
def everything():
    see = oracle.window(11, 13, 6, 0, [1, -2]) & oracle.key_lengths([12, 5], 13) & oracle.query_lengths([11, 7], 11)
    mask = (saccade.Window(6, 0) & saccade.Padding(torch.tensor([12, 5]), torch.tensor([11, 7]))).at([1, -2])
    named = tensors() | {"bias": _normal(1, 6, 1, 13), "sink": _normal(6)}
    return Problem(named, see, mask, {"scale": -0.7, "softcap": 2.1})


every_case = looped("name", CASES)


def assert_close(got: Tensor, want: Tensor, *, terms: int = 64, size: float | None = None, equal_nan=False):
    """Within the worst case of a sum of `terms` products in got's dtype, each of at most `size` (|want| by default).

    8 for what surrounds the sum: the exponential, the division and the softmax's own sum, each with a bound of its own.
    """
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if want.numel() == 0:
        return
    finite = want.detach()[torch.isfinite(want.detach())]
    size = max(1.0, finite.abs().max().item() if finite.numel() else 0.0) if size is None else size
    bound = 8 * terms * torch.finfo(got.dtype).eps * size
    torch.testing.assert_close(got.double(), want.double(), rtol=0.0, atol=bound, equal_nan=equal_nan)
