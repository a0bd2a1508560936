"""One of two ranks of a group in a namespace of its own: `rank_on_link.py RANK FILE`, which gets its answer."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from shared_calls import LINKED, attend
from slow_link import ADDRESSES

if __name__ == "__main__":
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:29533", rank=rank, world_size=2)
    torch.save(attend(rank, LINKED), sys.argv[2])
    dist.destroy_process_group()
