"""Loads models: `load`, for published checkpoints and Saccade's own models."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from ...operator.nn._rounded import Rounding
from ...operator.variants import MechanismConfig
from ...support._extras import installing
from ...support._restored import on_meta
from ._shortened import shortened
from .checkpoints.filling import coarser, draw, fill, label_axes, label_names, label_rows, reorder
from .checkpoints.gguf import SUFFIX
from .checkpoints.held_layers import hold_pieces
from .checkpoints.hub import folder_of
from .checkpoints.keys import plan
from .checkpoints.quantised import QuantisedWeights
from .checkpoints.reading import find_weights, materialised, read_json
from .checkpoints.settings import CONFIG, CheckpointSettings, read_settings
from .decoder_lm.checkpoint import load_own
from .families import FAMILIES, GRAPHS
from .held_weights import STORED, check_method, check_stored, check_weights, dtype_beside, readable
from .model import MECHANISM, Family, LoadReport, Model, Request
from .pruned_heads import remove_saved
from .text.decoder import TextDecoder
from .transformers_loading import open_with_transformers

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load(
    source: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    mechanism: MechanismConfig | None = None,
    head: str | None = None,
    labels: int | Sequence[str] | None = None,
    weights: str | None = None,
) -> Model:
    """Open a model with its weights, in evaluation mode.

    A type without a family here opens through transformers' class, as a `TransformersModel` with the same interface;
    `model.explain()` says which of the two it is. Both that and a GGUF file need transformers. Weights that a file
    holds in few bits (GGUF, GPTQ, AWQ, torchao) are dequantised, or held as they are.

    Every stored tensor is used and every parameter is filled; otherwise an error lists the missing, the unused and
    those of another shape. `model.report` lists the exceptions. Code in a checkpoint is never run.

    Args:
        source: a folder with config.json and weights, written by transformers or `saccade train`, a GGUF file, or a
            name on the Hugging Face hub such as "org/name" (needs `huggingface_hub`). None is the embedded language
            model.
        dtype: of the weights; None uses the one in config.json, or that of most stored bytes. Quantised weights of a
            GGUF file are float32 then.
        device: None is the CPU.
        mechanism: replaces softmax attention, a value of `saccade.variants`; None keeps the published attention, and
            is the only choice for transformers' classes.
            Dropout of attention weights is ignored by mechanisms without weights.
        head: the output head, such as "masked-lm" or "sequence-classification"; None uses the one in config.json,
            "none" loads only the body. A classification head that is missing in the files is initialised randomly.
        labels: of a classifier: their number or names; of a CTC head its tokens, the blank first. If the stored head
            has another number of labels, its tensors of another shape are initialised randomly; with other label names,
            all tensors with a row for each label are. The same names in another order reorder its rows.
        weights: what linear layers of 32,768 weights and more hold: "bfloat16", or whole numbers with scales for blocks
            of a row, "int8" by 128 or "int4" by 32, whose output layers have 8 bits. Everything else is float32, or
            beside whole numbers bfloat16: embeddings, output layers tied to them, norms, new heads. Such weights can
            be read, but not trained or saved; adapters beside them train. "stored" holds the numbers of a quantised
            checkpoint, and of the rest floats; `model.report` names what is dequantised. None holds all weights in
            `dtype`. `model.explain()` gives the sizes.

    Raises:
        FileNotFoundError: no such folder or name, or a file is missing from it.
        ValueError: damaged files, an unknown type or head, tensors that do not match, a configuration that needs code
            from the checkpoint, quantisation by another method; `weights` that are not finite, on another device than
            the CPU, or beside another dtype.

    Example:
        >>> import saccade
        >>> lm = saccade.models.load()  # the embedded language model
        >>> type(lm).__name__, lm.longest
        ('LanguageModel', 256)
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(map(str, _DTYPES))}, got {dtype}")
    check_weights(weights, dtype, device)
    dtype = torch.float32 if weights == "bfloat16" else dtype
    file = None if source is None else Path(source).expanduser()
    if file is not None and file.suffix == SUFFIX and file.is_file():
        _check_mechanism(mechanism)
        return open_with_transformers(
            file.parent, gguf=file.name, dtype=dtype, device=device, head=head, labels=labels, weights=weights
        )
    folder = None if source is None else folder_of(source)
    settings = None if folder is None else _settings(folder)
    if settings is not None and "model_type" not in settings and "architectures" in settings:
        _family(settings)  # raises without a known model type
    if folder is None or settings is None or "model_type" not in settings:
        if head not in (None, "causal-lm") or labels is not None:
            raise ValueError(
                f"head: a model of Saccade's own has only 'causal-lm', got head={head!r}, labels={labels!r}"
            )
        own = load_own(folder, dtype=dtype, device=device, mechanism=mechanism)
        if weights == STORED:
            check_stored(own, folder or "the embedded model")
        elif weights is not None:
            Rounding(own, weights).round_all()
        return own
    if _is_of_transformers(settings):
        _check_safe(settings)
        _check_mechanism(mechanism)
        return open_with_transformers(folder, dtype=dtype, device=device, head=head, labels=labels, weights=weights)
    return _published(folder, settings, dtype, device, mechanism, head, labels, weights)


