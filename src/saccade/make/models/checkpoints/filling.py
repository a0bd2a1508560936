"""Fills a model's parameters with stored tensors, as a `KeyPlan` says."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from ....operator.nn._rounded import Rounding
from .keys import KeyPlan, Piece
from .reading import StoredWeights


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
