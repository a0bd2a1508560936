"""One head of a decoder that reads a source: its self-attention, or what it reads of the source.

Shape legend: Ls / Lt tokens of source and target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..._call import ObservedCall
from ...models.text.encoder_decoder import EncoderDecoder
from .._collect import read
from .._models import LayerObserver, TextModel, evaluating
from .._targets import read_target, token_labels
from ._chosen_head import Place, most_telling
from ._chosen_word import asking
from ._inputs import of_stack
from ._result import Steps
from ._written import title_of, written_steps


def steps_of_target(
    opened: TextModel,
    text: str,
    target: str | None,
    part: str,
    place: Place | None,
    word: str | int | None = None,
    *,
    nth: int | None = None,
    without: Iterable[str] = (),
    name: str = "",
) -> Steps:
    """The steps of a word of the target in a head of the decoder; ``part`` is "decoder" or "cross".

    ``target`` None is what the model writes; ``place`` None is the head that tells most.
    """
    model = opened.module
    assert isinstance(model, EncoderDecoder)
    tokens, words = read(opened, text)
    device = next(model.parameters()).device
    source = opened.whole(tokens.ids).to(device)
    with evaluating(model):
        found = read_target(model, target, source)
    chosen, notes = asking(found.words, word, nth, where="target")
    row, ids = chosen.last - 1, torch.tensor([found.ids], device=device)
    notes.insert(0, f"the target is '{found.text}', as {'the model wrote it' if found.written else 'given'}")
    labels = found.labels if part == "decoder" else token_labels(text, tokens.spans, words, len(opened.before))

    def run(observe: LayerObserver) -> None:
        _run_decoder(model, source, ids, part, observe)

    if place is None:
        keys = found.words if part == "decoder" else words
        place, why = most_telling(run, row, keys, labels, chosen, part=part)
        notes.append(why)
    inputs = of_stack(model.decoder, place, row, run, part)
    table = model.tokens if model.target_tokens is None else model.target_tokens
    known = found.ids[row], table.weight[found.ids[row]].detach().cpu().double().numpy()
    made = written_steps(inputs, labels, known, without, notes, query=found.labels[row])
    return replace(
        made,
        text=text,
        target=found.text,
        model=name,
        layers=len(model.decoder.blocks),
        word=chosen,
        title=title_of(made, chosen.label, len(found.ids)),
    )


def _run_decoder(
    model: EncoderDecoder, source: Tensor, target: Tensor, part: str, observe: Callable[[int, Any], None]
) -> None:
    """Read ``source`` (1, Ls) and ``target`` (1, Lt) and tell the decoder's calls of ``part``, layers from 0."""
    first = len(model.encoder.blocks)

    def tell(layer: int, call: ObservedCall) -> None:
        if layer >= first and getattr(call, "cross", False) == (part == "cross"):
            observe(layer - first, call)

    with evaluating(model), torch.no_grad():
        model(source, None, target, observe=tell)
