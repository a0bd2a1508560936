"""A different mask for each query head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ._data import describe
from ._intervals import Kind, Region, throughout
from ._mask import Lengths, Mask, fixed_lengths
from ._program import Opcode, ProgramScope, ProgramWriter


class PerHead(Mask):
    """Mask h for query head h, for example dilations that differ by head.

    Args:
        masks: one mask per query head (not per key head). They may differ by batch item.

    Raises:
        TypeError: parts that are not masks.
        ValueError: no masks, or parts placed differently; when the mask is used, another number of query heads.

    Example:
        >>> import saccade
        >>> mask = saccade.Causal() & saccade.PerHead([saccade.Dilated(1), saccade.Dilated(2)])
        >>> mask.picture(4, 4, head=1)
        Causal() & PerHead([Dilated(1), Dilated(2)])
          0      3
        0 ██······
        1 ··██····
        2 ██··██··
        3 ··██··██
        4 queries down, 4 keys across, head 1 of 2; █ attends, · masked
    """

    fields = ("masks",)
    pairwise = True

    masks: tuple[Mask, ...]
    _distinct: tuple[Mask, ...]
    _which: tuple[int, ...]
    _fixed: Lengths | None

    def __init__(self, masks: Sequence[Mask]):
        if not isinstance(masks, list | tuple) or not all(isinstance(mask, Mask) for mask in masks):
            got = [describe(m) for m in masks] if isinstance(masks, list | tuple) else describe(masks)
            raise TypeError(f"PerHead: masks must be a list of masks, got {got}")
        if not masks:
            raise ValueError("PerHead: needs at least one mask")
        distinct = list(dict.fromkeys(masks))
        self._set(
            masks=tuple(masks),
            _distinct=tuple(distinct),
            _which=tuple(distinct.index(mask) for mask in masks),
            _fixed=fixed_lengths(distinct),
        )
        self.placement()  # refuses parts that stand in different places
        self._batch_and_heads()

    def _children(self) -> tuple[Mask, ...]:
        return self._distinct

    def _own_batch_and_heads(self) -> tuple[int, int]:
        return 1, len(self.masks)

    def _required_lengths(self) -> Lengths | None:
        return self._fixed

    def moved(self, device: torch.device | str) -> Mask:
        moved = [mask.to(device) for mask in self._distinct]
        return PerHead([moved[which] for which in self._which])

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        answers = [mask.allows(b, h, row, position, key) for mask in self._distinct]
        if len(self.masks) == 1:  # one mask stands for all heads
            return answers[0]
        along_heads = h.dim() == 4 and h.numel() == h.shape[1]
        if along_heads and all(mask._batch_and_heads()[1] == 1 for mask in self._distinct):
            order = torch.tensor(self._which, device=h.device)[h.flatten()]
            first = [answer[:, :1] for answer in answers]
            size = np.broadcast_shapes(*(answer.shape for answer in first))
            return torch.cat([answer.expand(size) for answer in first], dim=1).index_select(1, order)
        result = torch.zeros_like(h, dtype=torch.bool)
        for head, which in enumerate(self._which):
            result = result | ((h == head) & answers[which])
        return result

    def region_kind(self, region: Region) -> Kind:
        if region.head is not None:
            return self.masks[region.head].region_kind(region)
        if all(mask._batch_and_heads()[1] == 1 for mask in self._distinct):
            return throughout(mask.region_kind(region) for mask in self._distinct)
        return throughout(mask.region_kind(region._replace(head=head)) for head, mask in enumerate(self.masks))

    @property
    def sees_itself(self) -> bool:
        return all(part.sees_itself for part in self._distinct)

    @property
    def widens(self) -> bool:
        return all(part.widens for part in self._distinct)

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.HEADS, len(self._distinct), len(self._which), *self._which)
        for part in self._distinct:
            program.part(part, scope)

    def __repr__(self) -> str:
        return f"PerHead([{', '.join(map(repr, self.masks))}])"
