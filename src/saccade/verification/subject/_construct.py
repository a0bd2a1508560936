"""Making a module from a class: with the user's arguments, arguments of usual meaning, and the class's own defaults."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ...support._restored import seeded
from ..findings._finding import TargetError, Undecided
from ..findings._locate import location_of
from ..findings._words import GPU_WORDS
from ._reading import Hints, Promise
from ._source import parsed_by

EMBED_DIM, NUM_HEADS, KV_HEADS, MAX_LENGTH, DROPOUT = 24, 4, 2, 64, 0.1
_USUAL = {
    "kv_heads": r"(num|n)_(kv|key_value)_heads?|kv_heads|n_kv_heads?|num_query_groups|num_kv_groups|kv_h",
    "heads": r"(num|n)?_?(attention_|attn_|query_|q_)?heads?|nhead|h|n_head|head_num|nb_heads|num_attention_heads",
    "head_width": r"d_?k|d_?v|d_?q|head_(dim|size|width)|d_head|dim_head|dim_k|dim_v|key_dim|value_dim|kdim_head|d_qk",
    "inner": r"d_?ff|dim_?feed_?forward|ff(n)?_?(dim|size|hidden.*)?|mlp_dim|ffn_hidden|intermediate_size"
    r"|forward_expansion|hidden_ff|inner_dim|d_hidden|d_inner",
    "width": r"d_model|(input_)?embed(ding)?_?(dim|size)|hidden_(size|dim)|n_embd|dim|emb(ed)?_?(dim|size)|d_?in|d_?out"
    r"|model_?(dim|size)|width|(in|out|input|output)_?(dim|features|channels|size)|channels|features|embed|emb|d|c"
    r"|num_hiddens|query_(size|dim)|key_size|value_size|q?dim|context_dim|cross_(attention_)?dim|embed_size|in_dim"
    r"|dim_(in|out)|size|kdim|vdim|n_state|encoder_dim|decoder_dim|n_embed|units|hidden|dmodel|cond_dim|kv_dim"
    r"|memory_dim|d_context|e|d_embed|d_cross|dims",
    "length": r"block_size|context_len(gth)?|max_?(seq(uence)?_?)?(len(gth)?|positions?|context)"
    r"|max_position_embeddings|seq_?len(gth)?|n_ctx|n_positions|ctx_len|max_t|t_max|context_size|l_max|max_tokens"
    r"|num_tokens|t|maxlen|sequence_length|max_relative_position|max_distance|max_batch_len",
    "batch": r"max_batch_size|batch_size",
    "dropout": r".*(dropout|drop|pdrop|drop_rate|drop_prob)(_p|_rate|_prob)?|p",
    "vocabulary": r"vocab(_size)?|n_vocab|num_embeddings|vocabulary(_size)?|src_vocab(_size)?|tgt_vocab(_size)?"
    r"|n_tokens",
    "layers": r"(num|n)_(layers?|blocks?)|depth|layers|n_layer|num_hidden_layers",
    "window": r"(sliding_)?window(_size)?|w",
    "bias": r".*bias",
    "causal": r"(is_)?causal|autoregressive|masked|use_(causal_)?mask|mask",
    "layer": r"layer_idx|layer_(id|index|number)",
    "temperature": r"temperature|sqrt_d_?k",
    "scale": r"scale|softmax_scale|scaling",
    "eps": r".*eps(ilon)?",
    "device": r"device|dtype",
}

_CONFIG = r"(model_|gpt_|attn_)?(config|cfg|conf|args|params|hparams|opt|options)"


def construct(
    target: type, given: Mapping[str, Any], hints: Hints | None = None, promise: Promise | None = None, seed: int = 0
) -> tuple[Any, dict[str, Any]]:
    """The module of a class, and those of the user's arguments that its constructor does not take. Its weights are
    drawn with `seed`.

    Raises:
        Undecided: an argument that must be given and whose name says nothing; its option is named.
    """
    hints, promise = hints or Hints(), promise or Promise()
    taken, left = _arguments(target, dict(given), hints, promise)
    with seeded(seed):
        try:
            return target(**taken), left
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            where = location_of(error)
            if any(known in words.lower() for known in GPU_WORDS):
                raise TargetError(words, where) from error
            if where is not None and isinstance(error, (NameError, UnboundLocalError)):
                raise TargetError(words, where) from error  # no argument fixes that
            at = f" at {where.path}:{where.line}" if where else ""
            shown = ", ".join(f"{name}={value!r}" for name, value in taken.items())[:200]
            options = [(f"another {name}", f"--arg {name}=VALUE") for name in taken]
            raise Undecided(f"{target.__name__}({shown}) raised {words}{at}", options) from error


def guessed(target: type, given: Mapping[str, Any], hints: Hints, promise: Promise) -> tuple[str, ...]:
    """In words, the constructor arguments that `construct` inferred."""
    taken, _ = _arguments(target, dict(given), hints, promise)
    made = [f"{name}={_shown(value)}" for name, value in taken.items() if name not in given]
    return (f"it is made as {target.__name__}({', '.join(made)}) (otherwise --arg NAME=VALUE)",) if made else ()


def _shown(value: Any) -> str:
    if isinstance(value, SimpleNamespace):
        return f"({', '.join(f'{name}={own!r}' for name, own in vars(value).items())})"
    return repr(value)


def _arguments(
    target: type, given: dict[str, Any], hints: Hints, promise: Promise
) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return given, {}
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    taken = {
        name: value for name, value in given.items() if name in named or (open_ended and not _of_forward(target, name))
    }
    rest = {name: value for name, value in given.items() if name not in taken}
    sizes = _UsualSizes(hints, promise, given)
    used: set[str] = set()
    for name, parameter in named.items():
        if name in taken:
            continue
        if parameter.default is parameter.empty:
            if re.fullmatch(_CONFIG, name):
                taken[name] = _config(target, parameter, sizes, rest)
                own = taken[name]
                used |= {field for field in rest if (field in own if isinstance(own, dict) else hasattr(own, field))}
            else:
                taken[name] = _required(target, name, sizes)
        elif _kind(name) == "dropout" and parameter.default == 0.0 and not isinstance(parameter.default, bool):
            taken[name] = DROPOUT  # so that it can be seen to work; it is off outside training
        elif hinted := sizes.told(name):
            taken[name] = hinted
    return taken, {name: value for name, value in rest.items() if name not in used}


def _of_forward(target: type, name: str) -> bool:
    forward = getattr(target, "forward", None)
    return forward is not None and name in inspect.signature(forward).parameters


class _UsualSizes:
    """The usual sizes, by the kind of an argument's name."""

    def __init__(self, hints: Hints, promise: Promise, taken: Mapping[str, Any]):
        by_kind = {_kind(name): value for name, value in taken.items() if isinstance(value, int)}
        self.width = hints.embed_dim or by_kind.get("width") or EMBED_DIM
        self.heads = hints.num_heads or by_kind.get("heads") or (NUM_HEADS if self.width % NUM_HEADS == 0 else 1)
        self.hints, self.promise = hints, promise

    def told(self, name: str) -> Any:
        """The user's hint for an argument that has a default."""
        kind = _kind(name)
        if kind == "causal" and self.promise.causal is not None and name not in ("mask", "masked"):
            return self.promise.causal
        hinted = {"width": self.hints.embed_dim, "heads": self.hints.num_heads}
        return hinted.get(kind) if self.hints.embed_dim else None

    def of(self, name: str) -> Any:
        """A value for a parameter with a telling name; KeyError for other names."""
        if name.lower() in ("num_kv_groups", "num_query_groups"):
            return KV_HEADS if self.heads % KV_HEADS == 0 else 1
        return {
            "kv_heads": KV_HEADS if self.heads % KV_HEADS == 0 else self.heads,
            "heads": self.heads,
            "head_width": max(1, self.width // self.heads),
            "inner": 2 * self.width,
            "width": self.width,
            "length": MAX_LENGTH,
            "batch": 8,
            "dropout": DROPOUT,
            "vocabulary": 61,
            "layers": 2,
            "window": (self.promise.window or 3),
            "bias": False,
            "causal": bool(self.promise.causal),
            "layer": 0,
            "temperature": max(1, self.width // self.heads) ** 0.5,
            "scale": max(1, self.width // self.heads) ** -0.5,
            "eps": 1e-6,
            "device": None,
        }[_kind(name)]


def _kind(name: str) -> str:
    lowered = name.lower().strip("_")
    return next((kind for kind, pattern in _USUAL.items() if re.fullmatch(pattern, lowered)), "")


def _required(target: type, name: str, sizes: _UsualSizes) -> Any:
    try:
        return sizes.of(name)
    except KeyError:
        raise Undecided(
            f"{target.__name__} must be given {name!r}, and its name does not show what it is",
            [(f"give {name} to the constructor", f"--arg {name}=VALUE")],
        ) from None


def _config(target: type, parameter: inspect.Parameter, sizes: _UsualSizes, given: Mapping[str, Any]) -> Any:
    """A configuration object: its dataclass with required fields filled in, otherwise an object with the attributes
    that the class reads; `given` has precedence."""
    attributes, keys = _read_of(target, parameter.name)
    kind = _annotated(target, parameter) or (None if keys else _nearby(target))
    if kind is not None and dataclasses.is_dataclass(kind):
        return _filled(kind, sizes, given)
    if kind is not None:
        config = kind()
        for name in given:
            if hasattr(config, name):
                setattr(config, name, given[name])
        return config
    made = {name: given[name] if name in given else _required(target, name, sizes) for name in (keys or attributes)}
    if not made:
        raise Undecided(
            f"{target.__name__} must be given {parameter.name!r}, and its meaning is unknown",
            [("give it to the constructor", f"--arg {parameter.name}=VALUE")],
        )
    return made if keys else SimpleNamespace(**made)


def _filled(kind: type, sizes: _UsualSizes, given: Mapping[str, Any]) -> Any:
    """A dataclass with a value for each field that has no default; fields that are dataclasses likewise."""
    try:
        kinds = typing.get_type_hints(kind)
    except (NameError, TypeError):
        kinds = {}
    made = {}
    for parameter in dataclasses.fields(kind):
        if parameter.init and parameter.name in given:
            made[parameter.name] = given[parameter.name]
        elif (
            parameter.init
            and parameter.default is dataclasses.MISSING
            and parameter.default_factory is dataclasses.MISSING
        ):
            own = kinds.get(parameter.name)
            if inspect.isclass(own) and dataclasses.is_dataclass(own):
                made[parameter.name] = _filled(own, sizes, given)
            else:
                made[parameter.name] = _required(kind, parameter.name, sizes)
    return kind(**made)


def _annotated(target: type, parameter: inspect.Parameter) -> type | None:
    kind = parameter.annotation
    if isinstance(kind, str):
        kind = getattr(sys.modules.get(target.__module__), kind, None)
    return kind if inspect.isclass(kind) and kind not in (dict, parameter.empty, object) else None


def _nearby(target: type) -> type | None:
    """The only dataclass in the file of the class whose name is that of a configuration; None if there are none or
    several."""
    module = sys.modules.get(target.__module__, SimpleNamespace())
    named = [value for name, value in vars(module).items() if re.search("config|args|cfg|params", name.lower())]
    classes = [value for value in named if inspect.isclass(value) and dataclasses.is_dataclass(value)]
    return classes[0] if len(classes) == 1 else None


def _read_of(target: type, name: str) -> tuple[list[str], list[str]]:
    """Attributes and keys of its configuration that a class reads."""
    try:
        tree = parsed_by(ast.parse, textwrap.dedent(parsed_by(inspect.getsource, target)))
    except (OSError, TypeError, SyntaxError):
        return [], []
    attributes, keys = [], []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Attribute, ast.Subscript)):
            continue
        if not isinstance(node.value, ast.Name) or node.value.id != name:
            continue
        if isinstance(node, ast.Attribute):
            attributes.append(node.attr)
        elif isinstance(node.slice, ast.Constant):
            keys.append(str(node.slice.value))
    return list(dict.fromkeys(attributes)), list(dict.fromkeys(keys))
