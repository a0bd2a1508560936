"""Edits that need no other run: ablation, scale, mask, bias, and any function of the weights.

    out_i = sum_j w_ij v_j      w_i = softmax_j(softcap(scale * q_i.k_j) + bias_ij) over the keys the mask shows

Shape legend: B batch, Hq / Hkv query and key-value heads, n chosen heads, Lq / Lk lengths, D / Dv widths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...operator._biases import ALiBi, Bias, Span, TensorBias, as_bias
from ...operator._call import AttentionCall, _stands_at
from ...operator._checks import make_call
from ...operator._masks import Mask, Padding, as_mask
from ...operator._masks._algebra import And
from ...operator._masks._data import describe, whole
from ...operator._scores._score import ModifiedScores, Score
from ._edit import CallPart, CallPlace, Chosen, HeadEdit, Stage, WeightsFunction, split


@dataclass(frozen=True, eq=False)
class Ablate(HeadEdit):
    """Replace the output of heads.

    `to="zero"` and `to=tensor` do not compute the heads. Zero removes a head's contribution; a mean keeps its average
    (Wang et al., "Interpretability in the Wild", 2023, section 2); a resampled output is one that the head computes for
    another text (Chan et al., "Causal Scrubbing", 2022).

    Args:
        to: "zero"; "mean": the mean over the items of the batch, position by position, of rows that are tokens (a row
            that is padding in all items stays as it is); "resample": the output of another item of the batch, drawn
            once for all heads by `seed`; or a tensor that broadcasts to (B, n, Lq, Dv), such as (n, 1, Dv) means over a
            text.
        seed: for "resample".

    Raises:
        ValueError: an unknown `to`; when used, a tensor of another shape, or "resample" with a batch of one.

    Example:
        >>> import torch, saccade
        >>> model, x = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4)), torch.randn(2, 5, 16)
        >>> with saccade.intervene(model, {0: saccade.intervention.Ablate(heads=None)}):  # all heads
        ...     out = model(x)
        >>> bool((out == 0).all())
        True
    """

    to: str | Tensor = "zero"
    seed: int = 0
    _stage = Stage.OUTPUT

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.to, Tensor) and self.to not in ("zero", "mean", "resample"):
            raise ValueError(f"to must be 'zero', 'mean', 'resample' or a tensor, got {describe(self.to)}")
        object.__setattr__(self, "seed", whole(self.seed, "seed"))

    @property
    def _reads_other_items(self) -> bool:
        return not isinstance(self.to, Tensor) and self.to != "zero"

    def _replaced(self, call: AttentionCall, place: CallPlace) -> Tensor | None:
        return self.choice.covered(call) if isinstance(self.to, Tensor) or self.to == "zero" else None

    def _output(self, out: Tensor, call: AttentionCall, place: CallPlace) -> Tensor:
        heads = self.choice.heads_of(call)
        return with_heads(out, heads, self._new_output(out[:, heads], call, place), self.choice.covered(call))

    def _new_output(self, own: Tensor, call: AttentionCall, place: CallPlace) -> Tensor:
        if isinstance(self.to, Tensor):
            given = self.to.to(own)
            try:
                return given.expand(own.shape)
            except RuntimeError:
                raise ValueError(
                    f"to: {tuple(given.shape)} does not broadcast to (B, heads, Lq, Dv) = {tuple(own.shape)} "
                    f"of {place.name}"
                ) from None
        if self.to == "mean":
            return _mean_over_items(own, _tokens(call))
        if self.to == "resample":
            return own[self._others(own.shape[0], place)]
        return torch.zeros_like(own)

    def _others(self, batch: int, place: CallPlace) -> Tensor:
        """(B,) the number of another item for each item."""
        if batch < 2:
            raise ValueError(f"to='resample' needs batches of several items, and {place.name} has one")
        order = torch.randperm(batch, generator=torch.Generator().manual_seed(self.seed))
        others = torch.empty_like(order)
        others[order] = order.roll(1)
        return others


def _tokens(call: AttentionCall) -> Tensor | None:
    """(B or 1, Lq) bool: rows that are tokens, by the call or by padding in its mask; None if all rows are."""
    mask, tokens = as_mask(call.mask), call.real
    for part in mask.parts if isinstance(mask, And) else () if mask is None else (mask,):
        if isinstance(part, Padding) and part.queries is not None:
            rows = part.queries.marks(call.query.shape[2], call.query.device)
            tokens = rows if tokens is None else tokens & rows
    return None if tokens is None else tokens.expand(call.query.shape[0], -1)


def _mean_over_items(own: Tensor, real: Tensor | None) -> Tensor:
    """(B, n, Lq, Dv) of (B, n, Lq, Dv): at each position the mean over the items that have a token there."""
    if real is None:
        return own.mean(0, keepdim=True).expand_as(own)
    counted = real[:, None, :, None]
    total, number = torch.where(counted, own, 0.0).sum(0, keepdim=True), counted.sum(0, keepdim=True)
    mean = total / number.clamp(min=1).to(own.dtype)
    return torch.where(number > 0, mean, own)


@dataclass(frozen=True, eq=False)
class Scale(HeadEdit):
    """Multiply the output of heads, or their logits, by a factor.

    The gradient of a factor of 1 is the head's importance for the loss, to first order (Michel et al., "Are Sixteen
    Heads Really Better than One?", 2019, equation 2). A factor on the logits is the inverse of a temperature: it
    multiplies `scale * q.k`, before softcap and bias.

    Args:
        factor: a number, or a differentiable tensor (n,) with one factor for each chosen head.
        what: "output" or "logits".

    Raises:
        TypeError: factor is neither. ValueError: it is not finite, an unknown `what`; when used, a tensor of another
            size.

    Example:
        >>> import torch, saccade
        >>> model, x = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4)), torch.randn(2, 5, 16)
        >>> gates = torch.ones(4, requires_grad=True)
        >>> with saccade.intervene(model, {0: saccade.intervention.Scale(None, gates)}):
        ...     model(x).square().mean().backward()
        >>> gates.grad.shape  # what each head is worth to this loss
        torch.Size([4])
    """

    factor: float | Tensor = 1.0
    what: str = "output"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.factor, bool) or not isinstance(self.factor, (int, float, Tensor)):
            raise TypeError(f"factor must be a number or a tensor (heads,), got {describe(self.factor)}")
        if not isinstance(self.factor, Tensor) and not math.isfinite(self.factor):
            raise ValueError(f"factor must be finite, got {self.factor}")
        if self.what not in ("output", "logits"):
            raise ValueError(f"what must be 'output' or 'logits', got {self.what!r}")

    @property
    def _stage(self) -> Stage:
        return Stage.PRODUCTS if self.what == "logits" else Stage.OUTPUT

    def _parts(self, part: CallPart, place: CallPlace) -> list[CallPart]:
        if self.what == "output":
            return [part]
        return [replace(part, call=replace(part.call, query=self._scaled(part.call.query, part.call, place)))]

    def _output(self, out: Tensor, call: AttentionCall, place: CallPlace) -> Tensor:
        return self._scaled(out, call, place) if self.what == "output" else out

    def _scaled(self, tensor: Tensor, call: AttentionCall, place: CallPlace) -> Tensor:
        """(B, Hq, Lq, .) times the factors."""
        heads = self.choice.heads_of(call)
        factors: float | Tensor = self.factor
        if isinstance(factors, Tensor):
            if factors.dim() > 1 or factors.numel() not in (1, len(heads)):
                raise ValueError(
                    f"factor: {tuple(factors.shape)} for {len(heads)} heads of {place.name}; expected ({len(heads)},)"
                )
            factors = factors.reshape(-1, 1, 1).to(tensor)
        return with_heads(tensor, heads, tensor[:, heads] * factors, self.choice.covered(call))


@dataclass(frozen=True, eq=False)
class EditMask(HeadEdit):
    """Restrict heads further: a pair is visible if both the model's mask and this one allow it.

    The output of rows without any visible pair is 0.

    Args:
        mask: a mask value (`Window(8, 0)`), or a boolean tensor (Lq, Lk) or 4-D, True = attend. Its rows and keys are
            positioned as those of the call: with a cache, the rows are the last ones of the sequence.

    Raises:
        TypeError: not a mask.

    Example:
        >>> import torch, saccade
        >>> model, x = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4)), torch.randn(1, 5, 16)
        >>> edit = saccade.intervention.EditMask(heads=[0, 2], mask=saccade.Window(1, 0))
        >>> with saccade.watch(model, keep=True) as seen, saccade.intervene(model, {0: edit}):
        ...     out = model(x)
        >>> (kept,) = seen.kept.values()
        >>> (kept.weights()[0] > 0).sum(-1)  # (heads, rows): how many keys each row sees
        tensor([[1, 2, 2, 2, 2],
                [5, 5, 5, 5, 5],
                [1, 2, 2, 2, 2],
                [5, 5, 5, 5, 5]])
    """

    mask: Mask | Tensor | None = None
    _stage = Stage.LOGITS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask is None:
            raise TypeError("mask: expected a mask value or a boolean tensor, got none")
        object.__setattr__(self, "mask", as_mask(self.mask))

    def _parts(self, part: CallPart, place: CallPlace) -> list[CallPart]:
        own, here = as_mask(part.call.mask), self._placed(part.call)
        return [replace(part, call=replace(part.call, mask=here if own is None else own & here))]

    def _placed(self, call: AttentionCall) -> Mask:
        """The mask for these heads, positioned as the call's own mask."""
        assert isinstance(self.mask, Mask)
        mask, own = self.mask, as_mask(call.mask)
        if own is not None and mask.placement() == "open" and own.placement() not in (None, "open"):
            mask = mask.at(_stands_at(own, None, call.query.device))  # type: ignore[arg-type]
        return self.choice.mask(call, mask)

    def _logits(self, logits: Tensor, call: AttentionCall) -> Tensor:
        shown = self._placed(call)
        batch, heads, rows, keys = logits.shape
        shown.check(batch, heads, rows, keys, logits.device)
        return logits.masked_fill(~shown.dense(rows, keys, device=logits.device), float("-inf"))


