"""Attention modules of Hugging Face transformers that work with fewer heads, recognised by the names of their parts.

Since version 5 their forward passes only use the width of a head, so smaller projections are enough; stored counts are
updated. Every parameter of a module must be known here, otherwise an error is raised: an unknown one may be per head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ...operator.nn._cuts import Change, Cut, WeightSlice, head_rows, linear_cut
from ...operator.nn._fewer_heads import joined, kept_groups
from ...operator.nn.attention import HeadsLeft

_QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_INNER = ("all_head_size", "split_size", "inner_dim")  # query heads times head width


class _Form(NamedTuple):
    """Names of the query, key, value and output projections; names with .. belong to the parent module."""

    projections: tuple[str, str, str]
    output: str
    width: str  # attribute with the width of a head


_FORMS = (
    _Form(("q_proj", "k_proj", "v_proj"), "o_proj", "head_dim"),  # Llama and later models, ViT
    _Form(("q_proj", "k_proj", "v_proj"), "out_proj", "head_dim"),  # BART, Marian, wav2vec 2.0
    _Form(("query", "key", "value"), "..output.dense", "attention_head_size"),  # BERT, RoBERTa, ELECTRA, ESM
    _Form(("q_lin", "k_lin", "v_lin"), "out_lin", "attention_head_size"),  # DistilBERT
)


@dataclass(frozen=True, eq=False)
class TransformersAttention:
    """An attention module of transformers and its parts.

    Attributes:
        module: the attention module.
        projections: of query, key and value; in GPT-2 a single one.
        output: the projection of the concatenated heads.
        heads, kv_heads: query and key-value heads.
        width: of a head.
    """

    module: Any
    projections: tuple[Any, ...]
    output: Any
    heads: int
    kv_heads: int
    width: int

    def cut(self, kept: Sequence[int]) -> Cut:
        """The change that keeps only these heads. ValueError as of `kept_groups` and `linear_cut`."""
        groups = kept_groups(kept, self.heads, self.kv_heads)
        rows, columns = head_rows(groups, self.width), head_rows(kept, self.width)
        if _is_conv(self.output):
            cuts = [*self._conv_projections(columns), _conv_cut(self.output, inputs=columns)]
        else:
            wanted = zip(self.projections, (columns, rows, rows), strict=True)
            cuts = [
                *(linear_cut(projection, rows=of) for projection, of in wanted),
                linear_cut(self.output, columns=columns),
            ]
        sinks = [WeightSlice(self.module, "sinks", 0, tuple(kept))] if "sinks" in self.module._parameters else []
        return joined([*cuts, Cut(sinks, self._counts(kept, groups))])

    def _conv_projections(self, columns: list[int]) -> Iterator[Cut]:
        """Cuts for GPT-2: query, key and value side by side; in cross-attention a separate query."""
        inner = self.heads * self.width
        *query, many = self.projections
        yield from (_conv_cut(projection, outputs=columns) for projection in query)
        parts = range(3 - len(query))
        yield _conv_cut(many, outputs=[part * inner + column for part in parts for column in columns])

    def _counts(self, kept: Sequence[int], groups: Sequence[int]) -> list[Change]:
        before = getattr(self.module, "heads_left", None) or HeadsLeft(tuple(range(self.heads)), self.heads)
        values: dict[str, Any] = dict.fromkeys(_QUERY_HEADS, len(kept))
        values |= dict.fromkeys(_KEY_HEADS, len(groups)) | dict.fromkeys(_INNER, len(kept) * self.width)
        values["num_key_value_groups"] = len(kept) // len(groups)
        changes = [Change(self.module, name, value) for name, value in values.items() if name in vars(self.module)]
        left = HeadsLeft(tuple(before.numbers[head] for head in kept), before.original_heads)
        return [*changes, Change(self.module, "heads_left", left)]


def is_theirs(module: nn.Module) -> bool:
    """Whether a module is a transformers model."""
    return type(module).__module__.startswith("transformers.models.")


def read_attention(module: nn.Module, parent: nn.Module | None) -> TransformersAttention | str | None:
    """Read a module. Returns a str with the reason if its heads cannot be removed, None if it is not attention."""
    parts = dict(module.named_children())
    if hasattr(module, "split_size") and "c_attn" in parts:
        projections = tuple(parts[name] for name in ("q_attn", "c_attn") if name in parts)
        if "head_dim" not in vars(module) or not _is_conv(parts.get("c_proj")):  # GPT-1, GPT-BigCode
            return "its parts are not those of GPT-2"
        return _read(module, projections, parts["c_proj"], int(vars(module)["head_dim"]))
    for form in _FORMS:
        beside = form.output.startswith("..")
        output = _beside(parent, form.output[2:]) if beside else parts.get(form.output)
        if all(name in parts for name in form.projections) and output is not None:
            if not isinstance(getattr(module, form.width, None), int):
                return f"it lacks the width of a head ({form.width})"
            return _read(module, tuple(parts[name] for name in form.projections), output, getattr(module, form.width))
    return "its projections have unknown names" if type(module).__name__.endswith("Attention") else None


def _read(module: Any, projections: tuple[Any, ...], output: Any, width: int) -> TransformersAttention | str | None:
    if hasattr(module, "has_relative_attention_bias"):
        return "its layers share a bias with an entry for each head"
    known = {id(part) for layer in (*projections, output) for part in layer.modules()}
    for path, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            # A norm within each head is shared by all heads; a norm over all heads would mix them.
            of_head = path in ("q_norm", "k_norm", "q_layernorm", "k_layernorm") and tuple(parameter.shape) == (width,)
            if id(part) not in known and not of_head and not (part is module and name == "sinks"):
                return f"it has an unknown parameter, {'.'.join(filter(None, (path, name)))}"
    for part in (*projections, output):
        if getattr(part, "weight", None) is None or part.weight.dim() != 2:
            return f"a projection is a {type(part).__name__}"
    conv = _is_conv(output)
    queries = output.weight.shape[0] if conv else output.weight.shape[1]
    keys = queries if conv else projections[1].weight.shape[0]
    if queries % width or keys % width or (queries // width) % (keys // width):
        return f"heads {width} wide do not divide its {queries} columns of queries and {keys} of keys"
    rows = [part.weight.shape[conv] for part in projections]
    wanted = (queries, (4 - len(rows)) * queries)[-len(rows) :] if conv else (queries, keys, keys)
    if rows != list(wanted):
        return f"its projections have {rows} features, expected {list(wanted)} for heads of width {width}"
    return TransformersAttention(module, projections, output, queries // width, keys // width, width)


def _beside(parent: nn.Module | None, path: str) -> nn.Module | None:
    try:
        return None if parent is None else parent.get_submodule(path)
    except AttributeError:
        return None


def _is_conv(layer: nn.Module | None) -> bool:
    """Whether a layer is GPT-2's Conv1D: a linear layer whose weight is (in, out)."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"


def _conv_cut(layer: nn.Module, *, outputs: Sequence[int] | None = None, inputs: Sequence[int] | None = None) -> Cut:
    if not _is_conv(layer) or "weight" not in layer._parameters:
        raise ValueError(f"a projection is a {type(layer).__name__}, expected a Conv1D; merge adapters first")
    if outputs is not None:
        slices = [WeightSlice(layer, "weight", 1, tuple(outputs)), WeightSlice(layer, "bias", 0, tuple(outputs))]
        return Cut(slices, [Change(layer, "nf", len(outputs))])
    kept = tuple(inputs or ())
    return Cut([WeightSlice(layer, "weight", 0, kept)], [Change(layer, "nx", len(kept))])
