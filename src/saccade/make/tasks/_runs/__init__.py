"""A task's run: request, training, test, predictions, seeds. Begin with `_request.py`, then `_prepared.py`.

Imports every task, by `_registry.py`.
"""
