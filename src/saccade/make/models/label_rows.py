"""Labels of a classifier's head: which rows of the stored head are kept, reordered or initialised anew."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .checkpoints.settings import CheckpointSettings


def label_names(labels: int | Sequence[str]) -> list[str]:
    """The names of labels, "LABEL_0" and so on for a number. ValueError for none, or for one text."""
    if isinstance(labels, str):
        raise ValueError(f"labels: expected their number, or a list of names, got {labels!r}")
    names = [f"LABEL_{n}" for n in range(labels)] if isinstance(labels, int) else list(labels)
    if not names:
        raise ValueError("labels: expected at least one")
    return names


def label_rows(settings: CheckpointSettings, names: Sequence[str]) -> tuple[int, ...] | None:
    """The value of `Request.rows`. Generic stored names ("LABEL_0") match any labels."""
    named = settings.get("id2label")
    before = [str(named.get(str(n))) for n in range(len(named))] if isinstance(named, dict) else []
    numbered = any(re.fullmatch(r"LABEL_\d+", name) for name in (*before, *names))
    if numbered or before == list(names) or len(before) != len(names):
        return None
    return tuple(before.index(name) for name in names) if {*before} == {*names} else ()


def label_axes(tensors: Mapping[str, Tensor], wider: Mapping[str, Tensor]) -> dict[str, int]:
    """Tensors with an axis of labels, and the index of that axis, from the same model with one more label."""
    pairs = ((name, tensor.shape, wider[name].shape) for name, tensor in tensors.items())
    return {
        name: next(axis for axis in range(len(shape)) if shape[axis] != other[axis])
        for name, shape, other in pairs
        if shape != other
    }


@torch.no_grad()
def reorder(tensors: Mapping[str, Tensor], axes: Mapping[str, int], rows: Sequence[int]) -> None:
    """Reorder the rows of a stored head by label, in each of GAT's concatenated heads."""
    for name, axis in axes.items():
        labels = tensors[name].unflatten(axis, (-1, len(rows)))
        labels.copy_(labels.index_select(axis + 1, torch.tensor(rows, device=labels.device)))
