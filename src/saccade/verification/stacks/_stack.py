"""One form of a user's stack, which all probes call.

Shape legend: R rows, L length, V width of an output: the vocabulary, or the model's width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..findings._finding import Inapplicable, UnreadableResult
from ..subject._calling import guarded
from ..subject._subject import Subject
from ._documents import Documents, ids_of, located

Decode = Callable[[list[int], Any], tuple[Tensor, Any]]
# (prompts, steps) -> (the tokens that follow each, logits (B, steps, V) that they were chosen by)
Generate = Callable[[Documents, int], tuple[Documents, Tensor]]


@dataclass(frozen=True)
class Promises:
    """Statements of the author, or of the model's configuration; None where there is none."""

    causal: bool | None = None
    window: int | None = None  # keys that a query sees, its own included, as transformers counts


@dataclass(frozen=True)
class Decoder:
    """A way to decode step by step: `decode(tokens so far, state)` gives (logits of the last token (V,), state)."""

    name: str
    decode: Decode
    is_given: bool = False  # by the user


@dataclass(frozen=True, eq=False)
class Stack:
    """A model and its surroundings: collator, packing, decoders, training step. `module` is None if the model is a
    plain function; `modules` are all modules that the model, or these functions, compute with.

    `batch` and `pack` give the model's inputs for documents; `pack`, `step` and `second` are None where there are none.
    """

    name: str
    model: Callable[..., Any]
    module: nn.Module | None
    vocabulary: Tensor  # ids that documents are drawn from, none of them special
    batch: Callable[[Documents], Any]
    pack: Callable[[Documents], Any] | None = None
    decoders: tuple[Decoder, ...] = ()
    generate: Generate | None = None
    step: Callable[[list[Documents]], Any] | None = None
    shard: Callable[[Documents], Any] | None = (
        None  # called on each rank of a group: the output of all documents in one row
    )
    left: Callable[[Documents], Any] | None = None  # another batch, padded on the left
    second: Stack | None = None
    promises: Promises = Promises()
    longest: int | None = None
    takes_padding: bool = True  # whether `batch` can be given documents of unequal lengths
    constants: Mapping[str, Any] = field(default_factory=dict)  # arguments of every call
    modules: tuple[nn.Module, ...] = ()
    assumed: tuple[str, ...] = ()
    is_served: bool = False  # by another process: outputs are log probabilities (R, L, 1), and have its rounding
    subject: Subject | None = None  # the model alone, where it is a whole model of tokens

    @property
    def holders(self) -> tuple[Any, ...]:
        """All that a call may change: its modules and functions."""
        if self.is_served:
            return ()
        decoders = tuple(decoder.decode for decoder in self.decoders)
        return (*self.modules, self.model, self.batch, self.pack, self.step, self.shard, self.generate, *decoders)

    def zeros(self) -> list[tuple[str, nn.Parameter]]:
        """Weights that are to learn and are all 0, by name. None where others may hold copies of them: a second model,
        or a decoder of the user's."""
        if (self.second is not None and self.second.module is not self.module) or any(
            decoder.is_given for decoder in self.decoders
        ):
            return []
        named = (part for module in self.modules for part in module.named_parameters())
        return [
            (name, weight)
            for name, weight in named
            if weight.requires_grad and not name.endswith("bias") and not bool(weight.any())
        ]

    def run(self, inputs: Any, **more: Any) -> Tensor:
        """The output (R, L, V) of one call, as a copy without a graph.

        Raises:
            TargetError: the stack raised; or its output is not one for each token.
        """
        with torch.no_grad():
            return self.output(inputs, **more).detach().clone()

    def output(self, inputs: Any, **more: Any) -> Tensor:
        """As `run`, with a graph."""
        ids = ids_of(inputs)
        returned = guarded(self.called, inputs, **more)
        return per_token(returned, ids)

    def outputs(self, documents: Documents, make: Callable[[Documents], Any] | None = None) -> list[Tensor]:
        """The outputs (L, V) of each document of a batch, or of other inputs that `make` gives for them."""
        inputs = (make or self.batch)(documents)
        out = self.run(inputs)
        return [out[place.row, place.columns] for place in located(inputs, documents)]

    def called(self, inputs: Any, **more: Any) -> Any:
        """The model's result for these inputs. Labels are left out: the outputs are what is compared."""
        inputs = self._in_dtype(inputs)
        if isinstance(inputs, Mapping):
            named = {name: value for name, value in inputs.items() if name != "labels"}
            return self.model(**{**self.constants, **more, **named})
        places = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        return self.model(*places, **{**self.constants, **more})

    def _in_dtype(self, inputs: Any) -> Any:
        """Inputs on the model's device, and masks of numbers in its dtype, which SDPA asks for."""
        first = next((p for part in self.modules for p in part.parameters() if p.is_floating_point()), None)
        if first is None:
            return inputs
        plain = dict(inputs) if isinstance(inputs, Mapping) else inputs
        return tree_map_only(
            Tensor, lambda t: t.to(first.device, first.dtype if t.is_floating_point() else None), plain
        )

    def length(self, wanted: int) -> int:
        """`wanted`, or the longest document that the model takes."""
        return min(wanted, self.longest or wanted)


def per_token(returned: Any, ids: Tensor) -> Tensor:
    """The output (R, L, V) among what a model returned.

    Raises:
        UnreadableResult: it holds none.
    """
    for value in _candidates(returned):
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value[None] if value.dim() == 2 and len(ids) == 1 else value
            if value.dim() == 3 and value.shape[:2] == ids.shape:
                return value
    shapes = [list(value.shape) for value in _candidates(returned) if isinstance(value, Tensor)]
    raise UnreadableResult(
        f"the model's output: expected ({ids.shape[0]}, {ids.shape[1]}, width) for token ids of shape "
        f"{list(ids.shape)}, got {shapes or type(returned).__name__}",
        None,
    )


def _candidates(returned: Any) -> list[Any]:
    if isinstance(returned, Tensor):
        return [returned]
    names = ("logits", "last_hidden_state")
    if isinstance(returned, Mapping):
        return [returned[name] for name in names if name in returned]
    if any(hasattr(returned, name) for name in names):
        return [getattr(returned, name, None) for name in names]
    return list(returned) if isinstance(returned, (tuple, list)) else []


def padding_of(inputs: Any) -> Tensor | None:
    """(R, L), True = real, where the inputs have such a mask."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    fits = isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape == ids_of(inputs).shape
    return mask.bool() if fits and mask is not None and not mask.is_floating_point() and int(mask.max()) <= 1 else None


def needs(value: Any, what: str) -> Any:
    """`value`, unless it is None.

    Raises:
        Inapplicable: the stack has no such part.
    """
    if value is None:
        raise Inapplicable(f"no {what} is given")
    return value
