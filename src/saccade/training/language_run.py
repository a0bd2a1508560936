"""What a run of `saccade train lm` trains on what."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from .prepared import check_one
from .settings import LanguageSettings


@dataclasses.dataclass(frozen=True)
class LanguageRun:
    """What to train on what, and where to.

    Args:
        text: a text file, or a folder of `.txt` files.
        out: the folder to write; one that exists is refused unless `overwrite`.
        settings: of the training loop.
        shape: fields of `ModelConfig` but `vocabulary`.
        hold_out: files judged by instead of trained on; none is the last tenth of all text.
        vocabulary: how many tokens the BPE is to have; None is single characters.
        initial: a model folder whose weights and tokenizer the run starts from; its shape must be the same but for
            the dropout and the heads that were pruned. None starts from random weights.
        resume: continue the run in `out` where it stopped; one that is over also with more steps than it had.
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

    task = "lm"

    def __post_init__(self) -> None:
        check_one(self)
