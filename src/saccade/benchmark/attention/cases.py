"""A case of the benchmark: sizes, dtype, mask and stage, with its number of operations.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D width of query and key, Dv of value.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .patterns import MaskPattern, PatternSizes

# Work relative to a forward pass. The backward pass recomputes the logits and has four more products, where the forward
# # pass has two: 5 / 2 (Dao 2023, "FlashAttention-2", section 4.1).
STAGES = {"forward": 1.0, "recorded": 1.0, "backward": 2.5, "forward+backward": 3.5, "decode": 1.0}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Case:
    """A problem and the timed stage.

    stage: "forward" (without recording gradients), "recorded" (a forward pass that records for backward), "backward"
    (alone), "forward+backward", or "decode" (a forward pass of few queries with a long cache, measured in bytes/s).
    """

    length_q: int
    length_k: int
    mask: str = "full"
    stage: str = "forward"
    dtype: str = "float32"
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    width: int = 64
    value_width: int = 64

    def __post_init__(self) -> None:
        for name in ("length_q", "length_k", "batch", "heads", "kv_heads", "width", "value_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        if self.stage not in STAGES:
            raise ValueError(f"stage must be one of {', '.join(STAGES)}; got {self.stage!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        if self.length_q > self.length_k:
            raise ValueError(f"length_q must be at most length_k, got {self.length_q} and {self.length_k}")
        MaskPattern.parse(self.mask)

    @property
    def pattern(self) -> MaskPattern:
        return MaskPattern.parse(self.mask)

    @property
    def sizes(self) -> PatternSizes:
        return PatternSizes(self.batch, self.length_q, self.length_k)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def derives(self) -> bool:
        """Whether the stage computes gradients."""
        return self.stage in ("backward", "forward+backward")

    @property
    def records(self) -> bool:
        """Whether the inputs require gradients."""
        return self.derives or self.stage == "recorded"

    @cached_property
    def pairs(self) -> int:
        """Number of visible (query, key) pairs of one head, over the batch, counted from the mask."""
        return self.pattern.pairs(self.sizes)

    @property
    def work(self) -> float:
        """The visible share of all pairs."""
        return self.pairs / (self.batch * self.length_q * self.length_k)

    @property
    def flops(self) -> float:
        """2 (D + Dv) for each visible pair and query head, times the factor of the stage."""
        return STAGES[self.stage] * 2 * (self.width + self.value_width) * self.pairs * self.heads

    @property
    def bytes_read(self) -> int:
        """Bytes of keys and values that are visible to any query."""
        first, stop = self.pattern.ranges(self.sizes)
        empty = stop <= first
        lowest = torch.where(empty, self.length_k, first).amin(-1)
        highest = torch.where(empty, 0, stop).amax(-1)
        keys = int((highest - lowest).clamp(min=0).expand(self.batch).sum())
        return keys * self.kv_heads * (self.width + self.value_width) * self.torch_dtype.itemsize

    @property
    def amount(self) -> float:
        """The amount that the rate refers to: bytes for decoding, otherwise operations."""
        return self.bytes_read if self.stage == "decode" else self.flops

    @property
    def label(self) -> str:
        """One line with the values that differ from the defaults."""
        length = f"L={self.length_k}" if self.length_q == self.length_k else f"Lq={self.length_q} Lk={self.length_k}"
        heads = f"H={self.heads}" if self.heads == self.kv_heads else f"H={self.heads}/{self.kv_heads}"
        width = f"D={self.width}" if self.width == self.value_width else f"D={self.width}/{self.value_width}"
        batch = [] if self.batch == 1 else [f"B={self.batch}"]
        return " ".join([self.stage, self.dtype, self.mask, *batch, heads, length, width])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CaseInputs:
    """The tensors of a case: upstream is the gradient that reaches the output."""

    case: Case
    query: Tensor  # (B, Hq, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    upstream: Tensor  # (B, Hq, Lq, Dv)
    bias: Tensor | None  # ALiBi's slopes (Hq,), or (1, Hq, Lq, Lk)

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @classmethod
    def make(cls, case: Case, seed: int = 0) -> CaseInputs:
        """Standard normal values; equal cases give equal values."""
        from ...operator._biases import ALiBi

        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32).to(case.torch_dtype)

        query = normal(case.batch, case.heads, case.length_q, case.width)
        key = normal(case.batch, case.kv_heads, case.length_k, case.width)
        value = normal(case.batch, case.kv_heads, case.length_k, case.value_width)
        upstream = normal(case.batch, case.heads, case.length_q, case.value_width)
        bias = None
        if case.pattern.bias == "alibi":
            bias = ALiBi.slopes(case.heads)
        elif case.pattern.bias == "bias":
            bias = normal(1, case.heads, case.length_q, case.length_k)
        query, key, value = (leaf.requires_grad_(case.records) for leaf in (query, key, value))
        return cls(case, query, key, value, upstream, bias)


def decoding(size: int, like: Case) -> Case:
    """A decoding case whose keys and values take at least `size` bytes, in multiples of a thousand tokens."""
    token = like.batch * like.kv_heads * (like.width + like.value_width) * like.torch_dtype.itemsize
    length = -(-size // (token * 1024)) * 1024
    return replace(like, length_k=max(length, like.length_q))
