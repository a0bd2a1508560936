"""Attention step by step, of a row of a map that the viewer shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...inspection import TextModel, as_text_model, step_of_target_token, step_of_tokens, token_labels
from ...inspection._collect import read
from ..maps import MapCall, ReadPair, Run

MOST_STEPS = 2048  # tokens: the text is read again for each row, and the page shows every key


def has_steps(run: Run) -> bool:
    """Whether a model is behind the maps that reads the text again, and the text is short enough for that."""
    return isinstance(run.source, TextModel | ReadPair) and all(s.tokens <= MOST_STEPS for s in run.sides.values())


def steps_of_row(run: Run, call: MapCall, head: int, row: int) -> dict[str, Any]:
    """The header of a reply. The layers of a text are its calls, in order."""
    side, keys = run.sides[call.rows], run.sides[call.keys]
    labels = token_labels(keys.words, keys.pieces)
    source, part = run.source, call.id.partition(".")[0]
    if isinstance(source, ReadPair) and part != "encoder":
        found = step_of_target_token(source.model, source.ids, source.target, labels, (part, call.layer, head), row)
    elif isinstance(source, ReadPair):
        found = step_of_tokens(as_text_model(source.model), source.ids, labels, (call.layer, head), row)
    else:
        tokens, _ = read(source, run.text)
        found = step_of_tokens(source, source.whole(tokens.ids), labels, (call.layer, head), row)
    word = side.words[side.word_at(row)]
    name = f"{part} {call.layer}.{head}" if isinstance(source, ReadPair) else f"{call.layer}.{head}"
    title = f"Head {name}, '{word.label}' asks: token {row:,} of {side.tokens:,}, counted from 0"
    return replace(found, text=run.text, model=run.model, word=word, title=title).as_json()
