"""`MultiHeadAttention` without some of its heads: the rows and columns that stay, and the new configuration.

Shape legend: Hq / Hkv query and key-value heads, D key width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .._biases import paper_slopes
from ..positions import AlibiBias, AlibiConfig, T5Bias
from ..variants import (
    BlockTopKAttention,
    DifferentialAttention,
    GatedAttention,
    GatedDeltaRule,
    LinearAttention,
    LinformerAttention,
    LongformerAttention,
    Mechanism,
    NystromAttention,
    SigmoidAttention,
)
from ._cuts import Change, Cut, WeightSlice, head_rows, linear_cut
from .attention import HeadsLeft, MultiHeadAttention
from .blocks import EncoderBlock
from .config import AttentionConfig
from .stacks import Stack


def kept_heads(removed: object, heads: int) -> list[int]:
    """The heads that stay. ValueError unless `removed` is a list of some of these heads, and not of all."""
    given = list(removed) if isinstance(removed, list | tuple) else [-1]
    if not all(type(head) is int and 0 <= head < heads for head in given) or len(set(given)) == heads:
        raise ValueError(f"expected a list of some of the heads 0 to {heads - 1}, not all of them, got {removed!r}")
    return [head for head in range(heads) if head not in given]


def kept_groups(kept: Sequence[int], heads: int, kv_heads: int) -> list[int]:
    """The key-value heads that stay with these query heads, in order.

    Raises:
        ValueError: those that stay are not read by equally many query heads each; the message says what would do.
    """
    size = heads // kv_heads
    groups = [[head for head in kept if head // size == group] for group in range(kv_heads)]
    held = [group for group in range(kv_heads) if groups[group]]
    counts = {len(groups[group]) for group in held}
    if len(counts) > 1:
        least = min(counts)
        shown = "; ".join(f"key head {group} keeps {groups[group]}" for group in held)
        also = [head for group in held for head in groups[group][least:]]
        raise ValueError(
            f"query heads that read one key head must stay in equal numbers, but {shown}. Remove {also} as well, or "
            "keep as many everywhere; a key head goes when all its query heads do"
        )
    return held


def fewer_heads(config: AttentionConfig, kept: Sequence[int]) -> AttentionConfig:
    """The configuration with only these heads. ValueError as of `kept_groups`."""
    shape, positions = config.shape, config.positions
    if isinstance(positions, AlibiConfig):
        slopes = paper_slopes(config.heads) if positions.slopes is None else positions.slopes
        positions = replace(positions, slopes=tuple(slopes[head] for head in kept))
    return replace(
        config,
        heads=len(kept),
        kv_heads=len(kept_groups(kept, config.heads, shape.kv_heads)),
        head_width=shape.head,
        value_head_width=shape.value_head,
        fused=shape.fused,
        positions=positions,
    )


def cut_heads(module: MultiHeadAttention, kept: Sequence[int]) -> Cut:
    """The cut that leaves only these heads of `module`, in its current numbering.

    Raises:
        ValueError: as of `kept_groups`; a mechanism or a module of positions that cannot do with fewer heads.
    """
    config, shape = module.config, module.shape
    groups, smaller = kept_groups(kept, config.heads, shape.kv_heads), fewer_heads(config, kept)
    columns = head_rows(kept, shape.value_head)
    cuts = [
        *_projections(module, kept, groups),
        linear_cut(module.output, columns=columns),
        *([] if module.gate is None else [linear_cut(module.gate, rows=columns)]),
        *([] if module.sink is None else [Cut([WeightSlice(module, "sink", 0, tuple(kept))], [])]),
        *([] if module.positions is None else [_positions(module.positions, kept)]),
        *([] if module.mechanism is None else [_mechanism(module.mechanism, kept, groups)]),
    ]
    before = module.heads_left or HeadsLeft(tuple(range(config.heads)), config.heads)
    left = HeadsLeft(tuple(before.numbers[head] for head in kept), before.original_heads)
    own = {"config": smaller, "shape": smaller.shape, "sizes": smaller.sizes, "heads_left": left}
    return joined([*cuts, Cut([], [Change(module, name, value) for name, value in own.items()])])


def configurations(model: nn.Module, kept: Mapping[MultiHeadAttention, Sequence[int]]) -> Cut:
    """The changes of blocks and stacks, whose configurations describe their attention."""
    changes: list[Change] = []
    for module in model.modules():
        if isinstance(module, EncoderBlock):
            changes += (
                [] if (made := _of_block(module, module.config, kept)) is None else [Change(module, "config", made)]
            )
        elif isinstance(module, Stack):
            both = list(zip(module.blocks, module.configs, strict=True))
            made = tuple(_of_block(block, config, kept) or config for block, config in both)
            if made != module.configs:
                changes += [Change(module, "configs", made), Change(module, "config", made[0])]
    return Cut([], changes)


def joined(cuts: Iterable[Cut]) -> Cut:
    """All cuts as one."""
    every = list(cuts)
    return Cut([one for cut in every for one in cut.slices], [one for cut in every for one in cut.changes])


def _of_block(block: Any, config: Any, kept: Mapping[MultiHeadAttention, Sequence[int]]) -> Any:
    """The configuration of a block with fewer heads; None if it keeps all of them."""
    parts = {"attention": block.attention, "cross": getattr(block, "cross", None)}
    made = {name: fewer_heads(getattr(config, name), kept[module]) for name, module in parts.items() if module in kept}
    return replace(config, **made) if made else None


def _projections(module: MultiHeadAttention, kept: Sequence[int], groups: Sequence[int]) -> list[Cut]:
    shape, (queries, keys, _) = module.shape, module.sizes
    maps = shape.query_heads // module.config.heads
    parts = [
        head_rows(kept, maps * shape.head),
        head_rows(groups, maps * shape.head) if keys else [],
        head_rows(groups, shape.value_head),
    ]
    if shape.fused:
        starts = (0, queries, queries + keys)
        rows = [start + row for start, part in zip(starts, parts, strict=True) for row in part]
        return [linear_cut(module.projection, rows=rows)]
    layers = [module.query, module.key if keys else None, module.value]
    return [linear_cut(layer, rows=rows) for layer, rows in zip(layers, parts, strict=True) if layer is not None]


def _positions(module: nn.Module, kept: Sequence[int]) -> Cut:
    """The cut of a module's own positions: the entries of each head."""
    if isinstance(module, T5Bias):
        return Cut([WeightSlice(module, "table", 1, tuple(kept))], [Change(module, "heads", len(kept))])
    if isinstance(module, AlibiBias):
        beginnings = tuple(module.beginnings[head] for head in kept)
        changes = [Change(module, "heads", len(kept)), Change(module, "beginnings", beginnings)]
        return Cut([WeightSlice(module, "slopes", 0, tuple(kept))], changes)
    return Cut([], [])  # rotary: every head turns alike


