"""A smaller model from a run: taught by it, or without some of its heads. Begin with `_distill.py` and `_prune.py`.

Imports `_runs`.
"""
