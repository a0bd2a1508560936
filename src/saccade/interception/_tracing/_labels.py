"""Labels of tensors by identity: the table with which tensors are followed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Generic, TypeVar
from weakref import ref

from torch import Tensor

Label = TypeVar("Label")


class TensorLabels(Generic[Label]):
    """A label for each tensor that has one. The label ends with its tensor, which is not kept alive: later, another
    tensor may get the same id."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Tensor], Label]] = {}

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._known

    def __bool__(self) -> bool:
        return bool(self._known)

    def get(self, tensor: object) -> Label | None:
        found = self._known.get(id(tensor))
        return None if found is None else found[1]

    def with_views(self, tensor: Tensor) -> Label | None:
        """The label of the tensor, or else of its base if it is a view."""
        found = self._known.get(id(tensor))
        if found is not None:
            return found[1]
        return None if tensor._base is None else self.with_views(tensor._base)

    def put(self, tensor: Tensor, label: Label) -> None:
        key = id(tensor)
        # called with the dead reference, which `pop` takes for its default; a lambda takes twice as long
        self._known[key] = ref(tensor, partial(self._known.pop, key)), label

    def put_all(self, tensors: Iterable[Tensor], label: Label) -> None:
        for tensor in tensors:
            self.put(tensor, label)

    def pop(self, tensor: Tensor) -> None:
        self._known.pop(id(tensor), None)

    def items(self) -> Iterator[tuple[Tensor, Label]]:
        """Pairs of living tensors and labels; labels may be changed during iteration."""
        for reference, label in list(self._known.values()):
            tensor = reference()
            if tensor is not None:
                yield tensor, label

    def sharing(self, tensor: Tensor) -> Iterator[tuple[Tensor, Label]]:
        """Labelled tensors that share memory with the tensor, including itself."""
        memory = memory_of(tensor)
        return ((one, label) for one, label in self.items() if memory_of(one) == memory)

    def clear(self) -> None:
        self._known.clear()


def memory_of(tensor: Tensor) -> int:
    """The address of a tensor's storage, which all its views share."""
    return tensor.untyped_storage().data_ptr()
