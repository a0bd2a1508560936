"""Measured roles on disk: `heads.json` beside the weights, or in the cache folder if nothing can be written there.

The file names the weights that it was measured on by the SHA-256 of their files. The models of `saccade train lm` have
a `heads.json` without it, which was written together with the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ....support._whole_file import whole_file
from .gguf import SUFFIX
from .reading import read_json, weights_digest

HEADS = "heads.json"
ROLE_NAMES = {
    "previous": "previous token",
    "next": "next token",
    "self": "self",
    "sink": "first-token sink",
    "delimiter": "delimiter",
    "special": "special token",
    "repeat": "repeat",
    "duplicate": "duplicate",
    "broad": "broad",
    "mixed": "mixed",
}
"""Names of roles in reports."""


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
        return self.weights.with_suffix(f".{HEADS}") if self.weights.suffix == SUFFIX else self.weights / HEADS

    @property
    def cached(self) -> Path:
        """The file in `saccade` in the user's cache folder (`XDG_CACHE_HOME`, or `~/.cache`), by the weights' path."""
        at = self.weights.resolve()
        folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "saccade"
        return folder / f"{at.name}-{hashlib.sha256(str(at).encode()).hexdigest()[:16]}.{HEADS}"

    @cached_property
    def _digest(self) -> str:
        return weights_digest(self.weights)

    def read(self, heads: Sequence[int]) -> tuple[dict[str, Any] | None, str]:
        """The roles in the first file that fits, and ""; or None and why the files are not used, "" without files.

        Args:
            heads: the number of the model's heads, by layer.
        """
        reasons = []
        for file in filter(os.path.exists, self._known()):  # which is False for a folder that cannot be entered
            try:
                return self._of(file, heads), ""
            except (OSError, ValueError) as error:
                reasons.append(str(error))
        anew = f"; its roles are not used, `saccade heads --roles --model {self.source}` measures them anew"
        return None, "; ".join(reasons) + anew if reasons else ""

    def _of(self, file: Path, heads: Sequence[int]) -> dict[str, Any]:
        roles = read_json(file)
        measured = roles.pop("weights", None) if isinstance(roles, dict) else None
        if measured is not None and measured != self._digest:
            raise ValueError(f"{file}: measured on other weights")
        if not well_formed(roles, heads):
            raise ValueError(f"{file}: damaged, not the roles of this model's heads")
        if measured is None and not (self.own and file == self.beside):
            raise ValueError(f"{file}: does not name the weights it was measured on")
        return roles

    def write(self, roles: dict[str, Any]) -> Path:
        """Keep what `measure_roles` returned. OSError if the cache folder cannot be written either."""
        text = json.dumps(roles | {"weights": self._digest}, indent=1) + "\n"
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
            with suppress(OSError):
                self.cached.unlink()
        return file

    def _known(self) -> Iterator[Path]:
        """The file in the cache, unless there is no home, and the one beside the weights."""
        if self.cached.is_absolute():
            yield self.cached
        yield self.beside

    def _places(self) -> Iterator[Path]:
        if not self.fetched:
            yield self.beside
        yield self.cached


def well_formed(roles: Any, heads: Sequence[int]) -> bool:
    """Whether these are roles, as `measure_roles` returns them, of a model with so many heads by layer."""
    try:
        entries = all(
            0 <= one["layer"] < len(heads)
            and 0 <= one["head"] < heads[one["layer"]]
            and {one["role"], one["decided_by"]} <= ROLE_NAMES.keys()
            and all(0 <= score <= 1 for score in (one["score"], *one.get("above_chance", {}).values()))
            for one in roles["heads"]
        )
        return entries and all(
            rule["roles"]
            and ROLE_NAMES.keys() >= set(rule["roles"])
            and 0 <= rule["at_least"] <= 1
            and isinstance(rule["measured_on"], str)
            for rule in roles.get("rules", ())
        )
    except (AttributeError, KeyError, TypeError):
        return False
