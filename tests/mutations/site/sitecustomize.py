"""Loaded by every Python of a run with a planted fault: an editable installation must not import the original."""

from __future__ import annotations

import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
