"""The inputs of one row of one head: from a model while it reads a text, or from one observed call.

Everything is float64 numpy. Shape legend: L keys, E model width, D key width, Dv value width, Hq query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ....interception._hooks import hooked
from ....operator._biases import Bias, RelativeScores, Span, TensorBias
from ....operator._call import CheckedCall, ObservedCall
from ....operator._checks import make_call
from ....operator._pooled import pooled
from ....operator._scores._score import ModifiedScores
from ....operator._scores._terms import RelativeLine
from ....operator.nn.attention import MultiHeadAttention
from ....operator.nn.norm import RMSNorm
from ....operator.nn.stacks import Stack
from ....operator.positions import Rotary
from .._models import LayerObserver, weights_of


@dataclass(frozen=True, eq=False)
class LinearStep:
    """x -> W x + b; W (out, in), b (out,) or None; both hold `factor`, by which the model multiplies their result."""

    weight: np.ndarray
    bias: np.ndarray | None
    factor: float = 1.0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """(..., in) to (..., out)."""
        out = x @ self.weight.T
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, eq=False)
class Norm:
    """A layer norm or an RMS norm over the last axis."""

    kind: str  # "layer" or "rms"
    eps: float
    weight: np.ndarray | None
    bias: np.ndarray | None
    sizes: np.ndarray | None = (
        None  # (L, 1) or (1,), what each row of one head is divided by if the norm is of all heads
    )

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """(..., E) to the same shape."""
        x = x - x.mean(-1, keepdims=True) if self.kind == "layer" else x
        out = x / (np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) if self.sizes is None else self.sizes)
        out = out if self.weight is None else out * self.weight
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary positions: cos and sin (L, R / 2) of the first R components, paired by ``layout``."""

    cos: np.ndarray
    sin: np.ndarray
    layout: str  # "half" or "interleaved"

    def __call__(self, x: np.ndarray, rows: slice | int = slice(None)) -> np.ndarray:
        """x (L, D), or (D,) of one row, each turned to its position."""
        cos, sin = self.cos[rows], self.sin[rows]
        half = cos.shape[-1]
        first, second = slice(0, half), slice(half, 2 * half)
        if self.layout == "interleaved":
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        out = x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out


@dataclass(frozen=True, eq=False)
class Surroundings:
    """The modules and tensors around the call."""

    embedded: np.ndarray  # (E,) input of the first layer, at this row
    stream: Tensor  # (L, E) input of the block: the residual stream, in the model's dtype
    read: Tensor  # (L, E) input of the attention module
    written: np.ndarray  # (E,) output of the attention module
    placement: str  # of the norm: "pre", "post", "parallel", or "bare" where projections read the stream as it is
    norm: Norm | None  # None for another kind of norm
    query: LinearStep
    key: LinearStep
    value: LinearStep
    query_norm: Norm | None
    key_norm: Norm | None
    rotation: Rotation | None
    gate: LinearStep | None
    output: LinearStep
    context: Tensor | None = None  # (Lk, C) input of keys and values in cross-attention; None: the stream
    value_norm: Norm | None = None
    after: Norm | None = None  # of the output, before it is added
    factor: float = 1.0  # of the output, where it is added
    adds: bool = True  # whether it is known where the output is added


@dataclass(frozen=True, eq=False)
class HeadInputs:
    """Inputs and outputs of one row of one head in an observed call."""

    layer: int
    head: int
    row: int
    heads: int
    kv_heads: int
    dtype: torch.dtype
    query: np.ndarray  # (D,)
    key: np.ndarray  # (L, D)
    value: np.ndarray | None  # (L, Dv)
    outputs: np.ndarray | None  # (Hq, Dv) of all heads, None if unknown
    weights: np.ndarray  # (L,) as the model computes them
    scale: float
    softcap: float | None
    sink: float | None
    bias: np.ndarray | None  # (L,)
    bias_of_positions: bool  # whether the bias depends on the positions of keys
    bias_name: str
    visible: np.ndarray | None  # (L,) bool, None if all keys are visible
    mask_name: str
    own: int | None = None  # the key that is the query's token; None where queries and keys are different tokens
    around: Surroundings | None = None
    part: str = ""  # of an encoder-decoder: "encoder", "decoder" or "cross"

    @property
    def place(self) -> str:
        """The head as `--head` takes it: 1.4, cross.1.4."""
        return ".".join([*filter(None, [self.part]), str(self.layer), str(self.head)])

    @property
    def crosses(self) -> bool:
        """Whether query and keys are from different texts."""
        return self.part == "cross"

    @property
    def kv_head(self) -> int:
        """The key/value head that this head reads."""
        return self.head // (self.heads // self.kv_heads)


