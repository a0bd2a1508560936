"""The numbers behind the pictures: any tile, row or column of any map, exact, without storing anything of Lq x Lk.

Queries and keys are kept; a tile is two slices and one product. Begin with `_run.py`, then `_head.py` (one head's map).
Imports `inspection`, `monitoring` and the operator.
"""

from __future__ import annotations

from ._budget import KeptTensors
from ._call import MapCall
from ._head import SIDE, HeadPyramid, MapTile, Pool, What
from ._lse import MapClosed
from ._overview import THUMBNAIL, HeadSummary
from ._reading import ReadPair, read_continued, read_pair, read_text
from ._run import Cell, Links, Run, from_watch
from ._side import Side, SideWord

__all__ = [
    "SIDE",
    "THUMBNAIL",
    "Cell",
    "HeadPyramid",
    "HeadSummary",
    "KeptTensors",
    "Links",
    "MapCall",
    "MapClosed",
    "MapTile",
    "Pool",
    "ReadPair",
    "Run",
    "Side",
    "SideWord",
    "What",
    "from_watch",
    "read_continued",
    "read_pair",
    "read_text",
]
