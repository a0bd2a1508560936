"""Memory of each kind of cache, and the time of one decoding step of one layer: `python benchmarks/caches.py`.

Each kind holds the same tokens. A step appends one token and attends, without projections. The kinds take turns, so
that a noisy machine disturbs all alike; the median of the rounds is shown.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from saccade import Causal, Padding, attention
from saccade.nn.cache import GrowingLayer, LayerCache, StaticLayer, WindowLayer

CAUSAL = Causal()


def kinds(length: int, steps: int, window: int) -> dict[str, LayerCache]:
    return {
        "growing": GrowingLayer(),
        "static": StaticLayer(length + steps),
        "growing, lengths differ": GrowingLayer(),
        f"window {window}": WindowLayer(window),
        f"window {window}, 4 sinks": WindowLayer(window, sinks=4),
    }


def step(cache: LayerCache, tokens: torch.Tensor) -> None:
    seen = cache.append(tokens, tokens, CAUSAL)
    attention(tokens, seen.key, seen.value, seen.mask, bias=seen.bias)


@torch.no_grad()
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--length", type=int, default=4096)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--heads", type=int, default=8)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--window", type=int, default=512)
    options.add_argument("--rounds", type=int, default=64)
    given = options.parse_args()
    sizes = (given.batch, given.heads, given.length, given.width)
    prompt, token = torch.randn(sizes), torch.randn(*sizes[:2], 1, sizes[3])
    caches = kinds(given.length, given.rounds + 4, given.window)
    for name, cache in caches.items():
        lengths = [given.length - b * (given.length // 8) for b in range(given.batch)]
        cache.append(prompt, prompt, CAUSAL, padding=Padding(lengths) if "differ" in name else None)
        for _ in range(4):
            step(cache, token)
    taken: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(given.rounds):
        for name, cache in caches.items():
            start = time.perf_counter()
            step(cache, token)
            taken[name].append(time.perf_counter() - start)
    fastest = statistics.median(taken["growing"])
    print(f"{given}, {torch.get_num_threads()} threads")
    for name, cache in caches.items():
        median = statistics.median(taken[name])
        print(f"{name:26} {cache.nbytes / 2**20:8.1f} MiB  {median * 1e3:8.2f} ms  {median / fastest:6.2f}")


if __name__ == "__main__":
    main()
