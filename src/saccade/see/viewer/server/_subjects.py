"""What a user wants to see, as runs: texts through models, and what `watch` kept."""

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
FORMS = "a text, several texts, a look, or what watch kept (or the file that it was saved to)"


@dataclass(frozen=True)
class TextReading:
    """How texts are read.

    Attributes:
        target: what an encoder-decoder writes to the text.
        generate: tokens by which the model continues a text first, the most probable each time; an encoder-decoder
            writes a target of so many at most.
        words: labels of the tokens of what `watch` kept.
        budget: bytes of queries and keys in memory, of all texts together; None: no limit.
        folder: where those beyond the budget are kept in files.
        progress: told (done, total) layers of each text.
    """

    target: str | None = None
    generate: int = 0
    words: Sequence[str] | None = None
    budget: int | None = None
    folder: str | Path | None = None
    progress: Callable[[int, int], None] | None = None


def runs_of(subject: Any, models: Sequence[Any], reading: TextReading) -> list[Run]:
    """A run for each text and model, or for what was watched; for errors see `saccade.view`."""
    subjects = list(subject) if isinstance(subject, list | tuple) else [subject]
    if not subjects:
        raise ValueError(f"subject: expected {FORMS}, got none")
    watched = [is_watch_file(one) or isinstance(one, Observations) for one in subjects]
    if any(watched):
        _check_watched(all(watched), models, reading)
        return [_watched(one, number, reading.words) for number, one in enumerate(subjects, 1)]
    if reading.words is not None:
        raise ValueError("words: they name the tokens of what watch kept; a text has words of its own")
    texts = [one.seen.text if isinstance(one, Look) else one for one in subjects]
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
    """A run called by its file, or by its place among the subjects."""
    if isinstance(subject, Observations):
        return from_watch(subject, words, "watched model" if number == 1 else f"watched model {number}")
    path = Path(subject).expanduser()
    return from_watch(load(path), words, path.name)


def _check_watched(all_of_them: bool, models: Sequence[Any], reading: TextReading) -> None:
    if not all_of_them:
        raise ValueError("subject: what watch kept and texts are not shown together")
    given = {"model": bool(models), "target": reading.target is not None, "generate": bool(reading.generate)}
    kept = {"budget": reading.budget is not None, "folder": reading.folder is not None}
    for name, present in (given | kept).items():
        if present:
            does = "bounds what reading a text keeps" if name in kept else "reads a text"
            raise ValueError(f"{name}: it {does}; what watch kept was read already")


def _check_looks(subjects: Sequence[Any]) -> None:
    """The embedded model, unless a look went through another one, which it does not hold."""
    for look in subjects:
        if isinstance(look, Look) and look.model != EMBEDDED:
            raise ValueError(f"model: the look is of {look.model}, which it does not hold; give view(look, model=...)")


def reader_of(model: Any) -> TextModel:
    """The model as what reads a text; for errors see `saccade.view`."""
    if model is None or isinstance(model, str | Path):
        return open_model(model)
    if not isinstance(model, TextModel | Model):
        raise TypeError(
            "model: expected a folder, a name on the hub, or a model that saccade.models.load or open_model opened, "
            f"got {type(model).__name__}; watch(model, keep=True) shows any other"
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
        raise ValueError(f"target: {name or reader.name} is no encoder-decoder of Saccade's families")
    if reading.generate:
        return read_continued(text, reader, reading.generate, **how)
    return read_text(text, reader, **how)


def notes_of(runs: Sequence[Run], reading: TextReading) -> list[str]:
    """What is to be said of how texts were read."""
    return [
        f"generate: {reading.generate:,} tokens were asked for; {run.model} reads {run.source.context:,} at once, "
        "those of the text included, and writes no further"
        for run in runs
        for side in run.sides.values()
        if isinstance(run.source, TextModel)
        and side.prompt is not None
        and run.source.context is not None
        and side.prompt + reading.generate > run.source.context
    ]


def _with_what_is_left(reading: TextReading, runs: Sequence[Run]) -> TextReading:
    """The budget without what earlier runs keep in memory."""
    if reading.budget is None:
        return reading
    used = sum(run.kept.used for run in runs if run.kept is not None)
    return replace(reading, budget=reading.budget - used)


WATCH_ENDINGS = (".watch", ".safetensors")
LONGEST_PATH = 4096


def is_watch_file(subject: Any) -> bool:
    """Whether this names a file as a watch is saved to, by its ending or by what it holds; any other text is a text."""
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
    except (OSError, ValueError):  # impossible as a name
        return False
    header = int.from_bytes(beginning[:8], "little")  # of a safetensors file: how long its JSON is
    return path.suffix.lower() in WATCH_ENDINGS or (beginning[8:] == b"{" and header <= size)
