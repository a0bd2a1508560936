"""Training the small language model with the native kernels: the same losses, and what a step takes.

    python benchmarks/native_training.py tinyshakespeare.txt [--dtype bf16] [--out page.md]

The model, data and settings of benchmarks/results/tiny-shakespeare.md, at its context of 64 tokens and at one of 4,096
(batch 1). Each backend trains a model of its own, from the same weights on the same windows. The backends take turns
step by step in one process, in an order that moves on by one, so that what else the machine does hits all of them
alike. Beside them the first steps are made in float64: what a loss differs from that is rounding.

Nothing is written where native's losses are further from float64's than rounding explains: twice as far as those of
the other backends, and the last bit of a loss.

Shape legend: B batch, L context, N tokens of the text.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor

import saccade
import saccade.nn.attention as place
from saccade.benchmark.attention import machine
from saccade.benchmark.attention.timing import median_ratio
from saccade.models import DecoderLM, ModelConfig
from saccade.models.tokenizers.own import train_characters
from saccade.training import LanguageSettings
from saccade.training.language.corpus import Corpus, read_texts, split_tail
from saccade.training.language.evaluation import evaluate
from saccade.training.language.objective import draw, spread
from saccade.training.language.windows import whole_windows
from saccade.training.loop import make_optimizer

OUT = Path(__file__).parent / "results" / "native-training.md"
BACKENDS = ("native", "chunked", "sdpa")
EXACT = "float64"
COMMAND = "python benchmarks/native_training.py {} --dtype {} --steps {} --long-steps {}"
LOOKED_AT, TOKENS = 64, 2**15  # validation windows, evenly spread, and tokens in them, at most


@dataclasses.dataclass(frozen=True)
class Setting:
    """The model and the number of steps. The first `exact` steps are made in float64, too."""

    context: int
    batch: int
    steps: int
    exact: int
    layers: int = 4
    heads: int = 4
    width: int = 128

    def model(self, vocabulary: int) -> DecoderLM:
        torch.manual_seed(0)
        return DecoderLM(ModelConfig(vocabulary, self.width, self.layers, self.heads, context=self.context))

    def training(self) -> LanguageSettings:
        return LanguageSettings(self.steps, self.batch, beta2=0.99)


SHORT, LONG = Setting(64, 12, steps=600, exact=20), Setting(4096, 1, steps=20, exact=5)


class Data(NamedTuple):
    """The text as tokens, the start token, and how many tokens there are."""

    corpus: Corpus
    start: int
    vocabulary: int


def read(path: Path) -> Data:
    training, validation = split_tail("\n".join(read_texts(path).values()))
    tokenizer = train_characters([training])
    return Data(Corpus.encode([training], [validation], tokenizer), tokenizer.start, tokenizer.vocabulary)


class Clock:
    """Adds up the seconds inside attention: a call's forward, and its backward from `Leave`'s to `Enter`'s."""

    def __init__(self) -> None:
        self.forward = self.backward = self.began = 0.0
        self.calls = self.returns = 0

    def attend(self, backend: str, attention: Callable[..., Tensor], *given: Any, **options: Any) -> Tensor:
        *tensors, mask = given
        tensors = Enter.apply(self, *tensors)
        began = time.perf_counter()
        out = attention(*tensors, mask, backend=backend, **options)
        self.forward += time.perf_counter() - began
        self.calls += 1
        return Leave.apply(self, out)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, clock: Clock, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.clock = clock
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clock.backward += time.perf_counter() - ctx.clock.began
        ctx.clock.returns += 1
        return None, *gradients


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, clock: Clock, out: Tensor) -> Tensor:
        ctx.clock = clock
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.clock.began = time.perf_counter()
        return None, gradient


@contextlib.contextmanager
def bound(backend: str, clock: Clock) -> Iterator[None]:
    """Modules attend with one backend, and are timed.

    They take no such argument: which backend is right is the call's business, not the model's. So it is bound around
    the one place in `saccade.nn` that calls `attention`.
    """
    attention = place.attention
    place.attention = lambda *given, **options: clock.attend(backend, attention, *given, **options)
    try:
        yield
    finally:
        place.attention = attention


