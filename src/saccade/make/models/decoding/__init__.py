"""Writing tokens after tokens: one step of a model, how the next token is chosen, and the loop around both.

Begin with `step.py`. Imports `nn` and what models have in common, no family.
"""
