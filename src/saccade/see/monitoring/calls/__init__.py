"""Observing attention calls of a running model: calls of Saccade, of PyTorch, of transformers, and by hand.

Begin with `_calls_mode.py`. Imports nothing else of `monitoring`.
"""
