"""`saccade bench`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .. import __version__
from ._options import GroupedCommand, flattened, option
from ._parts._existing import existing
from ._parts._outputs import budget_of, checked_files, listed, piece_bar, read_results, write_files, write_plot

if TYPE_CHECKING:
    from ..benchmark.attention import BenchmarkReport, Case, Contender, MeasurementGroup, MeasurementSettings

EPILOG = """
Exit status: 0 measured, 1 a result was wrong (it is shown without a speed), 2 bad input, 130 stopped by Ctrl-C (what
was measured until then is shown and written).
"""
Shape = tuple[str, str, str, int, int, int, int, int]  # of a `Case`, from its mask on


@dataclasses.dataclass(frozen=True)
class CaseOptions:
    """Cases: every combination is measured; lists are written 1,2,3"""

    length: str | None = option(
        None,
        "Tokens: 1000, 4k, or 4x (keys and values fill the last-level cache 4 times).  [default: 512,2k,8k; "
        "decode: 1x,4x]",
        metavar="LIST",
    )
    queries: str | None = option(None, "Number of queries.  [default: as many as keys; decode: 1]", metavar="LIST")
    batch: str = option("1", "Batch size in sequences.", metavar="LIST")
    heads: str = option("8", "Query heads.", metavar="LIST")
    kv_heads: str | None = option(None, "Key/value heads.  [default: as many as query heads]", metavar="LIST")
    width: str = option("64", "Head width of query and key.", metavar="LIST")
    value_width: str | None = option(None, "Head width of value.  [default: as --width]", metavar="LIST")
    dtype: str = option("float32", "Data type: float32, bfloat16, float16 or float64.", metavar="LIST")
    mask: str = option(
        "causal",
        "Mask: full, causal, window:W, padding:half, documents:N, prefix:N, alibi or bias; combine several with +.",
        metavar="LIST",
    )
    stage: str = option(
        "forward",
        "What is timed: forward, backward, forward+backward, recorded (a forward pass that records for a "
        "backward pass) or decode.",
        "--pass",
        metavar="LIST",
    )


@dataclasses.dataclass(frozen=True)
class ContenderOptions:
    """Contenders"""

    backend: str = option("native,auto", "Backends of Saccade to measure.", metavar="LIST")
    against: str | None = option(
        None,
        "Implementations to compare with: sdpa, flex (compiles each shape), dense; or none.  [default: all; quick: "
        "not flex]",
        metavar="LIST",
    )


@dataclasses.dataclass(frozen=True)
class BenchMeasuringOptions:
    """Measuring"""

    threads: int | None = option(None, "Number of threads.  [default: PyTorch's setting]")
    seconds: float | None = option(None, "Seconds for each case.  [default: 3; quick: 0.3]")
    rounds: int | None = option(None, "Minimum number of rounds.  [default: 5; quick: 3]")
    most_memory: float = option(4.0, "Skip an implementation whose weights or masks need more than this many GiB.")
    quick: bool = option(False, "Fewer rounds, lengths and contenders.", "--quick")


@dataclasses.dataclass(frozen=True)
class BenchOutputOptions:
    """Output: files are replaced"""

    as_json: str | None = option(None, "Write every measurement as JSON; - prints it.", "--json", metavar="FILE")
    plot: Path | None = option(None, "Plot time against length: .png or .svg (needs matplotlib).", metavar="FILE")
    read: Path | None = option(
        None,
        "Show the results of a --json FILE, without measuring.",
        "--from",
        metavar="FILE",
        callback=existing("a file that --json wrote", kind="file"),
    )


def register(app: typer.Typer) -> None:
    app.command("bench", cls=GroupedCommand, epilog=EPILOG, short_help="Time attention on this machine.")(
        flattened(bench)
    )


def bench(
    cases: CaseOptions,
    contenders: ContenderOptions,
    measuring: BenchMeasuringOptions,
    output: BenchOutputOptions,
) -> None:
    """Time attention on this machine: Saccade, PyTorch's kernels, and how near they come to what the chip can do.

    Contenders take turns in one process, after each one's result was checked. Ratios are medians over the rounds.
    """
    from ..benchmark.attention import BenchmarkReport

    files, stopped = checked_files(output), False
    if output.read:
        report = read_results(output.read, BenchmarkReport.from_json)
    else:
        report, stopped = _measured(cases, contenders, measuring, files)
    _show(report, output, files)
    if stopped:
        raise typer.Exit(130)
    if any(row.status == "wrong" for row in report.rows):
        raise typer.Exit(1)


def _measured(
    cases: CaseOptions, contenders: ContenderOptions, measuring: BenchMeasuringOptions, files: dict[str, Path]
) -> tuple[BenchmarkReport, bool]:
    """The report, and whether Ctrl-C interrupted the measurement."""
    from ..benchmark.attention import BenchmarkReport
    from ..benchmark.attention.machine import describe, keep_freed_memory, last_level_cache
    from ..benchmark.attention.measuring import sweep

    keep_freed_memory()
    settings = settings_of(measuring)
    swept = cases_of(cases, last_level_cache() or 32 * 2**20, quick=measuring.quick)
    rivals = contenders_of(contenders, quick=measuring.quick)
    command = shlex.join(["saccade", *sys.argv[1:]])
    report = BenchmarkReport(describe(__version__, settings.threads), {"command": command, **vars(settings.budget)})
    with piece_bar("checking and timing", len(swept)) as advance:

        def after(group: MeasurementGroup) -> None:
            advance(group.title)
            write_files(files, json=report.as_json)

        try:
            sweep(swept, rivals, report, settings, after)
        except KeyboardInterrupt:
            return report, True
    return report, False


def _show(report: BenchmarkReport, output: BenchOutputOptions, files: dict[str, Path]) -> None:
    from ..benchmark.attention import figure, tables

    write_files(files, json=report.as_json)
    typer.echo(report.as_json() if output.as_json == "-" else "\n".join(tables.text(report)), nl=output.as_json != "-")
    write_plot(files, functools.partial(figure.draw, report))


def settings_of(measuring: BenchMeasuringOptions) -> MeasurementSettings:
    import torch

    from ..benchmark.attention import MeasurementSettings

    seconds, rounds = (0.3, 3) if measuring.quick else (3.0, 5)
    return MeasurementSettings(
        torch.get_num_threads() if measuring.threads is None else measuring.threads,
        budget_of(measuring, seconds=seconds, rounds=rounds),
        int(measuring.most_memory * 2**30),
        again=1,
    )


def cases_of(given: CaseOptions, cache: int, *, quick: bool) -> list[Case]:
    """The product of all lists without duplicates, with lengths in ascending order innermost."""
    axes = (
        listed(given.stage, "pass", str),
        listed(given.dtype, "dtype", str),
        listed(given.mask, "mask", str),
        listed(given.batch, "batch", int),
        listed(given.heads, "heads", int),
        [None] if given.kv_heads is None else listed(given.kv_heads, "kv-heads", int),
        listed(given.width, "width", int),
        [None] if given.value_width is None else listed(given.value_width, "value-width", int),
    )
    cases: dict[Case, None] = {}
    for stage, dtype, mask, batch, heads, kv_heads, width, value_width in itertools.product(*axes):
        shape = (mask, stage, dtype, batch, heads, kv_heads or heads, width, value_width or width)
        for case in _lengths(given, cache, quick, shape):
            cases[case] = None
    return list(cases)


def _lengths(given: CaseOptions, cache: int, quick: bool, shape: Shape) -> list[Case]:
    from ..benchmark.attention import Case
    from ..benchmark.attention.cases import decoding

    decode = shape[1] == "decode"
    usual = ("1x" if quick else "1x,4x") if decode else ("512,2k" if quick else "512,2k,8k")
    lengths = listed(given.length or usual, "length", str)
    queries = [1 if decode else None] if given.queries is None else listed(given.queries, "queries", int)
    made = []
    for text, rows in itertools.product(lengths, queries):
        if text.endswith("x"):
            least = Case(rows or 1, rows or 1, *shape)
            tokens = decoding(int(_number(text[:-1], "length") * cache), least).length_k
        else:
            tokens = _tokens(text)
        made.append(Case(rows or tokens, tokens, *shape))
    return made


def contenders_of(given: ContenderOptions, *, quick: bool) -> list[Contender]:
    from ..benchmark.attention import SaccadeAttention
    from ..benchmark.attention.contenders import others

    ours: list[Contender] = [SaccadeAttention(backend) for backend in listed(given.backend, "backend", str)]
    if given.against == "none":
        return ours
    words, known = listed(given.against or ("sdpa,dense" if quick else "sdpa,flex,dense"), "against", str), others()
    for word in words:
        if word not in known:
            raise ValueError(f"against: expected {', '.join(known)} or none, got {word!r}")
    return ours + [known[word] for word in words]


def _tokens(text: str) -> int:
    factor = 1024 if text.endswith("k") else 1
    return int(_number(text[:-1] if factor > 1 else text, "length") * factor)


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number of tokens as 1000, 4k or 4x, got {text!r}") from None
