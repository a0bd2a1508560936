"""The ways to compute one call. Each module has `refuses(call) -> str | None` and `run(call) -> (out, lse)`.

Begin with `chunked.py`, which is plain PyTorch; then `native.py`, and `_lowering.py` for how a mask reaches the
kernels. Imports the call and what it is made of, never the specification `_reference`.
"""
