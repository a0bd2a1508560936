"""What 1/sqrt(d_k) does: variance of the logits, entropy of the weights and gradients to q and k, against d_k.

    python benchmarks/scale.py [--out benchmarks/results/scale.md] [--figure docs/figures/scale.svg]

q, k, v and the gradient that comes to the output are standard normal, in float64; nothing is trained. A variance, an
entropy and a gradient are no timings, so the machine may be busy. Needs the extra `plot`.

Shape legend: B samples, L queries and keys, D = d_k.
"""

from __future__ import annotations

import argparse
import io
import math
from dataclasses import dataclass
from pathlib import Path

import torch

WIDTHS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LENGTH, SAMPLES = 64, 200
COLOURS = {True: "#2a6f97", False: "#c1440e"}


@dataclass(frozen=True)
class Row:
    """One width, scaled or not. Gradients are root mean squares of a query's (a key's) elements."""

    width: int
    scaled: bool
    variance: float
    entropy: float  # nats, mean over rows
    certain: float  # share of rows whose largest weight is above 0.99
    query_median: float  # over queries
    query_mean: float  # root mean square over all
    key_median: float
    key_mean: float


def measure(width: int, scaled: bool, samples: int = SAMPLES) -> Row:
    generator = torch.Generator().manual_seed(width)

    def normal() -> torch.Tensor:
        return torch.randn(samples, LENGTH, width, dtype=torch.float64, generator=generator)

    query, key, value = normal().requires_grad_(), normal().requires_grad_(), normal()
    logits = query @ key.transpose(-2, -1) * (width**-0.5 if scaled else 1.0)
    weights = logits.softmax(-1)
    gradients = torch.autograd.grad(weights @ value, (query, key), normal())
    by_query, by_key = (one.square().mean(-1).sqrt() for one in gradients)
    return Row(
        width,
        scaled,
        logits.var().item(),
        torch.special.entr(weights).sum(-1).mean().item(),
        (weights.amax(-1) > 0.99).double().mean().item(),
        by_query.median().item(),
        by_query.square().mean().sqrt().item(),
        by_key.median().item(),
        by_key.square().mean().sqrt().item(),
    )


def table(rows: list[Row]) -> str:
    head = (
        "| d_k | scaled | variance | entropy | rows with a weight above .99 | to q: median, rms | to k: median, rms |"
    )
    lines = [
        "# What 1/sqrt(d_k) does",
        "",
        f"{SAMPLES} samples of {LENGTH} queries and keys, standard normal, float64; `python benchmarks/scale.py`.",
        f"Entropy in nats; evenly spread it would be {math.log(LENGTH):.2f}. Gradients are root mean squares of a",
        "query's (a key's) elements, for an output gradient that is standard normal.",
        "",
        head,
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        gradients = f"{row.query_median:.2g}, {row.query_mean:.2g} | {row.key_median:.2g}, {row.key_mean:.2g}"
        numbers = f"{row.variance:.3g} | {row.entropy:.2f} | {row.certain:.2f} | {gradients}"
        lines.append(f"| {row.width} | {'yes' if row.scaled else 'no'} | {numbers} |")
    return "\n".join([*lines, ""])


def draw(rows: list[Row]) -> str:
    """The figure as SVG."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    FigureCanvasSVG(figure)
    variance, entropy, gradient = figure.subplots(1, 3)
    for scaled in (False, True):
        own = [row for row in rows if row.scaled == scaled]
        widths, colour = [row.width for row in own], COLOURS[scaled]
        name = "q·k / √d" if scaled else "q·k"
        variance.plot(widths, [row.variance for row in own], "o", color=colour, ms=4, label=name)
        variance.plot(widths, [1.0 if scaled else width for width in widths], color=colour, lw=1)
        entropy.plot(widths, [row.entropy for row in own], "o-", color=colour, ms=4, lw=1, label=name)
        for side, mark in (("query", "o"), ("key", "s")):
            medians = [getattr(row, f"{side}_median") for row in own]
            means = [getattr(row, f"{side}_mean") for row in own]
            gradient.plot(widths, medians, f"{mark}-", color=colour, ms=4, lw=1, label=f"{name}: {side[0]}, median")
            gradient.plot(widths, means, f"{mark}:", color=colour, ms=3, lw=0.8, mfc="white", label=f"{side[0]}, rms")
    entropy.axhline(math.log(LENGTH), color="#777777", lw=0.8, ls="--")
    entropy.annotate("evenly spread", (2, math.log(LENGTH)), (0, 3), textcoords="offset points", fontsize=7)
    titles = ("Variance of the logits (lines: d and 1)", "Entropy of the weights (nats)", "Gradient to q and to k")
    for axes, title in zip((variance, entropy, gradient), titles, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xticks(WIDTHS[::2], [str(width) for width in WIDTHS[::2]])
        axes.set_xlabel("d = width of a head", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(True, lw=0.4, alpha=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (variance, gradient):
        axes.set_yscale("log")
    entropy.set_ylim(0, 4.6)
    for axes, columns in ((variance, 1), (entropy, 1), (gradient, 2)):
        axes.legend(fontsize=7 if columns == 1 else 6, frameon=False, ncols=columns)
    gradient.set_ylim(1e-3, 200)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "saccade"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, facecolor="white")
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scale.md"))
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/scale.svg"))
    options = parser.parse_args()
    rows = [measure(width, scaled) for width in WIDTHS for scaled in (True, False)]
    options.out.write_text(table(rows), encoding="utf-8")
    options.figure.write_text(draw(rows), encoding="utf-8")
    print(options.out, options.figure)


if __name__ == "__main__":
    main()
