"""Opening models: one way in for published checkpoints and Saccade's own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...operator.variants import MechanismConfig
from ._shortened import shortened
from .checkpoints.hub import folder_of
from .checkpoints.keys import KeyPlan, Piece, plan
from .checkpoints.reading import StoredWeights, find_weights, materialised, read_json
from .checkpoints.settings import CONFIG, Settings, read_settings
from .families import FAMILIES, GRAPHS
from .model import MECHANISM, Family, LoadReport, Model, Request
from .own.checkpoint import load_own
from .pruned_heads import remove_saved

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load(
    source: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    mechanism: MechanismConfig | None = None,
    head: str | None = None,
    labels: int | Sequence[str] | None = None,
) -> Model:
    """Open a model with its weights, in evaluation mode.

    Every tensor of the files is used and every parameter is filled; otherwise the error lists what is missing, unused
    or of another shape. `model.report` lists the exceptions. Code that comes with a checkpoint is never
    run.

    Args:
        source: a folder with config.json and weights, as transformers or `saccade train` write it, or a name on the
            Hugging Face hub such as "org/name" (needs `huggingface_hub`). None is the embedded language model.
        dtype: of the weights; None is the one config.json names, or that of most stored bytes.
        device: None is the CPU.
        mechanism: what replaces softmax attention, a value of `saccade.variants`; None is the published attention.
            Dropout of weights is left out where a mechanism has no weights.
        head: what reads the hidden states, such as "masked-lm" or "sequence-classification"; None is the one the
            configuration names, "none" only the body. A classifying head that the files lack starts with random
            weights.
        labels: of a new classifier: how many, or their names; of a CTC head its tokens, the blank first. If the head in
            the files has another number of labels, the tensors of another size start with random weights; if its
            labels have other names, the tensors of labels do. The same names in another order change the order of
            its rows.

    Raises:
        FileNotFoundError: no such folder or name, or a file is missing from it.
        ValueError: damaged files, an unknown family or head, tensors that do not fit, a configuration that asks for
            code of its own.

    Example:
        >>> import saccade
        >>> lm = saccade.models.load()  # the embedded language model
        >>> type(lm).__name__, lm.longest
        ('LanguageModel', 256)
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(map(str, _DTYPES))}, got {dtype}")
    folder = None if source is None else folder_of(source)
    settings = None if folder is None else _settings(folder)
    if settings is not None and "model_type" not in settings and "architectures" in settings:
        _family(settings)  # raises: a published model has a type
    if folder is None or settings is None or "model_type" not in settings:
        if head not in (None, "causal-lm") or labels is not None:
            raise ValueError(
                f"head: a model of Saccade's own has 'causal-lm' alone, got head={head!r}, labels={labels!r}"
            )
        return load_own(folder, dtype=dtype, device=device, mechanism=mechanism)
    return _published(folder, settings, dtype, device, mechanism, head, labels)


def load_body(source: str | Path) -> Model:
    """What gives the hidden states of texts: a model without its head, and of T5 the encoder. Errors as of `load`."""
    folder = folder_of(source)
    settings = _settings(folder)
    encoder = "model_type" in settings and "encoder" in _family(settings).heads
    return load(folder, head="encoder" if encoder else "none")


def is_known(model_type: object) -> bool:
    """Whether a `model_type` of config.json is of a family here."""
    return isinstance(model_type, str) and any(model_type in family.types for family in FAMILIES)


