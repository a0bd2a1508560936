"""`saccade.tasks.search`: runs of one task with different settings, of which the best is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....support._extras import NotInstalled
from ...training import Diverged, Evaluation, Reporter, TooLittleMemory, run_training
from ...training.processes import joined
from ...training.run_folder.layout import SEARCH, SEARCH_PICTURE
from .._runs._prepared import PreparedTaskRun, description
from .._runs._request import TaskRun, settings_for
from .._runs._training import open_run, request, split_options
from .._space import Space, described, fitting, is_choice
from ._proposals import Proposal, importance
from ._result import SearchResult
from ._trials import DIVERGED, ENDED, PRUNED, TOO_LARGE, Trial, Trials, opened, promote, trial_folder

TRIALS = 20


class SearchReporter:
    r"""Gets the events of a search. Every method may be overridden; these do nothing.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> class Ended(saccade.tasks.SearchReporter):
        ...     def ended(self, trial, *, best):
        ...         print(trial.number, trial.state, best)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = pathlib.Path(folder, "reviews.csv")
        ...     _ = data.write_text("text,label\n" + "a good film,positive\na bad film,negative\n" * 20)
        ...     small = dict(layers=1, heads=2, width=8, vocabulary=280, steps=2, precision="no")
        ...     result = saccade.tasks.search("classify", data, folder + "/runs", trials=1, reporter=Ended(), **small)
        1 ended True
    """

    def began(self, trial: Trial, run: TaskRun) -> contextlib.AbstractContextManager[Reporter]:
        """Reports of a trial's run while it is in progress."""
        return contextlib.nullcontext(Reporter())

    def ended(self, trial: Trial, *, best: bool) -> None: ...


@dataclasses.dataclass(frozen=True)
class SearchRequest:
    """The request of a search.

    Args:
        run: with the usual settings, its data read.
        given: fixed settings, by option.
        space: the values to try, by option.
        trials: runs, at most.
        minutes: for all of them together; None is unlimited.
    """

    run: TaskRun
    given: Mapping[str, Any]
    space: Space
    trials: int
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"trials: must be at least 1, got {self.trials}")
        if self.minutes is not None and not (math.isfinite(self.minutes) and self.minutes > 0):
            raise ValueError(f"minutes: must be finite and positive, got {self.minutes}")
        if not self.space:
            raise ValueError("search: every option that it could try is given; leave one out, such as rate")

    @property
    def usual(self) -> dict[str, Any]:
        """The first values to try: the task's default settings and sizes."""
        recipe, count = self.run.recipe, len(self.run.training)
        values = {name: getattr(recipe if hasattr(recipe, name) else self.run.task, name) for name in self.space}
        return {name: min(value, count) if name == "batch" else value for name, value in values.items()}

    @property
    def asked(self) -> dict[str, Any]:
        """Everything that decides the result, as plain values."""
        return json.loads(json.dumps({**description(self.run), "space": described(self.space)}))

    def trial(self, settings: Mapping[str, Any], out: Path, minutes: float | None, *, resume: bool) -> TaskRun:
        """The run with these settings."""
        own = {field.name for field in dataclasses.fields(self.run.task)} & settings.keys()
        task = dataclasses.replace(self.run.task, **{name: settings[name] for name in own})
        others = {name: value for name, value in settings.items() if name not in own}
        counted = functools.partial(settings_for, self.run.recipe, given={**self.given, **others})
        return dataclasses.replace(
            self.run,
            task=task,
            source=dataclasses.replace(self.run.source, task=task),
            out=out,
            settings=dataclasses.replace(counted(len(self.run.training)), minutes=minutes),
            counted=counted,
            overwrite=False,
            resume=resume,
        )


