"""A whole run of `saccade train lm`: files in, a model folder out.

Beside the model (see `saccade.models.checkpoint`) the folder gets

    curve.jsonl        one line for each look at the validation text
    last.safetensors   the latest weights, while model.safetensors holds the best
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from ..models import DecoderLM, LanguageModel, ModelConfig, Sampling, generate, load, save
from ..models.checkpoint import CARD, CONFIG, HEADS, WEIGHTS, write_text
from ..models.tokenizer import train_bpe, train_characters
from .card import model_card
from .data import Corpus, read_texts, split_tail
from .evaluation import evaluate
from .loop import Settings, train
from .windows import check_length, whole_windows

CURVE, LAST = "curve.jsonl", "last.safetensors"


@dataclasses.dataclass(frozen=True)
class LanguageRun:
    """What to train on what, and where to.

    Args:
        text: a text file, or a folder of `.txt` files.
        out: the folder to write; one that exists is refused unless `overwrite`.
        settings: of the training loop.
        shape: fields of `ModelConfig` but `vocabulary`.
        hold_out: files judged by instead of trained on; none is the last tenth of all text.
        vocabulary: how many tokens the BPE is to have; None is single characters.
        initial: a model folder whose weights and tokenizer the run starts from; its shape must be the same but for
            the dropout. None starts from random weights.
    """

    text: Path
    out: Path
    settings: Settings
    shape: dict[str, Any]
    hold_out: tuple[Path, ...] = ()
    vocabulary: int | None = 2048
    overwrite: bool = False
    initial: Path | None = None


class Reporter:
    """What a run tells; every method may be overridden. This one says nothing."""

    def started(self, lm: LanguageModel, corpus: Corpus) -> None: ...

    def step(self, step: int, loss: float, norm: float, rate: float, tokens_per_second: float) -> None: ...

    def looked(self, entry: dict[str, float], sample: str, best: bool) -> None: ...

    def finished(self, validation_loss: float) -> None: ...


def train_language_model(run: LanguageRun, reporter: Reporter | None = None) -> LanguageModel:
    """Train, keeping the best weights on the way, and return the model with them, read back from `run.out`.

    All that can be wrong with the input is found before `run.out` is touched. On `KeyboardInterrupt` or a diverging
    loss the latest weights are saved before it is passed on.
    """
    reporter = reporter or Reporter()
    check_output(run.out, run.overwrite)
    training, validation = texts(run)
    torch.manual_seed(run.settings.seed)
    lm = _new(run, training) if run.initial is None else _continued(run, run.initial)
    tokenizer, config = lm.tokenizer, lm.model.config
    corpus = Corpus.encode(training, validation, tokenizer)
    for name, tokens in (("training", corpus.training), ("validation", corpus.validation)):
        _check_long_enough(name, tokens, config.context)
    make_folder(run.out)
    reporter.started(lm, corpus)
    keeper = _Keeper(run, lm, corpus, reporter)
    try:
        train(lm.model, corpus, tokenizer.start, run.settings, keeper)
    finally:
        keeper.close()
    return keeper.finish()


def _new(run: LanguageRun, training: list[str]) -> LanguageModel:
    tokenizer = train_characters(training) if run.vocabulary is None else train_bpe(training, run.vocabulary)
    config = ModelConfig(vocabulary=tokenizer.vocabulary, **run.shape)
    return LanguageModel(DecoderLM(config), tokenizer, name=str(run.out))


def _continued(run: LanguageRun, initial: Path) -> LanguageModel:
    """The model in `initial` with the run's dropout; ValueError names the fields in which its shape differs."""
    old = load(initial)
    config = ModelConfig(vocabulary=old.tokenizer.vocabulary, **run.shape)
    ours, theirs = config.to_dict(), old.model.config.to_dict()
    differ = [name for name in ours if ours[name] != theirs[name] and name != "dropout"]
    if differ:
        listed = ", ".join(f"{name} {theirs[name]} (asked for {ours[name]})" for name in differ)
        raise ValueError(f"{initial}: has another shape: {listed}")
    model = DecoderLM(config)
    model.load_state_dict(old.model.state_dict())
    return LanguageModel(model, old.tokenizer, name=str(run.out))


