"""The report of `verify`, and its printed form."""

from __future__ import annotations

from dataclasses import dataclass

from ..findings._results import Results
from ._html import as_fragment
from ._text import as_text, verdict


@dataclass(frozen=True, repr=False)
class Report(Results):
    """The result of `saccade.verify`. `print(report)` shows it as a table.

    `ok` is True if attention was tested and no error was found; warnings and notes do not count.

    Example:
        >>> import torch, saccade
        >>> report = saccade.verify(torch.nn.functional.scaled_dot_product_attention, checks=["scale"], isolated=False)
        >>> report.ok, len(report.outcomes), report.errors
        (True, 1, ())
    """

    def __repr__(self) -> str:
        return f"<Report on {self.target}: {verdict(self)}>"

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_fragment(self)