def new_graph_model(
    kind: str, *, head: str | None = None, labels: int | Sequence[str] | None = None, **settings: Any
) -> Model:
    """A model of graphs with new weights, in training mode; there are no published ones.

    Args:
        kind: "saccade-gat" or "saccade-graphormer".
        head: "node-classification" or "graph-classification"; None is only the body.
        labels: how many, or their names.
        settings: as in the family's config.json. Both have `hidden_size` (in GAT of all heads together),
            `num_attention_heads`, `num_hidden_layers`, `hidden_act` (in GAT "elu" or "relu"), `hidden_dropout_prob` and
            `attention_probs_dropout_prob`. GAT: `num_features`; `num_output_heads` of the last layer, whose heads are
            averaged; `attention_type`, "gat" or "gatv2"; `self_loops`; `negative_slope`. Graphormer: `node_types` or
            `node_features`; `edge_types`, `edge_features` or neither; `edge_width`; `intermediate_size`; `max_degree`
            and `max_hops`, above which all values share one embedding or bias; `path_length`, how many first edges of
            a path count; `attention_hops`, how far a node sees.

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
    read = Settings({**settings, "model_type": kind}, Path("settings"))
    return _built(read, head, labels)


def new_model(folder: Path, *, head: str | None, labels: int | Sequence[str] | None = None, **settings: Any) -> Model:
    """A model of any family with new weights, in training mode: matrices normal, biases 0, norms 1.

    Args:
        folder: of its tokenizer's or processor's files, if it has any.
        head, labels: as of `load`.
        settings: as config.json has them, `model_type` among them.

    Raises:
        ValueError: an unknown head or value of a setting.
    """
    model = _built(Settings(settings, folder / CONFIG), head, labels)
    for name, parameter in model.named_parameters():
        _draw(parameter.data, float(model.settings.number("initializer_range", 0.02)), name)
    model.folder = folder
    return model


def without_weights(folder: Path, stored: Collection[str] = ()) -> Model:
    """The model that config.json and the tokenizer's files of a folder describe, on the meta device.

    Args:
        stored: names of the tensors that its files had: some models are built by what they carry.
    """
    settings = read_settings(folder)
    settings.stored = frozenset(stored)
    with torch.device("meta"):
        model = _built(settings, None, None)
        remove_saved(model, settings)
    model.folder = folder
    return model


def _built(settings: Settings, head: str | None, labels: int | Sequence[str] | None) -> Model:
    settings.anew = True
    family = _family(settings)
    request = _request(family, settings, None, head, labels)
    model = family.build(settings, request)
    model.settings, model.request, model.family = settings, request, family
    return model


def _settings(folder: Path) -> Settings:
    """config.json; ValueError where the folder holds an adapter, whose weights are changes of another model's."""
    adapter = folder / "adapter_config.json"
    if adapter.exists() and (any(folder.glob("adapter_model.*")) or not (folder / CONFIG).exists()):
        values = read_json(adapter)
        base = values.get("base_model_name_or_path") if isinstance(values, dict) else None
        raise ValueError(
            f"{folder}: holds an adapter of {shortened(repr(base))} (adapter_config.json), not a whole model; merge "
            "it with peft: AutoPeftModel.from_pretrained(folder).merge_and_unload().save_pretrained(new_folder)"
        )
    return read_settings(folder)


def _published(
    folder: Path,
    settings: Settings,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    mechanism: MechanismConfig | None,
    head: str | None,
    labels: int | Sequence[str] | None,
) -> Model:
    family = _family(settings)
    stored = find_weights(folder)
    settings.stored = frozenset(stored.tensors)
    request = _request(family, settings, mechanism, head, labels)
    with torch.device("meta"):
        model = family.build(settings, request)
        remove_saved(model, settings)
    model.settings, model.request, model.family, model.folder = settings, request, family, folder
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if MECHANISM not in name}
    axes = {} if request.rows is None else _label_axes(model)
    wanted = plan(
        family.keys(model),
        shapes,
        {name: tensor.shape for name, tensor in stored.tensors.items()},
        new_head=head in family.new_heads,
        relabelled=request.relabelled,
        drawn=axes if not request.rows else (),
        where=f"{folder} as {_opened_as(family, settings, request, head)}",
    )
    model = materialised(model, dtype or _named_dtype(settings) or stored.dtype(), device or "cpu")
    _fill(model, wanted, stored)
    if request.rows:
        _reorder(model, axes, request.rows)
    tied, left_out = (first for first, _ in wanted.tied), (f"{name}={x}" for name, x in settings.left_out.items())
    rounded = _rounded(wanted, stored, model)
    model.report = LoadReport(tuple(wanted.new), tuple(wanted.unused), tuple(tied), tuple(left_out), rounded)
    return model.eval()


def _opened_as(family: Family, settings: Settings, request: Request, head: str | None) -> str:
    """The published class that a folder is opened as, and why it is that one where nothing names it."""
    unnamed = head is None and not settings.get("architectures")
    name = family.architecture(settings.values["model_type"], request.head)
    return f"{name} (architectures: names none, so the body; give head= for another)" if unnamed else name


def _named_dtype(settings: Settings) -> torch.dtype | None:
    """The dtype in config.json, which transformers loads the weights in; formerly torch_dtype."""
    name = "dtype" if "dtype" in settings else "torch_dtype"
    return settings.choice(name, {str(x).removeprefix("torch."): x for x in _DTYPES}) if name in settings else None


def _label_axes(model: Model) -> dict[str, int]:
    """The tensors of a head that are of labels, and along which axis: what one label more makes larger."""
    settings = Settings(model.settings.values, model.settings.path, model.settings.stored)
    with torch.device("meta"):
        wider = model.family.build(settings, dataclasses.replace(model.request, labels=model.request.labels + 1))
    pairs = ((name, tensor.shape, wider.state_dict()[name].shape) for name, tensor in model.state_dict().items())
    found = {}
    for name, shape, other in pairs:
        if name.startswith("head.") and shape != other:
            found[name] = next(axis for axis in range(len(shape)) if shape[axis] != other[axis])
    return found


@torch.no_grad()
def _reorder(model: Model, axes: Mapping[str, int], rows: Sequence[int]) -> None:
    """Give each label its own row of the files, in each of the heads side by side that GAT has."""
    tensors = model.state_dict()
    for name, axis in axes.items():
        labels = tensors[name].unflatten(axis, (-1, len(rows)))
        labels.copy_(labels.index_select(axis + 1, torch.tensor(rows, device=labels.device)))


