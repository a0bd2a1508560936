"""Fills a model's parameters with stored tensors, as a `KeyPlan` says; rows of a head are kept by label."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ....operator.nn._rounded import Rounding
from .keys import KeyPlan, Piece
from .reading import StoredWeights
from .settings import CheckpointSettings


def coarser(wanted: KeyPlan, stored: StoredWeights, model: nn.Module) -> tuple[str, ...]:
    """The stored tensors with a finer dtype than the parameters or buffers they fill."""
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    pairs = ((piece.published, stored.tensors[piece.published].dtype, dtypes[piece.ours]) for piece in wanted.pieces)
    return tuple(dict.fromkeys(name for name, fine, held in pairs if torch.promote_types(fine, held) != held))


@torch.no_grad()
def fill(model: nn.Module, wanted: KeyPlan, stored: StoredWeights, rounding: Rounding | None, *, std: float) -> None:
    """Fill all parameters; new ones are random.

    Args:
        rounding: of this model's linear layers, each as soon as its weight is filled; None leaves them as they are.
        std: of new matrices.

    Raises:
        ValueError: a tensor of whole numbers in place of floats, tied tensors that differ, weights that cannot be
            rounded.
    """
    targets = model.state_dict(keep_vars=True)
    places: dict[str, list[Piece]] = {}
    for piece in wanted.pieces:
        places.setdefault(piece.published, []).append(piece)
    left = Counter(piece.ours for piece in wanted.pieces)
    tied = dict(wanted.tied)
    compared = {piece.ours for first in tied.values() for piece in places[first]}
    for name, start, tensor in stored.read_parts(list(places)):
        last = not tensor.ndim or start + len(tensor) == stored.tensors[name].shape[0]
        for piece in places[name]:
            held = piece.of(targets[piece.ours])
            if held.is_floating_point() and not tensor.is_floating_point():
                raise ValueError(f"{stored.tensors[name].file}: {name}: expected floats, got {tensor.dtype}")
            (held.narrow(0, start, len(tensor)) if tensor.ndim else held).copy_(tensor)
            left[piece.ours] -= last
            if rounding is not None and not left[piece.ours] and piece.ours not in compared:
                del held, targets[piece.ours]  # frees the floats
                rounding.round(piece.ours)
    for name, tensor in stored.read(list(tied)):
        for piece in places[tied[name]]:
            held = piece.of(targets[piece.ours])
            if not torch.equal(held, tensor.to(held)):
                raise ValueError(
                    f"{stored.tensors[name].file.parent}: {name} and {tied[name]} are tied by the configuration "
                    "(tie_word_embeddings) or the family, but differ in the files"
                )
    for name in wanted.new:
        draw(targets[name], std, name)
    if rounding is not None:
        rounding.round_all()


def draw(tensor: Tensor, std: float, name: str) -> None:
    """Initialise a new head as the families do: matrices normal, biases 0."""
    if tensor.ndim > 1:
        nn.init.normal_(tensor, std=std)
    else:
        nn.init.constant_(tensor, 1.0 if name.endswith("norm.weight") else 0.0)


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