def _check_mechanism(mechanism: MechanismConfig | None) -> None:
    if mechanism is not None:
        raise ValueError(
            "mechanism: replaces attention in Saccade's own families only; this model is of transformers' class, which "
            f"keeps its attention; expected None, got {mechanism.name!r}"
        )


def load_body(source: str | Path, weights: str | None = None) -> Model:
    """Load a model without its head; of T5 only the encoder. Argument and errors as of `load`."""
    if Path(source).suffix == SUFFIX:
        return load(source, head="none", weights=weights)
    folder = folder_of(source)
    settings = _settings(folder)
    encoder = is_known(settings.get("model_type")) and "encoder" in _family(settings).heads
    return load(folder, head="encoder" if encoder else "none", weights=weights)


def is_known(model_type: object) -> bool:
    """Whether a `model_type` of config.json belongs to a supported family."""
    return isinstance(model_type, str) and any(model_type in family.types for family in FAMILIES)


def new_graph_model(
    kind: str, *, head: str | None = None, labels: int | Sequence[str] | None = None, **settings: Any
) -> Model:
    """A graph model with random weights, in training mode; none are published.

    Args:
        kind: "saccade-gat" or "saccade-graphormer".
        head: "node-classification" or "graph-classification"; None builds only the body.
        labels: their number or names.
        settings: as in the family's config.json. Both have `hidden_size` (in GAT of all heads together),
            `num_attention_heads`, `num_hidden_layers`, `hidden_act` (in GAT "elu" or "relu"), `hidden_dropout_prob` and
            `attention_probs_dropout_prob`. GAT: `num_features`; `num_output_heads` of the last layer, whose heads are
            averaged; `attention_type`, "gat" or "gatv2"; `self_loops`; `negative_slope`. Graphormer: `node_types` or
            `node_features`; `edge_types`, `edge_features` or neither; `edge_width`; `intermediate_size`; `max_degree`
            and `max_hops`, above which all values share one embedding or bias; `path_length`, the number of edges of a
            path that are used; `attention_hops`, the maximum distance of attention.

    Raises:
        ValueError: an unknown kind, head or value of a setting.

    Example:
        >>> import torch, saccade
        >>> model = saccade.models.new_graph_model("saccade-gat", head="node-classification", labels=2, num_features=3)
        >>> edges = torch.tensor([[0, 1, 2], [1, 2, 0]])  # 0 to 1, 1 to 2, 2 to 0
        >>> model(torch.rand(3, 3), edges).logits.shape
        torch.Size([3, 2])
    """
    known = {name: family for family in GRAPHS for name in family.types}
    if kind not in known:
        raise ValueError(f"kind: expected one of {', '.join(map(repr, known))}, got {kind!r}")
    read = CheckpointSettings({**settings, "model_type": kind}, Path("settings"))
    return _built(read, head, labels)


def new_model(folder: Path, *, head: str | None, labels: int | Sequence[str] | None = None, **settings: Any) -> Model:
    """A model of any family with random weights, in training mode: matrices normal, biases 0, norms 1.

    Args:
        folder: with the files of its tokenizer or processor, if it has any.
        head, labels: as of `load`.
        settings: as in config.json, including `model_type`.

    Raises:
        ValueError: an unknown head or value of a setting.
    """
    model = _built(CheckpointSettings(settings, folder / CONFIG), head, labels)
    for name, parameter in model.named_parameters():
        draw(parameter.data, float(model.settings.number("initializer_range", 0.02)), name)
    model.folder = folder
    return model


