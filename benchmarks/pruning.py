"""Time and memory of a model without half of its heads, beside the arithmetic and the bytes that were removed.

    python benchmarks/pruning.py [--rounds 15] [--length 2048] [--width 512] [--layers 4] [--out FILE.md]

Two numbers first, for one causal sequence of L tokens through layers of H heads, D wide, in a model E wide whose gated
feed-forward layers are F wide inside:

    FLOPs  8 E H D L + 4 H D L (L + 1) / 2 for each attention layer and 6 E F L for each feed-forward layer; half of
           the heads is half of the first two terms, and nothing of the third
    bytes  4 (4 E H D + 3 E F) a layer for weights, 8 H D L for cached keys and values, and 28 H D L of what attention
           keeps for the backward pass (the projection to query, key and value, of which value is a view; query and key,
           turned; the output by heads and in rows); half of the heads is half of all that has H in it

A forward pass without gradients and a training step (forward and backward) are measured, of one attention layer alone
and of a decoder of whole blocks. What is to be expected of the attention layer is its share of FLOPs; of the decoder
the same share of the time that its attention layers take, since products with the feed-forward weights and products of
queries and keys do not run at the same speed. Whole and pruned take turns in one process, in an order that turns
around each round; times are medians over rounds. Memory is counted: weights, a filled cache, and the storages that
autograd saves; and the peak of resident memory over the training step, in a process of its own for each.

Before anything is timed, the pruned model is held against the whole one with those heads' outputs set to 0.

Needs an idle machine, and Linux for the peak of memory.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import saccade
from saccade.nn import AttentionConfig, BlockConfig, Decoder, MultiHeadAttention
from saccade.positions import RotaryConfig
from saccade.pruning import attention_flops
from saccade.pruning._layers import attention_layers

STATUS = Path("/proc/self/status")
KINDS, VARIANTS, PASSES = ("attention", "decoder"), ("whole", "pruned"), ("forward", "step")
ROUNDING = 1e-4  # of the largest output: float32 sums over some thousand tokens, in another order
WITHIN = 0.15


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the models and the sequence."""

    length: int = 2048
    width: int = 512
    heads: int = 8
    layers: int = 4
    seed: int = 0

    def config(self) -> BlockConfig:
        return BlockConfig(AttentionConfig(self.width, self.heads, positions=RotaryConfig()))

    def tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(1, self.length, self.width, generator=generator)


def model_of(kind: str, variant: str, sizes: Sizes) -> nn.Module:
    """One attention layer or a decoder; pruned: without every other head."""
    torch.manual_seed(sizes.seed)
    made: nn.Module = (
        MultiHeadAttention(sizes.config().attention) if kind == "attention" else Decoder(sizes.config(), sizes.layers)
    )
    if variant == "pruned":
        odd = range(1, sizes.heads, 2)
        saccade.prune(made, {layer.path: odd for layer in attention_layers(made)})
    return made


def run(model: nn.Module, x: Tensor, which: str) -> None:
    """A forward pass or a training step."""
    mask = saccade.Causal()
    if which == "forward":
        with torch.no_grad():
            model(x, mask)
        return
    model.zero_grad()
    model(x, mask).sum().backward()


@torch.no_grad()
def check(sizes: Sizes) -> None:
    """SystemExit unless pruned is masked."""
    whole, pruned = (model_of("decoder", variant, sizes) for variant in VARIANTS)
    whole, x = copy.deepcopy(whole), sizes.tokens()[:, : min(sizes.length, 256)]
    for layer in attention_layers(whole):
        assert isinstance(layer.output, nn.Linear)
        layer.output.weight.unflatten(1, (sizes.heads, -1))[:, 1::2] = 0
    expected, got = whole(x), pruned(x)
    if (expected - got).abs().max() > ROUNDING * expected.abs().max():
        raise SystemExit("pruning: the pruned model is not the masked one")


def timed(sizes: Sizes, rounds: int) -> dict[str, float]:
    """Seconds of each kind, variant and pass, by "decoder pruned step"."""
    x = sizes.tokens()
    models = {(kind, variant): model_of(kind, variant, sizes) for kind in KINDS for variant in VARIANTS}
    cases = [(kind, variant, which) for kind in KINDS for which in PASSES for variant in VARIANTS]
    found: dict[str, list[float]] = {" ".join(case): [] for case in cases}
    for kind, variant, which in cases:
        run(models[kind, variant], x, which)  # what is made once is made before
    for number in range(rounds):
        for kind, variant, which in cases if number % 2 else reversed(cases):
            start = time.perf_counter()
            run(models[kind, variant], x, which)
            found[f"{kind} {variant} {which}"].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def counted_bytes(variant: str, sizes: Sizes) -> dict[str, int]:
    """Bytes of a decoder: weights, a cache filled with the sequence, and what autograd saves beside weights."""
    model, x = model_of("decoder", variant, sizes), sizes.tokens()
    cache = model.cache()  # type: ignore[operator]
    with torch.no_grad():
        model(x, cache=cache)
    held = [tensor for layer in cache.layers for tensor in (layer._key, layer._value)]
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(x)
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    kept = sum(size for pointer, size in saved.items() if pointer not in weights)
    del out
    cached = sum(2 * x.shape[1] * tensor.shape[1] * tensor.shape[3] * 4 for tensor in held) // 2
    return {"weights": sum(weights.values()), "cache": cached, "saved for the backward pass": kept}


