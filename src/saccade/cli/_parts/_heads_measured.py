"""What `saccade heads` measures of a text, and how it is shown: each question as numbers, lines and a figure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...support._numbers import counted
from .._errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from ...see.attribution import Attribution, WhyAttends
    from ...see.attribution._two_texts import ReadText
    from ...see.inspection import Predictor, TextModel
    from ...support._terminal._console import Console

MOST_PARTS = 16  # of a text, over which the interval of a head's importance is taken
Progress = Callable[[int, int], None]
OPTIONS = {
    "other": "--patch",
    "target": "--target",
    "positions": "--positions",
    "key": "--why",
    "against": "--against",
}


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


@contextlib.contextmanager
def _told_as_options() -> Iterator[None]:
    """A block whose errors about arguments name the options of the command."""
    try:
        yield
    except ValueError as error:
        begins = re.match(rf"({'|'.join(OPTIONS)})\b", str(error))
        if not begins:
            raise
        later = "" if begins[0] in ("key", "against") else r"|\b(target|positions)\b"
        said = re.sub(rf"^{begins[0]}\b{later}", lambda name: OPTIONS[name[0]], str(error))
        raise UserError(said) from error


@contextlib.contextmanager
def why_offered() -> Iterator[None]:
    """A block whose error about a model without a head for tokens names the option that needs no such head."""
    from ...see.inspection._predicting import NoTokenHead

    try:
        yield
    except NoTokenHead as error:
        raise UserError(f"{error}; --why WORD WORD needs no such head") from error


def measured_roles(model: TextModel, text: str | None, progress: Progress) -> Measured:
    """The role of every head, kept beside the model; on the docstrings of Saccade if there is no text."""
    from ...see.inspection import measure_roles
    from ...see.viewer.heads import print_roles

    found = measure_roles(model, docstrings() if text is None else text, progress=progress)
    kept = None if model.kept_roles is None else str(model.kept_roles.write(found))

    def show(console: Console) -> None:
        counts = counted(model.layers, "layer"), counted(sum(model.heads), "head")
        tokens = counted(found["text"]["tokens"], "token") + (" of docstrings" if text is None else " of the text")
        console.print(", ".join([tokens, model.name, *counts]), style="dim", highlight=False)
        console.print()
        print_roles(console, found)
        where = f"Kept in {kept}" if kept else "Not kept: the embedded model has its own"
        console.print(where, style="dim", highlight=False, soft_wrap=True)

    return Measured({"model": model.name, "kept": kept} | found, show, lambda _: b"", ("look", "The cat sat."))


def docstrings() -> str:
    """The docstrings of Saccade's files, one after the other: English that comes with every installation."""
    files = sorted(Path(__file__).parents[2].rglob("*.py"))
    found = (re.match(r'"""(.*?)"""', file.read_text(encoding="utf-8"), re.DOTALL) for file in files)
    return "\n\n".join(first[1] for first in found if first)


@_told_as_options()
def importance(
    model: TextModel, text: str, by: str, target: str | None, progress: Progress, *, alone: bool
) -> Measured:
    """How much the loss of the text depends on each head, and what heads write towards the predicted token."""
    from ... import head_importance
    from ...see.attribution._two_texts import read_text, target_tokens
    from ...see.inspection import as_predictor
    from ...see.viewer import heads as shown

    predictor, given = as_predictor(model), read_text(model, text)
    wanted = target_tokens(predictor, target)

    def losses(_: object, ids: Tensor) -> Tensor:
        return _parts(predictor.losses(ids))

    found = head_importance(predictor.module, [given.ids], losses, by=by, progress=progress)
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


def _parts(losses: Tensor) -> Tensor:
    """(T,) what each part of a text adds to the mean of its tokens' losses (P,), times T: each token, or eight parts.

    Gradients of a part take a backward pass, and neighbouring tokens are not independent.
    """
    from torch import stack

    count = len(losses)
    parts = count if count <= MOST_PARTS else MOST_PARTS // 2
    return stack([part.sum() * parts / count for part in losses.tensor_split(parts)])


def _attributed(
    model: TextModel, predictor: Predictor, given: ReadText, wanted: Sequence[int]
) -> tuple[Attribution | None, str]:
    """The attribution of a text, and "". None and the reason if what the model adds up is not found, or if a masked
    model's text has no mask."""
    from ... import attribute
    from ...see.attribution._traced_run import NoStream

    try:
        place = predictor.predicting(given.ids)
    except ValueError as error:
        if wanted:
            raise
        return None, str(error).removeprefix("text: ")
    chosen, other = [*wanted, None, None][:2]
    try:
        return attribute(model, given.text, chosen, against=other, position=place), ""
    except NoStream as error:
        return None, str(error).removeprefix("model: ")


