"""One run of any model, kept as a graph in which scales are fixed and everything that is added is a leaf.

The scale of a norm is held at its value, whatever code computes it: results of square roots and of norms are detached,
and F.layer_norm and F.rms_norm are computed by their formulas. Embeddings, the outputs of attention calls, biases and
other constants that are added to the stream become leaves of the graph. What `_stream.py` found to be nonlinear is cut
or held in a second run.

Shape legend: L tokens, E model width, Hq / Hkv query and key-value heads, D / Dv widths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...operator._call import AttentionCall, ObservedCall
from ..intervention._edit import CallPart, CallPlace, Edit
from ._runs import ALL, edited

_SCALES = frozenset("rsqrt sqrt norm vector_norm std var std_mean var_mean reciprocal".split())
_ROOTS = frozenset("pow __pow__".split())  # with a fraction or a negative number as the exponent
_SUMS = frozenset("add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __rsub__ __isub__ rsub subtract".split())
_JOINS = frozenset("cat concat stack where masked_fill".split())
_ADDED_FIRST = frozenset("addmm baddbmm addbmm".split())
_WITH_BIAS = frozenset("linear conv1d conv2d".split())
_READS = frozenset("embedding index_select __getitem__".split())


class NoStream(ValueError):
    """The residual stream of a model cannot be found."""


class Leaf(NamedTuple):
    """A tensor of the graph without a past.

    Attributes:
        kind: "read" from a table of `rows` by `read_by`, "added" (a constant), "head" (the output of the attention call
            number `call`) or "cut" (the output of a nonlinear operation).
        path: of the module that made it.
    """

    kind: str
    tensor: Tensor
    path: str
    read_by: Tensor | None = None
    rows: int = 0
    call: int | None = None
    calls: int = 0  # attention calls before it


class Made(NamedTuple):
    """The result of an operation: its number in the run, name and module, and the state of the tensor."""

    number: int
    name: str
    path: str
    tensor: Tensor
    version: int


class Held(NamedTuple):
    """The action of a second run at an operation: "cut", "ratio" (of output and input), or "hold" with an operand."""

    kind: str
    operand: int = 0


class SeenCall(NamedTuple):
    """An attention call as the model makes it, its tensors with their graphs, and its output (1, Hq, L, Dv)."""

    name: str
    path: str
    call: AttentionCall
    out: Tensor

    def graph(self, name: str) -> Tensor:
        """Its "query" or "key" with the graph of the model."""
        own: Tensor = getattr(self.call, name)
        if own.requires_grad or not isinstance(self.call, ObservedCall):
            return own
        tensor, seen_as = self.call.graph_tensors()[name]  # attention written by hand: a view of its factor
        seen = tensor if seen_as is None else seen_as(tensor)
        return seen if seen.shape == own.shape else own

    def observed(self) -> ObservedCall:
        """The call without graphs."""
        tensors = {name: getattr(self.call, name).detach() for name in ("query", "key", "value")}
        return self.call.observed(self.out.detach(), "", **tensors)


class Enough(Exception):
    """Everything that is asked for was computed."""


@dataclass(eq=False)
class TracedRun(TorchFunctionMode):
    """The graph of one run. `run` makes it.

    Attributes:
        leaves: in the order in which they came.
        made: by node of the graph.
        calls: the attention calls.
        operations: the name and module of each operation, by number.
        scaled: the paths of modules whose scales were fixed.
    """

    held: Mapping[int, Held]
    leaves: list[Leaf] = field(default_factory=list)
    made: dict[Any, Made] = field(default_factory=dict)
    calls: list[SeenCall] = field(default_factory=list)
    operations: dict[int, tuple[str, str]] = field(default_factory=dict)
    scaled: set[str] = field(default_factory=set)
    row: int | None = None  # the only row of which logits are computed
    vocabulary: int | None = None  # rows of the table of tokens
    _paths: list[str] = field(default_factory=lambda: [""])
    _count: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def path(self) -> str:
        """The path of the innermost running module."""
        return self._paths[-1]

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("__get__", "__set__", "size", "dim", "stride"):
            return func(*args, **kwargs)
        if name in _READS and args and not _reaches(args):
            return self._looked_up(name, func(*args, **kwargs), args, kwargs)
        if not (_reaches(args) or _reaches(kwargs.values())):
            return func(*args, **kwargs)
        self._count += 1
        number, held = self._count, self.held.get(self._count)
        self.operations[number] = name, self.path
        if held is not None and held.kind == "hold":
            args = _with_operand_held(args, held.operand)
        out = self._computed(func, name, args, kwargs)
        if held is not None and held.kind == "cut":
            out = self._leaf("cut", out)
        elif held is not None and held.kind == "ratio":
            out = _as_factor(args[0], out)
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor) and each.grad_fn is not None:
                self.made.setdefault(each.grad_fn, Made(number, name, self.path, each, each._version))
        return out

    def _computed(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name in ("layer_norm", "rms_norm"):
            self.scaled.add(self.path)
            return self._normed(name, *args, **kwargs)
        if name == "batch_norm":
            return self._batch_normed(*args, **kwargs)
        if name in _SCALES or (name in _ROOTS and _is_root(args)):
            self.scaled.add(self.path)
            return _detached(func(*args, **kwargs))
        if name == "linear":
            args = self._last_rows(args)
        if name in _WITH_BIAS and (bias := kwargs.pop("bias", args[2] if len(args) > 2 else None)) is not None:
            args, kwargs = (args[:2], kwargs) if len(args) < 3 else ((*args[:2], None, *args[3:]), kwargs)
            out = func(*args, **kwargs)
            shape = (-1, *[1] * (0 if name == "linear" else out.dim() - 2))
            return out + self._leaf("added", bias.view(shape))
        if name in _SUMS or name in _JOINS:
            args = self._constants_as_leaves(args, numbers=name in _SUMS)
        elif name in _ADDED_FIRST:
            args = [*self._constants_as_leaves(args[:1], numbers=False), *args[1:]]
        return func(*args, **kwargs)

    def _last_rows(self, args: Sequence[Any]) -> Sequence[Any]:
        """Only one row of the product with the table of all tokens: logits of a long text would fill memory."""
        x, weight, *more = args
        outside = not any(part.isdigit() for part in self.path.split("."))
        if self.row is None or not outside or weight.shape[0] != self.vocabulary or x.dim() != 3:
            return args
        return x[:, self.row : self.row + 1], weight, *more

    def _normed(
        self, name: str, x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: Any = None, **more: Any
    ) -> Tensor:
        """F.layer_norm(x, shape, weight, bias, eps) or F.rms_norm(x, shape, weight, eps) with a fixed scale."""
        if name == "rms_norm":
            bias, eps = None, bias if eps is None else eps
            eps = torch.finfo(x.dtype).eps if eps is None else eps
        weight, bias = more.get("weight", weight), more.get("bias", bias)
        axes = tuple(range(-len(shape), 0))
        centred = x if name == "rms_norm" else x - x.mean(axes, keepdim=True)
        scale = (centred.detach().square().mean(axes, keepdim=True) + (1e-5 if eps is None else eps)).rsqrt()
        out = centred * (scale if weight is None else scale * weight)
        return out if bias is None else out + self._leaf("added", bias)

    def _batch_normed(
        self, x: Tensor, mean: Tensor, variance: Tensor, weight: Any = None, bias: Any = None, *more: Any, **named: Any
    ) -> Tensor:
        """F.batch_norm(x, mean, variance, weight, bias, training, momentum, eps), which in evaluation is linear."""
        eps = named.get("eps", more[2] if len(more) > 2 else 1e-5)
        weight, bias = named.get("weight", weight), named.get("bias", bias)
        gain = (variance + eps).rsqrt() * (1.0 if weight is None else weight)
        constant = -mean * gain if bias is None else bias - mean * gain
        shape = (1, -1, *[1] * (x.dim() - 2))
        return x * gain.view(shape) + self._leaf("added", constant.view(shape))

    def _looked_up(self, name: str, out: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tables = [each for each in args if isinstance(each, nn.Parameter)]
        if not tables or not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        index = next((each for each in args if isinstance(each, Tensor) and not each.is_floating_point()), None)
        return self._leaf("read", out, index, len(tables[0]))

    def _constants_as_leaves(self, args: Sequence[Any], *, numbers: bool) -> list[Any]:
        like = next((each for each in args if isinstance(each, Tensor) and each.requires_grad), None)

        def leaf(each: Any) -> Any:
            if isinstance(each, (list, tuple)):
                return type(each)(leaf(one) for one in each)
            if isinstance(each, Tensor) and each.is_floating_point() and not each.requires_grad:
                return self._leaf("added", each)
            if numbers and like is not None and type(each) in (int, float) and each != 0:
                return self._leaf("added", like.new_tensor(float(each)))
            return each

        return [leaf(each) for each in args]

    def _leaf(self, kind: str, tensor: Tensor, index: Tensor | None = None, rows: int = 0) -> Tensor:
        """A leaf with this value; its copy may be changed in place."""
        return self._kept(Leaf(kind, tensor.detach().requires_grad_(), self.path, index, rows, calls=len(self.calls)))

    def _kept(self, leaf: Leaf) -> Tensor:
        self.leaves.append(leaf)
        return leaf.tensor.clone()


@dataclass(frozen=True, eq=False)
class Calls(Edit):
    """Gives each attention call to `see`, which returns the output to go on with, or None for the call's own."""

    see: Callable[[SeenCall], Tensor | None]
    choice = ALL

    def _parts(self, part: CallPart, place: CallPlace) -> list[CallPart]:
        detached = {name: getattr(part.call, name).detach() for name in ("query", "key", "value")}
        return [replace(part, call=replace(part.call, **detached))]

    def _output(self, out: Tensor, call: AttentionCall, place: CallPlace) -> Tensor:
        seen = self.see(SeenCall(place.name, place.site.path, call, out))
        return out if seen is None else seen


