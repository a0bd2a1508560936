"""Unsupported arguments, and their names."""

from __future__ import annotations


class UnknownAttention(ValueError):
    """An attention call of a transformers model asks for something unsupported. The message names it.

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
