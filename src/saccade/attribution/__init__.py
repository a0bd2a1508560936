"""What the parts of a model are for: logits as sums over heads, feed-forward layers and embeddings.

Begin with `_steps.py`, the mathematics, then `_residual.py`. Imports `inspection`, `models` and `nn`.
"""

from __future__ import annotations

from ._components import Component
from ._logits import Attribution, attribute
from ._why import WhyAttends, why_attends

__all__ = ["Attribution", "Component", "WhyAttends", "attribute", "why_attends"]
