"""The request for a run of `saccade train lm`."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

from ..prepared import check_one
from ..settings import LanguageSettings


@dataclasses.dataclass(frozen=True)
class LanguageRun:
    """The request to train a language model: text, settings, and the folder to write.

    Args:
        text: a text file, or a folder of `.txt` files.
        out: the folder to write; an existing one raises an error unless `overwrite`.
        settings: of the training loop.
        shape: fields of `ModelConfig` except `vocabulary`.
        hold_out: files used only for validation; without any, the last tenth of all text is.
        vocabulary: number of tokens of the BPE tokenizer; None uses single characters.
        overwrite: replace the run in `out`.
        initial: a model folder to take weights and tokenizer from; its shape must be the same, except for dropout and
            pruned heads. None starts from random weights.
        resume: continue the run in `out`; a finished run continues if `steps` is larger than before.

    Raises:
        ValueError: both `overwrite` and `resume`.

    Example:
        >>> import pathlib, saccade
        >>> run = saccade.training.LanguageRun(
        ...     text=pathlib.Path("stories.txt"),
        ...     out=pathlib.Path("runs/stories"),
        ...     settings=saccade.training.LanguageSettings(steps=1000),
        ...     shape={"layers": 2, "heads": 4, "width": 64},
        ... )  # for `train_language_model`
        >>> run.vocabulary
        2048
    """

    text: Path
    out: Path
    settings: LanguageSettings
    shape: dict[str, Any]
    hold_out: tuple[Path, ...] = ()
    vocabulary: int | None = 2048
    overwrite: bool = False
    initial: Path | None = None
    resume: bool = False

    task_name = "lm"

    def __post_init__(self) -> None:
        check_one(self)

    @property
    def task(self) -> str:
        """Deprecated: `task_name`."""
        warnings.warn("task is task_name now; the old name goes in 0.4", DeprecationWarning, stacklevel=2)
        return self.task_name
