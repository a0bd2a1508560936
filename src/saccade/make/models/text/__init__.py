"""Text and proteins as tokens: what the encoders, decoders and encoder-decoders of the families have in common.

Begin with `encoder.py`. Imports `decoding`, `tokenizers` and what all models have in common.
"""
