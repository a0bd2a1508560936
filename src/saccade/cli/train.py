"""`saccade train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._errors import require

if TYPE_CHECKING:
    from ..models import LanguageModel
    from ..training import LanguageRun


def register(app: typer.Typer) -> None:
    train = typer.Typer(no_args_is_help=True, help="Train a model of your own.")
    train.command("lm")(language_model)
    app.add_typer(train, name="train")


def language_model(
    text: Annotated[Path, typer.Argument(help="A text file, or a folder of .txt files.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder to write the model into.")] = Path("runs/lm"),
    hold_out: Annotated[
        list[Path] | None,
        typer.Option(help="Validate on this file, do not train on it; may be given again.  [default: the last tenth]"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model in --out.")] = False,
    characters: Annotated[bool, typer.Option("--characters", help="Tokens are characters, not BPE pieces.")] = False,
    initial: Annotated[
        Path | None,
        typer.Option("--from", help="Start from this model's weights and tokenizer.  [default: random weights]"),
    ] = None,
    vocabulary: Annotated[int, typer.Option(help="Size of the BPE vocabulary.")] = 2048,
    layers: Annotated[int, typer.Option(help="Decoder blocks.")] = 4,
    heads: Annotated[int, typer.Option(help="Query heads of each block.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads.  [default: as many]")] = None,
    width: Annotated[int, typer.Option(help="Width of the residual stream.")] = 256,
    hidden: Annotated[int | None, typer.Option(help="Width inside feed-forward.  [default: 8/3 of --width]")] = None,
    context: Annotated[int, typer.Option(help="Tokens the model sees at once.")] = 256,
    dropout: Annotated[float, typer.Option(help="Dropout on embedding and residual stream.")] = 0.1,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 2000,
    batch: Annotated[int, typer.Option(help="Windows in each step.")] = 16,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps up to it.")] = 100,
    decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.1,
    beta2: Annotated[float, typer.Option(help="AdamW's second beta.")] = 0.98,
    clip: Annotated[float, typer.Option(help="Largest gradient norm.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of windows, weights and dropout.")] = 0,
    precision: Annotated[str, typer.Option(help="bf16 (autocast) or no (float32).")] = "bf16",
    every: Annotated[int, typer.Option(help="Steps between looks at the validation text.")] = 250,
    repeats: Annotated[float, typer.Option(help="Share of windows that say something twice (teaches copying).")] = 0.0,
    copying: Annotated[int, typer.Option(help="Steps on repeated random tokens before the text (the same).")] = 0,
) -> None:
    """Train a language model on TEXT, and measure what its heads do.

    Keeps the best weights while it runs; Ctrl-C keeps what there is.
    """
    require("accelerate", "train")
    from ..training import LanguageRun, Settings, train_language_model
    from ..training.progress import ConsoleReporter

    settings = Settings(
        steps=steps,
        batch=batch,
        peak=rate,
        warmup=warmup,
        weight_decay=decay,
        beta2=beta2,
        clip=clip,
        seed=seed,
        precision=precision,
        evaluate_every=every,
        repeats=repeats,
        copying=copying,
    )
    shape = {
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "width": width,
        "hidden": hidden,
        "context": context,
        "dropout": dropout,
    }
    run = LanguageRun(
        text,
        out,
        settings,
        shape,
        hold_out=tuple(hold_out or ()),
        vocabulary=None if characters else vocabulary,
        overwrite=overwrite,
        initial=initial,
    )
    try:
        with ConsoleReporter(run) as reporter:
            lm = train_language_model(run, reporter)
    except KeyboardInterrupt:
        if out.exists():
            typer.echo(f"saccade: stopped; {out} keeps the best weights and the last", err=True)
        raise
    _measure_heads(lm, run)
    typer.echo(f"{out}: model written. Next:")
    typer.echo(f'  saccade generate --model {out} "Once upon a time"')
    typer.echo(f'  saccade look --model {out} "Once upon a time there was a time"')


def _measure_heads(lm: LanguageModel, run: LanguageRun) -> None:
    """Find out what each head does, on validation text, and keep it beside the weights."""
    from ..models import save
    from ..training.run import texts
    from ..watching import measure_roles

    lm.heads = measure_roles(lm, "\n".join(texts(run)[1]))
    save(lm, run.out)
