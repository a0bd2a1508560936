"""The residual stream of one run of any model as parts, and the share of each part in what is linear in them.

Shape legend: as in `_traced_run.py`; D numbers of a readout, n components.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...interception._running_modules import Layers, Place
from ...operator._call import ObservedCall
from ...support._restored import evaluating
from ..inspection import weights_of
from ..intervention._intervene import NoCall
from ._components import BIASES, HEADS, POSITION, TOKEN, TYPE, Component, exact
from ._input import Input
from ._nodes import before, in_order
from ._runs import edited
from ._stream import graph_of, node_of, nonlinear, reads
from ._traced_run import Calls, Enough, Held, Leaf, Made, NoStream, SeenCall, TracedRun, traced

_OF_OUTPUT = 1e-3  # far above float32's rounding of weights, far below what another kind of attention adds
_AT_ONCE = 16  # numbers of a readout that go back through the graph together
_ROWS = 64  # of weights that are computed together


class Part(NamedTuple):
    """A tensor that is added to the stream. Of an attention call's output it is each head (axis 1) of layer `heads`."""

    component: Component
    tensor: Tensor
    heads: int | None = None


class _Summed(NamedTuple):
    """Shares (D,) by component, and the rounding of their sums (D,): one of the run's dtype for each operation."""

    shares: dict[Component, Tensor]
    rounding: Tensor

    def differ(self, expected: Tensor) -> bool:
        """Whether the shares do not sum to what is expected (D,)."""
        return bool(((sum(self.shares.values()) - exact(expected)).abs() > self.rounding).any())


