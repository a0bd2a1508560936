"""A promise of attention, and the check that tests it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..findings._finding import Finding
from ._subject import Subject


@dataclass(frozen=True)
class Check:
    """A promise of attention, and how it is tested.

    `run` yields findings. It yields none if the promise is kept, and raises `Inapplicable` if it cannot be tested.

    Example:
        >>> from saccade.verification.checks import CHECKS
        >>> check = next(check for check in CHECKS if check.name == "scale")
        >>> check.family
        'scale'
        >>> print(check.promise)
        In every head, logits are q.k over the square root of the head width.
    """

    name: str
    family: str
    promise: str  # "Logits are q.k divided by the square root of the head width"
    how: str  # how it is tested, a sentence
    why: str  # what it costs when broken, a sentence
    run: Callable[[Subject], Iterable[Finding]]
    # Errors of these families, when there, explain errors of this one: they are then told as a note of what follows.
    follows_from: tuple[str, ...] = ()
