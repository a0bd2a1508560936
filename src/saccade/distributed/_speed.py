"""How fast the ranks of a group compute and exchange messages: measured once, and the same on all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..operator._attention import choose
from ..operator._checks import make_call
from ._costs import BACKWARD, CallSizes, RankSpeed
from ._exchange import Pending
from ._faults import answered

_ROUNDS = 5
_HEADS, _ROWS, _MOST_ROWS = 4, 1024, 2**14
_LONG_ENOUGH = 5e-3  # seconds of a forward pass
_ROWS_BETWEEN, _TURNS = 512, 8  # of work between messages
_BYTES = 2**22  # of a message
_OPERATION = "plan, measuring the speed of the ranks"

_MEASURED: WeakKeyDictionary[Any, dict[tuple[Any, ...], RankSpeed]] = WeakKeyDictionary()


def speed_of(group: Any, sizes: CallSizes) -> RankSpeed:
    """The speed of a group of several ranks, for these widths and dtype. Every rank calls it.

    The first call takes 1 to 2 seconds. Its result stays with the group, also when other programs start, or the
    number of threads or the device changes; a new group is measured anew.
    """
    known = _MEASURED.setdefault(dist.group.WORLD if group is None else group, {})
    kind = (*sizes.widths, sizes.dtype)
    if kind not in known:
        with torch.inference_mode(False), torch.enable_grad():
            known[kind] = _measured(group, sizes)
    return known[kind]


def _measured(group: Any, sizes: CallSizes) -> RankSpeed:
    device = torch.device("cpu")
    if "nccl" in dist.get_backend(group) and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    rows, compute = _ROWS, _passes(sizes, _ROWS, device)
    forward = _seconds(group, device, compute[0])
    while forward < _LONG_ENOUGH and rows < _MOST_ROWS:
        rows *= 2
        compute = _passes(sizes, rows, device)
        forward = _seconds(group, device, compute[0])
    exchange = _exchanges(group, device)
    idle, message = (_seconds(group, device, lambda n=n: exchange(n)) for n in (1, _BYTES))  # type: ignore[misc]
    latency = max(_latency(group, device, _passes(sizes, _ROWS_BETWEEN, device)[0], exchange), idle)
    both = _seconds(group, device, lambda: exchange(_BYTES, compute[0]))
    disturbed = max(both - max(forward, message), 0.0) / min(forward, message)
    operations = 2.0 * sum(sizes.widths) * _HEADS * rows**2
    return RankSpeed(
        operations / forward,
        operations * BACKWARD / _seconds(group, device, compute[1]),
        _BYTES / max(message - idle, message / 2),
        latency,
        _memory(group, device),
        max(1.0 - disturbed, -1.0),
    )


def _latency(group: Any, device: torch.device, work: Callable[[], Any], exchange: Callable[[int], None]) -> float:
    """Seconds of a message without bytes between ranks that compute. Where these share cores, a message then waits for
    a core: several times as long as between ranks that are idle."""
    alone = _seconds(group, device, lambda: [work() for _ in range(_TURNS)])
    both = _seconds(group, device, lambda: [(work(), exchange(1)) for _ in range(_TURNS)])  # type: ignore[func-returns-value]
    return (both - alone) / _TURNS


def _passes(sizes: CallSizes, rows: int, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A forward and a backward pass without a mask, outside of what observes calls."""
    draw = torch.Generator(device).manual_seed(0)
    width, value_width = sizes.widths
    tensors = [
        torch.randn(1, _HEADS, rows, width, generator=draw, device=device).to(sizes.dtype).requires_grad_()
        for width in (width, width, value_width)
    ]
    query, key, value = tensors
    call = make_call(query, key, value, None)

    def forward() -> torch.Tensor:
        out: torch.Tensor = choose(call, "auto")[0].run(call)[0]
        return out

    out = forward()
    ones = torch.ones_like(out)
    return forward, lambda: torch.autograd.grad(out, tensors, ones, retain_graph=True)


def _exchanges(group: Any, device: torch.device) -> Callable[..., None]:
    """Send to the next rank and receive from the one before: `exchange(bytes, meanwhile)`. Messages are cut out of
    tensors and put into others, as those of a call are."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    message = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    into = torch.zeros_like(message)

    def exchange(count: int, meanwhile: Callable[[], Any] = bool) -> None:
        received = torch.empty_like(message[:count])
        sends, receives = [((rank + 1) % ranks, message[:count].clone())], [((rank - 1) % ranks, received)]
        pending = Pending(group, sends, receives, _OPERATION)
        meanwhile()
        pending.received()
        into[:count] = received
        pending.finish()

    return exchange


def _memory(group: Any, device: torch.device) -> float:
    """Bytes/s of adding to a sum as the ring does, which reads three tensors and writes two."""
    total, more = torch.ones(2, 2**16, 64, device=device)  # more than caches hold
    weight = torch.ones(len(total), 1, device=device)
    return 5 * total.nbytes / _seconds(group, device, lambda: total.mul_(weight).addcmul_(more, weight))


def _seconds(group: Any, device: torch.device, call: Callable[[], Any]) -> float:
    """The median of some rounds, of the slowest rank."""
    taken = []
    for _ in range(_ROUNDS + 1):
        with answered(group, _OPERATION):
            dist.barrier(group)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(taken[1:]), dtype=torch.float64, device=device)
    with answered(group, _OPERATION):
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return float(slowest)
