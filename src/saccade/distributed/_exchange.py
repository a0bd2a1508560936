"""Messages between ranks: posted together, waited for later. A rank that does not answer is named by `_faults`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._faults import WAITING, answered, timeout

Message = tuple[int, Tensor]  # (rank within the group, a contiguous tensor)
_DATA, _AGREEMENT = 0, 1  # tags: a rank that is at another call must not read one as the other
_NAMED = 48  # bytes of an operation's name


class Pending:
    """Messages under way. Sent tensors must not be changed until `finish`."""

    def __init__(
        self, group: Any, sends: Sequence[Message], receives: Sequence[Message], operation: str, tag: int = _DATA
    ) -> None:
        self._group, self._operation = group, operation
        self._sent, self._received = [x for _, x in sends], [x for _, x in receives]
        self._work: list[Any] = []
        world = dist.get_process_group_ranks(group) if group is not None else range(dist.get_world_size())
        posts = [dist.P2POp(dist.irecv, x, world[rank], group, tag) for rank, x in receives if x.numel()]
        self._awaited = len(posts)
        posts += [dist.P2POp(dist.isend, x, world[rank], group, tag) for rank, x in sends if x.numel()]
        self._peers = [[one.peer] for one in posts]
        if posts:
            with answered(group, operation, sorted({one.peer for one in posts})):
                self._work = dist.batch_isend_irecv(posts)
        if len(self._work) < len(posts):  # a backend that gives one handle for all
            self._awaited, self._peers = len(self._work), [sorted({one.peer for one in posts})] * len(self._work)
        # With gloo a wait may end earlier than the group's timeout; with NCCL it would block the host.
        on_host = bool(posts) and posts[0].tensor.device.type == "cpu"
        self._patience = (timedelta(seconds=WAITING * timeout(group)),) if on_host else ()

    def received(self) -> list[Tensor]:
        """The received tensors, in the order in which they were posted; they are the caller's from then on."""
        self._wait(slice(self._awaited))
        received, self._received = self._received, []
        return received

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._wait(slice(self._awaited, None))
        self._sent = []

    def _wait(self, which: slice) -> None:
        for work, peers in zip(self._work[which], self._peers[which], strict=True):
            with answered(self._group, self._operation, peers):
                work.wait(*self._patience)


def exchanged(group: Any, sends: Sequence[Message], receives: Sequence[Message], operation: str) -> list[Tensor]:
    """Send and receive, and wait for both; messages without entries are left out."""
    pending = Pending(group, sends, receives, operation)
    received = pending.received()
    pending.finish()
    return received


def agree(group: Any, facts: dict[str, Any], operation: str) -> list[dict[str, Any]]:
    """The facts of every rank. ValueError on every rank, saying which rank and what, unless all are the same.

    A fact `_name` may differ; a message shows it in place of the fact `name`. `error` is None, or the text of an error
    that the caller raises afterwards: if only some ranks have one, all raise it here.
    """
    every: list[Any] = [None] * dist.get_world_size(group)
    _headers(group, operation, torch.device(dist.distributed_c10d._get_object_coll_device(group)))
    with answered(group, operation):
        dist.all_gather_object(every, facts, group)
    world = dist.get_process_group_ranks(group or dist.group.WORLD)
    errors = [of.get("error") for of in every]
    if None not in errors:
        return every
    failed = next((rank for rank, error in enumerate(errors) if error is not None), None)
    if failed is not None:
        raise ValueError(f"{operation}: rank {world[failed]} got an error: {errors[failed]}")
    for name in (name for name in facts if not name.startswith("_")):
        values = [of.get(name) for of in every]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            shown = [f"{every[rank].get(f'_{name}', values[rank])} on rank {world[rank]}" for rank in (0, other)]
            raise ValueError(f"{operation}: ranks disagree: {name} is {shown[0]} and {shown[1]}")
    return every


def agree_quickly(group: Any, facts: dict[str, Any], device: torch.device, operation: str, more: int = 0) -> int:
    """As `agree`, by one message of a digest where all is the same. Gives `more` (63 bits) as the first rank has it."""
    number = int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "big") >> 1
    headers = _headers(group, operation, device, number, more)
    if any(header[0] != number for header in headers):
        agree(group, facts, operation)
    return headers[0][1]


def _headers(group: Any, operation: str, device: torch.device, number: int = 0, more: int = 0) -> list[list[int]]:
    """`number` and `more` of each rank. ValueError on every rank if they are not at the same operation.

    Every agreement begins with this message of one size: gloo ends processes that receive another size than expected.
    """
    name = torch.frombuffer(bytearray(operation.encode().ljust(_NAMED)[:_NAMED]), dtype=torch.int64)
    mine = torch.cat((torch.tensor([number, more]), name)).to(device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    me = dist.get_rank(group)
    every[me] = mine
    others = [(rank, header) for rank, header in enumerate(every) if rank != me]
    pending = Pending(group, [(rank, mine) for rank, _ in others], others, operation, _AGREEMENT)
    pending.received()
    pending.finish()
    rows = [header.tolist() for header in every]
    other = next((rank for rank, row in enumerate(rows) if row[2:] != rows[0][2:]), None)
    if other is not None:
        names = [row[2:].cpu().numpy().tobytes().decode(errors="replace").strip() for row in (every[0], every[other])]
        world = dist.get_process_group_ranks(group or dist.group.WORLD)
        raise ValueError(f"ranks disagree: rank {world[0]} is in {names[0]} and rank {world[other]} in {names[1]}")
    return rows
