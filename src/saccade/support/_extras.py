"""The command that installs the packages of an extra of Saccade, for error messages."""

from __future__ import annotations

import importlib.metadata
import re


class NotInstalled(ModuleNotFoundError):
    """An optional dependency is missing. The message says what needs it, and the command that installs it."""

    def __init__(self, needing: str, module: str, extra: str):
        super().__init__(f"{needing} needs {module}, which is not installed: {installing(extra)}", name=module)


def installing(extra: str) -> str:
    """The packages of an extra by their names: the command works in any folder and compiles no kernels again.

    Where Saccade is not installed but only on the path, the extra is installed from the sources.
    """
    packages = _packages(extra)
    if not packages:
        return f'pip install -c constraints.txt ".[{extra}]" in the folder of Saccade'
    return " ".join(["pip install", *(f'"{package}"' for package in packages)])


def _packages(extra: str) -> list[str]:
    """The requirements of an extra, with those of extras that it names."""
    try:
        requirements = importlib.metadata.requires("saccade") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found: dict[str, None] = {}
    for line in requirements:
        package, _, marker = (part.strip() for part in line.partition(";"))
        if not re.search(rf"""\bextra == ["']{re.escape(extra)}["']""", marker):
            continue
        inner = re.match(r"saccade\[([^]]+)\]", package)
        more = [one for name in inner[1].split(",") for one in _packages(name)] if inner else [package]
        found.update(dict.fromkeys(more))
    return list(found)
