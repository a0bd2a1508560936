"""One head in the decoder of an encoder-decoder: self-attention or cross-attention.

Shape legend: Ls / Lt tokens of source and target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....make.models.text.encoder_decoder import EncoderDecoder
from ....operator._call import ObservedCall
from ....support._restored import evaluating
from .._collect import read
from .._models import LayerObserver, TextModel
from .._targets import Target, read_target, token_labels, token_names
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

    ``target`` None: the model writes one. ``place`` None: the head with the largest weight.
    """
    model = opened.module
    assert isinstance(model, EncoderDecoder)
    tokens, words = read(opened, text)
    device = next(model.parameters()).device
    source = opened.whole(tokens.ids).to(device)
    with evaluating(model):
        reading = read_target(model, target, source)
    chosen, notes = asking(reading.words, word, nth, where="target")
    row = chosen.last - 1
    notes.insert(0, f"the target is '{reading.text}', as {'the model wrote it' if reading.written else 'given'}")
    decoder = part == "decoder"
    keys, pieces = (reading.words, reading.pieces) if decoder else (words, opened.pieces(text, tokens.spans))
    labels, names = token_labels(keys, pieces), token_names(keys, pieces)
    if place is None:
        place, why = most_telling(_reading(model, source, reading.ids, part), row, keys, names, chosen, part=part)
        notes.append(why)
    made = step_of_target_token(
        model, source, reading, labels, (part, *place), row, names=names, without=without, notes=notes
    )
    title = title_of(made, chosen.label, len(reading.ids))
    return replace(made, text=text, model=name, word=chosen, title=title)


def step_of_target_token(
    model: EncoderDecoder,
    source: Tensor,
    target: Target,
    labels: Sequence[str],
    place: tuple[str, int, int],
    row: int,
    *,
    names: Sequence[str] = (),
    without: Iterable[str] = (),
    notes: Sequence[str] = (),
) -> Steps:
    """The steps of token ``row`` of the target in a head of the decoder.

    Args:
        source: (1, Ls) token ids.
        target: what `read_target` returns.
        labels: of the keys, as in `step_of_tokens`.
        place: ("decoder" or "cross", layer, head).
        names: of the keys, as in `step_of_tokens`.
    """
    part, layer, head = place
    reading = _reading(model, source, target.ids, part)
    inputs = of_stack(model.decoder, (layer, head), row, reading, part)
    table, token = model.tokens if model.target_tokens is None else model.target_tokens, target.ids[row]
    known = token, table.weight[token].detach().cpu().double().numpy()
    made = written_steps(inputs, labels, known, without, list(notes), names=names, query=target.names[row])
    return replace(made, target=target.text, layers=len(model.decoder.blocks))


def _reading(
    model: EncoderDecoder, source: Tensor, target: Sequence[int], part: str
) -> Callable[[LayerObserver], None]:
    """A function that runs ``source`` (1, Ls) and ``target`` and observes the decoder's calls of ``part``."""
    first, ids = len(model.encoder.blocks), torch.tensor([[*target]], device=source.device)

    def read(observe: LayerObserver) -> None:
        def tell(layer: int, call: ObservedCall) -> None:
            if layer >= first and getattr(call, "cross", False) == (part == "cross"):
                observe(layer - first, call)

        with evaluating(model), torch.no_grad():
            model(source, None, ids, observe=tell)

    return read
