"""Attention step by step for a row of a map in the viewer."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from ...inspection import (
    Steps,
    TextModel,
    as_text_model,
    step_of_target_token,
    step_of_tokens,
    token_labels,
    token_names,
)
from ...inspection._collect import read
from ..maps import MapCall, ReadPair, Run
from ._params import ParameterError

MOST_STEPS = 4096  # tokens: the text is read again for each row, and all its logits are held twice

# Forward passes are observed by hooks in a model's modules, which several runs share, and in functions of transformers,
# which all models share. So only one pass is observed at a time.
READING = threading.Lock()


def why_not_again(run: Run) -> str | None:
    """The reason why the text of a run cannot be read again, as a sentence; None if it can."""
    tokens = max(side.tokens for side in run.sides.values())
    if not isinstance(run.source, TextModel | ReadPair):
        return "Steps and heads switched off need the model that reads the text, and kept calls of a watch have none."
    if tokens > MOST_STEPS:
        return (
            f"Steps and heads switched off need a text of at most {MOST_STEPS:,} tokens, and this has {tokens:,}: "
            "view a part of it (--from, --to)."
        )
    return None


def check_again(run: Run, op: str) -> None:
    """ParameterError for a run whose text cannot be read again."""
    why = why_not_again(run)
    if why is not None:
        raise ParameterError(f"{op}: {why}")


def steps_of_row(run: Run, call: MapCall, head: int, row: int) -> dict[str, Any]:
    """The header of a reply with the steps of one row."""
    side = run.sides[call.rows]
    with READING:
        steps = _read_again(run, call, head, row)
    word, part = side.words[side.word_at(row)], _part(call)
    name = f"{part} {call.layer}.{head}" if isinstance(run.source, ReadPair) else f"{call.layer}.{head}"
    title = f"Head {name}, '{word.label}' asks: token {row:,} of {side.tokens:,}, counted from 0"
    return replace(steps, text=run.text, model=run.model, word=word, title=title).as_json()


def _part(call: MapCall) -> str:
    """ "encoder", "decoder" or "cross": what stands before the dot in the call's id, such as `cross.2`."""
    return call.id.partition(".")[0]


def _read_again(run: Run, call: MapCall, head: int, row: int) -> Steps:
    keys, source, part = run.sides[call.keys], run.source, _part(call)
    labels, names = (written(keys.words, keys.pieces) for written in (token_labels, token_names))
    if isinstance(source, ReadPair) and part != "encoder":
        place = part, call.layer, head
        return step_of_target_token(source.model, source.ids, source.target, labels, place, row, names=names)
    if isinstance(source, ReadPair):
        model, ids = as_text_model(source.model), source.ids
    else:
        model, ids = source, source.whole(read(source, run.text)[0].ids)
    return step_of_tokens(model, ids, labels, (call.layer, head), row, names=names)
