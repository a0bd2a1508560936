"""The figure of a comparison: error against time, time and memory against length, gradient against distance.

Colours distinguish families and suit colour blindness (Okabe and Ito 2008); lines are labelled at their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...support import _numbers
from .._figures import new_figure, rendered, style, without_zeros
from .advice import advice
from .results import LAYER, READING, ContenderResults, GradientReach, VariantComparison
from .trends import growth, sound

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAMILIES = {
    "exact attention": "#000000",
    "exact on some keys": "#0072B2",
    "approximation": "#D55E00",
    "something else": "#009E73",
    "layer": "#8A5A83",
}
SMALLEST = 1e-4  # smallest error and gradient drawn
FLAT = (1 / 3, 3.0)  # gradients within these bounds count as independent of distance
TEXT = 6.5  # points
CALL = "training"


class LineLabel(NamedTuple):
    """A label at the end of a line, in data coordinates."""

    x: float
    y: float
    text: str
    colour: str


def draw(comparison: VariantComparison, kind: str) -> bytes:
    """A figure, `kind` "png" or "svg".

    Raises:
        ValueError: nothing was timed.
    """
    if not any(line.amounts(CALL)[0] for line in comparison.lines):
        raise ValueError("a plot needs measurements, and this comparison has none")
    figure = new_figure(figsize=(11.5, 10.2))
    figure.subplots_adjust(left=0.065, right=0.855, top=0.885, bottom=0.055, wspace=0.58, hspace=0.27)
    (trade, times), (memory, gradient) = figure.subplots(2, 2)
    _trade(trade, comparison)
    _growing(times, comparison, CALL, "time of training (forward and backward)", _numbers.duration)
    _growing(memory, comparison, "memory", "peak memory of training", _numbers.size)
    _gradients(gradient, comparison)
    _annotate_figure(figure, comparison)
    return rendered(figure, kind)


def family(line: ContenderResults) -> str:
    if line.whole and line.kind == READING:
        return "exact attention"
    if line.kind == LAYER:
        return "layer"
    return {"softmax": "exact on some keys", "approximation": "approximation"}.get(line.computes, "something else")


def _annotate_figure(figure: Figure, comparison: VariantComparison) -> None:
    """Add title, advice and the legend of colours."""
    data, threads = comparison.data, comparison.machine["threads"]
    way = "causal" if data["causal"] else "bidirectional"
    where = f"{comparison.machine['processor']}, {_numbers.counted(threads, 'thread')}"
    figure.text(
        0.01, 0.978, f"{data['source']}; {way}, {data['heads']} heads of width {data['head']}; {where}", fontsize=8
    )
    figure.text(0.01, 0.958, advice(comparison), fontsize=8, weight="bold", wrap=True, va="top")
    used = {family(line) for line in comparison.lines if line.points}
    x = 0.01
    for name, colour in FAMILIES.items():
        if name in used:
            figure.text(x, 0.912, "■ " + name, color=colour, fontsize=8)
            x += 0.0058 * len(name) + 0.03
    legend = "hollow: no approximation of exact attention; dashed: layers, and four layers where gradients are shown"
    figure.text(x, 0.912, legend, color="#555555", fontsize=7.5)


def _trade(axes: Axes, comparison: VariantComparison) -> None:
    """Plot the error at the longest length with one against the time at the longest length."""
    length, known = _longest(comparison)
    axes.set_xscale("log")
    axes.set_yscale("log")
    labels = []
    for line in comparison.of(READING):
        there, judged = line.at(length), None if known is None else line.at(known)
        seconds = None if there is None else there.seconds(CALL)
        if seconds is None or judged is None or judged.error is None:
            continue
        colour = FAMILIES[family(line)]
        if line.whole:
            axes.axvline(seconds, color=colour, lw=1.0, ls=(0, (4, 3)))
            axes.annotate(
                "exact",
                (seconds, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -8),
                textcoords="offset points",
                fontsize=TEXT,
                color=colour,
            )
            continue
        error = max(judged.error.whole, SMALLEST)
        axes.plot(seconds, error, "o", ms=5, color=colour, mfc="none" if line.computes == "other" else colour)
        labels.append(LineLabel(seconds, error, line.name, colour))
    axes.set_xlabel(f"time of training at {_numbers.length(length)} tokens", fontsize=8)
    axes.set_ylabel(
        "" if known is None else f"error against exact attention at {_numbers.length(known)} tokens", fontsize=8
    )
    axes.set_title("Error against time: lower left is better", fontsize=9, loc="left")
    _style(axes, _numbers.duration, lambda share: f"{100 * share:g} %")
    _label_points(axes, labels)


def _longest(comparison: VariantComparison) -> tuple[int, int | None]:
    points = [point for line in comparison.of(READING) for point in line.points]
    timed = [point.length for point in points if point.seconds(CALL)]
    judged = [point.length for point in points if point.error is not None]
    return max(timed, default=max(comparison.lengths)), max(judged, default=None)


def _growing(axes: Axes, comparison: VariantComparison, what: str, title: str, as_text: Callable[[float], str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2 if what == "memory" else 10)
    labels = []
    for line in sorted(comparison.lines, key=lambda line: line.whole):
        lengths, amounts = line.amounts(what)
        if not lengths:
            continue
        colour = FAMILIES[family(line)]
        axes.plot(
            lengths,
            amounts,
            marker=".",
            ms=4,
            color=colour,
            lw=2.2 if line.whole else 1.1,
            ls="--" if line.kind == LAYER else "-",
        )
        power = growth(line, what) if sound(line, what) else None
        grown = "" if power is None else f"  L^{power:.1f}"
        labels.append(LineLabel(lengths[-1], amounts[-1], f"{_named(line)}{grown}", colour))
    lengths = comparison.lengths
    axes.set_xticks(lengths, [_numbers.length(length) for length in lengths])
    axes.set_xlabel("length (tokens)", fontsize=8)
    axes.set_title(f"{title[0].upper()}{title[1:]}", fontsize=9, loc="left")
    _style(axes, None, as_text)
    _at_ends(axes, labels)


def _named(line: ContenderResults) -> str:
    return f"{line.name} layer" if line.kind == LAYER and line.whole else line.name


def _gradients(axes: Axes, comparison: VariantComparison) -> None:
    """Plot gradients by distance: constant ones as one labelled band, others as lines."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    drawn = [path for path in comparison.paths if path.distances]
    axes.set_title("Gradient of the last output, as it starts", fontsize=9, loc="left")
    axes.set_xlabel("distance of the input (tokens)", fontsize=8)
    axes.set_ylabel("relative to distance 1", fontsize=8)
    if not drawn:
        return
    colours = {line.name: FAMILIES[family(line)] for line in comparison.lines}
    far = max(path.distances[-1] for path in drawn)
    flat = [path for path in drawn if path.distances[-1] == far and _is_flat(path)]
    labels = []
    if flat:
        low, high = (pick([pick(path.gradients) for path in flat]) for pick in (min, max))
        axes.fill_between([1, far], low, high, color="#000000", alpha=0.12, lw=0)
        labels.append(LineLabel(far, (low * high) ** 0.5, _band(flat), "#000000"))
    for path in drawn:
        if path in flat:
            continue
        shown = _down_to_the_floor(path)
        axes.plot(
            *zip(*shown, strict=True),
            marker=".",
            ms=4,
            lw=1.1,
            color=colours.get(path.name, "#000000"),
            ls="--" if path.layers > 1 else "-",
        )
        labels.append(LineLabel(*shown[-1], _path_name(path), colours.get(path.name, "#000000")))
    axes.set_ylim(SMALLEST, None)
    ticks = [2**n for n in range(far.bit_length())][:: 1 + (far > 256)]
    axes.set_xticks(ticks, [f"{tick}" for tick in ticks])
    _style(axes, None, lambda share: f"{share:g}")
    _at_ends(axes, labels)


