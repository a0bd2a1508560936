"""What `saccade heads` measures of a text, and how it is shown: each question as numbers, lines and a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._numbers import counted
from ._errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from .._terminal._console import Console
    from ..attribution import Attribution, WhyAttends
    from ..inspection import Predictor, TextModel, Tokens

Progress = Callable[[int, int], None]
MOST_TOKENS = 24  # of a text, in an error
LEAST = 0.05  # nats, below which a difference between two texts is not explained


@dataclass(frozen=True)
class Measured:
    """An answer.

    Attributes:
        numbers: for programs.
        show: prints it.
        draw: the figure's bytes, as "svg", "png" or "pdf".
        following: a command worth trying now, without its model and text.
    """

    numbers: dict[str, Any]
    show: Callable[[Console], None]
    draw: Callable[[str], bytes]
    following: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Read:
    """A text as the model reads it: ids (1, L) and how they are written."""

    text: str
    ids: Tensor
    pieces: tuple[str, ...]


def _read(model: TextModel, text: str) -> _Read:
    """ValueError where the text has no word or is too long."""
    from ..inspection._collect import read

    tokens: Tokens = read(model, text)[0]
    return _Read(text, model.whole(tokens.ids), model.pieces(text, tokens.spans))


def importance(model: TextModel, text: str, by: str, target: str | None, told: Progress, *, alone: bool) -> Measured:
    """How much the text's own loss hangs on each head, and what heads write towards the predicted token."""
    from .. import head_importance
    from ..inspection import as_predictor
    from ..viewer import heads as shown

    predictor, given = as_predictor(model), _read(model, text)
    wanted = _targets(predictor, target)
    found = head_importance(predictor.module, [given.ids], lambda _, ids: predictor.loss(ids), by=by, progress=told)
    what = _loss_of(predictor, given)
    attributed, without = (None, "") if alone else _attributed(model, predictor, given, wanted)

    def show(console: Console) -> None:
        _print_facts(console, model, given)
        shown.print_importance(console, found, what)
        if not alone:
            console.print()
            if attributed is not None:
                shown.print_attributed(console, attributed)
            else:
                console.print(f"No direct logit attribution: {without}", style="dim", highlight=False)

    numbers = _facts(model, given) | {
        "loss": what,
        "importance": found.as_json() | {"rise": shown.rises(found).values.tolist()},
        "sentences": shown.importance_sentences(found),
        "attribution": None if attributed is None else attributed.as_json(),
    }
    most = found.ranked()[0][0]
    following = ("step", "--head", str(most)) if by != "gradient" else ("heads", "--importance", "--by", "ablation")
    return Measured(numbers, show, lambda kind: shown.draw_importance(found, kind, what, attributed), following)


def _attributed(
    model: TextModel, predictor: Predictor, given: _Read, wanted: Sequence[int]
) -> tuple[Attribution | None, str]:
    """None with the reason where the model is not made of Saccade's blocks, or a masked one's text has no mask."""
    from .. import attribute

    if model.stack is None:
        return None, f"{model.name} runs with code of transformers, which has no family of Saccade's"
    try:
        place = predictor.predicting(given.ids)
    except ValueError as error:
        if wanted:
            raise
        return None, str(error).removeprefix("text: ")
    chosen, other = [*wanted, None, None][:2]
    return attribute(model, given.text, chosen, against=other, position=place), ""


def _loss_of(predictor: Predictor, given: _Read) -> str:
    count = len(predictor.places(given.ids))
    if predictor.mask is None:
        return f"loss: -log p of each next token of this text, mean of {count}"
    among = given.ids.shape[1] - len(predictor.reader.before) - len(predictor.reader.after)
    return f"pseudo-loss: -log p of a token where it alone is masked, mean of {count} of {counted(among, 'token')}"


def _targets(predictor: Predictor, target: str | None) -> list[int]:
    """The tokens of one word, or of two with a comma between."""
    if target is None:
        return []
    words = [word.strip() for word in target.split(",")]
    if len(words) > 2 or not all(words):
        raise UserError(f"--target {target}: expected a word, or two with a comma between, such as mat,dog")
    found = [predictor.token(word) for word in words]
    if len(set(found)) < len(found):
        raise UserError(f"--target {target}: both are the same token; expected two that differ")
    return found


def patched(
    model: TextModel,
    text: str,
    other: str,
    by: str | None,
    target: str | None,
    positions: list[int] | None,
    told: Progress,
) -> Measured:
    """Which heads carry what differs between two texts."""
    from .. import patching
    from ..inspection import as_predictor
    from ..viewer import heads as shown

    predictor = as_predictor(model)
    clean, corrupted = _read(model, text), _read(model, other)
    _check_lengths(clean, corrupted, positions)
    runs = _Run.of(predictor, clean), _Run.of(predictor, corrupted)
    metric = _Metric(*_compared(runs, _targets(predictor, target)))
    ways = ("exact", "gradient") if by is None else (by,)
    found = patching(predictor.module, *runs, metric, by=ways, positions=positions, progress=told)
    written = [model.written(token) for token in (metric.token, metric.against) if token is not None]
    if abs(found.clean - found.corrupted) < LEAST:
        raise UserError(
            f"--patch: nothing to explain, the texts have {found.clean:+.3f} and {found.corrupted:+.3f} as log p of "
            f"{' less that of '.join(map(repr, written))}; expected texts that differ in it, or --target A,B with "
            "words in which they do"
        )
    what = " less ".join(f"log p of {name!r}" for name in written)

    def show(console: Console) -> None:
        _print_facts(console, model, clean)
        shown.print_patching(console, found, what)
        if metric.against is None and target is None:
            said = f"Both texts are continued by {written[0]!r}; --target A,B compares two words of yours."
            console.print(said, style="dim", highlight=False)

    numbers = _facts(model, clean) | {
        "other": {"text": corrupted.text, "tokens": corrupted.pieces},
        "metric": {"of": what, "tokens": written},
        "patching": found.as_json(),
        "sentences": shown.patching_sentences(found),
    }
    following = ("step", "--head", str(found.ranked()[0][0]))
    return Measured(numbers, show, lambda kind: shown.draw_patching(found, kind, what), following)


