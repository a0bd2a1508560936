"""Smaller models from a run: distilled, or with heads removed. Begin with `_distill.py` and `_prune.py`.

Imports `_runs`.
"""
