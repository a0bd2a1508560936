"""The ways to compute one call. Each has `refuses(call) -> str | None`, `run(call) -> (out, lse)` and `costs(call)`.

Begin with `chunked.py`, which is plain PyTorch; then `native/`, the
compiled kernels. Imports the call, the tile walk and what they are made of, never the specification `_reference`.
"""
