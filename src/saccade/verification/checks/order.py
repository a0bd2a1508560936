from __future__ import annotations

from collections.abc import Iterator

from .._finding import Check, Finding, Inapplicable
from .._subject import Subject


def _run(subject: Subject) -> Iterator[Finding]:
    raise Inapplicable("not written")
    yield


CHECK = Check("order", "order", "", "", "", _run)
