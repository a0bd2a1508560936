"""Published checkpoints: a folder's settings and weights, and how published names become ours.

Begin with `keys.py`. Imports nothing of Saccade but how files are written.
"""