class _Keeper:
    """Writes down what the loop tells: curve, best and last weights, model card."""

    def __init__(self, run: LanguageRun, lm: LanguageModel, corpus: Corpus, reporter: Reporter):
        self._run, self._lm, self._corpus, self._reporter = run, lm, corpus, reporter
        self._best, self._done, self._saved = float("inf"), 0, -1
        self._norm = self._speed = 0.0
        self._stored: float | None = None
        self._curve: list[dict[str, float]] = []

    def step(self, step: int, loss: float, norm: float, rate: float, tokens_per_second: float) -> None:
        self._done, self._norm, self._speed = step, norm, tokens_per_second
        self._reporter.step(step, loss, norm, rate, tokens_per_second)

    def evaluated(self, step: int, training_loss: float, validation_loss: float, seconds: float) -> None:
        entry = {
            "step": step,
            "training_loss": round(training_loss, 5),
            "validation_loss": round(validation_loss, 5),
            "norm": round(self._norm, 4),
            "tokens_per_second": round(self._speed),
            "seconds": round(seconds, 1),
        }
        self._curve.append(entry)
        best = validation_loss < self._best
        if best:
            self._best = validation_loss
            self._write(WEIGHTS)
        self._write(LAST)
        self._reporter.looked(entry, self._sample(), best)

    def close(self) -> None:
        """Save what is not saved yet."""
        if self._done > self._saved:
            self._write(LAST)
        if self._done and self._best == float("inf"):
            self._write(WEIGHTS)

    def finish(self) -> LanguageModel:
        """The best weights as they were stored, judged by the whole validation text; the card says how well."""
        best = load(self._run.out)
        best.model.to(self._lm.model.embedding.weight.device)
        windows = whole_windows(self._corpus.validation, start=best.tokenizer.start, context=best.model.config.context)
        self._stored = evaluate(best.model, windows)
        write_text(self._run.out / CARD, self._card())
        self._reporter.finished(self._stored)
        return best

    def _card(self) -> str:
        return model_card(self._run, self._lm, self._corpus, self._curve, self._done, self._stored)

    def _write(self, weights: str) -> None:
        # Of a model that is being overwritten.
        (self._run.out / HEADS).unlink(missing_ok=True)
        save(self._lm, self._run.out, weights=weights)
        write_text(self._run.out / CURVE, "".join(json.dumps(entry) + "\n" for entry in self._curve))
        write_text(self._run.out / CARD, self._card())
        self._saved = self._done

    def _sample(self) -> str:
        model = self._lm.model
        was_training = model.training
        model.eval()
        text = "".join(generate(self._lm, "", 48, Sampling(temperature=0.8, top_p=0.95, seed=self._done)))
        model.train(was_training)
        return text


def check_output(out: Path, overwrite: bool) -> None:
    """FileExistsError unless `out` is new, an empty folder, or a model folder that may be overwritten."""
    if out.is_dir():
        names = {path.name for path in out.iterdir()}
        if not names:
            return
        if not overwrite:
            raise FileExistsError(f"{out}: exists already; choose another --out, or give --overwrite")
        if not names & {CONFIG, LAST}:
            raise FileExistsError(f"{out}: not a model folder, so it is not overwritten")
    elif out.exists():
        raise FileExistsError(f"{out}: is a file, expected a folder to write the model into")


def make_folder(out: Path) -> None:
    """Make the folder, and find out whether it can be written to, before hours of training are at stake."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / ".saccade", time.strftime("%Y-%m-%d\n"))
        (out / ".saccade").unlink()
    except OSError as error:
        raise OSError(f"{out}: cannot be written ({error.strerror})") from None


def texts(run: LanguageRun) -> tuple[list[str], list[str]]:
    """What the run trains on, and what it validates on."""
    known = read_texts(run.text)
    if not run.hold_out:
        training, validation = split_tail("\n".join(known.values()))
        return [training], [validation]
    held: dict[Path, str] = {}
    for path in run.hold_out:
        held.update(read_texts(path))
    names = {path.resolve() for path in held}
    rest = [text for path, text in known.items() if path.resolve() not in names]
    if not rest:
        raise ValueError(f"{run.text}: nothing is left to train on once the held-out files are taken out")
    return rest, list(held.values())


def _check_long_enough(name: str, tokens: torch.Tensor, context: int) -> None:
    try:
        check_length(tokens, context)
    except ValueError as error:
        raise ValueError(f"{name} {error}; give more text or a smaller --context") from None
