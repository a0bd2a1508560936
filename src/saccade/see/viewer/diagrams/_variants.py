"""One small picture for each variant: its pairs, computed from the mask or the mechanism itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....operator._masks import Causal, Chunks, Documents, Mask, Prefix, Window
from ....operator.variants import (
    MECHANISMS,
    BlockTopKConfig,
    GatedDeltaConfig,
    HeadSizes,
    LinformerConfig,
    MechanismConfig,
    NystromConfig,
    PerformerConfig,
    ReformerConfig,
)
from ....operator.variants.patterns import bigbird, longformer, sliding_window, sparse_fixed, sparse_strided, streaming
from ._canvas import Canvas
from ._fonts import fitted
from ._shapes import Box, arrow, runs

LENGTH = 16  # tokens of each picture
_SIDE, _GAP, _HEAD, _FOOT = 160.0, 44.0, 26.0, 48.0
_COLUMNS = 5
_WIDTH = 8  # of a head, for mechanisms whose pairs are probed
# Use sums of keys and values instead of pairs.
_SUMMARIES = ("linear", "gated-delta", "performer", "linformer", "nystrom")


@dataclass(frozen=True, eq=False)
class Variant:
    """A variant as one picture.

    Attributes:
        name, code: its name, and its expression in Saccade.
        pairs: (LENGTH, LENGTH), the computed pairs; None for a mechanism without pairs.
        note: the number of pairs, or what replaces them.
    """

    name: str
    code: str
    pairs: np.ndarray | None
    note: str
    kind: str = ""


def all_variants() -> list[Variant]:
    """Masks, then mechanisms with pairs, then those without."""
    masks: list[tuple[str, str, Mask | None]] = [
        ("Full", "no mask", None),
        ("Causal", "Causal()", Causal()),
        ("Prefix", "Prefix(5)", Prefix(5)),
        ("Packed texts", "Causal() & Documents(…)", Causal() & Documents([0] * 5 + [1] * 7 + [2] * 4)),
        ("Local window", "Window(2, 2)", Window(2, 2)),
        ("Sliding window", "sliding_window(4)", sliding_window(4)),
        ("Dilated window", "longformer(4, dilation=2)", longformer(4, dilation=2)),
        ("Longformer", "longformer(4, global_tokens=[0])", longformer(4, global_tokens=[0])),
        ("Chunks", "Causal() & Chunks(4)", Causal() & Chunks(4)),
        ("Streaming", "streaming(4, sinks=2)", streaming(4, sinks=2)),
        ("Sparse, strided", "sparse_strided(4)", sparse_strided(4)),
        ("Sparse, fixed", "sparse_fixed(4)", sparse_fixed(4)),
        ("BigBird", "bigbird(2, …)", bigbird(2, global_blocks=1, random_blocks=1, seed=4)),
    ]
    out = [of_mask(mask, name, code) for name, code, mask in masks]
    chosen = (ReformerConfig(buckets=4, rounds=1, chunk=4), BlockTopKConfig(block=4, k=2))
    out += [of_mechanism(config) for config in chosen]
    dense = [kind for kind in MECHANISMS if kind.name not in _SUMMARIES and kind.usual(LENGTH).name not in _CHOSEN]
    names = ", ".join(kind.name for kind in dense)
    every = np.ones((LENGTH, LENGTH), bool)
    out.append(Variant("Other weights", names, every, "every pair, not softmax"))
    out += [of_mechanism(kind.usual(LENGTH)) for kind in MECHANISMS if kind.name in _SUMMARIES]
    return out


_NAMES = {"block-topk": "Block top-k", "gated-delta": "Gated delta rule", "nystrom": "Nyström"}
_CHOSEN = ("reformer", "block-topk", "longformer")


def of_mask(mask: Mask | None, name: str, code: str = "") -> Variant:
    """The visible pairs of a mask, of its first item and head if it has several."""
    if mask is None:
        pairs = np.ones((LENGTH, LENGTH), bool)
    else:
        sizes = mask._required_lengths() or (LENGTH, LENGTH)
        pairs = mask.dense(*sizes)[0, 0].cpu().numpy()
    return Variant(name, code or repr(mask), pairs, f"{int(pairs.sum())} of {pairs.size:,} pairs")


def of_mechanism(config: MechanismConfig) -> Variant:
    """A mechanism: its pairs on random vectors, or the sums that replace them."""
    name = _NAMES.get(config.name, config.name.capitalize())
    code = type(config).__name__
    if isinstance(config, LinformerConfig):
        return Variant(name, code, None, f"{LENGTH} × {config.rank} mixed keys", "linformer")
    if isinstance(config, NystromConfig):
        return Variant(name, code, None, "all pairs with landmarks", "nystrom")
    if config.name in _SUMMARIES:
        features = "random features" if isinstance(config, PerformerConfig) else "features φ(k)"
        note = "one state, corrected" if isinstance(config, GatedDeltaConfig) else f"one sum, {features}"
        return Variant(name, code, None, note, "state")
    pairs = probed_pairs(config)
    by = ", by content" if config.name in ("reformer", "block-topk") else ""
    code = f"BlockTopKConfig({config.block}, {config.k}), causal" if isinstance(config, BlockTopKConfig) else code
    return Variant(name, code, pairs, f"{int(pairs.sum())} of {pairs.size:,} pairs{by}")


def probed_pairs(config: MechanismConfig) -> np.ndarray:
    """(L, L): the pairs whose value affects the query's output, found with one-hot values on random vectors."""
    sizes = HeadSizes(_WIDTH, config.maps, config.maps, _WIDTH, LENGTH)
    generator = torch.Generator().manual_seed(4)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(4)
        mechanism = config.build(sizes).eval()
        query = torch.randn(1, config.maps, LENGTH, _WIDTH, generator=generator)
        key = query if config.shares_key else torch.randn(query.shape, generator=generator)
        value = torch.eye(LENGTH)[None, None]
        options = {"tokens": torch.randn(1, LENGTH, _WIDTH, generator=generator)} if config.reads_tokens else {}
        mask = Causal() if isinstance(config, BlockTopKConfig) else None
        out = mechanism(query, key, value, mask, **options)
    return (out[0, 0] != 0).numpy()


