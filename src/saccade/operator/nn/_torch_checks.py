"""Checks for what a copy of weights between PyTorch's modules and Saccade's would lose; an error names the submodule by
its path.

A converted module must compute the same. So every part has to be exactly of the class that is converted (a subclass
may compute something else), and may have no hooks or other state that the copy would drop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

Kinds = tuple[type[nn.Module], ...]

ATTENTION: Kinds = (nn.MultiheadAttention,)
LINEAR: Kinds = (nn.Linear, NonDynamicallyQuantizableLinear)  # the second is the first by another name
NORM: Kinds = (nn.LayerNorm,)
DROPOUT: Kinds = (nn.Dropout,)

_LAYER = {
    "self_attn": ATTENTION,
    **dict.fromkeys(("norm1", "norm2"), NORM),
    **dict.fromkeys(("linear1", "linear2"), LINEAR),
    **dict.fromkeys(("dropout", "dropout1", "dropout2"), DROPOUT),
}
PARTS: dict[type[nn.Module], dict[str, Kinds]] = {
    nn.MultiheadAttention: {"out_proj": LINEAR},
    nn.TransformerEncoderLayer: _LAYER,
    nn.TransformerDecoderLayer: {**_LAYER, "multihead_attn": ATTENTION, "norm3": NORM, "dropout3": DROPOUT},
    nn.Transformer: {"encoder": (nn.TransformerEncoder,), "decoder": (nn.TransformerDecoder,)},
}
LAYERS: dict[type[nn.Module], Kinds] = {
    nn.TransformerEncoder: (nn.TransformerEncoderLayer,),
    nn.TransformerDecoder: (nn.TransformerDecoderLayer,),
}
_IN_PROJECTIONS = "in_proj_weight q_proj_weight k_proj_weight v_proj_weight in_proj_bias bias_k bias_v"
OWN: dict[type[nn.Module], tuple[str, ...]] = {
    nn.MultiheadAttention: tuple(_IN_PROJECTIONS.split()),
    **dict.fromkeys((*LINEAR, *NORM), ("weight", "bias")),
}

HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
    "_post_accumulate_grad_hooks": "a hook on its gradient",
}


def join(path: str, name: str) -> str:
    """The path of a part of a part; that of the module itself is empty."""
    return f"{path}.{name}" if path and name else path or name


def check_theirs(module: nn.Module) -> None:
    """Raise an error unless every submodule is of the class and the settings with which PyTorch builds the module."""
    _check_parts("", module, (type(module),))
    check_plain(module)
    orders = {path: part.batch_first for path, part in module.named_modules() if type(part) is nn.MultiheadAttention}
    _check_equal("batch_first", orders.items())


def check_kind(path: str, part: object, kinds: Kinds) -> None:
    """TypeError unless `part` is exactly of one of the classes."""
    if type(part) not in kinds:
        got = "None" if part is None else type(part).__name__
        raise TypeError(f"module: {path or 'it'} is {got}, expected {kinds[0].__name__}")


def check_layers(path: str, layers: nn.ModuleList) -> None:
    """ValueError for a stack without layers."""
    if not len(layers):
        raise ValueError(f"module: {path} is empty, expected at least one layer")


def check_names(path: str, part: nn.Module, known: Iterable[str]) -> None:
    """ValueError for a part, parameter or buffer that has no counterpart, whether or not it takes part."""
    own = (*part.named_children(), *part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
    for name, _ in own:
        if name not in known:
            raise ValueError(f"module: {join(path, name)} has no counterpart")


def _check_parts(path: str, part: Any, kinds: Kinds) -> None:
    check_kind(path, part, kinds)
    if type(part) is nn.ModuleList:
        return check_layers(path, part)
    known = {"activation", *OWN.get(type(part), ())}
    for name, child, wanted in _parts(part):
        known.add(name.partition(".")[0])
        _check_parts(join(path, name), child, wanted)
    return check_names(path, part, known)


def _parts(part: Any) -> Iterator[tuple[str, Any, Kinds]]:
    """Submodules of a module: name, module, and the classes that are expected."""
    for name, kinds in PARTS.get(type(part), {}).items():
        yield name, getattr(part, name, None), kinds
    if type(part) in LAYERS:
        layers = getattr(part, "layers", None)
        yield "layers", layers, (nn.ModuleList,)
        for number, layer in enumerate(layers or ()):
            yield f"layers.{number}", layer, LAYERS[type(part)]
        if getattr(part, "norm", None) is not None:
            yield "norm", part.norm, NORM


def check_plain(module: nn.Module) -> None:
    """ValueError for properties that a copy of the weights loses: hooks, an instance's own forward, sharing, mixed
    dtypes."""
    seen: dict[int, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        _check_unhooked(path, part)
        if "forward" in vars(part):
            raise ValueError(f"module: {path or 'it'} has its own forward, expected the forward of its class")
        if any(True for _ in part.parameters()):
            _check_unshared(seen, path, part)
    parameters = list(module.named_parameters(remove_duplicate=False))
    for path, parameter in parameters:
        _check_unhooked(path, parameter)
        _check_unshared(seen, path, parameter)
    _check_equal("dtype", [(path, parameter.dtype) for path, parameter in parameters])
    _check_equal("device", [(path, parameter.device) for path, parameter in parameters])


def _check_unhooked(path: str, part: object) -> None:
    for attribute, what in HOOKS.items():
        if getattr(part, attribute, None):
            raise ValueError(f"module: {path or 'it'} has {what}, which would be lost; remove it first")


def _check_unshared(names: dict[int, str], path: str, part: object) -> None:
    first = names.setdefault(id(part), path)
    if first != path:
        raise ValueError(f"module: {path} and {first} are one object, and copies would not be tied; give two")


def _check_equal(what: str, values: Iterable[tuple[str, object]]) -> None:
    (first, expected), *others = values
    for path, value in others:
        if value != expected:
            raise ValueError(
                f"module: {path} has {what} {value}, and {first} has {expected}; expected one for the whole module"
            )


def check_made(path: str, given: Any, config: object) -> None:
    """Raise an error unless all parts of a block or an attention module of Saccade are as `config` describes."""
    with torch.device("meta"):
        wanted = dict(type(given)(config).named_modules())
    parts = dict(given.named_modules())
    for name, expected in wanted.items():
        here, part = join(path, name), parts.get(name)
        check_kind(here, part, (type(expected),))
        own = (*expected.named_children(), *expected.named_parameters(recurse=False))
        check_names(here, parts[name], [known for known, _ in own])
        _check_described(here, part, expected)


def _check_described(path: str, part: Any, expected: Any) -> None:
    if hasattr(expected, "config") and part.config != expected.config:
        raise ValueError(f"module: {path}: {'; '.join(differences(part.config, expected.config))}")
    if part.extra_repr() != expected.extra_repr():
        name = type(part).__name__
        raise ValueError(
            f"module: {path} is {name}({part.extra_repr()}), expected {name}({expected.extra_repr()}), as configured"
        )


def differences(given: Any, expected: Any, prefix: str = "") -> Iterator[str]:
    """The fields of a configuration that differ from the expected one, each as text."""
    for field in fields(expected):
        one, other = getattr(given, field.name), getattr(expected, field.name)
        if one == other:
            continue
        if is_dataclass(one) and type(one) is type(other):
            yield from differences(one, other, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name} is {one!r}, expected {other!r}"
