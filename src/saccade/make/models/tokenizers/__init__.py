"""Tokenizers: published ones, SentencePiece, proteins, and tokenizers trained by Saccade.

Begin with `text.py`. Imports `checkpoints`.
"""
