"""Memory that must not be touched: every operand ends, or begins, where a page begins that nobody may read.

Calls run in processes of their own, which a read too far ends by a signal.
Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D and Dv widths.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import signal
import sys

import pytest
import torch
from torch import Tensor

import saccade
from native.forks import in_forks
from saccade import Causal, Padding, Window

pytest.importorskip("saccade._native", reason="this installation has no native build")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mmap and mprotect of Linux")

PAGE = mmap.PAGESIZE
_kept: list[mmap.mmap] = []


def guarded(count: int, dtype: torch.dtype, at_end: bool) -> Tensor:
    """`count` numbers that end at a page which may not be read, or begin behind one."""
    size = count * dtype.itemsize
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    _kept.append(memory)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = (pages + 1) * PAGE - size if at_end else PAGE
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for page in (0, pages + 1):
        assert protect(whole.data_ptr() + page * PAGE, PAGE, 0) == 0
    return whole[start : start + size].view(dtype)


def placed(shape: tuple[int, ...], dtype: torch.dtype, at_end: bool, interleaved: bool = False) -> Tensor:
    """Normal numbers there; `interleaved` in the order (B, L, H, D)."""
    order = (0, 2, 1, 3) if interleaved else (0, 1, 2, 3)
    tensor = guarded(math.prod(shape), dtype, at_end).view([shape[n] for n in order]).permute(order)
    return tensor.copy_(torch.randn(shape))


def forbid(tensor: Tensor) -> None:
    """No page may be read that lies wholly within this contiguous part of a mapping."""
    low, high = -(-tensor.data_ptr() // PAGE) * PAGE, (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
    assert high > low, "no whole page to protect"
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert protect(low, high - low, 0) == 0


def kernels(query, key, value, mask, bias) -> None:
    """Forward and backward, on each set; results are only looked at for being numbers."""
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    parameter = None if bias is None else bias.detach().requires_grad_()
    out, lse = saccade.attention_with_lse(*leaves, mask, bias=parameter, backend="native")
    cotangent = placed(tuple(out.shape), out.dtype, True)
    wanted = [*leaves, *([] if parameter is None else [parameter])]
    found = torch.autograd.grad([out, lse], wanted, [cotangent, torch.ones_like(lse)])
    assert all(x.isfinite().all() for x in (out, *found))
    assert not lse.isnan().any() and (lse < float("inf")).all()  # -inf where a row sees nothing


SIZES = {
    "tails": (1, 2, 1, 5, 53, 7, 9),
    "tiny": (1, 1, 1, 1, 1, 1, 1),
    "one block": (2, 4, 2, 48, 48, 64, 64),
    "odd": (1, 3, 3, 49, 97, 47, 49),
    "narrow": (1, 2, 2, 3, 101, 3, 2),
    "decode": (2, 4, 2, 2, 517, 64, 64),
    "decode odd": (1, 2, 2, 1, 523, 33, 97),
    "decode narrow": (1, 1, 1, 3, 259, 1, 5),
    "whole vectors": (1, 2, 2, 50, 61, 32, 16),
}


def over_edges(size: str, dtype: torch.dtype) -> None:
    batch, heads, kv_heads, rows, keys, width, value_width = SIZES[size]
    shapes = (batch, heads, rows, width), (batch, kv_heads, keys, width), (batch, kv_heads, keys, value_width)
    for at_end, interleaved in ((True, False), (False, True)):
        operands = [placed(shape, dtype, at_end, interleaved) for shape in shapes]
        kernels(*operands, None, None)
        kernels(*operands, Window(60, 3), None)
        for shape in ((1, 1, 1, keys), (1, 1, rows, 1), (batch, heads, rows, keys)):
            kernels(*operands, Causal(), placed(shape, dtype, at_end))


def over_unread(dtype: torch.dtype, decode: bool, width: int) -> None:
    """Contract: a key or value that no query of its item may see is never read, nor is a padded query."""
    rows, keys, lengths = (2, 2048, [600, 2048]) if decode else (64, 300, [53, 300])
    query, key, value = (placed((2, 2, n, width), dtype, True, True) for n in (rows, keys, keys))
    bias = placed((2, 1, 1, keys), dtype, True)
    for tensor in (key, value):
        forbid(tensor.transpose(1, 2)[0, lengths[0] :])
    mask = Padding(lengths)
    kernels(query, key, value, mask, None)
    kernels(query, key, value, mask & Window(700, None).at(0) if decode else mask, bias)


def over_unread_queries(dtype: torch.dtype, width: int) -> None:
    """The same for padded queries, in the backward pass, too."""
    key, value = (placed((2, 2, 300, width), dtype, True, True) for _ in range(2))
    query = placed((2, 2, 4096, width), dtype, True, True)
    forbid(query.transpose(1, 2)[0, 5:])
    kernels(query, key, value, Padding([53, 300], [5, 4096]), None)


HEADER = """import torch
from native.fuzzing import each_set
from native.test_memory_edges import *
torch.manual_seed(0)
"""


def in_each_dtype(*calls: str, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> str:
    """The last that is printed is the one that ended it."""
    lines = [call.replace("dtype", f"torch.{dtype}") for dtype in dtypes for call in calls]
    each = "torch.set_num_threads(2)\nfor instructions in each_set():\n    print(instructions, flush=True)\n    "
    return each + "\n    ".join(f"print({line!r}, flush=True); {line}" for line in lines)


EDGES = [f"over_edges({size!r}, dtype)" for size in SIZES]
HALVES = ("bfloat16", "float16")
PARTS = {
    "past the end": "x = guarded(7, torch.float32, True); print(torch.as_strided(x, (8,), (1,)).sum())",
    "before the start": "x = guarded(7, torch.float32, False); print(ctypes.string_at(x.data_ptr() - 1, 1))",
    "around": in_each_dtype(*EDGES, dtypes=("float32",)),
    "around, of 2 bytes": in_each_dtype(EDGES[0], EDGES[5], dtypes=("bfloat16",)),
    "padding of 64": in_each_dtype("over_unread(dtype, False, 64)", "over_unread(dtype, True, 64)"),  # read in place
    "padded queries": in_each_dtype("over_unread_queries(dtype, 37)"),
}
SLOW_PARTS = {
    "padding of 37": in_each_dtype("over_unread(dtype, False, 37)", "over_unread(dtype, True, 37)"),  # copied
    "half precision": in_each_dtype(
        *EDGES, "over_unread(dtype, False, 64)", "over_unread(dtype, True, 37)", dtypes=HALVES
    ),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return in_forks(HEADER, PARTS, tmp_path_factory.mktemp("parts"))


def assert_whole(part) -> None:
    assert part.status == 0, f"after {part.out.split(chr(10))[-3:]}: {part.err[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["past the end", "before the start"])
def test_the_pages_around_are_protected(where, ended):
    assert "Segmentation fault" in ended[where].err
    assert ended[where].status == -signal.SIGSEGV


@pytest.mark.slow
@pytest.mark.parametrize("part", ["around", "around, of 2 bytes", "padding of 64", "padded queries"])
def test_nothing_is_read_that_must_not_be(part, ended):
    assert_whole(ended[part])


@pytest.mark.slow
def test_nothing_is_read_in_half_precision_and_where_rows_are_copied(tmp_path):
    for part in in_forks(HEADER, SLOW_PARTS, tmp_path).values():
        assert_whole(part)
