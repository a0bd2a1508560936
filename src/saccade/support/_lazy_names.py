"""Public names of a package that are imported when they are first used, so that importing the package stays quick."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A `__getattr__` for the package: names by the modules, within it, that have them."""

    def get(name: str) -> object:
        import sys
        from importlib import import_module

        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(f".{homes[name]}", package), name)
        setattr(sys.modules[package], name, found)
        return found

    return get
