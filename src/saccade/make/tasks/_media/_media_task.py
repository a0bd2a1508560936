"""Tasks whose examples are files of one kind: how they are found and split."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..._task_options import MediaOptions
from .._classes._class_task import ClassTask
from ._files import Media, alone


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
