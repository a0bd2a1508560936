"""Norms of gradients and weights, by part of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """The Euclidean norm of the gradients of each group of parameters.

    A group is a part of a block, such as `decoder.blocks.3.attention`, or the first part of a name without a number
    (`embedding`); all normalisation layers are one group, `norms`. Parameters without a gradient count as 0. The
    squared norms of all groups add up to the squared norm of the whole gradient, which is what clipping uses.

    Example:
        >>> import torch, saccade
        >>> model = saccade.models.DecoderLM(saccade.models.ModelConfig(5, width=8, layers=1, heads=2, context=4))
        >>> model(torch.tensor([[0, 1, 2]])).sum().backward()
        >>> list(saccade.training.gradient_norms(model))
        ['embedding', 'norms', 'decoder.blocks.0.attention', 'decoder.blocks.0.feed_forward']
    """
    return _norms(model, lambda parameter: parameter.grad)


def weight_norms(model: nn.Module) -> dict[str, float]:
    """The Euclidean norm of the weights of each group of parameters (see `parameter_groups`)."""
    return _norms(model, lambda parameter: parameter.detach())


def parameter_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Parameters grouped by the part of the model they belong to.

    A part ends with the name after the number of a block (`decoder.blocks.3.attention`), or is the first part of a name
    without a number (`embedding`); all normalisation layers are one group, `norms`.
    """
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        group = "norms" if "norm" in type(owner).__name__.lower() else _part(name)
        groups.setdefault(group, []).append(parameter)
    return groups


def _part(name: str) -> str:
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return parts[0] if number is None else ".".join(parts[: min(number + 2, len(parts) - 1)])


def _norms(model: nn.Module, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, float]:
    squares = {}
    for group, parameters in parameter_groups(model).items():
        tensors = [tensor for parameter in parameters if (tensor := tensor_of(parameter)) is not None]
        squares[group] = _square(tensors)
    return (
        dict(zip(squares, torch.stack([square.double() for square in squares.values()]).sqrt().tolist(), strict=True))
        if squares
        else {}
    )


@torch.no_grad()
def _square(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros(())
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = torch.stack([_unsharded(torch.linalg.vector_norm(tensor, dtype=dtype)) for tensor in tensors])
    return norms.square().sum().cpu()


def _unsharded(tensor: Tensor) -> Tensor:
    """The whole tensor of a weight that may be sharded among processes."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
