"""Files of one kind, such as images or sounds: in folders of classes, named by a table or a list, and read one by one.

Every error names the file, and the line of the table where there is one.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..._task_options import MediaOptions
from .._classes._class_task import ClassTask
from .._examples import ENDINGS as TABLES, UnusableExamples, read_lines, read_table, warn_left_out

Found = tuple[Path, "str | None", str]
"""A file, its label from a table or a folder's name, and its place for messages."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Media:
    """Files of one kind.

    Args:
        called: what one is, with its article: "an image", "a .txt file".
        endings: by which the files of a folder are known.
    """

    called: str
    endings: tuple[str, ...]

    @property
    def thing(self) -> str:
        return self.called.partition(" ")[2]

    def below(self, folder: Path) -> list[Path]:
        """The files in a folder and its subfolders, in order, without hidden ones, such as those in .cache."""
        return [
            file
            for file in sorted(folder.rglob("*"))
            if file.suffix.lower() in self.endings
            and not any(part.startswith(".") for part in file.relative_to(folder).parts)
            and file.is_file()
        ]

    def in_class_folders(self, path: Path) -> list[Found]:
        """The files of each folder in `path`, whose name is their class."""
        classes = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and not folder.name.startswith(".")]
        files = {folder: self.below(folder) for folder in classes}
        if not any(files.values()):
            raise ValueError(
                f"{path}: holds no {self.thing}s; expected a folder for each class with {self.thing}s in it"
            )
        for folder in classes:
            if not files[folder]:
                raise ValueError(
                    f"{folder}: holds no {self.thing}s; remove the folder, or put {self.thing}s of the class in it"
                )
        return [(file, folder.name, str(file)) for folder in classes for file in files[folder]]

    def in_table(self, path: Path, columns: Sequence[str]) -> list[tuple[Path, tuple[Any, ...], str]]:
        """For each row the file in its first column, relative to the table; the other columns; its place."""
        found = []
        for place, (name, *rest) in read_table(path, columns):
            if not isinstance(name, str) or not name:
                raise ValueError(f"{place}: expected the path of {self.called}, got {name!r:.40}")
            found.append((self._existing(path.parent / name, place), tuple(rest), place))
        return found

    def in_list(self, path: Path) -> list[Found]:
        """The files in a list with one path a line, relative to it."""
        places = [(line, f"{path}: line {n}") for n, line in enumerate(read_lines(path), 1)]
        return [(self._existing(path.parent / line, place), None, place) for line, place in places]

    def listed(self, path: Path, column: str) -> list[Found]:
        """The files of a folder, of a column of a table, of a list with a path a line; or the one file itself."""
        if path.is_dir():
            found = [alone(file) for file in self.below(path)]
            if not found:
                raise ValueError(f"{path}: holds no {self.thing}s")
            return found
        kind = path.suffix.lower()
        if kind in TABLES:
            return [(file, None, place) for file, _, place in self.in_table(path, (column,))]
        return self.in_list(path) if kind == ".txt" else [alone(path)]

    def checked(self, pages: Iterable[Found], read: Callable[..., T], skip_broken: bool) -> list[T]:
        """`read(path, said, place)` of each file, which raises a ValueError for a broken file.

        Raises:
            ValueError: a file is broken, and not `skip_broken` (with it a warning counts broken files); or all are.
        """
        examples: list[T] = []
        broken: list[str] = []
        first = ""
        for path, said, place in pages:
            try:
                examples.append(read(path, said, place))
            except ValueError as error:
                broken.append(str(path))
                first = first or (str(error) if place == str(path) else f"{place}: {error}")
        if broken and not skip_broken:
            counts = f"{len(broken)} of {len(broken) + len(examples)} {self.thing}s"
            raise UnusableExamples(f"{first} (broken: {counts}); remove the broken files", "skip_broken")
        if not examples:
            raise ValueError(f"{broken[0]}: no {self.thing} is left, all {len(broken)} are broken")
        warn_left_out(broken, len(broken) + len(examples), f"{self.thing}s are broken and")
        return examples

    def _existing(self, path: Path, place: str) -> Path:
        if not path.is_file():
            raise FileNotFoundError(f"{place}: {path}: no such {self.thing} file")
        return path


def alone(path: Path) -> Found:
    """A file without a label."""
    return path, None, str(path)


@dataclasses.dataclass(frozen=True)
class MediaTask(MediaOptions, ClassTask):
    """A task of files. Abstract; its examples have a `path`.

    Args:
        file: column of a table; paths are relative to the table.
        skip_broken: leave out files that cannot be read, with a warning that counts them, instead of raising an error.
    """

    media: ClassVar[Media]

    @abstractmethod
    def example(self, path: Path, said: str | None, place: str) -> Any:
        """The example of a file. ValueError if it is broken."""

    def files(self, path: Path) -> list[Path]:
        """A folder, or a table and the files in its column."""
        if path.is_dir() or not path.exists():
            return [path]
        try:
            return [path, *(file for file, _, _ in self.media.in_table(path, (self.file,)))]
        except (OSError, ValueError):  # it is not what it was; its own content says so
            return [path]

    def split(self, data: Sequence[Any], share: float, seed: int) -> tuple[list[Any], list[Any]]:
        for label, count in Counter(example.label for example in data).items():
            if count < 2:
                only = next(example for example in data if example.label == label)
                raise ValueError(
                    f"{only.place}: is the only {self.thing} of {label!r}, too few to split; add {self.thing}s of it, "
                    "leave it out, or give --validation"
                )
        return super().split(data, share, seed)

    def inputs(self, texts: Sequence[str]) -> list[Any]:
        return self.media.checked([alone(Path(text)) for text in texts], self.example, self.skip_broken)

    def read_inputs(self, path: Path) -> list[Any]:
        return self.media.checked(self.media.listed(path, self.file), self.example, self.skip_broken)

    def named(self, example: Any) -> str:
        return str(example.path)
