"""Functions of scores: the value `Score`, and what it becomes in a call.

Begin with `_score.py`. `_binding.py` makes of it a mask, a bias that has kernels (`_terms.py`), a program
(`_program.py`), or, where it cannot be traced, the function itself (`_function.py`). The language of programs and its
tracer are in `operator/_programs/`.
"""
