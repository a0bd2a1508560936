"""The sequences that queries and keys were computed from: whether a call is self-attention, as far as is known.

Every tensor has sources: the tensors from which its rows were computed row by row (projections, norms, rotary
positions, views, sums). Functions that move or mix rows (attention, gather, a mean over tokens) begin a new source. So

    q = norm(x) @ W_q, k = x @ W_k           the same source: self-attention
    q = x @ W_q,       k = memory @ W_k      two sources: cross-attention
    q, k passed to the model                 unknown

Nothing is kept alive: tensors are held by weak references.

Shape legend: L length, the rows of a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ....interception._tracing import TensorLabels

Sources = frozenset[int]
_CONSTANT: Sources = frozenset()  # parameters, and tensors computed only from them
_PROJECTED = 0  # a source of every tensor that went through a layer with weights

_CUTTING, _JOINING, _PROJECTING, _MULTIPLYING, _MOVING, _KEEPING = range(6)
_KINDS = {
    name: kind
    for kind, names in {
        _CUTTING: "__getitem__ narrow chunk split split_with_sizes tensor_split unbind select",
        _JOINING: "cat concat concatenate stack hstack vstack",
        _PROJECTING: "linear conv1d conv2d embedding",
        _MULTIPLYING: "matmul __matmul__ __rmatmul__ mm bmm einsum baddbmm addmm addbmm tensordot",
        _MOVING: "flip fliplr flipud roll rot90 gather index_select index_copy index_copy_ index_add index_add_ "
        "index_put index_put_ scatter scatter_ scatter_add scatter_add_ scatter_reduce take_along_dim take sort topk "
        "masked_select masked_scatter masked_scatter_ unfold as_strided scaled_dot_product_attention",
        _KEEPING: "view_as_complex view_as_real",  # a complex number is two of a row's own
    }.items()
    for name in names.split()
}


class TensorOrigins:
    """Follows tensors through the functions of a mode."""

    def __init__(self) -> None:
        self._known = TensorLabels[Sources]()
        self._numbers = itertools.count(_PROJECTED + 1)
        self._joined: dict[tuple[Sources, ...], Sources] = {}
        self._cut: dict[int, tuple[frozenset[int], Sources]] = {}  # by source: the lengths it was cut to, and its whole

    def ended(self) -> None:
        """The forward has ended."""
        self._known.clear()
        self._joined.clear()
        self._cut.clear()

    def same(self, query: Tensor, key: Tensor, length: int, *, projected: bool = True) -> bool | None:
        """Whether rows of queries and keys are of the same tokens; None if unknown.

        Args:
            query, key: the arguments of a call.
            length: L, of both.
            projected: whether both must have gone through a layer: other tensors may have been computed anywhere.
        """
        if query is key:
            return True
        of_query, of_key = self._of(query), self._of(key)
        if of_query is None or of_key is None:
            return None if projected else False
        own, other = (self._whole(sources_, length) - {_PROJECTED} for sources_ in (of_query, of_key))
        if own and other and (own <= other or other <= own):
            return True
        known = not projected or all(not sources_ or _PROJECTED in sources_ for sources_ in (of_query, of_key))
        return False if known and own.isdisjoint(other) else None

    def sees(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Follow tensors through a function. Runs for every function, so it is fast for most."""
        kind = type(result)
        if kind is Tensor or isinstance(result, Tensor):
            self._remember(result, self._made(getattr(func, "__name__", ""), args, kwargs, result))
        elif isinstance(result, (tuple, list)) and kind is not torch.Size:
            for part in result:
                if isinstance(part, Tensor):
                    self._remember(part, self._made(getattr(func, "__name__", ""), args, kwargs, part))
        elif result is None and getattr(func, "__name__", "") == "__setitem__":
            self._written(args)

    def _made(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> Sources | None:
        """The sources of a result, None if it has none to share."""
        kind = _KINDS.get(name)
        if kind is _JOINING:
            return self._join(args[0] if args else kwargs.get("tensors", ()))
        if kind is _MOVING:
            return self._new()
        given = [arg for arg in args if isinstance(arg, Tensor)]
        if kwargs or not given:
            given += [arg for arg in (*_listed(args), *kwargs.values()) if isinstance(arg, Tensor)]
        if kind is _PROJECTING:
            return _projected(self._source(given[0]))
        sourced = [(tensor, found) for tensor in given if (found := self._found(tensor))]
        if not sourced:
            return _CONSTANT if given and all(self._of(tensor) is not None for tensor in given) else None
        if kind is _MULTIPLYING:
            factor = _only_factor(sourced)
            return self._new() if factor is None else _projected(factor)
        first, sources = sourced[0]
        if len(sourced) > 1:
            if all(found == sources for _, found in sourced):
                return sources
            # Smaller tensors are the same for many rows: masks, position embeddings, shifts.
            most = max(tensor.numel() for tensor, _ in sourced)
            return frozenset().union(*(found for tensor, found in sourced if tensor.numel() == most))
        if kind is _CUTTING:
            return self._pieces(first, sources, args, result)
        shrunk = kind is not _KEEPING and result.numel() < first.numel()
        return self._new() if shrunk else sources

    def _pieces(self, whole: Tensor, sources: Sources, args: tuple[Any, ...], result: Tensor) -> Sources:
        """The sources of a part of a tensor. It has the same rows, or fewer; the length of the call decides which."""
        index = args[1] if len(args) > 1 else None
        if any(isinstance(part, (Tensor, list)) for part in (index if isinstance(index, tuple) else (index,))):
            return self._new()
        lengths = frozenset(result.shape[:-1]) - frozenset(whole.shape)
        if not lengths:
            return sources
        (piece,) = new = self._new()
        self._cut[piece] = lengths, sources
        return new | (sources & {_PROJECTED})

    def _whole(self, sources: Sources, length: int) -> Sources:
        """The sources, with parts that were not cut to `length` replaced by their wholes."""
        whole: set[int] = set()
        for source in sources:
            lengths, of = self._cut.get(source, (frozenset(), _CONSTANT))
            whole |= {source} if not of or length in lengths else self._whole(of, length)
        return frozenset(whole)

    def _join(self, parts: Iterable[Any]) -> Sources | None:
        tensors = [part for part in parts if isinstance(part, Tensor) and part.numel()]
        sources = tuple(self._source(tensor) for tensor in tensors)
        if len(set(sources)) <= 1:
            return sources[0] if sources else None
        known = {_PROJECTED} if all(_PROJECTED in part for part in sources) else set()
        return self._joined.setdefault(sources, self._new()) | known

    def _written(self, args: tuple[Any, ...]) -> None:
        """Record `tensor[...] = value`. The tensor keeps its sources if they include all sources of `value`; otherwise
        it gets a new source."""
        tensor, value = args[0], args[-1]
        before = self._found(tensor) if isinstance(tensor, Tensor) else None
        if before and not (isinstance(value, Tensor) and (self._found(value) or _CONSTANT) <= before):
            self._remember(tensor, self._new())

    def _of(self, tensor: Tensor) -> Sources | None:
        """The known sources of a tensor, or of the tensor that it is a view of."""
        sources = self._known.with_views(tensor)
        return _CONSTANT if sources is None and _is_parameter(tensor) else sources

    def _found(self, tensor: Tensor) -> Sources | None:
        """The same; a tensor with unknown rows is a source itself."""
        sources = self._of(tensor)
        if sources is None and tensor.is_floating_point() and tensor.dim() > 1:
            sources = self._new()
            self._remember(tensor, sources)
        return sources

    def _source(self, tensor: Tensor) -> Sources:
        sources = self._found(tensor)
        if sources is None:  # token ids
            sources = self._new()
            self._remember(tensor, sources)
        return sources

    def _remember(self, tensor: Tensor, sources: Sources | None) -> None:
        if sources is not None:
            self._known.put(tensor, sources)

    def _new(self) -> Sources:
        return frozenset((next(self._numbers),))


def _is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one."""
    return type(tensor) is nn.Parameter or type(tensor._base) is nn.Parameter


def _projected(sources: Sources) -> Sources:
    return sources if _PROJECTED in sources else sources | {_PROJECTED}


def _listed(args: tuple[Any, ...]) -> Iterator[Any]:
    """The operands of einsum in the form of a list."""
    return (part for arg in args if isinstance(arg, (list, tuple)) for part in arg)


def _only_factor(sourced: list[tuple[Tensor, Sources]]) -> Sources | None:
    """The sources of a product's rows, if all but one of the factors are weights: constant, or a plain matrix."""
    rows = [found for tensor, found in sourced if tensor.dim() > 2] if len(sourced) > 1 else [sourced[0][1]]
    return rows[0] if len(rows) == 1 else None