def without_weights(folder: Path, stored: Collection[str] = ()) -> Model:
    """The model described by config.json and the tokenizer files of a folder, on the meta device.

    Args:
        stored: names of the stored tensors, which decide the structure of some models.
    """
    settings = read_settings(folder)
    settings.stored = frozenset(stored)
    with on_meta():
        model = _built(settings, None, None)
        remove_saved(model, settings)
    model.folder = folder
    return model


def _built(settings: CheckpointSettings, head: str | None, labels: int | Sequence[str] | None) -> Model:
    settings.anew = True
    family = _family(settings)
    request = _request(family, settings, None, head, labels)
    model = family.build(settings, request)
    model.settings, model.request, model.family = settings, request, family
    return model


def _settings(folder: Path) -> CheckpointSettings:
    """Read config.json; ValueError if the folder contains an adapter, which has no whole weights."""
    adapter = folder / "adapter_config.json"
    if adapter.exists() and (any(folder.glob("adapter_model.*")) or not (folder / CONFIG).exists()):
        values = read_json(adapter)
        base = values.get("base_model_name_or_path") if isinstance(values, dict) else None
        raise ValueError(
            f"{folder}: contains an adapter of {shortened(repr(base))} (adapter_config.json), not a whole model; merge "
            "it with peft: AutoPeftModel.from_pretrained(folder).merge_and_unload().save_pretrained(new_folder)"
        )
    return read_settings(folder)


def _published(
    folder: Path,
    settings: CheckpointSettings,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    mechanism: MechanismConfig | None,
    head: str | None,
    labels: int | Sequence[str] | None,
    weights: str | None,
) -> Model:
    family = _family(settings)
    stored = readable(find_weights(folder), settings.get("quantization_config"))
    settings.stored = frozenset(stored.tensors)
    request = _request(family, settings, mechanism, head, labels)
    with on_meta():
        model = family.build(settings, request)
        remove_saved(model, settings)
    model.settings, model.request, model.family, model.folder = settings, request, family, folder
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if MECHANISM not in name}
    axes = {} if request.rows is None else _label_axes(model)
    keys = family.keys(model)
    if isinstance(stored, QuantisedWeights) and any(key.transposed for key in keys.keys):
        raise ValueError(f"{folder}: holds {stored.method.form} of {family.name}, whose transposed layers are not read")
    wanted = plan(
        dataclasses.replace(keys, unused=(*keys.unused, *stored.zero_biases())),
        shapes,
        {name: tensor.shape for name, tensor in stored.tensors.items()},
        new_head=head in family.new_heads,
        relabelled=request.relabelled,
        drawn=axes if not request.rows else (),
        where=f"{folder} as {_opened_as(family, settings, request, head)}",
    )
    dtype = dtype or dtype_beside(weights, _named_dtype(settings) or stored.dtype())
    model = materialised(model, dtype, device or "cpu")
    rounding = None if weights is None else Rounding(model, weights, keep=(*axes, *wanted.new))
    if rounding is not None and weights == STORED:
        wanted = hold_pieces(rounding, wanted, stored)
        check_stored(model, folder, stored.dequantised(stored.tensors))
        rounding = None
    rounded = coarser(wanted, stored, model)
    fill(model, wanted, stored, rounding, std=float(settings.number("initializer_range", 0.02)))
    if weights not in (None, STORED) and isinstance(model, TextDecoder):
        model.round_output(weights)
    if request.rows:
        reorder(model.state_dict(), axes, request.rows)
    tied, left_out = (first for first, _ in wanted.tied), (f"{name}={x}" for name, x in settings.left_out.items())
    model.report = LoadReport(
        *(tuple(wanted.new), tuple(wanted.unused), tuple(tied), tuple(left_out), rounded),
        dequantised=stored.dequantised({piece.published for piece in wanted.pieces}),
    )
    return model.eval()


def _opened_as(family: Family, settings: CheckpointSettings, request: Request, head: str | None) -> str:
    """The published class to load, with a note if config.json names none."""
    unnamed = head is None and not settings.get("architectures")
    name = family.architecture(settings.values["model_type"], request.head)
    return f"{name} (architectures: none in config.json, so the body; give head= for another)" if unnamed else name