def _loss_of(predictor: Predictor, given: ReadText) -> str:
    count = len(predictor.places(given.ids))
    if predictor.mask is None:
        return f"loss: -log p of each next token of this text, mean of {count}"
    among = given.ids.shape[1] - len(predictor.reader.before) - len(predictor.reader.after)
    return f"pseudo-loss: -log p of a token where it alone is masked, mean of {count} of {counted(among, 'token')}"


@_told_as_options()
def patched(
    model: TextModel,
    text: str,
    other: str,
    by: str | None,
    target: str | None,
    positions: str | None,
    progress: Progress,
) -> Measured:
    """The heads that carry the difference between two texts."""
    from ...see.attribution._heads import by_sign
    from ...see.attribution._patching import BY
    from ...see.attribution._two_texts import listed_positions, patch_texts
    from ...see.viewer import heads as shown

    ways, places = (BY if by is None else by), listed_positions(positions)
    made = patch_texts(model, text, other, by=ways, target=target, positions=places, progress=progress)
    found, clean, what = made.found, made.clean, made.measured

    def show(console: Console) -> None:
        _print_facts(console, model, clean)
        shown.print_patching(console, found, what)
        if len(made.words) == 1 and target is None:
            said = f"Both texts are continued by {made.words[0]!r}; --target A,B compares two words of yours."
            console.print(said, style="dim", highlight=False)

    numbers = _facts(model, clean) | {
        "other": {"text": made.corrupted.text, "tokens": made.corrupted.pieces},
        "metric": {"of": what, "tokens": made.words},
        "patching": found.as_json(),
        "sentences": shown.patching_sentences(found),
    }
    restoring, opposing = by_sign(found.ranked())
    following = ("step", "--head", str((restoring or opposing or found.ranked())[0][0]))
    return Measured(numbers, show, lambda kind: shown.draw_patching(found, kind, what), following)


@_told_as_options()
def explained(
    model: TextModel, text: str, words: tuple[str, str], head: tuple[int, int] | None, against: str | None
) -> Measured:
    """Why one word attends to another."""
    from ... import why_attends
    from ...see.viewer import heads as shown

    found = why_attends(model, text, *words, head=head, against=against)
    if not found.visible:
        raise UserError(
            f"--why {' '.join(words)}: the mask hides {found.labels[found.key]} (token {found.key}) from "
            f"{found.labels[found.query]} (token {found.query}); give the attending word first, then the word that it "
            "attends to"
        )

    def show(console: Console) -> None:
        shown.print_why(console, found)

    numbers = {"format": 1, "text": text, "model": model.name, "why": found.as_json()}
    return Measured(numbers, show, lambda kind: shown.draw_why(found, kind), _earlier(found, words))


def _earlier(answer: WhyAttends, words: tuple[str, str]) -> tuple[str, ...]:
    """The command for the earlier head whose part of the query or key adds most to the logit."""
    written = [
        (float(share), one, word)
        for word, shares in zip(words, (answer.of_query, answer.of_key), strict=True)
        for one, share in zip(answer.components, shares, strict=True)
        if one.kind == "head"
    ]
    if not written:
        return "step", "--head", f"{answer.layer}.{answer.head}", "--word", words[0]
    _, head, word = max(written, key=lambda one: one[0])
    return "step", "--head", f"{head.layer}.{head.head}", "--word", word


def _facts(model: TextModel, given: ReadText) -> dict[str, Any]:
    return {"format": 1, "text": given.text, "model": model.name, "tokens": given.pieces}


def _print_facts(console: Console, model: TextModel, given: ReadText) -> None:
    tokens = counted(len(given.pieces), "token") + _with_special(model)
    counts = counted(model.layers, "layer"), counted(sum(model.heads), "head")
    console.print(", ".join([tokens, model.name, *counts]), style="dim", highlight=False)
    console.print()


def _with_special(model: TextModel) -> str:
    """Numbers that include special tokens; `saccade look` counts only the text's own."""
    before, after = len(model.before), len(model.after)
    if not before + after:
        return ""
    return " with the start token" if (before, after) == (1, 0) else f" with {counted(before + after, 'special one')}"
