"""The options that several tasks have. Help reads them without PyTorch; the classes of tasks inherit their fields."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..support._option_fields import option


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The default settings with which a task is trained.

    Args:
        epochs: times through the training data.
        rate: the highest learning rate.
        batch: examples in each step; None is all of them.
        every: steps between looks at the validation data; None is an epoch.
        patience: looks without an improvement that end a run.

    Example:
        >>> import saccade
        >>> saccade.tasks.Classify.tuning
        Recipe(epochs=3, rate=5e-05, batch=32, every=None, patience=5)
    """

    epochs: int
    rate: float
    batch: int | None = 32
    every: int | None = None
    patience: int = 5


@dataclasses.dataclass(frozen=True)
class BaseTaskOptions:
    """A task in `saccade train`: fields are its options, and its docstring is its help.

    Attributes:
        name: its name in `saccade train`.
        scratch, tuning: the default settings with new weights, and from a checkpoint.
        reading: names of the fields that may differ for data that are tested or predicted, such as a column.
    """

    name: ClassVar[str]
    scratch: ClassVar[Recipe]
    tuning: ClassVar[Recipe]
    reading: ClassVar[tuple[str, ...]]
    _heading: ClassVar[str]  # in help, of options without a group


@dataclasses.dataclass(frozen=True)
class ClassOptions(BaseTaskOptions):
    """Tasks of classes."""

    label: str = option("label", "The column of classes.", group="Classes", metavar="COLUMN")
    label_smoothing: float = option(
        0.0, "Share of the target probability that is spread over all classes.", group="Classes"
    )
    class_weights: bool = option(False, "Give rare classes more weight in the loss.", group="Classes")
    metric: str | None = option(
        None, "The metric that selects the best weights: accuracy or f1.  [default: accuracy]", group="Classes"
    )


@dataclasses.dataclass(frozen=True)
class MediaOptions(ClassOptions):
    """Tasks of files."""

    file: str = "file"
    skip_broken: bool = False


@dataclasses.dataclass(frozen=True)
class TranscriptOptions(MediaOptions):
    """Tasks of texts or classes."""

    text: str | None = option(
        None,
        "The column of texts: train to transcribe sounds instead of classifying them.",
        metavar="COLUMN",
        show_default=False,
    )
    beams: int = option(1, "Beams of the search for a transcript; 1 is greedy.")


@dataclasses.dataclass(frozen=True)
class TextOptions(BaseTaskOptions):
    """Tasks of texts."""

    vocabulary: int = option(4096, "Maximum vocabulary size of a new encoder, in word pieces.", group="Model")
    layers: int = option(2, "Blocks of a new model.", group="Model")
    heads: int = option(4, "Heads of each block.", group="Model")
    width: int = option(128, "Width of a new model.", group="Model")
    dropout: float = option(0.3, "Dropout probability of a new model.", group="Model")
    longest: int | None = option(
        None,
        "Maximum tokens of a text.  [default: 256 for a new encoder, else the checkpoint's maximum]",
        group="Model",
    )
    long: str = option(
        "cut",
        "Treatment of longer texts: cut (read only the beginning), slide (windows over the whole text) or "
        "refuse (raise an error).",
        group="Model",
    )


@dataclasses.dataclass(frozen=True)
class EncoderOptions(TextOptions):
    """Tasks whose new model is an encoder."""

    cased: bool = option(
        False, "A new encoder distinguishes capitals and accents.", "--cased/--no-cased", group="Model", before="layers"
    )


@dataclasses.dataclass(frozen=True)
class SlidingOptions(EncoderOptions):
    """Tasks that by default read long texts in windows."""

    long: str = option(
        "slide",
        "Treatment of longer texts: slide (windows over the whole text), cut (read only the beginning) or "
        "refuse (raise an error).",
        group="Model",
    )
