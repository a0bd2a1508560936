"""The default head of `step`, and the note on the choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ....make.models.text.encoder_decoder import EncoderDecoder
from ....operator._call import ObservedCall
from .._look import check_head
from .._models import LayerObserver, TextModel, weights_of
from .._words import Word
from ._writer import weight_text

PARTS = ("encoder", "decoder", "cross")  # of an encoder-decoder
Place = tuple[int, int]  # layer, head
Head = Place | tuple[str, int, int]  # with the part before it


def checked_place(model: TextModel, head: Head | None, target: str | None) -> tuple[str, Place | None]:
    """The part ("" for a model with one stack) and the place of a head; None if the place is still to be chosen in that
    part.

    Raises:
        TypeError: not a head. ValueError: a head, a part or a target that the model does not have or read.
    """
    part, place = _parted(head)
    pair = isinstance(model.module, EncoderDecoder)
    if part and not pair:
        raise ValueError(f"head: {_name(part, place)} is of an encoder-decoder; {model.name} has heads such as 1.4")
    if target is not None and not pair:
        raise ValueError(f"target: {model.name} reads none; only an encoder-decoder opened by saccade.models does")
    part = part or ("" if not pair else "cross" if head is None and target is not None else "encoder")
    if part == "encoder" and target is not None:
        raise ValueError("target: not read by the encoder; choose a head such as decoder.0.1 or cross.0.1")
    if part in ("decoder", "cross"):
        _check_in_decoder(model.module, part, place)
    else:
        check_head(model, place)
    return part, place


def _parted(head: Head | None) -> tuple[str, Place | None]:
    if head is None:
        return "", None
    if isinstance(head, tuple) and len(head) in (2, 3) and [type(n) for n in head[-2:]] == [int, int]:
        if len(head) == 2:
            return "", head
        if head[0] in PARTS:
            return head[0], head[1:]
        raise ValueError(f"head: expected a part of {', '.join(PARTS)}, got {head[0]!r}")
    raise TypeError(f"head: expected (layer, head), two ints, or (part, layer, head), got {head!r}")


def _check_in_decoder(model: Any, part: str, place: Place | None) -> None:
    blocks = model.decoder.blocks
    kind = "cross" if part == "cross" else "attention"
    heads = [getattr(block, kind).config.heads for block in blocks]
    if place is None or (0 <= place[0] < len(heads) and 0 <= place[1] < heads[place[0]]):
        return
    raise ValueError(
        f"head: {_name(part, place)} does not exist; the decoder has the layers 0 to {len(heads) - 1}, each with the "
        f"heads 0 to {max(heads) - 1}"
    )


def _name(part: str, place: Place | None) -> str:
    return ".".join([*filter(None, [part]), *map(str, place or ())])


def most_telling(
    run: Callable[[LayerObserver], None],
    row: int,
    keys: Sequence[Word],
    names: Sequence[str],
    query: Word,
    *,
    part: str = "",
) -> tuple[Place, str]:
    """The head in which token ``row`` attends most to one token of a word that is not adjacent to its own.

    ``run`` makes the calls to choose from. Special tokens do not count; between two texts (``part`` "cross") all
    other words do. Where there is no such word, it is head 0.0.

    Returns:
        (layer, head), and a note that gives the reason, and says that other heads attend to other words.
    """
    ordinary = [word for word in keys if not word.special]
    if part != "cross":
        at = next((i for i, word in enumerate(keys) if word.first == query.first), 0)
        ordinary = [word for i, word in enumerate(keys) if abs(i - at) > 1 and not word.special]
    counted = [j for word in ordinary for j in range(word.first, word.last)]
    best, place, told, looks = -1.0, (0, 0), 0, dict[Place, int]()

    def compare(layer: int, call: ObservedCall) -> None:
        nonlocal best, place, told
        weights = weights_of(call, rows=[row])[0, :, 0]
        looks.update({(layer, head): int(j) for head, j in enumerate(weights.argmax(-1))})
        if not counted:
            return
        largest, head = weights[:, counted].amax(-1).max(0)
        if float(largest) > best:
            best, place = float(largest), (layer, int(head))
            told = counted[int(weights[place[1], counted].argmax())]

    run(compare)
    name = _name(part, place)
    if not counted:
        return place, f"no head was given: {name} is shown; --head (in Python head=) shows another"
    elsewhere = Counter(names[j] for where, j in looks.items() if where != place)
    others = "--head (in Python head=) shows another"
    if elsewhere:
        most, count = elsewhere.most_common(1)[0]
        others = f"the others look elsewhere, {count} of them most at {most}; {others}"
    beside = "" if part == "cross" else " that is not adjacent"
    return place, (
        f"no head was given: of {len(looks)} heads, {name} is shown, in which '{query.label}' looks most at one "
        f"word{beside} ({names[told]}, {weight_text(best)}); {others}"
    )
