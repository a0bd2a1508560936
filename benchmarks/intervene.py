"""What `saccade.intervene` costs: a model's forward with edits against the plain one, side by side.

    python benchmarks/intervene.py [--rounds 9] [--length 2048] [--out benchmarks/results/intervene.md]

Three models of 4 layers, width 768, 12 heads of 64, one text, causal, no gradients: a Saccade decoder, a GPT-2 of
transformers with its sdpa attention, and the same with its eager one. Every edit is put on one head, on half of the
heads and on all heads of every layer. Ways take turns within each round, in an order that turns too; a ratio is the
median of the rounds' ratios.

What it must cost: a layer multiplies 24 E^2 L numbers in its projections and feed-forward layer and 2 L^2 E in its
causal attention (at L = 2,048 and E = 768 these are 29.0 and 6.4 GFLOP). Ablating half of the heads takes half of the
second away, 9 % of the whole; an edit that forms dense weights makes it 4 L^2 E, 18 % more.

Shape legend: B items, L tokens, E width.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import saccade
from saccade.intervention import Ablate, EditBias, EditMask, Patch, Scale, Weights
from saccade.nn import AttentionConfig, BlockConfig, Decoder

LAYERS, WIDTH, HEADS = 4, 768, 12
OUT = Path(__file__).parent / "results" / "intervene.md"
Run = Callable[[], object]


def saccade_decoder(length: int) -> tuple[nn.Module, Run]:
    model = Decoder(BlockConfig(AttentionConfig(WIDTH, HEADS)), LAYERS).eval()
    x = torch.randn(1, length, WIDTH)
    return model, lambda: model(x)


def gpt2(implementation: str) -> Callable[[int], tuple[nn.Module, Run]]:
    def make(length: int) -> tuple[nn.Module, Run]:
        from transformers import GPT2Config, GPT2Model

        config = GPT2Config(
            n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=length, attn_implementation=implementation
        )
        model = GPT2Model(config).eval()
        ids = torch.randint(0, config.vocab_size, (1, length))
        return model, lambda: model(input_ids=ids, use_cache=False)

    return make


MODELS = {"Saccade": saccade_decoder, "GPT-2, sdpa": gpt2("sdpa"), "GPT-2, eager": gpt2("eager")}


def halved(weights: Tensor, rows: Tensor) -> Tensor:
    return weights.mul_(0.5)


def edits(heads: int, length: int, watched: object) -> dict[str, object]:
    chosen = list(range(heads))
    slopes = saccade.ALiBi(saccade.ALiBi.slopes(HEADS))
    return {
        "Ablate": Ablate(chosen),
        "Ablate, mean": Ablate(chosen, "mean"),
        "Scale": Scale(chosen, 0.5),
        "Scale, logits": Scale(chosen, 0.5, "logits"),
        "Mask, window of 64": EditMask(chosen, saccade.Window(63, 0)),
        "Bias, ALiBi": EditBias(chosen, slopes),
        "Weights, halved": Weights(chosen, halved),
        **{f"Patch, {what}": Patch(chosen, watched, what) for what in ("output", "weights", "query", "key", "value")},  # type: ignore[arg-type]
    }


def timed(run: Run) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def ratios(model: nn.Module, run: Run, ways: dict[str, object], rounds: int) -> dict[str, float]:
    def way(edit: object) -> float:
        with saccade.intervene(model, {"*": edit}) if edit is not None else contextlib.nullcontext():  # type: ignore[dict-item]
            return timed(run)

    names: dict[str, object] = {"plain": None, **ways}
    for edit in names.values():
        way(edit)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        order = list(names)[number % len(names) :] + list(names)[: number % len(names)]
        times = {name: way(names[name]) for name in order}
        for name in ways:
            found[name].append(times[name] / times["plain"])
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--heads", nargs="*", type=int, default=[1, HEADS // 2, HEADS])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    lines = [
        f"{LAYERS} layers, width {WIDTH}, {HEADS} heads, {given.length:,} tokens, causal, float32, "
        f"{torch.get_num_threads()} threads, {platform.processor() or platform.machine()}; ratio to the plain forward, "
        f"median of {given.rounds} rounds.",
        "",
    ]
    with torch.no_grad():
        for name in given.models:
            model, run = MODELS[name](given.length)
            with saccade.watch(model, keep=True) as watched:
                run()
            columns = {n: ratios(model, run, edits(n, given.length, watched), given.rounds) for n in given.heads}
            lines += [f"| {name} | " + " | ".join(f"{n} of {HEADS} heads" for n in columns) + " |"]
            lines += ["|---|" + "---|" * len(columns)]
            lines += [
                f"| {edit} | " + " | ".join(f"{column[edit]:.2f}" for column in columns.values()) + " |"
                for edit in next(iter(columns.values()))
            ]
            lines += [""]
            print("\n".join(lines[-len(next(iter(columns.values()))) - 3 :]), flush=True)
    if given.out is not None:
        given.out.write_text("# What editing a model's attention costs\n\n" + "\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