def _family(settings: Settings) -> Family:
    for field in ("auto_map", "custom_pipelines"):
        if field in settings:
            raise ValueError(
                f"{settings.path}: {field}: asks for code that comes with the checkpoint, which is never run"
            )
    if "quantization_config" in settings:
        raise ValueError(f"{settings.path}: quantization_config: quantised weights are not read; expected float ones")
    for field in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        asked = str(settings.get(field, ""))
        if "/" in asked:
            raise ValueError(f"{settings.path}: {field}: {shortened(repr(asked))} is code on the hub, never run")
    kind = settings.get("model_type")
    for family in FAMILIES:
        if isinstance(kind, str) and kind in family.types:
            settings.rename(family.aliases)
            return family
    known = ", ".join(sorted(kind for family in FAMILIES for kind in family.types))
    raise ValueError(f"{settings.path}: model_type: unknown family {shortened(repr(kind))}, expected one of {known}")


def _request(
    family: Family,
    settings: Settings,
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
                f"{settings.path}: architectures: {shortened(repr(named))} is no head of {family.name} here; give "
                f"head=, one of {known}"
            ) from None
    elif head != "none" and head not in family.heads:
        raise ValueError(f"head: {family.name} has {known}; got {head!r}")
    else:
        chosen = None if head == "none" else head
    if labels is not None and chosen not in family.new_heads:
        raise ValueError(f"labels: only of a classifier, which the head {chosen!r} is not")
    if isinstance(labels, str):
        raise ValueError(f"labels: expected how many, or a list of names, got {labels!r}")
    rows = None
    if labels is not None:
        names = [f"LABEL_{n}" for n in range(labels)] if isinstance(labels, int) else list(labels)
        if not names:
            raise ValueError("labels: expected at least one")
        rows = None if chosen in family.of_tokens else _rows(settings, names)
        settings.values.update(_named(names) if chosen not in family.of_tokens else _tokens(names))
        settings.values.pop("num_labels", None)
    named = settings.get("id2label")
    count = len(named) if isinstance(named, dict) and named else settings.count("num_labels", family.labels)
    return Request(chosen, count, mechanism, labels is not None, rows)


def _rows(settings: Settings, names: Sequence[str]) -> tuple[int, ...] | None:
    """As `Request.rows`. Labels that are only numbered, as where nobody has named them, may be any."""
    named = settings.get("id2label")
    before = [str(named.get(str(n))) for n in range(len(named))] if isinstance(named, dict) else []
    numbered = any(re.fullmatch(r"LABEL_\d+", name) for name in (*before, *names))
    if numbered or before == list(names) or len(before) != len(names):
        return None
    return tuple(before.index(name) for name in names) if {*before} == {*names} else ()


def _named(labels: Sequence[str]) -> dict[str, Any]:
    """The labels of a classifier as config.json has them."""
    return {
        "id2label": {str(n): name for n, name in enumerate(labels)},
        "label2id": {name: n for n, name in enumerate(labels)},
    }


def _tokens(labels: Sequence[str]) -> dict[str, Any]:
    """The tokens of a CTC head as config.json has them: their number, and which one is the blank."""
    return {"vocab_size": len(labels), "pad_token_id": 0}


def _rounded(wanted: KeyPlan, stored: StoredWeights, model: Model) -> tuple[str, ...]:
    """The published tensors that parameters or buffers of a coarser dtype are filled from."""
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    pairs = ((piece.published, stored.tensors[piece.published].dtype, dtypes[piece.ours]) for piece in wanted.pieces)
    return tuple(dict.fromkeys(name for name, fine, held in pairs if torch.promote_types(fine, held) != held))


@torch.no_grad()
def _fill(model: Model, wanted: KeyPlan, stored: StoredWeights) -> None:
    targets = model.state_dict(keep_vars=True)
    places: dict[str, list[Piece]] = {}
    for piece in wanted.pieces:
        places.setdefault(piece.published, []).append(piece)
    for name, start, tensor in stored.read_parts(list(places)):
        for piece in places[name]:
            held = piece.of(targets[piece.ours])
            if held.is_floating_point() and not tensor.is_floating_point():
                raise ValueError(f"{model.folder}: {name}: expected floats, got {tensor.dtype}")
            (held.narrow(0, start, len(tensor)) if tensor.ndim else held).copy_(tensor)
    tied = dict(wanted.tied)
    for name, tensor in stored.read(list(tied)):
        for piece in places[tied[name]]:
            held = piece.of(targets[piece.ours])
            if not torch.equal(held, tensor.to(held)):
                raise ValueError(
                    f"{model.folder}: {name} and {tied[name]} are tied by the configuration (tie_word_embeddings) or "
                    "the family, but differ in the files"
                )
    for name in wanted.new:
        _draw(targets[name], float(model.settings.number("initializer_range", 0.02)), name)


def _draw(tensor: torch.Tensor, std: float, name: str) -> None:
    """A new head: matrices normal, biases 0, as the families begin theirs."""
    if tensor.ndim > 1:
        nn.init.normal_(tensor, std=std)
    else:
        nn.init.constant_(tensor, 1.0 if name.endswith("norm.weight") else 0.0)
