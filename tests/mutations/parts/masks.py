"""Faults in the masks."""

from __future__ import annotations

from ..fault import Fault

RELATIVE = "src/saccade/operator/_masks/_relative.py"
RESIDUES = "src/saccade/operator/_masks/_residues.py"
KINDS, MEANING = "tests/masks/test_mask_kinds.py", "tests/masks/test_mask_meaning.py"

FAULTS = (
    Fault(
        "window-left",
        RELATIVE,
        "kept = distance >= -self.left",
        "kept = distance > -self.left",
        (MEANING,),
        "A window is one key shorter on the left.",
    ),
    Fault(
        "causal-strict",
        RELATIVE,
        "return key <= position",
        "return key < position",
        (MEANING,),
        "A query does not see itself.",
    ),
    Fault(
        "window-equality",
        RELATIVE,
        '    fields = ("left", "right")\n    by_distance = True',
        '    fields = ("left",)\n    by_distance = True',
        ("tests/masks/test_mask_values.py",),
        "Windows that differ on the right are equal, so what is remembered for one is used for the other.",
    ),
    Fault(
        "prefix-length",
        RELATIVE,
        "(key < per_item(self.length, b))",
        "(key <= per_item(self.length, b))",
        (MEANING,),
        "A prefix is one key longer.",
    ),
    Fault(
        "padding-inverted",
        "src/saccade/operator/_masks/_padding.py",
        "real = self.keys.contains(b, key)",
        "real = ~self.keys.contains(b, key)",
        (MEANING,),
        "Padding is seen, and nothing else.",
    ),
    Fault(
        "band-full",
        "src/saccade/operator/_masks/_intervals.py",
        "(most is None or high <= most)",
        "(most is None or high <= most + 1)",
        (KINDS,),
        "A tile with one hidden pair counts as full.",
    ),
    Fault(
        "columns-full",
        "src/saccade/operator/_masks/_intervals.py",
        "(first >= stride - columns and first + size <= stride)",
        "first >= stride - columns",
        (KINDS,),
        "A span of keys that reaches into the next block counts as full.",
    ),
    Fault(
        "complement-kind",
        "src/saccade/operator/_masks/_intervals.py",
        'return "full" if kind == "empty" else "empty"',
        'return "empty" if kind == "empty" else "full"',
        (KINDS,),
        "The complement of a full tile counts as full.",
    ),
    Fault(
        "documents-item",
        "src/saccade/operator/_masks/_documents.py",
        "ids[b if ids.shape[0] > 1 else torch.zeros_like(b), index]",
        "ids[torch.zeros_like(b), index]",
        (MEANING,),
        "Every batch item has the documents of the first.",
    ),
    Fault(
        "documents-message",
        "src/saccade/operator/_masks/_documents.py",
        "queries and keys reach position {reached - 1}",
        "queries and keys reach position {reached}",
        ("tests/masks/test_mask_errors.py",),
        "The error names a position that is one too far.",
    ),
    Fault(
        "per-head-region",
        "src/saccade/operator/_masks/_heads.py",
        "return self.masks[region.head].region_kind(region)",
        "return self._distinct[0].region_kind(region)",
        (KINDS,),
        "The tiles of all heads are those of the first mask.",
    ),
    Fault(
        "chunks-sides",
        RESIDUES,
        "(ahead >= -self.left) & (ahead <= self.right)",
        "(ahead >= -self.right) & (ahead <= self.left)",
        (MEANING,),
        "Chunks before and after are exchanged.",
    ),
    Fault(
        "columns-count",
        RESIDUES,
        "return key % self.stride >= self.stride - self.columns",
        "return key % self.stride > self.stride - self.columns",
        (MEANING,),
        "One column fewer is kept.",
    ),
    Fault(
        "blocks-count",
        "src/saccade/operator/_masks/_blocks.py",
        "counts[:, bottom, left] + counts[:, top, left]",
        "counts[:, bottom, left] - counts[:, top, left]",
        (KINDS,),
        "Blocks of a rectangle are counted wrongly.",
    ),
    Fault(
        "slice-origin",
        "src/saccade/operator/_masks/_placement.py",
        "return row + self.rows[0], key + self.keys[0]",
        "return row, key",
        ("tests/operator/test_weight_dropout.py",),
        "Dropout of a slice draws other numbers than the whole.",
    ),
)
