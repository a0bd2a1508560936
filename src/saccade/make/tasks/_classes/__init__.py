"""Shared parts of tasks with classes: loss, class weights, metrics, confusions. Begin with `_class_task.py`.

Imports what a task is (`.._task`, `.._example_task`).
"""
