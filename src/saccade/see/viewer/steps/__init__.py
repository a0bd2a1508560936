"""Attention step by step, shown: as text in a terminal, and as an offline page with switches.

Begin with `_step.py` and `_text.py`; the page's script is `client/src/step.ts`. Imports `inspection`.
"""
