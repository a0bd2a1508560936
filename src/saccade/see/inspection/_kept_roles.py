"""Measured roles on disk: `heads.json` beside the weights, or in the cache folder if nothing can be written there.

The file names the weights that it was measured on by the SHA-256 of their files. The models of `saccade train lm` have
a `heads.json` without it, which was written together with the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...make.models.checkpoints.gguf import SUFFIX
from ...make.models.checkpoints.reading import read_json, weights_digest
from ...support._whole_file import whole_file

NAME = "heads.json"


@dataclass(frozen=True)
class KeptRoles:
    """The place of a model's roles.

    Attributes:
        weights: the model's folder, or its GGUF file.
        source: the model, as `--model` takes it.
        own: whether `saccade train lm` wrote the folder.
        fetched: whether the folder belongs to the hub's cache, where nothing is written.
    """

    weights: Path
    source: str
    own: bool = False
    fetched: bool = False

    @property
    def beside(self) -> Path:
        """`heads.json` in the folder; for `model.gguf` `model.heads.json` beside it."""
        return self.weights.with_suffix(f".{NAME}") if self.weights.suffix == SUFFIX else self.weights / NAME

    @property
    def cached(self) -> Path:
        """The file in `saccade` in the user's cache folder (`XDG_CACHE_HOME`, or `~/.cache`), by the weights' path."""
        at = self.weights.resolve()
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "saccade"
        return folder / f"{at.name}-{hashlib.sha256(str(at).encode()).hexdigest()[:16]}.{NAME}"

    @property
    def file(self) -> Path | None:
        """The file that is read; None if the roles were not measured."""
        return next((file for file in (self.cached, self.beside) if file.exists()), None)

    def read(self) -> dict[str, Any] | None:
        """The roles; None if they were not measured.

        Raises:
            ValueError: a damaged file, or one of other weights.
        """
        file = self.file
        if file is None:
            return None
        roles = read_json(file)
        anew = f"measure them again with `saccade heads --roles --model {self.source}`, or remove the file"
        if not isinstance(roles, dict):
            raise ValueError(f"{file} is damaged, expected an object of roles; {anew}")
        measured = roles.get("weights")
        if measured is None and not (self.own and file == self.beside):
            raise ValueError(f"{file}: does not say which weights its roles belong to; {anew}")
        if measured is not None and measured != weights_digest(self.weights):
            raise ValueError(f"{file}: its roles were measured on other weights than those of {self.source}; {anew}")
        return roles

    def write(self, roles: dict[str, Any]) -> Path:
        """Keep what `measure_roles` returned. OSError if the cache folder cannot be written either."""
        text = json.dumps(roles | {"weights": weights_digest(self.weights)}, indent=1) + "\n"
        for file in self._places():
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(file) as temporary:
                    temporary.write_text(text, encoding="utf-8")
            except OSError:
                if file == self.cached:
                    raise
            else:
                break
        if file == self.beside:
            self.cached.unlink(missing_ok=True)
        return file

    def _places(self) -> Iterator[Path]:
        if not self.fetched:
            yield self.beside
        yield self.cached
