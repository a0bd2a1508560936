"""`saccade train rate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._errors import UserError, require
from .._train_options import MachineOptions, ModelOptions, RangeTestOptions, Text, TextInputOptions, settings_of

if TYPE_CHECKING:
    from ...make.training import RangeTest

LINES = 20  # rows of the table


def learning_rate(
    text: Text,
    data: TextInputOptions,
    shape: ModelOptions,
    trial: RangeTestOptions,
    machine: MachineOptions,
    out: Annotated[
        Path | None, typer.Option(help="A folder for rate.csv, rate.json and (matplotlib) rate.png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find a learning rate: train with a rate that rises at each step until the loss diverges (Smith 2017).

    Give the same options for text, model and batch as for `saccade train lm`. The model is not saved.
    """
    require("accelerate", "train")
    if out is not None and out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file, expected a folder to write the curve into")
    from ...make.training.language.prepared import range_test_of
    from ...make.training.language.request import LanguageRun
    from ...make.training.progress import rates_shown

    run = LanguageRun(
        text,
        Path("."),
        settings_of(data, trial.learning, machine),
        shape.fields,
        hold_out=tuple(data.hold_out or ()),
        vocabulary=data.pieces,
    )
    begin = f"{trial.steps} steps with rates from {trial.low:g} to {trial.high:g} on {text}; a table follows"
    with rates_shown(trial.steps, quiet=as_json) as progress:

        def stepped(rate: float, loss: float) -> None:
            if rate == trial.low and not as_json:  # the input is valid now
                typer.echo(begin)
            progress(rate, loss)

        result = range_test_of(run, low=trial.low, high=trial.high, progress=stepped)
    rates = {"suggestion": result.suggestion, "edge": result.edge, "steepest": result.steepest}
    whole = {
        **rates,
        "diverged": result.diverged,
        "rates": result.rates,
        "losses": result.losses,
        "smoothed": result.smoothed,
    }
    if out is not None:
        _write(out, result, whole)
    typer.echo(json.dumps(whole, indent=1) if as_json else _table(result))


def _table(result: RangeTest) -> str:
    every = -(-len(result.rates) // LINES)
    rows = list(zip(result.rates, result.losses, result.smoothed, strict=True))[::every]
    lines = ["      rate      loss  smoothed", *(f"{rate:10.2e}{loss:10.4f}{mean:10.4f}" for rate, loss, mean in rows)]
    end = "then it diverged" if result.diverged else "it never diverged: --high may be higher"
    return "\n".join(
        [
            *lines,
            "",
            f"the loss fell fastest at {result.steepest:.1e} and was lowest at {result.edge:.1e}; {end}",
            f"suggested: --rate {result.suggestion:.1e}",
        ]
    )


def _write(out: Path, result: RangeTest, whole: dict[str, object]) -> None:
    import importlib.util

    from ...make.models.decoder_lm.checkpoint import write_text

    out.mkdir(parents=True, exist_ok=True)
    rows = zip(result.rates, result.losses, result.smoothed, strict=True)
    write_text(out / "rate.csv", "rate,loss,smoothed\n" + "".join(f"{r!r},{x!r},{m!r}\n" for r, x, m in rows))
    write_text(out / "rate.json", json.dumps(whole, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is not None:
        _draw(out / "rate.png", result)


def _draw(path: Path, result: RangeTest) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(result.rates, result.losses, color="0.7", label="loss")
    axes.plot(result.rates, result.smoothed, label="smoothed")
    axes.axvline(result.edge, color="0.3", linestyle=":", label=f"lowest, {result.edge:.1e}")
    axes.axvline(result.suggestion, color="tab:green", label=f"suggested, {result.suggestion:.1e}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss (nats per token)")
    axes.legend()
    figure.savefig(path, dpi=144)
