"""Observations as one safetensors file: numbers as tensors, everything else as JSON in its header.

The file holds no code, and reading it runs none. A kept mask or bias is stored as its parts.

Shape legend: S statistics, H watched heads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...support._plain_values import parsed_json, plain_values
from ...support._whole_file import whole_file
from ._aggregates import RunningSums
from ._alarms import Alarm
from ._kept_calls import KeptCall
from ._layers import sentences
from ._masks_stored import Tensors, UnstorableMask, read_bias, read_mask, stored_bias, stored_mask
from ._observed import CallObservations, SiteObservations
from ._record import CallSite, Unobserved

FORMAT, VERSION = "saccade-watched", 1


def write(observations: CallObservations, path: str | Path) -> dict[str, str]:
    """Write `observations` to `path`, whole or not at all. Returns what could not be stored, with the reason."""
    from safetensors.torch import save_file

    tensors: Tensors = {}
    left_out: dict[str, str] = {}
    places = [
        _stored_place(number, place, tensors, left_out) for number, place in enumerate(observations._places.values())
    ]
    contents = {
        "version": VERSION,
        "steps": observations.steps,
        "observed": observations.observed,
        "passed_over": observations.passed_over,
        "places": places,
        "unobserved": _counted(observations.unobserved),
        "unknown": _counted(observations.unknown),
        "without_attention": observations.without_attention,
        "alarms": [plain_values(alarm.to_dict(), repr) for alarm in observations.alarms],
        "left_out": left_out,
    }
    with whole_file(Path(path)) as temporary:
        save_file(tensors, temporary, metadata={FORMAT: json.dumps(contents, allow_nan=False)})
    return left_out


def read(source: Path, observations: CallObservations) -> None:
    """Read a file written by `write` into `observations`, which must be empty; errors as in `load`."""
    import safetensors

    if not source.is_file():
        raise FileNotFoundError(f"{source}: no such file (expected one that saccade.watch(...).save wrote)")
    try:
        with safetensors.safe_open(source, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it has no iterator
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{source}: damaged, or no safetensors file ({error})") from None
    if FORMAT not in header:
        raise ValueError(f"{source}: a safetensors file, but not one that saccade.watch(...).save wrote")
    try:
        contents = parsed_json(header[FORMAT])
        version = contents["version"]
        if version == VERSION:
            _read(contents, tensors, observations)
            return
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"{source}: damaged, its header does not fit its tensors ({error!r})") from None
    raise ValueError(f"{source}: written in version {version} of the format, this Saccade reads {VERSION}")


def _stored_place(number: int, place: SiteObservations, tensors: Tensors, left_out: dict[str, str]) -> dict[str, Any]:
    prefix = f"{number}"
    for kind, running in place.running.items():
        held = (running.count, running.mean, running.squares, running.least, running.most)
        tensors[f"{prefix}.{kind}"] = torch.stack([part.cpu().double() for part in held])
    kept: dict[str, Tensor] = {}
    stored = None
    if place.kept is not None:
        try:
            stored = _stored_call(place.kept, f"{prefix}.kept", kept)
            tensors.update(kept)
        except UnstorableMask as reason:
            left_out[place.site.name] = str(reason)
    return {
        "site": asdict(place.site),
        "heads": list(place.heads),
        "of_all": place.of_all,
        "statistics": {kind: list(running.names) for kind, running in place.running.items()},
        "kept": stored,
    }


def _stored_call(call: KeptCall, prefix: str, tensors: Tensors) -> dict[str, Any]:
    for name in ("query", "key", "lse", "sink", "value", "out"):
        tensor = getattr(call, name)
        if tensor is not None:
            tensors[f"{prefix}.{name}"] = tensor.cpu().contiguous()
    sizes = (*call.query.shape[:3], call.key.shape[2])
    return {
        "step": call.step,
        "mask": stored_mask(call.mask, f"{prefix}.mask", sizes, tensors),
        "bias": stored_bias(call.bias, f"{prefix}.bias", tensors),
        "scale": call.scale,
        "softcap": call.softcap,
    }


def _counted(table: Mapping[str, Unobserved]) -> dict[str, list[Any]]:
    return {name: [entry.count, entry.reason] for name, entry in table.items()}


def _read_counted(stored: Mapping[str, Any]) -> dict[str, Unobserved]:
    return {name: Unobserved(int(count), str(why)) for name, (count, why) in stored.items()}


def _read(contents: Mapping[str, Any], tensors: Tensors, observations: CallObservations) -> None:
    observations.steps, observations.observed = int(contents["steps"]), int(contents["observed"])
    observations.passed_over = int(contents.get("passed_over", 0))
    observations.unobserved = _read_counted(contents["unobserved"])
    observations.unknown = _read_counted(contents.get("unknown", {}))
    without = contents.get("without_attention", {})
    observations._without_attention = {str(path): str(kind) for path, kind in without.items()}
    sentences(observations._without_attention)  # ValueError unless each path ends in the number of a layer
    observations._alarms = [Alarm.from_dict(_numbers(values)) for values in contents["alarms"]]
    for number, stored in enumerate(contents["places"]):
        place = _read_place(stored, str(number), tensors)
        observations._known[place.site.name] = place


def _read_place(stored: Mapping[str, Any], prefix: str, tensors: Tensors) -> SiteObservations:
    place = SiteObservations(CallSite(**stored["site"]), tuple(stored["heads"]), int(stored["of_all"]))
    for kind, names in stored["statistics"].items():
        held = tensors[f"{prefix}.{kind}"]
        if held.shape != (5, len(names), len(place.heads)):
            raise ValueError(f"{prefix}.{kind} has shape {tuple(held.shape)}")
        place.running[kind] = RunningSums(tuple(names), *held.unbind())
    if stored["kept"] is not None:
        place.kept = _read_call(stored["kept"], f"{prefix}.kept", tensors)
    return place


def _read_call(stored: Mapping[str, Any], prefix: str, tensors: Tensors) -> KeptCall:
    return KeptCall(
        int(stored["step"]),
        tensors[f"{prefix}.query"],
        tensors[f"{prefix}.key"],
        tensors[f"{prefix}.lse"],
        read_mask(stored["mask"], tensors),
        read_bias(stored["bias"], tensors),
        stored["scale"],
        stored["softcap"],
        tensors.get(f"{prefix}.sink"),
        tensors.get(f"{prefix}.value"),
        tensors.get(f"{prefix}.out"),
    )


# JSON has no NaN and no infinity, but an alarm may hold them.


def _numbers(value: Any) -> Any:
    """The inverse of `plain_values` for the two number tables of an alarm."""
    tables = {key: {name: float(x) for name, x in value[key].items()} for key in ("numbers", "limits")}
    return {**value, **tables}
