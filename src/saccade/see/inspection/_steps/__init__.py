"""Attention step by step: every number of one head for one word.

Begin with `_step.py`; `_inputs.py` gets a head's inputs and `_found.py` the modules around it in any model; `_parts.py`
computes the numbers, `_scores.py` the weights, and the writers (`_before.py`, `_weighing.py`, `_after.py`) write the
sentences.
"""

from __future__ import annotations

from ._pair import step_of_target_token
from ._parts import Step
from ._result import Steps
from ._scores import SWITCHES
from ._step import example, step_of_call, step_of_tokens, steps_of

__all__ = ["SWITCHES", "Step", "Steps", "example", "step_of_call", "step_of_target_token", "step_of_tokens", "steps_of"]
