"""`saccade generate`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import typer

from ..support._terminal import uncleaned
from ._options import GroupedCommand
from ._parts._existing import existing_model


def register(app: typer.Typer) -> None:
    app.command("generate", cls=GroupedCommand, short_help="Continue a text, token by token.")(generate)


def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The start of the text; may be empty.", show_default=False)
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR_OR_HUB_ID",
            callback=existing_model(),
            help="A folder with a Saccade model or with published weights of a decoder (GPT-2, Llama, ...), or a name "
            "on the Hugging Face hub.  [default: the embedded model]",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens to write; generation also stops at the end of the context.")
    ] = 100,
    temperature: Annotated[
        float,
        typer.Option(help="Divide the logits by this: higher is more random, 0 always takes the most probable token."),
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Sample only from the k most probable tokens.  [default: all]")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample only from the most probable tokens whose probabilities sum to p.  [default: all]"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of sampling: the same seed gives the same text.  [default: random]")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What linear layers hold: bfloat16, int8, int4 or stored; a token takes the time of reading them.  "
            "[default: floats]",
        ),
    ] = None,
) -> None:
    """Continue PROMPT, token by token."""
    from ..make.models import Sampling, TransformersModel, generate as pieces, load
    from ..make.models.decoding.generating import GeneratingModel

    if tokens < 1:
        raise ValueError(f"tokens: must be at least 1, got {tokens}")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    opened = load(model, weights=weights)
    if not isinstance(opened, (GeneratingModel, TransformersModel)):
        raise ValueError(f"model: {model} is {opened.family.name}, which does not generate text; expected a decoder")
    sampling = replace(sampling, repetition_penalty=opened.repetition_penalty)
    continuation = pieces(opened, prompt, tokens, sampling)
    first = next(continuation, "")  # errors about the prompt are raised before anything is printed
    written = sys.stdout if sys.stdout.isatty() else uncleaned(sys.stdout)  # raw in a pipe or a file
    typer.echo(prompt + first, file=written, nl=False)
    for piece in continuation:
        typer.echo(piece, file=written, nl=False)
    typer.echo(file=written)
