"""`saccade step`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..support._garbage_collection import uncollected
from ._errors import UserError
from ._options import CommonOptions, GroupedCommand, flattened, option
from ._parts._outputs import result_console
from ._parts._texts import TextArgument, given_text, parse_head

if TYPE_CHECKING:
    from ..see.inspection import Steps

PAGES = (".html", ".htm")
PARTS = ("encoder", "decoder", "cross")


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What is shown"""

    head: str | None = option(
        None,
        "The head: 1.4 is layer 1, head 4. An encoder-decoder also has decoder.1.4 and cross.1.4.  [default: "
        "the head in which the word attends most to a word that is not adjacent]",
        metavar="LAYER.HEAD",
    )
    word: str | None = option(
        None,
        "The word of the query: it, its second occurrence it:2, or its number, counted from 1.  [default: the last]",
        metavar="WORD",
    )
    nth: int | None = option(None, "Which occurrence of the word, counted from 1.", metavar="N")
    target: str | None = option(
        None,
        "The target text for an encoder-decoder; --word is then a word of it.  [default: the model's own output]",
        metavar="TEXT",
    )
    without: str | None = option(
        None,
        "Show how the weights change without scale, mask, position or shift; separate several with commas.",
        metavar="LIST",
    )
    example: bool = option(
        False, "Show a worked example with two keys and small numbers; it needs no TEXT and no model."
    )


@dataclasses.dataclass(frozen=True)
class StepFileOptions(CommonOptions):
    """Options"""

    out: Path | None = option(
        None, "Write an interactive HTML page instead; the arrow keys move between steps.", metavar="FILE.html"
    )


def register(app: typer.Typer) -> None:
    app.command("step", cls=GroupedCommand, short_help="Show one head and one word step by step, with its numbers.")(
        flattened(step)
    )


def step(
    *,
    text: TextArgument = None,
    chosen: StepOptions,
    common: StepFileOptions,
) -> None:
    """Show attention step by step: the real numbers of one head for one word, from the embedding to the output.

    Every step has its formula, its shapes, and what would happen without it.
    """
    if common.out is not None and common.out.suffix.lower() not in PAGES:
        raise UserError(f"--out {common.out}: a page is written to an .html")
    made = _example(text, chosen, common) if chosen.example else _of_text(text, chosen, common)
    if common.out is not None:
        _write(made, common.out, force=common.force)
    if common.as_numbers:
        typer.echo(json.dumps(made.as_json(), separators=(",", ":"), allow_nan=False))
        return
    console = result_console()
    if common.out is not None:
        from rich.text import Text

        console.print(Text.assemble(("Page  ", "dim"), (str(common.out), "bold")), soft_wrap=True)
        return
    from ..see.viewer import print_steps

    print_steps(console, made)


def _example(text: list[str] | None, chosen: StepOptions, common: CommonOptions) -> Steps:
    others = (common.model, chosen.head, chosen.word, chosen.nth, chosen.target)
    if text or any(given is not None for given in others):
        raise UserError(
            "--example has its own text and head; leave out TEXT, --head, --word, --nth, --target and --model"
        )
    from ..see.inspection import example

    return example(without=_listed(chosen.without))


def _of_text(text: list[str] | None, chosen: StepOptions, common: CommonOptions) -> Steps:
    given, head = given_text(text, "step"), _parsed(chosen.head)
    if common.out is not None:
        from ..see.viewer import check_target

        check_target(common.out, force=common.force)
    with uncollected():  # imports PyTorch
        from ..see.viewer import step as steps_of

    without = _listed(chosen.without)
    return steps_of(given.text, head, chosen.word, common.model, nth=chosen.nth, without=without, target=chosen.target)


def _parsed(head: str | None) -> tuple[int, int] | tuple[str, int, int] | None:
    """Layer and head of 1.4, with the part before them of cross.1.4."""
    part, point, place = (head or "").strip().partition(".")
    if not part.isalpha():
        return parse_head(head)
    if part not in PARTS or not point or not re.fullmatch(r"\d{1,6}\.\d{1,6}", place):
        raise UserError(f"--head {head}: expected layer.head, such as 1.4, or {', '.join(f'{p}.1.4' for p in PARTS)}")
    layer, _, number = place.partition(".")
    return part, int(layer), int(number)


def _listed(without: str | None) -> list[str]:
    return [] if without is None else [name.strip() for name in without.split(",") if name.strip()]


def _write(made: Steps, out: Path, *, force: bool) -> None:
    from ..see.viewer import check_target, write_whole

    write_whole(check_target(out, force=force), made.html().encode("utf-8"))
