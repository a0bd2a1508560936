"""Runs in several processes: sharing a batch, and raising an error of one process in all."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch

from .settings import Execution, Settings

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

T = TypeVar("T")


def accelerator_for(settings: Settings) -> Accelerator:
    """The `Accelerator`, set up from its launcher and the environment.

    Raises ValueError if the machine does not support the precision, has more processes than the batch has windows, or
    a number of them that cannot share sequences.
    """
    # Accelerate is an extra, and slow to import.
    from accelerate import Accelerator

    execution = settings.execution.settled
    state = joined()
    if execution.precision == "fp16" and state.device.type == "cpu":
        raise ValueError("precision: 'fp16' needs a GPU; on a CPU use 'bf16' or 'no'")
    if execution.compile and state.device.type == "cpu" and not _has_compiler():
        raise ValueError("compile: needs a C++ compiler on a CPU, and there is none (g++ or clang++)")
    _check_sequences(execution, state.num_processes)
    parts = state.num_processes // execution.context_parallel * execution.accumulate
    if settings.batch < parts:
        raise ValueError(
            f"batch: {settings.batch} windows cannot be split among {state.num_processes} processes with "
            f"{execution.accumulate} micro-batches each"
        )
    _forget_another_precision(execution.precision)
    backend = "inductor" if execution.compile else None
    accelerator = Accelerator(mixed_precision=execution.precision, dynamo_backend=backend)
    if is_sharded(accelerator) and execution.context_parallel > 1:
        raise ValueError("context_parallel: is not there for sharded weights (FSDP); use one of them")
    return accelerator


def _check_sequences(execution: Execution, processes: int) -> None:
    shared = execution.context_parallel
    if processes % shared:
        raise ValueError(
            f"context_parallel: needs a multiple of {shared} processes, got {processes}; start them with "
            f"`torchrun --nproc-per-node {shared} -m saccade train lm ...`"
        )
    if execution.compile and shared > 1:
        raise ValueError("context_parallel: a compiled model cannot share sequences; use one of them")


def _forget_another_precision(precision: str) -> None:
    """Reset Accelerate, which keeps the first precision for the life of the process, before a run with another one."""
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state.get("_mixed_precision", precision) != precision:
        AcceleratorState._reset_state()


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether weights are sharded among processes (FSDP)."""
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type)) == "FSDP"


def own_parts(
    accelerator: Accelerator, split: Callable[[T, int], list[T]], batch: T, accumulate: int, sharing: int = 1
) -> list[T]:
    """The micro-batches of this process, on its device. Each item is in exactly one process, or in those that share it.

    Args:
        split: splits a batch (tensors, or dictionaries of them) into a number of parts. Parts may differ by an item;
            the weights of their losses correct for that.
        sharing: number of consecutive processes that get the same micro-batches.
    """
    from accelerate.utils import send_to_device

    parts = split(batch, accelerator.num_processes // sharing * accumulate)
    first = accelerator.process_index // sharing * accumulate
    return [send_to_device(part, accelerator.device) for part in parts[first : first + accumulate]]


class OtherProcessFailed(Exception):
    """Raised when another process failed; the main process reports that error."""


def together(processes: Accelerator | PartialState, action: Callable[[], T]) -> T:
    """Call `action` in every process. If it fails in any, every process raises, so that no process waits forever.

    Raises:
        Exception: in the main process, the first error.
        OtherProcessFailed: in all other processes.
    """
    if processes.num_processes == 1:
        return action()
    from accelerate.utils import gather_object

    result, error = None, None
    try:
        result = action()
    except Exception as raised:
        error = raised
    errors = [entry for entry in gather_object([error]) if entry is not None]
    if errors:
        raise errors[0] if processes.is_main_process else OtherProcessFailed(str(errors[0]))
    return result  # type: ignore[return-value]


@contextlib.contextmanager
def failures_named(processes: Accelerator | PartialState, *alike: type[Exception]) -> Iterator[None]:
    """A block in which all processes compute together. An error of one ends the others with one that names it.

    Args:
        alike: errors that all processes raise by themselves.

    Raises:
        RankFailed: another process has ended, hangs or raised an error.
    """
    if processes.num_processes == 1:
        yield
        return
    from ...distributed._faults import answered, report

    try:
        with answered(None, "training"):
            yield
    except Exception as error:
        if not isinstance(error, (OtherProcessFailed, *alike)):
            report(error)
        raise


def any_of(accelerator: Accelerator, flag: bool) -> bool:
    """Whether the flag is set in any process."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), "sum") > 0)


def slowest(accelerator: Accelerator, seconds: float) -> float:
    """The largest `seconds` of all processes."""
    if accelerator.num_processes == 1:
        return seconds
    times = torch.tensor([seconds], dtype=torch.float64, device=accelerator.device)
    return float(accelerator.gather(times).max())


def is_main_process() -> bool:
    """Whether this process writes files and output."""
    return bool(joined().is_main_process)


def joined() -> PartialState:
    """The state of all processes of the run. The first call waits for all of them.

    A process group that this starts is destroyed when the interpreter exits.
    """
    # Imported before the group exists: its default arguments would keep the group alive.
    import torch.distributed.nn.functional
    from accelerate import PartialState

    # Otherwise Accelerate treats every process on a machine without a GPU as a single one.
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true") or not torch.accelerator.is_available()
    started_before = torch.distributed.is_initialized()
    state = PartialState(cpu=on_cpu)
    if torch.distributed.is_initialized() and not started_before:
        atexit.register(_leave)
    return state


def _leave() -> None:
    """Destroy the process group before the interpreter ends.

    A thread of Gloo frees the tensors of a collective after the caller has continued. If it needs the interpreter's
    lock while the interpreter ends, the process aborts ("terminate called without an active exception"). The group
    joins its threads once nothing refers to it; Accelerate's states and reference cycles of modules do.
    """
    from accelerate.state import AcceleratorState

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()


def _has_compiler() -> bool:
    return "CXX" in os.environ or any(shutil.which(name) for name in ("g++", "clang++", "c++", "cl"))
