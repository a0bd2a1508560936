"""Many runs of one task with other settings, the best of them kept. Begin with `_search.py`.

Imports `_runs`.
"""
