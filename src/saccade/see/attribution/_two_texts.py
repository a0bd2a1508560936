"""Which heads carry the difference between two texts: `patching` for a text model.

For the command line and the viewer, whose targets and positions are text typed by a person.
Shape legend: L tokens with the special ones, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...support._restored import evaluating
from ..inspection import Predictor, TextModel, as_predictor
from ..inspection._collect import read
from ._patching import BY, patching
from ._patching_result import Patching
from ._runs import Progress

MOST_TOKENS = 24  # of a text, in an error message
LEAST = 0.05  # nats; smaller differences between two texts are not explained


@dataclass(frozen=True, eq=False)
class ReadText:
    """A text as the model reads it: ids (1, L) and the text of each token."""

    text: str
    ids: Tensor
    pieces: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class TextPatching:
    """The effects of heads, and the texts compared.

    Attributes:
        found: the effects. In its metric, `clean` is the text and `corrupted` the other text.
        clean, corrupted: the text and the other one.
        words: the token whose log-probability is the metric, and the token whose log-probability is subtracted, if any.
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
    """Encode a text. ValueError, which begins with `name`, if it has no word or is too long."""
    try:
        tokens = read(model, text)[0]
    except ValueError as error:
        raise ValueError(re.sub(r"^text\b", name, str(error))) from None
    return ReadText(text, model.whole(tokens.ids), model.pieces(text, tokens.spans))


def target_tokens(predictor: Predictor, target: str | None) -> list[int]:
    """The token of one word, or the tokens of two words separated by a comma; [] for None. ValueError for anything
    else."""
    if target is None:
        return []
    words = [word.strip() for word in target.split(",")]
    if len(words) > 2 or not all(words):
        raise ValueError(f"target {target}: expected a word, or two words separated by a comma, such as mat,hat")
    tokens = [predictor.token(word) for word in words]
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"target {target}: both are the same token; expected two that differ")
    return tokens


def listed_positions(given: str | None) -> list[int] | None:
    """ "3,5-7" as [3, 5, 6, 7]; None for None. ValueError for anything else."""
    if given is None:
        return None
    positions: list[int] = []
    for part in given.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"positions {given}: expected token numbers from 0, such as 3 or 3,5-7")
        positions += range(int(match[1]), int(match[2] or match[1]) + 1)
    return list(dict.fromkeys(positions))


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
    """Put each head's output in `text` into the run of `other`, and measure the share of the metric that it restores.

    The metric is the log-probability of the first word of `target` less that of the second, after the texts or at
    their masks. None: the most probable token after `text`, less the most probable one after `other`.

    Raises:
        ValueError: a model without a head for tokens; texts that cannot be compared, or do not differ in the metric.
    """
    predictor = as_predictor(model)
    clean, corrupted = read_text(model, text), read_text(model, other, "other")
    _check(clean, corrupted, positions)
    runs = _run(predictor, clean), _run(predictor, corrupted)
    with evaluating(predictor.module), torch.no_grad():
        logits = [run(predictor.module)[0] for run in runs]
    # If both texts have the same most probable token, that token alone is the metric.
    compared = target_tokens(predictor, target) or list(dict.fromkeys(int(each.argmax()) for each in logits))
    words, metric = tuple(model.written(token) for token in compared), _log_probability(compared)
    _check_differ(words, *(float(metric(each[None])) for each in logits))
    effects = patching(predictor.module, *runs, metric, by=by, positions=positions, progress=progress)
    return TextPatching(effects, clean, corrupted, words)


def _run(predictor: Predictor, given: ReadText) -> Callable[[object], Tensor]:
    """A function for `patching` that runs one forward and returns the logits (B, V) at the target."""
    place = predictor.predicting(given.ids)
    return lambda module: predictor.logits_at(given.ids, place)


def _log_probability(tokens: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """The metric: the log-probability of the first token, minus that of the second token if there are two."""

    def metric(logits: Tensor) -> Tensor:
        log_p = logits[0].float().log_softmax(-1)[list(tokens)]
        return log_p[0] - log_p[1:].sum()

    return metric


def _check_differ(words: Sequence[str], clean: float, corrupted: float) -> None:
    """Check before minutes of patching that the texts differ in the metric."""
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
            f"{_side_by_side(clean.pieces, corrupted.pieces)}; expected equally many, or positions, such as 1,3-5, "
            "that mean the same place in both"
        )
    beyond = [place for place in positions or () if place >= min(lengths)]
    if beyond:
        raise ValueError(f"positions: both texts have the tokens 0 to {min(lengths) - 1}, got {beyond[0]}")


def _side_by_side(words: Sequence[str], other: Sequence[str]) -> str:
    """The tokens of both texts from the first difference on, as many as fit a line."""
    same = next((i for i, (a, b) in enumerate(zip(words, other, strict=False)) if a != b), min(len(words), len(other)))
    first = max(0, same - 1)

    def listed(pieces: Sequence[str]) -> str:
        cut = [repr(piece) for piece in pieces[first : first + MOST_TOKENS]]
        return " ".join([*(["..."] if first else []), *cut, *(["..."] if len(pieces) > first + MOST_TOKENS else [])])

    return f"from token {first} on, {listed(words)} against {listed(other)}"
