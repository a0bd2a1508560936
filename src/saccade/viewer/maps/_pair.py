"""Reading a source and a target through an encoder-decoder: self-attention of both, and what the target reads.

Shape legend: Ls / Lt tokens of source and target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...inspection import Tokens, group, split_words
from ...models.text.encoder_decoder import EncoderDecoder
from ...nn.attention import Observation
from ._call import MapCall
from ._reading import Progress, judged, kept_call, kept_for
from ._run import Run
from ._side import Side


def read_pair(
    source: str,
    target: str | int,
    model: EncoderDecoder,
    *,
    name: str | None = None,
    budget: int | None = None,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Run:
    """The attention of an encoder-decoder on a source and a target; a number: what it writes, so many tokens at most.

    The decoder reads its start token, then the target. Arguments otherwise as in `read_text`.

    Raises:
        ValueError: as `read_text`; more tokens to write than the model has positions; a model that writes none.
    """
    tokenizer = model.tokenizer
    given = tokenizer.encode(source)
    ids = torch.tensor([[*tokenizer.before, *given.ids, *tokenizer.after]])
    written, prompt = _target(model, target, ids)
    encoders, total = len(model.encoder.blocks), len(model.encoder.blocks) + 2 * len(model.decoder.blocks)
    calls: list[MapCall] = []
    alarms: dict[tuple[str, int], list[str]] = {}
    with kept_for(total, budget, folder) as kept:

        def keep(layer: int, call: Observation) -> None:
            if layer < encoders:
                id, sides, kind = f"encoder.{layer}", ("source", "source"), "self"
            elif call.cross:
                id, sides, kind = f"cross.{layer - encoders}", ("target", "source"), "cross"
            else:
                id, sides, kind = f"decoder.{layer - encoders}", ("target", "target"), "self"
            at = layer if layer < encoders else layer - encoders
            calls.append(kept_call(kept, id, f"{id.partition('.')[0]} layer {at}", at, call, sides, kind))
            alarms.update(judged(calls[-1], call))
            if progress is not None:
                progress(len(calls), total)

        model.eval()
        with torch.no_grad():
            model(ids, None, torch.tensor([written]), observe=keep)
        calls.sort(key=lambda call: ("encoder", "decoder", "cross").index(call.id.partition(".")[0]))
        sides = {
            "source": _side("source", source, given, tokenizer, tokenizer.before, tokenizer.after),
            "target": _written(tokenizer, written, target, prompt),
        }
        called = name or ("unnamed" if model.folder is None else str(model.folder))
        return Run(called, source, sides, calls, None, alarms, kept=kept, source=model)


def _target(model: EncoderDecoder, target: str | int, ids: torch.Tensor) -> tuple[list[int], int | None]:
    """The tokens that the decoder reads, and how many of them were given."""
    if model.start is None:
        raise ValueError("model: its config.json has no decoder_start_token_id, with which targets begin")
    tokenizer = model.tokenizer
    if isinstance(target, str):
        return [model.start, *tokenizer.before, *tokenizer.encode(target).ids, *tokenizer.after], None
    if model.head is None:
        raise ValueError("generate: this checkpoint has no head, by which a model writes; give a target to read")
    if model.longest is not None and target > model.longest:
        raise ValueError(f"generate: {target:,} tokens, and {model.longest:,} at most is what this model writes")
    found = model.generate(ids, max_new_tokens=target).texts()[0][0]
    return [model.start, *found], 1


def _side(id: str, text: str, given: Any, tokenizer: Any, before: Any, after: Any) -> Side:
    first, last = [tokenizer.written(token) for token in before], [tokenizer.written(token) for token in after]
    words = group(text, given.spans, split_words(text), before=first, after=last)
    pieces = [*first, *(text[start:stop] for start, stop in given.spans), *last]
    return Side(id, id, len(pieces), words, text, pieces)


def _written(tokenizer: Any, ids: list[int], target: str | int, prompt: int | None) -> Side:
    """The target's side: its own text where one was given, the tokens as they are written otherwise."""
    start = [ids[0], *tokenizer.before]
    if isinstance(target, str):
        return _side("target", target, tokenizer.encode(target), tokenizer, start, tokenizer.after)
    text = "".join(tokenizer.stream(iter(ids[1:])))
    again: Tokens = tokenizer.encode(text)
    after = ids[1 + len(again.ids) :]
    if list(again.ids) == ids[1 : 1 + len(again.ids)] and len(after) <= 1:
        side = _side("target", text, again, tokenizer, ids[:1], after)
    else:  # the text's tokens are not those that were written: each stands for itself
        pieces = [tokenizer.written(token) for token in ids]
        spans, at = [], 0
        for piece in pieces:
            spans.append((at, at + len(piece)))
            at += len(piece)
        joined = "".join(pieces)
        side = Side("target", "target", len(ids), group(joined, spans, spans, before=()), joined, pieces)
    return Side(side.id, side.name, side.tokens, side.words, side.text, side.pieces, prompt)
