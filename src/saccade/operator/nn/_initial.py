"""The initial weights. Every module of `saccade.nn` follows these two rules.

1. By fan-in: matrices are normal with standard deviation fan_in ** -0.5, biases 0. Features of variance 1 stay so, and
   attention logits start with a variance near 1. A fixed 0.02 leaves narrow models with nearly uniform heads, which
   then take long to become anything else.
2. What writes into a residual stream that nothing normalises afterwards (pre-norm and parallel stacks) is divided by
   sqrt(number of writers), so that the stream's variance does not grow with depth (Radford et al., GPT-2, 2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def by_fan_in(module: nn.Module) -> None:
    """Initialise every linear layer in `module` by its fan-in, rule 1 above."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@torch.no_grad()
def divide_writers(writers: list[nn.Linear]) -> None:
    """Rule 2, for all the layers that write into one residual stream."""
    for layer in writers:
        layer.weight.mul_(len(writers) ** -0.5)


def begin_anew(module: nn.Module | None) -> None:
    """Draw the weights of a module again, if it has any, and everything else that it draws at random."""
    if module is not None and (hasattr(module, "reset_parameters") or any(True for _ in module.parameters())):
        reset: Any = module.reset_parameters
        reset()