@dataclass(frozen=True, eq=False)
class _Run:
    """One forward, as `patching` calls it: the logits (V,) of the token asked for."""

    predictor: Predictor
    ids: Tensor
    place: int

    @classmethod
    def of(cls, predictor: Predictor, given: _Read) -> _Run:
        return cls(predictor, given.ids, predictor.predicting(given.ids))

    def __call__(self, module: object = None) -> Tensor:
        return self.predictor.logits(self.ids)[0, self.place]


@dataclass(frozen=True)
class _Metric:
    """The log-probability of a token, less that of another."""

    token: int
    against: int | None

    def __call__(self, logits: Tensor) -> Tensor:
        found = logits.float().log_softmax(-1)
        return found[self.token] if self.against is None else found[self.token] - found[self.against]


def _check_lengths(clean: _Read, corrupted: _Read, positions: list[int] | None) -> None:
    lengths = len(clean.pieces), len(corrupted.pieces)
    if positions is None and lengths[0] != lengths[1]:
        raise UserError(
            f"--patch: heads are patched token by token, and the texts have {lengths[0]} and {lengths[1]} tokens: "
            f"{_side_by_side(clean.pieces, corrupted.pieces)}; expected as many, or --positions with tokens that mean "
            "the same place in both, such as --positions 1,3-5"
        )
    beyond = [place for place in positions or () if place >= min(lengths)]
    if beyond:
        raise UserError(f"--positions: both texts have the tokens 0 to {min(lengths) - 1}, got {beyond[0]}")


def _side_by_side(one: Sequence[str], other: Sequence[str]) -> str:
    """The tokens of both from where they differ on, as many as can be read in a line."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    first = max(0, same - 1)

    def told(pieces: Sequence[str]) -> str:
        cut = [repr(piece) for piece in pieces[first : first + MOST_TOKENS]]
        return " ".join([*(["..."] if first else []), *cut, *(["..."] if len(pieces) > first + MOST_TOKENS else [])])

    return f"from token {first} on, {told(one)} against {told(other)}"


def _compared(runs: Sequence[_Run], wanted: Sequence[int]) -> tuple[int, int | None]:
    """The token whose log-probability is measured, and the one whose is taken off: what the clean text is continued by
    and what the corrupted one is; one alone where both are continued alike."""
    import torch

    if wanted:
        return wanted[0], wanted[1] if len(wanted) > 1 else None
    with torch.no_grad():
        first, second = (int(run().argmax()) for run in runs)
    return first, None if first == second else second


def explained(
    model: TextModel, text: str, words: tuple[str, str], head: tuple[int, int] | None, against: str | None
) -> Measured:
    """Why one word attends to another."""
    from .. import why_attends
    from ..viewer import heads as shown

    if model.stack is None:
        raise UserError(
            f"--why: {model.name} runs with code of transformers, whose parts are not known; expected the embedded "
            "model or a family that saccade.models.load opens"
        )
    found = why_attends(model, text, *words, head=head, against=against)
    if not found.visible:
        raise UserError(
            f"--why {' '.join(words)}: the mask hides {found.labels[found.key]} (token {found.key}) from "
            f"{found.labels[found.query]} (token {found.query}); expected the word that looks first and the one it "
            "looks at second"
        )

    def show(console: Console) -> None:
        shown.print_why(console, found)

    numbers = {"format": 1, "text": text, "model": model.name, "why": found.as_json()}
    return Measured(numbers, show, lambda kind: shown.draw_why(found, kind), _earlier(found, words))


def _earlier(found: WhyAttends, words: tuple[str, str]) -> tuple[str, ...]:
    """What the earlier head did that wrote most into the query or the key."""
    written = [
        (float(share), one, word)
        for word, shares in zip(words, (found.of_query, found.of_key), strict=True)
        for one, share in zip(found.components, shares, strict=True)
        if one.kind == "head"
    ]
    if not written:
        return "step", "--head", f"{found.layer}.{found.head}", "--word", words[0]
    _, head, word = max(written, key=lambda one: abs(one[0]))
    return "step", "--head", f"{head.layer}.{head.head}", "--word", word


def _facts(model: TextModel, given: _Read) -> dict[str, Any]:
    return {"format": 1, "text": given.text, "model": model.name, "tokens": given.pieces}


def _print_facts(console: Console, model: TextModel, given: _Read) -> None:
    counts = counted(model.layers, "layer"), counted(sum(model.heads), "head")
    console.print(", ".join([counted(len(given.pieces), "token"), model.name, *counts]), style="dim", highlight=False)
    console.print()
