"""What tasks on texts share, and each one's data, baselines and pictures. Begin with `_text_task.py`.

Imports what a task is, and no other room.
"""