@dataclass(frozen=True, eq=False)
class EditBias(HeadEdit):
    """Add numbers to the logits of heads, after scale and softcap and in addition to the model's bias.

    Args:
        bias: a tensor (Lq, Lk), or 4-D that broadcasts to (B, Hq, Lq, Lk), differentiable; or `ALiBi` or
            `RelativeBias` for all heads of the call, of which the chosen heads are used. If the model has a bias of
            another kind, the sum is a dense tensor.

    Raises:
        TypeError: another type. ValueError: when used, another shape.

    Example:
        >>> import torch, saccade
        >>> model, x = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4)), torch.randn(2, 5, 16)
        >>> bias = torch.zeros(5, 5, requires_grad=True)
        >>> with saccade.intervene(model, {0: saccade.intervention.EditBias([1], bias)}):
        ...     out = model(x)
        >>> torch.allclose(out, model(x), atol=1e-6)  # a bias of 0 changes nothing
        True
        >>> out.square().mean().backward()
        >>> bias.grad.shape
        torch.Size([5, 5])
    """

    bias: Bias | Tensor | None = None
    _stage = Stage.LOGITS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.bias, (Bias, Tensor)) or isinstance(self.bias, (Score, ModifiedScores)):
            hint = "; a Score modifies scores instead of adding to them" if isinstance(self.bias, Bias) else ""
            raise TypeError(f"bias must be a tensor, ALiBi or RelativeBias, got {describe(self.bias)}{hint}")
        if isinstance(self.bias, Tensor) and not self.bias.is_floating_point():
            raise TypeError(
                f"bias must be of floating point (for True and False use EditMask), got {describe(self.bias)}"
            )

    def _parts(self, part: CallPart, place: CallPlace) -> list[CallPart]:
        return split(part, self.choice.covered(part.call), lambda call: replace(call, bias=self._added(call)))

    def _added(self, call: AttentionCall) -> Bias | Tensor | None:
        own = as_bias(call.bias)
        bias = self.bias
        if isinstance(bias, Tensor):
            bias = bias.to(call.query.device, torch.promote_types(call.query.dtype, torch.float32))
        if own is None:
            return bias
        ours = as_bias(bias)
        assert ours is not None
        if isinstance(own, (Score, ModifiedScores)):
            raise ValueError(f"EditBias: {own!r} changes the scores of this call, and no bias can be added to it")
        if isinstance(own, ALiBi) and isinstance(ours, ALiBi) and own.offset is None is ours.offset:
            return ALiBi(own.parameter + ours.parameter)
        return bias_tile(own, call) + bias_tile(ours, call)

    def _logits(self, logits: Tensor, call: AttentionCall) -> Tensor:
        bias = as_bias(self.bias)
        assert bias is not None
        bias._check(*logits.shape)
        added = logits + bias_tile(bias, call).to(logits.dtype)
        return torch.where(self.choice.covered(call), added, logits)


