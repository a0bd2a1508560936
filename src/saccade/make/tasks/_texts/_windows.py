"""Long texts in parts: overlapping windows, and which of them sees a token best."""

from __future__ import annotations

import math
from collections.abc import Sequence


def windows(count: int, room: int) -> list[range]:
    """Parts of `count` tokens, each of at most `room`.

        room = 4:   0 1 2 3 4 5 6
                    -------
                        -------
                          -------

    A window begins half a window after the one before; the last one ends with the text.
    """
    if count <= room:
        return [range(count)]
    starts = [*range(0, count - room, max(room // 2, 1)), count - room]
    return [range(start, start + room) for start in starts]


def innermost(place: int, parts: Sequence[range], count: int) -> int:
    """The number of the window in which a token stands furthest from where the text is cut; of equal ones the first.

    The text's own beginning and end cut nothing.
    """

    def depth(part: range) -> float:
        before = place - part.start if part.start else math.inf
        after = part.stop - 1 - place if part.stop < count else math.inf
        return min(before, after) if place in part else -1.0

    return max(range(len(parts)), key=lambda n: depth(parts[n]))
