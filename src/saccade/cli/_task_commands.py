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
        epochs, rate, batch: of its recipe; "10, with --from 3".
    """

    summary: str
    text: str
    data: str
    groups: tuple[type, ...]
    epochs: str
    rate: str
    batch: str = "32"


@dataclasses.dataclass(frozen=True)
class ClassOptions:
    """Texts and classes"""

    text: str = option("text", "The column of texts.", metavar="COLUMN")
    label: str = option("label", "The column of classes.", metavar="COLUMN")
    skip_empty: bool = option(False, "Leave out texts without a word.", "--skip-empty")
    label_smoothing: float = option(0.0, "Share of the truth that is spread over all classes.")
    class_weights: bool = option(False, "Let rare classes count more.", "--class-weights")
    metric: str = option("accuracy", "What the best weights are chosen by: accuracy or f1.")


@dataclasses.dataclass(frozen=True)
class TextModelOptions:
    """Model"""

    vocabulary: int = option(4096, "Word pieces of a new encoder, at most.")
    layers: int = option(2, "Its blocks.")
    heads: int = option(4, "Its heads of each block.")
    width: int = option(128, "Its width.")
    dropout: float = option(0.3, "Its dropout.")
    longest: int | None = option(
        None, "Tokens of a text that are read.  [default: 256 by a new encoder, all that a checkpoint can]"
    )
    long: str = option("cut", "What to do with longer texts: cut or refuse.")


@dataclasses.dataclass(frozen=True)
class SlidingTextModelOptions(TextModelOptions):
    """Model"""

    long: str = option("slide", "What to do with longer texts: slide windows over them, cut, or refuse.")


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
        (ClassOptions, TextModelOptions),
        epochs="10, with --from 3",
        rate="5e-4, with --from 5e-5",
    ),
    "tag": TaskCommand(
        "Find entities in texts.",
        "Train a tagger of words on DATA: an encoder of its own, or from a checkpoint.",
        "Columns (a word and its tag a line, an empty line between sentences), or a .jsonl with text and spans.",
        (TagOptions, SlidingTextModelOptions),
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
}
