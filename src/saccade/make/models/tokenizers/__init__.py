"""Text to tokens and back: published tokenizers, SentencePiece, proteins, and those that Saccade trains.

Begin with `text.py`. Imports `checkpoints`.
"""
