"""The performance targets of the native kernels: each is a group of measurements and their requirements.

Nothing here knows a vendor: a target is a share of a limit that is measured in the same run, another row's speed, or
the time of a full call. B = 1, H = 8, D = 64, 80 and 128, unless a target says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from saccade.benchmark.attention.cases import Case, decoding
from saccade.benchmark.attention.contenders import Contender, FlexAttention, SdpaAttention
from saccade.benchmark.attention.measuring import Entry

from .requirements import ExtraMemory, LimitShare, NeverSlower, Requirement, TileTime
from .runtimes import OnnxRuntimeAttention, OpenVinoAttention
from .subject import SubjectAttention

WIDTHS = (64, 80, 128)
DTYPES = ("float32", "bfloat16")
STAGES = ("forward", "forward+backward")
PEERS: dict[str, Contender] = {
    "sdpa": SdpaAttention(),
    "flex": FlexAttention(),
    "onnxruntime": OnnxRuntimeAttention(),
    "openvino": OpenVinoAttention(),
}
CONVERTED = 0.05  # taken off float32's share where bfloat16 has no instruction and is widened


@dataclass(frozen=True)
class PerformanceTarget:
    """weighed: memory is measured, and no time."""

    title: str
    entries: tuple[Entry, ...]
    asks: tuple[Requirement, ...]
    weighed: bool = False


@dataclass(frozen=True)
class MedianTarget:
    """The median of what the first requirement of each of these targets measured. members: their titles."""

    title: str
    members: tuple[str, ...]
    bound: float


@dataclass(frozen=True)
class TargetPreset:
    """Which backend is held to them, and on what.

    subject: the backend whose kernels are measured; choice: the one that picks a kernel by itself. lower: an
    instruction set that is forced for one target, if any. dots: whether the set in use has products of bf16. cache:
    bytes of the last-level cache. against: words of `PEERS`.
    """

    subject: str = "native"
    choice: str = "auto"
    lower: str | None = None
    dots: bool = False
    cache: int = 32 * 2**20
    against: tuple[str, ...] = tuple(PEERS)
    quick: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        return WIDTHS[:1] if self.quick else WIDTHS

    def group(
        self, case: Case, backend: str, *, flex: bool = False, beside: tuple[Entry, ...] = ()
    ) -> tuple[Entry, ...]:
        """The backend and everyone who has a kernel for the case. flex: compile FlexAttention for it (10 s)."""
        words = [word for word in self.against if _takes_part(word, case, flex)]
        ours = Entry(case, SubjectAttention(backend))
        return (ours, *beside, *(Entry(case, PEERS[word]) for word in words))


def _takes_part(word: str, case: Case, flex: bool) -> bool:
    if word == "flex":
        return flex and not case.records
    return word == "sdpa" or (case.dtype == "float32" and not case.records)


def share_of(stage: str, dtype: str, mask: str, length: int, dots: bool) -> float | None:
    """The least share of the limit; None where none is asked."""
    if dtype == "bfloat16" and dots:
        return None if length < 2048 else 0.72 if stage == "forward" else 0.55
    if length < 2048:
        share = 0.70 if stage == "forward" else None
    elif stage == "forward":
        share = 0.80 if mask == "full" else 0.75
    else:
        share = 0.68 if mask == "full" else 0.64
    return share if share is None or dtype == "float32" else share - CONVERTED


def targets(preset: TargetPreset) -> list[PerformanceTarget]:
    """All of them, in the order in which they are measured."""
    return [*_long(preset), *_lower_set(preset), *_tiles(preset), *_decoding(preset), *small(preset), *_memory(preset)]


def medians(preset: TargetPreset) -> list[MedianTarget]:
    """The requirement on many targets together."""
    members: dict[str, list[str]] = {}
    for target in small(preset):
        case = target.entries[0].case
        members.setdefault(f"{case.stage} {case.dtype} L=16 to 256 through {preset.choice}", []).append(target.title)
    return [MedianTarget(title, tuple(titles), 1.2) for title, titles in members.items()]


def _of(length: int, width: int = 64, **others: object) -> Case:
    return Case(length, length, width=width, value_width=width, **others)  # type: ignore[arg-type]


def _long(preset: TargetPreset) -> Iterator[PerformanceTarget]:
    for stage in STAGES:
        lengths = (512, 1024, 2048) if stage == "forward" else (2048,)
        longer = () if preset.quick else (8192,) if stage == "forward" else (4096,)
        for dtype in DTYPES:
            for mask in ("full", "causal"):
                for width in preset.widths:
                    for length in lengths + (longer if width == 64 else ()):
                        case = _of(length, width, mask=mask, stage=stage, dtype=dtype)
                        share = share_of(stage, dtype, mask, length, preset.dots)
                        asks = (*([] if share is None else [LimitShare(share)]), NeverSlower())
                        entries = preset.group(case, preset.subject, flex=width == 64 and length == 2048)
                        yield PerformanceTarget(case.label, entries, asks)


def _lower_set(preset: TargetPreset) -> Iterator[PerformanceTarget]:
    if preset.lower is not None:
        case = _of(2048)
        entry = Entry(case, SubjectAttention(preset.subject, preset.lower))
        yield PerformanceTarget(f"{case.label} on {preset.lower}", (entry,), (LimitShare(0.70),))


def _tiles(preset: TargetPreset) -> Iterator[PerformanceTarget]:
    """Masks that hide much, beside the full call of the same size: what is hidden must cost nothing."""
    length = 2048 if preset.quick else 4096
    for mask, batch in (("window:256", 1), ("padding:half", 4), ("documents:4", 1)):
        for dtype in DTYPES:
            for stage in STAGES:
                masked = _of(length // (2 if batch > 1 else 1), mask=mask, dtype=dtype, stage=stage, batch=batch)
                yield _against_full(preset, masked, flex=mask == "window:256")
    if not preset.quick:
        for width in WIDTHS[1:]:
            yield _against_full(preset, _of(length, width, mask="window:256"))
        yield _against_full(preset, _of(32768, mask="window:256"), length)


def _against_full(
    preset: TargetPreset, masked: Case, full_length: int | None = None, *, flex: bool = False
) -> PerformanceTarget:
    length = full_length or masked.length_k
    full = Entry(replace(masked, mask="full", length_q=length, length_k=length), SubjectAttention(preset.subject))
    entries = preset.group(masked, preset.subject, flex=flex, beside=(full,))
    # A dense mask of 32k x 32k would take the others seconds a call.
    return PerformanceTarget(
        masked.label,
        entries[:2] if full_length else entries,
        (TileTime(),) if full_length else (TileTime(), NeverSlower()),
    )


def _decoding(preset: TargetPreset) -> Iterator[PerformanceTarget]:
    shapes = [(8, 8, 64), (32, 8, 64)] if preset.quick else [(8, 8, 64), (32, 8, 64), (8, 8, 80), (32, 8, 128)]
    for dtype in DTYPES:
        for heads, kv_heads, width in shapes:
            short = Case(1, 4096, "full", "decode", dtype, 1, heads, kv_heads, width, width)
            long = decoding(4 * preset.cache, short)
            for case in (short, long):
                entries = preset.group(case, preset.subject)
                yield PerformanceTarget(case.label, entries, (LimitShare(0.85), NeverSlower()))


def small(preset: TargetPreset) -> Iterator[PerformanceTarget]:
    """Short sequences through the choice, where a call's fixed costs show."""
    lengths = (16, 64, 256) if preset.quick else (16, 32, 64, 128, 256)
    for dtype in DTYPES:
        for stage in STAGES:
            for mask in ("full", "causal"):
                for batch in (1, 12) if preset.quick else (1, 4, 12):
                    for length in lengths:
                        case = _of(length, mask=mask, stage=stage, dtype=dtype, batch=batch)
                        entries = preset.group(case, preset.choice)
                        yield PerformanceTarget(f"{case.label} through {preset.choice}", entries, (NeverSlower(),))


def _memory(preset: TargetPreset) -> Iterator[PerformanceTarget]:
    for dtype in DTYPES:
        case = _of(4096 if preset.quick else 16384, mask="causal", stage="forward+backward", dtype=dtype)
        entry = Entry(case, SubjectAttention(preset.subject))
        yield PerformanceTarget(f"memory of {case.label}", (entry,), (ExtraMemory(1.5),), weighed=True)
