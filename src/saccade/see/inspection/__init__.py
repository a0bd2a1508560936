"""One text seen through a model: weights between words, roles of heads, and sentences about the findings.

Begin with `_look.py`, then `_collect.py` (weights) and `_findings.py` (sentences). Imports the operator, `models` and
`_hooks`.
"""

from __future__ import annotations

from ...make.models.checkpoints.kept_roles import ROLE_NAMES
from ...support._numbers import hundredths as hundredths, short_number as short_number
from ._collect import AttentionMap, collect, words_that_fit as words_that_fit
from ._findings import MapFinding as MapFinding, find, name_of as name_of
from ._look import Look, look
from ._models import TextModel as TextModel, Tokens as Tokens, weights_of
from ._open import open_model
from ._predicting import Predictor as Predictor, as_predictor as as_predictor
from ._published import as_text_model as as_text_model
from ._roles import RULES, measure_roles as measure_roles, role_of as role_of
from ._scores import here as here, telling as telling
from ._steps import (
    SWITCHES as SWITCHES,
    Step as Step,
    Steps,
    example,
    step_of_call as step_of_call,
    step_of_target_token as step_of_target_token,
    step_of_tokens as step_of_tokens,
    steps_of as steps_of,
)
from ._targets import (
    Target as Target,
    read_target as read_target,
    token_labels as token_labels,
    token_names as token_names,
)
from ._words import START as START, Word as Word, group as group, split_words as split_words

__all__ = [
    "ROLE_NAMES",
    "RULES",
    "AttentionMap",
    "Look",
    "Steps",
    "collect",
    "example",
    "find",
    "look",
    "open_model",
    "weights_of",
]
