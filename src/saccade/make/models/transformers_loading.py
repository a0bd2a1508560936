"""Opens a folder or a GGUF file as a model of transformers' own class: the class, its head and labels, the report."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...operator.nn._rounded import Rounding
from ...support._restored import seeded
from ._shortened import shortened
from .checkpoints.filling import label_axes, label_names, label_rows, reorder
from .checkpoints.gguf import GgufHeader, read_header
from .checkpoints.quantised import QuantisedWeights
from .checkpoints.reading import Stored, find_weights
from .checkpoints.settings import CONFIG, CheckpointSettings
from .checkpoints.transformers_reading import (
    UnreadableCheckpoint,
    body_of,
    class_of,
    configuration_of,
    contained,
    read_configuration,
    read_weights,
    require_transformers,
)
from .held_weights import STORED, check_stored, dtype_beside, readable
from .model import Family, LoadReport, Request
from .transformers_model import TransformersModel

_AUTO = "AutoModelFor"
_SPELLED = {"Seq2SeqLM": "conditional-generation", "SpeechSeq2Seq": "conditional-generation"}
_NEW_HEADS = ("classification", "question-answering", "multiple-choice", "ctc", "regression")


def open_with_transformers(
    folder: Path,
    *,
    gguf: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    head: str | None = None,
    labels: int | Sequence[str] | None = None,
    weights: str | None = None,
) -> TransformersModel:
    """A folder, or a GGUF file in it, as a model of transformers' class. Arguments and errors as of `load`."""
    where = folder if gguf is None else folder / gguf
    require_transformers(str(where))
    header = None if gguf is None else read_header(folder / gguf)
    try:
        with contained():
            return _opened(folder, header, gguf, dtype, device, head, labels, weights)
    except UnreadableCheckpoint as error:
        raise ValueError(f"{where}: {error}") from None


def _opened(
    folder: Path,
    header: GgufHeader | None,
    gguf: str | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    head: str | None,
    labels: int | Sequence[str] | None,
    weights: str | None,
) -> TransformersModel:
    config = read_configuration(folder, gguf)
    files = None if header is not None else readable(find_weights(folder), getattr(config, "quantization_config", None))
    stored = {} if files is None else files.tensors
    packed = files if isinstance(files, QuantisedWeights) else None
    if packed is not None:
        del config.quantization_config
    if gguf is None and not config.architectures and head is None:
        head = "none"
    heads = heads_of(config)
    kind = _chosen_class(config, heads, head)
    config = configuration_of(kind, config)
    settings = CheckpointSettings(_values(config), folder / (gguf or CONFIG))
    named = _head_name(kind, config, heads)
    new = named is not None and named.endswith(_NEW_HEADS)
    if labels is not None and not new:
        raise ValueError(f"labels: need a head that classifies, got the head {named!r}")
    rows = None if labels is None else _relabel(config, settings, labels, named)
    axes = {} if rows is None and labels is None else _label_axes(kind, config)
    prefix = f"{kind.base_model_prefix}."

    def is_new(name: str) -> bool:
        return (head is not None and not name.startswith(prefix)) or name in axes

    if header is not None and header.unread:
        warnings.warn(
            f"{folder / (gguf or '')}: {', '.join(header.unread)}: transformers does not read it, so rotary "
            "frequencies are not scaled, and outputs differ from those of llama.cpp",
            stacklevel=2,
        )
    read = read_weights(
        *(kind, config, folder),
        dtype=dtype,
        gguf=gguf,
        is_new=is_new if new else None,
        packed=packed,
        stored=weights == STORED,
    )
    module = read.module.to(device or "cpu")
    if dtype_beside(weights, module.dtype) != module.dtype:
        module = module.float()
    drawn = [name for name in axes if rows == () and name not in read.initialised]
    with torch.no_grad():
        state = module.state_dict()
        for name in drawn:
            nn.init.normal_(state[name], std=0.02) if state[name].dim() > 1 else nn.init.zeros_(state[name])
        if rows:
            reorder(state, axes, rows)
    used = {name: tensor for name, tensor in stored.items() if name not in read.unused and name not in read.held}
    rounded = _rounded(module, used)
    quantised = header.quantised if header is not None else files.dequantised(used) if files is not None else ()
    dequantised = tuple(name for name in quantised if name.partition(" ")[0] not in read.held)
    if weights == STORED:
        check_stored(module, folder if gguf is None else folder / gguf, dequantised)
    elif weights is not None:
        Rounding(module, weights, keep=(*axes, *read.initialised)).round_all()
    if weights is not None and header is None and packed is None:
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()  # the others' memory is the mapped file, which is freed so
    family = Family(kind.__name__, {}, {name: other.__name__ for name, other in heads.items()})
    request = Request(named, getattr(config, "num_labels", 2), relabelled=labels is not None, rows=rows)
    model = TransformersModel(module, settings, request, family)
    model.folder, model.file = (folder, None) if gguf is None else (None, folder / gguf)
    model.report = LoadReport(
        initialised=(*read.initialised, *drawn),
        unused=(*read.unused, *(() if header is None else header.unread)),
        tied=tuple(name for name in getattr(module, "all_tied_weights_keys", ()) if name in stored),
        left_out=() if header is None else header.left_out,
        rounded=rounded,
        dequantised=dequantised,
    )
    return model.eval()


