"""The tasks: options, default settings and help. A new task is a class here, a line in `TASK_CLASSES`, and its file.

The docstring of a class is its help: a line for the list of tasks, what the command does, and what DATA may be.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..support._option_fields import option
from ._task_options import (
    BaseTaskOptions,
    ClassOptions,
    EncoderOptions,
    MediaOptions,
    Recipe,
    SlidingOptions,
    TextOptions,
    TranscriptOptions,
)


@dataclasses.dataclass(frozen=True)
class ClassifyOptions(ClassOptions, EncoderOptions):
    """Classify texts.

    Train a text classifier on DATA: a new encoder, or one from a checkpoint.

    A .csv, .tsv or .jsonl, or a folder with one folder of .txt files per class.
    """

    name = "classify"
    scratch = Recipe(epochs=10, rate=5e-4)
    tuning = Recipe(epochs=3, rate=5e-5)
    reading: ClassVar[tuple[str, ...]] = ("text", "label", "skip_empty", "longest", "long")
    _heading = "Texts"

    text: str = option("text", "The column of texts.", metavar="COLUMN")
    several: str | None = option(
        None,
        "Texts have any number of labels, separated by this.  [default: each text has one class]",
        metavar="SEPARATOR",
    )
    skip_empty: bool = option(False, "Skip texts without a word and rows without a label, and count them.")
    metric: str | None = option(
        None,
        "The metric that selects the best weights: accuracy or f1.  [default: accuracy; with --several the loss]",
        group="Classes",
    )


@dataclasses.dataclass(frozen=True)
class TagOptions(SlidingOptions):
    """Find entities in texts.

    Train a tagger of words on DATA: a new encoder, or one from a checkpoint.

    Columns (one word and its tag per line, an empty line between sentences), or a .jsonl with text and spans.
    """

    name = "tag"
    scratch = Recipe(epochs=20, rate=1e-3)
    tuning = Recipe(epochs=5, rate=5e-5)
    reading: ClassVar[tuple[str, ...]] = ("column", "words", "longest", "long")
    _heading = "Words and tags"

    cased: bool = option(
        True, "A new encoder distinguishes capitals and accents.", "--cased/--no-cased", group="Model", before="layers"
    )
    column: int | None = option(None, "The column of tags in a file with columns, counted from 1.  [default: the last]")
    words: str = option("signs", "Split texts into words at signs (spaces and punctuation) or only at spaces.")


@dataclasses.dataclass(frozen=True)
class AnswerOptions(SlidingOptions):
    """Find the answer to a question in a text.

    Train a model on DATA that finds answers in a context: a new encoder, or one from a checkpoint.

    A .jsonl with question, context and answers, or a .json in SQuAD's format.
    """

    name = "answer"
    scratch = Recipe(epochs=30, rate=1e-3)
    tuning = Recipe(epochs=3, rate=5e-5)
    reading: ClassVar[tuple[str, ...]] = ("longest_answer", "longest", "long")
    _heading = "Answers"

    longest_answer: int = option(30, "Maximum tokens of an answer.")


@dataclasses.dataclass(frozen=True)
class TranslateOptions(TextOptions):
    """Translate texts.

    Train a translator on DATA: a new encoder-decoder, or one from a checkpoint.

    The common prefix of two aligned files (corpus/train for train.de and train.en; .gz too), or a .csv, .tsv or .jsonl.
    """

    name = "translate"
    scratch = Recipe(epochs=10, rate=1e-3, batch=64)
    tuning = Recipe(epochs=3, rate=5e-5, batch=64)
    reading: ClassVar[tuple[str, ...]] = (
        "source",
        "target",
        "prefix",
        "skip_empty",
        "longest",
        "long",
        "beams",
        "lowercase",
    )
    _heading = "Texts and translations"

    vocabulary: int = option(8000, "Maximum vocabulary size of a new model, shared by both languages.", group="Model")
    separate: bool = option(
        False,
        "Give each language its own vocabulary of that size (Marian's layout, not BART's).",
        "--separate/--no-separate",
        group="Model",
        before="layers",
    )
    layers: int = option(3, "Blocks of a new model's encoder, and of its decoder.", group="Model")
    heads: int = option(8, "Heads of each block.", group="Model")
    width: int = option(256, "Width of a new model.", group="Model")
    dropout: float = option(0.2, "Dropout probability of a new model.", group="Model")
    longest: int | None = option(
        None, "Maximum tokens of a text.  [default: 256 for a new model, else the checkpoint's maximum]", group="Model"
    )
    long: str = option(
        "cut", "Treatment of longer texts: cut (read only the beginning) or refuse (raise an error).", group="Model"
    )
    source: str = option(
        "source", "The column of texts, or the extension of their file, such as de.", metavar="LANGUAGE"
    )
    target: str = option(
        "target", "The column of translations, or the extension of their file, such as en.", metavar="LANGUAGE"
    )
    prefix: str = option("", "Prefix added to each text, for checkpoints that need one.", show_default=False)
    skip_empty: bool = option(False, "Skip pairs with an empty side, and count them.")
    label_smoothing: float = option(0.1, "Share of the target probability that is spread over all tokens.")
    beams: int = option(4, "Beams of the search for a translation; 1 is greedy.")
    lowercase: bool = option(False, "Also report BLEU on lowercased texts.")


@dataclasses.dataclass(frozen=True)
class MlmOptions(SlidingOptions):
    """Predict masked tokens: pre-train an encoder for other tasks.

    Train an encoder to predict masked tokens in the texts of DATA; other tasks start --from it.

    A .txt with one text per line, a folder of them, or a .csv, .tsv or .jsonl.
    """

    name = "mlm"
    scratch = Recipe(epochs=40, rate=1e-3)
    tuning = Recipe(epochs=3, rate=5e-5)
    reading: ClassVar[tuple[str, ...]] = ("text", "longest", "long")
    _heading = "Texts and masks"

    text: str = option("text", "The column of texts in a table.", metavar="COLUMN")
    masked: float = option(0.15, "Share of a text's tokens to predict.")


@dataclasses.dataclass(frozen=True)
class ImageOptions(MediaOptions):
    """Classify images.

    Train an image classifier on DATA: a new vision transformer, or one from a checkpoint.

    A folder with one folder of images per class, or a .csv, .tsv or .jsonl of their paths and classes.
    """

    name = "image"
    scratch = Recipe(epochs=20, rate=1e-3, batch=64)
    tuning = Recipe(epochs=3, rate=5e-5)
    reading: ClassVar[tuple[str, ...]] = ("file", "label", "skip_broken")
    _heading = "Images"

    file: str = option("file", "The column of paths, relative to the table.", metavar="COLUMN")
    skip_broken: bool = option(False, "Skip images that cannot be read, and count them.")
    shift: float = option(0.1, "Augmentation: shift training images by at most this share of a side.")
    rotate: float = option(0.0, "Augmentation: rotate them by at most this many degrees.")
    zoom: float = option(0.0, "Augmentation: scale them up or down by at most this share.")
    flip: bool = option(False, "Augmentation: mirror half of them, left to right.")
    longest: int = option(64, "Maximum pixels of the longer side that a new model reads.", group="Model")
    patch: int | None = option(
        None, "Side of a new model's patches, in pixels.  [default: an eighth of the longer side]", group="Model"
    )
    layers: int = option(4, "Blocks of a new model.", group="Model")
    heads: int = option(4, "Heads of each block.", group="Model")
    width: int = option(64, "Width of a new model.", group="Model")
    dropout: float = option(0.1, "Dropout probability of a new model.", group="Model")


@dataclasses.dataclass(frozen=True)
class SpeechOptions(TranscriptOptions):
    """Classify sounds, or transcribe speech.

    Train a model of sounds on DATA: a new wav2vec 2.0, or one from a checkpoint. With --text it transcribes.

    A folder with one folder of sounds per class, or a .csv, .tsv or .jsonl of their paths and classes or texts.
    """

    name = "speech"
    scratch = Recipe(epochs=40, rate=2e-3, batch=16, patience=10)
    tuning = Recipe(epochs=10, rate=5e-5, batch=16)
    reading: ClassVar[tuple[str, ...]] = ("file", "label", "text", "skip_broken", "longest", "beams")
    _heading = "Sounds"

    file: str = option("file", "The column of paths, relative to the table.", metavar="COLUMN")
    skip_broken: bool = option(False, "Skip sounds that cannot be read, and count them.", before="speed")
    longest: float = option(30.0, "Maximum length of a sound, in seconds.")
    speed: float = option(0.1, "Augmentation: play training sounds faster or slower by at most this share.")
    shift: float = option(0.05, "Augmentation: add at most this many seconds of silence before and after them.")
    noise: float = option(0.1, "Augmentation: add white noise, at most this share of a sound's standard deviation.")
    hertz: int | None = option(
        None,
        "Sampling rate of a new model, in Hz; other sounds are resampled.  [default: the most common rate, "
        "at most 16000]",
        group="Model",
    )
    layers: int = option(3, "Blocks of a new model.", group="Model")
    heads: int = option(4, "Heads of each block.", group="Model")
    width: int = option(96, "Width of a new model.", group="Model")
    dropout: float = option(0.1, "Dropout probability of a new model.", group="Model")
    mask_time: float = option(0.1, "Mask this share of a new model's frames in training.")
    mask_channels: float = option(0.1, "Mask this share of a new model's channels in training.")


@dataclasses.dataclass(frozen=True)
class ForecastOptions(BaseTaskOptions):
    """Forecast time series.

    Train a forecaster of the time series in DATA: a new PatchTST, or one from a checkpoint.

    A .csv, .tsv or .jsonl with a column of dates and a column for each series.
    """

    name = "forecast"
    scratch = Recipe(epochs=10, rate=1e-3)
    tuning = Recipe(epochs=3, rate=1e-4)
    reading: ClassVar[tuple[str, ...]] = ("date", "fill")
    _heading = "Series"

    date: str = option("date", "The column of dates.", metavar="COLUMN")
    columns: str | None = option(
        None, "The series, separated by commas.  [default: all columns but the dates']", metavar="COLUMN,..."
    )
    fill: str = option("none", "Fill missing dates and numbers: previous, linear or none.")
    past: int = option(336, "Time steps that the model reads.")
    horizon: int = option(96, "Time steps that the model forecasts.")
    layers: int = option(3, "Blocks of a new model.", group="Model")
    heads: int = option(4, "Heads of each block.", group="Model")
    width: int = option(16, "Width of a new model.", group="Model")
    hidden: int = option(128, "Width inside the feed-forward layers.", group="Model")
    patch: int = option(16, "Time steps in each patch of a new model.", group="Model")
    stride: int = option(8, "Time steps from the start of one patch to the next.", group="Model")
    dropout: float = option(0.3, "Dropout probability of a new model.", group="Model")


@dataclasses.dataclass(frozen=True)
class GraphOptions(BaseTaskOptions):
    """Classify the nodes of a graph.

    Train a graph model on the labelled nodes of DATA.

    An .npz with edges, features and labels, or a folder with nodes.csv and edges.csv.
    """

    name = "graph"
    scratch = Recipe(epochs=1200, rate=5e-3, batch=None, every=20)
    tuning = Recipe(epochs=200, rate=1e-3, batch=None, every=20)
    reading: ClassVar[tuple[str, ...]] = ()
    _heading = "Nodes and edges"

    kind: str = option("gat", "Architecture of a new model: gat, gatv2 or graphormer.", group="Model")
    layers: int = option(2, "Layers of a new model; the last layer of GAT is the classifier.", group="Model")
    heads: int = option(8, "Heads of each layer.", group="Model")
    width: int = option(64, "Width of a new model, over all heads.", group="Model")
    dropout: float = option(0.6, "Dropout probability of features and layer inputs.", group="Model")
    attention_dropout: float = option(0.6, "Dropout probability of attention weights.", group="Model")
    hops: int = option(2, "Number of hops over which a node of graphormer attends.", group="Model")
    scale: str = option(
        "auto",
        "Scaling of features: columns (mean 0, standard deviation 1), rows (divided by the node's sum, for "
        "word counts), none, or auto: rows if they look like word counts.",
    )
    directed: bool = option(False, "Edges are directed, from source to target.")
    l2: float = option(5e-4, "L2 penalty: l2 / 2 times the sum of squared weights.")
    metric: str = option("loss", "The metric that selects the best weights: loss, accuracy or f1.")


TASK_CLASSES: dict[str, type[BaseTaskOptions]] = {  # by file and class
    "classify.Classify": ClassifyOptions,
    "tag.Tag": TagOptions,
    "answer.Answer": AnswerOptions,
    "translate.Translate": TranslateOptions,
    "mlm.Mlm": MlmOptions,
    "image.ClassifyImages": ImageOptions,
    "speech.Speech": SpeechOptions,
    "forecast.Forecast": ForecastOptions,
    "graph.ClassifyNodes": GraphOptions,
}
TASK_OPTIONS = {options.name: options for options in TASK_CLASSES.values()}
