"""Graph models: checked batches of graphs, attention along edges, pair biases, and output heads.

Begin with `structure.py`. Imports the files shared by all models.
"""
