"""Memory of each kind of cache, and the time of one decoding step of one layer: `python benchmarks/caches.py`.

Each kind holds the same tokens. A step appends one token and attends, without projections. The kinds take turns, so
that a noisy machine disturbs all alike; the median of the rounds is written to benchmarks/results/caches.md. Before
that, each kind's answer is compared with attention over all tokens.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path

import torch

from saccade import Causal, Padding, attention
from saccade.benchmark.attention.timing import rounds_of
from saccade.nn import GrowingLayer, LayerCache, StaticLayer, WindowLayer
from saccade.training.language.card import machine

CAUSAL = Causal()


def kinds(length: int, steps: int, window: int) -> dict[str, LayerCache]:
    return {
        "growing": GrowingLayer(),
        "static": StaticLayer(length + steps),
        "growing, lengths differ": GrowingLayer(),
        f"window {window}": WindowLayer(window),
        f"window {window}, 4 sinks": WindowLayer(window, sinks=4),
    }


def step(cache: LayerCache, tokens: torch.Tensor) -> torch.Tensor:
    seen = cache.append(tokens, tokens, CAUSAL)
    return attention(tokens, seen.key, seen.value, seen.mask, bias=seen.bias)


def check(cache: LayerCache, prompt: torch.Tensor, lengths: list[int], token: torch.Tensor) -> None:
    """The first step's answer is that of attention over each item's tokens, under what the cache shows of them."""
    out = step(cache, token)
    for item, length in enumerate(lengths):
        tokens = torch.cat((prompt[item, :, :length], token[item]), 1)[None].double()
        shown = CAUSAL if cache.mask is None else CAUSAL & cache.mask
        expected = attention(tokens, tokens, tokens, shown)[:, :, -1:]
        torch.testing.assert_close(out[item : item + 1].double(), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--length", type=int, default=4096)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--heads", type=int, default=8)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--window", type=int, default=512)
    options.add_argument("--rounds", type=int, default=64)
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "caches.md")
    given = options.parse_args()
    sizes = (given.batch, given.heads, given.length, given.width)
    prompt, token = torch.randn(sizes), torch.randn(*sizes[:2], 1, sizes[3])
    caches = kinds(given.length, given.rounds + 4, given.window)
    for name, cache in caches.items():
        apart = given.length // 8 if "differ" in name else 0
        lengths = [given.length - item * apart for item in range(given.batch)]
        cache.append(prompt, prompt, CAUSAL, padding=Padding(lengths) if apart else None)
        check(cache, prompt, lengths, token)
        for _ in range(3):
            step(cache, token)
    steps = {name: functools.partial(step, cache, token) for name, cache in caches.items()}
    taken = rounds_of(steps, given.rounds, warm=True)
    text = page(given, caches, {name: statistics.median(times) for name, times in taken.items()})
    given.out.write_text(text, encoding="utf-8")
    print(text)


def page(given: argparse.Namespace, caches: dict[str, LayerCache], medians: dict[str, float]) -> str:
    lines = [
        "# What each kind of cache costs",
        "",
        "    python benchmarks/caches.py",
        "",
        f"One layer, one step, without projections: batch {given.batch}, {given.heads} heads of width {given.width},",
        f"float32, {given.length:,} tokens (where lengths differ, items are {given.length // 8} tokens apart).",
        f"{machine()}, PyTorch {torch.__version__}.",
        f"Medians of {given.rounds} rounds in which the kinds take turns.",
        "",
        "| | memory | a step | relative |",
        "|---|---|---|---|",
    ]
    for name, cache in caches.items():
        ratio = medians[name] / medians["growing"]
        lines.append(f"| {name} | {cache.nbytes / 2**20:.1f} MiB | {medians[name] * 1e3:.1f} ms | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
