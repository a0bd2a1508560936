"""Whole stacks as they run: model, collator, packing, cache, training step.

Begin with `_verify_stack.py` beside this folder. `_opened.py` makes one `Stack` (`_stack.py`) of what a user has;
`_bounds.py` measures its rounding; each of `probes/` changes something that must not matter and compares; `_shrink.py`
finds the smallest input that shows a difference.
"""
