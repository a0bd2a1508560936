"""Benchmarks of speed, memory and accuracy: `attention` for `saccade bench`, `variants` and `tasks` for `saccade
compare`.

Begin with `attention/cases.py`, `variants/measuring.py`, `tasks/running.py`. Imports the measured packages.
"""

from __future__ import annotations

_PARTS = ("attention", "tasks", "variants")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import attention as attention, tasks as tasks, variants as variants
else:

    def __getattr__(name: str) -> object:
        """Import a sub-package when it is first used: `saccade.benchmark.attention` needs no import statement."""
        if name in _PARTS:
            from importlib import import_module

            return import_module(f".{name}", __name__)
        import sys

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
