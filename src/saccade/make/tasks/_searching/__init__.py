"""Runs of one task with different settings, of which the best is kept. Begin with `_search.py`.

Imports `_runs`.
"""
