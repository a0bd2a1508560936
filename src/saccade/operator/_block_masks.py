"""A BlockMask of torch.nn.attention.flex_attention as one of Saccade's masks.

    visible(b, h, i, j) = full[block of i, j]  or  listed[block of i, j] and mask_mod(b, h, i, j)

as PyTorch's compiled kernels have it: they visit the blocks that are listed, and ask `mask_mod` in those that are not
full. (PyTorch's eager code asks `mask_mod` alone.) Where the blocks say nothing that `mask_mod` does not say, as those
of `create_block_mask`, the mask is that of `mask_mod`.

Shape legend: B batch, H query heads, Lq / Lk lengths, nq x nk blocks of `BLOCK_SIZE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ._derived import state
from ._mask_functions import MaskFunction
from ._masks import Blocks, Mask
from ._masks._block_table import BlockTable
from ._surroundings import describe

_AT_ONCE = 1 << 22  # pairs that are compared in one piece
Lengths = tuple[int, int]


class _Known(NamedTuple):
    """The mask of a BlockMask, and the state of all that it was made of."""

    made_of: tuple[Any, ...]
    mask: Mask | None


_KNOWN: WeakKeyDictionary[Any, dict[tuple[int, int], _Known]] = WeakKeyDictionary()


def mask_of_blocks(block_mask: Any, batch: int, heads: int, lengths: Lengths, device: torch.device) -> Mask | None:
    """The mask for queries (B, Hq, Lq, D); None if all pairs are visible. It is cached until the BlockMask changes.

    Raises:
        TypeError: not a BlockMask.
        RuntimeError: its mask_mod was lost when it was sliced, as in PyTorch.
        ValueError: lengths, numbers of batch items or heads, or a device that do not fit.
    """
    _check(block_mask, batch, heads, lengths, device)
    function = MaskFunction.of(block_mask.mask_mod, batch, heads, device)
    made_of = (
        lengths,
        tuple(block_mask.BLOCK_SIZE),
        function.value,
        *map(_state, _lists(block_mask)),
    )
    known = _KNOWN.setdefault(block_mask, {})
    entry = known.get((batch, heads))
    if entry is None or entry.made_of != made_of:
        entry = known[batch, heads] = _Known(made_of, _made(block_mask, function, lengths))
    return entry.mask


def _lists(block_mask: Any) -> tuple[Tensor | None, ...]:
    return (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )


def _state(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tuple(tensor.shape), state(tensor))


def _check(block_mask: Any, batch: int, heads: int, lengths: Lengths, device: torch.device) -> None:
    from torch.nn.attention import flex_attention as theirs

    if not isinstance(block_mask, theirs.BlockMask):
        raise TypeError(
            f"block_mask must be a BlockMask of torch.nn.attention.flex_attention or None, got {describe(block_mask)}; "
            "masks of Saccade go into saccade.attention(mask=...)"
        )
    if block_mask.mask_mod is theirs._sliced_mask_mod_error:
        raise RuntimeError(
            "block_mask: Cannot use mask_mod from a sliced BlockMask: give the slice the function of the whole one, "
            "sliced.mask_mod = whole.mask_mod (with the offset of its rows added to q_idx)"
        )
    if _is_whole(block_mask):
        return
    _check_sizes(block_mask, batch, heads, lengths)
    for name, tensor in zip(("kv_num_blocks", "kv_indices"), _lists(block_mask)[:2], strict=True):
        assert tensor is not None
        if tensor.device != device:
            raise ValueError(f"block_mask: {name} is on {tensor.device}, expected query's device {device}")


def _check_sizes(block_mask: Any, batch: int, heads: int, lengths: Lengths) -> None:
    expected = tuple(block_mask.seq_lengths)
    if expected != lengths:
        raise ValueError(
            f"block_mask was made for {expected[0]} queries and {expected[1]} keys, got {lengths[0]} and {lengths[1]}: "
            "make one with create_block_mask, or crop a larger one to its upper left corner, "
            f"block_mask._adjust({lengths[0]}, {lengths[1]})"
        )
    shape = _four(block_mask.kv_indices).shape
    for have, need, what in ((shape[0], batch, "batch items"), (shape[1], heads, "heads")):
        if have not in (1, need):
            raise ValueError(f"block_mask was made for {have} {what}, the query has {need}")
    rows = shape[2] * block_mask.BLOCK_SIZE[0]
    if rows < lengths[0]:
        raise ValueError(
            f"block_mask lists {shape[2]} rows of blocks of {block_mask.BLOCK_SIZE[0]} queries, expected enough for "
            f"{lengths[0]} queries"
        )


def _is_whole(block_mask: Any) -> bool:
    """Whether its only block is larger than any problem: PyTorch's stand-in for no blocks."""
    from torch.nn.attention import flex_attention as theirs

    return all(size == theirs._LARGE_SPARSE_BLOCK_SIZE for size in block_mask.BLOCK_SIZE)


