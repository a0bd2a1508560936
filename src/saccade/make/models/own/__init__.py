"""Saccade's own language model: its shape, the decoder, and the folder that `saccade train lm` writes.

Begin with `language_model.py`. Imports `decoding`, `tokenizers` and what all models have in common.
"""
