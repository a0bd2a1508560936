"""The reference of names: a page for each public package, in which mkdocstrings puts signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect

import repository  # noqa: F401  for the next line's path
from public import PUBLIC, homes, names

_ABOUT = """Each public name: its signature, arguments, shapes and errors, and an example that the tests run. A name
that `saccade` itself exports is on the page of `saccade`."""


def pages() -> dict[str, str]:
    """Markdown by its place on the site."""
    home = homes()
    return {"reference/README.md": _overview(home), **{place(package): _page(package, home) for package in PUBLIC}}


def place(package: str) -> str:
    return f"reference/{package}.md"


def _overview(home: dict[tuple[str, str], str]) -> str:
    parts = ["# Public names", _ABOUT]
    for package in PUBLIC:
        links = ", ".join(f"[`{name}`][{home[package, name]}.{name}]" for name in names(package))
        parts.append(f"## [{package}]({package}.md)\n\n{_purpose(package)}\n\n{links}")
    return "\n\n".join(parts) + "\n"


def _page(package: str, home: dict[tuple[str, str], str]) -> str:
    parts = [f"# {package}", _purpose(package)]
    elsewhere = [name for name in names(package) if home[package, name] != package]
    if elsewhere:
        links = ", ".join(f"[`{home[package, name]}.{name}`][{home[package, name]}.{name}]" for name in elsewhere)
        parts.append(f"Also here, and described there: {links}.")
    parts += [f"::: {package}.{name}" for name in names(package) if name not in elsewhere]
    return "\n\n".join(parts) + "\n"


def _purpose(package: str) -> str:
    """The first paragraph of the package's docstring."""
    return (inspect.getdoc(importlib.import_module(package)) or "").partition("\n\n")[0]
