"""Attention calls of Hugging Face models: their arguments in Saccade's terms, and where to intercept them.

A model asks transformers' `AttentionInterface` for its function, and calls
`function(module, query, key, value, attention_mask, scaling=, dropout=, **more)`. `meaning_of` says what that asks for,
whichever implementation was chosen; `functions_wrapped_by` puts a wrapper around every function a model is handed.
"""

from ._mask_tensor import MaskTensor, UnknownAttention
from ._meaning import meaning_of
from ._wrapping import functions_wrapped_by, masks_wrapped_by

__all__ = ["MaskTensor", "UnknownAttention", "functions_wrapped_by", "masks_wrapped_by", "meaning_of"]
