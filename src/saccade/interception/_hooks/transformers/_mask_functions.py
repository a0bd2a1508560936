"""Mask functions of transformers, read as Saccade masks instead of being called for every pair of a query and a key.

transformers describes a mask by nested closures `f(b, h, q, k) -> bool` over absolute positions; they are known by the
code they run (transformers.masking_utils) and their meaning is in the variables they close over.

Shape legend: B batch, Lq / Lk lengths. Absolute positions: query row i stands at `i + start_q`, key j at `j + start_k`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, reduce
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....operator._masks import Causal, Documents, Mask, Padding, Window


class UnknownMaskFunction(Exception):
    """Raised for a mask function that is not known here."""


class MaskFrame(NamedTuple):
    """The query rows and keys of a mask, in absolute positions."""

    length_q: int
    length_k: int
    start_q: int
    start_k: int

    @property
    def offset(self) -> int:
        """The offset of query rows: row i is at key index i + offset."""
        return self.start_q - self.start_k

    def keys_of(self, table: Tensor) -> Tensor:
        """Select the columns (B, Lk) of this frame's keys from a table (B, L) over absolute positions."""
        if table.dim() != 2 or self.start_k + self.length_k > table.shape[1]:
            raise UnknownMaskFunction
        return table[:, self.start_k : self.start_k + self.length_k]


Read = Mask | None  # None: every query sees every key


def read(function: Any, frame: MaskFrame) -> Read:
    """The mask of a mask function, before its queries are placed at `frame.offset`.

    Raises:
        Unreadable: a function that is not of transformers' own making, or a use of one that has no compact form.
    """
    if not 0 <= frame.offset <= frame.length_k - frame.length_q:
        raise UnknownMaskFunction  # ids of documents, for one, would be asked for positions they do not have
    known = _readers()
    reader = known.get(getattr(function, "__code__", None))
    if reader is None:
        raise UnknownMaskFunction
    return reader(_closure(function), frame)


def of_block_mask(mask_mod: Any, length_q: int, length_k: int) -> Read:
    """The mask of a FlexAttention `mask_mod` of transformers, which adds offsets around one of its mask functions."""
    from transformers import masking_utils

    if getattr(mask_mod, "__code__", None) is not _inner(masking_utils, "add_offsets_to_mask_function"):
        raise UnknownMaskFunction
    held = _closure(mask_mod)
    frame = MaskFrame(length_q, length_k, int(held["q_offset"]), int(held["kv_offset"]))
    return placed(read(held["mask_function"], frame), frame)


def placed(mask: Read, frame: MaskFrame) -> Read:
    """The mask with its queries placed at the frame's offset."""
    if mask is None or mask.placement() is None or frame.offset == frame.length_k - frame.length_q:
        return mask
    return mask.at(frame.offset)


def _closure(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


@cache
def _readers() -> dict[CodeType | None, Callable[[dict[str, Any], MaskFrame], Read]]:
    from transformers import masking_utils

    factories: dict[str, Callable[[dict[str, Any], MaskFrame], Read]] = {
        "and_masks": _and,
        "or_masks": _or,
        "sliding_window_overlay": lambda held, frame: _window(held["sliding_window"] - 1, None, frame),
        "sliding_window_bidirectional_overlay": lambda held, frame: _window(
            held["sliding_window"], held["sliding_window"], frame
        ),
        "chunked_overlay": _chunks,
        "blockwise_overlay": _blocks,
        "padding_mask_function": lambda held, frame: _padding(held["padding_mask"], frame),
    }
    readers = {_inner(masking_utils, name): reader for name, reader in factories.items()}
    readers[masking_utils.causal_mask_function.__code__] = lambda held, frame: _causal(frame)
    readers[masking_utils.bidirectional_mask_function.__code__] = lambda held, frame: None
    readers.pop(None, None)
    return readers


@cache
def _inner(masking_utils: Any, factory: str) -> CodeType | None:
    """The code object of the function that a factory returns; None if this version has no such factory."""
    code = getattr(getattr(masking_utils, factory, None), "__code__", None)
    constants = () if code is None else code.co_consts
    codes = [const for const in constants if isinstance(const, CodeType)]
    inside = [const for const in codes if not const.co_name.startswith("<")]  # and no generator expression
    return inside[0] if len(inside) == 1 else None


def _causal(frame: MaskFrame) -> Read:
    return None if frame.offset >= frame.length_k - 1 else Causal()


def _window(left: int, right: int | None, frame: MaskFrame) -> Read:
    if not isinstance(left, int) or left < 0:
        raise UnknownMaskFunction
    wide = left >= frame.offset + frame.length_q - 1 and (right is None or right >= frame.length_k - 1 - frame.offset)
    return None if wide else Window(left, right)


def _chunks(held: dict[str, Any], frame: MaskFrame) -> Read:
    padding = held["left_padding"]
    positions = torch.arange(frame.length_k, device=padding.device) + frame.start_k
    return _documents((positions[None] - padding[:, None]) // held["chunk_size"])


def _blocks(held: dict[str, Any], frame: MaskFrame) -> Read:
    ids = frame.keys_of(held["block_sequence_ids"])
    return Documents(ids) & Padding(ids >= 0)


def _documents(ids: Tensor) -> Read:
    return None if bool((ids == ids[:, :1]).all()) else Documents(ids)


def _padding(kept: Tensor, frame: MaskFrame) -> Read:
    kept = frame.keys_of(kept).bool()
    return None if bool(kept.all()) else Padding(kept)


def _and(held: dict[str, Any], frame: MaskFrame) -> Read:
    parts = held["mask_functions"]
    packed = _packed(parts, frame)
    if packed is not None:
        return packed
    return joined(*(read(part, frame) for part in parts))


def joined(*masks: Read) -> Read:
    """The intersection of the masks."""
    kept = [mask for mask in masks if mask is not None]
    return reduce(operator.and_, kept) if kept else None


def _or(held: dict[str, Any], frame: MaskFrame) -> Read:
    parts = [read(part, frame) for part in held["mask_functions"]]
    return None if None in parts else reduce(operator.or_, parts)


def _packed(parts: tuple[Any, ...], frame: MaskFrame) -> Read:
    """The mask of sequences packed into one row: within each document, a mask on positions that restart at 0.

    Positions within a document rise by one, so that what depends on distances alone (causal, windows) means the same
    with the row's own positions.
    """
    from transformers import masking_utils

    wanted = [
        _inner(masking_utils, f"{n}") for n in ("packed_sequence_mask_function", "remap_positions_for_packed_sequence")
    ]
    if [getattr(part, "__code__", None) for part in parts] != wanted:
        return None
    ids, remapped = _closure(parts[0])["packed_sequence_mask"], _closure(parts[1])
    positions = remapped["position_ids"]
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    inside = read(remapped["mask_function"], frame)
    if not torch.equal((steps != 1).cumsum(-1), ids) or not _by_distance(inside):
        raise UnknownMaskFunction
    return joined(inside, Documents(frame.keys_of(ids)))


def _by_distance(mask: Read) -> bool:
    if mask is None or isinstance(mask, Causal | Window):
        return True
    return (
        bool(mask._children()) and type(mask).__name__ == "And" and all(_by_distance(part) for part in mask._children())
    )
