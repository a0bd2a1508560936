"""The operator and everything that builds on it alone: masks, biases, positions, batching, other forms of attention,
and modules.

Begin with `_attention.py`, which checks a call and chooses a backend.
"""
