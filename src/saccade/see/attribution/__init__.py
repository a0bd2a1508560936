"""What the parts of a model contribute: logits as sums over heads and layers, and effects of single heads.

Begin with `_traced_run.py` and `_stream.py`, which find what is added up, then `_contributions.py`. `_importance.py`
measures how much the loss depends on each head, `_patching.py` which heads carry the difference between two inputs.
Both run the model with edits of its calls (`_runs.py`) and give a number for each head (`_heads.py`). Names are
imported when they are first used, as those of `saccade` are.
"""

from __future__ import annotations

__all__ = [
    "Attribution",
    "CallHeads",
    "HeadImportance",
    "HeadValues",
    "Patching",
    "WhyAttends",
    "attribute",
    "head_importance",
    "patching",
    "why_attends",
]

_HOMES = {
    "Agreement": "_patching_result",
    "Attribution": "_logits",
    "CallHeads": "_heads",
    "Component": "_components",
    "Head": "_heads",
    "HeadImportance": "_importance_result",
    "HeadValues": "_heads",
    "Patching": "_patching_result",
    "Removal": "_importance_result",
    "WhyAttends": "_why",
    "attribute": "_questions",
    "head_importance": "_importance",
    "patching": "_patching",
    "why_attends": "_questions",
}

RENAMED = {"HeadMap": "HeadValues"}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._components import Component as Component
    from ._heads import CallHeads, Head as Head, HeadValues
    from ._importance import head_importance
    from ._importance_result import HeadImportance, Removal as Removal
    from ._logits import Attribution
    from ._patching import patching
    from ._patching_result import Agreement as Agreement, Patching
    from ._questions import attribute, why_attends
    from ._why import WhyAttends
else:
    from ...support._lazy_names import lazy_names

    __getattr__ = lazy_names(__name__, _HOMES, RENAMED)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