def draw_variants(canvas: Canvas, variants: Sequence[Variant]) -> str:
    """Draw the variants in rows of five; returns the description."""
    columns = min(_COLUMNS, len(variants))
    alone = len(variants) == 1 and variants[0].pairs is not None
    side = 2 * _SIDE if alone else _SIDE
    for i, variant in enumerate(variants):
        x = i % columns * (_SIDE + _GAP)
        y = i // columns * (_HEAD + _SIDE + _FOOT + 30)
        with canvas.group(f"{variant.name}: {variant.note}"):
            room = side + _GAP - 12
            canvas.text(x, y + 12, fitted(variant.name, 15, room, bold=True), size=15, bold=True)
            where = Box(x, y + _HEAD, side, side)
            if variant.pairs is not None:
                _draw_pairs(canvas, where, variant.pairs)
            else:
                _draw_summary(canvas, where, variant.kind)
            canvas.text(x, where.bottom + 19, fitted(variant.code, 12, room), size=12, fill="soft")
            canvas.text(x, where.bottom + 37, fitted(variant.note, 13, room), size=13)
    rows = math.ceil(len(variants) / columns)
    low = rows * (_HEAD + _SIDE + _FOOT + 30)
    wide = columns * (_SIDE + _GAP) - _GAP
    if len(variants) > 1:
        caption = "Rows are queries, columns are keys; a filled square is a pair that is computed."
        canvas.text(wide / 2, low, caption, size=13, fill="soft", anchor="middle")
    return _description(variants)


def _draw_pairs(canvas: Canvas, where: Box, pairs: np.ndarray) -> None:
    """Filled squares on a faint grid, joined within a row."""
    rows, columns = pairs.shape
    cell = where.width / max(rows, columns)
    canvas.rect(where.x, where.y, columns * cell, rows * cell, fill="wash", stroke="edge", line=1, radius=3)
    data = ""
    for i, start, stop in runs(pairs):
        x, y = where.x + start * cell, where.y + i * cell
        data += f"M{x:g} {y:g}h{(stop - start) * cell:g}v{cell:g}h{(start - stop) * cell:g}z"
    if data:
        canvas.path([], data, fill="pair")
    lines = "".join(f"M{where.x:g} {where.y + i * cell:g}h{columns * cell:g}" for i in range(1, rows))
    lines += "".join(f"M{where.x + j * cell:g} {where.y:g}v{rows * cell:g}" for j in range(1, columns))
    canvas.path([], lines, stroke="paper", line=1)


def _draw_summary(canvas: Canvas, where: Box, kind: str) -> None:
    """The picture of a mechanism without pairs: a state, mixed keys, or landmarks."""
    if kind == "state":
        _draw_state(canvas, where)
    elif kind == "linformer":
        _draw_product(canvas, where, [("queries", 22, _SIDE - 26, "query"), ("mixed keys", 74, 40, "key")])
    else:
        parts = [("L × m", 34, _SIDE - 26, "query"), ("m × m", 34, 34, "weight"), ("m × L", 58, 34, "key")]
        _draw_product(canvas, where, parts)


def _draw_state(canvas: Canvas, where: Box) -> None:
    """Keys and values into one square, which each query reads."""
    high, middle = _SIDE - 26, where.y + (_SIDE - 26) / 2
    left, right = where.x + 2, where.right - 26
    state = Box(where.middle[0] - 24, middle - 24, 48, 48)
    canvas.rect(left, where.y, 24, high, fill="key-wash", stroke="key", radius=3)
    canvas.rect(right, where.y, 24, high, fill="query-wash", stroke="query", radius=3)
    canvas.rect(*state, fill="weight-wash", stroke="weight", line=1.5, radius=4)
    arrow(canvas, [(left + 28, middle), (state.x - 3, middle)], stroke="key")
    arrow(canvas, [(right - 4, middle), (state.right + 3, middle)], stroke="query")
    for x, name in ((left + 12, "k, v"), (state.middle[0], "Σ φ(k) v"), (right + 12, "q")):
        canvas.text(x, where.bottom - 6, name, size=13, fill="soft", anchor="middle")


def _draw_product(canvas: Canvas, where: Box, parts: Sequence[tuple[str, float, float, str]]) -> None:
    """Narrow matrices side by side, multiplied."""
    high = _SIDE - 26
    gap = (_SIDE - 4 - sum(width for _, width, _, _ in parts)) / max(1, len(parts) - 1)
    x = where.x + 2
    for i, (name, width, tall, role) in enumerate(parts):
        canvas.rect(x, where.y + (high - tall) / 2, width, tall, fill=f"{role}-wash", stroke=role, radius=3)
        if i:
            canvas.text(x - gap / 2, where.y + high / 2 + 5, "×", size=15, fill="soft", anchor="middle")
        canvas.text(x + width / 2, where.bottom - 6, name, size=12, fill="soft", anchor="middle")
        x += width + gap


def _description(variants: Sequence[Variant]) -> str:
    listed = "; ".join(f"{variant.name} ({variant.code}): {variant.note}" for variant in variants)
    return f"Which pairs of queries (rows) and keys (columns) each variant of attention computes. {listed}."