def numbers(tensor: Tensor) -> np.ndarray:
    """A copy as float64."""
    return tensor.detach().to("cpu", torch.float64).numpy().copy()


# One call


def of_call(call: ObservedCall, head: int, row: int, layer: int = 0, item: int = 0) -> HeadInputs:
    """The inputs of ``row`` in ``head`` of batch item ``item``.

    Raises:
        ValueError: no such head, row or item.
    """
    batch, heads, rows, _ = call.query.shape
    for name, chosen, count in (("head", head, heads), ("row", row, rows), ("item", item, batch)):
        if not 0 <= chosen < count:
            raise ValueError(f"{name}: {chosen} does not exist; there are 0 to {count - 1}")
    kv_heads = call.key.shape[1]
    group = head // (heads // kv_heads)
    checked = make_call(call.query, call.key, call.value, **call.scoring(), dropout=0.0, needs_lse=False)
    bias = checked.bias
    added = None if bias is None else _bias_row(checked, bias, head, row, item)
    visible = _visible_row(checked, head, row, item)
    if added is not None and not np.isfinite(added).all():
        visible = np.isfinite(added) if visible is None else visible & np.isfinite(added)
        added = np.where(np.isfinite(added), added, 0.0)
    weights = weights_of(call, rows=[row], heads=[head])[item, 0, 0]
    return HeadInputs(
        layer=layer,
        head=head,
        row=row,
        heads=heads,
        kv_heads=kv_heads,
        dtype=call.query.dtype,
        query=numbers(call.query[item, head, row]),
        key=numbers(call.key[item, group]),
        value=numbers(call.value[item, group]),
        outputs=numbers(call.out[item, :, row]),
        weights=numbers(weights),
        scale=checked.scale,
        softcap=checked.softcap,
        sink=None if call.sink is None else float(call.sink[head]),
        bias=added if added is not None and added.any() else None,
        bias_of_positions=isinstance(bias, RelativeScores),
        bias_name=_bias_name(bias),
        visible=visible,
        mask_name="" if visible is None else _named(checked),
        own=row if rows == call.key.shape[2] and not getattr(call, "cross", False) else None,
    )


def _named(call: CheckedCall) -> str:
    name = repr(call.mask) if call.mask is not None else "a bias of -inf"
    return name if len(name) <= 60 else type(call.mask).__name__


def _bias_name(bias: Bias | None) -> str:
    if bias is None or isinstance(bias, TensorBias):
        return ""
    return "Score" if isinstance(bias, (ModifiedScores, RelativeLine)) else type(bias).__name__


def _bias_row(call: CheckedCall, bias: Bias, head: int, row: int, item: int) -> np.ndarray:
    """(L,) the bias of the row, or what a `Score` adds to its scores: the new one minus the old one."""
    if isinstance(bias, ModifiedScores):
        chosen, every = torch.tensor([row], device=call.device), range(call.length_k)
        new, old = (
            pooled(one, (item, head), chosen, every, (1, 1), None, logits=True, precise=True).largest[0]
            for one in (call, replace(call, bias=None))
        )
        return numbers(torch.where(old == -torch.inf, 0.0, new - torch.where(old == -torch.inf, 0.0, old)))
    at_row, at_head = torch.tensor([row], device=call.device), torch.tensor([head], device=call.device)
    parameter = bias._part(bias.parameter.detach(), at_row, None, at_head)
    length = call.length_k
    rows = Span(0, 1, at_row, unbroken=False)
    keys = Span(0, length, torch.arange(length, device=call.device))
    tile = bias._tile(parameter, rows, keys, call.placement, torch.float64)
    return np.broadcast_to(numbers(tile[item if tile.shape[0] > 1 else 0, 0, 0]), (length,)).copy()


def _visible_row(call: CheckedCall, head: int, row: int, item: int) -> np.ndarray | None:
    """(L,) bool; None without a mask."""
    if call.mask is None:
        return None
    at_row, keys = torch.tensor([row], device=call.device), torch.arange(call.length_k, device=call.device)
    bits = call.mask._grid(at_row, keys, call.length_q, call.length_k)
    bits_of_row = bits[item if bits.shape[0] > 1 else 0, head if bits.shape[1] > 1 else 0, 0]
    return bits_of_row.cpu().numpy().copy()