def heads_of(config: Any) -> dict[str, Any]:
    """The classes with a head that transformers has for a configuration, by the name of the head."""
    import transformers

    found: dict[str, Any] = {}
    body = transformers.AutoModel._model_mapping.get(type(config), None)
    for auto in sorted(name for name in dir(transformers) if name.startswith(_AUTO)):
        mapping = getattr(transformers, auto)._model_mapping
        if mapping is not None and type(config) in mapping:
            kind = mapping[type(config)]
            named = auto.removeprefix(_AUTO)
            found.setdefault(_SPELLED.get(named) or _dashed(named), kind[0] if isinstance(kind, tuple) else kind)
    return {name: kind for name, kind in found.items() if kind is not body}


def _dashed(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()


def _chosen_class(config: Any, heads: dict[str, Any], head: str | None) -> Any:
    known = ", ".join(map(repr, (*heads, "none")))
    if head is None:
        kind, named = class_of(config), config.architectures or ()
        if named and kind.__name__ not in named:
            raise ValueError(
                f"architectures: transformers' {config.model_type} has no class {shortened(repr(named))}; give head=, "
                f"one of {known}"
            )
        return kind
    if head != "none" and head not in heads:
        raise ValueError(f"head: transformers' {config.model_type} has {known}; got {head!r}")
    return body_of(config) if head == "none" else heads[head]


def _head_name(kind: Any, config: Any, heads: dict[str, Any]) -> str | None:
    """The name of a class's head; None for the body."""
    for name, other in heads.items():
        if other is kind:
            return name
    with suppress(UnreadableCheckpoint):
        if body_of(config) is kind:
            return None
    return _dashed(kind.__name__.rpartition("For")[2])


def _relabel(
    config: Any, settings: CheckpointSettings, labels: int | Sequence[str], head: str | None
) -> tuple[int, ...] | None:
    """Write the labels into the configuration. Returns `Request.rows`."""
    names = label_names(labels)
    if head == "ctc":
        config.vocab_size, config.pad_token_id = len(names), 0
        return None
    rows = label_rows(settings, names)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: n for n, name in enumerate(names)}
    settings.values.update(_values(config))
    return rows


def _values(config: Any) -> dict[str, Any]:
    """A configuration as the contents of config.json, where numbers as keys are texts."""
    values: dict[str, Any] = config.to_dict()
    values["id2label"] = {str(n): name for n, name in (config.id2label or {}).items()}
    return values


def _label_axes(kind: Any, config: Any) -> dict[str, int]:
    wider = copy.deepcopy(config)
    wider.num_labels = config.num_labels + 1
    with torch.device("meta"), seeded(None):
        return label_axes(kind(copy.deepcopy(config)).state_dict(), kind(wider).state_dict())


def _rounded(module: Any, stored: Mapping[str, Stored]) -> tuple[str, ...]:
    """Stored tensors with a finer dtype than the module's; some have other names there."""
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    pairs = ((name, tensor.dtype, dtypes.get(name, module.dtype)) for name, tensor in stored.items())
    floats = (pair for pair in pairs if pair[1].is_floating_point)
    return tuple(name for name, fine, held in floats if torch.promote_types(fine, held) != held)
