"""What the parts of a model are for: logits as sums over heads, feed-forward layers and embeddings.

Begin with `_steps.py`, the mathematics, then `_residual.py`. Imports `inspection`, `models` and `nn`. Names are
imported when they are first used, as those of `saccade` are.
"""

from __future__ import annotations

__all__ = ["Attribution", "Component", "WhyAttends", "attribute", "why_attends"]

_HOMES = {
    "Attribution": "_logits",
    "Component": "_components",
    "WhyAttends": "_why",
    "attribute": "_questions",
    "why_attends": "_questions",
}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._components import Component
    from ._logits import Attribution
    from ._questions import attribute, why_attends
    from ._why import WhyAttends
else:

    def __getattr__(name: str) -> object:
        """A public name, imported now and kept."""
        from importlib import import_module

        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
