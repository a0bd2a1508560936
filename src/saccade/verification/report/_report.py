"""The report: what `verify` found, as it is printed."""

from __future__ import annotations

from dataclasses import dataclass

from ..findings._results import Results
from ._html import as_fragment
from ._text import as_text, verdict


@dataclass(frozen=True, repr=False)
class Report(Results):
    """What `verify` found.

    `ok` is whether attention was put to the test and no error found; warnings and notes do not count. `str(report)`,
    and so `print`, give the table.
    """

    def __repr__(self) -> str:
        return f"<Report on {self.target}: {verdict(self)}>"

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_fragment(self)
