"""Linear layers with weights of 4 or 8 bits by groups of a row, on CPUs: x W^T + b.

A weight is scale (q - offset) - minimum, with whole numbers q from 0 and a scale and a minimum for each group of 32 or
16 entries of a row: those that "int4" finds, or those of a checkpoint. Activations become bytes with scales for the
same groups, or for 128 entries, as they come. Products of a group are summed in int32, exactly (`native/groups.h`).

Shape legend: ... any axes, E width, F features, G groups of E, N numbers of the scales of a row, P panels of F.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._backends.native import _kernels
from ._int8 import PANEL, multiply_rounded

_WHOLE = 32  # the width is held up to a multiple of it


class GroupForm(NamedTuple):
    """How a weight is held: scale (q - offset) - minimum.

    Attributes:
        bits: of q, 4 or 8.
        group: entries with one scale, 32 or 16.
        span: groups that share a number of the scales, a power of two.
        offset: the q of 0, where there is no minimum.
        dtype: of the numbers, float16 or bfloat16.
        steps: whether a scale is its number times a whole number of the group's own.
        minima: whether minima have numbers of their own, as many as the scales.
        zeros: whether a minimum is its number, or that of the scale, times a whole number of the group's own.
        bytes: whether steps are above 0 and q step - zero lies between -128 and 127, for 128 entries with one number:
            these are multiplied as bytes of one scale, and so are the activations.
    """

    bits: int = 8
    group: int = 32
    span: int = 1
    offset: int = 0
    dtype: torch.dtype = torch.float16
    steps: bool = False
    minima: bool = False
    zeros: bool = False
    bytes: bool = False

    @property
    def code(self) -> int:
        """The same as a number, which `GroupForm` in native/call.h reads."""
        return _code(self)

    def rows(self, width: int) -> tuple[int, ...]:
        """Rows of 64 half-precision numbers that a panel holds: scales, minima, steps, zeros."""
        groups = -(-width // self.group)
        units, pairs = -(-groups // self.span), -(-groups // 2)
        return units, units * self.minima, pairs * self.steps, pairs * self.zeros


@functools.cache
def _code(form: GroupForm) -> int:
    flags = (form.dtype == torch.float16, form.steps, form.minima, form.zeros, form.bytes)
    code = form.bits | form.group << 4 | (form.span.bit_length() - 1) << 10 | form.offset << 16
    return code | sum(flag << 24 + n for n, flag in enumerate(flags))


class GroupedWeight(NamedTuple):
    """A weight W (F, E) in groups, in the order in which the kernel reads.

    `packed` (P, E / 4, 64, 4), or (P, E / 8, 64, 4) with two q in a byte, holds q, uint8; `scales` (P, rows, 64) the
    bits of scales and minima, int16. `order` (E,), or None, are the columns of W in the order in which they are held.
    """

    packed: Tensor
    scales: Tensor
    order: Tensor | None
    features: int
    width: int
    form: GroupForm

    def put(self, first: int, q: Tensor, scales: Tensor, **parts: Tensor) -> None:
        """Fill in rows of W.

        Args:
            first: of the rows, a multiple of 64.
            q: (rows, E), uint8.
            scales: (rows, N), in the form's dtype.
            parts: as far as the form has them: `steps` and `zeros` (rows, G), int8, and `minima` as `scales`.
        """
        some = slice(first // PANEL, first // PANEL + -(-len(q) // PANEL))
        q = F.pad(q, (0, -self.width % _WHOLE, 0, -len(q) % PANEL)).unflatten(0, (-1, PANEL))  # (P, 64, E)
        if self.form.bits == 4:
            halves = q.unflatten(2, (-1, 2, 4))
            self.packed[some] = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).transpose(1, 2)
        else:
            self.packed[some] = q.unflatten(2, (-1, 4)).transpose(1, 2)
        rows = [scales, *(parts[name] for name in ("minima", "steps", "zeros") if name in parts)]
        self.scales[some] = torch.cat([_by_panels(part) for part in rows], 1)

    def integers(self) -> Tensor:
        """q (F, E), uint8, in the order in which columns are held."""
        if self.form.bits == 4:
            q = torch.stack((self.packed & 15, self.packed >> 4), 2).permute(0, 3, 1, 2, 4)
        else:
            q = self.packed.transpose(1, 2)
        return q.flatten(0, 1).flatten(1)[: self.features, : self.width]

    def dense(self) -> Tensor:
        """The weight that the products are with (F, E), float32."""
        form, parts = self.form, self.scales.split(self.form.rows(self.width), 1)
        numbers = [part.view(form.dtype).transpose(1, 2).flatten(0, 1).float() for part in parts[:2]]
        whole = [part.view(torch.int8).unflatten(2, (2, -1)) if part.numel() else part for part in parts[2:]]
        steps, zeros = (
            part.flatten(1, 2).transpose(1, 2).flatten(0, 1).float() if part.numel() else None for part in whole
        )
        scales = self._by_entry(numbers[0], steps)
        weight = scales.mul_(self.integers().to(torch.int16).sub_(form.offset))
        if form.minima or form.zeros:
            weight.sub_(self._by_entry(numbers[1] if form.minima else numbers[0], zeros))
        return self._ordered(weight)

    def _by_entry(self, numbers: Tensor, times: Tensor | None) -> Tensor:
        """(F, N), times (F, G), as (F, E)."""
        each = numbers[: self.features].repeat_interleave(self.form.span, 1)
        if times is not None:
            each = each[:, : times.shape[1]] * times[: self.features, : each.shape[1]]
        return each.repeat_interleave(self.form.group, 1)[:, : self.width].contiguous()

    def _ordered(self, weight: Tensor) -> Tensor:
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def multiply(self, x: Tensor, bias: Tensor | None, at_once: int = 64) -> Tensor:
        """x (..., E), float32 or bfloat16, to x W^T + b (..., F) of its dtype, as `multiply_rounded`."""
        if self.order is not None:
            return self._replace(order=None).multiply(x.index_select(-1, self.order), bias, at_once)
        return multiply_rounded(_kernels.module.group_product, x, self, bias, at_once, self.form.code)


def _by_panels(part: Tensor) -> Tensor:
    """Numbers (rows, N), or bytes (rows, G), as (P, N, 64) of 16 bits."""
    part = F.pad(part.view(torch.int16) if part.is_floating_point() else part, (0, 0, 0, -len(part) % PANEL))
    if part.dtype != torch.int8:
        return part.unflatten(0, (-1, PANEL)).transpose(1, 2)
    pairs = F.pad(part, (0, part.shape[1] % 2)).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    return pairs.view(torch.int16).unflatten(1, (-1, 2)).flatten(2)


def empty_groups(features: int, width: int, form: GroupForm, order: Tensor | None = None) -> GroupedWeight:
    """A weight W (F, E) whose rows are put in afterwards."""
    panels = -(-features // PANEL)
    packed = torch.empty(panels, -(-width // _WHOLE) * _WHOLE * form.bits // 32, PANEL, 4, dtype=torch.uint8)
    scales = torch.empty(panels, sum(form.rows(width)), PANEL, dtype=torch.int16)
    return GroupedWeight(packed, scales, order, features, width, form)


def joined(weights: Sequence[GroupedWeight | None]) -> GroupedWeight | None:
    """Weights of the same x as one, their rows one after the other; None: one is missing or held in another way."""
    there = [weight for weight in weights if weight is not None]
    if not there or len(there) < len(weights):
        return None
    first, orders = there[0], [weight.order for weight in there]
    alike = all(weight.form == first.form and weight.width == first.width for weight in there)
    if not alike or any(weight.features % PANEL for weight in there[:-1]):
        return None
    if any((order is None) != (first.order is None) for order in orders) or (
        first.order is not None and not all(torch.equal(first.order, order) for order in orders if order is not None)
    ):
        return None
    packed, scales = torch.cat([weight.packed for weight in there]), torch.cat([weight.scales for weight in there])
    return first._replace(packed=packed, scales=scales, features=sum(weight.features for weight in there))
