"""`saccade diagram`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._errors import UserError, require
from ._options import GroupedCommand

KINDS = ("attention", "multi-head", "block", "transformer", "decoder-step", "variants")
PLAIN = ("attention", "multi-head")
FORMATS = (".svg", ".png", ".html", ".htm")


def register(app: typer.Typer) -> None:
    app.command("diagram", cls=GroupedCommand, short_help="Draw attention from a real model, with its numbers.")(
        diagram
    )


def diagram(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help=f"{', '.join(KINDS)}.", show_default=False, autocompletion=lambda: list(KINDS)
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR_OR_HUB_ID",
            help="A model folder or a name on the Hugging Face hub. For block and transformer also a published "
            "architecture without weights: vaswani, bert, gpt2, llama, t5, bart, marian, vit, wav2vec2, esm, "
            "patchtst, gat or graphormer.  [default: the embedded model]",
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The input text for attention, multi-head and decoder-step.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The target so far, for decoder-step of an encoder-decoder.  [default: the first tokens that the "
            "model writes]",
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="LAYER.HEAD",
            help="The head, as layer.head, counted from 0; in decoder-step of an encoder-decoder decoder.1.4 and 1.4 "
            "are the same.  [default: the head with the most even weights]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file to write: .svg, .png or .html.  [default: saccade-KIND.svg]"),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Whole words and no numbers, for a slide or a telephone (attention, multi-head)."),
    ] = False,
    dark: Annotated[bool, typer.Option("--dark", help="Use the dark theme.  [default: the reader's setting]")] = False,
    light: Annotated[
        bool, typer.Option("--light", help="Use the light theme.  [default: the reader's setting]")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file even if Saccade did not write it.")] = False,
) -> None:
    """Draw attention, a block, a whole model, a step of decoding or the variants, from a real module."""
    if kind not in KINDS:
        raise UserError(f"{kind}: no kind of diagram; expected one of {', '.join(KINDS)}")
    if dark and light:
        raise UserError("--dark and --light are both given; give one of them")
    path = Path(f"saccade-{kind}.svg") if out is None else out
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--out {path}: expected a name that ends in .svg, .png or .html")
    if plain and kind not in PLAIN:
        raise UserError(f"--plain: not available for {kind}; only {' and '.join(PLAIN)} have a plain form")
    if kind == "variants" and model is not None:
        raise UserError("--model: not available for variants, which are drawn from saccade.variants")
    if path.suffix.lower() == ".png":
        require("resvg_py", "plot")

    from ..see.viewer import check_target
    from ..see.viewer.diagrams import diagram as draw

    check_target(path, force=force)
    theme = "dark" if dark else "light" if light else "auto"
    made = draw(None, kind, text=text, model=model, head=head, theme=theme, target=target, plain=plain)
    made.save(path, force=force)
    typer.echo(f"{made.title}\nDiagram: {path}")
