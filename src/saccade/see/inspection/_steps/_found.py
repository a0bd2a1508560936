"""The modules around an attention call of any model, found by what they read and give.

No name is read: the query projection is the matrix whose output holds the query, the norm is the module that gives what
the projections read, and so on. Everything found is a formula in float64 (`_inputs.py`) that is compared with what the
module gave. Rotary positions are measured: at position 0 nothing is turned, so the projection is known, and then cosine
and sine of each pair follow from query and key.

Shape legend: as in `_inputs.py`; O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ....interception._hooks import hooked
from ....interception._running_modules import Entry, following, layer_runs
from ....make.models.text.encoder_decoder import EncoderDecoder
from ....operator._call import ObservedCall
from ....support._numbers import joined
from .._models import LayerObserver, TextModel
from ._inputs import HeadInputs, LinearStep, Norm, Rotation, Surroundings, numbers, of_call, of_stack
from ._parts import HeadNumbers

_EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps")
_DEFAULT_EPS = (1e-5, 1e-6, 1e-12, 0.0)
HALF = (torch.float16, torch.bfloat16)


class Unknown(ValueError):
    """Modules that were not found; the message says which."""


class _Ran(NamedTuple):
    """A module that ran in the layer, with the tensors that it read first and gave."""

    module: nn.Module
    read: Tensor
    gave: Tensor


@dataclass(frozen=True)
class _Alike:
    """Whether two arrays are the same numbers up to the model's rounding."""

    share: float  # of the largest number

    def __call__(self, ours: np.ndarray, theirs: np.ndarray) -> bool:
        if ours.shape != theirs.shape:
            return False
        largest = float(np.abs(theirs).max(initial=0.0))
        return bool(np.abs(ours - theirs).max(initial=0.0) <= self.share * largest) and largest > 0


def _alike(inputs: HeadInputs) -> _Alike:
    """For numbers that are computed again, in float64: a layer's rounding is some ten of the dtype's."""
    return _Alike(max(1e-4, 16 * torch.finfo(inputs.dtype).eps))


def of_model(model: TextModel, tokens: Tensor, head: tuple[int, int], row: int) -> tuple[HeadInputs, str]:
    """The inputs of ``row`` in ``head`` (layer, head) as ``model`` reads ``tokens`` (1, L), and why the modules around
    the call are unknown; "" if they are known."""

    def run(observe: LayerObserver) -> None:
        model.run(tokens, observe)

    if model.stack is not None:
        return of_stack(model.stack, head, row, run, "encoder" if isinstance(model.module, EncoderDecoder) else ""), ""
    return of_module(model.module, run, head, row)


def of_module(
    module: nn.Module, run: Callable[[LayerObserver], None], head: tuple[int, int], row: int
) -> tuple[HeadInputs, str]:
    """The inputs of ``row`` in ``head`` (layer, head) while ``run(observe)`` runs the model, and why the modules around
    the call are unknown; "" if they are known."""
    layer, number = head
    running: list[Entry] = []
    within: list[tuple[Entry, ...]] = []
    inputs: list[HeadInputs] = []
    calls: list[ObservedCall] = []

    def keep(at: int, call: ObservedCall) -> None:
        within.append(tuple(running))
        if at == layer:
            inputs.append(of_call(call, number, row, layer))
            calls.append(call)

    with following(module, running), _in_single(module):
        run(keep)
    runs = layer_runs(within)
    first, own = runs[0], runs[layer]
    if first is None or own is None:
        return inputs[0], "its layer is no module of its own"
    with _recorded(module, first, own) as record, _in_single(module):
        run(lambda at, call: None)
    try:
        around = _surroundings(record, calls[0], inputs[0])
    except Unknown as error:
        return inputs[0], str(error)
    found = replace(inputs[0], around=around)
    wrong = [name for name, share in HeadNumbers(found).differences().items() if not share <= _alike(found).share]
    return (inputs[0], f"its {joined(wrong)} cannot be recomputed") if wrong else (found, "")


