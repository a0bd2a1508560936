"""Memory and speed of each remedy for training that is too large or too slow, on one model.

    python benchmarks/remedies.py [--rounds 3] [--items 32] [--out benchmarks/results/remedies.md]

bf16, checkpointing, accumulation, a window, grouping by length and packing, each alone and all together, beside the
plain float32 step. Every configuration trains the same decoder (forward, loss, backward, clipping, AdamW) over an epoch
of the same items, in padded batches. docs/remedies.md says what was expected, and by which formulas.

Before anything is timed, losses and gradients are checked. Times are medians over rounds in which the configurations
take turns in one process, in an order that moves on by one. Peak memory is resident memory: a process of its own for
each configuration makes its state in a tiny step, and the largest step of the epoch is measured above that.

Shape legend: B batch, L length, E width, F hidden width, V vocabulary, H heads.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor

import saccade
from saccade import Causal, Documents, Mask, Window
from saccade.batching import LengthGrouped, pad
from saccade.benchmark.attention.timing import median_ratio
from saccade.models import DecoderLM, ModelConfig

OUT = Path(__file__).parent / "results" / "remedies.md"
STATUS = Path("/proc/self/status")
SIGMA, SHORTEST = 0.7, 32  # of the lengths; median: below
BF16_FLAGS = ("amx_bf16", "avx512_bf16")
IGNORED = -100  # F.cross_entropy's
ROUNDING = 1e-4  # of the largest entry: float32 sums over some thousand tokens, in another order
NEAR = 2.0**-8  # bf16's spacing of numbers near 1


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model and the data. `window` is how many keys a token sees, itself among them."""

    width: int = 256
    heads: int = 4
    layers: int = 4
    vocabulary: int = 1024
    context: int = 1024
    window: int = 256
    batch: int = 8
    items: int = 32

    def model(self) -> ModelConfig:
        return ModelConfig(self.vocabulary, self.width, self.layers, self.heads, context=self.context)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Which remedies a step uses."""

    name: str
    bf16: bool = False
    checkpointing: bool = False
    parts: int = 1  # micro-batches of a step
    window: bool = False
    grouped: bool = False
    packed: bool = False  # the real tokens of a part in one row


PARTS = 4
CONFIGURATIONS = (
    Configuration("plain float32"),
    Configuration("bf16 autocast", bf16=True),
    Configuration("checkpointing", checkpointing=True),
    Configuration(f"accumulation, {PARTS} micro-batches", parts=PARTS),
    Configuration("window", window=True),
    Configuration("grouped by length", grouped=True),
    Configuration("packed", packed=True),
    Configuration("all together", bf16=True, checkpointing=True, parts=PARTS, window=True, packed=True),
)
PLAIN, BF16, CHECKPOINTING, ACCUMULATION, WINDOW, _, PACKED, TOGETHER = CONFIGURATIONS


def mask_of(sizes: Sizes, configuration: Configuration) -> Mask:
    return Causal() & Window(sizes.window - 1, 0) if configuration.window else Causal()


def flops(sizes: Sizes, configuration: Configuration, batch: Batch) -> float:
    """Operations of the matrix products of one step. Formula: docs/remedies.md."""
    hidden, width = sizes.model().hidden or 0, sizes.width
    lengths = computed(configuration, batch)
    tokens, attention = sum(lengths), 0.0
    for length in lengths:
        query = torch.zeros(1, sizes.heads, length, width // sizes.heads)
        plan = saccade.explain(query, query, query, mask_of(sizes, configuration))
        attention += sizes.layers * plan.flops
    block = 4 * width**2 + 3 * width * hidden
    total = 6 * tokens * (sizes.layers * block + sizes.vocabulary * width) + 3.5 * attention
    if configuration.checkpointing:  # what leads out of the block is not needed again, and not computed
        total += 2 * tokens * sizes.layers * (block - width * hidden) + attention
    return total


def kept_bytes(sizes: Sizes, configuration: Configuration) -> tuple[int, int]:
    """Bytes that autograd keeps for each token: of one block, and of the last norm, the head and the loss."""
    hidden, width, narrow = sizes.model().hidden or 0, sizes.width, 2 if configuration.bf16 else 4
    # Attention keeps its output, and two numbers for each row and head.
    block = 4 * (4 * width + 2 * sizes.heads + 2) + narrow * (9 * width + 4 * hidden)
    return block, 4 * (2 * width + 1 + sizes.vocabulary) + narrow * width


def activation_bytes(sizes: Sizes, configuration: Configuration, batch: Batch) -> int:
    """At the peak of a step, above weights, gradients and optimizer state.

    The larger of two moments: the loss's backward (three arrays of (tokens, V), one of which was kept), and the
    backward of the last block's feed-forward layer. Formula: docs/remedies.md.
    """
    hidden, width, narrow = sizes.model().hidden or 0, sizes.width, 2 if configuration.bf16 else 4
    (block, head), entry = kept_bytes(sizes, configuration), 4 * width
    kept = sizes.layers * (entry if configuration.checkpointing else block)
    again = block - entry if configuration.checkpointing else 0
    in_loss = kept + head + 8 * sizes.vocabulary
    in_block = kept + again + entry + 2 * narrow * hidden
    matrices = (4 * width**2 + 3 * width * hidden) * (1 if configuration.checkpointing else sizes.layers)
    cast = 2 * (matrices + sizes.vocabulary * width) if configuration.bf16 else 0
    lengths = torch.tensor(computed(configuration, batch))
    tokens = max(int(part.sum()) for part in lengths.chunk(configuration.parts))
    return tokens * max(in_loss, in_block) + cast


class Batch(NamedTuple):
    """A padded batch: tokens (B, L) and what follows each, IGNORED in the padding."""

    tokens: Tensor
    targets: Tensor


def computed(configuration: Configuration, batch: Batch) -> list[int]:
    """How many tokens of each item are computed: the real ones alone where they are packed."""
    rows, length = batch.tokens.shape
    return (batch.targets != IGNORED).sum(1).tolist() if configuration.packed else [length] * rows


def median(sizes: Sizes) -> int:
    """The median of the lengths' distribution: 300 in a context of 1,024."""
    return max(1, 300 * sizes.context // 1024)


def drawn(sizes: Sizes) -> list[Tensor]:
    """Sequences of random tokens, (length + 1,) each, with log-normal lengths; the longest fills the context."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(np.log(median(sizes)), SIGMA, sizes.items).astype(int)
    lengths = lengths.clip(min(SHORTEST, sizes.context), sizes.context)
    lengths[0] = sizes.context
    return [torch.from_numpy(random.integers(0, sizes.vocabulary, n + 1)) for n in lengths.tolist()]


def chosen(sizes: Sizes, items: list[Tensor], *, grouped: bool) -> list[list[int]]:
    """Which items make each batch of an epoch."""
    if grouped:
        return LengthGrouped([len(item) - 1 for item in items], sizes.batch, report=None).batches(0)
    order = np.random.default_rng(1).permutation(len(items)).tolist()
    return [order[at : at + sizes.batch] for at in range(0, len(order), sizes.batch)]


def padded(items: list[Tensor]) -> Batch:
    tokens, _ = pad([item[:-1] for item in items])
    targets, _ = pad([item[1:] for item in items], value=IGNORED)
    return Batch(tokens, targets)


def epoch_of(sizes: Sizes, configuration: Configuration) -> list[Batch]:
    items = drawn(sizes)
    return [padded([items[i] for i in few]) for few in chosen(sizes, items, grouped=configuration.grouped)]


def largest(configuration: Configuration, epoch: list[Batch]) -> Batch:
    return max(epoch, key=lambda batch: sum(computed(configuration, batch)))


class Trainer:
    """The model and its optimizer; what is measured is `step`."""

    def __init__(self, sizes: Sizes):
        torch.manual_seed(0)
        self.sizes, self.model = sizes, DecoderLM(sizes.model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, configuration: Configuration, batch: Batch) -> None:
        self.gradients(batch, configuration, mask_of(self.sizes, configuration))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        # Kept, so that what a step needs beside weights, gradients and state can be measured.
        self.optimizer.zero_grad(set_to_none=False)

    def gradients(self, batch: Batch, configuration: Configuration, mask: Any) -> float:
        """The mean loss of the real tokens; its gradients are added up in the weights."""
        self.model.decoder.checkpointing = configuration.checkpointing
        real, total = (batch.targets != IGNORED).sum(), 0.0
        parts = batch.tokens.chunk(configuration.parts), batch.targets.chunk(configuration.parts)
        for tokens, targets in zip(*parts, strict=True):
            seen = mask
            if configuration.packed:
                here = targets != IGNORED
                ends = [0, *here.sum(1).cumsum(0).tolist()]
                tokens, targets = tokens[here][None], targets[here][None]
                seen = mask & Documents.from_cu_seqlens(ends)
            loss = self._loss(tokens, targets, configuration, seen) / real
            loss.backward()
            total += loss.item()
        return total

    def _loss(self, tokens: Tensor, targets: Tensor, configuration: Configuration, mask: Mask | Tensor) -> Tensor:
        """Summed over the real tokens. As `DecoderLM.forward`, with a mask; no real token sees padding on its right."""
        embedding = self.model.embedding
        with torch.autocast("cpu", torch.bfloat16, enabled=configuration.bf16):
            x = self.model.decoder(embedding(tokens) * self.sizes.width**0.5, mask)
            logits = F.linear(x, embedding.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")

    def state_bytes(self) -> tuple[int, int, int]:
        """Bytes of weights, gradients and optimizer state."""
        weights = sum(weight.nbytes for weight in self.model.parameters())
        kept = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        return weights, weights, sum(x.nbytes for x in kept)


def check(sizes: Sizes) -> None:
    """Remedies that should change nothing do not; a window is what its dense mask is; bf16 is near; all items come."""
    trainer = Trainer(sizes)
    whole = epoch_of(sizes, PLAIN)[0]
    batch = Batch(*(x[:PARTS, : 2 * sizes.window] for x in whole))
    length = batch.tokens.shape[1]

    def found(configuration: Configuration, mask: Mask | Tensor) -> tuple[float, list[Tensor]]:
        trainer.optimizer.zero_grad()
        loss = trainer.gradients(batch, configuration, mask)
        return loss, [weight.grad for weight in trainer.model.parameters() if weight.grad is not None]

    plain = found(PLAIN, Causal())
    windowed = found(PLAIN, mask_of(sizes, WINDOW).dense(length, length))
    same = ((CHECKPOINTING, plain), (ACCUMULATION, plain), (PACKED, plain), (WINDOW, windowed))
    for configuration, expected in same:
        require_equal(configuration.name, found(configuration, mask_of(sizes, configuration)), expected)
    for configuration, (expected_loss, _) in ((BF16, plain), (TOGETHER, windowed)):
        loss, _ = found(configuration, mask_of(sizes, configuration))
        assert abs(loss - expected_loss) <= NEAR * expected_loss, f"{configuration.name}: {loss} is not {expected_loss}"
    for grouped in (False, True):
        seen = sorted(i for few in chosen(sizes, drawn(sizes), grouped=grouped) for i in few)
        assert seen == list(range(sizes.items)), "an epoch does not have every item once"


def require_equal(name: str, got: tuple[float, list[Tensor]], right: tuple[float, list[Tensor]]) -> None:
    """Losses and gradients, to rounding."""
    assert abs(got[0] - right[0]) <= ROUNDING * abs(right[0]), f"{name}: the loss is {got[0]}, not {right[0]}"
    for one, other in zip(got[1], right[1], strict=True):
        error = (one - other).abs().max() / other.abs().max()
        assert error <= ROUNDING, f"{name}: a gradient differs by {error:.1e} of its largest entry"


@dataclasses.dataclass
class Measured:
    """`seconds` of an epoch in each round; `peak` bytes of its largest step above `state` (weights, gradients, ...)."""

    peak: int = 0
    state: tuple[int, ...] = ()
    seconds: list[float] = dataclasses.field(default_factory=list)


def measure(sizes: Sizes, rounds: int, advance: Callable[[str], None] = lambda text: None) -> list[Measured]:
    """One for each configuration. `advance` is called after the checks, each memory and each timing."""
    check(sizes)
    advance("checked")
    results = []
    for configuration in CONFIGURATIONS:
        results.append(peak_in_own_process(sizes, configuration))
        advance(f"memory: {configuration.name}")
    trainer = Trainer(sizes)
    epochs = [epoch_of(sizes, configuration) for configuration in CONFIGURATIONS]
    for turn in range(rounds):
        for k in range(len(CONFIGURATIONS)):
            at = (k + turn) % len(CONFIGURATIONS)
            start = time.perf_counter()
            for batch in epochs[at]:
                trainer.step(CONFIGURATIONS[at], batch)
            results[at].seconds.append(time.perf_counter() - start)
            advance(f"round {turn + 1}: {CONFIGURATIONS[at].name}")
    return results


def peak_in_own_process(sizes: Sizes, configuration: Configuration) -> Measured:
    # Without a fixed threshold glibc keeps freed pieces of up to 32 MB, and their holes would be counted as needed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    task = json.dumps([dataclasses.asdict(sizes), dataclasses.asdict(configuration)])
    command = [sys.executable, __file__, "--peak", task]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{configuration.name}: measuring memory failed\n{done.stderr}")
    peak, state = json.loads(done.stdout)
    return Measured(peak, tuple(state))


def peak_here(sizes: Sizes, configuration: Configuration) -> tuple[int, tuple[int, ...]]:
    """The largest step's peak above this process's memory before it, and the bytes of the training state.

    VmHWM and not getrusage's ru_maxrss: that one begins with the peak of the process that started this one.
    """
    trainer, epoch = Trainer(sizes), epoch_of(sizes, configuration)
    trainer.step(configuration, Batch(*(x[:, :2] for x in epoch[0])))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again at what is resident now
    before = _resident("VmRSS")
    trainer.step(configuration, largest(configuration, epoch))
    return _resident("VmHWM") - before, trainer.state_bytes()


def _resident(field: str) -> int:
    """Bytes of memory."""
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


PAGE = """# Memory and speed of each remedy

A decoder with {millions:.1f} M parameters ({model}) over an epoch of {items} items, {real:,} real tokens, in padded
batches of {batch}. Lengths are log-normal: {lengths}. The window is {window} keys. Formulas and
conclusions: [docs/remedies.md](../../docs/remedies.md).

PyTorch {torch}, {threads} thread(s), {processor}; bf16 instructions: {instructions}.

    python benchmarks/remedies.py

## What it must cost, by the formulas

{expected}

## What it cost

Medians over {rounds} round(s), slowest over fastest round in brackets. Peak memory is that of the largest step, above
weights, gradients and optimizer state ({state} MiB), which are the same for all. Ratios are to the plain step; those
of times are medians of the rounds' ratios.{busy}

{measured}
"""
BUSY = """

**The machine was busy**: rounds of the same work differ by up to a factor of {:.1f}. Memory stands; times do not."""


def page(sizes: Sizes, rounds: int, results: list[Measured]) -> str:
    model, items = sizes.model(), drawn(sizes)
    spread = max(max(one.seconds) / min(one.seconds) for one in results)
    return PAGE.format(
        millions=sum(weight.numel() for weight in DecoderLM(model).parameters()) / 1e6,
        model=f"{model.layers} layers, width {model.width}, {model.heads} heads, vocabulary {model.vocabulary:,}",
        items=len(items),
        real=_real(items),
        batch=sizes.batch,
        lengths=f"median {median(sizes)}, sigma {SIGMA}, cut at {sizes.context:,}, the first item as long as that",
        window=sizes.window,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        processor=_information("model name") or platform.processor() or platform.machine(),
        instructions=", ".join(flag for flag in BF16_FLAGS if flag in _information("flags").split()) or "none",
        expected="\n".join(expected_table(sizes)),
        rounds=rounds,
        state=", ".join(f"{size / 2**20:.1f}" for size in results[0].state),
        busy=BUSY.format(spread) if spread > 1.5 else "",
        measured="\n".join(measured_table(sizes, results)),
    )


def expected_table(sizes: Sizes) -> list[str]:
    lines = ["| remedy | padding | GFLOP an epoch | ratio | peak activations | ratio |", "|---|---|---|---|---|---|"]
    real = _real(drawn(sizes))
    base_work, base_bytes = epoch_flops(sizes, PLAIN), step_bytes(sizes, PLAIN)
    for configuration in CONFIGURATIONS:
        work, needed = epoch_flops(sizes, configuration), step_bytes(sizes, configuration)
        epoch = epoch_of(sizes, configuration)
        padding = 1 - real / sum(sum(computed(configuration, batch)) for batch in epoch)
        lines.append(
            f"| {configuration.name} | {100 * padding:.0f} % | {work / 1e9:.0f} | {work / base_work:.2f} | "
            f"{needed / 2**20:.1f} MiB | {needed / base_bytes:.2f} |"
        )
    return lines


def measured_table(sizes: Sizes, results: list[Measured]) -> list[str]:
    lines = [
        "| remedy | peak memory | ratio | of the formula | time | ratio | GFLOP/s | real tokens/s | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base, real = results[0], _real(drawn(sizes))
    for configuration, one in zip(CONFIGURATIONS, results, strict=True):
        seconds = statistics.median(one.seconds)
        ratio = median_ratio(one.seconds, base.seconds)
        lines.append(
            f"| {configuration.name} | {one.peak / 2**20:.1f} MiB | {one.peak / base.peak:.2f} | "
            f"{one.peak / step_bytes(sizes, configuration):.2f} | "
            f"{seconds:.2f} s ({max(one.seconds) / min(one.seconds):.2f}) | {ratio:.2f} | "
            f"{epoch_flops(sizes, configuration) / seconds / 1e9:.0f} | {real / seconds:,.0f} | {1 / ratio:.2f} |"
        )
    return lines


def epoch_flops(sizes: Sizes, configuration: Configuration) -> float:
    return sum(flops(sizes, configuration, batch) for batch in epoch_of(sizes, configuration))


def step_bytes(sizes: Sizes, configuration: Configuration) -> int:
    """Bytes of the largest step of an epoch."""
    return activation_bytes(sizes, configuration, largest(configuration, epoch_of(sizes, configuration)))


def _real(items: list[Tensor]) -> int:
    return sum(len(item) - 1 for item in items)


def _information(field: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="how often each configuration is timed")
    parser.add_argument("--out", type=Path, default=OUT, help="where the page goes")
    parser.add_argument("--peak", help=argparse.SUPPRESS)  # the process that measures one configuration's memory
    options: dict[str, Any] = vars(parser.parse_args(arguments))
    task, rounds, out = options.pop("peak"), options.pop("rounds"), options.pop("out")
    if task is not None:
        sizes, configuration = json.loads(task)
        print(json.dumps(peak_here(Sizes(**sizes), Configuration(**configuration))))
        return
    if not STATUS.exists():
        raise SystemExit("remedies: peak memory is read from /proc/self/status, which only Linux has")
    sizes = Sizes(**options)
    with Progress(transient=True) as progress:
        bar = progress.add_task("checking", total=len(CONFIGURATIONS) * (rounds + 1) + 1)
        results = measure(sizes, rounds, lambda text: progress.update(bar, advance=1, description=text))
    written = page(sizes, rounds, results)
    out.write_text(written, encoding="utf-8")
    print(written)


if __name__ == "__main__":
    main()
