"""Reading a source and a target with an encoder-decoder: self-attention of both, and cross-attention.

Shape legend: Ls / Lt tokens of source and target.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ....make.models.text.encoder_decoder import EncoderDecoder
from ....operator.nn.attention import Observation
from ....support._evaluating import evaluating
from ...inspection import Target, as_text_model, read_target
from ...inspection._collect import read
from ._call import MapCall
from ._reading import Progress, judged, kept_call, kept_for
from ._run import Run
from ._side import Side

PARTS = ("encoder", "decoder", "cross")


class ReadPair(NamedTuple):
    """The input of a run, for reading it again."""

    model: EncoderDecoder
    ids: Tensor  # (1, Ls)
    target: Target


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
    """The attention of an encoder-decoder on a source and a target, or on a target that it writes (a number).

    The decoder reads its start token, then the target. Other arguments as in `read_text`.

    Raises:
        ValueError: as `read_text`; more tokens than the model has positions; a model that cannot write.
    """
    reader = as_text_model(model)
    tokens, words = read(reader, source)
    ids = reader.whole(tokens.ids).to(next(model.parameters()).device)
    with evaluating(model):
        read_ = read_target(model, target, ids)
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

        with evaluating(model), torch.no_grad():
            model(ids, None, torch.tensor([read_.ids], device=ids.device), observe=keep)
        calls.sort(key=lambda call: PARTS.index(call.id.partition(".")[0]))
        pieces = reader.pieces(source, tokens.spans)
        sides = {
            "source": Side("source", "source", len(pieces), words, source, pieces),
            "target": Side(
                "target", "target", len(read_.ids), read_.words, read_.text, read_.pieces, 1 if read_.written else None
            ),
        }
        called = name or ("unnamed" if model.folder is None else str(model.folder))
        return Run(called, source, sides, calls, None, alarms, kept=kept, source=ReadPair(model, ids, read_))
