"""Messages between ranks: posted together, waited for later. Failures become one message that names the operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Message = tuple[int, Tensor]  # (rank within the group, a contiguous tensor)


class Pending:
    """Messages under way. Sent tensors must not be changed until `finish`."""

    def __init__(self, group: Any, sends: Sequence[Message], receives: Sequence[Message], operation: str) -> None:
        self._operation, self._sent, self._received = operation, [x for _, x in sends], [x for _, x in receives]
        self._work: list[Any] = []
        world = dist.get_process_group_ranks(group) if group is not None else range(dist.get_world_size())
        posts = [dist.P2POp(dist.irecv, x, world[rank], group) for rank, x in receives if x.numel()]
        self._awaited = len(posts)
        posts += [dist.P2POp(dist.isend, x, world[rank], group) for rank, x in sends if x.numel()]
        if posts:
            self._work = answered(operation, lambda: dist.batch_isend_irecv(posts))
        if len(self._work) < len(posts):  # a backend that gives one handle for all
            self._awaited = len(self._work)

    def received(self) -> list[Tensor]:
        """The received tensors, in the order in which they were posted; they are the caller's from then on."""
        answered(self._operation, lambda: [one.wait() for one in self._work[: self._awaited]])
        received, self._received = self._received, []
        return received

    def finish(self) -> None:
        """Wait until everything is sent."""
        answered(self._operation, lambda: [one.wait() for one in self._work[self._awaited :]])
        self._sent = []


def exchanged(group: Any, sends: Sequence[Message], receives: Sequence[Message], operation: str) -> list[Tensor]:
    """Send and receive, and wait for both; messages without entries are left out."""
    pending = Pending(group, sends, receives, operation)
    received = pending.received()
    pending.finish()
    return received


def answered(operation: str, call: Callable[[], T]) -> T:
    """`call()`. RuntimeError, naming the operation, if another rank does not answer."""
    try:
        return call()
    except RuntimeError as error:
        raise RuntimeError(
            f"saccade.distributed: {operation}: another rank does not answer. It has ended, has raised an error, "
            f"or has not made the same call within the timeout of the process group ({str(error).splitlines()[0]})"
        ) from error


def agree(group: Any, facts: dict[str, Any], operation: str) -> list[dict[str, Any]]:
    """The facts of every rank. ValueError on every rank, saying which rank and what, unless all are the same.

    A fact `_name` may differ; a message shows it in place of the fact `name`.
    """
    every: list[Any] = [None] * dist.get_world_size(group)
    answered(operation, lambda: dist.all_gather_object(every, facts, group))
    for name in (name for name in facts if not name.startswith("_")):
        values = [of.get(name) for of in every]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            first, second = (every[rank].get(f"_{name}", values[rank]) for rank in (0, other))
            raise ValueError(f"{operation}: ranks disagree: {name} is {first} on rank 0 and {second} on rank {other}")
    return every


def same_everywhere(group: Any, number: int, device: torch.device, operation: str, *more: int) -> list[int] | None:
    """`more` as rank 0 has it, or None if `number` differs between ranks. 63 bits each."""
    mine = torch.tensor([number, *more], dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    answered(operation, lambda: dist.all_gather(every, mine, group))
    numbers = torch.stack(every).tolist()
    return numbers[0][1:] if all(line[0] == numbers[0][0] for line in numbers) else None
