"""One attention call in the contract's terms, and the values derived from it.

`AttentionCall` is what `saccade.attention` takes, whoever computes it; `CheckedCall` is what every backend receives,
and `ObservedCall` what observers receive.

Shape legend, everywhere: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D key width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._biases import Bias, Placement
from ._dropout import Dropout
from ._masks import Mask, Padding, as_mask
from ._masks._placement import At, Slice


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of one attention call. Do not change them.

    Example:
        >>> import torch, saccade
        >>> from saccade.integrations.transformers import AttentionCall
        >>> query, key, value = torch.randn(3, 1, 2, 5, 8)
        >>> call = AttentionCall(query, key, value, mask=saccade.Causal())
        >>> out = saccade.attention(call.query, call.key, call.value, **call.arguments())
        >>> out.shape
        torch.Size([1, 2, 5, 8])
    """

    query: Tensor  # (B, Hq, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    mask: Mask | Tensor | None = None
    bias: Tensor | Bias | None = None
    scale: float | None = None
    softcap: float | None = None
    sink: Tensor | None = None  # (Hq,)
    dropout: float | Dropout | None = 0.0
    real: Tensor | None = None  # (B, Lq) bool: query rows that are tokens, not padding; None: all, or not known

    def arguments(self) -> dict[str, Any]:
        """Mask, bias, scale, softcap, sink and dropout by name, as `saccade.attention` takes them."""
        return {**self.scoring(), "dropout": self.dropout or 0.0}

    def scoring(self) -> dict[str, Any]:
        """Mask, bias, scale, softcap and sink by name: the arguments that, with query and key, decide the weights."""
        return {
            "mask": self.mask,
            "bias": self.bias,
            "scale": self.scale,
            "softcap": self.softcap,
            "sink": self.sink,
        }

    def scores_like(self, other: AttentionCall) -> bool:
        """Whether both make weights of queries and keys in the same way: by the very same values."""
        return all(one is two for one, two in zip(self.scoring().values(), other.scoring().values(), strict=True))

    @property
    def counted_mask(self) -> Mask | None:
        """The mask with padded queries as empty rows: what statistics count."""
        mask = as_mask(self.mask)
        if self.real is None or bool(self.real.all()):
            return mask
        keys = self.real.new_full((self.key.shape[0],), self.key.shape[2], dtype=torch.int64)
        rows = Padding(keys, queries=self.real)
        return rows if mask is None else mask & rows

    def observed(self, out: Tensor, source: str, module: Any = None, **more: Any) -> ObservedCall:
        """The call with its results, and `more` fields of `ObservedCall`, or better values for the call's own."""
        own = {name: getattr(self, name) for name in _ARGUMENTS}
        return ObservedCall(**{**own, **more}, out=out, source=source, module=module)


_ARGUMENTS = tuple(field.name for field in fields(AttentionCall))


class GraphTensor(NamedTuple):
    """A tensor of the model's own graph, and how its gradient becomes that of the call's (B, H, L, D) tensor."""

    tensor: Tensor
    seen_as: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class ObservedCall(AttentionCall):
    """A call and its results. Its tensors may be views of the model's."""

    out: Tensor  # (B, Hq, Lq, Dv)
    source: str  # what was called: "saccade.attention", "F.scaled_dot_product_attention", ...
    module: Any = None  # the nn.Module that called, where the source says so
    rows_unknown: bool = False  # keys are padded, and nobody knows whether queries are the same tokens
    used: dict[str, GraphTensor] | None = None  # "query", "key", "value", "out"; None: the call's own tensors

    def graph_tensors(self) -> dict[str, GraphTensor]:
        """The tensors that gradients flow through, by "query", "key", "value", "out"."""
        return self.used or {name: GraphTensor(getattr(self, name)) for name in ("query", "key", "value", "out")}


S = TypeVar("S", bound="CallSettings")


@dataclass(frozen=True)
class CallSettings:
    """The arguments of a call other than tensors. An autograd graph keeps it: it has the form of a bias, not its
    parameter."""

    mask: Mask | None
    bias: Bias | None
    placement: Placement  # of the bias
    scale: float
    softcap: float | None
    dropout: Dropout | None


