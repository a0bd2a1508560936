"""What was observed, whether it is being watched or was read from a file, as it is printed and stored."""

from __future__ import annotations

from pathlib import Path

from . import _tables
from ._file import read, write
from ._observed import CallObservations


class Observations(CallObservations):
    """Statistics of a model's attention calls by call and head, the calls that were kept, and what was not seen.

    Printed, it is a summary; in a notebook a table. See `CallObservations` for its attributes.
    """

    def save(self, path: str | Path) -> dict[str, str]:
        """Write everything into one safetensors file, whole or not at all; `saccade.monitoring.load` reads it.

        Returns:
            What could not be stored, and why: kept calls with a mask or bias that is a function, and large.
        """
        return write(self, path)

    def grid(self, statistic: str = "entropy") -> str:
        """The mean of one statistic as text (in a notebook a table): a line for each call, a column for each head.

        Raises:
            ValueError: no such statistic was observed; the message names those that were.
        """
        return _tables.grid(self, statistic)

    def __str__(self) -> str:
        return _tables.text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _tables.html(self)


def load(path: str | Path) -> Observations:
    """What `Observations.save` wrote, on the CPU: `table`, `weights`, `print`, ... work as they did.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, not of this format, or of a later version; the message names the file.
    """
    seen = Observations()
    read(Path(path), seen)
    return seen
