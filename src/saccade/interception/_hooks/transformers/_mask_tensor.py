"""A boolean mask tensor that is materialised only when an operation reads it.

Models hand the mask of a forward from their mask function to their attention function. Most do not touch it on the
way, and then the compact value is all there ever is; to a model that slices or adds it, it is an ordinary tensor.

Shape legend: B batch, Lq / Lk lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ....operator._masks import Mask


class UnknownAttention(ValueError):
    """An attention call of a transformers model has an unsupported argument. The message names it.

    Example:
        >>> import torch
        >>> from saccade.integrations.transformers import UnknownAttention, meaning_of
        >>> query, key, value = torch.randn(3, 1, 2, 5, 8)
        >>> try:
        ...     meaning_of(torch.nn.Identity(), query, key, value, None, head_mask=torch.ones(2))
        ... except UnknownAttention as error:
        ...     print(error)
        head_mask of Identity (a torch.float32 tensor (2,)): a factor on the weights of each head is not supported
    """


_SUMS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}
_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default}


class MaskTensor(Tensor):
    """(B, 1, Lq, Lk) bool, True = attend: `mask.dense(Lq, Lk)`, formed by the first operation on it.

    Args:
        mask: who sees whom; None: everyone sees every key.
        shape: (B, 1, Lq, Lk).
        device: where the tensor would be.
        tokens: (B, Lq) bool, the query rows that are tokens rather than padding; None: not known.
    """

    mask: Mask | None
    tokens: Tensor | None
    _dense: Tensor | None

    @staticmethod
    def __new__(
        cls,
        mask: Mask | None,
        shape: tuple[int, int, int, int],
        device: torch.device | str,
        tokens: Tensor | None = None,
    ) -> MaskTensor:
        place = torch.device(device)
        self: MaskTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=place)
        self.mask, self.tokens, self._dense = mask, tokens, None
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _SAME:
            return args[0]
        if func in _SUMS and any(isinstance(x, Tensor) and x.is_floating_point() for x in args):
            raise UnknownAttention(
                "a boolean mask (True = attend) is added to scores: this model does not use transformers' attention "
                'registry, so that attn_implementation="saccade" has no effect on it; use "eager"'
            )
        unwrapped = tree_map(lambda x: x.dense() if isinstance(x, MaskTensor) else x, (args, kwargs or {}))
        return func(*unwrapped[0], **unwrapped[1])

    def dense(self) -> Tensor:
        """The ordinary tensor, (B, 1, Lq, Lk) bool. Formed once, and then kept."""
        if self._dense is None:
            batch, _, rows, keys = self.shape
            bits = torch.ones((), dtype=torch.bool) if self.mask is None else self.mask.dense(rows, keys)
            self._dense = bits.to(self.device).expand(batch, 1, rows, keys)
        return self._dense

    def __deepcopy__(self, memo: Any) -> MaskTensor:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return MaskTensor, (self.mask, tuple(self.shape), self.device, self.tokens)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MaskTensor({self.mask!r}, shape={tuple(self.shape)})"
