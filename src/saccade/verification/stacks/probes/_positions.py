"""Positions: only differences count where the model says so, and the configured scaling is in force.

Shape legend: R rows, L length, V width of an output, D head width.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...findings._finding import Finding, Inapplicable, TargetError
from .._bounds import Difference, Measure
from .._documents import Documents, drawn, ids_of, located
from .._layer_rules import configuration, rope_settings, rows_share_frequencies_until
from .._probe import Probe
from .._shrink import smallest
from .._stack import Stack

_LENGTH = 13
_SHIFT = 5
_ROUNDED = 2.0**-20  # relative: frequencies in float32 are this near, those in half precision are not


def _run(stack: Stack, measure: Measure) -> Iterator[Finding]:
    tables = _frequencies(stack)
    document = drawn(stack.vocabulary, [stack.length(_LENGTH)])[0]
    takes = _takes_positions(stack, document)
    if not takes and not tables:
        raise Inapplicable("it takes no position_ids, and has no table of rotary frequencies")
    yield from _scaling(tables)
    if takes:
        yield from _given(stack, measure, document)
        if tables and not _has_absolute(stack):
            yield from _shifted(stack, measure, document)


# position_ids


def _takes_positions(stack: Stack, document: list[int]) -> bool:
    """Whether position_ids can be given beside what the batch has."""
    function = stack.model.forward if isinstance(stack.model, nn.Module) else getattr(stack.module, "forward", None)
    inputs = stack.batch([document])
    if function is None or not isinstance(inputs, Mapping) or "decoder_input_ids" in inputs:
        return False
    return "position_ids" in inspect.signature(function).parameters


def _positioned(stack: Stack, document: list[int], start: int) -> Tensor | None:
    """(L, V): the output with positions from `start`; None where these positions raise."""
    inputs = stack.batch([document])
    [place] = located(inputs, [document])
    columns = torch.arange(ids_of(inputs).shape[1])
    positions = (columns - place.start + start).clamp(min=0).expand(ids_of(inputs).shape)
    try:
        return stack.run({**inputs, "position_ids": positions})[place.row, place.columns]
    except TargetError:
        return None


def _compared(measure: Measure, out: Tensor | None, reference: Tensor | None) -> Difference | None:
    return None if out is None or reference is None else measure.compare(out, reference)


def _given(stack: Stack, measure: Measure, document: list[int]) -> Iterator[Finding]:
    """The positions 0, 1, 2, ... given are those that the model counts itself."""

    def apart(documents: Documents) -> Difference | None:
        return _compared(measure, _positioned(stack, documents[0], 0), stack.outputs(documents)[0])

    if (before := apart([document])) is None or _counts_from(stack, measure, document) is not None:
        return
    documents, difference = smallest([document], apart, before)
    yield PROBE.error(
        f"position_ids of 0, 1, 2, ... give other outputs than none, by {difference.size:.3g} at output "
        f"{difference.position}: the model counts positions another way than it reads them",
        "A packed or padded row, which gives position_ids, is read at other positions than a single document.",
        "position_ids = torch.arange(length)  # where none are given",
        documents,
        difference,
        where="position_ids",
    )


def _counts_from(stack: Stack, measure: Measure, document: list[int]) -> int | None:
    """The position that the model begins with by itself, where it is not 0."""
    [plain] = stack.outputs([document])
    for start in (1, 2, 3):
        out = _positioned(stack, document, start)
        if out is not None and measure.compare(out, plain) is None:
            return start
    return None


def _shifted(stack: Stack, measure: Measure, document: list[int]) -> Iterator[Finding]:
    """A finding where a shift of all rotary positions changes outputs."""

    def apart(documents: Documents) -> Difference | None:
        # Angles are in float32. From 1 on, as some recurrent layers reset their state at position 0.
        loose = replace(measure, bound=max(measure.bound, 1e-3))
        return _compared(loose, _positioned(stack, documents[0], 1 + _SHIFT), _positioned(stack, documents[0], 1))

    if (before := apart([document])) is None or rows_share_frequencies_until(stack) is not None:
        return
    documents, difference = smallest([document], apart, before)
    yield PROBE.error(
        f"With all position_ids {_SHIFT} larger output {difference.position} differs by {difference.size:.3g}, though "
        "rotary positions count by their differences alone",
        "A document is not the same at another place of a pack or behind padding, and longer contexts fail.",
        "query, key = rotate(query, positions), rotate(key, positions)  # both, by the same angles",
        documents,
        difference,
        where="position_ids",
    )


def _has_absolute(stack: Stack) -> bool:
    """Whether a table of positions is added, or its values change with the position by itself."""
    config = configuration(stack)
    named = ("attn_temperature_tuning", "attn_scale", "llama_4_scaling_beta")
    rope = getattr(config, "rope_parameters", None) or {}
    if any(getattr(config, name, None) for name in named) or any("scaling_beta" in str(name) for name in rope):
        return True
    return any(
        isinstance(part, nn.Embedding) and ("pos" in name.lower() or name.endswith("wpe"))
        for module in stack.modules
        for name, part in module.named_modules()
    )


# Rotary frequencies


class Frequencies(NamedTuple):
    """A buffer of rotary frequencies, and the configuration of the module that has it."""

    values: Tensor  # (D / 2,)
    config: Any


def _frequencies(stack: Stack) -> dict[str, Frequencies]:
    """The buffers of rotary frequencies, by name."""
    return {
        f"{path}.{name}".lstrip("."): Frequencies(buffer, getattr(part, "config", None))
        for module in stack.modules
        for path, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq") and buffer.dim() == 1
    }


def _scaling(tables: Mapping[str, Frequencies]) -> Iterator[Finding]:
    """The frequencies in use are those of the configuration."""
    for name, (table, config) in tables.items():
        settings = rope_settings(config)
        kind = next((kind for kind in settings if kind and kind in name.rpartition(".")[2]), "")
        if kind not in settings:
            continue
        rope_type, rope = settings[kind]
        wanted = _wanted(rope_type, rope, config, len(table))
        if wanted is None:
            continue
        apart = float(((table.double().cpu() - wanted) / wanted).abs().max())
        if apart > _ROUNDED:
            yield _as_finding(name, apart, rope_type, rope)
            return


def _as_finding(name: str, apart: float, rope_type: str, rope: Mapping[str, Any]) -> Finding:
    rounded = apart < 2.0**-7
    why = "they are rounded to half precision" if rounded else f"the scaling {rope_type!r} is not in force"
    finding = PROBE.error(
        f"Rotary frequencies {name} differ from those of the configuration by {apart:.2g} of their size: {why}",
        f"At position {math.ceil(1 / apart)} the fastest angles are wrong by about 1 radian: distant tokens are read "
        "at other distances than in training.",
        "Keep the buffer in float32: model.to(dtype) casts it"
        if rounded
        else "Give rope_parameters when the model is made; changed afterwards, they do not reach its buffers",
        [],
        where=name,
        relative=apart,
        settings=dict(rope),
    )
    return replace(finding, severity="warning") if rounded else finding


def _wanted(rope_type: str, rope: Mapping[str, Any], config: Any, count: int) -> Tensor | None:
    """Frequencies (count,) by their published formulas; None for a type without one here."""
    base = rope.get("rope_theta", getattr(config, "rope_theta", None))
    factor = rope.get("factor", 1.0)
    if not isinstance(base, (int, float)) or not isinstance(factor, (int, float)):
        return None
    plain = base ** -(torch.arange(count, dtype=torch.float64) / count)
    if rope_type == "default":
        return plain
    if rope_type == "linear":
        return plain / factor
    if rope_type == "llama3":
        return _llama3(plain, rope)
    return None


def _llama3(plain: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Long waves are stretched by the factor, short ones stay, and those between are blended (Llama 3.1)."""
    factor, low, high, old = (
        float(rope[name])
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    turns = old * plain / (2 * math.pi)  # within the old context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain


PROBE = Probe("positions", "Only differences of rotary positions count, and the configured scaling is in force.", _run)
