"""Public addresses that leave out the wing: `saccade.inspection` is the package `saccade.see.inspection`.

The stubs beside `saccade/__init__.py`, such as `inspection.pyi`, give type checkers the same names.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False  # not from `typing`, which `import saccade` does without
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType


class AddressFinder:
    """Finds modules under their address: `saccade.nn.attention` gives the module `saccade.operator.nn.attention`.

    There is one module object, so a class is the same by both names. It stands before Python's own finders, which would
    take a folder of stubs for a package.

    Args:
        package: the name of the package that has the wings.
        wings: the wing of each room, by the name of the room.
    """

    def __init__(self, package: str, wings: Mapping[str, str]) -> None:
        self._prefix = f"{package}."
        self._wings = wings
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(self._prefix):
            return None
        room = name[len(self._prefix) :].partition(".")[0]
        return ModuleSpec(name, self) if room in self._wings else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        room = spec.name[len(self._prefix) :]
        module = import_module(f"{self._prefix}{self._wings[room.partition('.')[0]]}.{room}")
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own specification back: the import system has replaced it by that of the address."""
        address = module.__spec__.name  # type: ignore[union-attr]
        module.__spec__ = self._specs.pop(address)


def install(package: str, wings: Mapping[str, str]) -> None:
    """Make the parts of `package` importable by their public addresses."""
    sys.meta_path.insert(0, AddressFinder(package, wings))
