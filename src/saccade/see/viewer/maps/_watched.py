"""The calls kept by `watch`, as maps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ...monitoring._observed import CallObservations
from ._call import MapCall, checked
from ._run import Run
from ._side import Side, side_of_labels

# Names in PyTorch (multihead_attn), transformers (encoder_attn, EncDecAttention, crossattention) and Saccade.
_CROSS = re.compile(r"cross_?att|encoder_attn|EncDecAtt|multihead_attn$|(^|[.])cross([.]|$)", re.IGNORECASE)


def from_watch(observed: CallObservations, words: Sequence[str] | None = None, name: str = "watched model") -> Run:
    """The kept calls of a watch, or of its file.

    ``words`` are the labels of the tokens of a side; a side of another length has numbers instead. A call is
    cross-attention if its name says so, or if its lengths differ without a mask that positions the rows among the keys,
    as in decoding with a cache.

    Raises:
        ValueError: no call was kept, or no side has as many tokens as there are words.
    """
    if not observed.kept:
        raise ValueError(
            "watched: no call was kept, so there is no map to show; keep calls with saccade.watch(model, keep=True)"
        )
    sites = {site.name: site for site in observed.calls}
    sides: dict[str, Side] = {}
    calls = []
    for number, (site, kept) in enumerate(observed.kept.items()):
        given = {field: getattr(kept, field) for field in ("mask", "bias", "scale", "softcap", "sink")}
        call = checked(kept.query, kept.key, **given)
        cross = _CROSS.search(site) is not None
        keys = _side(sides, call.length_k, words, "source" if cross else "tokens").id
        rows = _side(sides, call.length_q, words).id
        place = str(number), site or "attention", sites[site].layer
        made = MapCall(*place, "cross" if cross else "self", rows, keys, call)
        if call.length_q != call.length_k and not cross:
            made = replace(made, rows=keys) if made.causal else replace(made, kind="cross")
        calls.append(made)
    used = {id for call in calls for id in (call.rows, call.keys)}
    sides = {id: side for id, side in sides.items() if id in used}
    if words is not None and not any(side.named for side in sides.values()):
        lengths = ", ".join(str(side.tokens) for side in sides.values())
        raise ValueError(f"words: expected as many as a call has tokens ({lengths}), got {len(words)}")
    return Run(name, "", sides, calls, alarms=_alarms(observed, calls))


def _side(sides: dict[str, Side], length: int, words: Sequence[str] | None, of: str = "tokens") -> Side:
    """The side of this length; the source of cross-attention is a separate side without words."""
    id = f"{of}-{length}"
    if id not in sides:
        if words is not None and len(words) == length and of == "tokens":
            sides[id] = side_of_labels(id, words)
        else:
            sides[id] = Side(id, f"{length:,} tokens" if of == "tokens" else f"{length:,} tokens of the source", length)
    return sides[id]


def _alarms(observed: CallObservations, calls: list[MapCall]) -> dict[tuple[str, int], list[str]]:
    ids = {call.name: call for call in calls}
    out: dict[tuple[str, int], list[str]] = {}
    for alarm in observed.alarms:
        call = ids.get(alarm.name or "attention")
        if call is not None:
            heads = range(call.shape[1]) if alarm.head is None else [alarm.head]
            for head in heads:
                out.setdefault((call.id, head), []).append(f"{alarm.kind}: {alarm.message}")
    return out
