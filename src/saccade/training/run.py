"""A whole run of `saccade train lm`: files in, a model folder out.

Beside the model (see `saccade.models.own.checkpoint`) the folder gets

    curve.jsonl        one line for each look at the validation text
    last.safetensors   the latest weights, while model.safetensors holds the best
    checkpoints/       all there is to a run at a step, for going on from there (see `files` and `resume`); while it
                       writes, the file that is locked (see `lock`)
    tensorboard/       the log, if asked for
    anomaly.txt        where the first number that is not finite stood, if one did
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .._extras import installing
from ..models import DecoderLM, LanguageModel, ModelConfig, Tokenizer
from ..models.own.checkpoint import CONFIG, load_own
from ..models.tokenizers.own import train_bpe, train_characters
from .data import Corpus, read_texts, split_tail
from .folder import check_output, check_still_new, clear, lock_existing, make_folder
from .language_run import LanguageRun, Reporter
from .lock import FileLock
from .loop import Diverged, Monitor, train
from .processes import accelerator_for, is_sharded, joined, together
from .resume import LatestCheckpoint, as_begun, check_same, description, newest
from .rising_rates import RangeTest, language_model_range_test
from .run_writer import RunWriter
from .stopping import StopAtSignal, Stopped
from .windows import check_length

if TYPE_CHECKING:
    from accelerate import Accelerator


def train_language_model(
    run: LanguageRun, reporter: Reporter | None = None, *, then: Callable[[LanguageModel], object] | None = None
) -> LanguageModel:
    """Train, keeping the best weights on the way, and return the model with them, read back from `run.out`.

    All that can be wrong with the input is found before `run.out` is touched. SIGINT (Ctrl-C) and SIGTERM end the run
    after the step in progress, with a checkpoint of it; a run with `resume` then goes on from there. Several processes
    (`accelerate launch`) each call this; only the main one writes, tells `reporter` and gets the stored model.
    The folder is locked meanwhile: a second run that would write there is told. `then` is called with the stored model
    before the lock is given up.

    Raises:
        BlockingIOError: another run is writing into the folder.
        FileExistsError, FileNotFoundError, OSError, ValueError: what is wrong with the input, in one line.
        Diverged: the loss or a gradient was not finite; `anomaly.txt` in the folder says where that began.
        Stopped: a signal came. It is a KeyboardInterrupt.
    """
    processes, run = joined(), _as_pruned(run)
    if not processes.is_main_process or reporter is None:
        reporter = Reporter()
    main = processes.is_main_process
    with contextlib.ExitStack() as held:
        # Before a checkpoint is read, which another run could replace; a folder that is new is locked once it is there.
        replaced = run.resume or run.overwrite
        lock = together(processes, lambda: lock_existing(run.out, ours=replaced) if main else None)
        if lock is not None:
            held.callback(lock.close)
        found = together(processes, lambda: newest(run.out) if run.resume else None)
        run = as_begun(run, found)
        accelerator = together(processes, lambda: accelerator_for(run.settings))
        prepared = together(processes, lambda: _prepare(run, found, reporter))
        together(processes, lambda: _open_folder(run, prepared, reporter, lock, held) if main else None)
        reporter.started(prepared.lm, prepared.corpus)
        lm = _train(run, prepared, reporter, accelerator)
        if main and then is not None:
            then(lm)
        return lm


def range_test_of(
    run: LanguageRun, *, low: float, high: float, told: Callable[[float, float], None] = lambda rate, loss: None
) -> RangeTest:
    """The learning-rate range test (see `range_test`) of what a run would train; nothing is written."""
    accelerator_for(run.settings)
    run = _as_pruned(run)
    both = texts(run)
    torch.manual_seed(run.settings.seed)
    lm = _new(run, both[0]) if run.initial is None else _continued(run, run.initial)
    corpus = Corpus.encode(*both, lm.tokenizer)
    _check_long_enough("training", corpus.training, lm.model.config.context)
    return language_model_range_test(lm.model, corpus, lm.tokenizer.start, run.settings, low=low, high=high, told=told)


@dataclasses.dataclass(frozen=True)
class _PreparedRun:
    """What a run trains on, found sound, and the checkpoint it continues from (None: it begins)."""

    lm: LanguageModel
    corpus: Corpus
    described: dict[str, Any]
    state: dict[str, Any] | None


def _prepare(run: LanguageRun, found: LatestCheckpoint | None, reporter: Reporter) -> _PreparedRun:
    if run.settings.looks.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(f"tensorboard: is not installed ({installing('train')})")
    if found is None:
        check_output(run.out, run.overwrite)
    both = texts(run)
    if found is not None:
        for line in found.damaged:
            reporter.warned(f"{line}; an older one is used")
        reporter.warned(f"resuming {run.out} from {'the beginning' if found.path is None else found.path.name}")
    torch.manual_seed(run.settings.seed)
    if found is None or found.path is None:
        lm = _new(run, both[0]) if run.initial is None else _continued(run, run.initial)
        described, state = description(run, both), None
    else:
        described, state = description(run, both), found.state
        check_same(described, state, found.path)
        lm = _stored(run, state)
    corpus = Corpus.encode(*both, lm.tokenizer)
    for name, tokens in (("training", corpus.training), ("validation", corpus.validation)):
        _check_long_enough(name, tokens, lm.model.config.context)
    return _PreparedRun(lm, corpus, described, state)


def _train(run: LanguageRun, prepared: _PreparedRun, reporter: Reporter, accelerator: Accelerator) -> LanguageModel:
    lm, main = prepared.lm, accelerator.is_main_process
    keeper = RunWriter(run, lm, prepared.corpus, reporter, prepared.described, sharded=is_sharded(accelerator))
    loop = None if prepared.state is None else prepared.state["loop"]
    if main:
        keeper.resume(prepared.state) if prepared.state is not None else keeper.begin()
    try:
        with StopAtSignal() as signals:
            train(
                lm.model,
                prepared.corpus,
                lm.tokenizer.start,
                run.settings,
                keeper if main else Monitor(),
                accelerator=accelerator,
                state=loop,
                stop=lambda: signals.number,
            )
    except Stopped:
        if main:
            keeper.stopped()
        raise
    except Diverged as error:
        if main:
            keeper.diverged(str(error.report))
        raise
    finally:
        keeper.close()
    return keeper.finish() if main else lm


def _open_folder(
    run: LanguageRun, prepared: _PreparedRun, reporter: Reporter, lock: FileLock | None, held: contextlib.ExitStack
) -> None:
    """Make the folder one that can be resumed, with nothing of another run's that could be taken for this one's.

    `lock` is the one on it, if it has been taken; if not, it is taken here and given up with `held`.
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


