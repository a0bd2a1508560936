"""Graphs: checked batches of them, attention along their edges, biases of pairs of nodes, and heads.

Begin with `structure.py`. Imports what all models have in common.
"""
