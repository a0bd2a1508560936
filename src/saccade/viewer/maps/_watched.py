"""What `watch` kept, as maps."""

from __future__ import annotations

from collections.abc import Sequence

from ...monitoring._observed import CallObservations
from ._call import MapCall, checked
from ._run import Run
from ._side import Side, side_of_labels


def from_watch(observed: CallObservations, words: Sequence[str] | None = None, name: str = "watched model") -> Run:
    """The kept calls of a watch, or of a file that it was saved to.

    ``words`` are the labels of the tokens of a side; of a side of another length they say nothing, and it is numbered.

    Raises:
        ValueError: nothing was kept, or no side has as many tokens as there are words.
    """
    if not observed.kept:
        raise ValueError(
            "watched: no call was kept, so there is no map to show; choose calls when watching: "
            "saccade.watch(model, keep=True)"
        )
    sites = {site.name: site for site in observed.calls}
    sides: dict[str, Side] = {}
    calls = []
    for number, (site, kept) in enumerate(observed.kept.items()):
        rows, keys = kept.query.shape[2], kept.key.shape[2]
        row_side, key_side = (_side(sides, length, words).id for length in (rows, keys))
        given = {field: getattr(kept, field) for field in ("mask", "bias", "scale", "softcap", "sink")}
        kind = "self" if rows == keys else "cross"
        call = checked(kept.query, kept.key, **given)
        calls.append(
            MapCall(str(number), site or "attention", sites[site].layer, kind, row_side, key_side, call, kept.lse)
        )
    if words is not None and not any(side.named for side in sides.values()):
        lengths = ", ".join(str(side.tokens) for side in sides.values())
        raise ValueError(f"words: {len(words)} came, and the calls have {lengths} tokens")
    return Run(name, "", sides, calls, alarms=_alarms(observed, calls))


def _side(sides: dict[str, Side], length: int, words: Sequence[str] | None) -> Side:
    id = f"tokens-{length}"
    if id not in sides:
        named = words is not None and len(words) == length
        sides[id] = side_of_labels(id, words) if named and words is not None else Side(id, f"{length:,} tokens", length)
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
