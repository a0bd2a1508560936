"""Following tensors through the PyTorch functions of one call: what monitoring and verification share.

`FunctionMode` sees each function, `TensorLabels` keeps what is known of tensors, and `ProductSpec` is the one form of a
product of two tensors. What a label means, and how it goes from one tensor to the next, each user says itself. Begin
with `_mode.py`. Imports nothing of Saccade.
"""

from ._functions import is_kernel, name_of, tensors_in, writes
from ._labels import TensorLabels, memory_of
from ._mode import SDPA, FunctionCall, FunctionMode, overridden

__all__ = [
    "SDPA",
    "FunctionCall",
    "FunctionMode",
    "TensorLabels",
    "is_kernel",
    "memory_of",
    "name_of",
    "overridden",
    "tensors_in",
    "writes",
]
