"""One run of any model, kept as a graph in which scales are fixed and everything that is added is a leaf.

The scale of a norm is held at its value, whatever code computes it: norms, and roots of means and sums, are detached,
and F.layer_norm and F.rms_norm are computed by their formulas. Embeddings, the outputs of attention calls, biases and
other constants that are added to the stream become leaves of the graph. What `_stream.py` found to be nonlinear is cut
or held in a second run.

Shape legend: L tokens, E model width, Hq / Hkv query and key-value heads, D / Dv widths, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ...interception._running_modules import Entry, Place, following
from ...operator._call import AttentionCall, ObservedCall
from ..intervention._edit import CallPart, CallPlace, Edit
from ._nodes import before, name_of
from ._runs import ALL, edited

_SPREADS = frozenset("norm linalg_norm linalg_vector_norm std var std_mean var_mean".split())
_ROOTS = frozenset("rsqrt sqrt reciprocal".split())
_REDUCTIONS = frozenset("Mean Sum Amax Max".split())
_OF_EACH = frozenset(
    "Abs Add Alias Clamp ClampMin Clone Div Expand Log Maximum Mul Neg Pow ReshapeAlias Rsub Sqrt Squeeze Sub ToCopy "
    "UnsafeView Unsqueeze View".split()
)
_SUMS = frozenset("add add_ __radd__ sub sub_ __rsub__ rsub subtract subtract_".split())
_JOINS = frozenset(
    "cat concat concatenate stack hstack vstack dstack column_stack where masked_fill masked_fill_ lerp copy_".split()
)
_ADDED_FIRST = frozenset("addmm baddbmm addbmm".split())
_WITH_BIAS = frozenset("linear conv1d conv2d".split())
_READS = frozenset("embedding index_select __getitem__".split())
_OF_ROWS = re.compile(r"__[gs]etitem__|index_(select|add|copy|put)_?")  # operations that whole numbers choose rows for
_MAY_WRITE = frozenset(
    "relu relu6 silu mish leaky_relu elu selu celu hardtanh hardswish hardsigmoid threshold rrelu dropout".split()
)
_FIRST, _SECOND = ("input", "tensors"), ("other", "exponent")  # names of operands
_NEW = re.compile(r"new_.*|.*_like|new")  # tensors that share a shape with another one, not its values
_LIKE = frozenset("to type_as expand_as view_as reshape_as".split())  # of which the first operand alone has values
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class NoStream(ValueError):
    """The residual stream of a model cannot be found."""


class Leaf(NamedTuple):
    """A tensor of the graph without a past.

    Attributes:
        kind: "read" from a table of `rows` by `read_by`, "added" to a tensor of shape `to` (a constant), "head" (the
            output of the attention call number `call`) or "cut" (the output of a nonlinear operation).
        place: of the operation that made it.
    """

    kind: str
    tensor: Tensor
    place: Place
    read_by: Tensor | None = None
    rows: int = 0
    call: int | None = None
    to: tuple[int, ...] = ()


class Made(NamedTuple):
    """The result of an operation: its number in the run, name and module, and the state of the tensor.

    `detached`: whether an operand is computed from the stream, but has no graph: a comparison, or what a frozen layer
    makes. Then the result is no linear function of the stream.
    """

    number: int
    name: str
    path: str
    tensor: Tensor
    version: int
    detached: bool


class Held(NamedTuple):
    """The action of a second run at an operation: "cut", "ratio" (of output and input), or an operand that is held:
    "gate" on the output of heads, "factor" of everything else."""

    kind: str
    operand: int = 0


class SeenCall(NamedTuple):
    """An attention call as the model makes it, its tensors with their graphs, and its output (1, Hq, L, Dv)."""

    name: str
    path: str
    call: AttentionCall
    out: Tensor
    within: tuple[Entry, ...] = ()

    def graph(self, name: str) -> Tensor:
        """Its "query", "key" or "value" with the graph of the model."""
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
    """Everything that is asked for was computed. PyTorch calls hooks that are always called for an Exception alone."""


@dataclass(eq=False)
class TracedRun(TorchFunctionMode):
    """The graph of one run. `traced` makes it.

    Attributes:
        ids: (1, L) that the model reads.
        row: the only row of which logits are computed, or None.
        tables: (V, E), products with which make the logits.
        embeddings: weights of embeddings of the model.
        leaves: in the order in which they came.
        made: by node of the graph.
        calls: the attention calls.
        operations: the name and module of each operation, by number.
        scaled: the paths of modules whose scales were fixed.
        eps: the coarsest rounding of the numbers of the graph.
    """

    held: Mapping[int, Held]
    ids: Tensor
    row: int | None = None
    tables: Sequence[Tensor] = ()
    embeddings: Sequence[Tensor] = ()
    leaves: list[Leaf] = field(default_factory=list)
    made: dict[Any, Made] = field(default_factory=dict)
    calls: list[SeenCall] = field(default_factory=list)
    operations: dict[int, tuple[str, str]] = field(default_factory=dict)
    scaled: set[str] = field(default_factory=set)
    eps: float = torch.finfo(torch.float64).eps
    running: list[Entry] = field(default_factory=list)
    _detached: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    _scales: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    _count: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def path(self) -> str:
        """The path of the innermost running module."""
        return self.running[-1].path if self.running else ""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("size", "dim", "stride", "__set__"):
            return func(*args, **(kwargs or {}))
        if name == "__get__":
            return self._attribute(func, args)
        args, kwargs = _by_place(name, args, kwargs or {})
        given = args[:1] if name in _LIKE else [*args, *kwargs.values()]
        if not any(each.requires_grad for each in tensors(given)):
            if name in _READS and args:
                return self._looked_up(name, func(*args, **kwargs), args, kwargs)
            return self._without_graph(name, given, func(*args, **kwargs))
        if _writes(name, args, kwargs) and args[0]._base is not None:
            return self._written_view(func, types, name, args, kwargs)
        self._count += 1
        number, held = self._count, self.held.get(self._count)
        self.operations[number] = name, self.path
        detached = any(
            self.has_lost(each) and not (_is_integer(each) and _OF_ROWS.fullmatch(name)) for each in tensors(given)
        )
        if held is not None and held.kind in ("gate", "factor"):
            args = _with_operand_held(args, held.operand)
        ends = held is not None and held.kind in ("cut", "ratio")
        x = next(each for each in tensors(given) if each.requires_grad)
        x = x.clone() if ends else x  # it may be written to
        with torch.set_grad_enabled(torch.is_grad_enabled() and not ends):
            out = self._computed(func, name, args, kwargs)
        wrote = args[0] if out is None or (args and out is args[0]) else None
        if held is not None and ends:
            out = self._replaced(out, wrote, x if held.kind == "ratio" else None)
        elif not torch.is_grad_enabled():
            self._lose(name, [out])
        for each in tensors([out, wrote]):
            if each.grad_fn is not None:
                self.made.setdefault(
                    each.grad_fn, Made(number, name, self.path, each, each._version, detached and name not in _SUMS)
                )
                if each.is_floating_point():
                    self.eps = max(self.eps, torch.finfo(each.dtype).eps)
        return out

    def _written_view(self, func: Any, types: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operation that writes into a view, as one on a copy: the node of a written base does not say which."""
        view, base, fresh = args[0], args[0]._base, args[0].clone()
        if self.has_lost(view):
            self._detached[fresh] = True
        self.__torch_function__(func, types, [fresh, *args[1:]], kwargs)
        if base.numel() == fresh.numel() and fresh.stride() == view.stride():
            base.copy_(fresh.as_strided(base.size(), base.stride()))
        else:
            view.copy_(fresh)
        return None if name == "__setitem__" else view

    def _attribute(self, func: Any, args: Sequence[Any]) -> Any:
        out = func(*args)
        if isinstance(out, Tensor):
            if self.has_lost(args[0]) or (args[0].requires_grad and func == _DATA):
                self._detached[out] = True
            if out.grad_fn is not None:
                self.made.setdefault(out.grad_fn, Made(self._count, "", self.path, out, out._version, False))
        return out

    def _without_graph(self, name: str, given: Sequence[Any], out: Any) -> Any:
        """Remember what is computed from tensors that lost their graph, and from scales."""
        known = list(tensors(given))
        if any(map(self.has_lost, known)):
            self._lose(name, [out, *given[:1]] if _writes(name, given, {}) else [out])
        elif any(each in self._scales for each in known):
            for each in tensors([out]):
                self._scales[each] = True
        return out

    def has_lost(self, tensor: Tensor) -> bool:
        """Whether a tensor comes from the stream, but has lost its graph."""
        return not tensor.requires_grad and tensor in self._detached

    def _lose(self, name: str, out: Sequence[Any]) -> None:
        if not _NEW.fullmatch(name):
            for each in tensors(out):
                if not each.requires_grad:
                    self._detached[each] = True

    def _replaced(self, out: Any, wrote: Tensor | None, x: Tensor | None) -> Any:
        """The result of a nonlinear operation as a leaf, or as the product of `x` and a fixed ratio."""

        def new(each: Any) -> Any:
            if not isinstance(each, Tensor) or not each.is_floating_point():
                return each
            return self._leaf("cut", each) if x is None else _as_factor(x, each)

        if wrote is not None:
            wrote.copy_(new(wrote))
            return out
        return type(out)(tuple(map(new, out))) if isinstance(out, (tuple, list)) else new(out)

    def _computed(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name in ("layer_norm", "rms_norm"):
            self.scaled.add(self.path)
            return self._normed(name, *args, **kwargs)
        if name == "batch_norm":
            return self._batch_normed(*args, **kwargs)
        if name == "normalize":
            self.scaled.add(self.path)
            return _of_length_1(*args, **kwargs)
        if name in _SPREADS or ((name in _ROOTS or (name == "pow" and _is_root(args))) and self._is_of_all(args[0])):
            self.scaled.add(self.path)
            scale, *mean = _scale_detached(func, args, kwargs)
            self._scales[scale] = True
            return (scale, *mean) if mean else scale
        if name in _WITH_BIAS:
            x, weight, bias, *more = _named(args, kwargs, "input", "weight", "bias")
            x = self._last_rows(x, weight) if name == "linear" else x
            out = func(x, weight, None, *more, **kwargs)
            if bias is None:
                return out
            shape = (-1, *[1] * (0 if name == "linear" else out.dim() - 2))
            return out + self._leaf("added", bias.view(shape), to=out.shape)
        if name in _SUMS or name in _JOINS:
            args, kwargs = self._constants_as_leaves(name, args, kwargs)
        elif name in _ADDED_FIRST:
            args = [*self._constants_as_leaves(name, args[:1], {})[0], *args[1:]]
        elif name == "__setitem__":
            args = [*args[:2], *self._constants_as_leaves(name, args[2:], {})[0]]
        out = func(*args, **kwargs)
        self._lose(name, [out])
        return out

    def _is_of_all(self, x: Tensor) -> bool:
        """Whether x is a mean, a sum or a variance of features, or is made of one, number by number."""
        open_nodes: list[Any] = [x.grad_fn]
        seen: set[Any] = set()
        while open_nodes and len(seen) < 16:
            node = open_nodes.pop()
            made = self.made.get(node)
            if node in seen or (made is not None and made.tensor.numel() != x.numel()):
                continue
            seen.add(node)
            if name_of(node) in _REDUCTIONS:
                return True
            if name_of(node) in _OF_EACH:
                open_nodes += before(node)
        return False

    def _last_rows(self, x: Tensor, weight: Tensor) -> Tensor:
        """Only one row of the product with the table of all tokens: logits of a long text would fill memory."""
        whole = self.row is None or x.dim() != 3 or x.shape[1] != self.ids.shape[1]
        if whole or not any(weight is table for table in self.tables):
            return x
        assert self.row is not None
        return x[:, self.row : self.row + 1]

    def _normed(
        self,
        name: str,
        input: Tensor,
        normalized_shape: Any,
        weight: Any = None,
        bias: Any = None,
        eps: Any = None,
        *_: Any,
    ) -> Tensor:
        """F.layer_norm(x, shape, weight, bias, eps) or F.rms_norm(x, shape, weight, eps) with a fixed scale."""
        if name == "rms_norm":
            bias, eps = None, bias if eps is None else eps
            eps = torch.finfo(input.dtype).eps if eps is None else eps
        axes = tuple(range(-len(normalized_shape), 0))
        centred = input if name == "rms_norm" else input - input.mean(axes, keepdim=True)
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
        """A row of a table for each token, or of an embedding; rows of other parameters are no embeddings."""
        given = list(tensors([*args, *kwargs.values()]))
        if any(map(self.has_lost, given)):
            self._lose(name, [out])
            return out
        index = next((each for each in given if _is_integer(each)), None)
        table = next((each for each in given if each.is_floating_point()), None)
        if table is None or table.dim() != 2 or not isinstance(out, Tensor):
            return out
        if not any(table is each for each in self.embeddings):
            if index is None or index.numel() != self.ids.numel():
                return out
            if not isinstance(table, nn.Parameter) and bool((index.flatten() != self.ids.flatten()).any()):
                return out
        return self._leaf("read", out, read_by=index, rows=len(table))

    def _constants_as_leaves(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The operands of a sum, with constants as leaves. What an operation writes into gets one by being written."""
        numbers = name in _SUMS or name == "__setitem__"
        like = next((each for each in tensors([*args, *kwargs.values()]) if each.requires_grad), args[0])

        def leaf(each: Any) -> Any:
            if type(each) in (list, tuple):
                return type(each)(leaf(one) for one in each)
            if isinstance(each, Tensor) and each.is_floating_point() and not each.requires_grad:
                kind = "cut" if self.has_lost(each) or each in self._scales else "added"
                return self._leaf(kind, each, to=tuple(like.shape))
            if numbers and isinstance(like, Tensor) and type(each) in (int, float) and each != 0:
                return self._leaf("added", like.new_tensor(float(each)))
            return each

        first = args[:1]
        if _writes(name, args, kwargs):
            if name in _SUMS and not args[0].requires_grad and bool(args[0].any()):
                args[0].copy_(leaf(args[0].clone()))
        else:
            first = [leaf(each) for each in first]
        named = {key: leaf(each) if key in ("input", "other", "tensors") else each for key, each in kwargs.items()}
        return [*first, *(leaf(each) for each in args[1:])], named

    def _leaf(self, kind: str, tensor: Tensor, **more: Any) -> Tensor:
        """A leaf with this value; its copy may be changed in place."""
        place = Place(tuple(self.running), len(self.calls))
        return self.kept(Leaf(kind, tensor.detach().requires_grad_(), place, **more))

    def kept(self, leaf: Leaf) -> Tensor:
        """A copy of the leaf's tensor in the graph."""
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


def traced(module: nn.Module, run: Callable[[], Any], trace: TracedRun, *, until: int | None = None) -> Any:
    """The result of the run of the model, while `trace` gets the graph.

    Args:
        until: the number of the attention call that ends the run, which then returns None.
    """

    trace.embeddings = [each.weight for each in module.modules() if isinstance(each, nn.Embedding)]

    def see(call: SeenCall) -> Tensor:
        within = tuple(trace.running)
        trace.calls.append(call._replace(within=within))
        if until == len(trace.calls) - 1:
            raise Enough
        number = len(trace.calls) - 1
        return trace.kept(Leaf("head", call.out.detach().requires_grad_(), Place(within, number), call=number))

    try:
        with _frozen(module), torch.enable_grad(), following(module, trace.running), edited(module, Calls(see)), trace:
            return run()
    except Enough:
        return None
    finally:
        _without_graphs(module)


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


def _without_graphs(module: nn.Module) -> None:
    """Detach what the model has written into its buffers and attributes, such as caches."""
    for part in module.modules():
        for holder in (part._buffers, vars(part)):
            for name, each in list(holder.items()):
                if isinstance(each, Tensor) and each.grad_fn is not None:
                    holder[name] = each.detach()


def tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among these values and in the lists among them."""
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from tensors(each)


def _by_place(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments with the operands of sums, joins, products and roots by place, however they were given."""
    if name == "where" or not any(key in kwargs for key in (*_FIRST, *_SECOND)):
        return args, kwargs
    args, kwargs = list(args), dict(kwargs)
    for place, keys in enumerate((_FIRST, _SECOND)):
        args += [kwargs.pop(key) for key in keys if key in kwargs and len(args) == place]
    return args, kwargs


def _writes(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation writes into its first operand."""
    if not args or not isinstance(args[0], Tensor):
        return False
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__imul__", "__itruediv__")
    flagged = kwargs.get("inplace") is True or (name in _MAY_WRITE and any(each is True for each in args[1:]))
    return in_place or flagged


def _named(args: Sequence[Any], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """The arguments by these names, None for each that is missing, then the rest of `args`; `kwargs` loses them."""
    given = list(args)
    return [*(given.pop(0) if given else kwargs.pop(name, None) for name in names), *given]


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _is_root(args: Sequence[Any]) -> bool:
    exponent = args[1] if len(args) > 1 else None
    return isinstance(exponent, (int, float)) and (exponent < 0 or exponent != int(exponent))


def _scale_detached(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The scale as a constant; of a variance and a mean, the mean is linear, which their common node does not say."""
    out = func(*args, **kwargs)
    if isinstance(out, Tensor):
        return (out.detach(),)
    axes = kwargs.get("dim", args[1] if len(args) > 1 and type(args[1]) is not bool else None)
    mean = args[0].mean() if axes is None else args[0].mean(axes, keepdim=True)
    return out[0].detach(), mean.view_as(out[1])


def _of_length_1(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **_: Any) -> Tensor:
    """F.normalize with a fixed scale."""
    return input / input.detach().norm(p, dim, keepdim=True).clamp_min(eps)


def _with_operand_held(args: Sequence[Any], operand: int) -> list[Any]:
    tensors = [at for at, each in enumerate(args) if isinstance(each, Tensor) and each.requires_grad]
    return [each.detach() if at == tensors[operand] else each for at, each in enumerate(args)]


def _as_factor(x: Tensor, out: Tensor) -> Tensor:
    """f(x) as the product of x and the fixed ratio f(x) / x."""
    ratio = torch.where(x == 0, 0.0, out / torch.where(x == 0, 1.0, x)).detach()
    return x * ratio
