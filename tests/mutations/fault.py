"""What a planted fault is."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One fault: `old` occurs exactly once in the file `path`, and becomes `new`.

    `tests` are run one after another until one fails: paths, or `path::name`. `wrong` says what goes wrong then.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    wrong: str

    @property
    def native(self) -> bool:
        """Whether the compiled module has to be built again."""
        return self.path.startswith("native/")
