"""`speech`: sounds of classes, or with a text. A wav2vec 2.0 of the user's own sounds, or a published one.

Shape legend: B sounds of a batch, S samples of the longest, L frames, U characters of the longest text, K classes or
tokens.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ...operator.nn.stacks import LayerObserver
from .._task_registry import SpeechOptions
from ..models import Model, load
from ..models.checkpoints.settings import PROCESSOR
from ..models.families.wav2vec2 import CLASSIFIER, CTC
from ..models.signals.sound import Samples, SoundInputs
from ..models.signals.sound_encoder import SoundEncoder
from ..training import Objective, Settings
from ._classes._class_task import label_of
from ._classes._results import heading_of_worst, named_as, worst
from ._example_task import Batch, widened
from ._media._augmenting import SoundChanges
from ._media._characters import needed_frames, padded, text_of
from ._media._files import Found
from ._media._mfcc import log_mel, mfcc_regression
from ._media._sound_model import SoundModelSizes, new_sound_model
from ._media._sound_picture import SoundPanel, heard, picture_of_panels, rows_of_characters, rows_of_heads, worst_texts
from ._media._sounds import (
    SOUNDS,
    SoundExample,
    SoundStore,
    read_example,
    resampled_length,
    usual_rate,
    warn_of_changes,
)
from ._media._transcript_task import TranscriptTask
from ._task import Baseline, Tested
from ._temporary import kept_while_used, temporary_folder

FEW_TEXTS = 100  # different ones, at most, that the baseline tells apart as classes


class SoundItem(NamedTuple):
    """A sound by its number in a store, and its label if that is known: a class or the tokens of a text."""

    store: SoundStore
    number: int
    said: int | tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Speech(SpeechOptions, TranscriptTask):
    """Sounds of classes, or with `text` their transcripts.

    Several channels are averaged, and other rates resampled by a polyphase filter; a warning counts both.
    Capitals and signs of texts are learned as they are written; characters that training did not have count as errors.
    Texts are split off at random, classes alike. The model reads each sound with mean 0 and deviation 1, so loudness is
    not changed. Validation and test sounds are not changed. The regression is a baseline of texts if there are at most
    100 different ones, with five training sounds each on average. The head of a checkpoint starts with random weights
    unless its vocabulary is the same. A published model without an attention mask gets each sound alone.

    Args:
        file, skip_broken: as in every task of files; broken are also empty, silent and too long sounds.
        label, label_smoothing, class_weights, metric: as in every task of classes.
        text: column of a table; the model then writes characters. None: it gives classes.
        beams: texts that are searched for at once; 1 takes the most probable character of each frame.
        longest: seconds of a sound, at most.
        speed, shift, noise: how sounds are changed at random in training, see `SoundChanges`.
        hertz: samples a second that a new model reads; None: as most training sounds have, at most 16,000.
        layers, heads, width, dropout: of a new model; a checkpoint has its own.
        mask_time, mask_channels: share of the frames, of the channels, that a new model masks in training (Park et
            al., "SpecAugment", 2019, as wav2vec 2.0 has it).

    Raises:
        ValueError: an option outside of its range.

    Example:
        >>> import pathlib, tempfile, numpy, soundfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:  # a folder for each class
        ...     for label, hertz in (("high", 800), ("low", 200)):
        ...         pathlib.Path(folder, label).mkdir()
        ...         wave = 0.5 * numpy.sin(2 * numpy.pi * hertz * numpy.arange(4000) / 8000)
        ...         soundfile.write(pathlib.Path(folder, label, "1.wav"), wave, 8000)
        ...     sounds = saccade.tasks.Speech().read(pathlib.Path(folder))
        >>> [(sound.label, sound.samples) for sound in sounds]
        [('high', 4000), ('low', 4000)]
    """

    unit = "samples"
    thing = "sound"
    media = SOUNDS
    requires = ("jiwer", "scipy.signal", "sklearn.metrics", "soundfile")
    extra = "speech"
    compared = 1_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.longest > 0:
            raise ValueError(f"longest: must be positive, got {self.longest}")
        if self.hertz is not None and not 1000 <= self.hertz <= 192000:
            raise ValueError(f"hertz: must be from 1,000 to 192,000 samples a second, got {self.hertz}")
        assert self.changes and self.sizes  # which check their own

    @property
    def changes(self) -> SoundChanges:
        return SoundChanges(self.speed, self.shift, self.noise)

    @property
    def sizes(self) -> SoundModelSizes:
        return SoundModelSizes(self.layers, self.heads, self.width, self.dropout, self.mask_time, self.mask_channels)

    # --- data ---------------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> list[SoundExample]:
        column = self.label if self.text is None else self.text
        if not path.is_dir():
            to_value = label_of if self.text is None else text_of
            rows = self.media.in_table(path, (self.file, column))
            files: list[Found] = [(file, to_value(said, place), place) for file, (said,), place in rows]
        elif self.text is None:
            files = self.media.in_class_folders(path)
        else:
            raise ValueError(f"{path}: a folder has no texts; give a .csv, .tsv or .jsonl with the column {column!r}")
        if self.text is None:
            self.check_known((label, place) for _, label, place in files)
        return self.media.checked(files, self.example, self.skip_broken)

    def example(self, path: Path, said: str | None, place: str) -> SoundExample:
        label, text = (said, None) if self.text is None else (None, said)
        return read_example(path, label, text, place, self.longest)

    # --- model --------------------------------------------------------------------------------------------------------

    @property
    def said(self) -> tuple[str, ...]:
        """The outputs of the head: classes, or tokens."""
        return self.labels if self.text is None else self.alphabet.tokens

    def new_model(self, training: Sequence[SoundExample]) -> Model:
        folder = temporary_folder()
        if self.text is not None:
            self.alphabet.write(folder)
        head = CLASSIFIER if self.text is None else CTC
        rate = self.hertz or usual_rate(training)
        return kept_while_used(new_sound_model(folder, self.sizes, rate, head, self.said), folder)

    def open_model(self, source: Path | str) -> Model:
        """The model with this task's head; its weights are random if the checkpoint's head has other classes."""
        if self.text is None:
            return _hearing(load(source, head=CLASSIFIER, labels=list(self.labels), dtype=torch.float32))
        model = _hearing(load(source, head=CTC, labels=list(self.said), dtype=torch.float32))
        assert model.folder is not None
        if self.alphabet.are_those_of(model.folder):
            return model
        folder = temporary_folder()
        shutil.copyfile(model.folder / PROCESSOR, folder / PROCESSOR)
        self.alphabet.write(folder)
        model.folder = folder
        return kept_while_used(model, folder)

    def objective(
        self, model: Model, training: Sequence[SoundExample], validation: Sequence[SoundExample], settings: Settings
    ) -> Objective:
        if self.text is not None:
            self._check_lengths(_hearing(model), [*training, *validation])
        return super().objective(model, training, validation, settings)

    def _check_lengths(self, model: SoundEncoder, examples: Sequence[SoundExample]) -> None:
        """ValueError for a text that is too long for its sound: CTC has no alignment, and the loss is infinite."""
        rate, alphabet = SoundInputs.of_folder(model.folder).rate, self.alphabet
        for example in examples:
            samples = max(resampled_length(example.samples, example.rate, rate), model.features.least)
            needed, frames = needed_frames(alphabet.numbers(example.text or "")), model.frames(samples)
            if needed > frames:
                raise ValueError(
                    f"{example.where}: the text {example.text!r:.40} needs {needed} frames, and its sound of "
                    f"{example.seconds:.2f} s has {frames}; remove it, or correct the text"
                )

    # --- batches ------------------------------------------------------------------------------------------------------

    def encode(self, model: Model, examples: Sequence[SoundExample]) -> list[SoundItem]:
        warn_of_changes(examples, SoundInputs.of_folder(model.folder).rate)
        return self._items(_hearing(model), examples)

    def _items(self, model: SoundEncoder, examples: Sequence[SoundExample]) -> list[SoundItem]:
        store = SoundStore(examples, SoundInputs.of_folder(model.folder).rate, model.features.least)
        return [SoundItem(store, n, said) for n, said in enumerate(self._said_of(examples))]

    def state_counts(self, batch: Batch) -> Tensor:
        """The number of frames; the attention mask counts samples."""
        return batch["frames"]

    def reads_alike(self, student: Model, teacher: Model, examples: Sequence[SoundExample]) -> bool:
        """Compares the items' settings; the samples are in a store for each model."""
        return self._reading(_hearing(student), examples) == self._reading(_hearing(teacher), examples)

    def _reading(self, model: SoundEncoder, examples: Sequence[SoundExample]) -> tuple[Any, ...]:
        """The model's preprocessing and its number of frames for each sound."""
        reader, features = SoundInputs.of_folder(model.folder), model.features
        counts = (resampled_length(example.samples, example.rate, reader.rate) for example in examples)
        return reader, features.over_time, features.least, [model.frames(max(n, features.least)) for n in counts]

    def _said_of(self, examples: Sequence[SoundExample]) -> Sequence[int | tuple[int, ...] | None]:
        if self.text is None:
            return self.class_numbers(examples)
        alphabet = self.alphabet
        return [None if example.text is None else alphabet.numbers(example.text) for example in examples]

    def length(self, item: SoundItem) -> int:
        return item.store.lengths[item.number]

    def collate(self, model: Model, items: Sequence[SoundItem], random: np.random.Generator | None = None) -> Batch:
        """`input_values` (B, S), `samples` and `frames` (B,), and `labels` where they are known.

        `attention_mask` (B, S) is there if the model can leave padding out. Other models get each sound alone, in
        `forward`.
        """
        hearing = _hearing(model)
        sounds = [self._changed(hearing, item, random) for item in items]
        lengths = [len(sound) for sound in sounds]
        batch = _inputs(SoundInputs.of_folder(model.folder), sounds, together=not hearing.features.over_time)
        batch["samples"] = torch.tensor(lengths)
        batch["frames"] = torch.tensor([hearing.frames(length) for length in lengths])
        said = [item.said for item in items if item.said is not None]
        if len(said) == len(items):
            batch["labels"] = torch.tensor(said) if self.text is None else padded(said)  # type: ignore[arg-type]
        return batch

    def counted(self, batch: Batch) -> int:
        return int(batch["samples"].sum())

    def token_names(self, model: Model, batch: Batch) -> list[str]:
        """The start of each frame, in seconds."""
        hearing = _hearing(model)
        rate, step = SoundInputs.of_folder(model.folder).rate, math.prod(hearing.features.strides)
        return [f"{frame * step / rate:.2f}" for frame in range(int(batch["frames"][0]))]

    def _changed(self, model: SoundEncoder, item: SoundItem, random: np.random.Generator | None) -> Samples:
        """The sound, augmented in training unless that makes it too short for its text."""
        samples = item.store.samples(item.number)
        if random is None:
            return samples
        changed = self.changes(samples, item.store.rate, random)
        needed = needed_frames(item.said) if isinstance(item.said, tuple) else 1
        return changed if model.frames(len(changed)) >= needed else samples

    def forward(self, model: nn.Module, batch: Batch, observe: LayerObserver | None = None) -> Tensor:
        """The logits (B, K), or with texts (B, L, K)."""
        told = {} if observe is None else {"observe": observe}
        values = batch["input_values"]
        if "attention_mask" in batch:
            return widened(model(values, batch["attention_mask"], **told).logits)
        rows = zip(values, batch["samples"].tolist(), strict=True)
        alone = [model(row[None, :length], **told).logits[0] for row, length in rows]
        return widened(torch.stack(alone) if self.text is None else pad_sequence(alone, batch_first=True))

    # --- results ------------------------------------------------------------------------------------------------------

    def baselines(
        self,
        model: Model,
        training: Sequence[SoundExample],
        validation: Sequence[SoundExample],
        tested: Sequence[SoundExample],
    ) -> list[Baseline]:
        if self.text is None:
            outputs, what = mfcc_regression(
                training, validation, tested, (self.truth(training), self.truth(validation))
            )
            return [Baseline(what, list(outputs))]
        counts = Counter(example.text or "" for example in training)
        usual = min(counts, key=lambda text: (-counts[text], text))
        baselines = [Baseline("always the most frequent text", [usual] * len(tested))]
        if 2 <= len(counts) <= min(FEW_TEXTS, len(training) // 5):
            baselines.append(_texts_as_classes(sorted(counts), training, validation, tested))
        return baselines

    def picture(self, tested: Tested, kind: str) -> bytes:
        """The worst predictions; for classes with the confusion matrix above."""
        if self.text is None:
            truth = self.truth(tested.data)
            numbers = worst(tested.outputs, truth)
            heading = heading_of_worst([np.argmax(tested.outputs[n]) == truth[n] for n in numbers])
            classes = tested.details["labels"], tested.details["confusion"]
        else:
            texts, seconds = (
                [example.text or "" for example in tested.data],
                [example.seconds for example in tested.data],
            )
            numbers, classes = worst_texts(texts, tested.outputs, seconds), None
            heading = "By errors for each character, the most first"
        panels = [self._panel(tested.model, tested.data[n], tested.outputs[n]) for n in numbers]
        return picture_of_panels(panels, heading, kind, classes)

    def _panel(self, model: Model, example: SoundExample, output: Any) -> SoundPanel:
        (item,) = self._items(_hearing(model), [example])
        batch = {name: tensor.to(model.device) for name, tensor in self.collate(model, [item]).items()}
        result, weights = heard(model, lambda observe: self.forward(model, batch, observe))
        samples, rate = item.store.samples(0), item.store.rate
        spectrogram, seconds = log_mel(samples, rate), len(samples) / rate
        if self.text is None:
            found = int(np.argmax(output))
            title = named_as(str(example.label), self.labels[found], output[found])
            return SoundPanel(title, spectrogram, seconds, *rows_of_heads(weights))
        rows, names, marks = rows_of_characters(weights, self.alphabet.per_frame(result))
        heard_as = f"heard as {shorten(repr(output), 40)}" if output else "nothing is heard"
        title = f"{shorten(repr(example.text), 40)}\n{heard_as}"
        return SoundPanel(title, spectrogram, seconds, rows, names, tuple(marks))


def _texts_as_classes(
    texts: Sequence[str],
    training: Sequence[SoundExample],
    validation: Sequence[SoundExample],
    tested: Sequence[SoundExample],
) -> Baseline:
    """Texts as classes, if there are few different ones."""
    numbers = {text: n for n, text in enumerate(texts)}
    known, judged = (np.array([numbers.get(one.text or "", -1) for one in part]) for part in (training, validation))
    outputs, what = mfcc_regression(training, validation, tested, (known, judged))
    return Baseline(f"one of {len(texts)} texts: {what}", [texts[n] for n in outputs.argmax(1)])


def _inputs(reader: SoundInputs, sounds: Sequence[Samples], *, together: bool) -> dict[str, Any]:
    """The inputs of a batch: each sound preprocessed separately and padded on the right.

    Args:
        together: whether the model reads each sound of a padded batch as if it were alone.
    """
    if reader.masked and together:
        return reader(list(sounds))
    rows = [reader(sound)["input_values"][0] for sound in sounds]
    return {"input_values": pad_sequence(rows, batch_first=True)}


def _hearing(model: nn.Module) -> SoundEncoder:
    """The model, if it is a `SoundEncoder`; otherwise ValueError."""
    if not isinstance(model, SoundEncoder):
        raise ValueError(f"expected a model of sounds, such as wav2vec 2.0, got {type(model).__name__}")
    return model
