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
        None, "Texts have any number of labels, separated by this.  [default: one class each]", metavar="SEPARATOR"
    )
    skip_empty: bool = option(False, "Leave out texts without a word, and rows without a label.", "--skip-empty")


@dataclasses.dataclass(frozen=True)
class ClassOptions:
    """Classes"""

    label: str = option("label", "The column of classes.", metavar="COLUMN")
    label_smoothing: float = option(0.0, "Share of the truth that is spread over all classes.")
    class_weights: bool = option(False, "Let rare classes count more.", "--class-weights")
    metric: str | None = option(None, "What the best weights are chosen by: accuracy or f1.  [default: accuracy]")


@dataclasses.dataclass(frozen=True)
class LabelOptions(ClassOptions):
    """Classes"""

    metric: str | None = option(
        None, "What the best weights are chosen by: accuracy or f1.  [default: accuracy; with --several the loss]"
    )


@dataclasses.dataclass(frozen=True)
class ImageOptions:
    """Images"""

    file: str = option("file", "The column of paths, relative to the table.", metavar="COLUMN")
    skip_broken: bool = option(False, "Leave out images that cannot be read, and count them.", "--skip-broken")
    shift: float = option(0.1, "Move images while learning, by at most so much of a side.")
    rotate: float = option(0.0, "Turn them by at most so many degrees.")
    zoom: float = option(0.0, "Enlarge them or make them smaller by at most this share.")
    flip: bool = option(False, "Mirror half of them, left to right.", "--flip")


@dataclasses.dataclass(frozen=True)
class ImageModelOptions:
    """Model"""

    longest: int = option(64, "Pixels of the longer side that a new model reads, at most.")
    patch: int | None = option(
        None, "Pixels of a side of a new model's patches.  [default: an eighth of the longer side]"
    )
    layers: int = option(4, "Blocks of a new model.")
    heads: int = option(4, "Heads of each block.")
    width: int = option(64, "Width of a new model.")
    dropout: float = option(0.1, "Dropout of a new model.")


@dataclasses.dataclass(frozen=True)
class SoundOptions:
    """Sounds"""

    file: str = option("file", "The column of paths, relative to the table.", metavar="COLUMN")
    text: str | None = option(
        None, "The column of texts: write them, instead of naming classes.", metavar="COLUMN", show_default=False
    )
    beams: int = option(1, "Texts that are searched for at once.")
    longest: float = option(30.0, "Seconds of a sound, at most.")
    skip_broken: bool = option(False, "Leave out sounds that cannot be read, and count them.", "--skip-broken")
    speed: float = option(0.1, "Make sounds faster or slower while learning, by at most this share.")
    shift: float = option(0.05, "Put at most so many seconds of silence before and behind them.")
    noise: float = option(0.1, "Add white noise, at most this share of a sound's deviation.")
    mask_time: float = option(0.1, "Mask this share of a new model's frames while learning.")
    mask_channels: float = option(0.1, "Mask this share of its channels.")


@dataclasses.dataclass(frozen=True)
class SoundModelOptions:
    """Model"""

    hertz: int | None = option(
        None,
        "Samples a second that a new model reads; others are resampled.  [default: as most sounds have, at most 16000]",
    )
    layers: int = option(3, "Blocks of a new model.")
    heads: int = option(4, "Heads of each block.")
    width: int = option(96, "Width of a new model.")
    dropout: float = option(0.1, "Dropout of a new model.")


@dataclasses.dataclass(frozen=True)
class TextModelOptions:
    """Model"""

    vocabulary: int = option(4096, "Word pieces of a new encoder, at most.")
    cased: bool = option(False, "Distinguish capitals and accents, in a new encoder.", "--cased/--no-cased")
    layers: int = option(2, "Blocks of a new model.")
    heads: int = option(4, "Heads of each block.")
    width: int = option(128, "Width of a new model.")
    dropout: float = option(0.3, "Dropout of a new model.")
    longest: int | None = option(
        None, "Tokens of a text that are read.  [default: 256 by a new encoder, all that a checkpoint can]"
    )
    long: str = option("cut", "What to do with longer texts: cut, slide windows over them, or refuse.")


