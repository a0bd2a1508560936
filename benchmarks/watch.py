"""What `saccade.watch` costs: forwards with every step observed, and training steps of which every 50th is.

    python benchmarks/watch.py [--rounds 15] [--threads 0] [--training MODEL ...] [--out benchmarks/results/watch.md]

Three models of 6 layers, width 512, 8 heads of 64, on 4 sequences of 512 tokens: a Saccade decoder, a BERT of
transformers with its sdpa attention, and PyTorch's nn.TransformerEncoder. Ways take turns within each round, in an
order that turns too; ratios are medians of the rounds' ratios. Outputs are checked to be equal, to the bit, before
anything is timed.

`--parts` finds out what the ratio depends on instead, in two to four minutes: what a watched call takes more than an
unwatched one, at several lengths, widths and batches, as two numbers that are fitted to all of them.

    more = fixed + by pair * B * heads * L (L + 1) / 2        seconds of a causal call

`--decoding` measures steps of one token after 64 instead: a Saccade decoder, and a Llama of transformers inside of
`saccade.accelerate`, both of 12 layers of width 768.

`--thread-time` counts the CPU time of one thread instead of time on the clock: for a machine that does other things.

Shape legend: B items, L tokens, E width.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import saccade
from saccade.benchmark.attention.timing import median_ratio
from saccade.nn import AttentionConfig, BlockConfig, Decoder

LAYERS, WIDTH, HEADS, ITEMS, LENGTH, EVERY = 6, 512, 8, 4, 512, 50
# B, L, E: one thing changes at a time around (1, 256, 256).
SHAPES = (
    (1, 64, 256),
    (1, 128, 256),
    (1, 256, 256),
    (1, 512, 256),
    (1, 1024, 256),
    (1, 256, 128),
    (1, 256, 512),
    (1, 256, 1024),
    (4, 256, 256),
    (16, 256, 256),
)
PARTS = ("not watched", "every step", "every step, received and top 8")
OUT = Path(__file__).parent / "results" / "watch.md"

Run = Callable[[Tensor], Tensor]
Way = Callable[[], float]
Context = Callable[[nn.Module], contextlib.AbstractContextManager[object]]
Results = dict[str, dict[str, list[float]]]  # by model and way


def heads(width: int) -> int:
    """As wide as those of the models of usual width."""
    return width * HEADS // WIDTH


def decoder(width: int | None = None) -> tuple[nn.Module, Run]:
    width = width or WIDTH
    model = Decoder(BlockConfig(AttentionConfig(width, heads(width))), LAYERS)
    return model, model


def bert() -> tuple[nn.Module, Run]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=LENGTH,
    )
    model = BertModel(config, add_pooling_layer=False)
    return model, lambda x: model(inputs_embeds=x).last_hidden_state


def encoder() -> tuple[nn.Module, Run]:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    return model, model


MODELS = {"Saccade decoder": decoder, "BERT (transformers, sdpa)": bert, "nn.TransformerEncoder": encoder}

FORWARDS: dict[str, Context] = {
    "not watched": lambda model: contextlib.nullcontext(),
    "every step": lambda model: saccade.watch(model),
    "every step, without alarms": lambda model: saccade.watch(model, alarms=False),
    "every step, received and top 8": lambda model: saccade.watch(model, received=True, top=8),
}
# The first step of a way is not timed: it is the one that a watch of every 50th step observes.
TRAININGS: dict[str, Context] = {
    "not watched": lambda model: contextlib.nullcontext(),
    "passed over": lambda model: saccade.watch(model, every=EVERY, gradients=True),
    "observed, with gradients": lambda model: saccade.watch(model, gradients=True),
}


def forward(run: Run, x: Tensor) -> None:
    with torch.no_grad():
        run(x)


def train(run: Run, x: Tensor) -> None:
    run(x).square().mean().backward()


def check(model: nn.Module, run: Run, x: Tensor) -> None:
    """Watched, the model gives the same; in training mode, where no native fast path differs, without dropout."""
    plain = run(x)
    with saccade.watch(model, gradients=True) as watched:
        seen = run(x)
    assert torch.equal(plain, seen)
    assert len(watched.calls) == LAYERS and not watched.unobserved


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "dropout_prob", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def measured(
    model: nn.Module,
    ways: dict[str, Context],
    work: Callable[[], None],
    before: int,
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Seconds of one step in each way, round by round, after `before` steps that are not timed."""
    work()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with ways[name](model):
                for _ in range(before):
                    work()
                start = clock()
                work()
                taken[name].append(clock() - start)
    return taken


