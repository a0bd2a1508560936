"""Text generation: one decoding step, constraints, sampling, beam search, and the loops around them.

Begin with `step.py`. Imports `nn` and the files shared by all models, no family.
"""
