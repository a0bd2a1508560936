"""Dtype, device and state: everything follows when the module is moved, cast, saved and loaded.

The device is tested on `meta`, which every PyTorch has: shapes without numbers, and the same errors as a GPU gives when
a tensor was left on the CPU.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...support._restored import seeded
from ..findings._finding import Finding, Inapplicable, Location, TargetError
from ..subject._check import Check
from ..subject._inputs import NamedInputs
from ..subject._source import attribute_line, line_with
from ..subject._steady import steady, tolerance
from ..subject._subject import Subject

_finding = partial(Finding, "dtype and device", "robustness")
_error = partial(Finding, "dtype and device", "robustness", "error")

NAMES = {torch.float64: "float64", torch.bfloat16: "bfloat16"}
_MOST = 2**26  # bytes of state: a large model is written by its own means, and takes its time
# What PyTorch says of tensors on two devices; other errors on `meta` only say that it holds no numbers.
APART = re.compile(r"on the same device|different devices?|not on the expected device|two devices", re.IGNORECASE)
# What PyTorch says where it has no kernel for a dtype: of grouped products (experts), of Fourier transforms.
LACKING = ("not implemented for", "without overflow", "to be Float32, BFloat16 or Float16", "Unsupported dtype")


def _run(subject: Subject) -> Iterator[Finding]:
    hidden = list(_unregistered(subject))
    yield from hidden
    unsaved = [] if hidden else list(_saved(subject))
    yield from unsaved
    if hidden or unsaved:
        return
    there = list(_device(subject))
    yield from there
    if any(finding.evidence.get("left_behind") for finding in there):
        return  # a tensor that stays behind keeps its dtype, too: one defect
    where = {finding.location for finding in there}
    yield from (finding for finding in _dtypes(subject) if finding.location not in where)


def _unregistered(subject: Subject) -> Iterator[Finding]:
    """Modules and parameters that are not registered with PyTorch."""
    if subject.module is None:
        return
    known = {id(part) for part in (*subject.module.modules(), *subject.module.parameters(), *subject.module.buffers())}
    for path, module in subject.module.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") and name in vars(nn.Module()):
                continue
            hidden = [part for part in _parts(value) if id(part) not in known]
            if not hidden:
                continue
            whole = f"{path}.{name}".lstrip(".")
            kind = "module" if isinstance(hidden[0], nn.Module) else "tensor with gradients"
            yield _error(
                f"`{whole}` holds {len(hidden)} {kind}{'s' if len(hidden) > 1 else ''} that are not registered with "
                "PyTorch.",
                "They are in neither parameters() nor state_dict(): not trained, not saved, not moved by .to(device).",
                f"self.{name} = nn.ModuleList([...])  # or nn.ModuleDict; a tensor: nn.Parameter(...)",
                {"attribute": whole, "hidden": len(hidden)},
                attribute_line(module, name),
            )
            return


def _parts(value: Any, depth: int = 0) -> Iterator[Any]:
    """Modules and learned tensors in plain containers, methods and partial functions."""
    if isinstance(value, nn.Module):
        if any(True for _ in value.parameters()):
            yield value
    elif isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            yield value
    elif depth < 3 and isinstance(value, (list, tuple, set)):
        for part in value:
            yield from _parts(part, depth + 1)
    elif depth < 3 and isinstance(value, Mapping):
        for part in value.values():
            yield from _parts(part, depth + 1)
    elif isinstance(value, partial):
        yield from _parts((value.func, *value.args), depth + 1)
    elif hasattr(value, "__self__") and depth < 3:
        yield from _parts(value.__self__, depth + 1)


def _saved(subject: Subject) -> Iterator[Finding]:
    """A new target of the same class with the saved and loaded state."""
    loss = _saving_loss(subject)
    if loss is None:
        return
    if loss.raised:
        yield _finding(
            "warning" if loss.refused else "error",
            f"Its state, saved and loaded again, raises {loss.raised}",
            "It cannot be read with torch.load(..., weights_only=True), the only safe way to read what others saved."
            if loss.refused
            else "A checkpoint of it cannot be used.",
            "Keep only tensors in state_dict(): register_buffer(name, tensor) and nn.Parameter(tensor).",
            {"raised": loss.raised, "saved": True},
            None,
        )
        return
    named = f" {', '.join(f'`{name}`' for name in loss.names)}" if loss.names else " what it computes with"
    yield _error(
        f"Saved and loaded into another one of its class, it gives another output (by {loss.change:.3g}, of"
        f" {loss.size:.3g}): its state leaves out{named}.",
        "What was trained is lost when it is saved: the loaded model computes something else.",
        f'self.register_buffer("{(*loss.names, "name")[0].rpartition(".")[2]}", ...)  # saved with the parameters',
        {"largest_difference": loss.change, "left_out": list(loss.names)},
        loss.location,
    )


def _first_error(subject: Subject, inputs: NamedInputs) -> tuple[TargetError | None, Tensor | None]:
    """The first error of calls without and with masks, which are given in the inputs' dtype and on their device; and
    the output without."""
    out = None
    for masks in ({}, *subject.masks(inputs)):
        try:
            with torch.no_grad(), seeded(0):
                result = subject.fresh()(inputs, **masks).out
            out = result if out is None else out
        except TargetError as error:
            return error, out
        except Inapplicable:
            continue
    return None, out


def _dtypes(subject: Subject) -> Iterator[Finding]:
    """Cast to another dtype, the target must compute in that dtype."""
    usual, _ = _first_error(subject, subject.inputs(2, 7))
    if usual is not None:
        return
    for dtype, name in NAMES.items():
        cast = subject.to(dtype)
        error, out = _first_error(cast, cast.inputs(2, 7, dtype=dtype))
        if error is not None and out is not None and any("float" in mask.words for mask in subject.reading.masks):
            continue  # it asks for a mask of floats, and may be given booleans: no fault of its own
        if error is not None and not any(words in error.error for words in LACKING):
            yield _error(
                f"With parameters and inputs in {name} it raises {error.error}",
                "It cannot be cast: not to half precision for speed, nor to float64 for tests.",
                "Take the dtype from the other operand: torch.zeros(n, n, dtype=scores.dtype), weights.to(v.dtype).",
                {"dtype": name, "raised": error.error},
                error.location,
            )
            return
        if out is not None and out.is_floating_point() and out.dtype != dtype and subject.form != "tokens":
            returned = str(out.dtype).removeprefix("torch.")
            yield _finding(
                "error" if dtype == torch.float64 else "warning",
                f"With parameters and inputs in {name} the output is in {returned}.",
                "The next layer, cast as this one was, raises on another dtype.",
                "Return the dtype of the input: return out.to(x.dtype).",
                {"dtype": name, "output": returned},
                line_with(subject, r"float32|\.float\(\)|torch\.(zeros|ones|empty|full)\("),
            )
            return


def _device(subject: Subject) -> Iterator[Finding]:
    """Moved to another device, the target must compute there."""
    inputs = subject.inputs(2, 7).map(lambda tensor: tensor.to("meta"))
    moved = subject.to(device="meta")
    error, _ = _first_error(moved, inputs)
    if error is None or not APART.search(error.error):
        return
    left = _left_behind(moved, inputs)
    where = _attribute_line(moved, left[0]) if left else None
    yield _error(
        f"Moved to another device (meta, which computes only shapes) it raises {error.error.rstrip('.!')}."
        + (f" The tensor `{left[0]}` stays behind: it is no buffer." if left else ""),
        "It runs only on the CPU.",
        f'self.register_buffer("{left[0].rpartition(".")[2]}", ..., persistent=False)'
        if left
        else "Create tensors on the input's device: torch.arange(length, device=x.device).",
        {"raised": error.error, "left_behind": left},
        where or error.location,
    )


def _attribute_line(subject: Subject, path: str) -> Location | None:
    """The line that gives a submodule's attribute its value."""
    owner, _, name = path.rpartition(".")
    return None if subject.module is None else attribute_line(subject.module.get_submodule(owner), name)


