"""Reading a text, or a source and a target, with a model, and keeping the inputs of its maps.

Shape legend: B items, Hq / Hkv query and key-value heads, L tokens, Ls those of a source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....make.models import Model, Sampling, generate
from ....make.models.text.encoder_decoder import EncoderDecoder
from ....operator._biases import as_bias
from ....operator._call import ObservedCall
from ....operator._masks import Mask
from ....operator.nn.attention import Observation
from ....support._restored import evaluating
from ...inspection import Look, Target, TextModel, as_text_model, look, read_target
from ...inspection._collect import read
from ...monitoring import Alarms, CallRecord
from ...monitoring._kept_calls import bias_to, own_bias
from ...monitoring._observe import ObservationRequest, observed
from ._budget import KeptTensors, release_freed
from ._call import MapCall, checked
from ._run import Run
from ._side import Side

Progress = Callable[[int, int], None]
_LOOKED_AT = 400  # words up to which the findings of a look are shown beside the maps
_JUDGED = 4096  # tokens up to which alarms are computed
PARTS = ("encoder", "decoder", "cross")


def read_text(
    text: str,
    model: TextModel | Model,
    *,
    name: str | None = None,
    prompt: int | None = None,
    budget: int | None = None,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Run:
    """The attention of ``model`` on ``text``, kept.

    Args:
        model: one that reads text; for an encoder-decoder its encoder.
        name: the model's name in the viewer.
        prompt: the number of characters that were given; the rest was generated.
        budget: bytes of queries and keys that may stay in memory; None: no limit. folder: keeps the rest in files.
        progress: called with (done, total) after each layer.

    Raises:
        ValueError: a text without a word or longer than the model's context; queries and keys that exceed the budget;
            weights that are not finite.
    """
    reader = as_text_model(model)
    tokens, words = read(reader, text)
    pieces = reader.pieces(text, tokens.spans)
    generated = None
    if prompt is not None:
        generated = len(reader.before) + sum(start < prompt for start, _ in tokens.spans)
    side = Side("text", "text", len(pieces), words, text, pieces, generated)
    calls: list[MapCall] = []
    alarms: dict[tuple[str, int], list[str]] = {}
    with kept_for(reader.layers, budget, folder) as kept:

        def keep(layer: int, call: ObservedCall) -> None:
            made = kept_call(kept, str(layer), f"layer {layer}", layer, call, ("text", "text"))
            calls.append(made)
            alarms.update(judged(made, call))
            if progress is not None:
                progress(layer + 1, reader.layers)

        reader.run_calls(reader.whole(tokens.ids), keep)
        beyond = reader.trained if reader.trained is not None and len(pieces) > reader.trained else None
        roles = reader.roles if beyond is None else None  # measured within the context of training
        called = name or reader.name
        run = Run(called, text, {"text": side}, calls, roles, alarms, kept=kept, beyond=beyond, source=reader)
        if len(words) <= _LOOKED_AT:
            _tell(run, look(reader, text))
        return run


@contextmanager
def kept_for(calls: int, budget: int | None, folder: str | Path | None) -> Iterator[KeptTensors]:
    """Storage for queries and keys of so many calls; its files are deleted if reading fails."""
    kept = KeptTensors(budget, folder, calls=calls)
    try:
        yield kept
    except BaseException:
        kept.close()
        raise
    release_freed()


def read_continued(text: str, model: TextModel | Model, tokens: int, **more: Any) -> Run:
    """``text`` continued by the model's most probable ``tokens`` tokens, and read as by `read_text`.

    Raises:
        ValueError: as `read_text`; a model that cannot generate text; a text that leaves no room in the context.
    """
    reader = as_text_model(model)
    if reader.generator is None:
        raise ValueError(f"generate: {reader.name} is not a decoder of Saccade's families; only these generate text")
    pieces = generate(reader.generator, text, tokens, Sampling(temperature=0.0))
    return read_text(text + "".join(pieces), reader, prompt=len(text), **more)


def kept_call(
    kept: KeptTensors, id: str, name: str, layer: int, call: ObservedCall, sides: tuple[str, str], kind: str = "self"
) -> MapCall:
    """A call with copied queries and keys: caches are overwritten, and a model's memory is reused."""
    scoring = call.scoring()
    scoring["bias"] = bias_to(own_bias(as_bias(scoring["bias"])), "cpu")
    if scoring["sink"] is not None:
        scoring["sink"] = scoring["sink"].detach().cpu()
    if isinstance(scoring["mask"], (Mask, torch.Tensor)):
        scoring["mask"] = scoring["mask"].to("cpu")
    query, key = kept.take(call.query, call.key)
    return MapCall(id, name, layer, kind, *sides, checked(query, key, **scoring))


def judged(made: MapCall, call: ObservedCall) -> dict[tuple[str, int], list[str]]:
    """Alarms about a call's heads, as sentences. The keys are (call id, head). Empty for a text of more than `_JUDGED`
    tokens."""
    if max(made.shape[2:]) > _JUDGED:
        return {}
    judge = Alarms(None)
    measured, norms = observed(call, ObservationRequest())
    judge.observe(CallRecord(made.name, made.name, made.layer, 1, 0, measured, norms))
    out: dict[tuple[str, int], list[str]] = {}
    for alarm in judge.fired:
        for head in range(made.shape[1]) if alarm.head is None else [alarm.head]:
            out.setdefault((made.id, head), []).append(f"{alarm.kind}: {alarm.message}")
    return out


def _tell(run: Run, look: Look) -> None:
    """Add the findings of a look, with their tokens, and the head that it shows to the run."""
    words = look.seen.words
    run.shown = (str(look.layer), look.head)
    run.findings = [
        (
            finding.sentence,
            None if finding.layer is None else str(finding.layer),
            finding.head,
            None if finding.query is None else words[finding.query].last - 1,
            None if finding.key is None else words[finding.key].first,
        )
        for finding in look.findings
    ]


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
