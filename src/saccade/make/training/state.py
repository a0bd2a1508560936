"""The state of a run at a step, as plain values: weights, optimizer, loss scale and random states."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from .processes import is_sharded

if TYPE_CHECKING:
    from accelerate import Accelerator


def capture(
    accelerator: Accelerator, model: nn.Module, prepared: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Weights (unrounded), optimizer, loss scale and random states, on the CPU.

    All processes call it; if tensors are sharded, only the main one gets them.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    module = prepared if is_sharded(accelerator) else model
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    plain = _unwrapped(optimizer)
    return {
        "model": _copied(get_model_state_dict(module, options=whole)),
        # Without this check PyTorch would make a step to create the state, which AdamW's bias correction counts.
        "optimizer": _copied(get_optimizer_state_dict(module, plain, options=whole)) if plain.state else {},
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "random": _of_all(accelerator, random_states()),
    }


def whole_weights(accelerator: Accelerator, model: nn.Module, prepared: nn.Module) -> dict[str, torch.Tensor]:
    """The whole weights: the model's own, or, if they are sharded, gathered on the main process."""
    if not is_sharded(accelerator):
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, torch.Tensor], get_model_state_dict(prepared, options=whole))


def restore(
    state: dict[str, Any],
    accelerator: Accelerator,
    model: nn.Module,
    prepared: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Restore a state made by `capture`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

    module = prepared if is_sharded(accelerator) else model
    whole = StateDictOptions(full_state_dict=True)
    # `set_model_state_dict` replaces values of the mapping by shards.
    set_model_state_dict(module, dict(state["model"]), options=whole)
    if state["optimizer"].get("state"):
        set_optimizer_state_dict(module, _unwrapped(optimizer), _copied(state["optimizer"]), options=whole)
    if accelerator.scaler is not None and state["scaler"]:
        accelerator.scaler.load_state_dict(state["scaler"])
    if accelerator.process_index < len(state["random"]):
        set_random_states(state["random"][accelerator.process_index])


def random_states() -> dict[str, Any]:
    """Random states of PyTorch (CPU and every GPU), NumPy and Python, as values that load without running code."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    random.setstate(states["python"])


def step_seed(seed: int, step: int, micro: int, process: int) -> int:
    """64-bit seed of the random numbers inside a step (dropout). Equal arguments give equal seeds."""
    return int(np.random.SeedSequence((seed, step, micro, process)).generate_state(1, np.uint64)[0])


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer without Accelerate's wrapper, which skips some steps."""
    return getattr(optimizer, "optimizer", optimizer)


def _of_all(accelerator: Accelerator, value: Any) -> list[Any]:
    if accelerator.num_processes == 1:
        return [value]
    from accelerate.utils import gather_object

    return gather_object([value])


def _copied(value: Any) -> Any:
    """A copy with all tensors cloned to the CPU, so that training in place does not change it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value