def _left_behind(moved: Subject, inputs: NamedInputs) -> list[str]:
    """Plain tensor attributes that `.to` does not move, if moving them fixes it."""
    left = []
    for path, module in () if moved.module is None else moved.module.named_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.device.type != "meta" and value.dim() > 0:
                left.append(f"{path}.{name}".lstrip("."))
                setattr(module, name, value.to("meta"))
    error, _ = _first_error(moved, inputs)
    return left if error is None or not APART.search(error.error) else []


# A state that is saved, read, and loaded into another module of its kind


@dataclass(frozen=True)
class _SavingLoss:
    """Errors and changes of the output by saving and loading a state."""

    raised: str = ""  # by saving or loading
    refused: bool = False  # what is saved is more than tensors, and read with weights_only=False alone
    change: float = 0.0  # of the output, at most
    size: float = 0.0  # of the output
    names: tuple[str, ...] = ()  # tensors that the state leaves out and that another module has otherwise
    location: Location | None = None


def _saving_loss(subject: Subject) -> _SavingLoss | None:
    """The loss by saving and loading; None if the loaded module gives the same outputs, or if this cannot be tested."""
    saved = subject.fresh()
    if (
        saved.module is None
        or sum(t.nbytes for t in saved.module.state_dict().values() if isinstance(t, Tensor)) > _MOST
    ):
        return None
    other = _other_instance(saved)
    if other.module is None:
        return None
    file = io.BytesIO()
    try:
        torch.save(saved.module.state_dict(), file)
        file.seek(0)
        other.module.load_state_dict(torch.load(file, weights_only=True))
    except Exception as error:  # what a target's own state_dict and load_state_dict may raise is not known
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return _SavingLoss(words, refused=isinstance(error, pickle.UnpicklingError))
    return _compared(saved, other)


