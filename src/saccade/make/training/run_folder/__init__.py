"""The folder of a run: its files, lock, checkpoints and scalar log; writing it during a run, and resuming from it.

Begin with `layout.py`. Imports `models`, `monitoring` and the trainer beside it.
"""
