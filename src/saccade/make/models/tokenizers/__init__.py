"""Tokenizers: published ones, SentencePiece, proteins, and those trained by Saccade.

Begin with `text.py`. Imports `checkpoints`.
"""