@contextmanager
def _in_single(module: nn.Module) -> Iterator[None]:
    """A block in which the model computes in float32 at least: in half precision the numbers of many modules fit."""
    kept = [each for each in (*module.parameters(), *module.buffers()) if each.dtype in HALF]
    before = [each.data for each in kept]
    try:
        for each in kept:
            each.data = each.data.float()
        yield
    finally:
        for each, data in zip(kept, before, strict=True):
            each.data = data


@dataclass(frozen=True, eq=False)
class _Record:
    """The modules that ran in one layer, the layer itself last; `embedded` is what the first layer reads."""

    embedded: list[Tensor]
    ran: list[_Ran]


@contextmanager
def _recorded(module: nn.Module, first: Entry, own: Entry) -> Iterator[_Record]:
    running: list[Entry] = []
    record = _Record([], [])
    reads: list[tuple[Tensor | None, bool]] = []

    def enter(part: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        read = next((each for each in (*given, *named.values()) if _is_of_features(each)), None)
        inside = own in running
        reads.append((None if read is None else read.detach().clone() if inside else read, inside))
        begins = running[-1] == first or (_list_of(first) and _list_of(running[-1]) == _list_of(first))
        if begins and read is not None:
            record.embedded.append(read.detach().clone())

    def leave(part: nn.Module, out: Any) -> None:
        read, inside = reads.pop()
        gave = next((each for each in (out if isinstance(out, tuple) else (out,)) if _is_of_features(each)), None)
        if inside and read is not None and gave is not None:
            record.ran.append(_Ran(part, read, gave.detach().clone()))

    with following(module, running), hooked(module.modules(), before=enter, after=leave):
        yield record


def _list_of(run: Entry) -> str:
    """The list of layers that a module stands in: its first one reads the embedding, with attention or without."""
    path, _, name = run.path.rpartition(".")
    return path if name.isdigit() else ""


def _is_of_features(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


def _surroundings(record: _Record, call: ObservedCall, inputs: HeadInputs) -> Surroundings:
    exact, alike = _Alike(16 * torch.finfo(inputs.dtype).eps), _alike(inputs)
    length, row = len(inputs.key), inputs.row
    if not record.ran or not record.embedded:
        raise Unknown("its layer reads no vectors")
    block = record.ran[-1]
    if block.read.dim() != 3 or block.read.shape[:2] != (1, length):
        raise Unknown(f"its layer reads {tuple(block.read.shape)}, not a vector for each token")
    parts = record.ran[:-1]
    matrices = [found for ran in parts if (found := _matrix_of(ran, length, alike)) is not None]
    group, query_rows = inputs.kv_head, numbers(call.query[0, inputs.head])
    query, query_norm, read, asked = _projection("query", query_rows, inputs.head, matrices, parts, exact, alike)
    key, key_norm, of_key, offered = _projection("key", inputs.key, group, matrices, parts, exact, alike)
    if inputs.value is None:
        raise Unknown("its values are not observed")
    value, value_norm, of_value, _ = _projection("value", inputs.value, group, matrices, parts, exact, alike)
    if not all(exact(numbers(other), numbers(read)) for other in (of_key, of_value)):
        raise Unknown("query, key and value are made of different vectors")
    rotation = _rotation((asked, query_rows), (offered, inputs.key), alike)
    if query_norm is not None and query_norm.sizes is not None:
        query_norm = replace(query_norm, sizes=query_norm.sizes[row])
    output, written, gate = _output(inputs, matrices, read, exact)
    stream = block.read[0]
    norm, bare = _first_norm(parts, stream, read, exact, alike)
    after, added = _norm_after(parts, written, row, length, exact, alike)
    placement, factor, post = _residual(parts, block, numbers(stream[row]), added, row, bare, alike)
    if post is not None:
        norm = post
    return Surroundings(
        embedded=numbers(record.embedded[0][0, row]),
        stream=stream,
        read=read,
        written=written,
        placement=placement or ("bare" if bare else "pre"),
        norm=norm,
        query=query,
        key=key,
        value=value,
        query_norm=query_norm,
        key_norm=key_norm,
        value_norm=value_norm,
        rotation=rotation,
        gate=gate,
        output=output,
        after=after,
        factor=factor,
        adds=placement is not None,
    )


class _Matrix(NamedTuple):
    """A module that multiplies by a matrix."""

    step: LinearStep
    read: Tensor  # (L, E)
    gave: np.ndarray  # (L, O)


def _matrix_of(ran: _Ran, length: int, alike: _Alike) -> _Matrix | None:
    weight, bias = getattr(ran.module, "weight", None), getattr(ran.module, "bias", None)
    shaped = all(each.dim() in (2, 3) and each[..., 0].numel() == length for each in (ran.read, ran.gave))
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point() or not shaped:
        return None
    read, gave = ran.read.reshape(length, -1), numbers(ran.gave.reshape(length, -1))
    for matrix in (weight, weight.T):  # Conv1D of transformers keeps the transpose
        if matrix.shape == (gave.shape[1], read.shape[1]):
            step = LinearStep(numbers(matrix), None if bias is None else numbers(bias))
            if alike(step(numbers(read[:1])), gave[:1]):
                return _Matrix(step, read, gave)
    return None


def _projection(
    name: str,
    wanted: np.ndarray,
    head: int,
    matrices: Sequence[_Matrix],
    parts: Sequence[_Ran],
    exact: _Alike,
    alike: _Alike,
) -> tuple[LinearStep, Norm | None, Tensor, np.ndarray]:
    """The head's rows of the matrix that made ``wanted`` (L, D), the norm of heads, what the matrix reads, and (L, D)
    before rotation."""
    for matrix in matrices:
        found = _window(matrix.gave, wanted, exact, alike)
        if found is not None:
            step, before = _rows(matrix, *found, wanted.shape[1])
            return step, None, matrix.read, before
    for ran in parts:
        for read, gave in _by_head(ran, head, wanted.shape):
            found = _window(gave, wanted, exact, alike)
            if found is None or found != (0, 1.0):
                continue
            norm = _norm_of(ran.module, read, gave, alike)
            if norm is None:
                continue
            for matrix in matrices:
                if (at := _window(matrix.gave, read, exact, alike)) is not None:
                    step, _ = _rows(matrix, *at, wanted.shape[1])
                    return step, norm, matrix.read, gave
    for ran, read, gave in _rows_of(parts, len(wanted)):
        norm, at = _norm_of(ran.module, read, gave, alike), _window(gave, wanted, exact, alike)
        made_by = next((matrix for matrix in matrices if exact(matrix.gave, read)), None)
        if norm is not None and norm.kind == "rms" and at is not None and made_by is not None:
            part = slice(at[0], at[0] + wanted.shape[1])
            sizes = np.sqrt((read**2).mean(-1, keepdims=True) + norm.eps)
            of_part = replace(norm, weight=None if norm.weight is None else norm.weight[part], sizes=sizes)
            return _rows(made_by, *at, wanted.shape[1])[0], of_part, made_by.read, gave[:, part] * at[1]
    raise Unknown(f"no matrix makes the {name}")


def _window(gave: np.ndarray, wanted: np.ndarray, exact: _Alike, alike: _Alike) -> tuple[int, float] | None:
    """The first column and the factor of a part of (L, O) that is ``wanted`` (L, D), but for a rotation of each row."""
    width = wanted.shape[1]
    if gave.shape[1] < width or gave.shape[0] != wanted.shape[0]:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(gave[0], width)
    sizes = (windows**2).sum(1)
    ratios = windows @ wanted[0] / np.where(sizes > 0, sizes, 1.0)
    errors = np.abs(windows * ratios[:, None] - wanted[0]).max(1)
    for at in np.flatnonzero(errors <= exact.share * np.abs(wanted[0]).max()):
        factor = 1.0 if abs(ratios[at] - 1) < 1e-5 else float(ratios[at])
        part = gave[:, at : at + width] * factor
        if factor > 0 and alike((part**2).sum(1), (wanted**2).sum(1)):
            return int(at), factor
    return None


def _rows(matrix: _Matrix, at: int, factor: float, width: int) -> tuple[LinearStep, np.ndarray]:
    part = slice(at, at + width)
    weight, bias = matrix.step.weight[part] * factor, matrix.step.bias
    return LinearStep(weight, None if bias is None else bias[part] * factor, factor), matrix.gave[:, part] * factor


def _by_head(ran: _Ran, head: int, shape: tuple[int, ...]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Input and output, (L, D), of one head in a module of each head."""
    length, width = shape
    if ran.read.shape != ran.gave.shape or ran.read.dim() != 4 or ran.read.shape[-1] != width:
        return
    for axis in (1, 2):
        if ran.read.shape[3 - axis] == length and ran.read.shape[axis] > head:
            read, gave = (numbers(each[0].select(axis - 1, head)) for each in (ran.read, ran.gave))
            yield read, gave


def _norm_of(module: nn.Module, read: np.ndarray, gave: np.ndarray, alike: _Alike) -> Norm | None:
    """The formula of a module that gave (L, E) for (L, E); None if it is no layer norm or RMS norm."""
    kept = [getattr(module, name, None) for name in ("weight", "bias")]
    weight, bias = (numbers(each) if isinstance(each, Tensor) else None for each in kept)
    if weight is not None and weight.shape != read.shape[-1:]:
        return None
    own = [float(eps) for name in _EPS if isinstance(eps := getattr(module, name, None), float)]
    gains = [None] if weight is None else [weight, 1 + weight]  # Gemma keeps the gain less 1
    for kind in ("rms", "layer"):
        for gain in gains:
            for eps in own or _DEFAULT_EPS:
                norm = Norm(kind, eps, gain, bias)
                if alike(norm(read), gave):
                    return norm
    return None


def _rotation(
    query: tuple[np.ndarray, np.ndarray], key: tuple[np.ndarray, np.ndarray], alike: _Alike
) -> Rotation | None:
    """The rotation of (L, D) before to (L, D) after, the same for query and key; None if there is none."""
    if alike(*query) and alike(*key):
        return None
    width = query[0].shape[1]
    for turned in range(width - width % 2, 0, -2):
        for layout in ("half", "interleaved"):
            half = turned // 2
            first, second = slice(0, half), slice(half, turned)
            if layout == "interleaved":
                first, second = slice(0, turned, 2), slice(1, turned, 2)
            sizes, cos, sin = 0.0, 0.0, 0.0
            for before, after in (query, key):
                a, b, c, d = before[:, first], before[:, second], after[:, first], after[:, second]
                sizes, cos, sin = sizes + a**2 + b**2, cos + a * c + b * d, sin + a * d - b * c
            whole = np.where(np.equal(sizes, 0), 1.0, sizes)
            rotation = Rotation(cos / whole, sin / whole, layout)
            if all(alike(rotation(before), after) for before, after in (query, key)):
                return rotation
    raise Unknown("what turns its queries and keys is no rotation of pairs")


def _output(
    inputs: HeadInputs, matrices: Sequence[_Matrix], read: Tensor, exact: _Alike
) -> tuple[LinearStep, np.ndarray, LinearStep | None]:
    """The output projection, what it gave at the row, and the gate before it."""
    if inputs.outputs is None:
        raise Unknown("its outputs are not observed")
    whole = inputs.outputs.reshape(-1)
    for matrix in matrices:
        if exact(numbers(matrix.read[inputs.row]), whole):
            return matrix.step, matrix.gave[inputs.row], None
    for matrix in matrices:
        gated = numbers(matrix.read[inputs.row])
        for other in matrices if gated.shape == whole.shape else ():
            if exact(numbers(other.read), numbers(read)) and (gate := _gate(inputs, other, gated, exact)) is not None:
                return matrix.step, matrix.gave[inputs.row], gate
    raise Unknown("no matrix reads the outputs of its heads, as they are or times a sigmoid")


def _gate(inputs: HeadInputs, matrix: _Matrix, gated: np.ndarray, exact: _Alike) -> LinearStep | None:
    """The rows of a matrix whose sigmoid is the factor of each number of each head, or of each head as a whole."""
    assert inputs.outputs is not None
    heads, width = inputs.outputs.shape
    factors, places = 1 / (1 + np.exp(-matrix.gave[inputs.row])), []
    for own, after in zip(inputs.outputs, gated.reshape(heads, width), strict=True):
        windows = np.lib.stride_tricks.sliding_window_view(factors, width) if len(factors) >= width else factors[:0]
        wide = [at for at, window in enumerate(windows) if exact(window * own, after)]
        single = [at for at, factor in enumerate(factors) if exact(factor * own, after)]
        if not wide and not single:
            return None
        places += list(range(wide[0], wide[0] + width)) if wide else [single[0]] * width
    bias = matrix.step.bias
    return LinearStep(matrix.step.weight[places], None if bias is None else bias[places])


def _first_norm(
    parts: Sequence[_Ran], stream: Tensor, read: Tensor, exact: _Alike, alike: _Alike
) -> tuple[Norm | None, bool]:
    """The norm before the projections, and whether they read the stream without one."""
    before, normed = numbers(stream), numbers(read)
    if exact(before, normed):
        return None, True
    for ran, given, gave in _rows_of(parts, len(before)):
        if exact(given, before) and exact(gave, normed):
            norm = _norm_of(ran.module, given, gave, alike)
            if norm is not None:
                return norm, False
    return None, False


def _rows_of(parts: Sequence[_Ran], length: int) -> Iterator[tuple[_Ran, np.ndarray, np.ndarray]]:
    """The modules with what they read and gave, (L, E) each."""
    for ran in parts:
        if all(each.dim() in (2, 3) and each[..., 0].numel() == length for each in (ran.read, ran.gave)):
            yield ran, numbers(ran.read.reshape(length, -1)), numbers(ran.gave.reshape(length, -1))


def _norm_after(
    parts: Sequence[_Ran], written: np.ndarray, row: int, length: int, exact: _Alike, alike: _Alike
) -> tuple[Norm | None, np.ndarray]:
    """The norm of what attention writes, before it is added, and what is added."""
    for ran, read, gave in _rows_of(parts, length):
        if exact(read[row], written) and gave.shape == read.shape and not exact(gave[row], written):
            norm = _norm_of(ran.module, read, gave, alike)
            if norm is not None:
                return norm, gave[row]
    return None, written


def _residual(
    parts: Sequence[_Ran],
    block: _Ran,
    x: np.ndarray,
    added: np.ndarray,
    row: int,
    bare: bool,
    alike: _Alike,
) -> tuple[str | None, float, Norm | None]:
    """Where the norm stands, the factor of what is added, and the norm of the sum. None: the sum was not seen."""
    if x.shape != added.shape:
        return None, 1.0, None
    everything = list(_rows_of([*parts, block], len(block.read[0])))
    final = everything[-1][2][row] if everything and everything[-1][0] is block else None
    gave_like_x = [gave[row] for ran, _, gave in everything if ran is not block and gave.shape[1:] == x.shape]
    size = float(added @ added) or 1.0
    for ran, read, gave in everything:
        if read.shape[1:] != x.shape:
            continue
        factor = float((read[row] - x) @ added / size)
        if factor > 0.01 and alike(x + factor * added, read[row]):
            factor = 1.0 if abs(factor - 1) < 1e-3 else factor
            ends = final is not None and any(alike(each, final) for each in gave_like_x)
            norm = _norm_of(ran.module, read, gave, alike) if bare and ends and gave.shape == read.shape else None
            return ("bare" if bare and norm is None else "post" if bare else "pre"), factor, norm
    if final is not None and any(alike(x + added + each, final) for each in gave_like_x):
        return ("bare" if bare else "parallel"), 1.0, None
    return None, 1.0, None