def _named_dtype(settings: CheckpointSettings) -> torch.dtype | None:
    """The dtype in config.json (`dtype`, or the older `torch_dtype`), which transformers loads weights in."""
    name = "dtype" if "dtype" in settings else "torch_dtype"
    return settings.choice(name, {str(x).removeprefix("torch."): x for x in _DTYPES}) if name in settings else None


def _label_axes(model: Model) -> dict[str, int]:
    """Tensors of a head with an axis of labels, and the index of that axis."""
    settings = CheckpointSettings(model.settings.values, model.settings.path, model.settings.stored)
    with on_meta():
        wider = model.family.build(settings, dataclasses.replace(model.request, labels=model.request.labels + 1))
    heads = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("head.")}
    return label_axes(heads, wider.state_dict())


def _check_safe(settings: CheckpointSettings) -> None:
    """ValueError for a checkpoint that needs code of its own or of the hub, or is quantised so that it is not read."""
    for field in ("auto_map", "custom_pipelines"):
        if field in settings:
            raise ValueError(f"{settings.path}: {field}: requires code of the checkpoint, and Saccade never runs it")
    if "quantization_config" in settings:
        check_method(settings.get("quantization_config"), settings.path)
    for field in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        asked = str(settings.get(field, ""))
        if "/" in asked:
            raise ValueError(f"{settings.path}: {field}: {shortened(repr(asked))} is code on the hub, never run")


def _family(settings: CheckpointSettings) -> Family:
    _check_safe(settings)
    kind = settings.get("model_type")
    for family in FAMILIES:
        if isinstance(kind, str) and kind in family.types:
            settings.rename(family.aliases)
            return family
    known = ", ".join(sorted(kind for family in FAMILIES for kind in family.types))
    more = "those of transformers" if _has_transformers() else f"with transformers ({installing('hf')}) its types"
    raise ValueError(
        f"{settings.path}: model_type: unknown family {shortened(repr(kind))}, expected one of {known}, or {more}"
    )


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def _is_of_transformers(settings: CheckpointSettings) -> bool:
    """Whether only transformers has a class for the model's type."""
    kind = settings.get("model_type")
    if not isinstance(kind, str) or is_known(kind) or not _has_transformers():
        return False
    from transformers import CONFIG_MAPPING

    return kind in CONFIG_MAPPING


def _request(
    family: Family,
    settings: CheckpointSettings,
    mechanism: MechanismConfig | None,
    head: str | None,
    labels: int | Sequence[str] | None,
) -> Request:
    known = ", ".join(map(repr, (*family.heads, "none")))
    if head is None:
        asked = settings.get("architectures", [])
        names = [asked] if isinstance(asked, str) else asked
        if not isinstance(names, list):
            raise settings.error("architectures", "a list of class names")
        named = names[0] if names else None
        try:
            chosen = None if named is None else family.head_of(str(named))
        except KeyError:
            raise ValueError(
                f"{settings.path}: architectures: {shortened(repr(named))} is not a supported head of {family.name}; "
                f"give head=, one of {known}"
            ) from None
    elif head != "none" and head not in family.heads:
        raise ValueError(f"head: {family.name} has {known}; got {head!r}")
    else:
        chosen = None if head == "none" else head
    if labels is not None and chosen not in family.new_heads:
        raise ValueError(f"labels: need a head that classifies, got the head {chosen!r}")
    rows = None
    if labels is not None:
        names = label_names(labels)
        rows = None if chosen in family.of_tokens else label_rows(settings, names)
        settings.values.update(_named(names) if chosen not in family.of_tokens else _tokens(names))
        settings.values.pop("num_labels", None)
    named = settings.get("id2label")
    count = len(named) if isinstance(named, dict) and named else settings.count("num_labels", family.labels)
    return Request(chosen, count, mechanism, labels is not None, rows)


def _named(labels: Sequence[str]) -> dict[str, Any]:
    """Labels of a classifier in the format of config.json."""
    return {
        "id2label": {str(n): name for n, name in enumerate(labels)},
        "label2id": {name: n for n, name in enumerate(labels)},
    }


def _tokens(labels: Sequence[str]) -> dict[str, Any]:
    """Tokens of a CTC head in the format of config.json: their number, and the id of the blank."""
    return {"vocab_size": len(labels), "pad_token_id": 0}
