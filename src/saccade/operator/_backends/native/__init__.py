"""Saccade's own kernels for CPUs, as a backend. Begin with `_run.py`.

`_lowering.py` makes of a mask what the kernels read; `_kernels.py` loads them and hands them the addresses of
tensors; `_operator.py` is the same call for compilers; `_statistics.py` asks for numbers about weights. Imports the
call, the tile walk and `chunked`, which has the derivatives that the kernels lack.
"""

from ._int8_rows import attend_rows, fast_rows, rounded_rows, streams_rows
from ._run import attend, costs, fast_forward, lowered, refuses, run

__all__ = [
    "attend",
    "attend_rows",
    "costs",
    "fast_forward",
    "fast_rows",
    "lowered",
    "refuses",
    "rounded_rows",
    "run",
    "streams_rows",
]
