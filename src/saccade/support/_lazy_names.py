"""Public names of a package that are imported when they are first used, and old names that still work."""

from __future__ import annotations

from collections.abc import Callable, Mapping

TYPE_CHECKING = False  # not from `typing`, which the command does without
if TYPE_CHECKING:
    from typing import Any, TypeVar

    F = TypeVar("F", bound=Callable[..., Any])


def lazy_names(
    package: str, homes: Mapping[str, str], renamed: Mapping[str, str] | None = None
) -> Callable[[str], object]:
    """A `__getattr__` for the package.

    Args:
        package: its `__name__`.
        homes: names by the modules, within it, that have them: importing the package stays quick.
        renamed: new names by the old ones, whose use raises a `DeprecationWarning`.
    """

    def get(name: str) -> object:
        import sys
        from importlib import import_module

        if renamed and name in renamed:
            return _renamed(sys.modules[package], name, renamed[name])
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(f".{homes[name]}", package), name)
        setattr(sys.modules[package], name, found)
        return found

    return get


def _renamed(package: object, old: str, new: str) -> object:
    import warnings

    warnings.warn(f"{old} is {new} now; the old name goes in 0.4", DeprecationWarning, stacklevel=3)
    return getattr(package, new)


def renamed_arguments(**names: str) -> Callable[[F], F]:
    """Marks a function whose arguments have new names, by the old ones, which raise a `DeprecationWarning`."""
    import functools

    def mark(function: F) -> F:
        @functools.wraps(function)
        def with_old_names(*args: Any, **given: Any) -> Any:
            import warnings

            for old in names.keys() & given.keys():
                text = f"the argument {old} is {names[old]} now; the old name goes in 0.4"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                given[names[old]] = given.pop(old)
            return function(*args, **given)

        return with_old_names  # type: ignore[return-value]

    return mark