def _gated(module: Any, kept: Sequence[int], groups: Sequence[int]) -> Cut:
    rows = head_rows(kept, module.gate.out_features // module.heads)
    return joined([linear_cut(module.gate, rows=rows), Cut([], [Change(module, "heads", len(kept))])])


def _gated_delta(module: Any, kept: Sequence[int], groups: Sequence[int]) -> Cut:
    gates = [linear_cut(gate, rows=groups) for gate in (module.beta, module.alpha) if gate is not None]
    rate = [] if module.log_rate is None else [WeightSlice(module, "log_rate", 0, tuple(groups))]
    return joined([*gates, Cut(rate, [])])


def _longformer(module: Any, kept: Sequence[int], groups: Sequence[int]) -> Cut:
    if isinstance(module.config.dilation, tuple):
        raise ValueError("the mechanism 'longformer' has a dilation for each head, which its configuration numbers")
    sizes = module.heads
    return joined(
        [
            linear_cut(module.global_query, rows=head_rows(kept, sizes.head)),
            linear_cut(module.global_key, rows=head_rows(groups, sizes.head)),
            linear_cut(module.global_value, rows=head_rows(groups, sizes.value_head)),
            Cut([], [Change(module, "heads", sizes._replace(heads=len(kept), kv_heads=len(groups)))]),
        ]
    )


def _linformer(module: Any, kept: Sequence[int], groups: Sequence[int]) -> Cut:
    held = [name for name, parameter in module.named_parameters() if len(parameter) > 1]
    return Cut([WeightSlice(module, name, 0, tuple(groups)) for name in held], [])


def _nystrom(module: Any, kept: Sequence[int], groups: Sequence[int]) -> Cut:
    return Cut([] if module.convolution is None else [WeightSlice(module, "convolution", 0, tuple(kept))], [])


def _nothing(module: Any, kept: Sequence[int], groups: Sequence[int]) -> Cut:
    """Positions that are the same for all heads need no cut."""
    return Cut([], [])


_MECHANISMS: dict[type[Mechanism], Callable[[Any, Sequence[int], Sequence[int]], Cut]] = {
    BlockTopKAttention: _nothing,
    DifferentialAttention: _nothing,
    GatedAttention: _gated,
    GatedDeltaRule: _gated_delta,
    LinearAttention: _nothing,
    LinformerAttention: _linformer,
    LongformerAttention: _longformer,
    NystromAttention: _nystrom,
    SigmoidAttention: _nothing,
}


def _mechanism(module: Mechanism, kept: Sequence[int], groups: Sequence[int]) -> Cut:
    cut = _MECHANISMS.get(type(module))
    if cut is None:
        raise ValueError(
            f"the mechanism {type(module).__name__} draws random numbers for all heads together, so removing some "
            "heads would change the others"
        )
    return cut(module, kept, groups)