def search(
    task: str,
    data: str | Path,
    out: str | Path,
    *,
    trials: int = TRIALS,
    minutes: float | None = None,
    validation: str | Path | None = None,
    initial: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    reporter: SearchReporter | None = None,
    **options: Any,
) -> SearchResult:
    r"""Train a model for a task many times, with other settings each time, and keep the best run in a folder.

    The first trial has the usual settings, some are drawn at random, and the others depend on earlier results (TPE).
    Trials are judged by the validation data. Once six trials have ended, a trial is stopped if its best look is worse
    than the median of the others after as many looks. `importance` needs four trials that ended, not all equally well;
    a setting with a small share may keep its default. Ctrl-C stops after a step, and `resume` continues.
    Two searches with the same seed, data and machine try the same settings, unless there are `minutes`.

    Args:
        task, data, out, validation, initial, overwrite: as of `train`.
        trials: runs, at most.
        minutes: for all trials together. A trial begins only while there is time for the quickest one so far, and ends
            in time.
        resume: continue the search in `out` where it stopped; a finished one with more trials.
        reporter: gets the events of the search.
        options: as of `train`. Options you give are not searched.

    Raises:
        NotInstalled: Optuna is missing.
        ValueError: no trial ended. Other errors as of `train`.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = pathlib.Path(folder, "reviews.csv")
        ...     _ = data.write_text("text,label\n" + "a good film,positive\na bad film,negative\n" * 20)
        ...     small = dict(layers=1, heads=2, width=8, vocabulary=280, steps=2, precision="no")
        ...     result = saccade.tasks.search("classify", data, folder + "/runs", trials=1, **small)
        >>> sorted(result.best.settings)  # what was searched
        ['batch', 'dropout', 'rate']
    """
    began = time.perf_counter()
    how: dict[str, Any] = {"validation": validation, "initial": initial, "overwrite": overwrite, "resume": resume}
    wanted = search_request(task, data, out, options, trials=trials, minutes=minutes, **how)
    return search_requested(wanted, reporter or SearchReporter(), began)


def search_request(
    task: str,
    data: str | Path,
    out: str | Path,
    options: dict[str, Any],
    *,
    trials: int,
    minutes: float | None,
    **how: Any,
) -> SearchRequest:
    """The request of `search`, with its data read; `how` as in `request`."""
    for module in ("optuna", "matplotlib"):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            raise NotInstalled("search", module, "search") from None
    run = request(task, data, out, options, **how)
    if joined().num_processes > 1:
        raise ValueError("search: trials run one after another in one process; start it without a launcher")
    whole = run.task.space(run.recipe, new=run.initial is None)
    space = {name: fitting(name, choice, len(run.training)) for name, choice in whole.items()}
    space = {name: choice for name, choice in space.items() if options.get(name) is None and is_choice(choice)}
    return SearchRequest(run, split_options(type(run.task), options)[1], space, trials, minutes)


def search_requested(wanted: SearchRequest, reporter: SearchReporter, began: float) -> SearchResult:
    """Run a request of `search`; minutes count from `began`, by `time.perf_counter`."""
    with opened(wanted.run, wanted.asked) as trials:
        state = _Search(wanted, trials, reporter, began)
        state.run()
        out, trials = wanted.run.out, state.found
        if trials.best is None:
            raise ValueError(
                f"search: no trial ended, see {SEARCH} in {out}; give a --rate, or a --batch and --width that fit"
            )
        by_factors = [name for name, choice in wanted.space.items() if getattr(choice, "logarithmic", False)]
        shares = importance(wanted.space, trials.done)
        result = SearchResult(open_run(out, {}), tuple(trials.done), shares, by_factors)
        result.save_picture(out / SEARCH_PICTURE)
        return result