@dataclasses.dataclass(frozen=True)
class MaskedOptions:
    """Texts and masks"""

    text: str = option("text", "The column of texts, of a table.", metavar="COLUMN")
    masked: float = option(0.15, "Share of a text's tokens that are guessed.")


@dataclasses.dataclass(frozen=True)
class SlidingTextModelOptions(TextModelOptions):
    """Model"""

    long: str = option("slide", "What to do with longer texts: slide windows over them, cut, or refuse.")


@dataclasses.dataclass(frozen=True)
class SeriesOptions:
    """Series"""

    date: str = option("date", "The column of dates.", metavar="COLUMN")
    columns: str | None = option(
        None, "The series, separated by commas.  [default: all columns but the dates']", metavar="COLUMN,..."
    )
    past: int = option(336, "Steps that the model reads.")
    horizon: int = option(96, "Steps that it forecasts.")


@dataclasses.dataclass(frozen=True)
class SeriesModelOptions:
    """Model"""

    layers: int = option(3, "Blocks of a new model.")
    heads: int = option(4, "Heads of each block.")
    width: int = option(16, "Width of a new model.")
    hidden: int = option(128, "Width inside of feed-forward layers.")
    patch: int = option(16, "Steps in each patch of a new model.")
    stride: int = option(8, "Steps from one patch to the next.")
    dropout: float = option(0.3, "Dropout of a new model.")


@dataclasses.dataclass(frozen=True)
class GraphOptions:
    """Nodes and edges"""

    scale: str = option(
        "columns",
        "What is done to features: columns (mean 0, deviation 1), rows (divided by a node's sum, for counts of words) "
        "or none.",
    )
    directed: bool = option(False, "Edges lead only from their source to their target.", "--directed")
    l2: float = option(5e-4, "L2 penalty: l2 / 2 times the sum of squared weights.")
    metric: str = option("loss", "What the best weights are chosen by: loss, accuracy or f1.")


@dataclasses.dataclass(frozen=True)
class GraphModelOptions:
    """Model"""

    kind: str = option("gat", "Of a new model: gat, gatv2 or graphormer.")
    layers: int = option(2, "Layers of a new model; GAT's last one names the classes.")
    heads: int = option(8, "Heads of each layer.")
    width: int = option(64, "Width of a new model, of all heads together.")
    dropout: float = option(0.6, "Dropout of features and of what layers read.")
    attention_dropout: float = option(0.6, "Dropout of attention weights.")
    hops: int = option(2, "How far a node of graphormer sees.")


@dataclasses.dataclass(frozen=True)
class PairOptions:
    """Texts and translations"""

    source: str = option("source", "The column, or the file's ending, of texts: de.", metavar="LANGUAGE")
    target: str = option("target", "The column, or the file's ending, of translations: en.", metavar="LANGUAGE")
    prefix: str = option("", "What stands before each text, for a checkpoint that wants it.", show_default=False)
    skip_empty: bool = option(False, "Leave out pairs with an empty side.", "--skip-empty")
    label_smoothing: float = option(0.1, "Share of the truth that is spread over all tokens.")
    beams: int = option(4, "Translations that are searched for at once.")
    lowercase: bool = option(False, "Report BLEU on lowercased texts, too.", "--lowercase")


@dataclasses.dataclass(frozen=True)
class TranslationModelOptions:
    """Model"""

    vocabulary: int = option(8000, "Tokens of a new model, for both languages together, at most.")
    separate: bool = option(False, "Give each language so many tokens of its own (Marian's layout, not BART's).")
    layers: int = option(3, "Blocks of a new model, of encoder and of decoder.")
    heads: int = option(8, "Heads of each block.")
    width: int = option(256, "Width of a new model.")
    dropout: float = option(0.2, "Dropout of a new model.")
    longest: int | None = option(
        None, "Tokens of a text that are read.  [default: 256 by a new model, all that a checkpoint can]"
    )
    long: str = option("cut", "What to do with longer texts: cut or refuse.")


@dataclasses.dataclass(frozen=True)
class TagModelOptions(SlidingTextModelOptions):
    """Model"""

    cased: bool = option(True, "Distinguish capitals and accents, in a new encoder.", "--cased/--no-cased")


