"""A module's state written as a file is, read, and loaded into another module of its kind.

Shape legend: those of the target's own tensors.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..findings._finding import Inapplicable, Location, TargetError
from ..target._source import attribute_line
from ..target._steady import steady, tolerance
from ..target._subject import Subject

MOST = 2**26  # bytes of state: a large model is written by its own means, and takes its time


@dataclass(frozen=True)
class SavingLoss:
    """What came of it where not all is as it was."""

    raised: str = ""  # by saving or loading
    refused: bool = False  # what is saved is more than tensors, and read with weights_only=False alone
    change: float = 0.0  # of the output, at most
    size: float = 0.0  # of the output
    names: tuple[str, ...] = ()  # tensors that the state leaves out and that another module has otherwise
    location: Location | None = None


def lost(subject: Subject) -> SavingLoss | None:
    """None where the loaded module gives what the saved one gives, or where that cannot be asked."""
    one = subject.fresh()
    if one.module is None or sum(t.nbytes for t in one.module.state_dict().values() if isinstance(t, Tensor)) > MOST:
        return None
    other = _another(one)
    if other.module is None:
        return None
    try:
        other.module.load_state_dict(_read(one.module))
    except pickle.UnpicklingError as error:
        return SavingLoss(_words(error), refused=True)
    except Exception as error:  # what a target's own state_dict and load_state_dict may raise is not known
        return SavingLoss(_words(error))
    return _compared(one, other)


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _read(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _another(subject: Subject) -> Subject:
    """Made anew with other random numbers where its class is known, else a copy whose state is another."""
    made = subject.remade()
    if made is not None:
        return made
    copy = subject.fresh()
    assert copy.module is not None
    with torch.no_grad():
        for tensor in copy.module.state_dict().values():
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor.mul_(-0.5).add_(0.25)
    return copy


def _compared(one: Subject, other: Subject) -> SavingLoss | None:
    inputs = one.inputs(2, 7)
    try:
        before, after = steady(one, inputs).out, steady(other, inputs).out
    except (Inapplicable, TargetError):
        return None  # told by other checks
    if before.shape != after.shape or not before.isfinite().all():
        return None
    change = float((after - before).abs().max())
    if change <= tolerance(one, inputs, before):
        return None
    names = tuple(_left_out(one.module, other.module))
    return SavingLoss(change=change, size=float(before.abs().max()), names=names, location=_line(one.module, names))


def _left_out(one: nn.Module | None, other: nn.Module | None) -> list[str]:
    """Buffers and plain tensors that are no part of the state, and differ."""
    if one is None or other is None:
        return []
    theirs = dict(other.named_modules())
    found = []
    for path, part in one.named_modules():
        for name, tensor in {**vars(part), **dict(part.named_buffers(recurse=False))}.items():
            same = {**vars(theirs[path]), **theirs[path]._buffers}.get(name) if path in theirs else None
            if isinstance(tensor, Tensor) and isinstance(same, Tensor) and not torch.equal(tensor, same):
                found.append(f"{path}.{name}".lstrip("."))
    return found


def _line(module: nn.Module | None, names: tuple[str, ...]) -> Location | None:
    if module is None or not names:
        return None
    owner, _, name = names[0].rpartition(".")
    return attribute_line(module.get_submodule(owner), name)
