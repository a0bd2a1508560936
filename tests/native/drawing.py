"""Random calls: sizes that are multiples of nothing, every memory layout, mask, bias and option, alone and together.

What kind of thing is drawn is hypothesis's choice, so that failures shrink; the numbers come from a seed.
Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D and Dv widths.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import saccade
from masks import mask_sets
from native.fuzzing import DTYPES, Draw
from saccade import Causal, Documents, Fixed, Global, Padding, PerHead, Prefix, Strided, Window


class Sizes(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    width: int
    value_width: int


# Around the vectors of 4, 8 and 16 numbers, the 48 rows and keys of a block, the 96 of a tile.
WIDTHS = (1, 2, 3, 5, 7, 8, 13, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 67, 80, 96, 97)
LENGTHS = (1, 2, 3, 11, 12, 13, 47, 48, 49, 61, 95, 96, 97, 131, 383, 384, 385, 431)
widths, lengths = st.sampled_from(WIDTHS), st.sampled_from(LENGTHS)


@st.composite
def sizes(draw, work: int, lengths_q=lengths, lengths_k=lengths) -> Sizes:
    """Sizes that keep B Hq Lq Lk (D + Dv), which is the reference's memory, below `work`."""
    rows, keys = draw(lengths_q), draw(lengths_k)
    width, value_width = draw(st.just(64) | widths), draw(st.just(64) | widths)
    group, kv_heads, batch = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    while (over := batch * kv_heads * group * rows * keys * (width + value_width) / work) > 1:
        if batch * kv_heads * group > 1:
            batch, kv_heads, group = max(1, batch - 1), max(1, kv_heads - 1), max(1, group // 2)
        elif width + value_width > 8:
            width, value_width = max(1, int(width / min(over, 3))), max(1, int(value_width / min(over, 2)))
        else:
            rows = max(1, rows // 2)
    return Sizes(batch, kv_heads * group, kv_heads, rows, keys, width, value_width)


# --- memory -------------------------------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "(B, L, H, D)", "(L, B, H, D)", "cache", "unaligned", "wide rows", "one head", "one item")


def laid_out(shape: tuple[int, ...], layout: str, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Normal numbers (B, H, L, width), NaN around them; the last stride is 1."""
    batch, heads, length, width = shape
    if layout == "one head":
        return torch.randn(batch, 1, length, width, generator=draw).to(dtype).expand(shape)
    if layout == "one item":
        return torch.randn(1, heads, length, width, generator=draw).to(dtype).expand(shape)
    full = {
        "contiguous": shape,
        "unaligned": shape,
        "wide rows": (*shape[:3], width + 5),
        "(B, L, H, D)": (batch, length, heads, width),
        "(L, B, H, D)": (length, batch, heads, width),
        "cache": (batch + 1, heads, length + 7, width),
    }[layout]
    memory = torch.full((math.prod(full) + 1,), math.nan, dtype=dtype)[1 if layout == "unaligned" else 0 :]
    memory = memory[: math.prod(full)].view(full)
    if layout in ("(B, L, H, D)", "(L, B, H, D)"):
        memory = memory.permute((0, 2, 1, 3) if layout == "(B, L, H, D)" else (1, 2, 0, 3))
    elif layout == "wide rows":
        memory = memory[..., 3 : 3 + width]
    elif layout == "cache":
        memory = memory[1:, :, 2 : 2 + length]
    return memory.copy_(torch.randn(shape, generator=draw))


@st.composite
def operands(draw, size: Sizes, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    shapes = {
        "query": (size.batch, size.heads, size.rows, size.width),
        "key": (size.batch, size.kv_heads, size.keys, size.width),
        "value": (size.batch, size.kv_heads, size.keys, size.value_width),
    }
    layout = draw(st.sampled_from([None, *LAYOUTS]))
    made = {
        name: laid_out(shape, layout or draw(st.sampled_from(LAYOUTS)), generator, dtype)
        for name, shape in shapes.items()
    }
    if draw(st.booleans()):
        made["query"] = made["query"] * 3  # sharper logits
    return made


# --- masks --------------------------------------------------------------------------------------------------------


def _part(draw, size: Sizes, generator: torch.Generator):
    """One mask of any length."""
    batch, heads, rows, keys = size.batch, size.heads, size.rows, size.keys

    def some(high: int, count: int) -> list[int]:
        return torch.randint(0, high + 1, (count,), generator=generator).tolist()

    near = st.sampled_from([0, 1, 5, 47, 48, 50, 130])
    kind = draw(
        st.sampled_from(["causal", "window", "padding", "prefix", "documents", "global", "sparse", "tensor", "both"])
    )
    if kind == "causal":
        return Causal()
    if kind == "window":
        return Window(draw(st.none() | near), draw(st.none() | near))
    if kind == "padding":
        return Padding(some(keys, batch))
    if kind == "both":
        return Padding(torch.rand(batch, keys, generator=generator) < 0.7, some(rows, batch))
    if kind == "prefix":
        return Prefix(some(keys, batch))
    if kind == "documents":
        queries = torch.tensor(some(3, batch * rows), dtype=torch.int64).view(batch, rows)
        return Documents(queries, torch.tensor(some(3, keys), dtype=torch.int64).sort()[0])
    if kind == "global":
        return Global(some(keys, 3)) | Window(3, 3)
    if kind == "sparse":
        return draw(st.sampled_from([Strided(7), Strided(53), Fixed(48, 3), Fixed(5, 1)]))
    shape = [draw(st.sampled_from([1, n])) for n in (batch, heads, rows, keys)]
    return saccade.FromTensor(torch.rand(shape, generator=generator) < draw(st.sampled_from([0.02, 0.6, 0.99])))


def expression(draw, size: Sizes, generator: torch.Generator):
    """A mask of up to two parts, or None, and the placement in it."""
    if draw(st.integers(0, 4)) == 0:
        return None, None
    mask = _part(draw, size, generator)
    way = draw(st.sampled_from(["one", "and", "or", "not", "heads"]))
    if way in ("and", "or"):
        other = _part(draw, size, generator)
        mask = mask & other if way == "and" else mask | other
    elif way == "not":
        mask = ~mask
    elif way == "heads":
        mask = PerHead([mask, *(_part(draw, size, generator) for _ in range(size.heads - 1))])
    offset = draw(st.none() | st.integers(-9, 60) | st.just("per item"))
    if offset == "per item":
        offset = torch.randint(-9, max(1, size.keys), (size.batch,), generator=generator).tolist()
    return (mask if offset is None else mask.at(offset)), offset


# --- scores -------------------------------------------------------------------------------------------------------


def _tensor_bias(draw, size: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    shape = [draw(st.sampled_from([1, n])) for n in (size.batch, size.heads, size.rows, size.keys)]
    way = draw(st.sampled_from(["contiguous", "transposed", "every other", "shifted"]))
    if way == "transposed":
        bias = torch.randn(shape[::-1], generator=generator).permute(3, 2, 1, 0)
    elif way == "every other":
        bias = torch.randn(*shape[:3], 2 * shape[3], generator=generator)[..., ::2]
    elif way == "shifted":
        bias = torch.randn(math.prod(shape) + 1, generator=generator)[1:].view(shape)
    else:
        bias = torch.randn(shape, generator=generator)
    hidden = draw(st.sampled_from(["none", "some", "rows"]))
    if hidden == "some":
        bias.masked_fill_(torch.rand(shape, generator=generator) < 0.4, -math.inf)
    elif hidden == "rows":
        bias.masked_fill_(torch.rand((*shape[:3], 1), generator=generator) < 0.4, -math.inf)
    return bias.to(dtype)  # which keeps the strides


def scores(draw, size: Sizes, dtype: torch.dtype, generator: torch.Generator) -> tuple[dict[str, Tensor], dict]:
    """The parameter of a bias and, for a table, the rest of it."""
    kind = draw(st.sampled_from(["none", "bias", "bias", "slopes", "table"]))
    dtype = draw(st.sampled_from([dtype, torch.float32]))
    if kind == "bias":
        return {"bias": _tensor_bias(draw, size, dtype, generator)}, {}
    if kind == "slopes":
        return {"slopes": (torch.rand(size.heads, generator=generator) / 8).to(dtype)}, {}
    if kind == "table":
        both = draw(st.booleans())
        table = torch.randn(draw(st.sampled_from([4, 8, 32])), size.heads, generator=generator).to(dtype)
        return {"table": table}, {"bidirectional": both, "max_distance": draw(st.sampled_from([17, 128]))}
    return {}, {}


def options(draw) -> dict:
    made: dict = {}
    if draw(st.integers(0, 2)) == 0:
        made["softcap"] = draw(st.sampled_from([0.7, 5.0, 50.0]))
    if draw(st.integers(0, 2)) == 0:
        made["scale"] = draw(st.sampled_from([0.0, 1e-30, 0.37, -0.2, 1.0]))
    if draw(st.integers(0, 2)) == 0:
        made["dropout"] = saccade.Dropout(draw(st.sampled_from([0.1, 0.5, 0.9])), draw(st.integers(0, 2**63)))
    return made


@st.composite
def calls(draw, size=None, work: int = 2**21) -> Draw:
    """Any call whose reference takes about 64 bytes times `work`."""
    size = draw(sizes(work) if size is None else size)
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    leaves = draw(operands(size, dtype, generator))
    mask, offset = expression(draw, size, generator)
    parameters, rest = scores(draw, size, dtype, generator)
    leaves |= parameters
    if draw(st.integers(0, 2)) == 0:
        leaves["sink"] = torch.randn(size.heads, generator=generator).to(dtype)
    return Draw(leaves, mask, offset, options(draw), rest, seed)


@st.composite
def small_calls(draw) -> Draw:
    """With any mask expression at all, of lengths that its own strategies know; 0 included."""
    rows, keys = draw(st.integers(0, 13)), draw(st.integers(0, 13))
    mask = mask_sets.composition(draw, rows, keys).mask
    one = st.integers(-4, mask_sets.REACH - 14)
    offset = draw(st.none() | one | st.lists(one, min_size=mask_sets.BATCH, max_size=mask_sets.BATCH))
    heads = mask_sets.HEADS
    size = Sizes(mask_sets.BATCH, heads, draw(st.sampled_from([1, heads])), rows, keys, draw(widths), draw(widths))
    made = draw(calls(st.just(size)))
    made.mask, made.offset = mask if offset is None else mask.at(offset), offset
    return made
