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

    Numbers are computed again, in float64, from what the block read and its parameters; ``differences`` compares them
    with the model's own. In a model whose modules are not Saccade's only the call itself is seen, so steps begin with
    query, key and value. ``print`` shows them, a notebook a page, which ``html()`` gives.

    Args:
        text: what the model reads.
        head: (layer, head); None is the head in which the word looks most at a word that is not adjacent. Of an
            encoder-decoder (part, layer, head): "encoder", which (layer, head) alone means too, "decoder" for the
            decoder's self-attention, "cross" for its cross-attention.
        word: the word that asks, ``it``; ``it:2`` is its second occurrence, an int a word number from 1; None is the
            last word. Of a word of several tokens the last token asks: there a causal model has read the word.
            In a decoder or cross head it is a word of the target.
        model: a folder, a name on the hub, or an open model; None is the embedded one.
        nth: the occurrence of the word, from 1.
        without: what to leave out: "scale", "mask", "position", "shift". ``weights_without`` are then the weights.
        target: what the decoder of an encoder-decoder reads; None is what the model writes. Without a head it is
            shown in a cross head.

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
