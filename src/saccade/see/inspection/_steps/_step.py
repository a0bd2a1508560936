"""One head and one word, step by step: from the embedding to the residual stream after attention.

Shape legend: L keys, Dv value width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....make.models import Model
from ....operator._attention import attention
from ....operator._call import AttentionCall, ObservedCall
from .._collect import read
from .._models import TextModel
from .._published import as_text_model
from .._targets import token_labels, token_names
from ._chosen_head import Head, checked_place, most_telling
from ._chosen_word import asking
from ._found import HALF, of_model
from ._inputs import of_call
from ._pair import steps_of_target
from ._result import Steps
from ._written import title_of, written_steps


def steps_of(
    model: TextModel | Model,
    text: str,
    head: Head | None = None,
    word: str | int | None = None,
    *,
    nth: int | None = None,
    without: Iterable[str] = (),
    target: str | None = None,
    name: str | None = None,
) -> Steps:
    """As `saccade.step`, for an open model. ``name`` is the model's name in the result."""
    opened = as_text_model(model)
    part, place = checked_place(opened, head, target)
    called = name or opened.name
    if part in ("decoder", "cross"):
        return steps_of_target(opened, text, target, part, place, word, nth=nth, without=without, name=called)
    tokens, words = read(opened, text)
    chosen, notes = asking(words, word, nth)
    row, ids = chosen.last - 1, opened.whole(tokens.ids)
    pieces = opened.pieces(text, tokens.spans)
    labels, names = token_labels(words, pieces), token_names(words, pieces)
    if place is None:
        place, why = most_telling(lambda observe: opened.run(ids, observe), row, words, names, chosen, part=part)
        notes.append(why)
    steps = step_of_tokens(opened, ids, labels, place, row, names=names, without=without, notes=notes)
    return replace(steps, text=text, model=called, word=chosen, title=title_of(steps, chosen.label, len(labels)))


def step_of_tokens(
    model: TextModel,
    ids: Tensor,
    labels: Sequence[str],
    head: tuple[int, int],
    row: int,
    *,
    names: Sequence[str] = (),
    without: Iterable[str] = (),
    notes: Sequence[str] = (),
) -> Steps:
    """The steps of token ``row`` as ``model`` reads ``ids`` (1, L).

    Args:
        labels: the displayed text of each token.
        head: (layer, head).
        names: the name of each token in sentences; by default the labels in quotes.
        without: as in `saccade.step`.
        notes: lines that the result displays.
    """
    inputs, unknown = of_model(model, ids, head, row)
    table, token = model.embedding, int(ids[0, row])
    known = None if table is None else (token, table.weight[token].detach().cpu().double().numpy())
    notes = list(notes)
    if unknown:
        notes.append(
            f"of this layer only the attention call is seen, since {unknown}: norm, projections and positions come "
            "before it, the output projection after it"
        )
    elif inputs.around is not None and not inputs.around.adds:
        notes.append("where the output of attention is added to the residual stream was not seen")
    if model.stack is None and any(each.dtype in HALF for each in model.module.parameters()):
        notes.append("computed in float32: in the model's half precision, the numbers of several modules would fit")
    steps = written_steps(inputs, labels, known, without, notes, names=names)
    return replace(steps, model=model.name, layers=model.layers)


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
    """The steps that can be computed from one observed call: from query and key to the output.

    Args:
        call: kept by `saccade.watch`, or passed to an observer of a `TextModel`.
        item: the batch item.
        labels: of the keys.
        query: the label of the row; None: the label of its key, as in self-attention.
        without: as in `saccade.step`.
    """
    shown = [str(j) for j in range(call.key.shape[2])] if labels is None else labels
    asks = None if query is None else f"'{query}'"
    return written_steps(of_call(call, head, row, layer, item), shown, None, without, (), query=asks)


def example(without: Iterable[str] = ()) -> Steps:
    """The steps of the example on the page "Attention by hand". Every number can be checked on paper.

    Example:
        >>> from saccade.inspection import example
        >>> steps = example()
        >>> steps.weights.round(4)  # softmax([1 / sqrt(2), 0])
        array([0.6698, 0.3302])
    """
    query = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    value = torch.tensor([[[[10.0, 20.0], [30.0, 40.0]]]], dtype=torch.float64)
    call = AttentionCall(query, key, value).observed(attention(query, key, value), "saccade.attention")
    steps = written_steps(of_call(call, 0, 0), ("A", "B"), None, without, (), query="'A'", digits=6)
    return replace(
        steps,
        title="Attention by hand: the query A = [1, 0] and two keys",
        model="every number can be checked on paper",
    )
