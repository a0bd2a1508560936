"""Shared parts of tasks on texts, and the data, baselines and pictures of each task. Begin with `_text_task.py`.

Imports what a task is, and no other room.
"""
