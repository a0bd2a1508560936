"""Linear layers that get the numbers of a checkpoint in few bits, in place of floats: `load(..., weights="stored")`.

Shape legend: F features, E width.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ....operator._groups import GroupedWeight, joined
from ....operator._int8 import Int8Weight, int8_of
from ....operator.nn._rounded import Rounding
from .gguf import GgufHeader, model_names, processor_of, row_order
from .keys import KeyPlan, Piece
from .quantised import HELD_TYPES, QuantisedWeights, gguf_weight
from .reading import StoredWeights


class HeldLayer(NamedTuple):
    """A weight of a linear layer, from the tensor `source` of the files.

    Attributes:
        form: its name in `explain`.
        read: makes the weight.
        tied: whether an embedding has the same weight, which it keeps as floats.
    """

    source: str
    form: str
    read: Callable[[], GroupedWeight | Int8Weight]
    tied: bool


def gguf_layers(module: nn.Module, header: GgufHeader, file: Path) -> dict[str, HeldLayer]:
    """The layers of a GGUF file that can be held, by the names of their weights in a module on the meta device."""
    rounding, layers = Rounding(module, "stored"), {}
    processor = processor_of(header, file)
    names = model_names(module, header, processor)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    tables = {id(parameters[own]): source for own, source in names.items() if own in parameters}
    for name, shape in rounding.shapes().items():
        source = names.get(name) or tables.get(id(parameters[name]))
        if source is None or header.types[source] not in HELD_TYPES or header.places[source][1] != shape:
            continue
        linear = module.get_submodule(name.rpartition(".")[0])
        try:
            rows = row_order(linear, source, shape, processor)
        except ValueError:
            continue
        kind = header.types[source]
        read = functools.partial(gguf_weight, file, header.places[source][0], kind, *shape, rows)
        layers[name] = HeldLayer(source, kind, read, rounding.table(name))
    return layers


def packed_layers(module: nn.Module, packed: QuantisedWeights) -> dict[str, HeldLayer]:
    """The layers of a GPTQ, AWQ or torchao checkpoint that can be held, by the names of their weights in a module."""
    rounding, layers = Rounding(module, "stored"), {}
    shapes = rounding.shapes()
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    for source in packed.packed:
        name = next((name for name in (source, prefix + source, source.removeprefix(prefix)) if name in shapes), None)
        weight = packed.held(source) if name and shapes[name] == packed.packed[source] else None
        if name is not None and weight is not None:
            read = functools.partial(type(weight), *weight)
            layers[name] = HeldLayer(source, packed.method.form, read, rounding.table(name))
    return layers


def hold_pieces(rounding: Rounding, wanted: KeyPlan, packed: StoredWeights) -> KeyPlan:
    """Replace the layers of a family's model that can be held, and return the plan of the tensors that are left."""
    if not isinstance(packed, QuantisedWeights):
        return wanted
    places: dict[str, list[Piece]] = {}
    for piece in wanted.pieces:
        places.setdefault(piece.ours, []).append(piece)
    for name, shape in rounding.shapes().items():
        pieces = sorted(places.get(name, ()), key=lambda piece: piece.start)
        if not pieces or not all(piece.published in packed.packed and not piece.transposed for piece in pieces):
            continue
        weight = _joined([packed.held(piece.published) for piece in pieces])
        if weight is not None and (weight.features, weight.width) == shape:
            rounding.hold(name, weight, packed.method.form)
            del places[name]
        for piece in places.get(name, ()):
            packed.leave(piece.published, "the parts of its layer are packed differently")
    return wanted._replace(pieces=[piece for piece in wanted.pieces if piece.ours in places])


def _joined(weights: Sequence[GroupedWeight | Int8Weight | None]) -> GroupedWeight | Int8Weight | None:
    """Weights of the same x as one, as in `joined`."""
    of_groups = [weight for weight in weights if not isinstance(weight, Int8Weight)]
    if of_groups:
        return joined(of_groups) if len(of_groups) == len(weights) else None
    eight = [weight for weight in weights if isinstance(weight, Int8Weight)]
    return int8_of(
        *(torch.cat(parts) for parts in zip(*((w.integers(), w.block_scales()) for w in eight), strict=True))
    )


def put(module: nn.Module, layers: dict[str, HeldLayer]) -> None:
    """Replace the layers of a module that are not replaced yet."""
    rounding = Rounding(module, "stored")
    for name in rounding.shapes().keys() & layers.keys():
        layer: Any = rounding.hold(name, layers[name].read(), layers[name].form)
        layer._is_hf_initialized = True  # transformers draws no weight for it


def leaves_out() -> bool:
    """Whether this version of transformers can be kept from making floats for layers; else they are made and freed."""
    return hasattr(importlib.import_module("transformers").PreTrainedModel, "_finalize_model_loading")


def put_while_loading(layers: dict[str, HeldLayer]) -> AbstractContextManager[None]:
    """Leave the tensors of layers out of the files that transformers reads, and replace the layers before it makes
    floats for them. Those that are tied to an embedding follow after loading."""
    kind: Any = importlib.import_module("transformers").PreTrainedModel
    if not leaves_out():
        return nullcontext()
    own_layers = {name: layer for name, layer in layers.items() if not layer.tied}
    left_out = {layer.source for layer in own_layers.values()}
    finish: Any = kind._finalize_model_loading
    thread = threading.get_ident()

    def finalised(model: Any, config: Any, info: Any) -> Any:
        if threading.get_ident() == thread:  # others load models of their own
            put(model, own_layers)
            info.missing_keys -= own_layers.keys()
        return finish(model, config, info)

    switches: list[tuple[Any, str, Any]] = [(kind, "_finalize_model_loading", staticmethod(finalised))]
    with suppress(ImportError):
        legacy: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        load = functools.partial(legacy.load_gguf_checkpoint, left_out=left_out)
        switches.append((legacy, "load_gguf_checkpoint", load))
    with suppress(ImportError):
        own: Any = importlib.import_module("transformers.quantizers.quantizer_gguf")
        read = own.load_gguf_state_dict

        def without(header: Any) -> dict[str, Any]:
            return {name: tensor for name, tensor in read(header).items() if name not in left_out}

        switches.append((own, "load_gguf_state_dict", without))
    return replaced(switches)


@contextmanager
def replaced(switches: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes other values, each as (owner, name, value), as far as their owners have them."""
    before = [(owner, name, inspect.getattr_static(owner, name)) for owner, name, _ in switches if hasattr(owner, name)]
    try:
        for owner, name, value in switches:
            if hasattr(owner, name):
                setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
