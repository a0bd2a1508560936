"""One decoding step of one layer with keys and values in float32, bfloat16 and 8 bits.

    python benchmarks/cache_dtypes.py

A step appends one token and attends, without projections. The dtypes take turns, so that a noisy machine disturbs all
alike; the median of the rounds is written to benchmarks/results/cache-dtypes.md. Before that, each answer is compared
with attention in float64 over the numbers that the cache holds.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path
from typing import NamedTuple

import torch

from saccade import Causal, attention
from saccade.benchmark.attention.timing import rounds_of
from saccade.nn import KVCache, LayerCache
from saccade.training.language.card import machine

CAUSAL = Causal()
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Kind(NamedTuple):
    """A cache, and the dtype of its queries and of the tokens that it is given."""

    cache: LayerCache
    dtype: torch.dtype


def kinds() -> dict[str, Kind]:
    found = {name: Kind(KVCache.growing(1)[0], dtype) for name, dtype in FLOATS.items()}
    found |= {
        f"8 bits, queries {name}": Kind(KVCache.growing(1, dtype="int8")[0], dtype) for name, dtype in FLOATS.items()
    }
    return found


def step(kind: Kind, query: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    seen = kind.cache.append(token, token, CAUSAL)
    return attention(query, seen.key, seen.value, seen.mask)


def check(kind: Kind, query: torch.Tensor, token: torch.Tensor) -> None:
    """The step's answer is that of attention in float64 over what the cache holds."""
    seen = kind.cache.append(token, token, CAUSAL).in_floats(torch.float64)
    kind.cache.rollback(1)
    expected = attention(query.double(), seen.key.double(), seen.value.double())
    close = 1e-5 if kind.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(step(kind, query, token).double(), expected, atol=close, rtol=close)


def measured(given: argparse.Namespace, length: int, heads: int) -> dict[str, tuple[float, float]]:
    """Seconds of a step, and MiB of the cache, by kind."""
    prompt = torch.randn(1, given.kv_heads, length, given.width)
    query, token = torch.randn(1, heads, 1, given.width), torch.randn(1, given.kv_heads, 1, given.width)
    found, steps = kinds(), {}
    for name, kind in found.items():
        own = [tensor.to(kind.dtype) for tensor in (query, token)]
        kind.cache.append(prompt.to(kind.dtype), prompt.to(kind.dtype), CAUSAL)
        check(kind, *own)
        steps[name] = functools.partial(step, kind, *own)
    taken = rounds_of(steps, given.rounds, warm=True)
    return {name: (statistics.median(taken[name]), found[name].cache.nbytes / 2**20) for name in found}


@torch.no_grad()
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--lengths", type=int, nargs="+", default=[4096, 32768])
    options.add_argument("--heads", type=int, nargs="+", default=[8, 32])
    options.add_argument("--kv-heads", type=int, default=8)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--rounds", type=int, default=64)
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cache-dtypes.md")
    given = options.parse_args()
    cases = [(length, heads) for length in given.lengths for heads in given.heads]
    text = page(given, {case: measured(given, *case) for case in cases})
    given.out.write_text(text, encoding="utf-8")
    print(text)


def page(given: argparse.Namespace, measurements: dict[tuple[int, int], dict[str, tuple[float, float]]]) -> str:
    lines = [
        "# What keys and values in 8 bits cost",
        "",
        "    python benchmarks/cache_dtypes.py",
        "",
        f"One layer, one step, without projections: one item, {given.kv_heads} key heads of width {given.width}.",
        f"{machine()}, PyTorch {torch.__version__}.",
        f"Medians of {given.rounds} rounds in which the dtypes take turns; a growing cache has up to twice the slots.",
        "",
        "| keys | query heads | | memory | a step | bfloat16 / it | float32 / it |",
        "|---|---|---|---|---|---|---|",
    ]
    for (length, heads), by_kind in measurements.items():
        for name, (taken, size) in by_kind.items():
            half, whole = (by_kind[other][0] / taken for other in ("bfloat16", "float32"))
            cost = f"{size:.1f} MiB | {taken * 1e3:.2f} ms | {half:.2f} | {whole:.2f}"
            lines.append(f"| {length:,} | {heads} | {name} | {cost} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
