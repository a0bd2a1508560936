"""What a block wants changed about a call, and where the call's rows stand in their sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ...operator._call import AttentionCall
from ..monitoring import CallSite
from ._edit import CallPlace, Edit


@dataclass
class RowCounts:
    """Which positions the calls of a block have had, by call name.

    Attributes:
        ends: one more than the last position that any call of this name had.
    """

    ends: dict[str, int] = field(default_factory=dict)
    _next: dict[str, int] = field(default_factory=dict)  # of a text that began in the block

    def first_row(self, name: str, rows: int, keys: int) -> int:
        """The position of row 0 of the call that happens now.

        A cache of a window holds fewer keys than there were tokens: rows are counted from the call that had as many
        rows as keys, which begins a text. A cache that was filled outside of the block is taken to hold all tokens.
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
    """What one block wants changed about the call that happens now."""

    edits: tuple[Edit, ...]
    site: CallSite
    rows: RowCounts

    def placed(self, call: AttentionCall) -> list[tuple[Edit, CallPlace]]:
        """The edits with the place of the call, whose rows are counted. Once for each call."""
        first = self.rows.first_row(self.site.name, call.query.shape[2], call.key.shape[2])
        return [(edit, CallPlace(self.site, first)) for edit in self.edits]