@dataclasses.dataclass(frozen=True)
class TagOptions:
    """Words and tags"""

    column: int | None = option(None, "The column of tags in a file with columns, counted from 1.  [default: the last]")
    words: str = option("signs", "Split texts into words by signs (spaces and punctuation) or by spaces alone.")


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """Answers"""

    longest_answer: int = option(30, "Tokens of an answer, at most.")


TASK_COMMANDS = {
    "classify": TaskCommand(
        "Tell classes of texts apart.",
        "Train a classifier of texts on DATA: an encoder of its own, or from a checkpoint.",
        "A .csv, .tsv or .jsonl, or a folder with a folder of .txt files each class.",
        (TextClassOptions, LabelOptions, TextModelOptions),
        epochs="10, with --from 3",
        rate="5e-4, with --from 5e-5",
    ),
    "tag": TaskCommand(
        "Find entities in texts.",
        "Train a tagger of words on DATA: an encoder of its own, or from a checkpoint.",
        "Columns (a word and its tag a line, an empty line between sentences), or a .jsonl with text and spans.",
        (TagOptions, TagModelOptions),
        epochs="20, with --from 5",
        rate="1e-3, with --from 5e-5",
    ),
    "answer": TaskCommand(
        "Find the answer to a question in a text.",
        "Train a model on DATA that finds answers in a context: an encoder of its own, or from a checkpoint.",
        "A .jsonl with question, context and answers, or a .json as of SQuAD.",
        (AnswerOptions, SlidingTextModelOptions),
        epochs="30, with --from 3",
        rate="1e-3, with --from 5e-5",
    ),
    "translate": TaskCommand(
        "Translate texts.",
        "Train a translator on DATA: an encoder-decoder of its own, or from a checkpoint.",
        "What two aligned files begin with (corpus/train for train.de and train.en; .gz too), or a .csv, .tsv, .jsonl.",
        (PairOptions, TranslationModelOptions),
        epochs="10, with --from 3",
        rate="1e-3, with --from 5e-5",
        batch="64",
    ),
    "mlm": TaskCommand(
        "Guess masked pieces: pre-train an encoder for other tasks.",
        "Train an encoder on the texts of DATA to guess pieces that are hidden; other tasks start --from it.",
        "A .txt with a text a line, a folder of them, or a .csv, .tsv or .jsonl.",
        (MaskedOptions, SlidingTextModelOptions),
        epochs="40, with --from 3",
        rate="1e-3, with --from 5e-5",
    ),
    "image": TaskCommand(
        "Tell classes of images apart.",
        "Train a classifier of images on DATA: a vision transformer of its own, or from a checkpoint.",
        "A folder with a folder of images each class, or a .csv, .tsv or .jsonl of their paths and classes.",
        (ImageOptions, ClassOptions, ImageModelOptions),
        epochs="20, with --from 3",
        rate="1e-3, with --from 5e-5",
        batch="64, with --from 32",
    ),
    "speech": TaskCommand(
        "Tell classes of sounds apart, or write what is said.",
        "Train a model of sounds on DATA: a wav2vec 2.0 of its own, or from a checkpoint. With --text it writes texts.",
        "A folder with a folder of sounds each class, or a .csv, .tsv or .jsonl of their paths and classes or texts.",
        (SoundOptions, ClassOptions, SoundModelOptions),
        epochs="40, with --from 10",
        rate="2e-3, with --from 5e-5",
        batch="16",
        patience="10, with --from 5",
    ),
    "forecast": TaskCommand(
        "Forecast series.",
        "Train a forecaster of the series in DATA: a PatchTST of its own, or from a checkpoint.",
        "A .csv, .tsv or .jsonl with a column of dates and a column for each series.",
        (SeriesOptions, SeriesModelOptions),
        epochs="10, with --from 3",
        rate="1e-3, with --from 1e-4",
    ),
    "graph": TaskCommand(
        "Tell classes of the nodes of a graph apart.",
        "Train a model of graphs on the nodes of DATA that have a label.",
        "An .npz with edges, features and labels, or a folder with nodes.csv and edges.csv.",
        (GraphOptions, GraphModelOptions),
        epochs="1200, with --from 200",
        rate="5e-3, with --from 1e-3",
        batch="all",
        every="20",
    ),
}