def bias_tile(bias: Bias, call: AttentionCall) -> Tensor:
    """The whole bias of a call, (B or 1, Hq or 1, Lq or 1, Lk or 1)."""
    if isinstance(bias, TensorBias):
        return bias.parameter
    checked = make_call(call.query, call.key, call.value, call.mask, bias=bias)
    rows, keys = (Span(0, size, torch.arange(size, device=call.query.device)) for size in _lengths(call))
    return bias._tile(bias.parameter, rows, keys, checked.placement, checked.accumulator)


def _lengths(call: AttentionCall) -> tuple[int, int]:
    return call.query.shape[2], call.key.shape[2]


@dataclass(frozen=True, eq=False)
class Weights(HeadEdit):
    """Replace the weights of heads by any function of them. Forward only.

    The weights are computed in tiles of whole rows: memory grows with the length, not with its square.

    Args:
        function: `function(weights, rows)` gets weights (B, n, r, Lk) of the chosen heads, in the order of `heads`, in
            query rows `rows` (r,). It may change them in place, and returns weights of the same shape, with any sums.
            Dropout is not applied to them.

    Raises:
        TypeError: not a function. ValueError: when used, gradients are enabled and needed, or the result has another
            shape.

    Example:
        >>> import torch, saccade
        >>> model, x = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4)), torch.randn(2, 5, 16)
        >>> def first_key(weights, rows):
        ...     return torch.nn.functional.one_hot(torch.zeros_like(rows), 5).to(weights).expand_as(weights)
        >>> with torch.no_grad(), saccade.intervene(model, {0: saccade.intervention.Weights(None, first_key)}):
        ...     out = model(x)
        >>> torch.allclose(out, out[:, :1].expand_as(out))  # every row gets the value of the first key
        True
    """

    function: WeightsFunction | None = None
    _stage = Stage.WEIGHTS
    _by_function = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.function):
            raise TypeError(f"function must be callable, got {describe(self.function)}")

    def _weights(self, weights: Tensor, chosen: Chosen, call: AttentionCall, place: CallPlace) -> Tensor:
        if torch.is_grad_enabled() and weights.requires_grad:
            raise ValueError(FORWARD_ONLY)
        heads = self.choice.heads_of(call)
        at = [chosen.heads.index(head) for head in heads]
        own = weights if at == list(range(weights.shape[1])) else weights[:, at]
        if self.choice.items is not None:
            own = own.clone()  # the function may change it
        new = applied(self.function, own, chosen.rows)
        if torch.is_grad_enabled() and new.requires_grad:
            raise ValueError(FORWARD_ONLY)
        return with_heads(weights, at, new, self.choice.covered(call)[:, chosen.heads])


FORWARD_ONLY = "intervene: Weights is forward only, but a gradient is needed; use torch.no_grad()"


def applied(function: Any, weights: Tensor, rows: Tensor) -> Tensor:
    """The result of a user's function of weights. ValueError if it has another shape."""
    shape = tuple(weights.shape)
    result = function(weights, rows)
    if not isinstance(result, Tensor) or tuple(result.shape) != shape:
        raise ValueError(f"function: expected weights of shape {shape} from it, got {describe(result)}")
    return result.to(weights.dtype)


def with_heads(whole: Tensor, heads: list[int], new: Tensor, covered: Tensor) -> Tensor:
    """`whole` (B, Hq, ., .) with `new` (B, n, ., .) instead of `heads`, in the items of `covered`."""
    everywhere = covered.shape[0] == 1 and bool(covered[:, heads].all())  # false if only some items are chosen
    if len(heads) == whole.shape[1] and heads == sorted(heads) and everywhere:
        return new
    at = torch.tensor(heads, dtype=torch.int64, device=whole.device)
    if not everywhere:
        new = torch.where(covered[:, heads], new, whole[:, heads])
    return whole.index_copy(1, at, new.to(whole.dtype))