@dataclass(frozen=True, eq=False)
class CheckedCall(AttentionCall):
    """A call whose arguments keep the contract, each in one form."""

    mask: Mask | None = None
    bias: Bias | None = None
    scale: float = 1.0
    dropout: Dropout | None = None
    needs_lse: bool = False
    score: str | None = None  # what a `Score` became in this call, for `explain`

    def settings(self, kind: Callable[..., S], *more: Any) -> S:
        """A `CallSettings`, or a derived class with `more` fields."""
        bias, placement = (None, 0) if self.bias is None else (self.bias._form(), self.placement)
        return kind(self.mask, bias, placement, self.scale, self.softcap, self.dropout, *more)

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def length_q(self) -> int:
        return self.query.shape[2]

    @property
    def length_k(self) -> int:
        return self.key.shape[2]

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator_of(self.query)

    @property
    def origin(self) -> tuple[int, int, int]:
        """Row, key and head of the whole problem at which this call begins: dropout counts from there."""
        row, key = (0, 0) if self.mask is None else self.mask._origin()
        return row, key, 0 if self.dropout is None else self.dropout._first_head

    @property
    def placement(self) -> Placement:
        """The offset of query rows: row i of this call is at key index `i + placement`, an int or one per item (B,).

        This is for biases: their own placement, else the mask's, else bottom-right.
        """
        if self.bias is not None and self.bias.offset is not None:
            return self.bias.offset
        return standing(self.mask, self.length_k - self.length_q, self.device)

    @property
    def transformed(self) -> bool:
        """Whether forward-mode tangents or a torch.func transform are at work, which fused kernels do not know."""
        if torch._C._are_functorch_transforms_active():
            return True
        # Outside of every dual level no tensor has a tangent: no need to ask each one, on each call.
        return forward_ad._current_level >= 0 and any(
            forward_ad.unpack_dual(tensor).tangent is not None for tensor in self.tensors()
        )

    def tensors(self) -> list[Tensor]:
        """Every tensor that may carry a derivative."""
        given = [self.query, self.key, self.value, self.sink, None if self.bias is None else self.bias.parameter]
        return [tensor for tensor in given if tensor is not None]


def accumulator_of(query: Tensor) -> torch.dtype:
    """The dtype in which sums are formed."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast switched off; torch.autocast itself raises an error on devices without it, such as `meta`."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def standing(mask: Mask | None, unplaced: int | None, device: torch.device) -> Placement:
    """The placement of the queries: row i is at key index `i + result`, by the mask or, if the mask has no placement,
    `unplaced`."""
    found = _stands_at(mask, unplaced, device)
    if found is None:
        raise ValueError(
            "bias: the mask is a slice without the positions of its queries; "
            "pass mask.slice(..., lengths=(Lq, Lk)), or place the bias with bias.at(offset)"
        )
    return found


def _stands_at(mask: Mask | None, unplaced: int | None, device: torch.device) -> Placement | None:
    if isinstance(mask, At):
        if isinstance(mask.offset, int):
            return mask.offset
        alone = mask.offset.shape == (1,) and not torch.compiler.is_compiling()
        return int(mask.offset.host[0]) if alone else mask.offset.on(device)
    if isinstance(mask, Slice):
        whole = None if mask.lengths is None else mask.lengths[1] - mask.lengths[0]
        inner = _stands_at(mask.part, whole, device)
        return None if inner is None else mask.rows[0] - mask.keys[0] + inner
    # Parts that are placed are placed alike, combining others is refused; some slices do not say where.
    placed = [] if mask is None else [part for part in mask._children() if part.placement() not in (None, "open")]
    answers = (_stands_at(part, unplaced, device) for part in placed)
    return next((answer for answer in answers if answer is not None), None) if placed else unplaced


def sink_lse(lse: Tensor, sink: Tensor | None) -> Tensor:
    """The lse (B, Hq, Lq) once the sink (Hq,) has joined the denominator; an empty row's is the sink itself."""
    if sink is None:
        return lse
    sink = sink.to(lse.dtype)[None, :, None]
    empty = lse == float("-inf")
    # No -inf - -inf is ever formed, in value or derivative, whatever the sink is.
    return torch.where(empty, sink, torch.logaddexp(torch.where(empty, 0.0, lse), sink))


def share_of_keys(lse: Tensor, whole: Tensor) -> Tensor:
    """The keys' share of a denominator with a sink: exp(lse - whole), 1 on empty rows."""
    empty = lse == float("-inf")
    return torch.exp(torch.where(empty, 0.0, lse) - torch.where(empty, 0.0, whole))


def add_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Give the sink its share of the denominator: it is one more part to merge, with output 0 and lse `sink`.

    Args:
        out: (B, Hq, Lq, Dv) without the sink, accumulator dtype.
        lse: (B, Hq, Lq), -inf on empty rows.
        sink: (Hq,) or None.
    """
    if sink is None:
        return out, lse
    whole = sink_lse(lse, sink)
    empty, share = lse == float("-inf"), share_of_keys(lse, whole)
    # An empty row's output is 0 whatever the sink: its cotangent, perhaps a padded query's NaN, must not reach it.
    return torch.where(empty[..., None], 0.0, out * share[..., None]), whole
