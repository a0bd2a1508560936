"""What `saccade train` asks for by each task: a summary, what its data may be, its recipe, and options of its own.

Here once more, beside the tasks themselves, since help needs no PyTorch; a test compares the two.
"""

from __future__ import annotations

import dataclasses

from ._options import option


@dataclasses.dataclass(frozen=True)
class TaskCommand:
    """A task on the command line.

    Args:
        summary: of a line, for the list of tasks.
        text: the first sentence of its help.
        data: what DATA may be.
        groups: of options, whose names are those of the task's fields.
        epochs, rate, batch, every, patience: of its recipe; "10, with --from 3".
    """

    summary: str
    text: str
    data: str
    groups: tuple[type, ...]
    epochs: str
    rate: str
    batch: str = "32"
    every: str = "an epoch"
    patience: str = "5"


@dataclasses.dataclass(frozen=True)
class TextClassOptions:
    """Texts"""

    text: str = option("text", "The column of texts.", metavar="COLUMN")
    several: str | None = option(
        None,
        "Texts have any number of labels, separated by this.  [default: each text has one class]",
        metavar="SEPARATOR",
    )
    skip_empty: bool = option(
        False, "Skip texts without a word and rows without a label, and count them.", "--skip-empty"
    )


@dataclasses.dataclass(frozen=True)
class ClassOptions:
    """Classes"""

    label: str = option("label", "The column of classes.", metavar="COLUMN")
    label_smoothing: float = option(0.0, "Share of the target probability that is spread over all classes.")
    class_weights: bool = option(False, "Give rare classes more weight in the loss.", "--class-weights")
    metric: str | None = option(None, "The metric that selects the best weights: accuracy or f1.  [default: accuracy]")


@dataclasses.dataclass(frozen=True)
class LabelOptions(ClassOptions):
    """Classes"""

    metric: str | None = option(
        None, "The metric that selects the best weights: accuracy or f1.  [default: accuracy; with --several the loss]"
    )


@dataclasses.dataclass(frozen=True)
class ImageOptions:
    """Images"""

    file: str = option("file", "The column of paths, relative to the table.", metavar="COLUMN")
    skip_broken: bool = option(False, "Skip images that cannot be read, and count them.", "--skip-broken")
    shift: float = option(0.1, "Augmentation: shift training images by at most this share of a side.")
    rotate: float = option(0.0, "Augmentation: rotate them by at most this many degrees.")
    zoom: float = option(0.0, "Augmentation: scale them up or down by at most this share.")
    flip: bool = option(False, "Augmentation: mirror half of them, left to right.", "--flip")


@dataclasses.dataclass(frozen=True)
class ImageModelOptions:
    """Model"""

    longest: int = option(64, "Maximum pixels of the longer side that a new model reads.")
    patch: int | None = option(
        None, "Side of a new model's patches, in pixels.  [default: an eighth of the longer side]"
    )
    layers: int = option(4, "Blocks of a new model.")
    heads: int = option(4, "Heads of each block.")
    width: int = option(64, "Width of a new model.")
    dropout: float = option(0.1, "Dropout probability of a new model.")


@dataclasses.dataclass(frozen=True)
class SoundOptions:
    """Sounds"""

    file: str = option("file", "The column of paths, relative to the table.", metavar="COLUMN")
    text: str | None = option(
        None,
        "The column of texts: train to transcribe sounds instead of classifying them.",
        metavar="COLUMN",
        show_default=False,
    )
    beams: int = option(1, "Beams of the search for a transcript; 1 is greedy.")
    longest: float = option(30.0, "Maximum length of a sound, in seconds.")
    skip_broken: bool = option(False, "Skip sounds that cannot be read, and count them.", "--skip-broken")
    speed: float = option(0.1, "Augmentation: play training sounds faster or slower by at most this share.")
    shift: float = option(0.05, "Augmentation: add at most this many seconds of silence before and after them.")
    noise: float = option(0.1, "Augmentation: add white noise, at most this share of a sound's standard deviation.")
    mask_time: float = option(0.1, "Mask this share of a new model's frames in training.")
    mask_channels: float = option(0.1, "Mask this share of a new model's channels in training.")


@dataclasses.dataclass(frozen=True)
class SoundModelOptions:
    """Model"""

    hertz: int | None = option(
        None,
        "Sampling rate of a new model, in Hz; other sounds are resampled.  [default: the most common rate, "
        "at most 16000]",
    )
    layers: int = option(3, "Blocks of a new model.")
    heads: int = option(4, "Heads of each block.")
    width: int = option(96, "Width of a new model.")
    dropout: float = option(0.1, "Dropout probability of a new model.")