def _other_instance(subject: Subject) -> Subject:
    """Another instance, made with other random numbers if that is possible, otherwise a copy with another state."""
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


def _compared(subject: Subject, other: Subject) -> _SavingLoss | None:
    inputs = subject.inputs(2, 7)
    try:
        before, after = steady(subject, inputs).out, steady(other, inputs).out
    except (Inapplicable, TargetError):
        return None  # told by other checks
    if before.shape != after.shape or not before.isfinite().all():
        return None
    change = float((after - before).abs().max())
    if change <= tolerance(subject, inputs, before):
        return None
    names = tuple(_left_out(subject.module, other.module))
    location = _attribute_line(subject, names[0]) if names else None
    return _SavingLoss(change=change, size=float(before.abs().max()), names=names, location=location)


def _left_out(module: nn.Module | None, other: nn.Module | None) -> list[str]:
    """Buffers and plain tensors that are not in the state dict and differ between the two modules."""
    if module is None or other is None:
        return []
    theirs = dict(other.named_modules())
    names = []
    for path, part in module.named_modules():
        for name, tensor in {**vars(part), **dict(part.named_buffers(recurse=False))}.items():
            same = {**vars(theirs[path]), **theirs[path]._buffers}.get(name) if path in theirs else None
            if isinstance(tensor, Tensor) and isinstance(same, Tensor) and not torch.equal(tensor, same):
                names.append(f"{path}.{name}".lstrip("."))
    return names


CHECK = Check(
    "dtype and device",
    "robustness",
    "All its parts are cast, moved, saved and loaded with it.",
    "Calls in float64 and bfloat16 and on the meta device, with and without masks; a search for modules and learned"
    " tensors in plain lists, dictionaries and attributes; its state, saved and loaded into another one.",
    "Parts that are not registered fail on a GPU or in half precision, are not trained, or are lost when the model is "
    "saved.",
    _run,
)
