"""Writes down what the loop tells: checkpoints, best and last weights, curve, model card, TensorBoard log."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import safetensors
import torch

from ..models import DecoderLM, LanguageModel, Sampling, generate, save
from ..models.own.checkpoint import CARD, WEIGHTS, as_stored, load_own, write_text
from ..monitoring import Alarm, AttentionMonitor
from .card import model_card
from .data import Corpus
from .evaluation import evaluate
from .files import prune, write_checkpoint
from .folder import ANOMALY, CURVE, FOLDER, LAST, OURS, unfinished_files
from .language_run import LanguageRun, Reporter
from .loop import Monitor
from .resume import VERSION
from .scalars import LOG, ScalarLog
from .windows import whole_windows

Tensors = dict[str, torch.Tensor]


class RunWriter(Monitor):
    """Of the main process. Everything in the folder follows from the checkpoint, and is written again from it.

    What cannot be written (a full disk) is told in a line, and tried again at the next look: training goes on, the
    files that are there stay as they are, and only at the end is it an error.
    """

    def __init__(
        self,
        run: LanguageRun,
        lm: LanguageModel,
        corpus: Corpus,
        reporter: Reporter,
        described: dict[str, Any],
        *,
        sharded: bool = False,
    ):
        self._run, self._lm, self._corpus, self._reporter = run, lm, corpus, reporter
        self._described, self._sharded = described, sharded
        self._best = float("inf")
        self._best_weights: Tensors | None = None
        self._latest: Tensors | None = None
        self._done, self._norm, self._speed = 0, 0.0, 0.0
        self._curve: list[dict[str, float]] = []
        self._fresh = True  # nothing of this run's model is in the folder yet
        self._log: ScalarLog | None = None

    # --- beginning, continuing --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the run known to the folder, so that from here on it can be resumed."""
        self._start_log(0)

    def resume(self, state: dict[str, Any]) -> None:
        """Bring the folder to where the checkpoint is."""
        kept = state["keeper"]
        self._best, self._best_weights, self._curve = kept["best"], kept["weights"], kept["curve"]
        self._latest, self._fresh = state["loop"]["model"], kept["fresh"]
        self._done = state["loop"]["progress"]["step"]
        self._norm, self._speed = kept["norm"], kept["speed"]
        (self._run.out / ANOMALY).unlink(missing_ok=True)
        for path in unfinished_files(self._run.out):
            path.unlink(missing_ok=True)
        if self._best_weights is not None:
            self._write()
        self._start_log(self._done)

    def _start_log(self, step: int) -> None:
        if self._run.settings.looks.tensorboard:
            self._log = ScalarLog(self._run.out / LOG, step, self._reporter.warned)

    # --- what the loop tells ------------------------------------------------------------------------------------------

    def step(self, step: int, loss: float, norm: float, rate: float, tokens_per_second: float) -> None:
        self._done, self._norm, self._speed = step, norm, tokens_per_second
        if self._log is not None and step % self._run.settings.looks.log_every == 0:
            self._log.add(
                step,
                {"loss/training": loss, "rate": rate, "tokens per second": tokens_per_second, "gradient/all": norm},
            )
        self._reporter.step(step, loss, norm, rate, tokens_per_second)

    def norms(self, step: int, gradients: dict[str, float], weights: dict[str, float]) -> None:
        if self._log is not None:
            values = {f"gradient/{group}": norm for group, norm in gradients.items()}
            self._log.add(step, values | {f"weights/{group}": norm for group, norm in weights.items()})

    def attention(self, model: DecoderLM) -> AttentionMonitor | None:
        every = self._run.settings.looks.watch
        if every is None:
            return None
        return AttentionMonitor(model, self._log or False, every=every, on_alarm=self._alarm)

    def _alarm(self, alarm: Alarm) -> None:
        if alarm.severity != "note":
            self._reporter.warned(f"{alarm}; {alarm.advice}")

    def evaluated(
        self, step: int, training_loss: float, validation_loss: float, seconds: float, weights: Tensors
    ) -> None:
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
            self._best, self._best_weights = validation_loss, as_stored(self._lm.model, weights)
        self._latest = weights
        if self._log is not None:
            self._log.add(step, {"loss/validation": validation_loss})
        self._attempt("the model could not be written", self._write)
        self._reporter.looked(entry, self._sample(), best)

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        self._latest = state["model"]
        if self._log is not None:
            self._log.flush()
        kept = {
            "best": self._best,
            "weights": self._best_weights,
            "curve": self._curve,
            "norm": self._norm,
            "speed": self._speed,
            "fresh": self._fresh,
        }
        whole = {
            "version": VERSION,
            "run": self._described,
            "tokenizer": self._lm.tokenizer.to_json(),
            "keeper": kept,
            "loop": state,
        }
        folder = self._run.out / FOLDER
        if self._attempt("a checkpoint could not be written", lambda: write_checkpoint(folder, step, whole)):
            self._attempt("old checkpoints could not be removed", lambda: prune(folder))

    # --- the end ----------------------------------------------------------------------------------------------------

    def stopped(self) -> None:
        """Keep the weights there are, as the best ones if no look at the validation text has chosen any."""
        if self._done:
            self._attempt("the model could not be written", self._write)
        self.close()

    def diverged(self, report: str) -> None:
        """Write down where it went wrong; weights and checkpoints stay as they were."""
        self._attempt("the report could not be written", lambda: write_text(self._run.out / ANOMALY, report + "\n"))
        self.close()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def finish(self) -> LanguageModel:
        """The best weights as they were stored, judged by the whole validation text; the card says how well."""
        self.close()
        try:
            self._write()
        except (OSError, safetensors.SafetensorError) as error:
            out = self._run.out
            raise OSError(
                f"{out}: could not be written ({_reason(error)}); make room and go on with --resume"
            ) from None
        best = load_own(self._run.out)
        best.model.to(self._lm.model.embedding.weight.device)
        windows = whole_windows(self._corpus.validation, start=best.tokenizer.start, context=best.model.config.context)
        stored = evaluate(best.model, windows)
        write_text(self._run.out / CARD, self._card(stored))
        self._reporter.finished(stored)
        return best

    # --- writing ----------------------------------------------------------------------------------------------------

    def _attempt(self, failure: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except (OSError, safetensors.SafetensorError) as error:
            self._reporter.warned(f"step {self._done:,}: {failure} ({_reason(error)}); training goes on")
            return False
        return True

    def _write(self) -> None:
        out, latest = self._run.out, self._latest
        assert latest is not None
        if self._fresh:
            # Of a model that is being overwritten: its weights would not fit the new configuration.
            for name in OURS:
                (out / name).unlink(missing_ok=True)
            self._fresh = False
        self._save(as_stored(self._lm.model, latest) if self._best_weights is None else self._best_weights, WEIGHTS)
        self._save(latest, LAST)
        write_text(out / CURVE, "".join(json.dumps(entry) + "\n" for entry in self._curve))
        write_text(out / CARD, self._card(None))

    def _save(self, weights: Tensors, name: str) -> None:
        # Not the model in training, which may be sharded, or newer than these weights.
        with torch.device("meta"):  # no memory, and no random weights to be overwritten
            model = type(self._lm.model)(self._lm.model.config)
        model.load_state_dict(weights, assign=True)
        save(LanguageModel(model, self._lm.tokenizer), self._run.out, weights=name)

    def _card(self, stored_loss: float | None) -> str:
        return model_card(self._run, self._lm, self._corpus, self._curve, self._done, stored_loss)

    def _sample(self) -> str:
        model = self._lm.model
        if self._sharded:
            return ""
        was_training = model.training
        model.eval()
        text = "".join(generate(self._lm, "", 48, Sampling(temperature=0.8, top_p=0.95, seed=self._done)))
        model.train(was_training)
        return text


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