class Contender:
    """One backend's model and optimizer, and what its steps gave: losses, seconds, and those of them in attention."""

    def __init__(self, name: str, model: DecoderLM, settings: LanguageSettings, dtype: str):
        self.name, self.settings, self.dtype = name, settings, dtype
        self.model = copy.deepcopy(model).double() if name == EXACT else copy.deepcopy(model)
        self.backend = "chunked" if name == EXACT else name
        self.optimizer = make_optimizer(self.model, settings)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.inside: list[float] = []

    def step(self, windows: Tensor) -> None:
        """As `saccade.training.loop` makes it, but for what watches over a run."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate_at(len(self.losses))
        clock, began = Clock(), time.perf_counter()
        with bound(self.backend, clock):
            with self.autocast():
                logits = self.model(windows[:, :-1])
            loss_of(logits, windows).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)
        self.inside.append(clock.forward + clock.backward)
        # Again in float64: the last bit of a float32 loss is coarser than what the backends differ by.
        self.losses.append(loss_of(logits.detach().double(), windows).item())
        layers = self.model.config.layers
        assert clock.calls == clock.returns == layers, f"{self.name}: {layers} layers, {clock.calls} calls of attention"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bf16" and self.name != EXACT)

    def validate(self, windows: Tensor) -> float:
        with bound(self.backend, Clock()), self.autocast():
            return evaluate(self.model, windows, batch=4)


@dataclasses.dataclass(frozen=True)
class Trained:
    """All contenders of one setting, the float64 one last, and the validation losses of the others."""

    setting: Setting
    contenders: list[Contender]
    validation: list[float]


def train(setting: Setting, data: Data, dtype: str, advance: Callable[[], None] = lambda: None) -> Trained:
    settings, model = setting.training(), setting.model(data.vocabulary)
    contenders = [Contender(name, model, settings, dtype) for name in (*BACKENDS, EXACT)]
    for step in range(setting.steps):
        windows = draw(step, data.corpus.training, data.start, data.vocabulary, setting.context, settings)
        if step < setting.exact:
            contenders[-1].step(windows)
        for k in range(len(BACKENDS)):
            contenders[(k + step) % len(BACKENDS)].step(windows)
        if step + 1 == setting.exact:
            check(contenders)
        advance()
    windows = whole_windows(data.corpus.validation, start=data.start, context=setting.context)
    windows = spread(windows, min(LOOKED_AT, max(1, TOKENS // setting.context)))
    return Trained(setting, contenders, [one.validate(windows) for one in contenders[:-1]])


def loss_of(logits: Tensor, windows: Tensor) -> Tensor:
    """The loss of windows (B, L + 1), in float32 at least, as in `saccade.training.loop`."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def check(contenders: list[Contender]) -> None:
    """Native's losses differ from those of float64 as rounding makes them differ."""
    native, *others, last = contenders
    exact, came = last.losses, largest(native.losses, last.losses)
    last_bit = 2.0 ** (math.frexp(max(exact))[1] - 24)
    allowed = 2 * max(largest(one.losses, exact) for one in others) + last_bit
    assert came <= allowed, f"native: a loss differs by {came:.1e} from float64's, rounding explains {allowed:.1e}"


