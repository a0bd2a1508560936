"""The modules around an attention call of any model, found by what they read and give.

No path or class is read, only the names of parameters: the query projection is the matrix whose output holds the query,
the norm is the module that gives what the projections read, and so on. Everything found is a formula in float64
(`_inputs.py`) that is compared with what the module gave. Rotary positions are measured: at position 0 nothing is
turned, so the projection is known, and then cosine and sine of each pair follow from query and key.

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
_SOME = 64  # rows on which layouts of a rotation are tried first
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
    """The modules that ran in one layer, and the whole layer; `embedded` is what the first layer reads."""

    embedded: list[Tensor]
    ran: list[_Ran]
    whole: list[_Ran]


@contextmanager
def _recorded(module: nn.Module, first: Entry, own: Entry) -> Iterator[_Record]:
    running: list[Entry] = []
    record = _Record([], [], [])
    reads: list[tuple[Tensor | None, Entry]] = []

    def enter(part: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        read = next((each for each in (*given, *named.values()) if _is_of_features(each)), None)
        # what modules write in place must not change what is kept
        reads.append((read.detach().clone() if read is not None and own in running else None, running[-1]))
        begins = running[-1] == first or (_list_of(first) and _list_of(running[-1]) == _list_of(first))
        if begins and read is not None:
            record.embedded.append(read.detach().clone())

    def leave(part: nn.Module, out: Any) -> None:
        read, run = reads.pop()
        gave = next((each for each in (out if isinstance(out, tuple) else (out,)) if _is_of_features(each)), None)
        if read is not None and gave is not None:
            (record.whole if run == own else record.ran).append(_Ran(part, read, gave.detach().clone()))

    with following(module, running), hooked(module.modules(), before=enter, after=leave):
        yield record


def _list_of(run: Entry) -> str:
    """The list of layers that a module stands in: its first one reads the embedding, with attention or without."""
    path, _, name = run.path.rpartition(".")
    return path if name.isdigit() else ""


def _is_of_features(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


def _surroundings(record: _Record, call: ObservedCall, inputs: HeadInputs) -> Surroundings:
    length, row = len(inputs.key), inputs.row
    if not record.whole or not record.embedded:
        raise Unknown("its layer reads no vectors")
    [block] = record.whole
    if block.read.dim() != 3 or block.read.shape[:2] != (1, length):
        raise Unknown(f"its layer reads {tuple(block.read.shape)}, not a vector for each token")
    layer = _Layer(record.ran, inputs)
    query_rows, group, stream = numbers(call.query[0, inputs.head]), inputs.kv_head, block.read[0]
    query, query_norm, read, asked = layer.projection("query", query_rows, inputs.head)
    key, key_norm, of_key, offered = layer.projection("key", inputs.key, group)
    if inputs.value is None:
        raise Unknown("its values are not observed")
    value, value_norm, of_value, _ = layer.projection("value", inputs.value, group)
    if not all(layer.same(other, read) for other in (of_key, of_value)):
        raise Unknown("query, key and value are made of different vectors")
    if query_norm is not None and query_norm.sizes is not None:
        query_norm = replace(query_norm, sizes=query_norm.sizes[row])
    output, written, gate = layer.output(read)
    bare = layer.same(stream, read)
    after = layer.norm(written, row=row)
    added = written if after is None else after(written)
    placement, factor, post = layer.residual(stream, block.gave, added, bare)
    return Surroundings(
        embedded=numbers(record.embedded[0][0, row]),
        stream=stream,
        read=read,
        written=written,
        placement=placement or ("bare" if bare else "pre"),
        norm=post if bare else layer.norm(numbers(stream[row]), numbers(read[row]), row=row),
        query=query,
        key=key,
        value=value,
        query_norm=query_norm,
        key_norm=key_norm,
        value_norm=value_norm,
        rotation=_rotation((asked, query_rows), (offered, inputs.key), layer.alike),
        gate=gate,
        output=output,
        after=after,
        factor=factor,
        adds=placement is not None,
    )


class _Matrix(NamedTuple):
    """A module that multiplies by a matrix (O, E)."""

    weight: Tensor
    bias: Tensor | None
    read: Tensor  # (L, E)
    gave: Tensor  # (L, O)

    def step(self, places: slice | list[int], factor: float = 1.0) -> LinearStep:
        """Some of its rows."""
        bias = None if self.bias is None else numbers(self.bias[places]) * factor
        return LinearStep(numbers(self.weight[places]) * factor, bias, factor)


class _Layer:
    """The modules of one layer, and the searches in them. Tensors become float64 as a whole only where a row fits."""

    def __init__(self, ran: Sequence[_Ran], inputs: HeadInputs) -> None:
        self.inputs, self.ran, length = inputs, ran, len(inputs.key)
        self.exact, self.alike = _Alike(16 * torch.finfo(inputs.dtype).eps), _alike(inputs)
        self.rows = [
            _Ran(each.module, each.read.reshape(length, -1), each.gave.reshape(length, -1))
            for each in ran
            if all(tensor.dim() in (2, 3) and tensor[..., 0].numel() == length for tensor in (each.read, each.gave))
        ]
        self.matrices = [found for each in self.rows if (found := self._matrix(each)) is not None]

    def same(self, first: Tensor, other: Tensor) -> bool:
        """Whether two tensors (L, E) are the same numbers."""
        row = self.inputs.row
        fits = first.shape == other.shape and self.exact(numbers(first[row]), numbers(other[row]))
        return fits and self.exact(numbers(first), numbers(other))

    def _matrix(self, ran: _Ran) -> _Matrix | None:
        weight, bias = getattr(ran.module, "weight", None), getattr(ran.module, "bias", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
            return None
        for matrix in (weight, weight.T):  # Conv1D of transformers keeps the transpose
            if matrix.shape == (ran.gave.shape[1], ran.read.shape[1]):
                read, constant = ran.read[:1], None if bias is None else bias.to(ran.read.dtype)
                made = nn.functional.linear(read, matrix.to(read.dtype), constant).detach()
                if self.alike(numbers(made), numbers(ran.gave[:1])):
                    return _Matrix(matrix, bias, ran.read, ran.gave)
        return None

    def projection(
        self, name: str, wanted: np.ndarray, head: int
    ) -> tuple[LinearStep, Norm | None, Tensor, np.ndarray]:
        """The head's rows of the matrix that made ``wanted`` (L, D), the norm of heads, what the matrix reads, and the
        numbers (L, D) before rotation."""
        width = wanted.shape[1]

        def made_by(target: np.ndarray) -> tuple[_Matrix, slice, float] | None:
            for matrix in self.matrices:
                if (at := self._window(matrix.gave, target)) is not None:
                    return matrix, slice(at[0], at[0] + width), at[1]
            return None

        if (found := made_by(wanted)) is not None:
            matrix, part, factor = found
            return matrix.step(part, factor), None, matrix.read, numbers(matrix.gave[:, part]) * factor
        for ran in self.ran:
            for read, gave in _by_head(ran, head, wanted.shape):
                if self._window(gave, wanted) != (0, 1.0):
                    continue
                norm = _norm_of(ran.module, numbers(read), numbers(gave), self.alike)
                if norm is not None and (found := made_by(numbers(read))) is not None:
                    matrix, part, factor = found
                    return matrix.step(part, factor), norm, matrix.read, numbers(gave)
        for ran in self.rows:
            if (at := self._window(ran.gave, wanted)) is None:
                continue
            norm = _norm_of(ran.module, numbers(ran.read), numbers(ran.gave), self.alike)
            before = next((matrix for matrix in self.matrices if self.same(matrix.gave, ran.read)), None)
            if norm is not None and norm.kind == "rms" and before is not None:
                part, factor = slice(at[0], at[0] + width), at[1]
                sizes = np.sqrt((numbers(ran.read) ** 2).mean(-1, keepdims=True) + norm.eps)
                of_part = replace(norm, weight=None if norm.weight is None else norm.weight[part], sizes=sizes)
                return before.step(part, factor), of_part, before.read, numbers(ran.gave[:, part]) * factor
        raise Unknown(f"no matrix makes the {name}")

    def _window(self, gave: Tensor, wanted: np.ndarray) -> tuple[int, float] | None:
        """The first column and the factor of a part of (L, O) that is ``wanted`` (L, D), but for a rotation of rows."""
        length, width = wanted.shape
        if gave.shape[0] != length or gave.shape[1] < width:
            return None
        windows = np.lib.stride_tricks.sliding_window_view(numbers(gave[0]), width)
        sizes = (windows**2).sum(1)
        ratios = windows @ wanted[0] / np.where(sizes > 0, sizes, 1.0)
        errors = np.abs(windows * ratios[:, None] - wanted[0]).max(1)
        for at in np.flatnonzero(errors <= self.exact.share * np.abs(wanted[0]).max()):
            factor = 1.0 if abs(ratios[at] - 1) < 1e-5 else float(ratios[at])
            part = numbers(gave[:, at : at + width]) * factor
            if factor > 0 and self.alike((part**2).sum(1), (wanted**2).sum(1)):
                return int(at), factor
        return None

    def output(self, read: Tensor) -> tuple[LinearStep, np.ndarray, LinearStep | None]:
        """The output projection, what it gave at the row, and the gate before it."""
        if self.inputs.outputs is None:
            raise Unknown("its outputs are not observed")
        row, whole = self.inputs.row, self.inputs.outputs.reshape(-1)
        wide = [(matrix, numbers(matrix.read[row])) for matrix in self.matrices if matrix.read.shape[1] == len(whole)]
        for matrix, given in wide:
            if self.exact(given, whole):
                return matrix.step(slice(None)), numbers(matrix.gave[row]), None
        for matrix, given in wide:
            for other in self.matrices:
                if self.same(other.read, read) and (gate := self._gate(other, given)) is not None:
                    return matrix.step(slice(None)), numbers(matrix.gave[row]), gate
        raise Unknown("no matrix reads the outputs of its heads, as they are or times a sigmoid")

    def _gate(self, matrix: _Matrix, gated: np.ndarray) -> LinearStep | None:
        """The rows of a matrix whose sigmoid is the factor of each number of each head, or of each head as a whole."""
        assert self.inputs.outputs is not None
        heads, width = self.inputs.outputs.shape
        factors, places = 1 / (1 + np.exp(-numbers(matrix.gave[self.inputs.row]))), []
        for own, after in zip(self.inputs.outputs, gated.reshape(heads, width), strict=True):
            bound = self.exact.share * np.abs(after).max()
            for wide in (width, 1):
                if len(factors) < wide:
                    continue
                windows = np.lib.stride_tricks.sliding_window_view(factors, wide)
                fits = np.flatnonzero(np.abs(windows * own - after).max(1) <= bound)
                if len(fits):
                    places += [int(fits[0]) + n for n in range(wide)] * (width // wide)
                    break
            else:
                return None
        return matrix.step(places)

    def norm(self, read: np.ndarray, gave: np.ndarray | None = None, *, row: int) -> Norm | None:
        """The norm that reads this vector at the row, and gives this one if that is known."""
        for ran in self.rows:
            if ran.read.shape != ran.gave.shape or not self.exact(numbers(ran.read[row]), read):
                continue
            if gave is not None and not self.exact(numbers(ran.gave[row]), gave):
                continue
            if gave is None and self.same(ran.read, ran.gave):  # such as a dropout
                continue
            found = _norm_of(ran.module, numbers(ran.read), numbers(ran.gave), self.alike)
            if found is not None:
                return found
        return None

    def residual(
        self, stream: Tensor, gave: Tensor, added: np.ndarray, bare: bool
    ) -> tuple[str | None, float, Norm | None]:
        """Where the norm stands, the factor of what is added, and the norm of the sum. None: the sum was not seen."""
        row = self.inputs.row
        x = numbers(stream[row])
        if x.shape != added.shape:
            return None, 1.0, None
        like_x = [ran for ran in self.rows if ran.read.shape[1:] == x.shape]
        ends = numbers(gave[0, row]) if gave.dim() == 3 and gave.shape[1:] == stream.shape else None
        size = float(added @ added) or 1.0
        for ran in like_x:
            total = numbers(ran.read[row])
            factor = float((total - x) @ added / size)
            if factor > 0.01 and self.alike(x + factor * added, total):
                factor = 1.0 if abs(factor - 1) < 1e-3 else factor
                norm = self.norm(total, row=row) if bare and ends is not None and self._is_given(ends) else None
                return ("post" if norm is not None else "bare" if bare else "pre"), factor, norm
        if ends is not None and self.alike(x + added, ends):
            return ("bare" if bare else "pre"), 1.0, None
        if ends is not None and self._is_given(ends - x - added):
            return ("bare" if bare else "parallel"), 1.0, None
        return None, 1.0, None

    def _is_given(self, vector: np.ndarray) -> bool:
        """Whether a module gives this vector at the row."""
        row = self.inputs.row
        return any(
            self.alike(numbers(ran.gave[row]), vector) for ran in self.rows if ran.gave.shape[1:] == vector.shape
        )


def _by_head(ran: _Ran, head: int, shape: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Input and output, (L, D), of one head in a module of each head."""
    length, width = shape
    if ran.read.shape != ran.gave.shape or ran.read.dim() != 4 or ran.read.shape[-1] != width:
        return
    for axis in (1, 2):
        if ran.read.shape[3 - axis] == length and ran.read.shape[axis] > head:
            yield ran.read[0].select(axis - 1, head), ran.gave[0].select(axis - 1, head)


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
    width, some = query[0].shape[1], slice(_SOME)
    for turned in range(width - width % 2, 0, -2):
        for layout in ("half", "interleaved"):
            half = turned // 2
            first, second = slice(0, half), slice(half, turned)
            if layout == "interleaved":
                first, second = slice(0, turned, 2), slice(1, turned, 2)
            for rows in (some, slice(None)):
                sizes, cos, sin = 0.0, 0.0, 0.0
                for before, after in (query, key):
                    a, b, c, d = before[rows, first], before[rows, second], after[rows, first], after[rows, second]
                    sizes, cos, sin = sizes + a**2 + b**2, cos + a * c + b * d, sin + a * d - b * c
                whole = np.where(np.equal(sizes, 0), 1.0, sizes)
                rotation = Rotation(cos / whole, sin / whole, layout)
                if not all(alike(rotation(before[rows]), after[rows]) for before, after in (query, key)):
                    break
            else:
                return rotation
    raise Unknown("what turns its queries and keys is no rotation of pairs")
