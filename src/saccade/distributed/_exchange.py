"""Messages between ranks: posted together, waited for later. What goes wrong is told in one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Message = tuple[int, Tensor]  # (rank within the group, a contiguous tensor)


class Pending:
    """Messages under way. `wait` returns what was received, in the order in which it was posted."""

    def __init__(self, work: list[Any], sent: list[Tensor], received: list[Tensor], operation: str) -> None:
        self._work, self._sent, self._received, self._operation = work, sent, received, operation

    def wait(self) -> list[Tensor]:
        answered(self._operation, lambda: [one.wait() for one in self._work])
        self._sent = []
        return self._received


def post(group: Any, sends: Sequence[Message], receives: Sequence[Message], operation: str) -> Pending:
    """Begin to send and receive; messages without entries are left out. Sent tensors must not be changed until `wait`."""
    world = dist.get_process_group_ranks(group) if group is not None else range(dist.get_world_size())
    work = [dist.P2POp(dist.isend, x, world[rank], group) for rank, x in sends if x.numel()]
    work += [dist.P2POp(dist.irecv, x, world[rank], group) for rank, x in receives if x.numel()]
    posted = answered(operation, lambda: dist.batch_isend_irecv(work)) if work else []
    return Pending(posted, [x for _, x in sends], [x for _, x in receives], operation)


def answered(operation: str, call: Callable[[], T]) -> T:
    """`call()`. RuntimeError, naming the operation, if another rank does not answer."""
    try:
        return call()
    except RuntimeError as error:
        raise RuntimeError(
            f"saccade.distributed: {operation}: another rank does not answer. It has ended, has raised an error, or has "
            f"not made the same call within the timeout of the process group ({str(error).splitlines()[0]})"
        ) from error


def agree(group: Any, facts: dict[str, Any], operation: str) -> list[dict[str, Any]]:
    """The facts of every rank. ValueError on every rank, saying which rank and what, unless all are the same.

    Facts whose name begins with an underscore may differ.
    """
    every: list[Any] = [None] * dist.get_world_size(group)
    answered(operation, lambda: dist.all_gather_object(every, facts, group))
    for name in facts:
        values = [of.get(name) for of in every]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None and not name.startswith("_"):
            raise ValueError(
                f"{operation}: ranks disagree: {name} is {values[0]} on rank 0 and {values[other]} on rank {other}"
            )
    return every


def same_everywhere(group: Any, number: int, device: torch.device, operation: str, *more: int) -> list[int] | None:
    """`more` as rank 0 has it, or None if `number` differs between ranks. 63 bits each."""
    mine = torch.tensor([number, *more], dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    answered(operation, lambda: dist.all_gather(every, mine, group))
    numbers = torch.stack(every).tolist()
    return numbers[0][1:] if all(line[0] == numbers[0][0] for line in numbers) else None
