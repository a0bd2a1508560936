"""Writes the files of a run: checkpoints, best and last weights, curve, model card and TensorBoard log."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import safetensors
import torch

from ....see.monitoring import Alarm, AttentionMonitor
from ...models.decoder_lm.checkpoint import CARD, WEIGHTS, write_text
from ..loop import Monitor
from ..memory import LOOK_SMALLER, memory_told
from ..objective import Evaluation
from ..pace import Pace
from ..prepared import CurveEntry, PreparedRun, Reporter, RunRequest
from ..processes import joined
from .checkpoint_files import prune, write_checkpoint
from .layout import ANOMALY, CURVE, FOLDER, LAST, OURS, VERDICT, task_of, unfinished_files
from .resume import VERSION
from .scalars import LOG, ScalarLog

Tensors = dict[str, torch.Tensor]


class RunWriter(Monitor):
    """The monitor of the main process. All files in the folder can be rewritten from the checkpoint.

    If a file cannot be written (a full disk), a warning is shown and the next evaluation tries again: training
    continues and existing files stay unchanged. Only at the end it is an error.
    """

    def __init__(self, run: RunRequest, prepared: PreparedRun, reporter: Reporter, *, sharded: bool = False):
        self._run, self._prepared, self._reporter, self._sharded = run, prepared, reporter, sharded
        self._best = self._best_loss = float("inf")
        self._best_weights: Tensors | None = None
        self._latest: Tensors | None = None
        self._done, self._norm, self._speed = 0, 0.0, 0.0
        self._curve: list[CurveEntry] = []
        self._fresh = True  # no file of this run's model is in the folder yet
        self._log: ScalarLog | None = None
        self._pace = Pace()

    @property
    def beside_another(self) -> bool:
        """Whether the folder still contains the model of the run that this one overwrites."""
        return self._fresh and task_of(self._run.out) is not None

    # --- beginning, continuing --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Write the first checkpoint, so that the run can be resumed."""
        self._start_log(0)

    def resume(self, state: dict[str, Any]) -> None:
        """Restore the files of the folder from a checkpoint."""
        kept = state["keeper"]
        self._best, self._best_weights, self._curve = kept["best"], kept["weights"], kept["curve"]
        self._best_loss = kept.get("best_loss", self._best)  # runs selected by their loss store no other
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

    # --- callbacks of the loop ----------------------------------------------------------------------------------------

    def step(self, step: int, loss: float, norm: float, rate: float, tokens_per_second: float) -> None:
        self._done, self._norm, self._speed = step, norm, tokens_per_second
        if self._log is not None and step % self._run.settings.looks.log_every == 0:
            self._log.add(
                step,
                {"loss/training": loss, "rate": rate, "tokens per second": tokens_per_second, "gradient/all": norm},
            )
        self._reporter.step(step, loss, norm, rate, tokens_per_second)
        slow = self._pace.stepped()
        if slow is not None and joined().device.type == "cpu":
            self._reporter.warned(slow)

    def norms(self, step: int, gradients: dict[str, float], weights: dict[str, float]) -> None:
        if self._log is not None:
            values = {f"gradient/{group}": norm for group, norm in gradients.items()}
            self._log.add(step, values | {f"weights/{group}": norm for group, norm in weights.items()})

    def attention(self, model: torch.nn.Module) -> AttentionMonitor | None:
        every = self._run.settings.looks.watch
        if every is None:
            return None
        return AttentionMonitor(model, self._log or False, every=every, on_alarm=self._alarm)

    def _alarm(self, alarm: Alarm) -> None:
        if alarm.severity != "note":
            self._reporter.warned(f"{alarm}; {alarm.advice}")

    def evaluated(
        self, step: int, training_loss: float, evaluation: Evaluation, seconds: float, weights: Tensors
    ) -> None:
        entry = {
            "step": step,
            "training_loss": round(training_loss, 5),
            "validation_loss": round(evaluation.loss, 5),
            **{name: round(value, 5) for name, value in evaluation.metrics.items()},
            "norm": round(self._norm, 4),
            "tokens_per_second": round(self._speed),
            "seconds": round(seconds, 1),
        }
        self._curve.append(entry)
        # Metrics are often equal, above all at their best; the loss decides between them.
        best = (evaluation.judged, evaluation.loss) < (self._best, self._best_loss)
        if best:
            self._best, self._best_loss = evaluation.judged, evaluation.loss
            self._best_weights = self._prepared.as_stored(weights)
        self._latest = weights
        if self._log is not None:
            metrics = {f"validation/{name}": value for name, value in evaluation.metrics.items()}
            self._log.add(step, {"loss/validation": evaluation.loss, **metrics})
        self._attempt("the model could not be written", self._write)
        sample = "" if self._sharded else self._prepared.sample(self._done)
        self._pace.paused()
        self._reporter.looked(entry, sample, best)
        self._reporter.judged(step, evaluation.judged)

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        self._latest = state["model"]
        self._pace.paused()
        if self._log is not None:
            self._log.flush()
        kept = {
            "best": self._best,
            "best_loss": self._best_loss,
            "weights": self._best_weights,
            "curve": self._curve,
            "norm": self._norm,
            "speed": self._speed,
            "fresh": self._fresh,
        }
        whole = {
            "version": VERSION,
            "run": self._prepared.described,
            **self._prepared.kept,
            "keeper": kept,
            "loop": state,
        }
        folder = self._run.out / FOLDER
        if self._attempt("a checkpoint could not be written", lambda: write_checkpoint(folder, step, whole)):
            self._attempt("old checkpoints could not be removed", lambda: prune(folder))

    # --- the end ----------------------------------------------------------------------------------------------------

    def stopped(self) -> None:
        """Store the current weights, as the best ones if there was no evaluation yet."""
        if self._done:
            self._attempt("the model could not be written", self._write)
        self.close()

    def diverged(self, report: str) -> None:
        """Write the report of a run that diverged; weights and checkpoints stay unchanged."""
        self._attempt("the report could not be written", lambda: write_text(self._run.out / ANOMALY, report + "\n"))
        self.close()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def finish(self) -> Any:
        """Load the best stored weights, evaluate them on all validation data and complete the card."""
        self.close()
        try:
            self._write()
        except (OSError, safetensors.SafetensorError) as error:
            out = self._run.out
            raise OSError(
                f"{out}: could not be written ({_reason(error)}); make room and go on with --resume"
            ) from None
        with memory_told("training: the evaluation of the stored weights", lambda: LOOK_SMALLER):
            best, evaluation = self._prepared.stored()
        write_text(self._run.out / CARD, self._card(evaluation))
        lines = self._prepared.verdict(self._curve, self._done, evaluation)
        write_text(self._run.out / VERDICT, "".join(line + "\n" for line in lines))
        self._reporter.finished(self._prepared, evaluation)
        for line in lines:
            self._reporter.concluded(line)
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
            # Weights of the overwritten model do not fit the new configuration.
            for name in OURS:
                (out / name).unlink(missing_ok=True)
            self._fresh = False
        best = self._prepared.as_stored(latest) if self._best_weights is None else self._best_weights
        self._prepared.save(best, WEIGHTS)
        self._prepared.save(latest, LAST)
        write_text(out / CURVE, "".join(json.dumps(entry) + "\n" for entry in self._curve))
        write_text(out / CARD, self._card(None))

    def _card(self, stored: Evaluation | None) -> str:
        return self._prepared.card(self._curve, self._done, stored)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