def _down_to_the_floor(path: GradientReach) -> list[tuple[int, float]]:
    """Distances and gradients up to the first gradient that is too small to draw."""
    drawn = []
    for distance, gradient in zip(path.distances, path.gradients, strict=True):
        drawn.append((distance, max(gradient, SMALLEST)))
        if gradient < SMALLEST:
            break
    return drawn


def _is_flat(path: GradientReach) -> bool:
    return all(FLAT[0] <= gradient <= FLAT[1] for gradient in path.gradients)


def _band(flat: Sequence[GradientReach]) -> str:
    """Names in the band, a few to a line; only single layers, since four layers are constant too."""
    single = {path.name for path in flat if path.layers == 1}
    names = [_path_name(path) for path in flat if path.layers == 1 or path.name not in single]
    rows = [", ".join(names[start : start + 2]) for start in range(0, len(names), 2)]
    return "in the band at all distances:\n" + "\n".join(rows)


def _path_name(path: GradientReach) -> str:
    return path.name if path.layers == 1 else f"{path.name} x{path.layers}"


def _style(axes: Axes, across: Callable[[float], str] | None, up: Callable[[float], str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for axis, label in ((axes.xaxis, across), (axes.yaxis, up)):
        axis.set_minor_locator(NullLocator())
        if label is not None:
            axis.set_major_formatter(FuncFormatter(lambda amount, _, label=label: without_zeros(label(amount))))
    if across is not None:
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,), numticks=12))
    style(axes)


