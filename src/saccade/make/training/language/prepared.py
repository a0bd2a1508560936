"""`saccade train lm` as a run: reads texts, trains a `DecoderLM` and writes its model folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....operator.variants._parse import to_json
from ....support._plain_values import parsed_json
from ....support._restored import on_meta
from ...models import DecoderLM, LanguageModel, ModelConfig, Sampling, Tokenizer, generate, save
from ...models.decoder_lm.checkpoint import CONFIG, WEIGHTS, as_stored, load_own, write_text
from ...models.tokenizers.own import train_bpe, train_characters
from ..objective import Evaluation
from ..prepared import CurveEntry, PreparedRun, Reporter
from ..processes import accelerator_for
from ..rising_rates import RangeTest, objective_range_test
from ..run import run_training
from ..run_folder.layout import TASK
from ..run_folder.resume import LatestCheckpoint, check_same, digest, settings_described, sha256
from ..settings import LanguageSettings
from .card import model_card
from .corpus import TAIL, Corpus, read_texts, split_tail
from .evaluation import bigram_loss, evaluate
from .objective import LanguageObjective
from .request import LanguageRun
from .windows import check_length, whole_windows


def train_language_model(
    run: LanguageRun, reporter: Reporter | None = None, *, then: Callable[[LanguageModel], object] | None = None
) -> LanguageModel:
    """Train a language model, keep the best weights in `run.out`, and return the stored model.

    See `run_training` for folders, signals and processes.

    Args:
        run: what to train, and where to write.
        reporter: gets the events of the run.
        then: called with the stored model while the folder is still locked.

    Raises:
        BlockingIOError: another run is writing into the folder.
        FileExistsError, FileNotFoundError, OSError, ValueError: wrong input, in one line.
        Diverged: the loss or a gradient was not finite; `anomaly.txt` in the folder names the first such tensor.
        TooLittleMemory: a step did not fit in memory; the message says which sizes to reduce.
        Stopped: a signal came. It is a KeyboardInterrupt.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> from saccade.training import Execution, LanguageRun, LanguageSettings
        >>> settings = LanguageSettings(steps=2, batch=2, execution=Execution(precision="no"))
        >>> shape = {"layers": 1, "heads": 2, "width": 8, "context": 8}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = pathlib.Path(folder, "story.txt")
        ...     _ = text.write_text("the cat sat on the mat. " * 20)
        ...     run = LanguageRun(text, pathlib.Path(folder, "run"), settings, shape, vocabulary=None)
        ...     lm = saccade.training.train_language_model(run)
        >>> lm.tokenizer.decode(lm.tokenizer.encode("the cat").ids)
        'the cat'
    """
    return run_training(_as_pruned(run), PreparedLanguageRun.of, reporter, then=then)


def range_test_of(
    run: LanguageRun, *, low: float, high: float, progress: Callable[[float, float], None] = lambda rate, loss: None
) -> RangeTest:
    """The learning-rate range test (`range_test`) of the model and data of a run. Writes no file."""
    accelerator_for(run.settings)
    run = _as_pruned(run)
    both = texts(run)
    torch.manual_seed(run.settings.seed)
    lm = _new(run, both[0]) if run.initial is None else _continued(run, run.initial)
    corpus = Corpus.encode(*both, lm.tokenizer)
    _check_long_enough("training", corpus.training, lm.model.config.context)
    objective = LanguageObjective(lm.model, corpus, lm.tokenizer.start, run.settings)
    return objective_range_test(objective, run.settings, low=low, high=high, progress=progress)


class PreparedLanguageRun(PreparedRun):
    """A `LanguageRun` with its texts read and its model made.

    Args:
        described, state: see `PreparedRun`.
    """

    def __init__(
        self,
        run: LanguageRun,
        lm: LanguageModel,
        corpus: Corpus,
        described: dict[str, Any],
        state: dict[str, Any] | None,
    ):
        self.run, self.lm, self.corpus, self.described, self.state = run, lm, corpus, described, state
        self.trained, self.settings = lm, run.settings
        if run.settings.execution.context_parallel > 1:
            _check_shares(lm.model.config, run.settings)
        self.objective = LanguageObjective(lm.model, corpus, lm.tokenizer.start, run.settings)
        self.kept = {"tokenizer": lm.tokenizer.to_json()}

    @classmethod
    def of(cls, run: LanguageRun, checkpoint: LatestCheckpoint | None) -> PreparedLanguageRun:
        """Read the texts, and make the model or restore it from the checkpoint. Raises errors about the input."""
        both = texts(run)
        torch.manual_seed(run.settings.seed)
        if checkpoint is None or checkpoint.path is None:
            lm = _new(run, both[0]) if run.initial is None else _continued(run, run.initial)
            described, state = _description(run, both), None
        else:
            described, state = _description(run, both), checkpoint.state
            check_same(described, state, checkpoint.path)
            lm = _stored(run, state)
        corpus = Corpus.encode(*both, lm.tokenizer)
        for name, tokens in (("training", corpus.training), ("validation", corpus.validation)):
            _check_long_enough(name, tokens, lm.model.config.context)
        return cls(run, lm, corpus, described, state)

    @property
    def introduction(self) -> list[str]:
        config, corpus = self.lm.model.config, self.corpus
        return [
            f"{self.lm.model.parameter_count():,} parameters: {config.layers} layers, {config.heads} heads, "
            f"width {config.width}, context {config.context}, {config.vocabulary} tokens in the vocabulary"
            + ("" if config.mechanism is None else f"; {config.mechanism}"),
            f"{corpus.training.shape[0]:,} tokens to train on, {corpus.validation.shape[0]:,} to validate",
        ]

    def conclusion(self, stored: Evaluation) -> str:
        return f"best weights, over the whole validation text: {stored.loss:.4f} nats per token"

    def verdict(self, curve: list[CurveEntry], steps_done: int, stored: Evaluation) -> list[str]:
        pairs = bigram_loss(self.corpus.training, self.corpus.validation, self.lm.model.config.vocabulary)
        better = "less good than this model" if stored.loss < pairs else "as good as this model or better"
        line = f"a bigram, a simple model, has {pairs:.4f} nats per token: {better}"
        return [*super().verdict(curve, steps_done, stored), line]

    def as_stored(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return as_stored(self.lm.model, weights)

    def save(self, weights: dict[str, Tensor], name: str) -> None:
        # A new module, since the model in training may be sharded, or newer than these weights.
        with on_meta():  # takes no memory, and its initial weights would be replaced
            model = type(self.lm.model)(self.lm.model.config)
        model.load_state_dict(weights, assign=True)
        save(LanguageModel(model, self.lm.tokenizer), self.run.out, weights=name)
        write_text(self.run.out / TASK, json.dumps(self._task, indent=1) + "\n")

    @cached_property
    def _task(self) -> dict[str, Any]:
        """Contents of `task.json`, which `saccade test` reads."""
        run = self.run
        text, *held = (path.resolve() for path in (run.text, *run.hold_out))  # absolute: tests may run elsewhere
        digests = {str(path): digest(sorted(read_texts(path))) for path in (text, *held)}
        data = {"data": str(text), "validation": None, "sha256": digests}
        return {
            "task": run.task_name,
            "options": {"hold_out": [str(path) for path in held]},
            **data,
            "seed": run.settings.seed,
            "share": TAIL,
        }

    def card(self, curve: list[CurveEntry], steps_done: int, stored: Evaluation | None) -> str:
        return model_card(self.run, self.lm, self.corpus, curve, steps_done, None if stored is None else stored.loss)

    def stored(self) -> tuple[LanguageModel, Evaluation]:
        best = load_own(self.run.out)
        best.model.to(self.lm.model.embedding.weight.device)
        windows = whole_windows(self.corpus.validation, start=best.tokenizer.start, context=best.model.config.context)
        return best, Evaluation(evaluate(best.model, windows))

    def sample(self, step: int) -> str:
        model = self.lm.model
        was_training = model.training
        model.eval()
        text = "".join(generate(self.lm, "", 48, Sampling(temperature=0.8, top_p=0.95, seed=step)))
        model.train(was_training)
        return text


def texts(run: LanguageRun) -> tuple[list[str], list[str]]:
    """Texts to train on, and texts to validate on."""
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


def _description(run: LanguageRun, both: tuple[list[str], list[str]]) -> dict[str, Any]:
    """All settings that affect the result, and the SHA-256 of the texts."""
    initial = "random weights" if run.initial is None else sha256([(run.initial / WEIGHTS).read_bytes()])
    training, validation = both
    shape, mechanism = dict(run.shape), run.shape.get("mechanism")
    shape.pop("mechanism", None)
    if mechanism is not None:
        shape["mechanism"] = to_json(mechanism)
    return {
        **settings_described(run.settings),
        **shape,
        "vocabulary": "characters" if run.vocabulary is None else run.vocabulary,
        "from": initial,
        "training text": sha256(text.encode() for text in training),
        "validation text": sha256(text.encode() for text in validation),
    }


def _stored(run: LanguageRun, state: dict[str, Any]) -> LanguageModel:
    """The model described by a checkpoint, with untrained weights: the loop restores them."""
    tokenizer = Tokenizer.from_json(state["tokenizer"])
    return LanguageModel(DecoderLM(ModelConfig(tokenizer.vocabulary, **run.shape)), tokenizer, name=str(run.out))


def _new(run: LanguageRun, training: list[str]) -> LanguageModel:
    tokenizer = train_characters(training) if run.vocabulary is None else train_bpe(training, run.vocabulary)
    config = ModelConfig(vocabulary=tokenizer.vocabulary, **run.shape)
    return LanguageModel(DecoderLM(config), tokenizer, name=str(run.out))


def _as_pruned(run: LanguageRun) -> LanguageRun:
    """The run with the pruned heads of `initial` in its shape; no option of a run describes them."""
    if run.initial is None or not (run.initial / CONFIG).is_file():
        return run
    try:
        removed = parsed_json((run.initial / CONFIG).read_bytes()).get("pruned_heads")
    except (ValueError, AttributeError):  # errors of the folder are raised when it is loaded
        return run
    return run if removed is None else dataclasses.replace(run, shape={**run.shape, "pruned_heads": removed})


def _continued(run: LanguageRun, initial: Path) -> LanguageModel:
    """The model in `initial` with the run's dropout. ValueError lists the fields of its shape that differ."""
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


def _check_shares(config: ModelConfig, settings: LanguageSettings) -> None:
    if config.mechanism is not None:
        raise ValueError(f"context_parallel: shares softmax attention, not the mechanism {config.mechanism}")
    if settings.looks.watch is not None:
        raise ValueError("watch: heads are not watched where windows are shared; leave out watch or context_parallel")


def _check_long_enough(name: str, tokens: torch.Tensor, context: int) -> None:
    try:
        check_length(tokens, context)
    except ValueError as error:
        raise ValueError(f"{name} {error}; give more text or a smaller --context") from None
