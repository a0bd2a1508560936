"""A whole run of any task: reads the input, opens the folder, trains with checkpoints and writes the best model.

Besides the model the folder contains

    curve.jsonl        one line for each evaluation on the validation data
    last.safetensors   the latest weights, while model.safetensors holds the best
    checkpoints/       the state of the run at a step, to continue from (see `run_folder`); during the run also the
                       locked file
    tensorboard/       the TensorBoard log, if enabled
    anomaly.txt        the first tensor that was not finite, if training diverged
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ...support._extras import installing
from .loop import Diverged, Monitor, train
from .memory import TooLittleMemory
from .prepared import PreparedRun, Reporter, RunRequest
from .processes import accelerator_for, failures_named, is_sharded, joined, together
from .run_folder.layout import check_output, check_still_new, clear, lock_existing, make_folder
from .run_folder.lock import FileLock
from .run_folder.resume import LatestCheckpoint, as_begun, newest
from .run_folder.run_writer import RunWriter
from .running_statistics import parts_told
from .stopping import StopAtSignal, Stopped

if TYPE_CHECKING:
    from accelerate import Accelerator

R = TypeVar("R", bound=RunRequest)


def run_training(
    run: R,
    prepare: Callable[[R, LatestCheckpoint | None], PreparedRun],
    reporter: Reporter | None = None,
    *,
    then: Callable[[Any], object] | None = None,
    began: float | None = None,
) -> Any:
    """Train, keep the best weights in `run.out`, and return the stored model.

    All input is checked before `run.out` is changed. SIGINT (Ctrl-C) and SIGTERM end the run after the current step,
    with a checkpoint; a run with `resume` continues from there. With several processes (`accelerate launch`) each calls
    this; only the main one writes files, calls `reporter` and gets the stored model. The folder is locked during the
    run: a second run in it raises BlockingIOError.

    Args:
        run: the request, such as a `LanguageRun`.
        prepare: reads the input, and makes the model or restores it from a checkpoint.
        reporter: gets the events of the run.
        then: called with the stored model while the folder is still locked.
        began: start of the time budget, by `time.perf_counter`; None: now.

    Raises:
        BlockingIOError: another run is writing into the folder.
        FileExistsError, FileNotFoundError, OSError, ValueError: wrong input, in one line.
        RankFailed: another process has ended, hangs or raised an error (`saccade.distributed`).
        Diverged: the loss or a gradient was not finite; `anomaly.txt` in the folder names the first such tensor.
        TooLittleMemory: a step did not fit in memory; the message says which sizes to reduce.
        Stopped: a signal came. It is a KeyboardInterrupt.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> from saccade.training import Execution, LanguageRun, LanguageSettings, run_training
        >>> from saccade.training.language.prepared import PreparedLanguageRun
        >>> settings = LanguageSettings(steps=1, batch=2, execution=Execution(precision="no"))
        >>> shape = {"layers": 1, "heads": 2, "width": 8, "context": 8}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text, out = pathlib.Path(folder, "story.txt"), pathlib.Path(folder, "run")
        ...     _ = text.write_text("the cat sat on the mat. " * 20)
        ...     lm = run_training(LanguageRun(text, out, settings, shape, vocabulary=None), PreparedLanguageRun.of)
        ...     written = sorted(path.name for path in out.iterdir())
        >>> "config.json" in written and "model.safetensors" in written
        True
    """
    began = time.perf_counter() if began is None else began
    processes = joined()
    if not processes.is_main_process or reporter is None:
        reporter = Reporter()
    main = processes.is_main_process
    with contextlib.ExitStack() as held:
        # Locked before the checkpoint is read, which another run could replace. A new folder is locked once it exists.
        replaced = run.resume or run.overwrite
        lock = together(processes, lambda: lock_existing(run.out, ours=replaced) if main else None)
        if lock is not None:
            held.callback(lock.close)
        checkpoint = together(processes, lambda: newest(run.out, run.task_name) if run.resume else None)
        run = as_begun(run, checkpoint)
        prepared = together(processes, lambda: _prepared(run, prepare, checkpoint, reporter))
        accelerator = together(processes, lambda: accelerator_for(prepared.settings))
        if warning := parts_told(prepared.objective.model, prepared.settings, processes.num_processes):
            reporter.warned(warning)
        together(processes, lambda: _open_folder(run, prepared, reporter, lock, held) if main else None)
        reporter.started(prepared)
        trained = _train(run, prepared, reporter, accelerator, spent=time.perf_counter() - began)
        if main and then is not None:
            then(trained)
        return trained


def _prepared(
    run: R,
    prepare: Callable[[R, LatestCheckpoint | None], PreparedRun],
    checkpoint: LatestCheckpoint | None,
    reporter: Reporter,
) -> PreparedRun:
    if run.settings.looks.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(f"tensorboard: is not installed ({installing('train')})")
    if checkpoint is None:
        check_output(run.out, run.overwrite)
    prepared = prepare(run, checkpoint)
    if checkpoint is not None:
        for line in checkpoint.damaged:
            reporter.warned(f"{line}; an older one is used")
        reporter.warned(
            f"resuming {run.out} from {'the beginning' if checkpoint.path is None else checkpoint.path.name}"
        )
    return prepared


def _train(run: RunRequest, prepared: PreparedRun, reporter: Reporter, accelerator: Accelerator, spent: float) -> Any:
    main = accelerator.is_main_process
    keeper = RunWriter(run, prepared, reporter, sharded=is_sharded(accelerator))
    if main:
        keeper.resume(prepared.state) if prepared.state is not None else keeper.begin()
    try:
        with StopAtSignal() as signals, failures_named(accelerator, Diverged):
            train(
                prepared.objective,
                prepared.settings,
                keeper if main else Monitor(),
                accelerator=accelerator,
                state=None if prepared.state is None else prepared.state["loop"],
                stop=lambda: signals.number,
                spent=0.0 if prepared.settings.minutes is None else spent,
            )
    except Stopped:
        if main:
            keeper.stopped()
        raise
    except (Diverged, TooLittleMemory) as error:
        if main and isinstance(error, Diverged):
            keeper.diverged(str(error.report))
        if main and keeper.beside_another:
            error.args = (f"{error}; {run.out} still holds the model of the run before",)
        raise
    finally:
        keeper.close()
    return keeper.finish() if main else prepared.trained


def _open_folder(
    run: RunRequest, prepared: PreparedRun, reporter: Reporter, lock: FileLock | None, held: contextlib.ExitStack
) -> None:
    """Make a folder from which the run can be resumed, without checkpoints or logs of an earlier run.

    `lock` is the lock on it, if the caller has one; otherwise it is taken here and released by `held`.
    """
    taken = make_folder(run.out, lock)
    if taken is not lock:
        held.callback(taken.close)
    if taken.failure is not None:
        reporter.warned(f"{run.out} cannot be locked ({taken.failure}); let no other run write there meanwhile")
    if prepared.state is None:
        if not run.overwrite and not run.resume:
            check_still_new(run.out)
        clear(run.out)
