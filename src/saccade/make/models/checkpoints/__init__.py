"""Reading published checkpoints: settings, weights, tokenizer files, and the maps from published to Saccade's names.

Begin with `keys.py`. Imports no other part of `models`.
"""