def _at_ends(axes: Axes, labels: Sequence[LineLabel]) -> None:
    """Label the ends of lines to the right of the axes, moved apart and connected by thin lines."""
    axes.get_xlim(), axes.get_ylim()  # computes the limits
    scale = axes.figure.dpi / 72
    heights = {label: axes.transData.transform((label.x, label.y))[1] / scale for label in labels}
    bottom, top = (axes.transAxes.transform((0, edge))[1] / scale for edge in (0, 1))
    rows = [(label, TEXT * 1.25 * (1 + label.text.count("\n"))) for label in sorted(labels, key=heights.__getitem__)]
    centres = apart([heights[label] for label, _ in rows], [size for _, size in rows], bottom, top)
    for (label, _), centre in zip(rows, centres, strict=True):
        y = (centre - bottom) / (top - bottom)
        axes.annotate(
            label.text,
            (label.x, label.y),
            xytext=(1.045, y),
            textcoords="axes fraction",
            fontsize=TEXT,
            color=label.colour,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "lw": 0.4,
                "color": label.colour,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 1,
                "relpos": (0, 0.5),
            },
        )


def apart(wanted: Sequence[float], sizes: Sequence[float], bottom: float, top: float) -> list[float]:
    """Centres near `wanted` (ascending), such that items of these sizes do not overlap and stay between bottom and top.

    If there is too little room, they are squeezed evenly.
    """
    shrink = min(1.0, (top - bottom) / max(sum(sizes), 1e-9))
    sizes = [size * shrink for size in sizes]
    centres: list[float] = []
    edge = bottom
    for centre, size in zip(wanted, sizes, strict=True):
        centres.append(max(centre, edge + size / 2))
        edge = centres[-1] + size / 2
    edge = top
    for index in reversed(range(len(centres))):
        centres[index] = min(centres[index], edge - sizes[index] / 2)
        edge = centres[index] - sizes[index] / 2
    return centres


def _label_points(axes: Axes, labels: Sequence[LineLabel]) -> None:
    """Label points at the first free of ten positions."""
    axes.get_xlim(), axes.get_ylim()  # computes the limits
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    points = [axes.transData.transform((label.x, label.y)) for label in labels]
    frame = axes.get_window_extent(renderer)
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    places = [
        (6, 0, "left", "center"),
        (-6, 0, "right", "center"),
        (0, 6, "center", "bottom"),
        (0, -6, "center", "top"),
        (6, 7, "left", "bottom"),
        (6, -7, "left", "top"),
        (-6, 7, "right", "bottom"),
        (-6, -7, "right", "top"),
        (6, 15, "left", "bottom"),
        (6, -15, "left", "top"),
    ]
    for label in labels:
        for x, y, across, up in places:
            text = axes.annotate(
                label.text,
                (label.x, label.y),
                xytext=(x, y),
                textcoords="offset points",
                fontsize=TEXT,
                color=label.colour,
                ha=across,
                va=up,
            )
            extent = text.get_window_extent(renderer)
            box = (extent.x0, extent.y0, extent.x1, extent.y1)
            inside = frame.x0 <= box[0] and box[1] >= frame.y0 and box[3] <= frame.y1
            if inside and not any(_overlap(box, other) for other in taken):
                break
            if (x, y) != places[-1][:2]:
                text.remove()
        taken.append(box)


def _overlap(values: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return values[0] < other[2] and other[0] < values[2] and values[1] < other[3] and other[1] < values[3]
