"""A promise of a stack, and the probe that tests it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ...support._numbers import rounded
from ..findings._finding import Finding, Location
from ._bounds import Difference, Measure
from ._documents import Documents
from ._stack import Stack


@dataclass(frozen=True)
class Probe:
    """A promise of a stack. `run` yields findings, none if it is kept, and raises `Inapplicable` if it cannot be
    tested. `rounds`: whether it compares outputs that differ by rounding."""

    name: str
    promise: str
    run: Callable[[Stack, Measure], Iterable[Finding]]
    rounds: bool = True

    @property
    def family(self) -> str:
        """Its name: findings of checks are sorted by families, of which a probe is one."""
        return self.name

    def error(
        self,
        message: str,
        effect: str,
        fix: str,
        documents: Documents,
        difference: Difference | None = None,
        *,
        where: str = "",
        location: Location | None = None,
        **evidence: Any,
    ) -> Finding:
        """An error of this probe, with the smallest documents that show it."""
        if difference is not None:
            evidence |= {
                "largest_difference": rounded(difference.size),
                "relative": rounded(difference.relative),
                "positions": list(difference.differing),
            }
        return Finding(
            self.name,
            self.name,
            "error",
            message,
            effect,
            fix,
            evidence,
            location,
            example=tuple(map(tuple, documents)),
            where=where,
        )