def _stored(run: LanguageRun, state: dict[str, Any]) -> LanguageModel:
    """The model of a checkpoint, whose weights the loop restores."""
    tokenizer = Tokenizer.from_json(state["tokenizer"])
    return LanguageModel(DecoderLM(ModelConfig(tokenizer.vocabulary, **run.shape)), tokenizer, name=str(run.out))


def _new(run: LanguageRun, training: list[str]) -> LanguageModel:
    tokenizer = train_characters(training) if run.vocabulary is None else train_bpe(training, run.vocabulary)
    config = ModelConfig(vocabulary=tokenizer.vocabulary, **run.shape)
    return LanguageModel(DecoderLM(config), tokenizer, name=str(run.out))


def _as_pruned(run: LanguageRun) -> LanguageRun:
    """The run with the heads that `initial` has left: no option of a run says them."""
    if run.initial is None or not (run.initial / CONFIG).is_file():
        return run
    try:
        removed = json.loads((run.initial / CONFIG).read_bytes()).get("pruned_heads")
    except (ValueError, AttributeError):  # what is wrong with the folder is said when it is opened
        return run
    return run if removed is None else dataclasses.replace(run, shape={**run.shape, "pruned_heads": removed})


def _continued(run: LanguageRun, initial: Path) -> LanguageModel:
    """The model in `initial` with the run's dropout; ValueError names the fields in which its shape differs."""
    old = load_own(initial)
    config = ModelConfig(vocabulary=old.tokenizer.vocabulary, **run.shape)
    ours, theirs = config.to_dict(), old.model.config.to_dict()
    names = dict.fromkeys([*ours, *theirs])
    differ = [name for name in names if ours.get(name) != theirs.get(name) and name != "dropout"]
    if differ:
        listed = ", ".join(f"{name} {theirs.get(name)} (asked for {ours.get(name)})" for name in differ)
        raise ValueError(f"{initial}: has another shape: {listed}")
    model = DecoderLM(config)
    model.load_state_dict(old.model.state_dict())
    return LanguageModel(model, old.tokenizer, name=str(run.out))


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
