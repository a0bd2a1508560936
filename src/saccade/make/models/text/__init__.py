"""Text models: the base classes of the families' encoders, decoders and encoder-decoders.

Begin with `encoder.py`. Imports `decoding`, `tokenizers` and the files shared by all models.
"""