def traced(
    module: nn.Module,
    run: Callable[[], Any],
    *,
    held: Mapping[int, Held] | None = None,
    until: int | None = None,
    row: int | None = None,
    vocabulary: int | None = None,
) -> tuple[TracedRun, Any]:
    """Run the model, and return the graph with what the run returns.

    Args:
        held: by number of operation.
        until: the number of the attention call that ends the run, which then returns None.
        row, vocabulary: of which row logits are computed alone, and the number of tokens.
    """
    trace = TracedRun(held or {}, row=row, vocabulary=vocabulary)

    def see(call: SeenCall) -> Tensor:
        trace.calls.append(call)
        if until == len(trace.calls) - 1:
            raise Enough
        return trace._kept(Leaf("head", call.out.detach().requires_grad_(), call.path, call=len(trace.calls) - 1))

    with _frozen(module), torch.enable_grad(), _following(module, trace._paths), edited(module, Calls(see)), trace:
        try:
            return trace, run()
        except Enough:
            return trace, None


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """A block in which no parameter requires a gradient."""
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)


@contextmanager
def _following(module: nn.Module, paths: list[str]) -> Iterator[None]:
    """A block in which `paths` ends with the path of the innermost running module."""
    with ExitStack() as hooks:
        for path, part in module.named_modules():

            def enter(*_: Any, path: str = path) -> None:
                paths.append(path)

            def leave(*_: Any) -> None:
                paths.pop()

            hooks.callback(part.register_forward_pre_hook(enter).remove)
            hooks.callback(part.register_forward_hook(leave, always_call=True).remove)
        yield


def _reaches(values: Any) -> bool:
    """Whether one of these values, or of the lists among them, has a gradient."""
    for each in values:
        if isinstance(each, Tensor):
            if each.requires_grad:
                return True
        elif isinstance(each, (list, tuple)) and _reaches(each):
            return True
    return False


def _is_root(args: Sequence[Any]) -> bool:
    exponent = args[1] if len(args) > 1 else None
    return isinstance(exponent, (int, float)) and (exponent < 0 or exponent != int(exponent))


def _detached(out: Any) -> Any:
    return out.detach() if isinstance(out, Tensor) else type(out)(each.detach() for each in out)


def _with_operand_held(args: Sequence[Any], operand: int) -> list[Any]:
    tensors = [at for at, each in enumerate(args) if isinstance(each, Tensor) and each.requires_grad]
    return [each.detach() if at == tensors[operand] else each for at, each in enumerate(args)]


def _as_factor(x: Tensor, out: Tensor) -> Tensor:
    """f(x) as the product of x and the fixed ratio f(x) / x."""
    ratio = torch.where(x == 0, 0.0, out / torch.where(x == 0, 1.0, x)).detach()
    return x * ratio
