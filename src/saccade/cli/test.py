"""`saccade test`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ._parts._existing import existing_data
from ._parts._run_options import Changes, Picture, Run, RunCommand, changes_of, picture_target


def register(app: typer.Typer) -> None:
    app.command("test", cls=RunCommand, short_help="Evaluate a trained model on new data.")(test)


def test(
    run: Run,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="Labelled data in the format of `saccade train`.",
            show_default=False,
            callback=existing_data(),
        ),
    ],
    changes: Changes = None,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Also train the task's simple baseline, for comparison.")
    ] = True,
    picture: Picture = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Evaluate the model of RUN on DATA, and compare it with a simple baseline trained on the same examples.

    If the baseline is better, the first line says so. For runs with several seeds, the report shows mean and spread.
    """
    target = picture_target(picture)
    from ..make.tasks import test as judge, test_seeds
    from ..make.tasks._runs._seeds import seed_folders

    report = (test_seeds if seed_folders(run) else judge)(run, data, baseline=baseline, **changes_of(changes))
    typer.echo(json.dumps(report.as_dict(), indent=1) if as_json else str(report))
    if target is not None:  # after the figures: a task may have none
        report.save_picture(target)
        if not as_json:
            typer.echo(f"picture: {target}")
