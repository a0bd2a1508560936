"""The oracle of pruning: the whole model, whose output projections read 0 from the heads that are removed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saccade import prune

EXACT = dict(rtol=1e-12, atol=1e-12)  # float64: 1e-16 an operation, values of size 1, a few thousand terms


def masked(output: nn.Module, heads: Sequence[int], width: int) -> None:
    """Let an output projection read 0 from these heads, each `width` columns wide."""

    def zero(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kept = torch.ones(inputs[0].shape[-1], dtype=inputs[0].dtype)
        for head in heads:
            kept[head * width : (head + 1) * width] = 0
        return (inputs[0] * kept, *inputs[1:])

    output.register_forward_pre_hook(zero)


def numbered(model: nn.Module) -> nn.Module:
    """A copy whose every entry says where it stood in its parameter: pruned, it tells which entries stay."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape))
    return twin


def assert_equals_masked(
    model: nn.Module,
    removed: Mapping[str, Sequence[int]],
    outputs: Mapping[str, tuple[str, int]],
    run: Callable[[nn.Module], Tensor | Sequence[Tensor]],
) -> nn.Module:
    """Prune a float64 model: outputs, and the gradients of all that stays, are those of the masked one.

    Args:
        removed: heads by the path of an attention layer.
        outputs: of each of those, the path of its output projection and the width of a head in it.
        run: the tensors that are compared.
    """
    model.zero_grad()
    whole, twin, unmasked = copy.deepcopy(model), numbered(model), copy.deepcopy(model)
    for path, heads in removed.items():
        output, width = outputs[path]
        masked(whole.get_submodule(output), heads, width)
    prune(twin, removed)
    report = prune(model, removed)
    assert report.parameters[1] == sum(p.numel() for p in model.parameters()) < report.parameters[0]
    expected, got, plain = (_tensors(run(one)) for one in (whole, model, unmasked))
    assert any(not torch.allclose(one, other, atol=1e-6) for one, other in zip(plain, expected, strict=True))
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, **EXACT)
    for tensors in (expected, got):
        sum(
            (tensor * torch.arange(1, tensor.numel() + 1).view(tensor.shape).sin()).sum() for tensor in tensors
        ).backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for (name, parameter), numbers in zip(model.named_parameters(), twin.parameters(), strict=True):
        theirs = gradients[name]
        assert (theirs is None) == (parameter.grad is None), name
        if theirs is not None:
            kept = theirs.flatten()[numbers.detach().long()]
            scale = max(1.0, float(kept.abs().max()))
            torch.testing.assert_close(parameter.grad, kept, rtol=1e-10, atol=1e-11 * scale, msg=name)
    return model


def _tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)
