"""One head and one word, step by step: from the embedding to what attention writes into the residual stream.

Shape legend: L keys, Dv value width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..._attention import attention
from ..._call import AttentionCall, ObservedCall
from ...models import Model
from .._collect import read
from .._look import check_head
from .._models import TextModel, weights_of
from .._published import as_text_model
from .._words import Word
from ._after import AfterWeights
from ._before import BeforeScores
from ._chosen_word import find_word
from ._inputs import HeadInputs, of_call, of_model
from ._parts import HeadNumbers
from ._result import Steps
from ._scores import checked_switches
from ._weighing import Weighing


def steps_of(
    model: TextModel | Model,
    text: str,
    head: tuple[int, int] | None = None,
    word: str | int | None = None,
    *,
    nth: int | None = None,
    without: Iterable[str] = (),
    name: str | None = None,
) -> Steps:
    """What `saccade.step` gives, of an open model that is called ``name``."""
    opened = as_text_model(model)
    check_head(opened, head)
    tokens, words = read(opened, text)
    number, note = find_word(words, word, nth)
    chosen = words[number]
    ids = opened.whole(tokens.ids)
    row, notes = chosen.last - 1, [note] if note else []
    if chosen.last - chosen.first > 1:
        notes.append(f"'{chosen.label}' is {chosen.last - chosen.first} tokens: the last of them asks")
    if head is None:
        head = _most_telling(opened, ids, words, row, number)
        notes.append(
            f"no head was asked for: in layer {head[0]} head {head[1]} it looks most at a word that is not beside it"
        )
    labels = token_labels(opened, text, tokens.spans, words)
    found = step_of_tokens(opened, ids, labels, head, row, without=without, notes=notes)
    title = f"Head {head[0]}.{head[1]}, '{chosen.label}' asks: token {row} of {len(labels):,}, counted from 0"
    return replace(found, text=text, model=name or opened.name, word=chosen, title=title)


def step_of_tokens(
    model: TextModel,
    ids: Tensor,
    labels: Sequence[str],
    head: tuple[int, int],
    row: int,
    *,
    without: Iterable[str] = (),
    notes: Sequence[str] = (),
) -> Steps:
    """The steps of token ``row`` as ``model`` reads ``ids`` (1, L), whose tokens are shown as ``labels``."""
    inputs = of_model(model, ids, head, row)
    table, token = model.embedding, int(ids[0, row])
    known = None if table is None else (token, table.weight[token].detach().cpu().double().numpy())
    notes = list(notes)
    if inputs.around is None:
        notes.append(
            "the modules of this model are not Saccade's, so only its attention call is seen: norm, projections and "
            "positions come before it, the output projection after it"
        )
    found = _steps(inputs, labels, known, without, notes)
    return replace(found, model=model.name, layers=model.layers)


def step_of_call(
    call: ObservedCall,
    head: int,
    row: int,
    *,
    layer: int = 0,
    item: int = 0,
    labels: Sequence[str] | None = None,
    query: str | None = None,
    without: Iterable[str] = (),
) -> Steps:
    """The steps that can be seen in one observed call, for batch item ``item``: from query and key to the output.

    ``labels`` are of the keys, ``query`` is the label of the row; None is that of its key in self-attention.
    """
    shown = [str(j) for j in range(call.key.shape[2])] if labels is None else labels
    return _steps(of_call(call, head, row, layer, item), shown, None, without, (), query=query)


def example(without: Iterable[str] = ()) -> Steps:
    """The two keys of the page "Attention by hand": every number can be checked on paper."""
    query = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    value = torch.tensor([[[[10.0, 20.0], [30.0, 40.0]]]], dtype=torch.float64)
    call = AttentionCall(query, key, value).observed(attention(query, key, value), "saccade.attention")
    found = _steps(of_call(call, 0, 0), ("A", "B"), None, without, (), query="A", digits=6)
    return replace(
        found,
        title="Attention by hand: the query A = [1, 0] and two keys",
        model="every number can be checked on paper",
    )


def _steps(
    inputs: HeadInputs,
    labels: Sequence[str],
    token: tuple[int, np.ndarray] | None,
    without: Iterable[str],
    notes: Sequence[str],
    *,
    query: str | None = None,
    digits: int = 3,
) -> Steps:
    numbers, labels = HeadNumbers(inputs), tuple(labels)
    left_out = checked_switches(without, numbers.scores)
    before = BeforeScores(numbers, labels, digits, query, token)
    writers = before, Weighing(numbers, labels, digits, query), AfterWeights(numbers, labels, digits, query)
    written = tuple(step for writer in writers for step in writer.steps())
    of = "" if inputs.own is None else f" of {len(labels):,}"
    title = f"Head {inputs.layer}.{inputs.head}: token {inputs.row}{of}, counted from 0"
    return Steps("", "", 1, title, labels, numbers, written, None, left_out, tuple(notes), digits)


def token_labels(
    model: TextModel, text: str, spans: Sequence[tuple[int, int]], words: Sequence[Word]
) -> tuple[str, ...]:
    """Each token that the model reads, as it can be shown: a word of one token as the word."""
    out = [""] * words[-1].last
    before = len(model.before)
    for word in words:
        for i in range(word.first, word.last):
            if word.last - word.first == 1 or not 0 <= i - before < len(spans):
                out[i] = word.label
                continue
            start, stop = spans[i - before]
            out[i] = Word(text[start:stop].strip(" ") or "␣", start, stop, i, i + 1).label
    return tuple(out)


def _most_telling(model: TextModel, ids: Tensor, words: Sequence[Word], row: int, number: int) -> tuple[int, int]:
    """The head in which the row looks most at a token of a word that is not beside its own; special tokens aside."""
    others = [word for i, word in enumerate(words) if abs(i - number) > 1 and not word.special]
    counted = [j for word in others for j in range(word.first, word.last)]
    best, place = -1.0, (0, 0)

    def compare(layer: int, call: ObservedCall) -> None:
        nonlocal best, place
        seen = weights_of(call, rows=[row])[0, :, 0]
        weight, head = seen[:, counted].amax(-1).max(0) if counted else (seen.new_zeros(()), torch.tensor(0))
        if float(weight) > best:
            best, place = float(weight), (layer, int(head))

    model.run(ids, compare)
    return place