@dataclasses.dataclass(frozen=True)
class TextModelOptions:
    """Model"""

    vocabulary: int = option(4096, "Maximum vocabulary size of a new encoder, in word pieces.")
    cased: bool = option(False, "A new encoder distinguishes capitals and accents.", "--cased/--no-cased")
    layers: int = option(2, "Blocks of a new model.")
    heads: int = option(4, "Heads of each block.")
    width: int = option(128, "Width of a new model.")
    dropout: float = option(0.3, "Dropout probability of a new model.")
    longest: int | None = option(
        None, "Maximum tokens of a text.  [default: 256 for a new encoder, else the checkpoint's maximum]"
    )
    long: str = option(
        "cut",
        "Treatment of longer texts: cut (read only the beginning), slide (windows over the whole text) or "
        "refuse (raise an error).",
    )


@dataclasses.dataclass(frozen=True)
class MaskedOptions:
    """Texts and masks"""

    text: str = option("text", "The column of texts in a table.", metavar="COLUMN")
    masked: float = option(0.15, "Share of a text's tokens to predict.")


@dataclasses.dataclass(frozen=True)
class SlidingTextModelOptions(TextModelOptions):
    """Model"""

    long: str = option(
        "slide",
        "Treatment of longer texts: slide (windows over the whole text), cut (read only the beginning) or "
        "refuse (raise an error).",
    )


@dataclasses.dataclass(frozen=True)
class SeriesOptions:
    """Series"""

    date: str = option("date", "The column of dates.", metavar="COLUMN")
    columns: str | None = option(
        None, "The series, separated by commas.  [default: all columns but the dates']", metavar="COLUMN,..."
    )
    fill: str = option("none", "Fill missing dates and numbers: previous, linear or none.")
    past: int = option(336, "Time steps that the model reads.")
    horizon: int = option(96, "Time steps that the model forecasts.")


@dataclasses.dataclass(frozen=True)
class SeriesModelOptions:
    """Model"""

    layers: int = option(3, "Blocks of a new model.")
    heads: int = option(4, "Heads of each block.")
    width: int = option(16, "Width of a new model.")
    hidden: int = option(128, "Width inside the feed-forward layers.")
    patch: int = option(16, "Time steps in each patch of a new model.")
    stride: int = option(8, "Time steps from the start of one patch to the next.")
    dropout: float = option(0.3, "Dropout probability of a new model.")


@dataclasses.dataclass(frozen=True)
class GraphOptions:
    """Nodes and edges"""

    scale: str = option(
        "auto",
        "Scaling of features: columns (mean 0, standard deviation 1), rows (divided by the node's sum, for "
        "word counts), none, or auto: rows if they look like word counts.",
    )
    directed: bool = option(False, "Edges are directed, from source to target.", "--directed")
    l2: float = option(5e-4, "L2 penalty: l2 / 2 times the sum of squared weights.")
    metric: str = option("loss", "The metric that selects the best weights: loss, accuracy or f1.")


@dataclasses.dataclass(frozen=True)
class GraphModelOptions:
    """Model"""

    kind: str = option("gat", "Architecture of a new model: gat, gatv2 or graphormer.")
    layers: int = option(2, "Layers of a new model; the last layer of GAT is the classifier.")
    heads: int = option(8, "Heads of each layer.")
    width: int = option(64, "Width of a new model, over all heads.")
    dropout: float = option(0.6, "Dropout probability of features and layer inputs.")
    attention_dropout: float = option(0.6, "Dropout probability of attention weights.")
    hops: int = option(2, "Number of hops over which a node of graphormer attends.")


@dataclasses.dataclass(frozen=True)
class PairOptions:
    """Texts and translations"""

    source: str = option(
        "source", "The column of texts, or the extension of their file, such as de.", metavar="LANGUAGE"
    )
    target: str = option(
        "target", "The column of translations, or the extension of their file, such as en.", metavar="LANGUAGE"
    )
    prefix: str = option("", "Prefix added to each text, for checkpoints that need one.", show_default=False)
    skip_empty: bool = option(False, "Skip pairs with an empty side, and count them.", "--skip-empty")
    label_smoothing: float = option(0.1, "Share of the target probability that is spread over all tokens.")
    beams: int = option(4, "Beams of the search for a translation; 1 is greedy.")
    lowercase: bool = option(False, "Also report BLEU on lowercased texts.", "--lowercase")


@dataclasses.dataclass(frozen=True)
class TranslationModelOptions:
    """Model"""

    vocabulary: int = option(8000, "Maximum vocabulary size of a new model, shared by both languages.")
    separate: bool = option(False, "Give each language its own vocabulary of that size (Marian's layout, not BART's).")
    layers: int = option(3, "Blocks of a new model's encoder, and of its decoder.")
    heads: int = option(8, "Heads of each block.")
    width: int = option(256, "Width of a new model.")
    dropout: float = option(0.2, "Dropout probability of a new model.")
    longest: int | None = option(
        None, "Maximum tokens of a text.  [default: 256 for a new model, else the checkpoint's maximum]"
    )
    long: str = option("cut", "Treatment of longer texts: cut (read only the beginning) or refuse (raise an error).")


