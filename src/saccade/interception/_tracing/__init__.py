"""Follows tensors through the PyTorch functions of a call; shared by monitoring and verification.

`FunctionMode` sees each function, `TensorLabels` keeps what is known of tensors, and `EinsumSpec` is the one form of a
product of two tensors. What a label means, and how it goes from one tensor to the next, each user says itself. Begin
with `_mode.py`. Imports nothing of Saccade.
"""

from ._labels import TensorLabels, memory_of
from ._mode import SDPA, FunctionCall, FunctionMode, is_kernel, name_of, overridden, tensors_in, writes
from ._products import EinsumSpec, ProductLayout, View, laid_out, outer, spelled

__all__ = [
    "SDPA",
    "EinsumSpec",
    "FunctionCall",
    "FunctionMode",
    "ProductLayout",
    "TensorLabels",
    "View",
    "is_kernel",
    "laid_out",
    "memory_of",
    "name_of",
    "outer",
    "overridden",
    "spelled",
    "tensors_in",
    "writes",
]
