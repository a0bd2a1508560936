"""What each mask means, written as plain Python about one pair at a time, and random masks with their meaning.

A meaning is `f(b, h, row, position, key) -> bool`. Sizes: BATCH items, HEADS heads; positions stay below REACH.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from saccade.operator import _masks as masks

BATCH, HEADS, REACH = 3, 2, 29
Meaning = Callable[[int, int, int, int, int], bool]


class Case(NamedTuple):
    mask: masks.Mask
    meaning: Meaning


def table(meaning: Meaning, Lq: int, Lk: int, batch: int = BATCH, heads: int = HEADS, offset: int | None = None):
    """The meaning as a bool tensor (batch, heads, Lq, Lk), pair by pair."""
    shift = Lk - Lq if offset is None else offset
    cells = [
        [[[meaning(b, h, i, i + shift, j) for j in range(Lk)] for i in range(Lq)] for h in range(heads)]
        for b in range(batch)
    ]
    return torch.tensor(cells, dtype=torch.bool).reshape(batch, heads, Lq, Lk)


def full(mask: masks.Mask, Lq: int, Lk: int) -> torch.Tensor:
    return mask.dense(Lq, Lk).expand(BATCH, HEADS, Lq, Lk)


def kind_of(bits: torch.Tensor) -> str:
    return "empty" if not bits.any() else "full" if bits.all() else "partial"


def tiles(length: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def per_item(value, b):
    return value[b % len(value)] if isinstance(value, list) else value


per_batch = st.lists(st.integers(0, 9), min_size=BATCH, max_size=BATCH)


def causal(draw, Lq, Lk):
    return Case(masks.Causal(), lambda b, h, i, p, j: j <= p)


def window(draw, Lq, Lk):
    left, right = draw(st.none() | st.integers(0, 6)), draw(st.none() | st.integers(0, 6))

    def meaning(b, h, i, p, j):
        return (left is None or j >= p - left) and (right is None or j <= p + right)

    return Case(masks.Window(left, right), meaning)


def prefix(draw, Lq, Lk):
    length = draw(st.integers(0, 9) | per_batch)
    return Case(masks.Prefix(length), lambda b, h, i, p, j: j < per_item(length, b) or j <= p)


def strided(draw, Lq, Lk):
    stride = draw(st.integers(1, 7))
    return Case(
        masks.Strided(stride), lambda b, h, i, p, j: j in range(p + 1) and (p - j <= stride or (p - j) % stride == 0)
    )


def fixed(draw, Lq, Lk):
    stride = draw(st.integers(1, 7))
    columns = draw(st.integers(1, stride))

    def meaning(b, h, i, p, j):
        return j <= p and (j // stride == p // stride or j % stride in range(stride - columns, stride))

    return Case(masks.Fixed(stride, columns), meaning)


def dilated(draw, Lq, Lk):
    step = draw(st.integers(1, 7))
    return Case(masks.Dilated(step), lambda b, h, i, p, j: abs(j - p) in range(0, REACH, step))


def chunks(draw, Lq, Lk):
    size = draw(st.integers(1, 7))
    left, right = draw(st.integers(0, 2)), draw(st.integers(0, 2))

    def meaning(b, h, i, p, j):
        start = next(s for s in range(-REACH * size, REACH * size, size) if p in range(s, s + size))
        return j in range(start - left * size, start + (right + 1) * size)

    return Case(masks.Chunks(size, left, right), meaning)


def columns(draw, Lq, Lk):
    stride = draw(st.integers(1, 7))
    count = draw(st.integers(1, stride))
    kept = {end - n for end in range(stride, REACH + stride, stride) for n in range(1, count + 1)}
    return Case(masks.Columns(stride, count), lambda b, h, i, p, j: j in kept)


def global_(draw, Lq, Lk):
    rows = draw(st.integers(1, 3))
    if rows == 3:
        flags = [draw(st.lists(st.booleans(), min_size=REACH, max_size=REACH)) for _ in range(BATCH)]
        flags = [[flag and n % 3 == 0 for n, flag in enumerate(row)] for row in flags]
        sets = [{n for n, flag in enumerate(row) if flag} for row in flags]
        mask = masks.Global(torch.tensor(flags))
    else:
        sets = [set(draw(st.lists(st.integers(0, REACH - 1), max_size=3)))]
        mask = masks.Global(sorted(sets[0]))
    return Case(mask, lambda b, h, i, p, j: p in sets[b % len(sets)] or j in sets[b % len(sets)])


def edges(draw, Lq, Lk):
    pairs = draw(st.sets(st.tuples(st.integers(0, REACH - 1), st.integers(0, 12)), max_size=40))
    mask = masks.Edges([q for q, _ in pairs], [k for _, k in pairs])
    return Case(mask, lambda b, h, i, p, j: (p, j) in pairs)


def blocks(draw, Lq, Lk):
    size = draw(st.integers(1, 5))
    count = -(-REACH // size)
    heads = draw(st.sampled_from([1, HEADS]))
    flags = np.random.default_rng(draw(st.integers(0, 99))).random((heads, count, count)) < 0.6
    layout = flags[0] if flags.shape[0] == 1 else flags

    def meaning(b, h, i, p, j):
        return p >= 0 and bool(flags[h % len(flags)][p // size][j // size])

    return Case(masks.Blocks(layout, size), meaning)


def random_blocks(draw, Lq, Lk):
    seed, size, count = draw(st.integers(-5, 5)), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    both_ways = draw(st.booleans())
    mask = masks.RandomBlocks(seed, size, count, symmetric=both_ways)
    # The pattern itself is arbitrary: what it must obey has tests of its own. Here: whole blocks, position by position.
    whole = masks.RandomBlocks(seed, 1, count, symmetric=both_ways).dense(REACH, REACH)[0, 0]
    return Case(mask, lambda b, h, i, p, j: p >= 0 and bool(whole[p // size, j // size]))


def padding(draw, Lq, Lk):
    def side(length):
        if draw(st.booleans()):
            lengths = draw(st.lists(st.integers(0, length), min_size=BATCH, max_size=BATCH))
            return lengths, [set(range(n)) for n in lengths]
        flags = [draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in range(BATCH)]
        kept = [{n for n, flag in enumerate(row) if flag} for row in flags]
        return torch.tensor(flags, dtype=torch.bool).reshape(BATCH, length), kept

    keys, kept_keys = side(Lk)
    queries, kept_rows = side(Lq) if draw(st.booleans()) else (None, [set(range(Lq))] * BATCH)
    return Case(masks.Padding(keys, queries), lambda b, h, i, p, j: j in kept_keys[b] and i in kept_rows[b])


def documents(draw, Lq, Lk):
    ids = st.integers(0, 2)
    if draw(st.booleans()):
        rows = [draw(st.lists(ids, min_size=Lq, max_size=Lq)) for _ in range(BATCH)]
        keys = draw(st.lists(ids, min_size=Lk, max_size=Lk))
        mask = masks.Documents(torch.tensor(rows).reshape(BATCH, Lq).long(), torch.tensor(keys).long())
        return Case(mask, lambda b, h, i, p, j: rows[b][i] == keys[j])
    names = [draw(st.lists(ids, min_size=REACH, max_size=REACH)) for _ in range(draw(st.sampled_from([1, BATCH])))]
    if draw(st.booleans()):
        names = [sorted(row) for row in names]
    mask = masks.Documents(names[0] if len(names) == 1 else names)
    return Case(mask, lambda b, h, i, p, j: p >= 0 and names[b % len(names)][p] == names[b % len(names)][j])


def from_tensor(draw, Lq, Lk):
    shape = [draw(st.sampled_from([1, n])) for n in (BATCH, HEADS, Lq, Lk)]
    density = draw(st.sampled_from([0.0, 0.5, 1.0]))
    bits = torch.from_numpy(np.random.default_rng(draw(st.integers(0, 99))).random(shape) < density)

    def meaning(b, h, i, p, j):
        return bool(bits[tuple(at % size for at, size in zip((b, h, i, j), shape, strict=True))])

    return Case(masks.FromTensor(bits), meaning)


@dataclass(frozen=True)
class Multiples:
    step: int

    def __call__(self, b, h, q, k):
        return (q + k + b) % (self.step + h) == 0


def predicate(draw, Lq, Lk):
    step = draw(st.integers(1, 4))
    mask = masks.Predicate(Multiples(step), batch=BATCH, heads=HEADS)
    return Case(mask, lambda b, h, i, p, j: (p + j + b) % (step + h) == 0)


LEAVES = {
    "Causal": causal,
    "Window": window,
    "Prefix": prefix,
    "Strided": strided,
    "Fixed": fixed,
    "Dilated": dilated,
    "Chunks": chunks,
    "Columns": columns,
    "Global": global_,
    "Edges": edges,
    "Blocks": blocks,
    "RandomBlocks": random_blocks,
    "Padding": padding,
    "Documents": documents,
    "FromTensor": from_tensor,
    "Predicate": predicate,
}


def leaf(draw, Lq: int, Lk: int) -> Case:
    return LEAVES[draw(st.sampled_from(sorted(LEAVES)))](draw, Lq, Lk)


def composition(draw, Lq: int, Lk: int, depth: int = 2) -> Case:
    shape = draw(st.sampled_from(["leaf", "and", "or", "not", "heads"])) if depth else "leaf"
    if shape == "leaf":
        return leaf(draw, Lq, Lk)
    parts = [composition(draw, Lq, Lk, depth - 1) for _ in range(1 if shape == "not" else 2)]
    if shape == "not":
        return Case(~parts[0].mask, lambda *at: not parts[0].meaning(*at))
    if shape == "heads":
        mask = masks.PerHead([part.mask for part in parts])
        return Case(mask, lambda b, h, *at: parts[h].meaning(b, h, *at))
    if shape == "and":
        return Case(parts[0].mask & parts[1].mask, lambda *at: parts[0].meaning(*at) and parts[1].meaning(*at))
    return Case(parts[0].mask | parts[1].mask, lambda *at: parts[0].meaning(*at) or parts[1].meaning(*at))


def placed(draw, case: Case, Lq: int) -> Case:
    """The case itself, or moved by `.at`."""
    one = st.integers(-4, REACH - 14)
    offset = draw(st.none() | one | st.lists(one, min_size=BATCH, max_size=BATCH))
    if offset is None:
        return case
    return Case(case.mask.at(offset), lambda b, h, i, p, j: case.meaning(b, h, i, i + per_item(offset, b), j))


@st.composite
def problems(draw, depth: int = 2, least: int = 0):
    """A mask with its meaning, and the sizes (Lq, Lk) it is for."""
    Lq, Lk = draw(st.integers(least, 13)), draw(st.integers(least, 13))
    return placed(draw, composition(draw, Lq, Lk, depth), Lq), Lq, Lk


@st.composite
def spans(draw, length: int):
    start = draw(st.integers(0, length))
    return start, draw(st.integers(start, length))
