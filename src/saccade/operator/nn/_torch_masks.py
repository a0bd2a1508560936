"""Converts the masks of PyTorch's modules to masks of Saccade.

Shape legend: B batch, H heads, L / S lengths of queries and keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._masks import Causal, FromTensor, Mask, Padding


class TranslatedMasks(NamedTuple):
    """A mask and additive scores, for `saccade.attention` and `saccade.nn`; `masks_from_torch` returns it.

    Attributes:
        mask: who sees whom, True = attend; None shows everything.
        bias: added to the logits; None adds nothing.

    Example:
        >>> import torch, saccade
        >>> mask, bias = saccade.nn.masks_from_torch(key_padding_mask=torch.tensor([[False, False, True]]))
        >>> mask, bias
        (Padding([[True, True, False]]), None)
    """

    mask: Mask | None
    bias: Tensor | None


def masks_from_torch(
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, *, heads: int | None = None
) -> TranslatedMasks:
    """PyTorch's `attn_mask` and `key_padding_mask`, in which True means *ignore*, as a mask and a bias.

    Booleans are inverted. Floating-point masks of 0 and -inf, as `nn.Transformer.generate_square_subsequent_mask`
    makes them, become masks too; others are additive scores and become the bias. A square mask of a causal model
    becomes `Causal()`, so that its upper half costs nothing.

    Args:
        attn_mask: (L, S), or (B H, L, S); bool, True = ignore, or floating point, added to the logits.
        key_padding_mask: (B, S); the same.
        heads: H, for a mask of three axes.

    Raises:
        TypeError: a mask that is neither bool nor floating point.
        ValueError: other ranks (unbatched ones too), three axes without `heads`.

    Example:
        >>> import torch, saccade
        >>> saccade.nn.masks_from_torch(torch.nn.Transformer.generate_square_subsequent_mask(4))
        TranslatedMasks(mask=Causal(), bias=None)
    """
    masks: list[Mask] = []
    biases: list[Tensor] = []
    for name, given in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if given is None:
            continue
        allowed, scores = _booleans_or_scores(name, given)
        if allowed is not None:
            masks.append(Padding(allowed) if name == "key_padding_mask" else _as_mask(allowed, heads))
        if scores is not None:
            biases.append(scores[:, None, None] if name == "key_padding_mask" else _with_head_axis(scores, heads))
    mask = None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]
    return TranslatedMasks(mask, None if not biases else sum(biases[1:], biases[0]))


def _booleans_or_scores(name: str, given: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(True = attend, None) or (None, scores)."""
    ranks = (2,) if name == "key_padding_mask" else (2, 3)
    if given.dim() not in ranks:
        shapes = "(B, S)" if name == "key_padding_mask" else "(L, S) or (B H, L, S)"
        raise ValueError(f"{name}: expected shape {shapes}, got {tuple(given.shape)}")
    if given.dtype == torch.bool:
        return ~given, None
    if not given.is_floating_point():
        raise TypeError(f"{name}: expected bool (True = ignore) or floating point (added), got {given.dtype}")
    hidden = given == float("-inf")
    return (~hidden, None) if bool((hidden | (given == 0)).all()) and not given.requires_grad else (None, given)


def _as_mask(allowed: Tensor, heads: int | None) -> Mask:
    if (
        allowed.dim() == 2
        and allowed.shape[0] == allowed.shape[1]
        and torch.equal(allowed, torch.ones_like(allowed).tril())
    ):
        return Causal()
    return FromTensor(_with_head_axis(allowed, heads))


def _with_head_axis(tensor: Tensor, heads: int | None) -> Tensor:
    """(L, S) unchanged; (B H, L, S) as (B, H, L, S)."""
    if tensor.dim() == 2:
        return tensor
    if heads is None or heads < 1 or tensor.shape[0] % heads:
        raise ValueError(
            f"heads: a mask of shape {tuple(tensor.shape)} is (B H, L, S), so heads must be given and divide "
            f"{tensor.shape[0]}; got {heads}"
        )
    return tensor.unflatten(0, (-1, heads))
