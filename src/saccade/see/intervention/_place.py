"""The edits of one block for a call, and the positions of the call's rows in their sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ...operator._call import AttentionCall
from ..monitoring import CallSite
from ._edit import CallPlace, Edit


@dataclass
class RowCounts:
    """The positions that the calls of a block have reached, by call name.

    Attributes:
        ends: one more than the last position of any call of this name.
    """

    ends: dict[str, int] = field(default_factory=dict)
    _next: dict[str, int] = field(default_factory=dict)  # next position of a text that began in the block

    def first_row(self, name: str, rows: int, keys: int) -> int:
        """The position of row 0 of the current call.

        A window cache holds fewer keys than there were tokens, so rows are counted from the call with equally many rows
        and keys, which begins a text. A cache filled outside of the block is assumed to hold all tokens.
        """
        cached = keys - rows
        first = self._next.pop(name, None) if cached else 0
        if first is None or first < cached:
            first = cached
        else:
            self._next[name] = first + rows
        self.ends[name] = max(self.ends.get(name, 0), first + rows)
        return first

    def copy(self) -> RowCounts:
        return RowCounts(self.ends.copy(), self._next.copy())


class BlockEdits(NamedTuple):
    """The edits of one block for the current call."""

    edits: tuple[Edit, ...]
    site: CallSite
    rows: RowCounts

    def placed(self, call: AttentionCall) -> list[tuple[Edit, CallPlace]]:
        """The edits with the place of the call; counts its rows, so once for each call."""
        first = self.rows.first_row(self.site.name, call.query.shape[2], call.key.shape[2])
        return [(edit, CallPlace(self.site, first)) for edit in self.edits]