def largest(losses: list[float], others: list[float]) -> float:
    """The largest difference in the steps that both made; NaN where a loss is."""
    differences = [abs(a - b) for a, b in zip(losses, others, strict=False)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


PAGE = """# Training with the native kernels

{layers} layers, {heads} heads, width {width}, {count:,} parameters, {dtype}: the model, data and settings of
[tiny-shakespeare.md](tiny-shakespeare.md). Each backend trains a model of its own, from the same weights on the same
windows; they take turns step by step. Times are medians over steps (forward, backward, clipping, AdamW), of them
attention: what happens between queries, keys and values and the heads' outputs, forward and backward. Ratios are
medians of the steps' ratios: chunked's time over the backend's. The validation loss is that of evenly spread windows
after the last step. The losses of all steps: `{losses}`.

{processor}, {threads} thread(s), instruction set of the kernels: {instruction_set}; PyTorch {torch}, Saccade {saccade};
{date}, load before {load_before}.

    {command}

{sections}"""
SECTION = """## Context {context:,}, batch {batch}, {steps} steps

{times}

The largest difference between two backends' losses of the same step. How far chunked and sdpa are apart is what
rounding in another order does. In the first {exact} steps native is {ratio:.2f} times as far from float64 as chunked.

{differences}
"""


def page(every: list[Trained], dtype: str, losses: str, command: str, measured: dict[str, Any]) -> str:
    setting, model = every[0].setting, every[0].contenders[0].model
    return PAGE.format(
        **{**dataclasses.asdict(setting), **measured},
        count=model.parameter_count(),
        dtype="bfloat16 autocast" if dtype == "bf16" else dtype,
        losses=losses,
        command=command,
        sections="\n".join(section(trained) for trained in every),
    )


def section(trained: Trained) -> str:
    native, chunked, _, exact = (one.losses for one in trained.contenders)
    return SECTION.format(
        **dataclasses.asdict(trained.setting),
        times="\n".join(times(trained)),
        ratio=largest(native, exact) / largest(chunked, exact),
        differences="\n".join(differences(trained)),
    )


def times(trained: Trained) -> list[str]:
    lines = [
        "| backend | step | ratio | attention | ratio | share of the step | last loss | validation loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    chunked = trained.contenders[BACKENDS.index("chunked")]
    for one, validation in zip(trained.contenders, trained.validation, strict=False):
        whole, inside = (f"{1e3 * statistics.median(seconds):.1f} ms" for seconds in (one.seconds, one.inside))
        lines.append(
            f"| {one.name} | {whole} | {median_ratio(chunked.seconds, one.seconds):.2f} | "
            f"{inside} | {median_ratio(chunked.inside, one.inside):.2f} | "
            f"{100 * median_ratio(one.inside, one.seconds):.0f} % | {one.losses[-1]:.5f} | {validation:.5f} |"
        )
    return lines


def differences(trained: Trained) -> list[str]:
    """A row for each pair. Float64 made only the first steps."""
    setting, named = trained.setting, {one.name: one.losses for one in trained.contenders}
    counts = 1, setting.exact, setting.steps
    lines = [f"| between | first step | first {setting.exact} | all {setting.steps} |", "|---|---|---|---|"]
    for one, other in (("native", "chunked"), ("sdpa", "chunked"), *((name, EXACT) for name in BACKENDS)):
        made = [n for n in counts if n <= len(named[other])]
        cells = [f"{largest(named[one][:n], named[other][:n]):.1e}" for n in made] + [""] * (3 - len(made))
        lines.append(f"| {one}, {other} | {' | '.join(cells)} |")
    return lines


def curves(trained: Trained, dtype: str) -> str:
    losses = {one.name: [round(loss, 9) for loss in one.losses] for one in trained.contenders}
    return json.dumps({"context": trained.setting.context, "dtype": dtype, "losses": losses}) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32", help="bf16 is autocast")
    parser.add_argument("--steps", type=int, default=SHORT.steps, help="at the short context; default %(default)s")
    parser.add_argument("--long-steps", type=int, default=LONG.steps, help="at the long one; default %(default)s")
    parser.add_argument("--out", type=Path, default=OUT, help="where the page goes; the losses go beside it")
    options = parser.parse_args(arguments)
    data, seen = read(options.text), machine.describe(saccade.__version__, torch.get_num_threads())
    every = []
    with Progress(transient=True) as progress:
        for usual, steps in ((SHORT, options.steps), (LONG, options.long_steps)):
            setting = dataclasses.replace(usual, steps=steps, exact=min(usual.exact, steps))
            bar = progress.add_task(f"context {setting.context}", total=steps)
            every.append(train(setting, data, options.dtype, functools.partial(progress.advance, bar)))
    losses = options.out.with_suffix(".jsonl")
    command = COMMAND.format(options.text.name, options.dtype, options.steps, options.long_steps)
    written = page(every, options.dtype, losses.name, command, seen)
    losses.write_text("".join(curves(trained, options.dtype) for trained in every), encoding="utf-8")
    options.out.write_text(written, encoding="utf-8")
    print(written)


if __name__ == "__main__":
    main()
