"""Masks: small values that say which keys a query may attend to. They compose with & | ~.

Begin with `_mask.py`, the class that all are, and `_relative.py`, the commonest. Imports nothing of Saccade; its files
may import each other, since masks are made of masks.
"""

from __future__ import annotations

from ._arbitrary import FromTensor, as_mask as as_mask
from ._blocks import Blocks, RandomBlocks
from ._documents import Documents
from ._heads import PerHead
from ._mask import Mask, Tile, mask_classes as mask_classes
from ._padding import Padding
from ._predicate import Predicate
from ._relative import Causal, Fixed, Prefix, Strided, Window
from ._residues import Chunks, Columns, Dilated
from ._sparse import Edges, Global
from ._visible_keys import empty_rows as empty_rows, keys_seen as keys_seen

__all__ = [
    "Blocks",
    "Causal",
    "Chunks",
    "Columns",
    "Dilated",
    "Documents",
    "Edges",
    "Fixed",
    "FromTensor",
    "Global",
    "Mask",
    "Padding",
    "PerHead",
    "Predicate",
    "Prefix",
    "RandomBlocks",
    "Strided",
    "Tile",
    "Window",
]
