"""The same bits whatever the number of threads and the mates in a batch: every dtype, every way through the kernels.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D and Dv widths.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import saccade
from native.fuzzing import DTYPES, Draw, each_set, ours
from saccade import Causal, Dropout, FromTensor, Padding, Window
from slowly import slow_but

pytest.importorskip("saccade._native", reason="this installation has no native build")
pytestmark = pytest.mark.usefixtures("every_other_set")

# float16 goes the ways of bfloat16, with another conversion, which test_fuzz.py checks.
every_dtype = pytest.mark.parametrize("dtype", slow_but(DTYPES, torch.float32, torch.bfloat16), ids=str)

# (B, Hq, Hkv, Lq, Lk, D, Dv): the ways by which work is cut into tasks.
WAYS = {
    "one head at a time": (3, 6, 3, 53, 61, 16, 16),  # packed by the thread that uses it where threads divide the heads
    "many small heads": (9, 9, 9, 7, 11, 5, 3),
    "first all keys, then all rows": (3, 3, 1, 101, 2503, 64, 64),
    "several blocks of keys": (2, 2, 1, 149, 1013, 128, 96),
    "decode": (3, 10, 5, 2, 2053, 33, 64),
    "decode of one head": (2, 1, 1, 1, 5003, 64, 64),
}
every_way = pytest.mark.parametrize("way", WAYS)


def problem(way: str, dtype: torch.dtype, **more) -> Draw:
    batch, heads, kv_heads, rows, keys, width, value_width = WAYS[way]
    draw = torch.Generator().manual_seed(7)
    lengths = [keys - 7 * n % keys for n in range(batch)]
    shapes = {
        "query": (batch, heads, rows, width),
        "key": (batch, kv_heads, keys, width),
        "value": (batch, kv_heads, keys, value_width),
        "sink": (heads,),
    }
    leaves = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    return Draw(leaves, Causal() & Padding(lengths), options=more, seed=11)


def alone(whole: Draw, b: int) -> Draw:
    leaves = {name: leaf if name == "sink" else leaf[b : b + 1] for name, leaf in whole.leaves.items()}
    keys = whole.leaves["key"].shape[2]
    return Draw(leaves, Causal() & Padding([keys - 7 * b % keys]), options=whole.options, seed=whole.seed)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], what: str) -> None:
    for name, result in one.items():
        assert torch.equal(result, other[name]), f"{name}, {what}"


@every_dtype
@every_way
def test_any_number_of_threads(way, dtype, threads):
    call = problem(way, dtype, softcap=3.0, dropout=Dropout(0.2, 5))
    for instructions in each_set():
        threads(1)
        want = ours(call)
        assert all(result.isfinite().all() for result in want.values())
        for count in (2, 5):
            threads(count)
            assert_same(ours(call), want, f"{count} threads, {instructions}")


@every_dtype
@every_way
@pytest.mark.parametrize("count", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_batch_mates(way, dtype, count, threads):
    """Also of NaN: neither a mate's values nor how its tiles are then computed may show."""
    call = problem(way, dtype)
    cotangents, threaded = call.cotangents(), threads(count)
    assert threaded is None
    for instructions in each_set():
        whole = ours(call, cotangents=cotangents)
        for b in range(WAYS[way][0]):
            one = ours(alone(call, b), cotangents=[x[b : b + 1] for x in cotangents])
            got = {name: x if name == "d sink" else x[b : b + 1] for name, x in whole.items()}
            del one["d sink"]  # the sum over the batch
            assert_same(one, got, f"item {b}, {instructions}")
        ill = Draw(dict(call.leaves), call.mask, options=call.options)
        for name in ("query", "key", "value"):
            ill.leaves[name] = torch.cat([torch.full_like(call.leaves[name][:1], torch.nan), call.leaves[name][1:]])
        beside = ours(ill, cotangents=cotangents)
        del beside["d sink"]
        assert_same({n: x[1:] for n, x in beside.items()}, {n: x[1:] for n, x in whole.items() if n in beside}, "NaN")


@every_dtype
@pytest.mark.parametrize("kind", ["rows and keys", "keys", "rows", "slopes", "table"])
def test_gradients_of_biases(kind, dtype, threads):
    batch, heads, kv_heads, rows, keys, width = 2, 2, 1, 101, 797, 64  # three blocks of keys
    draw = torch.Generator().manual_seed(13)
    shape = {"rows and keys": (1, 1, rows, keys), "keys": (1, heads, 1, keys), "rows": (batch, 1, rows, 1)}
    parameter = torch.rand(shape.get(kind, (heads,) if kind == "slopes" else (32, heads)), generator=draw).to(dtype)
    leaves = {
        "query": torch.randn(batch, heads, rows, width, generator=draw).to(dtype),
        "key": torch.randn(batch, kv_heads, keys, width, generator=draw).to(dtype),
        "value": torch.randn(batch, kv_heads, keys, width, generator=draw).to(dtype),
        kind if kind in ("slopes", "table") else "bias": parameter,
    }
    call = Draw(leaves, Window(500, None), relative={"bidirectional": True, "max_distance": 128})
    for instructions in each_set():
        threads(1)
        want = ours(call)
        for count in (2, 3, 5):
            threads(count)
            assert_same(ours(call), want, f"{count} threads, {instructions}")


@every_dtype
def test_memory_layout(dtype):
    """Rows read in place and rows copied give the same bits; so do addresses that are multiples of nothing."""
    call = problem("first all keys, then all rows", dtype)
    apart = {}
    for name, leaf in call.leaves.items():
        memory = torch.full((leaf.numel() + 1,), torch.nan, dtype=dtype)[1:].view(leaf.shape)
        apart[name] = memory.copy_(leaf)
    far = dict(call.leaves)
    far["value"] = torch.nn.functional.pad(far["value"], (0, 64 * 3))[..., :64]  # rows too far apart to stay in place
    for instructions in each_set():
        want = ours(call)
        for leaves in (apart, far):
            assert_same(ours(Draw(leaves, call.mask, seed=call.seed)), want, instructions)


@pytest.mark.slow
def test_several_python_threads_at_once(threads):
    """Calls of every kind beside each other, each with a team of its own."""
    threads(2)
    calls = [problem(way, dtype) for way in WAYS for dtype in DTYPES]
    want = [ours(call) for call in calls]
    with ThreadPoolExecutor(5) as pool:
        for n, found in enumerate(pool.map(ours, calls * 2)):
            assert_same(found, want[n % len(calls)], f"call {n % len(calls)}")


@every_dtype
def test_masks_that_say_the_same(dtype):
    """A mask as numbers and as a tensor: the same pairs, the same bits."""
    call = problem("one head at a time", dtype)
    rows, keys = call.sizes[2:]
    dense = FromTensor(call.mask.dense(rows, keys))
    for instructions in each_set():
        assert_same(ours(Draw(call.leaves, dense, seed=call.seed)), ours(call), instructions)


def test_lse_or_not(threads):
    for way in WAYS:
        call = problem(way, torch.float32)
        out = saccade.attention(
            *(call.leaves[name] for name in ("query", "key", "value")),
            call.mask,
            sink=call.leaves["sink"],
            backend="native",
        )
        assert torch.equal(out, ours(call)["out"]), way
