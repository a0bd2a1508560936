"""Which heads carry what differs between two texts: `patching`, asked of a text model.

The command line and the viewer ask it here, with words as a person types them.
Shape legend: L tokens with the special ones, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...support._evaluating import evaluating
from ..inspection import Predictor, TextModel, as_predictor
from ..inspection._collect import read
from ._patching import BY, patching
from ._patching_result import Patching
from ._runs import Progress

MOST_TOKENS = 24  # of a text, in an error
LEAST = 0.05  # nats, below which a difference between two texts is not explained


@dataclass(frozen=True, eq=False)
class ReadText:
    """A text as the model reads it: ids (1, L) and how they are written."""

    text: str
    ids: Tensor
    pieces: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class TextPatching:
    """The effects that were found.

    Attributes:
        found: the effects. Of its metric, `clean` is the text's and `corrupted` that of the other text.
        clean, corrupted: the text and the other one.
        words: the token whose log-probability is the metric, and the one whose is taken off, if any, as written.
    """

    found: Patching
    clean: ReadText
    corrupted: ReadText
    words: tuple[str, ...]

    @property
    def measured(self) -> str:
        """The metric in words."""
        return _measured(self.words)


def read_text(model: TextModel, text: str, name: str = "text") -> ReadText:
    """ValueError, which begins with `name`, where the text has no word or is too long."""
    try:
        tokens = read(model, text)[0]
    except ValueError as error:
        raise ValueError(re.sub(r"^text\b", name, str(error))) from None
    return ReadText(text, model.whole(tokens.ids), model.pieces(text, tokens.spans))


def target_tokens(predictor: Predictor, target: str | None) -> list[int]:
    """The tokens of one word, or of two with a comma between; none of None. ValueError where it is something else."""
    if target is None:
        return []
    words = [word.strip() for word in target.split(",")]
    if len(words) > 2 or not all(words):
        raise ValueError(f"target {target}: expected a word, or two with a comma between, such as mat,hat")
    found = [predictor.token(word) for word in words]
    if len(set(found)) < len(found):
        raise ValueError(f"target {target}: both are the same token; expected two that differ")
    return found


def listed_positions(given: str | None) -> list[int] | None:
    """ "3,5-7" as 3, 5, 6, 7; None of None. ValueError where it is something else."""
    if given is None:
        return None
    found: list[int] = []
    for part in given.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"positions {given}: expected tokens from 0, such as 3 or 3,5-7")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return list(dict.fromkeys(found))


def patch_texts(
    model: TextModel,
    text: str,
    other: str,
    *,
    by: str | Sequence[str] = BY,
    target: str | None = None,
    positions: list[int] | None = None,
    progress: Progress | None = None,
) -> TextPatching:
    """Each head's output in `text` put into the run of `other`, and what of the metric that brings back.

    The metric is the log-probability of the first word of `target` less that of the second, after the texts or at
    their masks; None: of what the model continues `text` by, less what it continues `other` by.

    Raises:
        ValueError: a model without a head for tokens; texts that cannot be compared, or do not differ in the metric.
    """
    predictor = as_predictor(model)
    clean, corrupted = read_text(model, text), read_text(model, other, "other")
    _check(clean, corrupted, positions)
    runs = _run(predictor, clean), _run(predictor, corrupted)
    with evaluating(predictor.module), torch.no_grad():
        logits = [run(predictor.module) for run in runs]
    # What both texts are continued by alike stands alone.
    compared = target_tokens(predictor, target) or list(dict.fromkeys(int(one.argmax()) for one in logits))
    words, metric = tuple(model.written(token) for token in compared), _log_probability(compared)
    _check_differ(words, *(float(metric(one)) for one in logits))
    found = patching(predictor.module, *runs, metric, by=by, positions=positions, progress=progress)
    return TextPatching(found, clean, corrupted, words)


def _run(predictor: Predictor, given: ReadText) -> Callable[[object], Tensor]:
    """One forward, as `patching` calls it: the logits (V,) of the token asked for."""
    place = predictor.predicting(given.ids)
    return lambda module: predictor.logits(given.ids)[0, place]


def _log_probability(tokens: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Of the first token, less that of the second if there is one."""

    def metric(logits: Tensor) -> Tensor:
        found = logits.float().log_softmax(-1)[list(tokens)]
        return found[0] - found[1:].sum()

    return metric


def _check_differ(words: Sequence[str], clean: float, corrupted: float) -> None:
    """Before minutes of patching: whether the texts differ in the metric."""
    if abs(clean - corrupted) < LEAST:
        alike = f"predict {words[0]!r}" if len(words) == 1 else "prefer {!r} to {!r}".format(*words)
        raise ValueError(
            f"other: both texts {alike} almost equally ({_measured(words)}: {clean:+.3f} and {corrupted:+.3f})"
            ": name words in which they differ, target A,B"
        )


def _measured(words: Sequence[str]) -> str:
    """The metric in words."""
    return " less ".join(f"log p of {word!r}" for word in words)


def _check(clean: ReadText, corrupted: ReadText, positions: list[int] | None) -> None:
    if torch.equal(clean.ids, corrupted.ids):
        raise ValueError("other: it has the same tokens as the text; expected a text that differs")
    lengths = len(clean.pieces), len(corrupted.pieces)
    if positions is None and lengths[0] != lengths[1]:
        raise ValueError(
            f"other: heads are patched token by token, and the texts have {lengths[0]} and {lengths[1]} tokens: "
            f"{_side_by_side(clean.pieces, corrupted.pieces)}; expected as many, or positions, such as 1,3-5, that "
            "mean the same place in both"
        )
    beyond = [place for place in positions or () if place >= min(lengths)]
    if beyond:
        raise ValueError(f"positions: both texts have the tokens 0 to {min(lengths) - 1}, got {beyond[0]}")


def _side_by_side(words: Sequence[str], other: Sequence[str]) -> str:
    """The tokens of both from where they differ on, as many as can be read in a line."""
    same = next((i for i, (a, b) in enumerate(zip(words, other, strict=False)) if a != b), min(len(words), len(other)))
    first = max(0, same - 1)

    def told(pieces: Sequence[str]) -> str:
        cut = [repr(piece) for piece in pieces[first : first + MOST_TOKENS]]
        return " ".join([*(["..."] if first else []), *cut, *(["..."] if len(pieces) > first + MOST_TOKENS else [])])

    return f"from token {first} on, {told(words)} against {told(other)}"