# A model that reads a text


def of_stack(
    stack: Stack, head: tuple[int, int], row: int, run: Callable[[LayerObserver], None], part: str = ""
) -> HeadInputs:
    """The inputs of ``row`` in ``head`` (layer, head) of a stack of Saccade, while ``run(observe)`` runs it.

    `run` passes only calls of ``part`` to the observer; "cross" is cross-attention.
    """
    layer, number = head
    inputs: list[HeadInputs] = []

    def keep(at: int, call: ObservedCall) -> None:
        if at == layer:
            inputs.append(replace(of_call(call, number, row, layer), part=part))

    with _captured(stack, layer, cross=part == "cross") as tensors:
        run(keep)
    return _with_surroundings(inputs[0], stack, tensors, row)


@contextmanager
def _captured(stack: Stack, layer: int, *, cross: bool) -> Iterator[dict[str, Tensor]]:
    """The inputs of the first block, this block and this attention, and this attention's output, by name."""
    tensors: dict[str, Tensor] = {}

    def reads(name: str) -> Any:
        return lambda module, given, named: tensors.update({name: given[0]})

    def attends(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors["read"] = given[0]
        if named.get("context") is not None:
            tensors["context"] = named["context"]

    block: Any = stack.blocks[layer]
    attention = block.cross if cross else block.attention
    # With a norm before cross-attention, the stream is the output of self-attention; with a norm after it, its own
    # input.
    before = block if not cross else block.cross_norm if block.config.placement == "pre" else attention
    with (
        hooked([stack.blocks[0]], before=reads("embedded")),
        hooked([before], before=reads("stream")),
        hooked([attention], before=attends, after=lambda module, out: tensors.update(written=out)),
    ):
        yield tensors


def _with_surroundings(inputs: HeadInputs, stack: Stack, tensors: dict[str, Tensor], row: int) -> HeadInputs:
    block: Any = stack.blocks[inputs.layer]
    attention, norm = (block.cross, block.cross_norm) if inputs.crosses else (block.attention, block.attention_norm)
    query, key, value = _of_head(attention, inputs)
    positions = None if inputs.crosses else stack.positions_of(inputs.layer)
    around = Surroundings(
        embedded=numbers(tensors["embedded"][0, row]),
        stream=tensors["stream"][0],
        read=tensors["read"][0],
        written=numbers(tensors["written"][0, row]),
        placement=block.config.placement,
        norm=_norm(norm),
        query=query,
        key=key,
        value=value,
        query_norm=_norm(attention.query_norm),
        key_norm=_norm(attention.key_norm),
        rotation=_rotation(positions, len(inputs.key)) if isinstance(positions, Rotary) else None,
        gate=None if attention.gate is None else _linear(attention.gate),
        output=_linear(attention.output),
        context=tensors["context"][0] if inputs.crosses else None,
    )
    return replace(inputs, around=around)


def _of_head(attention: MultiHeadAttention, inputs: HeadInputs) -> tuple[LinearStep, LinearStep, LinearStep]:
    """The rows of the projections for this head's query, key and value."""
    shape, group = attention.shape, inputs.kv_head
    (wq, bq), (wk, bk), (wv, bv) = attention.matrices()
    places = (
        (wq, bq, inputs.head * shape.head, shape.head),
        (wk, bk, group * shape.head, shape.head),
        (wv, bv, group * shape.value_head, shape.value_head),
    )
    query, key, value = (
        LinearStep(numbers(w[start : start + size]), None if b is None else numbers(b[start : start + size]))
        for w, b, start, size in places
    )
    return query, key, value


def _linear(layer: nn.Linear) -> LinearStep:
    return LinearStep(numbers(layer.weight), None if layer.bias is None else numbers(layer.bias))


def _norm(module: nn.Module) -> Norm | None:
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    kept = [None if x is None else numbers(x) for x in (weight, bias)]
    if isinstance(module, RMSNorm):
        # PyTorch's default eps is the machine epsilon of the dtype.
        eps = torch.finfo(module.weight.dtype).eps if module.eps is None else module.eps
        return Norm("rms", float(eps), kept[0], None)
    return Norm("layer", module.eps, *kept) if isinstance(module, nn.LayerNorm) else None


def _rotation(positions: Rotary, length: int) -> Rotation:
    cos, sin = positions._waves.at(torch.arange(length), torch.float64)
    return Rotation(numbers(cos), numbers(sin), positions.layout)
