"""The options of `saccade bench`, by theme: each dataclass is one, its fields are options of the command line."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ._existing import existing
from ._options import option
from ._outputs import budget_of

if TYPE_CHECKING:
    from ..benchmark.attention import Case, Contender, MeasurementSettings
    from ..benchmark.attention.targets import TargetPreset

T = TypeVar("T")
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
    instruction_set: str | None = option(
        None,
        "Instruction sets to force for native, such as avx2.  [default: chosen for this processor]",
        "--set",
        metavar="LIST",
    )
    against: str | None = option(
        None,
        "Implementations to compare with: sdpa, flex (compiles each shape), dense, onnxruntime, openvino; or "
        "none.  [default: sdpa,flex,dense; quick: not flex; targets: all but dense]",
        metavar="LIST",
    )


@dataclasses.dataclass(frozen=True)
class BenchMeasuringOptions:
    """Measuring"""

    threads: int | None = option(None, "Number of threads.  [default: PyTorch's setting]")
    seconds: float | None = option(None, "Seconds for each case.  [default: 3; quick: 0.3]")
    rounds: int | None = option(None, "Minimum number of rounds.  [default: 5; quick: 3]")
    memory: bool = option(False, "Also measure peak memory; --plot implies it.", "--memory")
    most_memory: float = option(4.0, "Skip an implementation whose weights or masks need more than this many GiB.")
    quick: bool = option(False, "Fewer rounds, lengths and contenders.", "--quick")
    clock: str = option("wall", "wall, or cpu: CPU time of one thread, for a busy machine.")


@dataclasses.dataclass(frozen=True)
class TargetOptions:
    """Targets"""

    targets: bool = option(
        False, "Measure the performance targets of the native kernels, not the cases above.", "--targets"
    )
    only: list[str] | None = option(
        None, "Only the targets whose name has all of these words; repeat it for more.", metavar="WORDS"
    )
    resume: bool = option(
        False,
        "Keep the results in the --json FILE of an earlier run on this machine, and measure the rest.",
        "--resume",
    )


@dataclasses.dataclass(frozen=True)
class BenchOutputOptions:
    """Output: files are replaced"""

    as_json: str | None = option(None, "Write every measurement as JSON; - prints it.", "--json", metavar="FILE")
    markdown: Path | None = option(None, "Write the results as a Markdown page.", metavar="FILE")
    plot: Path | None = option(
        None, "Plot time and memory against length: .png or .svg (needs matplotlib).", metavar="FILE"
    )
    read: Path | None = option(
        None,
        "Show the results of a --json FILE, without measuring.",
        "--from",
        metavar="FILE",
        callback=existing("a file that --json wrote", kind="file"),
    )


def settings_of(measuring: BenchMeasuringOptions, *, memory: bool, targets: bool) -> MeasurementSettings:
    import torch

    from ..benchmark.attention import MeasurementSettings

    seconds, rounds = (0.3, 3) if measuring.quick else (3.0, 5)
    if targets:
        seconds, rounds = (0.5 if measuring.quick else 1.0), 7  # quartiles of seven: one reading in six may be off
    return MeasurementSettings(
        torch.get_num_threads() if measuring.threads is None else measuring.threads,
        budget_of(measuring, seconds=seconds, rounds=rounds),
        measuring.clock,
        int(measuring.most_memory * 2**30),
        memory or measuring.memory,
        again=2 if targets else 1,
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
    from ..benchmark.attention import SaccadeAttention
    from ..benchmark.attention.naming import others
    from ..benchmark.attention.sets import forced

    backends = listed(given.backend, "backend", str)
    ours: list[Contender] = [SaccadeAttention(backend) for backend in backends]
    if given.instruction_set is not None:
        for name in listed(given.instruction_set, "set", str):
            with forced(name):  # one that is not there is told now
                ours.append(SaccadeAttention("native", name))
    known = others()
    return ours + [known[word] for word in against(given, "sdpa,dense" if quick else "sdpa,flex,dense")]


def against(given: ContenderOptions, usual: str) -> tuple[str, ...]:
    """The words of `naming.others` that take part. ValueError for another one."""
    from ..benchmark.attention.naming import others

    if given.against == "none":
        return ()
    words, known = listed(given.against or usual, "against", str), [*others()]
    for word in words:
        if word not in known:
            raise ValueError(f"against: expected {', '.join(known)} or none, got {word!r}")
    return tuple(words)


def preset_of(given: ContenderOptions, cache: int, *, quick: bool) -> TargetPreset:
    """What `--targets` are for: the first of the backends, chosen by the second; on a lower set, the first of --set."""
    from ..benchmark.attention import sets
    from ..benchmark.attention.targets import TargetPreset

    subject, *rest = listed(given.backend, "backend", str)
    lower = listed(given.instruction_set, "set", str)[0] if given.instruction_set else _lower_set()
    if lower is not None:
        with sets.forced(lower):  # one that is not there is told now
            pass
    return TargetPreset(
        subject,
        rest[0] if rest else subject,
        lower,
        sets.peak("bfloat16", 1, 1.0) is not None,
        cache,
        against(given, "sdpa,flex,onnxruntime,openvino"),
        quick,
    )


def _lower_set() -> str | None:
    """AVX2, where something higher is in use."""
    from ..benchmark.attention import sets

    return "avx2" if "avx2" in sets.supported() and sets.in_use() not in ("avx2", "baseline") else None


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