class _Search:
    """A search in progress."""

    def __init__(self, wanted: SearchRequest, trials: Trials, reporter: SearchReporter, began: float):
        self.wanted, self.found, self._reporter = wanted, trials, reporter
        self._began = began - sum(trial.seconds for trial in trials.done)  # as if it had never stopped

    def run(self) -> None:
        while len(self.found.done) < self.wanted.trials and self._has_time():
            self._run_next()

    @property
    def _left(self) -> float:
        """The seconds that are left."""
        spent = time.perf_counter() - self._began
        return math.inf if self.wanted.minutes is None else 60 * self.wanted.minutes - spent

    def _has_time(self) -> bool:
        ended = [trial.seconds for trial in self.found.done if trial.state == ENDED]
        return not self.found.done or self._left > min(ended, default=0.0)

    def _run_next(self) -> None:
        proposal, trial = self._next()
        out = trial_folder(self.wanted.run.out, trial.number)
        minutes = None if self.wanted.minutes is None else max(self._left / 60, 1e-3)
        run = self.wanted.trial(trial.settings, out, minutes, resume=out.is_dir())
        with self._reporter.began(trial, run) as events:
            record = _RunRecord(self, trial, proposal, events)
            trial = record.run(run)
        self.keep(trial)
        best = self.found.best
        self._reporter.ended(trial, best=best is trial)
        if best is trial:
            promote(self.wanted.run.out, out)
        shutil.rmtree(out)

    def _next(self) -> tuple[Proposal, Trial]:
        """The interrupted trial, or a new one, with its proposal."""
        known, stopped, seed = self.found.done, self.found.running, self.wanted.run.settings.seed
        settings = stopped.settings if stopped is not None else None if known else self.wanted.usual
        proposal = Proposal(self.wanted.space, known, seed, settings)
        trial = stopped or Trial(len(known) + 1, proposal.settings)
        for look, cost in enumerate(trial.looks, 1):
            proposal.is_hopeless(look, cost)
        self.keep(trial)
        return proposal, trial

    def keep(self, trial: Trial) -> None:
        """Store the state of a trial."""
        self.found = self.found.with_trial(trial)
        self.found.write(self.wanted.run.out / SEARCH)


class _Pruned(Exception):
    """Ends the run of a hopeless trial."""


class _RunRecord(Reporter):
    """Stores the events of a trial's run and passes them on; ends hopeless runs."""

    def __init__(self, search: _Search, trial: Trial, proposal: Proposal, reporter: Reporter):
        self._search, self._trial, self._proposal, self._told = search, trial, proposal, reporter
        self._stored: Evaluation | None = None
        self._before, self._began = 0.0, time.perf_counter()
        self._steps = 0

    def run(self, run: TaskRun) -> Trial:
        """Run the trial; it is returned with its result."""
        try:
            run_training(run, PreparedTaskRun.of, self, began=self._began)
        except _Pruned:
            return self._ended(PRUNED)
        except Diverged:
            return self._ended(DIVERGED)
        except TooLittleMemory:
            return self._ended(TOO_LARGE)
        stored = self._stored
        assert stored is not None
        if not (math.isfinite(stored.loss) and math.isfinite(stored.judged)):
            return self._ended(DIVERGED)
        return self._ended(ENDED, metrics=dict(stored.metrics), loss=stored.loss, cost=stored.judged)

    def _ended(self, state: str, **result: Any) -> Trial:
        seconds = round(self._before + time.perf_counter() - self._began, 2)
        return dataclasses.replace(self._trial, state=state, steps=self._steps, seconds=seconds, **result)

    def started(self, prepared: Any) -> None:
        if prepared.state is not None:
            progress = prepared.state["loop"]["progress"]
            self._before, self._steps = progress["seconds"], progress["step"]
        self._settings = prepared.settings
        self._told.started(prepared)

    def step(self, step: int, loss: float, norm: float, rate: float, tokens_per_second: float) -> None:
        self._steps = step
        self._told.step(step, loss, norm, rate, tokens_per_second)

    def looked(self, entry: dict[str, float], sample: str, best: bool) -> None:
        self._told.looked(entry, sample, best)

    def judged(self, step: int, cost: float) -> None:
        look = math.ceil(step / self._settings.looks.every)  # an early look of a run in a hurry counts as the first
        if look <= len(self._trial.looks):
            return
        self._trial = dataclasses.replace(self._trial, looks=(*self._trial.looks, cost))
        if self._proposal.is_hopeless(look, cost) and step < self._settings.all_steps:
            raise _Pruned
        self._search.keep(self._trial)

    def finished(self, prepared: Any, stored: Evaluation) -> None:
        self._stored = stored
        self._told.finished(prepared, stored)

    def warned(self, message: str) -> None:
        self._told.warned(message)
