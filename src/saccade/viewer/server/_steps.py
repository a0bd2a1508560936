"""Attention step by step, of a row of a map that the viewer shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...inspection import TextModel, step_of_tokens
from ...inspection._collect import read
from ..maps import MapCall, Run, Side

MOST_STEPS = 2048  # tokens: the text is read again for each row, and the page shows every key


def has_steps(run: Run) -> bool:
    """Whether a model is behind the maps that reads the text again, and the text is short enough for that."""
    return isinstance(run.source, TextModel) and all(side.tokens <= MOST_STEPS for side in run.sides.values())


def steps_of_row(run: Run, call: MapCall, head: int, row: int) -> dict[str, Any]:
    """The header of a reply. The layers of a text are its calls, in order."""
    side, model = run.sides[call.rows], run.source
    labels = _labels(side)
    tokens, _ = read(model, run.text)
    ids = model.whole(tokens.ids)
    found = step_of_tokens(model, ids, labels, (call.layer, head), row)
    word = side.words[side.word_at(row)]
    title = f"Head {call.layer}.{head}, '{word.label}' asks: token {row:,} of {side.tokens:,}, counted from 0"
    return replace(found, text=run.text, model=run.model, word=word, title=title).as_json()


def _labels(side: Side) -> list[str]:
    """Each token as it can be shown: a word of one token as the word."""
    out = [*side.pieces]
    for word in side.words:
        if word.last - word.first == 1:
            out[word.first] = word.label
    return out