def ratios(taken: dict[str, list[float]]) -> Iterator[tuple[str, float, float]]:
    """Name, median seconds, and the median of the ratios to the first way."""
    first = next(iter(taken.values()))
    for name, seconds in taken.items():
        yield name, statistics.median(seconds), median_ratio(seconds, first)


def table(title: str, results: Results) -> list[str]:
    lines = [f"| {title} | way | a step | ratio |", "|---|---|---|---|"]
    for model, taken in results.items():
        for name, seconds, ratio in ratios(taken):
            lines.append(f"| {model} | {name} | {1e3 * seconds:.1f} ms | {ratio:.3f} |")
    return lines


def overall(trainings: Results) -> Iterator[str]:
    """One line for each model, from the medians of the steps."""
    for model, taken in trainings.items():
        _, passed_over, observed = (ratio for _, _, ratio in ratios(taken))
        yield f"- {model}: {((EVERY - 1) * passed_over + observed) / EVERY:.3f} times an unwatched one"


def pairs(items: int, length: int, width: int) -> int:
    """Queries and keys that see each other in one causal call, over all heads."""
    return items * heads(width) * length * (length + 1) // 2


def two_numbers(amounts: Sequence[int], more: Sequence[float]) -> tuple[float, float]:
    """`fixed` and `by pair` of `more = fixed + by pair * amount`, whose relative errors are least; neither below 0."""
    seconds = np.asarray(more, dtype=float)
    rows = np.stack([np.ones(len(seconds)), np.asarray(amounts, dtype=float)], 1) / seconds[:, None]
    fixed, by_pair = np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)[0]
    return max(float(fixed), 0.0), max(float(by_pair), 0.0)


def parts(rounds: int, clock: Callable[[], float]) -> Iterator[str]:
    """The quantities that a ratio depends on, as Markdown."""
    ways = {name: FORWARDS[name] for name in PARTS}
    taken = {}
    for shape in SHAPES:
        torch.manual_seed(0)
        model, run = decoder(shape[2])
        x = torch.randn(*shape)
        found = measured(model.eval(), ways, lambda r=run, x=x: forward(r, x), 1, rounds, clock)  # type: ignore[misc]
        taken[shape] = {name: statistics.median(seconds) for name, seconds in found.items()}
    amounts = [pairs(*shape) for shape in SHAPES]
    for way in PARTS[1:]:
        more = [max(one[way] - one[PARTS[0]], 1e-9) / LAYERS for one in taken.values()]
        fixed, by_pair = two_numbers(amounts, more)
        yield f"**{way}**: a call takes {1e3 * fixed:.2f} ms more, and {1e9 * by_pair:.2f} ns more for each pair."
        yield ""
        yield "| B | L | width | not watched | watched | ratio | by the two numbers |"
        yield "|---|---|---|---|---|---|---|"
        for shape, amount in zip(SHAPES, amounts, strict=True):
            plain, watched = taken[shape][PARTS[0]], taken[shape][way]
            told = 1 + LAYERS * (fixed + by_pair * amount) / plain
            items, length, width = shape
            yield (
                f"| {items} | {length} | {width} | {1e3 * plain:.1f} ms | {1e3 * watched:.1f} ms "
                f"| {watched / plain:.2f} | {told:.2f} |"
            )
        yield ""


def parts_page(rounds: int, clock: Callable[[], float], thread_time: bool) -> str:
    lines = [
        "# What the cost of watching depends on",
        "",
        f"A Saccade decoder of {LAYERS} layers, heads of {WIDTH // HEADS}, float32, on B sequences of L tokens. "
        f"{'CPU time of one thread' if thread_time else 'Time on the clock'}, medians of {rounds} rounds in which "
        "the ways take turns. A pair is a query and a key that it sees, in one head: B heads L (L + 1) / 2 in a call.",
        "",
        f"PyTorch {torch.__version__}, {torch.get_num_threads()} thread(s), {_processor()}.",
        "",
        f"    python benchmarks/watch.py --parts --rounds {rounds}{' --thread-time' * thread_time}",
        "",
        *parts(rounds, clock),
    ]
    return "\n".join(lines).rstrip() + "\n"


