"""The options of `saccade compare`, by theme: each dataclass is one, its fields are options of the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._bench_options import listed

if TYPE_CHECKING:
    from ..benchmark.variants.measuring import ComparisonSettings


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Data: one of random numbers, a file, or a model that reads a text"""

    random: Annotated[
        str | None, typer.Option(metavar="B,H,D", help="Normal numbers: batch, heads, width of a head.")
    ] = None
    tensors: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="query, key and value (B, H, L, D) in a .safetensors or .pt file."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR_OR_HUB_ID",
            help="Those of this model, a folder or a name on the Hugging Face hub.  [default: the embedded model]",
        ),
    ] = None
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The text it reads.  [default: the start of a novel]")
    ] = None
    layer: Annotated[
        int | None, typer.Option(metavar="N", help="Its layer, counted from 0.  [default: the middle one]")
    ] = None
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--bidirectional",
            help="Whether no token sees a later one.  [default: as the model; otherwise causal]",
            show_default=False,
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class ComparedOptions:
    """What is compared"""

    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:SETTING]",
            help="Only this one and exact attention: linear, or linear:feature_map=relu; may be given again.",
        ),
    ] = None
    layers: Annotated[
        bool, typer.Option("--layers/--no-layers", help="LSTM, GRU, convolutions and a connected layer, too.")
    ] = True
    lengths: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Tokens: 1000 or 4k.  [default: 256,1k,4k,8k; quick: 256,1k,2k]"),
    ] = None
    abilities: Annotated[
        bool, typer.Option("--list", help="Measure nothing: show what each mechanism can and cannot do.")
    ] = False


@dataclasses.dataclass(frozen=True)
class CompareMeasuringOptions:
    """Measuring"""

    threads: Annotated[int | None, typer.Option(help="Threads.  [default: as many as PyTorch takes]")] = None
    seconds: Annotated[
        float | None, typer.Option(help="Time for each length and kind of call.  [default: 1; quick: 0.1]")
    ] = None
    rounds: Annotated[int | None, typer.Option(help="Rounds at least.  [default: 3; quick: 2]")] = None
    most_memory: Annotated[float, typer.Option(help="GiB beyond which something is left out.")] = 4.0
    longest_call: Annotated[float, typer.Option(help="Seconds of a call beyond which something is left out.")] = 10.0
    tolerance: Annotated[float, typer.Option(help="Relative error up to which the advice takes an approximation.")] = (
        0.1
    )
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Fewer rounds and lengths: about a minute on two idle cores, two or more on busy ones."
        ),
    ] = False


@dataclasses.dataclass(frozen=True)
class CompareOutputOptions:
    """Output: files are replaced"""

    as_json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Every reading, for programs; - prints it.")
    ] = None
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="The results as a page.")] = None
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The trade-offs as a figure: .png or .svg (matplotlib).")
    ] = None
    read: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure nothing: show a --json FILE, or for tasks --records.")
    ] = None


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Tasks: train a small model with each mechanism instead"""

    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="copy, duplication, recall, induction, needle, or all; several with commas, or given again.",
        ),
    ] = None
    steps: Annotated[int | None, typer.Option(help="Of training, at most, for each learning rate.  [default: 600]")] = (
        None
    )
    rates: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Learning rates, tried in turn until one solves.  [default: .01,.003]"),
    ] = None
    seeds: Annotated[int, typer.Option(help="Runs of each; the table has their median.")] = 1
    records: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append each run to this .jsonl; those that stand there are not repeated."),
    ] = None


def refuse_beside(why: str, *given: object) -> None:
    """ValueError for the first option, of these groups, that is not as usual.

    An option without effect is a mistake of who gave it.
    """
    for group in given:
        for field in dataclasses.fields(group):  # type: ignore[arg-type]
            if getattr(group, field.name) != field.default:
                raise ValueError(f"{field.name.replace('_', '-')}: {why}")


def settings_of(measuring: CompareMeasuringOptions) -> ComparisonSettings:
    import torch

    from ..benchmark.attention import Budget
    from ..benchmark.variants.measuring import ComparisonSettings
    from ..benchmark.variants.weighing import WeighingLimits

    quick = measuring.quick
    seconds = measuring.seconds if measuring.seconds is not None else (0.1 if quick else 1.0)
    rounds = measuring.rounds if measuring.rounds is not None else (2 if quick else 3)
    if rounds < 1:
        raise ValueError(f"rounds: must be at least 1, got {rounds}")
    for name in ("most_memory", "longest_call", "tolerance"):
        if not getattr(measuring, name) > 0:
            raise ValueError(f"{name.replace('_', '-')}: must be positive, got {getattr(measuring, name)}")
    return ComparisonSettings(
        torch.get_num_threads() if measuring.threads is None else measuring.threads,
        Budget(seconds, rounds, max(100, rounds)),
        WeighingLimits(int(measuring.most_memory * 2**30), measuring.longest_call),
        measuring.seed,
    )


def lengths_of(chosen: ComparedOptions, *, quick: bool) -> list[int]:
    """Ascending, each once."""
    usual = "256,1k,2k" if quick else "256,1k,4k,8k"
    found = [tokens(text) for text in listed(chosen.lengths or usual, "lengths", str)]
    if min(found) < 2:
        raise ValueError(f"lengths: must be at least 2, got {min(found)}")
    return sorted(set(found))


def tokens(text: str) -> int:
    """1000, or 4k."""
    try:
        return int(text[:-1]) * 1024 if text.endswith("k") else int(text)
    except ValueError:
        raise ValueError(f"lengths: expected numbers of tokens as 1000 or 4k, got {text!r}") from None