@dataclass(frozen=True, eq=False)
class Stream:
    """A run that is linear in what is added. `stream_of` makes it.

    Attributes:
        out: what the run returned; None if it ended at an attention call.
        fixed: what is held besides the scales of norms: "gate", or "ratio" and "factor" (activations).
        cross: the numbers of the calls of cross-attention.
    """

    trace: TracedRun
    out: Any
    ids: Tensor
    fixed: frozenset[str]
    cross: frozenset[int] = frozenset()

    @property
    def calls(self) -> list[SeenCall]:
        """The attention calls, layer after layer."""
        return self.trace.calls

    def parts(self, readout: Tensor) -> list[Part]:
        """The tensors that the readout (D,) is linear in."""
        leaf_of = {node_of(leaf): leaf for leaf in self.trace.leaves}
        named = _Names(self)
        nodes = in_order([graph_of(readout)])
        writers: dict[Any, frozenset[Component]] = {}
        for node in nodes:
            own = leaf_of.get(node)
            if own is not None:
                writers[node] = frozenset() if own.kind == "added" else frozenset([named(own)])
            else:
                writers[node] = frozenset().union(*(writers[each] for each in before(node)))
        # A feed-forward layer ends where what it wrote meets something else, so its bias is part of it.
        last = {
            each
            for node in nodes
            for each in before(node)
            if len(writers[each]) == 1 and writers[node] != writers[each] and self._is_known(each, writers)
        }
        parts = []
        for node in in_order([graph_of(readout)], lambda node: node in last):
            if node in last:
                (component,) = writers[node]
                parts.append(Part(component, self.trace.made[node].tensor))
            elif node in leaf_of:
                own = leaf_of[node]
                parts.append(Part(named(own), own.tensor, own.call))
        return parts

    def _is_known(self, node: Any, writers: dict[Any, frozenset[Component]]) -> bool:
        """Whether a node is the output of layers that mix, whose value is known."""
        (component,) = writers[node]
        made = self.trace.made.get(node)
        mixes = component.kind not in (*HEADS, "token", "position", "type")
        return mixes and made is not None and made.tensor._version == made.version and made.tensor.grad_fn is node

    def shares(self, readout: Tensor, expected: Tensor) -> dict[Component, Tensor]:
        """The share (D,) of each component in a readout (D,), in float64; biases are last.

        Raises:
            NoStream: the shares do not sum to what the model computes, `expected` (D,).
        """
        found = self._summed(readout)
        if found.differ(expected):
            raise NoStream(
                f"model: what is added to its residual stream does not sum to it, from {self._wrong(readout)} on"
            )
        return {each: found.shares[each] for each in ordered(found.shares)}

    def _summed(self, readout: Tensor) -> _Summed:
        parts = self.parts(readout)
        found: dict[Component, list[Tensor]] = {}
        size = []
        for slopes in self._slopes(readout, parts):
            here: dict[Component, Tensor] = {}
            size.append(torch.zeros(len(slopes[0]), dtype=torch.float64))
            for part, slope in zip(parts, slopes, strict=True):
                products = exact(slope) * exact(part.tensor)
                size[-1] += products.abs().reshape(len(slope), -1).sum(1)
                shares = {part.component: products.reshape(len(slope), -1).sum(1)}
                if part.heads is not None:
                    by_head = products.sum((1, 3, 4)).T
                    shares = {part.component._replace(head=head): share for head, share in enumerate(by_head)}
                for component, share in shares.items():
                    here[component] = here[component] + share if component in here else share
            for component, share in here.items():
                found.setdefault(component, []).append(share)
        rounding = self._eps(readout) * max(self.trace.operations, default=1)
        biases = found.pop(BIASES, [torch.zeros(len(readout), dtype=torch.float64)])
        shares = {component: torch.cat(each) for component, each in found.items()}
        return _Summed({**shares, BIASES: torch.cat(biases)}, rounding * torch.cat(size))

    def _eps(self, readout: Tensor) -> float:
        """The coarsest rounding of what is added; layers that are cut may round to half precision inside."""
        made = [self.trace.made[node].tensor.dtype for node in in_order([graph_of(readout)]) if node in self.trace.made]
        added = max((torch.finfo(dtype).eps for dtype in made if dtype.is_floating_point), default=0.0)
        return max(added, min(self.trace.eps, torch.finfo(torch.float32).eps))

    def _wrong(self, readout: Tensor) -> str:
        """The first operation on the way from the tokens whose result is not the sum of its shares."""
        ways = {node_of(leaf) for leaf in self.trace.leaves if leaf.kind == "read"}
        for node in in_order([graph_of(readout)]):
            if any(each in ways for each in before(node)):
                ways.add(node)
        made = sorted((self.trace.made[node] for node in ways if node in self.trace.made), key=lambda each: each.number)
        made = [each for each in made if each.tensor._version == each.version]

        def is_wrong(each: Made) -> bool:
            weights = torch.randn(each.tensor.shape, generator=torch.Generator().manual_seed(0)).to(each.tensor)
            number = (each.tensor * weights).sum()[None]
            return self._summed(number).differ(number)

        at = bisect.bisect_left(made, True, key=is_wrong)
        return "its output" if at == len(made) else f"{made[at].name} in {made[at].path or 'the model'}"

    def sources(self, readout: Tensor) -> tuple[Tensor, Tensor]:
        """(N, L) float64: the share of each head in a readout (1,), split over the tokens that are read; and those of
        cross-attention, over the source."""
        parts = {part.heads: part for part in self.parts(readout) if part.heads is not None}
        if not parts:
            raise NoStream("model: no attention call adds to its residual stream; other layers read what heads write")
        (slopes,) = self._slopes(readout, list(parts.values()))
        rows = {}
        for layer, slope in zip(parts, slopes, strict=True):
            call = self.calls[layer].observed()
            check_lengths(call, layer, self.ids, cross=layer in self.cross)
            wanted = exact(slope)[0, 0]  # (Hq, L, Dv)
            found = torch.zeros(len(wanted), call.key.shape[2], dtype=torch.float64)
            for some in wanted.any(0).any(1).nonzero()[:, 0].split(_ROWS):
                weights = exact(weights_of(call, rows=some.tolist())[0])  # (Hq, R, L)
                grouped = wanted[:, some].unflatten(0, (call.value.shape[1], -1))
                shares = torch.einsum("gld,gnrd->gnrl", exact(call.value[0]), grouped).flatten(0, 1) * weights
                whole = (wanted * exact(call.out)[0])[:, some].sum(-1)  # (Hq, R)
                if bool(((shares.sum(-1) - whole).abs() > _OF_OUTPUT * (shares.abs().sum(-1) + whole.abs())).any()):
                    raise NoStream(f"model: attention call {layer} does not return its values times its weights")
                found += shares.sum(1)
            rows[layer] = found
        own = [rows[n] for n in sorted(rows) if n not in self.cross]
        cross = [rows[n] for n in sorted(rows) if n in self.cross]
        nothing = torch.zeros(0, self.ids.shape[1], dtype=torch.float64)
        return torch.cat(own or [nothing]), torch.cat(cross or [nothing])

    def _slopes(self, readout: Tensor, parts: Sequence[Part]) -> Iterator[tuple[Tensor, ...]]:
        """The derivative (d, ...) of some numbers of the readout by each part, some after the other."""
        tensors = [part.tensor for part in parts]
        units = torch.eye(len(readout), dtype=readout.dtype, device=readout.device)
        for some in units.split(_AT_ONCE):
            try:
                yield torch.autograd.grad(
                    readout,
                    tensors,
                    some,
                    is_grads_batched=True,
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
            except RuntimeError as error:  # such as a checkpoint, or a tensor that was written to
                raise NoStream(
                    f"model: the graph of its run cannot be followed: {str(error).splitlines()[0]}"
                ) from None


def ordered(*components: Iterable[Component]) -> tuple[Component, ...]:
    """All of these: embeddings, then layer after layer, then other mixers, and the biases."""
    return tuple(sorted(set(itertools.chain(*components)), key=_order))


def _order(component: Component) -> tuple[int, int, int, int, str]:
    kinds = ("token", "position", "type")
    if component.kind in kinds:
        return 0, kinds.index(component.kind), 0, 0, ""
    if component.layer is None:
        return 3 if component == BIASES else 2, 0, 0, 0, component.kind
    return 1, component.layer, (*HEADS, component.kind).index(component.kind), component.head or 0, ""


class _Names:
    """The component of each leaf."""

    def __init__(self, stream: Stream) -> None:
        self._ids = stream.ids
        leaves = stream.trace.leaves
        self._first = next((leaf for leaf in leaves if leaf.kind == "read" and reads(leaf, stream.ids)), None)
        self._cross = sorted(stream.cross)
        self._own = [n for n in range(len(stream.calls)) if n not in stream.cross] or self._cross
        places = [self._counted(leaf.place) for leaf in leaves if leaf.kind == "cut"]
        self._layers = Layers([stream.calls[n].within for n in self._own], places)

    def __call__(self, leaf: Leaf) -> Component:
        if leaf.kind == "added":
            return POSITION if _by_row(leaf, self._ids.shape[1]) else BIASES
        if leaf.kind == "read":
            return self._table(leaf)
        if leaf.kind == "head":
            assert leaf.call is not None
            cross = leaf.call in self._cross
            return Component(HEADS[cross], (self._cross if cross else self._own).index(leaf.call))
        layer = self._layers(self._counted(leaf.place))
        return Component(layer) if isinstance(layer, str) else Component("feed_forward", layer)

    def _counted(self, place: Place) -> Place:
        """The place, after as many calls of those that count layers."""
        return place._replace(calls=bisect.bisect_left(self._own, place.calls))

    def _table(self, leaf: Leaf) -> Component:
        """Tokens may be the numbers of their places: the first table that is read by them is that of tokens."""
        index, first = leaf.read_by, self._first
        if index is None:
            return POSITION if leaf.tensor.shape[-2:-1] == self._ids.shape[-1:] else TYPE
        counts = bool((index.flatten() == torch.arange(index.numel(), device=index.device)).all())
        if reads(leaf, self._ids) and (leaf is first or not counts):
            alone = index.numel() == 1 and first is not None and leaf.rows != first.rows
            return POSITION if alone else TOKEN
        same = bool((index == index.flatten()[0]).all())
        return TYPE if same and (index.numel() > 1 or leaf.rows < 5) else POSITION


def _by_row(leaf: Leaf, length: int) -> bool:
    """Whether a constant differs from token to token, along the axis of tokens of what it is added to."""
    shape, to = leaf.tensor.shape, leaf.to
    if length < 2 or length not in to or len(shape) > len(to):
        return False
    axis = to.index(length) - len(to)
    return len(shape) >= -axis and shape[axis] == length and leaf.tensor.numel() > length


def stream_of(
    given: Input,
    ends: Callable[[TracedRun, Any], Sequence[Tensor]],
    *,
    until: int | None = None,
    row: int | None = None,
) -> Stream:
    """Run the model twice, so that the tensors chosen by `ends` are linear in what is added to the stream.

    Args:
        until: as in `traced`.
        row: the only one of which logits are computed.

    Raises:
        NoStream: no such stream was found.
    """

    def run(held: Mapping[int, Held]) -> tuple[TracedRun, Any]:
        trace = TracedRun(held, given.ids, row, () if row is None else given.tables)
        return trace, traced(given.module, given.run, trace, until=until)

    with evaluating(given.module), _with_calls():
        try:
            first, out = run({})
            held = nonlinear(first, ends(first, out), given.ids)
            operations = {number: first.operations[number] for number in held}
            del first, out
            second, out = run(held)
        except (NoStream, NoCall):
            raise
        except Exception as error:  # the model alone has run before
            raise NoStream(
                f"model: a run that records its operations failed, {type(error).__name__}: {error}; expected "
                "operations that can be differentiated"
            ) from error
    if any(second.operations.get(number) != operations[number] for number in held):
        raise NoStream("model: it does something else in a second run of the same text")
    cross = (n for n, call in enumerate(second.calls) if given.sources is not None and _reads_constants(second, call))
    return Stream(second, out, given.ids, frozenset(each.kind for each in held.values()) - {"cut"}, frozenset(cross))


def _reads_constants(trace: TracedRun, call: SeenCall) -> bool:
    """Whether keys and values do not come from the stream, such as those of cross-attention."""
    read = [call.graph(name) for name in ("key", "value")]
    return not any(each.requires_grad or trace.has_lost(each) for each in read)


@contextmanager
def _with_calls() -> Iterator[None]:
    """A block whose error for a model without attention calls says that there is nothing to split."""
    try:
        yield
    except NoCall as error:
        if error.there:
            raise
        raise NoStream(
            f"model: no call of softmax attention was seen, so there are no weights to split{error.lost}"
        ) from None


def check_lengths(call: ObservedCall, layer: int, ids: Tensor, *, cross: bool = False) -> None:
    """NoStream for an attention call between other rows than the tokens, such as patches, or blocks of them; `cross`:
    the keys are those of a source."""
    if call.query.shape[2] != ids.shape[1] or (call.key.shape[2] != ids.shape[1] and not cross):
        raise NoStream(f"model: attention call {layer} is not one from token to token")


def observed(given: Input, see: Callable[[int, ObservedCall], None], *, until: int | None = None) -> None:
    """Run the model as it is, and call `see` with each layer's attention call; `until`: the last layer."""
    layers = itertools.count()

    def seen(call: SeenCall) -> None:
        layer = next(layers)
        see(layer, call.observed())
        if layer == until:
            raise Enough

    with evaluating(given.module), torch.no_grad(), _with_calls(), edited(given.module, Calls(seen)), suppress(Enough):
        given.run()


def heads_of(given: Input) -> tuple[int, ...]:
    """The number of query heads of each layer."""
    heads: list[int] = []
    observed(given, lambda layer, call: heads.append(call.query.shape[1]))
    return tuple(heads)
