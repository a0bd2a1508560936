"""The options of `saccade compare`: a dataclass for each group, a field for each option."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from .._options import option
from ._existing import existing, existing_model
from ._outputs import budget_of, listed

if TYPE_CHECKING:
    from ...benchmark.variants.measuring import ComparisonSettings


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Data: one of random numbers, a file, or a model that reads a text"""

    random: str | None = option(None, "Random normal q, k and v: batch, heads, head width.", metavar="B,H,D")
    tensors: Path | None = option(
        None,
        "A .safetensors or .pt file with query, key and value (B, H, L, D).",
        metavar="FILE",
        callback=existing("a .safetensors or .pt file", kind="file"),
    )
    model: str | None = option(
        None,
        "Use q, k and v of this model: a folder or a name on the Hugging Face hub.  [default: the embedded model]",
        metavar="DIR_OR_HUB_ID",
        callback=existing_model(),
    )
    text: Path | None = option(
        None,
        "The text that the model reads.  [default: the start of a novel]",
        metavar="FILE",
        callback=existing("a text file", kind="file"),
    )
    layer: int | None = option(None, "Layer of the model, counted from 0.  [default: the middle one]", metavar="N")
    causal: bool | None = option(
        None,
        "Whether tokens attend only to earlier tokens and themselves.  [default: as the model; otherwise causal]",
        "--causal/--bidirectional",
        show_default=False,
    )


@dataclasses.dataclass(frozen=True)
class ComparedOptions:
    """What is compared"""

    mechanism: list[str] | None = option(
        None,
        "Compare only this mechanism with exact attention: linear, or linear:feature_map=relu; repeat it for more.",
        metavar="NAME[:SETTING]",
    )
    layers: bool = option(
        True, "Also compare LSTM, GRU, convolutions and a fully connected layer.", "--layers/--no-layers"
    )
    lengths: str | None = option(
        None, "Lengths in tokens: 1000 or 4k.  [default: 256,1k,4k,8k; quick: 256,1k,2k]", metavar="LIST"
    )
    abilities: bool = option(False, "Show what each mechanism can and cannot do, without measuring.", "--list")


@dataclasses.dataclass(frozen=True)
class CompareMeasuringOptions:
    """Measuring"""

    threads: int | None = option(None, "Number of threads.  [default: PyTorch's setting]")
    seconds: float | None = option(None, "Seconds for each length and kind of call.  [default: 1; quick: 0.1]")
    rounds: int | None = option(None, "Minimum number of rounds.  [default: 3; quick: 2]")
    most_memory: float = option(4.0, "Skip a mechanism that needs more than this many GiB.")
    longest_call: float = option(10.0, "Skip a mechanism of which one call takes more than this many seconds.")
    tolerance: float = option(0.1, "Largest relative error at which the advice recommends an approximation.")
    seed: int = option(0, "Seed of all random numbers.")
    quick: bool = option(
        False, "Fewer rounds and lengths: about one minute on two idle cores, two or more on busy ones.", "--quick"
    )


@dataclasses.dataclass(frozen=True)
class CompareOutputOptions:
    """Output: files are replaced"""

    as_json: str | None = option(None, "Write every measurement as JSON; - prints it.", "--json", metavar="FILE")
    markdown: Path | None = option(None, "Write the results as a Markdown page.", metavar="FILE")
    plot: Path | None = option(None, "Plot the trade-offs: .png or .svg (needs matplotlib).", metavar="FILE")
    read: Path | None = option(
        None,
        "Show a --json FILE, or with --task a --records file, without measuring.",
        metavar="FILE",
        callback=existing("a file that --json or --records wrote", kind="file"),
    )


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Tasks: train a small model with each mechanism instead"""

    task: list[str] | None = option(
        None,
        "copy, duplication, recall, induction, needle or all; separate several with commas, or repeat the option.",
        metavar="NAME",
    )
    steps: int | None = option(None, "Maximum training steps for each learning rate.  [default: 600]")
    rates: str | None = option(
        None, "Learning rates, tried in turn until one solves the task.  [default: .01,.003]", metavar="LIST"
    )
    seeds: int = option(1, "Runs of each mechanism; the table shows their median.")
    records: Path | None = option(
        None, "Append each run to this .jsonl; runs that it already has are not repeated.", metavar="FILE"
    )


def refuse_beside(why: str, *given: object) -> None:
    """ValueError for the first option in these groups that differs from its default.

    An option without effect is a user's mistake.
    """
    for group in given:
        for field in dataclasses.fields(group):  # type: ignore[arg-type]
            if getattr(group, field.name) != field.default:
                raise ValueError(f"{field.name.replace('_', '-')}: {why}")


def settings_of(measuring: CompareMeasuringOptions) -> ComparisonSettings:
    import torch

    from ...benchmark.variants.measuring import ComparisonSettings
    from ...benchmark.variants.weighing import WeighingLimits

    quick = measuring.quick
    budget = budget_of(measuring, seconds=0.1 if quick else 1.0, rounds=2 if quick else 3)
    for name in ("most_memory", "longest_call", "tolerance"):
        if not getattr(measuring, name) > 0:
            raise ValueError(f"{name.replace('_', '-')}: must be positive, got {getattr(measuring, name)}")
    return ComparisonSettings(
        torch.get_num_threads() if measuring.threads is None else measuring.threads,
        budget,
        WeighingLimits(int(measuring.most_memory * 2**30), measuring.longest_call),
        measuring.seed,
    )


def lengths_of(chosen: ComparedOptions, *, quick: bool) -> list[int]:
    """The lengths in ascending order, without duplicates."""
    usual = "256,1k,2k" if quick else "256,1k,4k,8k"
    lengths = [tokens(text) for text in listed(chosen.lengths or usual, "lengths", str)]
    if min(lengths) < 2:
        raise ValueError(f"lengths: must be at least 2, got {min(lengths)}")
    return sorted(set(lengths))


def tokens(text: str) -> int:
    """Parse a number of tokens such as 1000 or 4k."""
    try:
        return int(text[:-1]) * 1024 if text.endswith("k") else int(text)
    except ValueError:
        raise ValueError(f"lengths: expected numbers of tokens as 1000 or 4k, got {text!r}") from None
