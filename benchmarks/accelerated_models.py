"""Models of transformers, plain and inside `saccade.accelerate()`: `python benchmarks/accelerated_models.py`.

Random weights, attn_implementation="sdpa", without the layer over the vocabulary. Plain and accelerated runs take turns
in one process; the factor is the median of the rounds' ratios. Beside it stands the share of the plain run's time that
passes inside F.scaled_dot_product_attention, forward and backward: no kernel can gain more than 1 / (1 - share).

Nothing is written where an accelerated output is further from float64's than twice the plain one's.

Shape legend: B batch, L length.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from rich.progress import Progress
from torch import Tensor, nn

import saccade
from saccade.benchmark.attention import machine
from saccade.interception._hooks import SdpaCall, sdpa_handled_by

OUT = Path(__file__).parent / "results" / "accelerated-models.md"
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
CHECKED = 512  # the longest that is computed in float64, too
PATCH = 16


@dataclasses.dataclass(frozen=True)
class Setting:
    """One line of the table. `padded`: a quarter of the first item is padding."""

    model: str
    dtype: str
    length: int
    batch: int
    layers: int
    stage: str  # "forward" or "training"
    padded: bool = False


def settings(quick: bool, models: list[str], lengths: list[int], dtypes: list[str]) -> list[Setting]:
    made = []
    for model in models:
        for dtype in dtypes:
            for length in lengths:
                batch, layers = max(1, 512 // length), 1 if quick or length > 2048 or dtype == "bf16" else 4
                made.append(Setting(model, dtype, length, batch, layers, "forward"))
                if model in ("BERT", "Llama") and length <= 2048:
                    made.append(Setting(model, dtype, length, batch, layers, "forward", padded=True))
                if model in ("BERT", "GPT-2") and length <= 512:
                    made.append(Setting(model, dtype, length, batch, layers, "training"))
    return made


# --- models -------------------------------------------------------------------------------------------------------


def bert(setting: Setting) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=1000,
        num_hidden_layers=setting.layers,
        max_position_embeddings=setting.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    return transformers.BertModel(config, add_pooling_layer=False)


def gpt2(setting: Setting) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=1000,
        n_layer=setting.layers,
        n_positions=setting.length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="sdpa",
    )
    return transformers.GPT2Model(config)


def llama(setting: Setting) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=setting.layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=setting.length,
        attn_implementation="sdpa",
    )
    return transformers.LlamaModel(config)


def vit(setting: Setting) -> nn.Module:
    config = transformers.ViTConfig(
        num_hidden_layers=setting.layers, image_size=side(setting.length), patch_size=PATCH, attn_implementation="sdpa"
    )
    return transformers.ViTModel(config, add_pooling_layer=False)


MODELS: dict[str, Callable[[Setting], nn.Module]] = {"BERT": bert, "GPT-2": gpt2, "Llama": llama, "ViT": vit}


def side(length: int) -> int:
    """The side of a square image with about so many patches."""
    return PATCH * round(length**0.5)


class Inputs(NamedTuple):
    given: dict[str, Tensor]
    real: Tensor  # (B, L) bool

    def cast(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in self.given.items()}


def inputs(setting: Setting) -> Inputs:
    if setting.model == "ViT":
        size = side(setting.length)
        tokens = (size // PATCH) ** 2 + 1
        image = torch.randn(setting.batch, 3, size, size)
        return Inputs({"pixel_values": image}, torch.ones(setting.batch, tokens, dtype=torch.bool))
    mask = torch.ones(setting.batch, setting.length, dtype=torch.long)
    if setting.padded:
        kept = setting.length * 3 // 4
        mask[0] = (torch.arange(setting.length) < kept).long()
        if setting.model != "BERT":
            mask = mask.flip(1)  # decoders are padded on the left
    tokens = torch.randint(0, 1000, (setting.batch, setting.length))
    return Inputs({"input_ids": tokens, "attention_mask": mask}, mask.bool())


# --- measuring ----------------------------------------------------------------------------------------------------


class Clock:
    """Adds up the seconds inside attention: forward, and backward from `Leave`'s to `Enter`'s."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.seconds, self.began = now, 0.0, 0.0

    def answer(self, call: SdpaCall, proceed: Callable[[], Tensor]) -> Tensor:
        query, key, value = Enter.apply(self, *call[:3])
        began = self.now()
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            call.attn_mask,
            call.dropout_p,
            call.is_causal,
            scale=call.scale,
            enable_gqa=call.enable_gqa,
        )
        self.seconds += self.now() - began
        return Leave.apply(self, out)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, clock: Clock, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.clock = clock
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clock.seconds += ctx.clock.now() - ctx.clock.began
        return None, *gradients


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, clock: Clock, out: Tensor) -> Tensor:
        ctx.clock = clock
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.clock.began = ctx.clock.now()
        return None, gradient