def _made(block_mask: Any, function: MaskFunction, lengths: Lengths) -> Mask | None:
    asked = function.mask(lengths)
    if _is_whole(block_mask):
        return asked
    size = tuple(block_mask.BLOCK_SIZE)
    columns = -(-lengths[1] // size[1])
    num, indices, full_num, full_indices = _lists(block_mask)
    listed = _layout(num, indices, lengths[0], size[0], columns, "kv_indices")
    full = np.zeros_like(listed[:1, :1])
    if full_num is not None:
        full = _layout(full_num, full_indices, lengths[0], size[0], columns, "full_kv_indices")
    listed = listed & ~full
    if asked is None:
        return _of_layout(listed | full, size, lengths)
    if _adds_nothing(function, asked, listed, full, size, lengths):
        return asked
    return _composed(asked, listed, full, size, lengths)


def _layout(num: Any, indices: Any, length: int, size: int, columns: int, name: str) -> np.ndarray[Any, Any]:
    """Which blocks are listed, (B or 1, H or 1, nq, nk) booleans."""
    rows = -(-length // size)
    places = _four(indices)[:, :, :rows].cpu().numpy()
    counts = _four(num[..., None])[:, :, :rows].cpu().numpy()
    used = np.arange(places.shape[3]) < counts
    if (places[used] < 0).any():
        raise ValueError(f"block_mask: {name} has a negative index, {int(places[used].min())}")
    layout = np.zeros((*places.shape[:3], columns + 1), dtype=np.bool_)  # the last one is of what lies beyond the keys
    np.put_along_axis(layout, np.where(used, np.minimum(places, columns), columns), True, axis=3)
    return layout[..., :columns]


def _four(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (4 - tensor.dim())]


def _of_layout(layout: np.ndarray[Any, Any], size: Lengths, lengths: Lengths) -> Mask | None:
    """The mask of whole blocks; None if all blocks are visible."""
    if layout.all():
        return None
    if layout.shape[0] == 1 and size[0] == size[1] and lengths[0] == lengths[1]:
        return Blocks(layout[0] if layout.shape[1] > 1 else layout[0, 0], size[0])
    return BlockTable(layout, size)


def _composed(
    asked: Mask, listed: np.ndarray[Any, Any], full: np.ndarray[Any, Any], size: Lengths, lengths: Lengths
) -> Mask | None:
    if not full.any():
        blocks = _of_layout(listed, size, lengths)
        return asked if blocks is None else blocks & asked
    shown = _of_layout(full, size, lengths)
    if shown is None:
        return None
    if not listed.any():
        return shown
    blocks = _of_layout(listed, size, lengths)
    return shown | (asked if blocks is None else blocks & asked)


# --- whether the blocks say more than mask_mod ------------------------------------------------------------------------


def _adds_nothing(
    function: MaskFunction,
    asked: Mask,
    listed: np.ndarray[Any, Any],
    full: np.ndarray[Any, Any],
    size: Lengths,
    lengths: Lengths,
) -> bool:
    """Whether `asked` shows every pair of each full block, and no pair of each block that is not listed."""
    batch, heads = (max(pair) for pair in zip(asked._batch_and_heads(), listed.shape[:2], strict=True))
    shape = (batch, heads, *listed.shape[2:])
    wanted = np.where(np.broadcast_to(full, shape), 1, np.where(np.broadcast_to(listed, shape), -1, 0))
    sure = function.kinds(shape, size, lengths)  # 1 full, 0 empty, -1 not known
    if ((sure >= 0) & (wanted >= 0) & (sure != wanted)).any():
        return False
    unknown = np.argwhere((wanted >= 0) & (sure < 0))
    return all(_agrees(asked, part, wanted, size, lengths) for part in _parts(unknown, size))


def _parts(blocks: np.ndarray[Any, Any], size: Lengths) -> Iterator[np.ndarray[Any, Any]]:
    count = max(_AT_ONCE // (size[0] * size[1]), 1)
    return (blocks[at : at + count] for at in range(0, len(blocks), count))


def _agrees(
    asked: Mask, blocks: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], size: Lengths, lengths: Lengths
) -> bool:
    """Whether all pairs of each of these blocks (n, 4) are visible (`wanted` 1) or hidden (0)."""
    device = asked._device() or torch.device("cpu")
    item, head, down, across = (torch.from_numpy(column).to(device)[:, None, None] for column in blocks.T)
    row = down * size[0] + torch.arange(min(size[0], lengths[0]), device=device)[:, None]
    key = across * size[1] + torch.arange(min(size[1], lengths[1]), device=device)
    inside = (row < lengths[0]) & (key < lengths[1])
    row, key = row.clamp(max=lengths[0] - 1), key.clamp(max=lengths[1] - 1)
    shown = torch.from_numpy(wanted[tuple(blocks.T)] == 1).to(device)[:, None, None]
    return bool(((asked.allows(item, head, row, row, key) == shown) | ~inside).all())
