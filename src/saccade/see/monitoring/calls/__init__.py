"""Seeing the attention calls of a model that runs: told by `_tap`, made to PyTorch, made by hand, made by transformers.

Begin with `_calls_mode.py`. Imports nothing else of `monitoring`.
"""
