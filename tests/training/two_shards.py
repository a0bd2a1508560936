"""What each of two processes does in test_processes.py where weights are sharded (FSDP); run by `torchrun`.

Accelerate shards on GPUs only. This shards with PyTorch, on CPUs, and tries what is ours: taking the state of a sharded
model apart and putting it together, norms by group, and the loss over shares of the windows.

    torchrun --nproc-per-node 2 two_shards.py FILE
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import torch
from accelerate import PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from saccade.models import DecoderLM, ModelConfig
from saccade.training import evaluate, gradient_norms
from saccade.training.language.objective import loss_of
from saccade.training.norms import weight_norms
from saccade.training.state import capture, restore, whole_weights

CONFIG = ModelConfig(31, width=12, layers=2, heads=2, hidden=16, context=11)
WINDOWS = torch.arange(84).view(7, 12) ** 2 % 31


def make() -> DecoderLM:
    torch.manual_seed(3)
    return DecoderLM(CONFIG)


def step(model: DecoderLM, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model, WINDOWS).backward()
    optimizer.step()


def main(path: str) -> None:
    processes = PartialState(cpu=True)
    accelerator = SimpleNamespace(
        distributed_type="FSDP",
        scaler=None,
        num_processes=processes.num_processes,
        process_index=processes.process_index,
        is_main_process=processes.is_main_process,
        # Of a float on the CPU: the sum over processes.
        reduce=lambda tensor, how: torch.distributed.all_reduce(tensor) or tensor,
    )
    model = make()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.decoder.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    step(model, optimizer)
    first = capture(accelerator, model, model, optimizer)
    gathered = [first]
    torch.distributed.broadcast_object_list(gathered)  # as if all had read the checkpoint
    loaded = gathered[0]
    step(model, optimizer)
    second = capture(accelerator, model, model, optimizer)
    restore({**loaded, "random": first["random"]}, accelerator, model, model, optimizer)
    again = capture(accelerator, model, model, optimizer)
    step(model, optimizer)
    made = {
        "first": first,
        "again": again,
        "second": second,
        "resumed": capture(accelerator, model, model, optimizer),
        "weights": whole_weights(accelerator, model, model),
        "gradients": gradient_norms(model),
        "norms": weight_norms(model),
        "loss": evaluate(model, WINDOWS, batch=2, accelerator=accelerator),
    }
    if processes.is_main_process:
        torch.save(made, path)
    # The caches of DTensor hold the group: its threads cannot be joined, and would race the end of the interpreter.
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
