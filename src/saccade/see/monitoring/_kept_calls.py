"""One kept attention call, from which any part of its map can be computed again.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...operator._biases import Bias, TensorBias, as_bias
from ...operator._call import ObservedCall
from ...operator._masks import Mask
from ...operator._masks._data import whole
from ...operator._weights import Chosen, attention_weights


@dataclass(frozen=True, eq=False, repr=False)
class KeptCall:
    """Copies of the inputs and outputs of one call, without a graph. `saccade.watch(model, keep=True)` keeps them.

    Example:
        >>> import torch, saccade
        >>> model = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> with saccade.watch(model, keep=True) as seen:
        ...     _ = model(torch.randn(2, 5, 16), saccade.Causal())
        >>> (kept,) = seen.kept.values()
        >>> kept.query.shape, kept.weights(head=0).shape
        (torch.Size([2, 4, 5, 4]), torch.Size([2, 5, 5]))
    """

    step: int
    query: Tensor  # (B, Hq, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    lse: Tensor  # (B, Hq, Lq)
    mask: Mask | None
    bias: Bias | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None  # (Hq,)
    value: Tensor | None = None  # (B, Hkv, Lk, Dv); None in files of old versions
    out: Tensor | None = None  # (B, Hq, Lq, Dv)

    def weights(self, head: Chosen = None, rows: Chosen = None, keys: Chosen = None) -> Tensor:
        """(B, rows, keys) for one head, or (B, heads, rows, keys); rows that are padding or see no key are 0."""
        logits: dict[str, Any] = {name: getattr(self, name) for name in ("bias", "scale", "softcap", "sink")}
        weights = attention_weights(self.query, self.key, self.mask, rows=rows, keys=keys, heads=head, **logits)
        single = head is not None and hasattr(head, "__index__") and not (isinstance(head, Tensor) and head.dim() > 0)
        return weights[:, 0] if single and whole(head, "head") is not None else weights

    def __repr__(self) -> str:
        batch, heads, rows, width = self.query.shape
        sizes = f"B={batch}, Hq={heads}, Hkv={self.key.shape[1]}, Lq={rows}, Lk={self.key.shape[2]}, D={width}"
        return f"KeptCall(step {self.step}, {sizes}, mask={self.mask!r}, bias={self.bias!r})"

    def to(self, device: torch.device | str) -> KeptCall:
        """The same on `device`."""
        held = {name: getattr(self, name) for name in ("query", "key", "lse", "mask", "sink", "value", "out")}
        moved: dict[str, Any] = {name: None if tensor is None else tensor.to(device) for name, tensor in held.items()}
        return replace(self, **moved, bias=bias_to(self.bias, device))


def kept_of(call: ObservedCall, lse: Tensor, step: int) -> KeptCall:
    """A call with copies of its tensors: caches, parameters and masks given as tensors change later."""
    return KeptCall(
        step,
        _copy(call.query),
        _copy(call.key),
        lse.clone(),
        call.counted_mask,
        own_bias(as_bias(call.bias)),
        call.scale,
        call.softcap,
        None if call.sink is None else _copy(call.sink),
        _copy(call.value),
        _copy(call.out),
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def own_bias(bias: Bias | None) -> Bias | None:
    """A copy of the bias, in which expanded axes are stored once."""
    if bias is None:
        return None
    if isinstance(bias, TensorBias):
        return TensorBias(_compact(bias.parameter.detach()))
    return bias._copied()


def _compact(tensor: Tensor) -> Tensor:
    for axis in range(tensor.dim()):
        if tensor.shape[axis] > 1 and tensor.stride(axis) == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return _copy(tensor)


def bias_to(bias: Bias | None, device: torch.device | str) -> Bias | None:
    return None if bias is None else bias._moved(device)
