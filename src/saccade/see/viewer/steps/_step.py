"""`saccade.step`. Importing it imports no model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ....make.models import Model
    from ...inspection import Steps, TextModel


def step(
    text: str,
    head: tuple[int, int] | tuple[str, int, int] | None = None,
    word: str | int | None = None,
    model: TextModel | Model | str | Path | None = None,
    *,
    nth: int | None = None,
    without: Iterable[str] = (),
    target: str | None = None,
) -> Steps:
    """Attention step by step: the real numbers of one head for one word of ``text``.

    Numbers are recomputed in float64 from the block's input and parameters; ``differences`` compares them with the
    model's own. For modules that are not Saccade's only the call itself is observed, so steps begin with query, key and
    value. ``print`` shows them as text, a notebook as a page, which ``html()`` returns.

    Args:
        text: the text that the model reads.
        head: (layer, head); None is the head in which the word attends most to a word that is not adjacent. For an
            encoder-decoder (part, layer, head): "encoder", which (layer, head) alone also means, "decoder" for the
            decoder's self-attention, "cross" for its cross-attention.
        word: the query word, ``it``; ``it:2`` is its second occurrence, an int a word number from 1; None is the
            last word. Of a word of several tokens the last one is the query: there a causal model has read the word.
            In a decoder or cross head it is a word of the target.
        model: a folder, a name on the hub, or an open model; None is the embedded one.
        nth: the occurrence of the word, from 1.
        without: the parts to leave out: "scale", "mask", "position", "shift"; ``weights_without`` are the weights then.
        target: the input of an encoder-decoder's decoder; None is the text that the model writes. Without `head` a
            cross head is shown.

    Raises:
        ValueError: no such word or head, a text that is empty or too long, a part that this head does not have.
        FileNotFoundError: no such model.
        TypeError: a head, word or model of another type.

    Example:
        >>> import saccade
        >>> steps = saccade.step("The cat sat on the mat because it was soft", head=(0, 2), word="it")
        >>> print(steps)
        Head 0.2, 'it' asks: token 9 of 12, counted from 0
        ...
         5  Dot product
            d_j = q · k_j
        ...
    """
    from ....make.models import LanguageModel, Model
    from ...inspection import TextModel, open_model, steps_of

    if not (model is None or isinstance(model, str | Path | TextModel | Model | LanguageModel)):
        raise TypeError(f"model: expected a folder, a name on the hub or an open model, got {type(model).__name__}")
    opened = open_model(model) if model is None or isinstance(model, str | Path) else model
    name = "embedded model" if model is None else None
    return steps_of(opened, text, head, word, nth=nth, without=without, target=target, name=name)
