"""The model card of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ....support._machine import processor
from ....support._tables import Table
from ...models import LanguageModel
from .corpus import Corpus
from .request import LanguageRun

if TYPE_CHECKING:
    from ..settings import LanguageSettings


def model_card(
    run: LanguageRun,
    lm: LanguageModel,
    corpus: Corpus,
    curve: list[dict[str, float]],
    steps_done: int,
    stored_loss: float | None,
) -> str:
    """Model card in Markdown: model, data, settings, machine and validation loss."""
    rows = {**_model(run, lm), **_training(run, lm, corpus, steps_done), **_result(curve, stored_loss)}
    return card(run.out, "A small language model trained by `saccade train lm`.", rows)


def card(out: Path, sentence: str, rows: Mapping[str, str]) -> str:
    """Model card in Markdown: the folder's name, a sentence and a table of facts."""
    table = Table(("", ""), list(rows.items())).markdown()
    return "\n".join([f"# {out.resolve().name}", "", sentence, "", *table, ""])


def _model(run: LanguageRun, lm: LanguageModel) -> dict[str, str]:
    config = lm.model.config
    kind = "single characters" if run.vocabulary is None else "byte-level BPE"
    return {
        "shape": f"{config.layers} layers, {config.heads} heads ({config.kv_heads} for keys and values), "
        f"width {config.width}, hidden {config.hidden}, context {config.context}",
        "attention": "softmax" if config.mechanism is None else f"`{config.mechanism}` instead of softmax",
        "parameters": f"{lm.model.parameter_count():,}",
        "tokens": f"{kind}, {config.vocabulary}",
    }


def _training(run: LanguageRun, lm: LanguageModel, corpus: Corpus, steps_done: int) -> dict[str, str]:
    config, settings = lm.model.config, run.settings
    text_steps = max(steps_done - settings.copying, 0)
    trained_tokens = text_steps * settings.batch * config.context
    held = ", ".join(path.name for path in run.hold_out) or "the last tenth of the text"
    return {
        "trained on": f"{run.text.name}: {corpus.training.shape[0]:,} tokens",
        "validated on": f"{held}: {corpus.validation.shape[0]:,} tokens",
        "steps": f"{text_steps:,} of {settings.steps:,}, {settings.batch} windows each: {trained_tokens:,} tokens, "
        f"{trained_tokens / corpus.training.shape[0]:.1f} times the text",
        "starts from": "random weights" if run.initial is None else run.initial.resolve().name,
        "optimizer": f"AdamW, rate {settings.rate:g}, warm-up {settings.warmup}, weight decay {settings.decay:g}, "
        f"betas 0.9 and {settings.beta2:g}, gradient norm at most {settings.clip:g}, dropout {config.dropout:g}, "
        f"precision {settings.execution.precision}, seed {settings.seed}",
        "copying": _copying(settings),
    }


def _result(curve: list[dict[str, float]], stored_loss: float | None) -> dict[str, str]:
    rows = {}
    if curve:
        best = min(curve, key=lambda entry: entry["validation_loss"])
        rows["time"] = f"{curve[-1]['seconds'] / 60:.1f} min on {machine()}"
        rows["best look at validation"] = (
            f"{best['validation_loss']:.4f} nats per token, at step {best['step']:,}, whose weights are kept"
        )
    if stored_loss is not None:
        rows["validation loss as stored"] = (
            f"{stored_loss:.4f} nats per token (perplexity {math.exp(stored_loss):.2f}) over the whole validation text"
        )
    return rows


def _copying(settings: LanguageSettings) -> str:
    """How the run trained copying (induction) heads, for the model card."""
    done = []
    if settings.copying:
        done.append(f"{settings.copying:,} steps before the text, on random tokens over and over")
    if settings.repeats:
        done.append(f"in {settings.repeats:.0%} of the windows a stretch of text is followed by itself")
    return "; ".join(done) or "no training for copying"


def machine() -> str:
    """Processor or GPU, memory and PyTorch version, as one line."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{processor()}, {min(torch.get_num_threads(), os.cpu_count() or 1)} threads"
