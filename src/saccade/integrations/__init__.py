"""Saccade inside other frameworks: Hugging Face transformers (`transformers`, `trainer`), Lightning (`lightning`).

Each is a leaf: nothing imports it. They import the operator, `_hooks` and `monitoring`. `_verification` has what
`saccade.verify` knows of models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import lightning as lightning, trainer as trainer, transformers as transformers
else:

    def __getattr__(name: str) -> object:
        """Import an integration when it is used: each needs a framework that may not be installed."""
        if name in ("lightning", "trainer", "transformers"):
            from importlib import import_module

            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
