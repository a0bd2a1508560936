"""The compared implementations: Saccade's backends, PyTorch's fused kernel, compiled FlexAttention and a plain formula.

Masks of the other implementations (dense booleans, block masks) are made before timing; Saccade's mask is created in
every call.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...operator._attention import attention
from ...operator._biases import ALiBi
from .cases import Case, CaseInputs
from .machine import Limit, limits_of

Forward = Callable[[], Tensor]  # -> (B, Hq, Lq, Dv)


class Contender(ABC):
    """An implementation of attention. `name` is shown in tables."""

    name: str
    compiles = False  # whether its first call compiles for the shape

    @abstractmethod
    def forward(self, inputs: CaseInputs) -> Forward:
        """Returns a function without arguments that computes the output. Preparation happens here, before timing.

        Raises any exception if the case is not supported; its message becomes the row's note.
        """

    def needs(self, case: Case) -> int:
        """Bytes of its largest intermediate tensors, as far as they grow with Lq x Lk."""
        return 0

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """A context manager around every sequence of its calls."""
        return contextlib.nullcontext()

    def limits(self, inputs: CaseInputs, threads: int) -> list[Limit]:
        """The machine's limits for these inputs."""
        return limits_of(inputs, threads)


class SaccadeAttention(Contender):
    """`saccade.attention` with a backend, which may be "auto"."""

    def __init__(self, backend: str):
        self.name = self.backend = backend

    def forward(self, inputs: CaseInputs) -> Forward:
        query, key, value = inputs.leaves
        pattern = inputs.case.pattern
        mask, backend = pattern.mask(inputs.case.sizes), self.backend
        if pattern.bias is None:
            return lambda: attention(query, key, value, mask(), backend=backend)
        added = inputs.bias
        assert added is not None
        if pattern.bias == "alibi":
            return lambda: attention(query, key, value, mask(), bias=ALiBi(added), backend=backend)
        return lambda: attention(query, key, value, mask(), bias=added, backend=backend)


class SdpaAttention(Contender):
    """F.scaled_dot_product_attention: with is_causal if it is equivalent, otherwise with a dense mask."""

    name = "F.sdpa"

    def forward(self, inputs: CaseInputs) -> Forward:
        case = inputs.case
        query, key, value = inputs.leaves
        causal = self.takes_causal(case)
        mask = None if causal or not constrains(case) else dense_scores(inputs)
        grouped = case.heads != case.kv_heads
        return lambda: F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )

    def needs(self, case: Case) -> int:
        if not constrains(case) or self.takes_causal(case):
            return 0
        pairs = case.length_q * case.length_k * (case.batch if case.pattern.by_item else 1)
        if case.pattern.bias:
            return pairs * case.heads * case.torch_dtype.itemsize
        # The boolean mask, and the kernel's conversion of it to numbers.
        return pairs * (1 + case.torch_dtype.itemsize)

    @staticmethod
    def takes_causal(case: Case) -> bool:
        return case.pattern.is_causal and case.length_q == case.length_k and not case.pattern.bias


class FlexAttention(Contender):
    """PyTorch's FlexAttention, compiled for exactly this shape; forward only on a CPU."""

    name = "FlexAttention"
    compiles = True

    def forward(self, inputs: CaseInputs) -> Forward:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        case, pattern = inputs.case, inputs.case.pattern
        if case.records and inputs.query.device.type == "cpu":
            raise ValueError("its backward raises on a CPU")
        query, key, value = inputs.leaves
        rule, grouped = pattern.rule(case.sizes), case.heads != case.kv_heads
        blocks = None
        if rule is not None:
            items = case.batch if pattern.by_item else None
            blocks = create_block_mask(rule, items, None, case.length_q, case.length_k, device="cpu")
        score_mod = _added_score(inputs)
        # Each shape counts against the limit of recompilations, which would stop the run.
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return lambda: compiled(query, key, value, score_mod=score_mod, block_mask=blocks, enable_gqa=grouped)

    def needs(self, case: Case) -> int:
        # The block mask is computed from all pairs at once.
        items = case.batch if case.pattern.by_item else 1
        return case.length_q * case.length_k * 2 * items if case.pattern.terms else 0


class DenseAttention(Contender):
    """softmax(q k^T / sqrt(D)) v in plain PyTorch."""

    name = "dense"

    def forward(self, inputs: CaseInputs) -> Forward:
        query, key, value = inputs.leaves
        case = inputs.case
        scores = dense_scores(inputs) if constrains(case) else None
        group, scale = case.heads // case.kv_heads, case.width**-0.5

        def compute() -> Tensor:
            keys, values = (x if group == 1 else x.repeat_interleave(group, 1) for x in (key, value))
            logits = query @ keys.mT * scale
            if scores is not None:
                logits = logits.masked_fill(~scores, -math.inf) if scores.dtype == torch.bool else logits + scores
            return torch.softmax(logits, -1) @ values

        return compute

    def needs(self, case: Case) -> int:
        # Logits, scaled logits, masked logits and weights, and their gradients.
        alive = 6 if case.records else 3
        return alive * case.batch * case.heads * case.length_q * case.length_k * case.torch_dtype.itemsize


def others() -> dict[str, Contender]:
    """The other implementations, by their names in `saccade bench --against`."""
    return {"sdpa": SdpaAttention(), "flex": FlexAttention(), "dense": DenseAttention()}


def constrains(case: Case) -> bool:
    """Whether the case has a mask or a bias."""
    return bool(case.pattern.terms or case.pattern.bias)


def dense_scores(inputs: CaseInputs) -> Tensor | None:
    """The attn_mask of F.sdpa: booleans (B or 1, 1, Lq, Lk), or numbers with -inf at hidden pairs."""
    case = inputs.case
    visible, added = case.pattern.dense(case.sizes), dense_bias(inputs, case.torch_dtype)
    if added is None:
        return visible
    return added if visible is None else torch.where(visible, added, -math.inf)


def dense_bias(inputs: CaseInputs, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor | None:
    """The bias (1, Hq, Lq or rows, Lk) as a dense tensor; None without one."""
    case = inputs.case
    if inputs.bias is None:
        return None
    if case.pattern.bias == "bias":
        return (inputs.bias if rows is None else inputs.bias[:, :, rows]).to(dtype)
    at = torch.arange(case.length_q) if rows is None else rows
    distance = (torch.arange(case.length_k) - (at[:, None] + case.sizes.offset)).abs()
    return (-inputs.bias[:, None, None].double() * distance)[None].to(dtype)


def _added_score(inputs: CaseInputs) -> Callable[..., Tensor] | None:
    """FlexAttention's score_mod."""
    bias, offset = inputs.bias, inputs.case.sizes.offset
    if bias is None:
        return None
    if inputs.case.pattern.bias == "alibi":
        return lambda score, b, h, row, key: score - bias[h] * (key - row - offset).abs()
    return lambda score, b, h, row, key: score + bias[0, h, row, key]