def peak(variant: str, sizes: Sizes) -> int:
    """Bytes of resident memory that a training step of a decoder takes at most, in this process."""
    model, x = model_of("decoder", variant, sizes), sizes.tokens()
    run(model, x[:, :2], "step")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again at what is resident now
    before = _resident("VmRSS")
    run(model, x, "step")
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def peak_elsewhere(variant: str, sizes: Sizes) -> int:
    """`peak` in a process of its own."""
    asked = json.dumps({"variant": variant, "sizes": dataclasses.asdict(sizes)})
    done = subprocess.run([sys.executable, __file__, "--peak", asked], capture_output=True, text=True, check=True)
    return int(done.stdout)


def expected_bytes(sizes: Sizes) -> dict[str, int]:
    """Bytes that half of the heads remove, by the docstring's formulas."""
    inner, layers = sizes.width // 2, sizes.layers  # H D of the heads removed
    kept = 28 * inner * sizes.length * layers
    weights, cache = 16 * sizes.width * inner * layers, 8 * inner * sizes.length * layers
    return {"weights": weights, "cache": cache, "saved for the backward pass": kept, "peak": kept}


def page(sizes: Sizes, rounds: int) -> str:
    """All of it as Markdown."""
    flops = {
        v: attention_flops(attention_layers(model_of("attention", v, sizes)), sizes.length, causal=True)
        for v in VARIANTS
    }
    share = flops["pruned"] / flops["whole"]
    forward = 6 * sizes.width * sizes.config().hidden_width * sizes.length
    seconds = timed(sizes, rounds)
    lines = [
        "# Half of the heads removed",
        "",
        f"`python benchmarks/pruning.py`: {sizes}, {rounds} rounds, {torch.get_num_threads()} threads.",
        "",
        f"An attention layer: {flops['whole']:,} FLOPs, {flops['pruned']:,} with half of its heads ({share:.1%}). A "
        f"feed-forward layer: {forward:,}.",
        "",
        "| | whole, ms | pruned, ms | expected, ms | off by |",
        "|---|---|---|---|---|",
    ]
    for which in PASSES:
        attention = seconds[f"attention whole {which}"] * (1 - share)
        for kind, saved in (("attention", attention), ("decoder", attention * sizes.layers)):
            whole, pruned = (seconds[f"{kind} {variant} {which}"] for variant in VARIANTS)
            lines.append(_row(f"{kind}, {which}", whole * 1e3, pruned * 1e3, (whole - saved) * 1e3, "{:.2f}"))
    lines += ["", "| decoder | whole, MB | pruned, MB | expected, MB | off by |", "|---|---|---|---|---|"]
    counted: dict[str, Any] = {variant: counted_bytes(variant, sizes) for variant in VARIANTS}
    for variant in VARIANTS:
        counted[variant]["peak"] = peak_elsewhere(variant, sizes)
    for name, removed in expected_bytes(sizes).items():
        whole, pruned = (counted[variant][name] / 1e6 for variant in VARIANTS)
        lines.append(_row(name, whole, pruned, whole - removed / 1e6, "{:.1f}"))
    return "\n".join(lines) + "\n"


def _row(name: str, whole: float, pruned: float, expected: float, form: str) -> str:
    off = pruned / expected - 1
    shown = [form.format(value) for value in (whole, pruned, expected)]
    return f"| {name} | {' | '.join(shown)} | {off:+.1%}{'' if abs(off) <= WITHIN else ' (more than 15 %)'} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    given = vars(parser.parse_args(arguments))
    if given["peak"] is not None:
        asked = json.loads(given["peak"])
        print(peak(asked["variant"], Sizes(**asked["sizes"])))
        return
    if not STATUS.exists():
        raise SystemExit("pruning: peak memory is read from /proc/self/status, which only Linux has")
    sizes = Sizes(**{field.name: given[field.name] for field in dataclasses.fields(Sizes)})
    check(sizes)
    written = page(sizes, given["rounds"])
    print(written, end="")
    if given["out"] is not None:
        given["out"].write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
