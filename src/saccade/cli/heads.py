"""`saccade heads`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..support._garbage_collection import uncollected
from ._errors import UserError, require
from ._options import CommonOptions, GroupedCommand, flattened, option
from ._parts._heads_measured import Measured
from ._parts._outputs import result_console
from ._parts._texts import InputText, TextArgument, command_line, existing_text, given_text, parse_head

if TYPE_CHECKING:
    from ..see.inspection import TextModel

FIGURES = (".svg", ".png", ".pdf")
BY = {"importance": ("gradient", "ablation", "greedy"), "patch": ("gradient", "exact")}


@dataclasses.dataclass(frozen=True)
class QuestionOptions:
    """Question  [default: what each head contributes to the prediction of TEXT]"""

    roles: bool = option(
        False,
        "Measure the role of every head (previous token, sink, repeat, ...) on TEXT and on repeated random tokens, "
        "and keep them beside the model, where saccade look finds them. TEXT is one that the model was not trained "
        "on; 4,000 tokens of it are read.  [default: docstrings of Saccade]",
    )
    importance: bool = option(False, "Show only how much the prediction of TEXT depends on each head.")
    patch: str | None = option(
        None,
        "Find the heads that carry the difference between TEXT and OTHER: each head's output for TEXT "
        "replaces its output for OTHER. OTHER is a text or a file with the same number of tokens.",
        metavar="OTHER",
        callback=existing_text(),
    )
    why: tuple[str, str] | None = option(
        None,
        "Explain why the first word attends to the second. A word is cat, its second occurrence cat:2, or "
        "its number, counted from 1. For a word of several tokens, the query is its last token and the key "
        "is its token with the largest weight.",
        metavar="WORD WORD",
    )


@dataclasses.dataclass(frozen=True)
class HowOptions:
    """How"""

    by: str | None = option(
        None,
        "gradient (first-order estimate of the rise in loss without the head: minus the derivative with "
        "respect to a factor on the head, signed; saccade prune ranks by its absolute value), ablation (the "
        "exact rise without that head) or greedy (remove one head after the other). With --patch: gradient "
        "or exact.  [default: gradient; with --patch both]",
        metavar="WAY",
    )
    target: str | None = option(
        None,
        "The word whose prediction is explained, or two: mat,hat means mat rather than hat.  [default: the "
        "model's own next token; with --patch that of TEXT rather than that of OTHER]",
        metavar="WORD[,WORD]",
    )
    positions: str | None = option(
        None,
        "With --patch: the tokens to patch, counted from 0, such as 3,5-7. The texts may then differ in "
        "length; a number means the same position in both.",
        metavar="LIST",
    )
    head: str | None = option(
        None,
        "With --why: the head; 1.4 is layer 1, head 4.  [default: the head with the largest weight for the pair]",
        metavar="LAYER.HEAD",
    )
    against: str | None = option(
        None, "With --why: another word, to explain why the key is preferred to it.", metavar="WORD"
    )


@dataclasses.dataclass(frozen=True)
class HeadsOptions(CommonOptions):
    """Options"""

    out: Path | None = option(None, "Write the maps as a figure: .svg, .png or .pdf.", metavar="FILE")


def register(app: typer.Typer) -> None:
    app.command("heads", cls=GroupedCommand, short_help="Show what the heads of a model do for a text, and why.")(
        flattened(heads)
    )


def heads(
    *,
    text: TextArgument = None,
    question: QuestionOptions,
    how: HowOptions,
    common: HeadsOptions,
) -> None:
    """Show what each head does for the prediction of TEXT: a map of layers x heads, sentences, and a picture.

    Asks one of five things: the overview, --roles, --importance, --patch or --why.
    """
    _check(question, how)
    if question.roles and common.out is not None:
        raise UserError("--out draws the other answers, not --roles; saccade look --out draws a model with its roles")
    given = InputText("", [], "") if question.roles and not text else given_text(text, "heads")
    _check_out(common)
    head = parse_head(how.head)
    with uncollected():  # imports PyTorch
        from ..see.inspection import open_model

    opened = open_model(common.model)
    if question.roles:
        measured = _roles(opened, given.text, quiet=common.as_numbers)
    elif question.why is not None:
        measured = _why(opened, given.text, question.why, how, head)
    elif question.patch is not None:
        measured = _patched(opened, given.text, question.patch, how, quiet=common.as_numbers)
    else:
        measured = _important(opened, given.text, question, how, quiet=common.as_numbers)
    _give(measured, common, given.again)


# What is asked


def _check(question: QuestionOptions, how: HowOptions) -> None:
    asked = [name for name, value in vars(question).items() if value]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(f'--{name}' for name in asked)} cannot be combined; give one of them")
    kind = asked[0] if asked else "overview"
    fits = {
        "by": ("overview", "importance", "patch"),
        "target": ("overview", "patch"),
        "positions": ("patch",),
        "head": ("why",),
        "against": ("why",),
    }
    for name, value in vars(how).items():
        if value is not None and kind not in fits[name]:
            raise UserError(f"--{name} goes with {_named(fits[name])}, not with {_named([kind])}")
    ways = BY["patch" if kind == "patch" else "importance"]
    if how.by is not None and how.by not in ways:
        raise UserError(f"--by {how.by}: expected {', '.join(ways[:-1])} or {ways[-1]} {_of(kind)}")


def _named(kinds: Any) -> str:
    return " or ".join("the overview" if kind == "overview" else f"--{kind}" for kind in kinds)


def _of(kind: str) -> str:
    return "with --patch" if kind == "patch" else "(exact is of --patch)"


def _check_out(common: HeadsOptions) -> None:
    if common.out is None:
        return
    if common.out.suffix.lower() not in FIGURES:
        raise UserError(f"--out {common.out}: a figure is written to an .svg, .png or .pdf; --json prints numbers")
    require("matplotlib", "plot")
    from ..see.viewer import check_target

    check_target(common.out, force=common.force)


# The answers


def _roles(opened: TextModel, text: str, *, quiet: bool) -> Measured:
    from ..see.analysis.tables import shown_progress
    from ._parts._heads_measured import measured_roles

    with shown_progress("heads", quiet=quiet) as progress:
        return measured_roles(opened, text or None, progress)


def _important(opened: TextModel, text: str, question: QuestionOptions, how: HowOptions, *, quiet: bool) -> Measured:
    from ..see.analysis.tables import shown_progress
    from ._parts._heads_measured import importance, why_offered

    with why_offered(), shown_progress("heads", quiet=quiet) as progress:
        return importance(opened, text, how.by or "gradient", how.target, progress, alone=question.importance)


def _patched(opened: TextModel, text: str, other: str, how: HowOptions, *, quiet: bool) -> Measured:
    from ..see.analysis.tables import shown_progress
    from ._parts._heads_measured import patched, why_offered
    from ._parts._texts import text_or_file

    try:
        corrupted = text_or_file(other).text
    except UserError as error:
        raise UserError(f"--patch: {error}") from error
    with why_offered(), shown_progress("heads", quiet=quiet) as progress:
        return patched(opened, text, corrupted, how.by, how.target, how.positions, progress)


def _why(
    opened: TextModel, text: str, words: tuple[str, str], how: HowOptions, head: tuple[int, int] | None
) -> Measured:
    from ._parts._heads_measured import explained

    return explained(opened, text, words, head, how.against)


def _give(measured: Measured, common: HeadsOptions, again: list[str]) -> None:
    if common.out is not None:
        from ..see.viewer import check_target, write_whole

        target = check_target(common.out, force=common.force)
        write_whole(target, measured.draw(common.out.suffix.lower()[1:]))
    if common.as_numbers:
        numbers = measured.numbers | {"figure": None if common.out is None else str(common.out)}
        typer.echo(json.dumps(numbers, separators=(",", ":"), allow_nan=False))
        return
    console = result_console()
    measured.show(console)
    console.print()
    from rich.text import Text

    if common.out is not None:
        console.print(Text.assemble(("Figure  ", "dim"), (str(common.out), "bold")), soft_wrap=True)
    name, *options = measured.following
    model = ["--model", common.model] if common.model else []
    console.print(Text.assemble(("Next    ", "dim"), command_line(name, *model, *options, *again)), soft_wrap=True)
