"""`saccade predict`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ._parts._existing import existing
from ._parts._run_options import Changes, Picture, Run, RunCommand, changes_of, picture_target

PROBABILITIES = ("probability", "probabilities")
# Of an input that is meant to be a file, though it is not there.
_ENDINGS = tuple(".csv .tsv .jsonl .json .txt .conll .png .jpg .jpeg .wav .flac .npz .fasta".split())


def register(app: typer.Typer) -> None:
    app.command("predict", cls=RunCommand, short_help="Predict new inputs with a trained model.")(predict)


def predict(
    run: Run,
    given: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="A file or folder in the format of the training data, a .txt with one input per line, an input in "
            "quotes, or - for lines on standard input. forecast accepts only a file.",
            show_default=False,
            callback=existing(named=lambda given: Path(given) if _is_named_as_a_file(given) else None),
        ),
    ] = "-",
    changes: Changes = None,
    picture: Picture = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines in a terminal too; piped output always has them.")
    ] = False,
) -> None:
    """Print the prediction of the model of RUN for each INPUT, with probabilities; piped output is JSON lines."""
    from ..make.tasks._examples import text_lines
    from ..make.tasks._runs._predicting import predicted
    from ..make.training.verdict import untrained
    from ..support._terminal import standard_input, uncleaned

    target = picture_target(picture)
    for line in untrained(run):
        typer.echo(f"saccade: warning: {line}", err=True)
    inputs = text_lines(standard_input().read()) if given == "-" else _file_or_text(given)
    result = predicted(run, inputs, **changes_of(changes))
    in_lines = as_json or not sys.stdout.isatty()
    for n, values in enumerate(result.values):
        if in_lines:
            typer.echo(json.dumps(_rounded(values), ensure_ascii=False), file=uncleaned(sys.stdout))
        else:
            typer.echo("(empty)" if n in result.empty else result.task.line(values))
    if target is not None:  # after the lines: a task may have none
        result.save_picture(target)
        typer.echo(f"picture: {target}", err=in_lines)  # programs read the lines alone


def _rounded(value: Any, *, probability: bool = False) -> Any:
    """Plain values with four digits of every probability."""
    if isinstance(value, dict):
        return {key: _rounded(part, probability=probability or key in PROBABILITIES) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part, probability=probability) for part in value]
    return round(value, 4) if probability and isinstance(value, float) else value


def _file_or_text(given: str) -> str | Path:
    path = Path(given)
    try:
        there = given != "" and path.exists()  # "" is the folder one is in to `Path`
    except OSError:  # a text longer than a name may be
        there = False
    return path if there or _is_named_as_a_file(given) else given


def _is_named_as_a_file(given: str) -> bool:
    return Path(given).suffix.lower() in _ENDINGS and len(given.split()) == 1
