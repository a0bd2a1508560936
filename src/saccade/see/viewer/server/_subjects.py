"""The subjects of a viewer as runs: texts read by models, and calls kept by `watch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....make.models import Model
from ....make.models.text.encoder_decoder import EncoderDecoder
from ...inspection import Look, TextModel, as_text_model, open_model
from ...monitoring import Observations, load
from ..maps import Run, from_watch, read_continued, read_pair, read_text

EMBEDDED = "embedded model"
FORMS = "a text, several texts, a look, or the result of watch (or its file)"


@dataclass(frozen=True)
class TextReading:
    """Options for reading texts.

    Attributes:
        target: the target of an encoder-decoder.
        generate: the number of tokens by which the model continues a text first, the most probable each time; for an
            encoder-decoder the largest number of tokens of the target that it writes.
        words: labels of the tokens of kept calls.
        budget: bytes of queries and keys in memory, of all texts together; None: no limit.
        folder: for files with queries and keys beyond the budget.
        progress: called with (done, total) layers of each text.
    """

    target: str | None = None
    generate: int = 0
    words: Sequence[str] | None = None
    budget: int | None = None
    folder: str | Path | None = None
    progress: Callable[[int, int], None] | None = None


def runs_of(subject: Any, models: Sequence[Any], reading: TextReading) -> list[Run]:
    """A run for each text and model, or for each watch; errors as in `saccade.view`."""
    subjects = list(subject) if isinstance(subject, list | tuple) else [subject]
    if not subjects:
        raise ValueError(f"subject: expected {FORMS}, got none")
    watched = [is_watch_file(each) or isinstance(each, Observations) for each in subjects]
    if any(watched):
        _check_watched(all(watched), models, reading)
        return [_watched(each, number, reading.words) for number, each in enumerate(subjects, 1)]
    if reading.words is not None:
        raise ValueError("words: only for the tokens of a watch; a text has its own words")
    texts = [each.seen.text if isinstance(each, Look) else each for each in subjects]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"subject: expected {FORMS}, got {type(text).__name__}")
    if not models:
        _check_looks(subjects)
        models = [None]
    readers = [(reader_of(model), EMBEDDED if model is None else None) for model in models]
    runs: list[Run] = []
    try:
        for text in texts:
            for reader, name in readers:
                runs.append(_read(text, reader, name, _with_what_is_left(reading, runs)))
    except BaseException:
        for run in runs:
            run.close()
        raise
    return runs


def _watched(subject: Any, number: int, words: Sequence[str] | None) -> Run:
    """A run named by its file, or by its number among the subjects."""
    if isinstance(subject, Observations):
        return from_watch(subject, words, "watched model" if number == 1 else f"watched model {number}")
    path = Path(subject).expanduser()
    return from_watch(load(path), words, path.name)


def _check_watched(all_of_them: bool, models: Sequence[Any], reading: TextReading) -> None:
    if not all_of_them:
        raise ValueError("subject: watches and texts cannot be shown together")
    given = {"model": bool(models), "target": reading.target is not None, "generate": bool(reading.generate)}
    kept = {"budget": reading.budget is not None, "folder": reading.folder is not None}
    for name, present in (given | kept).items():
        if present:
            does = "limits the memory for reading a text" if name in kept else "is for reading a text"
            raise ValueError(f"{name}: it {does}; a watch was read already")


def _check_looks(subjects: Sequence[Any]) -> None:
    """ValueError for a look of another model than the embedded one: a look does not hold its model."""
    for look in subjects:
        if isinstance(look, Look) and look.model != EMBEDDED:
            raise ValueError(f"model: the look is of {look.model}, which it does not hold; pass view(look, model=...)")


def reader_of(model: Any) -> TextModel:
    """The model as a `TextModel`; errors as in `saccade.view`."""
    if model is None or isinstance(model, str | Path):
        return open_model(model)
    if not isinstance(model, TextModel | Model):
        raise TypeError(
            "model: expected a folder, a name on the hub, or a model opened by saccade.models.load or open_model, got "
            f"{type(model).__name__}; for other models show watch(model, keep=True)"
        )
    return as_text_model(model)


def _read(text: str, reader: TextModel, name: str | None, reading: TextReading) -> Run:
    how: dict[str, Any] = {
        "name": name,
        "budget": reading.budget,
        "folder": reading.folder,
        "progress": reading.progress,
    }
    module = reader.module
    if isinstance(module, EncoderDecoder) and (reading.target is not None or reading.generate):
        target = reading.generate if reading.target is None else reading.target
        return read_pair(text, target, module, **{**how, "name": name or reader.name})
    if reading.target is not None:
        raise ValueError(f"target: {name or reader.name} is not an encoder-decoder of Saccade's families")
    if reading.generate:
        return read_continued(text, reader, reading.generate, **how)
    return read_text(text, reader, **how)


def notes_of(runs: Sequence[Run], reading: TextReading) -> list[str]:
    """Remarks on how texts were read."""
    return [
        f"generate: {reading.generate:,} tokens were requested; the context of {run.model} is {run.source.context:,} "
        "tokens, the text included"
        for run in runs
        for side in run.sides.values()
        if isinstance(run.source, TextModel)
        and side.prompt is not None
        and run.source.context is not None
        and side.prompt + reading.generate > run.source.context
    ]


def _with_what_is_left(reading: TextReading, runs: Sequence[Run]) -> TextReading:
    """The options with the budget that earlier runs leave."""
    if reading.budget is None:
        return reading
    used = sum(run.kept.used for run in runs if run.kept is not None)
    return replace(reading, budget=reading.budget - used)


WATCH_ENDINGS = (".watch", ".safetensors")
LONGEST_PATH = 4096


def is_watch_file(subject: Any) -> bool:
    """Whether this is the path of a watch's file, by its ending or contents; anything else is a text."""
    if isinstance(subject, Path):
        return True
    if not isinstance(subject, str) or not subject or len(subject) > LONGEST_PATH:
        return False
    path = Path(subject).expanduser()
    try:
        if not path.is_file():
            return path.suffix.lower() in WATCH_ENDINGS and not any(map(str.isspace, subject))
        with path.open("rb") as file:
            beginning = file.read(9)
        size = path.stat().st_size
    except (OSError, ValueError):  # not a possible path
        return False
    header = int.from_bytes(beginning[:8], "little")  # of a safetensors file: the length of its JSON
    return path.suffix.lower() in WATCH_ENDINGS or (beginning[8:] == b"{" and header <= size)
