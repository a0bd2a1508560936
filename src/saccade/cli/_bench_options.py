"""The options of `saccade bench`, by theme: each dataclass is one, its fields are options of the command line."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from ..benchmark.attention import Case, Contender, MeasurementSettings

T = TypeVar("T")
Shape = tuple[str, str, str, int, int, int, int, int]  # of a `Case`, from its mask on


@dataclasses.dataclass(frozen=True)
class CaseOptions:
    """Cases: every combination is measured; lists are written 1,2,3"""

    length: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Tokens: 1000, 4k, or 4x (keys and values fill 4 last-level caches).  "
            "[default: 512,2k,8k; decode: 1x,4x]",
        ),
    ] = None
    queries: Annotated[
        str | None, typer.Option(metavar="LIST", help="Query rows.  [default: as many as keys; decode: 1]")
    ] = None
    batch: Annotated[str, typer.Option(metavar="LIST", help="Sequences.")] = "1"
    heads: Annotated[str, typer.Option(metavar="LIST", help="Query heads.")] = "8"
    kv_heads: Annotated[
        str | None, typer.Option(metavar="LIST", help="Key/value heads.  [default: as many as query heads]")
    ] = None
    width: Annotated[str, typer.Option(metavar="LIST", help="Columns of query and key.")] = "64"
    value_width: Annotated[
        str | None, typer.Option(metavar="LIST", help="Columns of value.  [default: as many as of query and key]")
    ] = None
    dtype: Annotated[str, typer.Option(metavar="LIST", help="float32, bfloat16, float16 or float64.")] = "float32"
    mask: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="full, causal, window:W, padding:half, documents:N, prefix:N, alibi, bias; joined by +.",
        ),
    ] = "causal"
    stage: Annotated[
        str,
        typer.Option(
            "--pass",
            metavar="LIST",
            help="forward, backward, forward+backward, recorded (a forward that a backward may follow) or decode.",
        ),
    ] = "forward"


@dataclasses.dataclass(frozen=True)
class ContenderOptions:
    """Contenders"""

    backend: Annotated[str, typer.Option(metavar="LIST", help="Saccade's backends.")] = "native,auto"
    instruction_set: Annotated[
        str | None,
        typer.Option("--set", metavar="LIST", help="Instruction sets to force for native: avx2, for example."),
    ] = None
    against: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="sdpa, flex (compiles each shape), dense; or none.  [default: all; quick: not flex]",
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class BenchMeasuringOptions:
    """Measuring"""

    threads: Annotated[int | None, typer.Option(help="Threads.  [default: as many as PyTorch takes]")] = None
    seconds: Annotated[float | None, typer.Option(help="Time for each case.  [default: 3; quick: 0.3]")] = None
    rounds: Annotated[int | None, typer.Option(help="Rounds at least.  [default: 5; quick: 3]")] = None
    memory: Annotated[bool, typer.Option("--memory", help="Measure the peak memory, too; --plot does.")] = False
    most_memory: Annotated[float, typer.Option(help="GiB of weights or masks beyond which one is left out.")] = 4.0
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, lengths and contenders.")] = False


@dataclasses.dataclass(frozen=True)
class BenchOutputOptions:
    """Output: files are replaced"""

    as_json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Every reading, for programs; - prints it.")
    ] = None
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="The results as a page.")] = None
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Time and memory against length: .png or .svg (matplotlib).")
    ] = None
    read: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Measure nothing: show the results of a --json FILE.")
    ] = None


def settings_of(measuring: BenchMeasuringOptions, *, memory: bool, clock: str) -> MeasurementSettings:
    import torch

    from ..benchmark.attention import Budget, MeasurementSettings

    quick = measuring.quick
    seconds = measuring.seconds if measuring.seconds is not None else (0.3 if quick else 3.0)
    rounds = measuring.rounds if measuring.rounds is not None else (3 if quick else 5)
    if rounds < 1:
        raise ValueError(f"rounds: must be at least 1, got {rounds}")
    return MeasurementSettings(
        torch.get_num_threads() if measuring.threads is None else measuring.threads,
        Budget(seconds, rounds, max(100, rounds)),
        clock,
        int(measuring.most_memory * 2**30),
        memory or measuring.memory,
    )


def cases_of(given: CaseOptions, cache: int, *, quick: bool) -> list[Case]:
    """The product of all lists, lengths ascending within each of the rest; each case once."""
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
    found: dict[Case, None] = {}
    for stage, dtype, mask, batch, heads, kv_heads, width, value_width in itertools.product(*axes):
        shape = (mask, stage, dtype, batch, heads, kv_heads or heads, width, value_width or width)
        for case in _lengths(given, cache, quick, shape):
            found[case] = None
    return list(found)


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
    from ..benchmark.attention import DenseAttention, FlexAttention, SaccadeAttention, SdpaAttention
    from ..benchmark.attention.sets import forced

    backends = listed(given.backend, "backend", str)
    ours: list[Contender] = [SaccadeAttention(backend) for backend in backends]
    if given.instruction_set is not None:
        for name in listed(given.instruction_set, "set", str):
            with forced(name):  # one that is not there is told now
                ours.append(SaccadeAttention("native", name))
    others: dict[str, Contender] = {"sdpa": SdpaAttention(), "flex": FlexAttention(), "dense": DenseAttention()}
    usual = "sdpa,dense" if quick else "sdpa,flex,dense"
    wanted = [] if given.against == "none" else listed(given.against or usual, "against", str)
    for name in wanted:
        if name not in others:
            raise ValueError(f"against: expected sdpa, flex, dense or none, got {name!r}")
    return ours + [others[name] for name in wanted]


def listed(text: str, name: str, kind: Callable[[str], T]) -> list[T]:
    """The entries of a list. ValueError that names the option."""
    found = []
    for entry in text.split(","):
        try:
            found.append(kind(entry.strip()))
        except ValueError:
            raise ValueError(f"{name}: expected {kind.__name__} numbers separated by commas, got {text!r}") from None
    if "" in found:
        raise ValueError(f"{name}: an entry is empty in {text!r}")
    return found


def _tokens(text: str) -> int:
    factor = 1024 if text.endswith("k") else 1
    return int(_number(text[:-1] if factor > 1 else text, "length") * factor)


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number of tokens as 1000, 4k or 4x, got {text!r}") from None