def decoding(rounds: int, clock: Callable[[], float]) -> Iterator[str]:
    """The lines of a table: a step of native calls, the same step watched, and one by the modules."""
    yield from ("| decoding, step of one token | way | a step | ratio |", "|---|---|---|---|")
    for name, make in (("Saccade decoder", _decoder_steps), ("Llama (transformers, accelerated)", _llama_steps)):
        torch.manual_seed(0)
        ways, taken = make(), {}
        for _ in range(rounds):
            for way, (context, run) in ways.items():
                with torch.no_grad(), context(), contextlib.closing(run()) as steps:
                    seconds = [_timed(steps, clock) for _ in range(44)]
                taken.setdefault(way, []).append(statistics.median(seconds[4:]))
        for way, seconds_, ratio in ratios(taken):
            yield f"| {name} | {way} | {1e3 * seconds_:.1f} ms | {ratio:.2f} |"


def _timed(steps: Iterator[object], clock: Callable[[], float]) -> float:
    start = clock()
    next(steps)
    return clock() - start


Steps = dict[str, tuple[Callable[[], contextlib.AbstractContextManager[object]], Callable[[], Any]]]


def _decoder_steps() -> Steps:
    attention = AttentionConfig(768, 12, positions=saccade.positions.RotaryConfig(), bias=False)
    block = BlockConfig(attention, hidden=2048, activation="swiglu", norm="rms", bias=False)
    model = Decoder(block, 12).eval()

    def run(**options: Any) -> Iterator[object]:
        cache = model.cache()
        model(torch.randn(1, 64, 768), cache=cache)
        while True:
            yield model(torch.randn(1, 1, 768), cache=cache, **options)

    modules = functools.partial(run, hidden_states=[])  # which nobody but the modules can give
    plain = contextlib.nullcontext
    return {"native": (plain, run), "watched": (lambda: saccade.watch(model), run), "modules": (plain, modules)}


def _llama_steps() -> Steps:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=2048)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes)).eval()

    def run() -> Iterator[object]:
        cache = DynamicCache(config=model.config)
        model(torch.arange(64)[None], past_key_values=cache)
        while True:
            yield model(torch.arange(1)[None], past_key_values=cache)

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with saccade.accelerate(model), saccade.watch(model):
            yield

    accelerated = lambda: saccade.accelerate(model)  # noqa: E731
    return {"native": (accelerated, run), "watched": (both, run), "modules": (contextlib.nullcontext, run)}


def page(forwards: list[str], trainings: Results, rounds: int, thread_time: bool) -> str:
    clock = "CPU time of one thread" if thread_time else "Time on the clock"
    lines = [
        "# What watching costs",
        "",
        f"Models of {LAYERS} layers, width {WIDTH}, {HEADS} heads of {WIDTH // HEADS}, float32, on {ITEMS} sequences "
        f"of {LENGTH} tokens. {clock}, medians of {rounds} rounds in which the ways take turns; ratios are medians of "
        "the rounds' ratios. Outputs were checked to be equal to the bit first.",
        "",
        f"PyTorch {torch.__version__}, {torch.get_num_threads()} thread(s), {_processor()}.",
        "",
        "    python benchmarks/watch.py",
        "",
        *forwards,
        "",
        f"Forward and backward, with a watch of every {EVERY}th step and its gradients: a step that it passes over, "
        "and one that it observes.",
        "",
        *table("training step", trainings),
        "",
        f"So a run of which every {EVERY}th step is observed takes:",
        "",
        *overall(trainings),
    ]
    return "\n".join(lines) + "\n"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="0: PyTorch's own number")
    parser.add_argument("--thread-time", action="store_true")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--training", nargs="*", choices=list(MODELS), default=list(MODELS), help="minutes for each")
    parser.add_argument("--parts", action="store_true", help="what the ratio depends on, and nothing else")
    parser.add_argument("--decoding", action="store_true", help="steps of one token, and nothing else")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.threads or options.thread_time:
        torch.set_num_threads(options.threads or 1)
    clock = time.thread_time if options.thread_time else time.perf_counter
    if options.decoding:
        show("\n".join(decoding(options.rounds, clock)) + "\n", options.out)
        return
    if options.parts:
        show(parts_page(options.rounds, clock, options.thread_time), options.out)
        return
    forwards, trainings = {}, {}
    for name in options.models:
        torch.manual_seed(0)
        model, run = MODELS[name]()
        without_dropout(model.train())
        x = torch.randn(ITEMS, LENGTH, WIDTH)
        check(model, run, x)
        forwards[name] = measured(model, FORWARDS, lambda r=run, x=x: forward(r, x), 0, options.rounds, clock)
        if name in options.training:
            trainings[name] = measured(model, TRAININGS, lambda r=run, x=x: train(r, x), 1, options.rounds, clock)
    show(page(table("forward", forwards), trainings, options.rounds, options.thread_time), options.out)


def show(text: str, out: Path | None) -> None:
    print(text)
    if out is not None:
        out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
