"""A graph and its nodes: files, objective, baselines, picture. Begin with `_data.py`.

Imports what a task is.
"""
