"""Images and sounds: reading, changing, new models, baselines, pictures. Begin with `_media_task.py` and `_files.py`.

Imports what a task is, and `_classes`.
"""
