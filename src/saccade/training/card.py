"""The model card of a run."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..models import LanguageModel
from .data import Corpus

if TYPE_CHECKING:
    from .run import LanguageRun
    from .settings import Settings


def model_card(
    run: LanguageRun,
    lm: LanguageModel,
    corpus: Corpus,
    curve: list[dict[str, float]],
    steps_done: int,
    stored_loss: float | None,
) -> str:
    """Markdown: what was trained on what, for how long, on which machine, and how well it predicts."""
    config, settings = lm.model.config, run.settings
    text_steps = max(steps_done - settings.copying, 0)
    seen = text_steps * settings.batch * config.context
    kind = "single characters" if run.vocabulary is None else "byte-level BPE"
    held = ", ".join(path.name for path in run.hold_out) or "the last tenth of the text"
    best = min(curve, key=lambda entry: entry["validation_loss"], default=None)
    lines = [
        f"# {run.out.resolve().name}",
        "",
        "A small language model trained by `saccade train lm`.",
        "",
        "| | |",
        "|---|---|",
        f"| shape | {config.layers} layers, {config.heads} heads ({config.kv_heads} for keys and values), "
        f"width {config.width}, hidden {config.hidden}, context {config.context} |",
        f"| parameters | {lm.model.parameter_count():,} |",
        f"| tokens | {kind}, {config.vocabulary} |",
        f"| trained on | {run.text.name}: {corpus.training.shape[0]:,} tokens |",
        f"| validated on | {held}: {corpus.validation.shape[0]:,} tokens |",
        f"| steps | {text_steps:,} of {settings.steps:,}, {settings.batch} windows each: {seen:,} tokens, "
        f"{seen / corpus.training.shape[0]:.1f} times the text |",
        f"| starts from | {'random weights' if run.initial is None else run.initial.resolve().name} |",
        f"| optimizer | AdamW, peak {settings.peak:g}, warm-up {settings.warmup}, weight decay "
        f"{settings.weight_decay:g}, betas 0.9 and {settings.beta2:g}, gradient norm at most {settings.clip:g}, "
        f"dropout {config.dropout:g}, precision {settings.execution.precision}, seed {settings.seed} |",
        f"| copying | {_copying(settings)} |",
    ]
    if best is not None:
        lines += [
            f"| time | {curve[-1]['seconds'] / 60:.1f} min on {machine()} |",
            f"| best look at validation | {best['validation_loss']:.4f} nats per token, at step {best['step']:,}, "
            "whose weights are kept |",
        ]
    if stored_loss is not None:
        lines.append(
            f"| validation loss as stored | {stored_loss:.4f} nats per token (perplexity {math.exp(stored_loss):.2f}) "
            "over the whole validation text |"
        )
    return "\n".join(lines) + "\n"


def _copying(settings: Settings) -> str:
    """What was done for copying heads, which text alone gives a small model late or never."""
    done = []
    if settings.copying:
        done.append(f"{settings.copying:,} steps before the text, on random tokens over and over")
    if settings.repeats:
        done.append(f"in {settings.repeats:.0%} of the windows a stretch of text is followed by itself")
    return "; ".join(done) or "nothing was done to teach it"


def machine() -> str:
    """The hardware, in a few words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line[:10] == "model name"]
        name = models[0] if models else name
    return f"{name}, {min(torch.get_num_threads(), os.cpu_count() or 1)} threads"