class Contest:
    """One setting's model, plain and accelerated."""

    def __init__(self, setting: Setting, now: Callable[[], float]) -> None:
        torch.manual_seed(0)
        self.setting, self.now, self.inputs = setting, now, inputs(setting)
        self.model = MODELS[setting.model](setting).eval()
        self.dtype = DTYPES[setting.dtype]
        if setting.length <= CHECKED:
            self.check()
        self.model, self.given = self.model.to(self.dtype), self.inputs.cast(self.dtype)

    def check(self) -> None:
        exact = self.output(copy.deepcopy(self.model).double(), torch.float64)
        model = copy.deepcopy(self.model).to(self.dtype)
        plain = self.output(model, self.dtype)
        with saccade.accelerate():
            ours = self.output(model, self.dtype)
        theirs, came = ((one.double() - exact).abs().max().item() for one in (plain, ours))
        allowed = 2 * theirs + torch.finfo(self.dtype).eps * exact.abs().max().item()
        assert came <= allowed, f"{self.setting}: off by {came:.1e}, rounding explains {allowed:.1e}"

    @torch.no_grad()
    def output(self, model: nn.Module, dtype: torch.dtype) -> Tensor:
        return model(**self.inputs.cast(dtype))[0][self.inputs.real]

    def run(self) -> None:
        if self.setting.stage == "forward":
            with torch.no_grad():
                self.model(**self.given)
            return
        self.model(**self.given)[0].float().square().mean().backward()
        self.model.zero_grad(set_to_none=True)

    def seconds(self) -> float:
        began = self.now()
        self.run()
        return self.now() - began

    def measure(self, rounds: int) -> dict[str, Any]:
        plain, ours = [], []
        for number in range(-1, rounds):  # the first one warms up
            for accelerated in (False, True) if number % 2 else (True, False):
                if accelerated:
                    with saccade.accelerate() as counts:
                        ours.append(self.seconds())
                else:
                    plain.append(self.seconds())
        plain, ours = plain[1:], ours[1:]
        ratios = [one / other for one, other in zip(plain, ours, strict=True)]
        return {
            **dataclasses.asdict(self.setting),
            "plain": plain,
            "accelerated": ours,
            "factor": statistics.median(ratios),
            "share": self.share(),
            "taken": counts.taken,
            "calls": counts.calls,
            "left": dict(counts.left),
        }

    def share(self) -> float:
        """The share of the plain run's time that attention takes."""
        shares = []
        for _ in range(3):
            clock = Clock(self.now)
            with sdpa_handled_by(clock.answer):
                whole = self.seconds()
            shares.append(clock.seconds / whole)
        return statistics.median(shares)


# --- results ------------------------------------------------------------------------------------------------------

PAGE = """# Models inside accelerate()

Random weights of transformers {transformers}: BERT, GPT-2 and ViT of width 768 with 12 heads, Llama of width 1,024 with
16 query and 4 key-value heads; without the layer over the vocabulary. Plain and accelerated runs take turns; times are
medians of {rounds} rounds ({clock}), the factor is the median of the rounds' ratios, plain over accelerated. Share: of
the plain run's time, inside F.scaled_dot_product_attention. Calls: how many of the model's Saccade took. The rounds'
times: `{data}`.

{processor}, {threads} thread(s), instruction set of the kernels: {instruction_set}; PyTorch {torch}, Saccade {saccade};
{date}, load before {load_before}.

    {command}

| model | dtype | L | batch | layers | stage | plain | accelerated | factor | attention's share | calls |
|---|---|---|---|---|---|---|---|---|---|---|
{lines}
"""


def line(row: dict[str, Any]) -> str:
    plain, ours = (1e3 * statistics.median(row[name]) for name in ("plain", "accelerated"))
    stage = row["stage"] + (", padded" if row["padded"] else "")
    return (
        f"| {row['model']} | {row['dtype']} | {row['length']:,} | {row['batch']} | {row['layers']} | "
        f"{stage} | {plain:,.1f} ms | {ours:,.1f} ms | {row['factor']:.2f} | {100 * row['share']:.0f} % | "
        f"{row['taken']} of {row['calls']} |"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one layer, three rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, help="default 9, quick 3")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 2048, 8192])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--cpu-time", action="store_true", help="of one thread: for a machine that others use as well")
    parser.add_argument("--out", type=Path, default=OUT, help="where the page goes; the times go beside it")
    options = parser.parse_args(arguments)
    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time counts one thread: add --threads 1")
    torch.set_num_threads(options.threads)
    now, rounds = (
        time.thread_time if options.cpu_time else time.perf_counter,
        options.rounds or (3 if options.quick else 9),
    )
    seen, found = machine.describe(saccade.__version__, options.threads), []
    with Progress(transient=True) as progress:
        every = settings(options.quick, options.models, options.lengths, options.dtypes)
        for setting in progress.track(every, description="settings"):
            found.append(Contest(setting, now).measure(rounds))
    data = options.out.with_suffix(".json")
    page = PAGE.format(
        **seen,
        transformers=transformers.__version__,
        rounds=rounds,
        data=data.name,
        clock="CPU time of the one thread" if options.cpu_time else "wall-clock time",
        command=command(options, rounds),
        lines="\n".join(map(line, found)),
    )
    data.write_text(json.dumps({"machine": seen, "settings": found}, indent=1) + "\n", encoding="utf-8")
    options.out.write_text(page, encoding="utf-8")
    print(page)


def command(options: argparse.Namespace, rounds: int) -> str:
    words = ["python benchmarks/accelerated_models.py", f"--threads {options.threads} --rounds {rounds}"]
    words += ["--quick"] if options.quick else []
    words += ["--cpu-time"] if options.cpu_time else []
    words += [f"--models {' '.join(options.models)}", f"--lengths {' '.join(map(str, options.lengths))}"]
    words += [f"--dtypes {' '.join(options.dtypes)}"]
    return " ".join(words)


if __name__ == "__main__":
    main()
