"""The named sparse patterns, each against the set of keys that its paper gives to a query, written as Python sets.

Shape legend: Lq / Lk numbers of queries and keys; p the position of a query, row i stands at `i + (Lk - Lq)`.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import saccade
from looped import looped
from saccade import Causal, FromTensor, Global, PerHead, attention
from saccade.variants.patterns import (
    bigbird,
    longformer,
    sliding_window,
    sparse_fixed,
    sparse_fixed_heads,
    sparse_strided,
    sparse_strided_heads,
    streaming,
)
from slowly import diagonal

SIZES = [(29, 29), (7, 31), (1, 23), (31, 19), (13, 0), (0, 13), (61, 61)]


def back(p, count):
    """The last `count` positions up to p."""
    return set(range(p - count + 1, p + 1))


def mistral(size):
    return lambda p, n: {j for j in range(n) if p - size < j <= p}


def longformer_set(window, dilation=1, tokens=(), causal=False):
    def keys(p, n):
        near = {p + side * step * dilation for step in range(window // 2 + 1) for side in (-1, 1)}
        seen = near | set(tokens) | (set(range(n)) if p in tokens else set())
        return {j for j in seen if 0 <= j < n and (j <= p or not causal)}

    return keys


def strided_set(stride):
    def keys(p, n):
        columns = {p - n_steps * stride for n_steps in range(p // stride + 1)} if p >= 0 else set()
        return {j for j in back(p, stride + 1) | columns if 0 <= j < n}

    return keys


def blocks_of(size, last):
    """[0, size), [size, 2 size), ... up to one that holds `last`, each a set."""
    return [set(range(start, start + size)) for start in range(0, last + 1, size)]


def own_block(p, size):
    return next(block for block in blocks_of(size, p) if p in block) if p >= 0 else set()


def fixed_set(stride, columns, local=True, summaries=True):
    def keys(p, n):
        seen = own_block(p, stride) if local else set()
        for block in blocks_of(stride, n) if summaries else []:
            seen = seen | set(sorted(block)[-columns:])
        return {j for j in seen if 0 <= j <= min(p, n - 1)}

    return keys


def bigbird_set(block, window, many, drawn, causal=False):
    """`drawn[P]` is the set of blocks that block P drew."""

    def keys(p, n):
        P, seen = p // block, set()
        for J in range(n // block + 1):
            near, everyone = abs(P - J) <= window // 2, {P, J} & set(range(many))
            drew = P >= 0 and (J in drawn[P] or (P in drawn[J] and not causal))
            if near or everyone or drew:
                seen |= set(range(J * block, (J + 1) * block))
        return {j for j in seen if j < n and (j <= p or not causal)}

    return keys


def streaming_set(window, sinks):
    return lambda p, n: {j for j in range(n) if j <= p and (j in back(p, window) or j in set(range(sinks)))}


def drawings(seed, size, count, blocks):
    """Which earlier blocks each block drew, read from single queries that look at one key of each."""
    return [
        {
            J
            for J in range(P)
            if saccade.RandomBlocks(seed, 1, count).tile((P, P + 1), (J, J + 1), blocks, blocks).kind == "full"
        }
        for P in range(blocks)
    ]


DRAWN = drawings(5, 1, 2, 62)
CASES = {
    "window 1": (sliding_window(1), mistral(1)),
    "window 7": (sliding_window(7), mistral(7)),
    "window 97": (sliding_window(97), mistral(97)),
    "longformer": (longformer(6), longformer_set(6)),
    "longformer causal": (longformer(6, causal=True), longformer_set(6, causal=True)),
    "longformer dilated": (longformer(6, dilation=3), longformer_set(6, 3)),
    "longformer dilated causal": (longformer(10, dilation=2, causal=True), longformer_set(10, 2, causal=True)),
    "longformer global": (longformer(4, global_tokens=[0, 11, 12]), longformer_set(4, tokens=(0, 11, 12))),
    "longformer global dilated": (longformer(4, dilation=3, global_tokens=(2, 17)), longformer_set(4, 3, (2, 17))),
    "longformer global causal": (
        longformer(4, global_tokens=[1, 7], causal=True),
        longformer_set(4, tokens=(1, 7), causal=True),
    ),
    "strided 1": (sparse_strided(1), strided_set(1)),
    "strided 5": (sparse_strided(5), strided_set(5)),
    "strided, local": (sparse_strided_heads(5)[0], lambda p, n: {j for j in back(p, 6) if 0 <= j < n}),
    "strided, columns": (sparse_strided_heads(5)[1], lambda p, n: {j for j in range(p, -1, -5) if j < n}),
    "fixed 7, 1": (sparse_fixed(7), fixed_set(7, 1)),
    "fixed 5, 3": (sparse_fixed(5, 3), fixed_set(5, 3)),
    "fixed, local": (sparse_fixed_heads(5, 2)[0], fixed_set(5, 2, summaries=False)),
    "fixed, columns": (sparse_fixed_heads(5, 2)[1], fixed_set(5, 2, local=False)),
    "bigbird": (bigbird(3, window_blocks=3, global_blocks=2, random_blocks=2, seed=5), bigbird_set(3, 3, 2, DRAWN)),
    "bigbird causal": (
        bigbird(3, window_blocks=5, global_blocks=1, random_blocks=2, seed=5, causal=True),
        bigbird_set(3, 5, 1, DRAWN, causal=True),
    ),
    "bigbird of single tokens": (
        bigbird(1, window_blocks=1, global_blocks=0, random_blocks=2, seed=5),
        bigbird_set(1, 1, 0, DRAWN),
    ),
    "bigbird without chance": (
        bigbird(7, window_blocks=3, global_blocks=1, random_blocks=0),
        bigbird_set(7, 3, 1, [set()] * 62),
    ),
    "streaming": (streaming(5), streaming_set(5, 4)),
    "streaming, no sinks": (streaming(3, sinks=0), streaming_set(3, 0)),
    "streaming, many sinks": (streaming(2, 11), streaming_set(2, 11)),
}


def bits_of(keys, Lq, Lk):
    rows = [keys(i + Lk - Lq, Lk) for i in range(Lq)]
    return torch.tensor([[j in row for j in range(Lk)] for row in rows], dtype=torch.bool).reshape(Lq, Lk)


@looped("name", CASES)
@looped("Lq, Lk", SIZES)
def test_the_set_of_the_paper(name, Lq, Lk):
    mask, keys = CASES[name]
    assert torch.equal(mask.dense(Lq, Lk).expand(1, 1, Lq, Lk)[0, 0], bits_of(keys, Lq, Lk))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_tiles_are_cut_from_the_set(name, data):
    mask, keys = CASES[name]
    Lq, Lk = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    (top, bottom), (left, right) = (sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in (Lq, Lk))
    expected = bits_of(keys, Lq, Lk)[top:bottom, left:right]
    tile = mask.tile((top, bottom), (left, right), Lq, Lk)
    if not expected.any():
        assert tile.kind == "empty"
    elif expected.all():
        assert tile.kind == "full"
    else:
        assert tile.kind == "partial" and torch.equal(tile.bits[0, 0], expected)


@looped("name", CASES)
def test_it_is_a_value(name):
    mask, _ = CASES[name]
    twin = pickle.loads(pickle.dumps(mask))
    assert twin == mask and hash(twin) == hash(mask) and torch.equal(twin.dense(13, 17), mask.dense(13, 17))
    names = {kind: getattr(saccade, kind) for kind in saccade.operator._masks.__all__}
    assert eval(repr(mask), names) == mask


def test_one_dilation_for_each_head():
    mask = longformer(4, dilation=(1, 3, 1), global_tokens=[7])
    for Lq, Lk in SIZES:
        whole = mask.dense(Lq, Lk)
        for head, dilation in enumerate((1, 3, 1)):
            assert torch.equal(whole[0, head], bits_of(longformer_set(4, dilation, (7,)), Lq, Lk))


def test_global_tokens_by_item():
    flags = torch.zeros(2, 17, dtype=torch.bool)
    flags[0, 3] = flags[1, 5] = flags[1, 16] = True
    whole = longformer(4, global_tokens=flags).dense(17, 17)
    for item, tokens in enumerate(((3,), (5, 16))):
        assert torch.equal(whole[item, 0], bits_of(longformer_set(4, tokens=tokens), 17, 17))


# --- what the papers say of them --------------------------------------------------------------------------------------

TWO = {
    "strided": (sparse_strided_heads, (7,), sparse_strided),
    "fixed": (sparse_fixed_heads, (7,), sparse_fixed),
    "fixed, wide": (sparse_fixed_heads, (7, 3), sparse_fixed),
}


@pytest.mark.parametrize("name", TWO)
def test_two_hops_reach_every_earlier_position(name):
    heads, parameters, merged = TWO[name]
    first, second = (mask.dense(61, 61)[0, 0].float() for mask in heads(*parameters))
    everything = Causal().dense(61, 61)[0, 0]
    assert torch.equal((first + second).bool(), merged(*parameters).dense(61, 61)[0, 0])
    through_both = (first + second + first @ second + second @ first).bool()
    assert torch.equal(through_both, everything)
    # One hop does not, nor do two through the same head.
    assert not torch.equal((first + second).bool(), everything)
    for head in (first, second):
        assert not torch.equal((head + head @ head).bool(), everything)


def test_a_window_reaches_further_with_every_layer():
    """W - 1 positions a layer (Mistral, section 2), and w / 2 d on each side (Longformer, section 3.1)."""
    once = sliding_window(4).dense(61, 61)[0, 0].float()
    assert torch.equal((once @ once @ once).bool(), sliding_window(10).dense(61, 61)[0, 0])
    dilated = longformer(4, dilation=3).dense(61, 61)[0, 0].float()
    twice = (dilated @ dilated).bool()
    assert torch.equal(twice, longformer(8, dilation=3).dense(61, 61)[0, 0])


def test_keys_of_a_row_are_as_many_as_promised():
    L = 211
    counts = {
        name: mask.dense(L, L)[0, 0].sum(1)
        for name, mask in {
            "sliding": sliding_window(13),
            "longformer": longformer(12, global_tokens=[5, 100]),
            "strided": sparse_strided(14),
            "fixed": sparse_fixed(14, 2),
            "streaming": streaming(9, 4),
        }.items()
    }
    assert counts["sliding"].max() == 13
    assert counts["longformer"].sort().values[-3:].tolist() == [15, L, L]
    assert counts["strided"].max() <= 14 + 1 + L / 14
    assert counts["fixed"].max() <= 14 + 2 * L / 14
    assert counts["streaming"].max() == 13
    local, columns = sparse_fixed_heads(14, 2)
    assert local.dense(L, L).sum(-1).max() == 14 and columns.dense(L, L).sum(-1).max() == 2 * (L // 14)


def test_blocks_of_bigbird_are_whole_and_as_many_as_promised():
    blocks, size = 67, 3
    bits = bigbird(size, seed=11).dense(blocks * size, blocks * size)[0, 0]
    by_block = bits.view(blocks, size, blocks, size)
    grid = by_block[:, 0, :, 0]
    assert torch.equal(by_block, grid[:, None, :, None].expand_as(by_block)) and torch.equal(grid, grid.T)
    assert grid[:2].all() and grid[:, :2].all()
    rows = grid[2:].sum(1).float()
    assert rows.max() < blocks and rows.mean() <= 3 + 2 + 2 * 3
    assert not torch.equal(grid, bigbird(size, seed=12).dense(blocks * size, blocks * size)[0, 0][::size, ::size])
    drew = bigbird(size, window_blocks=1, global_blocks=0, seed=11, causal=True)
    last = drew.dense(blocks * size, blocks * size)[0, 0][size - 1 :: size, ::size]
    assert last.sum(1).tolist() == [1 + min(row, 3) for row in range(blocks)]


def test_extra_tokens_of_bigbird_that_fill_no_blocks():
    mask = bigbird(4, global_blocks=0, random_blocks=0) | Global(range(3))
    bits = mask.dense(23, 23)[0, 0]
    assert bits[:3].all() and bits[:, :3].all() and not bits[8:12, 3:4].any() and bits[8:12, 4:16].all()


CAUSAL = [
    sliding_window(5),
    longformer(6, dilation=2, global_tokens=[3], causal=True),
    sparse_strided(5),
    *sparse_strided_heads(5),
    sparse_fixed(5, 2),
    *sparse_fixed_heads(5, 2),
    streaming(4, 2),
    bigbird(3, causal=True, seed=3),
]


@looped("mask", CAUSAL)
def test_decoding_token_by_token_sees_what_training_saw(mask):
    whole = mask.dense(31, 31)
    assert not (whole & ~Causal().dense(31, 31)).any()
    for length in range(1, 32):
        assert torch.equal(mask.dense(1, length), whole[..., length - 1 : length, :length])


# --- attention with them ----------------------------------------------------------------------------------------------

B, H, D = 2, 4, 16
ATTENDED = {
    **{
        name: CASES[name][0]
        for name in (
            "window 7",
            "longformer global dilated",
            "strided 5",
            "strided, columns",
            "fixed 5, 3",
            "fixed, columns",
            "bigbird",
            "bigbird causal",
            "streaming",
        )
    },
    "by head": longformer(12, dilation=(1, 2, 3, 1), global_tokens=[0, 100]),
    "factorised": PerHead([*sparse_strided_heads(11), *sparse_fixed_heads(13, 2)]),
    "large bigbird": bigbird(16, seed=2),
}


WAYS = [("native", 131, 131), ("chunked", 131, 131), ("chunked", 37, 149), ("native", 37, 149)]


@pytest.mark.parametrize(("name", "way"), diagonal([*ATTENDED], WAYS))
def test_backends_equal_the_reference(name, way):
    backend, Lq, Lk = way
    if backend == "native":
        pytest.importorskip("saccade._native")
    generator = torch.Generator().manual_seed(3)
    inputs = [
        torch.randn(B, h, n, D, generator=generator, dtype=torch.float64 if backend == "chunked" else torch.float32)
        for h, n in ((H, Lq), (2, Lk), (2, Lk))
    ]
    cotangent = torch.randn(B, H, Lq, D, generator=generator, dtype=inputs[0].dtype)

    def run(which, dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        out = attention(*leaves, ATTENDED[name], backend=which)
        return out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(dtype))

    exact = run("reference", torch.float64)
    plain = run("reference", inputs[0].dtype)
    for mine, its, true in zip(run(backend, inputs[0].dtype), plain, exact, strict=True):
        # As near to float64 as twice plain PyTorch's formula in the same dtype, and a few roundings of the largest.
        bound = 2 * (its - true).abs().max() + 8 * torch.finfo(mine.dtype).eps * true.abs().max()
        assert (mine - true).abs().max() <= bound


def test_a_global_key_in_the_window_counts_once():
    """With equal logits the output is the mean over the set, not over window and global keys one by one."""
    mask = longformer(4, global_tokens=[10])
    query = key = torch.zeros(1, 1, 23, 4, dtype=torch.float64)
    value = torch.randn(1, 1, 23, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for backend in ("reference", "chunked"):
        out = attention(query, key, value, mask, backend=backend)
        for row in (9, 12, 17):
            listed = sorted(longformer_set(4, tokens=(10,))(row, 23))
            torch.testing.assert_close(out[0, 0, row], value[0, 0, listed].mean(0), rtol=1e-13, atol=1e-13)


# --- words ------------------------------------------------------------------------------------------------------------


@looped(
    "error, words, make",
    [
        (ValueError, "size must be at least 1, got 0", lambda: sliding_window(0)),
        (TypeError, "size", lambda: sliding_window(2.0)),
        (ValueError, "window must be at least 2, got 0", lambda: longformer(0)),
        (
            ValueError,
            "window: half of it lies on each side of the query, so it must be even, got 5",
            lambda: longformer(5),
        ),
        (ValueError, "dilation must be at least 1, got 0", lambda: longformer(4, dilation=0)),
        (ValueError, "dilation must be at least 1, got -2", lambda: longformer(4, dilation=[1, -2])),
        (ValueError, "dilation: expected one for each query head, got none", lambda: longformer(4, dilation=[])),
        (ValueError, "negative position", lambda: longformer(4, global_tokens=[-1])),
        (TypeError, "causal: expected a bool, got 1", lambda: longformer(4, causal=1)),
        (ValueError, "stride must be at least 1, got 0", lambda: sparse_strided(0)),
        (ValueError, "stride must be at least 1, got 0", lambda: sparse_strided_heads(0)),
        (ValueError, "columns must be at most stride 3, got 4", lambda: sparse_fixed(3, 4)),
        (ValueError, "columns must be at most stride 3, got 4", lambda: sparse_fixed_heads(3, 4)),
        (ValueError, "columns must be at least 1, got 0", lambda: sparse_fixed_heads(3, 0)),
        (
            ValueError,
            "window_blocks: the query's own and as many on each side are odd, got 2",
            lambda: bigbird(4, window_blocks=2),
        ),
        (ValueError, "block must be at least 1, got 0", lambda: bigbird(0)),
        (ValueError, "global_blocks must be at least 0, got -1", lambda: bigbird(4, global_blocks=-1)),
        (ValueError, "random_blocks must be at least 0, got -1", lambda: bigbird(4, random_blocks=-1)),
        (TypeError, "causal: expected a bool, got None", lambda: bigbird(4, causal=None)),
        (TypeError, "seed", lambda: bigbird(4, seed="x")),
        (ValueError, "window must be at least 1, got 0", lambda: streaming(0)),
        (ValueError, "sinks must be at least 0, got -3", lambda: streaming(4, -3)),
    ],
)
def test_parameters_without_sense_are_refused_by_name(error, words, make):
    with pytest.raises(error, match=re.escape(words)):
        make()


DRAWN_IN = [
    sliding_window,
    longformer,
    sparse_strided,
    sparse_strided_heads,
    sparse_fixed,
    sparse_fixed_heads,
    bigbird,
    streaming,
]


@looped("function", DRAWN_IN)
def test_the_drawing_in_the_docstring(function):
    head, *lines = inspect.cleandoc(function.__doc__).split("::\n\n")[1].split("\n\n")[0].splitlines()
    calls = re.findall(r"\w+\((?:[^()\[\]]|\[[^\]]*\])*\)", head)
    masks = [mask for call in calls for mask in _several(eval(call, {function.__name__: function}))]
    length = len(lines)
    rows = [[re.sub(" ", "", part) for part in re.split(r" {3,}", line.strip())] for line in lines]
    assert len(rows[0]) == len(masks)
    for number, mask in enumerate(masks):
        drawn = ["".join("1" if bit else "." for bit in row) for row in mask.dense(length, length)[0, 0].tolist()]
        assert [row[number] for row in rows] == drawn


@pytest.mark.slow
def test_the_pictures_of_the_page():
    """What each block of docs/patterns.md prints stands below it."""
    page, namespace, shown = (Path(__file__).parents[2] / "docs" / "patterns.md").read_text(), {}, 0
    for code, text in re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", page, re.DOTALL):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        assert printed.getvalue() == text
        shown += bool(text)
    assert shown == 8


def _several(made):
    return made if isinstance(made, tuple) else (made,)


def test_what_flash_attention_and_transformers_call_a_window_of_four():
    """transformers: `kv > q - window and kv <= q`; flash-attn: `window_size=(left, right)`, beside the own key."""
    p, j = torch.arange(13)[:, None], torch.arange(13)
    assert torch.equal(sliding_window(4).dense(13, 13)[0, 0], (j > p - 4) & (j <= p))
    assert sliding_window(4) == saccade.Window(3, 0)


def test_a_pattern_beside_other_masks():
    flags = torch.ones(1, 1, 13, 13, dtype=torch.bool)
    flags[..., 4] = False
    both = (longformer(4, global_tokens=[2]) & FromTensor(flags)).dense(13, 13)[0, 0]
    expected = bits_of(longformer_set(4, tokens=(2,)), 13, 13)
    expected[:, 4] = False
    assert torch.equal(both, expected)
