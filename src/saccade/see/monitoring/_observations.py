"""Observations of a running model or from a file, with printing and storing."""

from __future__ import annotations

from pathlib import Path

from . import _tables
from ._file import read, write
from ._observed import CallObservations


class Observations(CallObservations):
    """Statistics of a model's attention calls by call and head, kept calls, and unobserved calls.

    `print` shows the alarms, then each call with the range over its heads and the heads with the least and greatest
    values, then unobserved calls. A notebook shows a table. See `CallObservations` for its attributes.

    Example:
        >>> import pathlib, tempfile, torch, saccade
        >>> model = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> with saccade.watch(model) as watched:
        ...     _ = model(torch.randn(2, 5, 16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "watched.safetensors")
        ...     print(watched.save(path))  # what could not be stored
        ...     seen = saccade.monitoring.load(path)
        {}
        >>> type(seen).__name__, str(seen) == str(watched)
        ('Observations', True)
    """

    def save(self, path: str | Path) -> dict[str, str]:
        """Write everything into one safetensors file, whole or not at all; `saccade.monitoring.load` reads it.

        A mask that is a function is stored as booleans, up to 64 Mi of them.

        Returns:
            What could not be stored, with the reason: kept calls with a large mask or bias that is a function.
        """
        return write(self, path)

    def grid(self, statistic: str = "entropy") -> str:
        """The mean of one statistic as text (in a notebook a table): a row for each call, a column for each head.

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
    """Read a file of `Observations.save`, onto the CPU: `table`, `weights`, `print`, ... work as before.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a damaged file, another format, or a later version; the message names the file.

    Example:
        >>> import pathlib, tempfile, torch, saccade
        >>> model = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> with saccade.watch(model, keep=True) as watched:
        ...     _ = model(torch.randn(2, 5, 16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "watched.safetensors")
        ...     _ = watched.save(path)
        ...     seen = saccade.monitoring.load(path)
        >>> [tuple(kept.query.shape) for kept in seen.kept.values()]
        [(2, 4, 5, 4)]
    """
    observations = Observations()
    read(Path(path), observations)
    return observations
