"""`DecoderLM`, the language model of `saccade train lm`: configuration, module and checkpoint folder.

Begin with `language_model.py`. Imports `decoding`, `tokenizers` and the files shared by all models.
"""