@dataclasses.dataclass(frozen=True)
class TagModelOptions(SlidingTextModelOptions):
    """Model"""

    cased: bool = option(True, "A new encoder distinguishes capitals and accents.", "--cased/--no-cased")


@dataclasses.dataclass(frozen=True)
class TagOptions:
    """Words and tags"""

    column: int | None = option(None, "The column of tags in a file with columns, counted from 1.  [default: the last]")
    words: str = option("signs", "Split texts into words at signs (spaces and punctuation) or only at spaces.")


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """Answers"""

    longest_answer: int = option(30, "Maximum tokens of an answer.")


TASK_COMMANDS = {
    "classify": TaskCommand(
        "Classify texts.",
        "Train a text classifier on DATA: a new encoder, or one from a checkpoint.",
        "A .csv, .tsv or .jsonl, or a folder with one folder of .txt files per class.",
        (TextClassOptions, LabelOptions, TextModelOptions),
        epochs="10, with --from 3",
        rate="5e-4, with --from 5e-5",
    ),
    "tag": TaskCommand(
        "Find entities in texts.",
        "Train a tagger of words on DATA: a new encoder, or one from a checkpoint.",
        "Columns (one word and its tag per line, an empty line between sentences), or a .jsonl with text and spans.",
        (TagOptions, TagModelOptions),
        epochs="20, with --from 5",
        rate="1e-3, with --from 5e-5",
    ),
    "answer": TaskCommand(
        "Find the answer to a question in a text.",
        "Train a model on DATA that finds answers in a context: a new encoder, or one from a checkpoint.",
        "A .jsonl with question, context and answers, or a .json in SQuAD's format.",
        (AnswerOptions, SlidingTextModelOptions),
        epochs="30, with --from 3",
        rate="1e-3, with --from 5e-5",
    ),
    "translate": TaskCommand(
        "Translate texts.",
        "Train a translator on DATA: a new encoder-decoder, or one from a checkpoint.",
        "The common prefix of two aligned files (corpus/train for train.de and train.en; .gz too), or a "
        ".csv, .tsv or .jsonl.",
        (PairOptions, TranslationModelOptions),
        epochs="10, with --from 3",
        rate="1e-3, with --from 5e-5",
        batch="64",
    ),
    "mlm": TaskCommand(
        "Predict masked tokens: pre-train an encoder for other tasks.",
        "Train an encoder to predict masked tokens in the texts of DATA; other tasks start --from it.",
        "A .txt with one text per line, a folder of them, or a .csv, .tsv or .jsonl.",
        (MaskedOptions, SlidingTextModelOptions),
        epochs="40, with --from 3",
        rate="1e-3, with --from 5e-5",
    ),
    "image": TaskCommand(
        "Classify images.",
        "Train an image classifier on DATA: a new vision transformer, or one from a checkpoint.",
        "A folder with one folder of images per class, or a .csv, .tsv or .jsonl of their paths and classes.",
        (ImageOptions, ClassOptions, ImageModelOptions),
        epochs="20, with --from 3",
        rate="1e-3, with --from 5e-5",
        batch="64, with --from 32",
    ),
    "speech": TaskCommand(
        "Classify sounds, or transcribe speech.",
        "Train a model of sounds on DATA: a new wav2vec 2.0, or one from a checkpoint. With --text it transcribes.",
        "A folder with one folder of sounds per class, or a .csv, .tsv or .jsonl of their paths and classes or texts.",
        (SoundOptions, ClassOptions, SoundModelOptions),
        epochs="40, with --from 10",
        rate="2e-3, with --from 5e-5",
        batch="16",
        patience="10, with --from 5",
    ),
    "forecast": TaskCommand(
        "Forecast time series.",
        "Train a forecaster of the time series in DATA: a new PatchTST, or one from a checkpoint.",
        "A .csv, .tsv or .jsonl with a column of dates and a column for each series.",
        (SeriesOptions, SeriesModelOptions),
        epochs="10, with --from 3",
        rate="1e-3, with --from 1e-4",
    ),
    "graph": TaskCommand(
        "Classify the nodes of a graph.",
        "Train a graph model on the labelled nodes of DATA.",
        "An .npz with edges, features and labels, or a folder with nodes.csv and edges.csv.",
        (GraphOptions, GraphModelOptions),
        epochs="1200, with --from 200",
        rate="5e-3, with --from 1e-3",
        batch="all",
        every="20",
    ),
}
