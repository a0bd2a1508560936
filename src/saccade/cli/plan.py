"""`saccade plan`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ._options import GroupedCommand, flattened, option
from ._parts._existing import existing
from ._parts._mask_expression import document_lengths, packed, parsed_mask, quantity, tokens

if TYPE_CHECKING:
    from ..distributed._costs import CallSizes, LayoutCost, RankSpeed
    from ..operator._masks import Mask

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class SequenceOptions:
    """The sequence"""

    length: str = option("128k", "Tokens of the whole sequence: 1000, 4k (4,096) or 1M (1,048,576).", metavar="TOKENS")
    ranks: int = option(8, "Processes that share it.")
    mask: str = option(
        "causal",
        "Such as 'causal & window(4096)', with & | ~ between causal, full, window(W), documents(N), "
        "documents([LENGTH, ...]), prefix(N), chunks(N), strided(N), fixed(N), dilated(STEP), global([TOKEN, ...]).",
        metavar="EXPRESSION",
    )
    documents: Path | None = option(
        None,
        "A file of document lengths in tokens, one on each line: they are packed in this order, again and again.",
        metavar="FILE",
        callback=existing("a file with one length on each line", kind="file"),
    )


@dataclasses.dataclass(frozen=True)
class ShapeOptions:
    """Each attention call"""

    heads: int = option(32, "Query heads.")
    kv_heads: int | None = option(None, "Key/value heads.  [default: as many as query heads]")
    width: int = option(128, "Head width of query and key.")
    value_width: int | None = option(None, "Head width of value.  [default: as --width]")
    batch: int = option(1, "Batch size in sequences.")
    dtype: str = option("bfloat16", "Data type: float32, bfloat16, float16 or float64.")


@dataclasses.dataclass(frozen=True)
class RankOptions:
    """Each rank"""

    rate: str = option("400TFLOP/s", "Operations in a second that attention reaches.", metavar="FLOP/s")
    link: str = option("50GB/s", "Network bandwidth of a rank, each way at once.", metavar="B/s")
    latency: str = option("10us", "Time of a message without bytes.", metavar="TIME")
    memory_bandwidth: str = option("2TB/s", "Memory bandwidth of a rank, reading and writing together.", metavar="B/s")
    as_json: bool = option(False, "Print the numbers as JSON.", "--json")


def register(app: typer.Typer) -> None:
    app.command("plan", cls=GroupedCommand, short_help="Predict what sharing a sequence among processes costs.")(
        flattened(plan)
    )


def plan(sequence: SequenceOptions, shape: ShapeOptions, machine: RankOptions) -> None:
    """Predict what attention over a sequence that processes share costs under each layout, and which one to take.

    Figures are of one attention call, for the busiest rank; "mean" is over ranks. Computing, network and bytes received
    are of both passes. Nothing is measured.
    """
    from ..distributed._blocks import block_size, survey
    from ..distributed._costs import layouts_of
    from ..distributed._prediction import predicted

    length = tokens(sequence.length, "length")
    if not 0 < sequence.ranks <= length:
        raise ValueError(f"ranks: expected 1 to {length}, a row for each, got {sequence.ranks}")
    sizes, speed, mask = _sizes(shape), _speed(machine), _mask(sequence, length)
    table = survey(mask, length, block_size(length, sequence.ranks))
    costs = predicted(table, sizes, speed, layouts_of(sequence.ranks, sizes))
    typer.echo(json.dumps(_as_json(costs), indent=2) if machine.as_json else "\n".join(_lines(costs)))


def _mask(sequence: SequenceOptions, length: int) -> Mask | None:
    mask = parsed_mask(sequence.mask, length)
    if sequence.documents is None:
        return mask
    documents = packed(document_lengths(sequence.documents), length)
    return documents if mask is None else mask & documents


def _sizes(shape: ShapeOptions) -> CallSizes:
    import torch

    from ..distributed import CallSizes

    if shape.dtype not in DTYPES:
        raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}; got {shape.dtype!r}")
    given = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape) if field.name != "dtype"}
    return CallSizes(**given, dtype=getattr(torch, shape.dtype))


def _speed(machine: RankOptions) -> RankSpeed:
    from ..distributed._costs import RankSpeed

    rate = quantity(machine.rate, "FLOP/s", "rate", "400TFLOP/s")
    link = quantity(machine.link, "B/s", "link", "50GB/s")
    memory = quantity(machine.memory_bandwidth, "B/s", "memory_bandwidth", "2TB/s")
    return RankSpeed(rate, rate, link, quantity(machine.latency, "s", "latency", "10us"), memory)


def _lines(costs: list[LayoutCost]) -> list[str]:
    from ..distributed._costs import because, cheapest
    from ..support._numbers import duration, percent, size
    from ..support._tables import Table

    head = [
        *("layout", "memory", "received", "compute", "mean compute", "network", "mean network"),
        *("forward", "forward + backward", "imbalance"),
    ]
    rows = []
    for cost in sorted(costs, key=lambda cost: cost.seconds):
        compute, links = cost.compute.both, cost.links.both
        times = (compute.max(), compute.mean(), links.max(), links.mean(), cost.forward, cost.seconds)
        sizes = (size(cost.memory.max()), size(cost.received.both.max()))
        rows.append([cost.name, *sizes, *map(duration, times), percent(cost.imbalance)])
    best = cheapest(costs)
    return [*Table(head, rows).lines(), "", f"{best.name}: {because(costs)}"]


def _as_json(costs: list[LayoutCost]) -> dict[str, Any]:
    from ..distributed._costs import cheapest

    best = cheapest(costs)
    return {"cheapest": best.name, "layouts": [_figures(cost) for cost in costs]}


def _figures(cost: LayoutCost) -> dict[str, Any]:
    """Bytes and seconds: of the rank with most, and on average."""
    arrays = {"shards": cost.shards, "kept": cost.kept, "in_flight": cost.in_flight, "memory": cost.memory}
    for name, passes in (("received", cost.received), ("compute", cost.compute), ("links", cost.links)):
        arrays |= {f"{name}_forward": passes.forward, f"{name}_backward": passes.backward}
    figures = {name: {"most": float(array.max()), "mean": float(array.mean())} for name, array in arrays.items()}
    times = {"forward": cost.forward, "with_backward": cost.seconds, "imbalance": cost.imbalance}
    return {"layout": cost.layout, "grid": list(cost.grid), **figures, **times}
