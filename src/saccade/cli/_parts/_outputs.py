"""Shared by measuring commands: output files checked before the work, progress bars, and time limits."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from .._errors import require

if TYPE_CHECKING:
    from ...benchmark.attention import Budget
    from ...support._terminal._console import Console

T = TypeVar("T")


class OutputOptions(Protocol):
    """Options of output files."""

    @property
    def as_json(self) -> str | None: ...
    @property
    def plot(self) -> Path | None: ...


class RoundOptions(Protocol):
    """Options of measuring time."""

    @property
    def seconds(self) -> float | None: ...
    @property
    def rounds(self) -> int | None: ...


def checked_files(output: OutputOptions, markdown: Path | None = None) -> dict[str, Path]:
    """The files to write, by kind. Checked first, so that errors come before minutes of work."""
    from ...see.viewer import check_target

    if output.plot is not None:
        require("matplotlib", "plot")
        if output.plot.suffix.lower() not in (".png", ".svg"):
            raise ValueError(f"plot: expected a file that ends in .png or .svg, got {output.plot}")
    wanted = {
        "json": None if output.as_json in (None, "-") else Path(str(output.as_json)),
        "markdown": markdown,
        "plot": output.plot,
    }
    return {kind: check_target(path, force=True) for kind, path in wanted.items() if path is not None}


def write_files(files: dict[str, Path], **made: Callable[[], str]) -> None:
    """Write the result of each function in `made` to the file of its kind, if there is one."""
    from ...see.viewer import write_whole

    for kind, make in made.items():
        if kind in files:
            write_whole(files[kind], make().encode("utf-8"))


def write_plot(files: dict[str, Path], draw: Callable[[str], bytes]) -> None:
    """Write the figure from `draw`, called with "png" or "svg", if there is a file for it."""
    from ...see.viewer import write_whole

    if "plot" in files:
        write_whole(files["plot"], draw(files["plot"].suffix.lower()[1:]))


def read_results(path: Path, from_json: Callable[[str], T]) -> T:
    """Read a file with `from_json`. ValueError names the file."""
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def budget_of(measuring: RoundOptions, *, seconds: float, rounds: int) -> Budget:
    """The budget by the options, with these defaults."""
    from ...benchmark.attention import Budget

    rounds = rounds if measuring.rounds is None else measuring.rounds
    if rounds < 1:
        raise ValueError(f"rounds: must be at least 1, got {rounds}")
    return Budget(seconds if measuring.seconds is None else measuring.seconds, rounds, max(100, rounds))


def listed(text: str, name: str, kind: Callable[[str], T]) -> list[T]:
    """Parse a comma-separated list. ValueError names the option."""
    names = []
    for entry in text.split(","):
        try:
            names.append(kind(entry.strip()))
        except ValueError:
            raise ValueError(f"{name}: expected {kind.__name__} numbers separated by commas, got {text!r}") from None
    if "" in names:
        raise ValueError(f"{name}: an entry is empty in {text!r}")
    return names


@contextlib.contextmanager
def piece_bar(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error; yields the function to call with the name of each finished piece."""
    from ...support._terminal._console import progress_bar

    with progress_bar() as update:
        update(description=title, total=total)
        yield lambda piece: update(advance=1, description=piece)


def result_console() -> Console:
    """The console for results; characters that a terminal lacks become question marks."""
    from ...support._terminal._console import Console

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)
