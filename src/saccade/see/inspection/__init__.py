"""Looking at one text through a model: weights on words, what each head is for, and sentences about the findings.

Begin with `_look.py`, then `_collect.py` (weights) and `_findings.py` (sentences). Imports the operator, `models` and
`_hooks`.
"""

from __future__ import annotations

from ...support._numbers import hundredths, short_number
from ._collect import AttentionMap, collect, words_that_fit
from ._findings import MapFinding, find, name_of
from ._look import Look, look
from ._models import TextModel, Tokens, weights_of
from ._open import open_model
from ._predicting import Predictor, as_predictor
from ._published import as_text_model
from ._roles import ROLE_NAMES, RULES, measure_roles, role_of
from ._scores import here, telling
from ._steps import SWITCHES, Step, Steps, example, step_of_call, step_of_target_token, step_of_tokens, steps_of
from ._targets import Target, read_target, token_labels, token_names
from ._words import START, Word, group, split_words

__all__ = [
    "ROLE_NAMES",
    "RULES",
    "START",
    "SWITCHES",
    "AttentionMap",
    "Look",
    "MapFinding",
    "Predictor",
    "Step",
    "Steps",
    "Target",
    "TextModel",
    "Tokens",
    "Word",
    "as_predictor",
    "as_text_model",
    "collect",
    "example",
    "find",
    "group",
    "here",
    "hundredths",
    "look",
    "measure_roles",
    "name_of",
    "open_model",
    "read_target",
    "role_of",
    "short_number",
    "split_words",
    "step_of_call",
    "step_of_target_token",
    "step_of_tokens",
    "steps_of",
    "telling",
    "token_labels",
    "token_names",
    "weights_of",
    "words_that_fit",
]
