"""The arguments of a target, and the role of each by its name."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .._source import parsed_by

_CACHE_OFF = r"(^|_)(no|not|reset|clear|init|flush|empty|disable|detach|drop|skip|is)(_|$)"  # of a flag

# The first that fits the whole name, in lower case, decides.
_ROLES = {
    "use_cache": r"(use|return|output|with|get|ret|want|need|keep|store|save|write|update|enable)_?(the_)?(new_)?"
    r"((past_)?(kvs?|k_v|key_values?|caches?|key_value_states)(_caches?|_states?)?|past|presents?|layer_past)"
    r"|cache_.*flag|caching",
    "cache": r"(past_)?(kv|key_value|layer)_?(cache|past|values?|states?)s?|past(_key_values?)?|past_?kv|layer_past"
    r"|.*_?caches?|cache_params|memory_state|incremental_state|state|present",
    "head_mask": r"(layer_|cross_attn_)?head_mask",
    "flag": r"(is_|use_)?(causal|autoregressive)(_flag|ity)?|use_(causal_)?mask|apply_mask|masked|mask_future",
    "lengths": r"(valid|seq|src|source|key|input|sequence|memory|context|x)?_?(lens?|lengths|valid_lens?"
    r"|valid_lengths)",
    "mask": r".*masks?.*|(attn|attention|score|logit|position|rel_pos|pos|relative_position|alibi)_?(bias|biases)|bias"
    r"|alibi|key_padding|padding|is_pad(ding)?",
    "weights_flag": r"(need|return|output|with|get|ret|want)_?(the_)?(attn|attention|attentions|weights|att|probs"
    r"|scores|attn_weights|attention_weights|attn_probs|w|map|maps|attention_scores)",
    "averaged": r"average_attn_weights|average_weights",
    "gqa": r"enable_gqa|gqa|use_gqa",
    "groups": r"n_rep|num_(key_value|kv|query)_groups|num_groups|n_groups|groups|group_size|kv_groups",
    "training": r"training|train|is_training",
    "inference": r"inference|eval|evaluate|deterministic",
    "dropout": r"(attn|attention)?_?(dropout|drop|p_drop|pdrop|dropout_p|dropout_rate|drop_rate|drop_prob|dropout_prob)"
    r"|p_dropout|p",
    "scale": r"(softmax|sm|attn|attention|qk|score)?_?(scale|scaling|scale_factor|scaling_factor)|norm_factor",
    "temperature": r"temperature|temp|tau",
    "kv_heads": r"(num|n)_(kv|key_value)_heads|kv_heads|n_kv|n_kv_head|hkv",
    "heads": r"(num|n)?_?(attention_|attn_|query_|q_)?heads?|nhead|nh|n_head",
    "head_width": r"d_?k|d_?q|d_?h|head_(dim|size|width)|d_head|dim_head|dim_k",
    "width": r"d_model|embed_dim|hidden_size|dim|d|emb_dim|n_embd|embedding_dim",
    "window": r"(sliding_)?window(_size)?|local_window",
    "positions": r"position_ids|positions?|pos_ids|cache_position|input_pos|token_positions|pos",
    "start": r"start_pos(ition)?|offset|start|pos_offset|past_len(gth)?|cur_pos|step",
    "cos_sin": r"position_embeddings|cos_sin|rotary_pos_emb|rope|rotary|rope_embeddings",
    "cos": r"(freqs_)?cos|rope_cos|cos_cached",
    "sin": r"(freqs_)?sin|rope_sin|sin_cached",
    "freqs": r"freqs_?(cis|complex)?|freq_cis|rope_freqs|pe|pis",
    "matrix_q": r"w_?q(uery)?|q_?(proj|weight|w)|wq|query_(proj|weight)",
    "matrix_k": r"w_?k(ey)?|k_?(proj|weight|w)|wk|key_(proj|weight)",
    "matrix_v": r"w_?v(alue)?|v_?(proj|weight|w)|wv|value_(proj|weight)",
    "matrix_o": r"w_?o(ut)?|w_?out(put)?|o_?(proj|weight)|out_?(proj|weight)|proj|w_?proj",
    "matrix_qkv": r"w_?qkv|qkv_?(proj|weight|w)|in_proj(_weight)?",
    "packed": r"qkv|qkv_packed|packed_qkv|mixed_qkv",
    "key_value": r"kv|key_value(s|_states)?|keys?_(and_)?values?|x_?kv|kv_input|inputs_kv",
    "query": r"(x|input|inputs)?_?q|(x_|input_|inputs_)?(query|queries)(_states|_layer|_input|_in|_seq|_tensor|_head"
    r"|_heads)?|qs|qh|q_(in|input|heads?|states|seq)",
    "key": r"(x|input|inputs)?_?k|(x_|input_|inputs_)?keys?(_states|_layer|_input|_in|_seq|_tensor|_head|_heads)?|ks"
    r"|kh|k_(in|input|heads?|states|seq)",
    "value": r"(x|input|inputs)?_?v|(x_|input_|inputs_)?values?(_states|_layer|_input|_in|_seq|_tensor|_head|_heads)?"
    r"|vs|vh|v_(in|input|heads?|states|seq)",
    "context": r"context|ctx|cond(itioning)?|memory|mem|y|encoder_(output|outputs|out|hidden_states|states|x|hidden)"
    r"|enc(_out|_output|_outputs|_hidden|_x|_states)?|encoded|key_value_states|source|other"
    r"|cross_(input|states|x)|x2|x_2|context_states|kv_states|m|z",
    "x": r"x|input|inputs|hidden_states?|hidden|src|tgt|trg|target|embeddings?|embedded|seq|sequences?|features|h|inp"
    r"|(input|inputs)_?embeds|emb|data|tensor|dec(oder)?_(input|inputs|in|x|hidden_states)|x1|x_1|xs|tokens"
    r"|batch|states|input_tensor|x_in|embeds|token_embeddings|decoder_states|sequence_output|input_ids|idx|ids"
    r"|input_tokens|token_ids",
}


@dataclass(frozen=True)
class TargetArgument:
    """One parameter of the target's signature."""

    name: str
    role: str = ""  # "" where the name says nothing
    required: bool = True
    default: Any = None
    by_place: bool = False  # cannot be given by name
    place: int | None = None  # of one that cannot be given by name; None: after the inputs
    is_open: bool = False  # of `*args`: whether it is a mask, only what it does can tell


def role_of(name: str) -> str:
    lowered = name.lower().strip("_")
    return next((role for role, pattern in _ROLES.items() if re.fullmatch(pattern, lowered)), "")


def arguments_of(target: Any) -> tuple[TargetArgument, ...]:
    """The target's arguments; empty without a signature."""
    target = getattr(target, "_orig_mod", target)  # what torch.compile made of a module
    function = target.forward if isinstance(target, nn.Module) else target
    if hasattr(function, "schema"):
        return _resolved([_of_schema(argument) for argument in function.schema.arguments if argument.name != "self"])
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = _from_text(function)
    named = [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    arguments = list(_resolved([_argument(parameter, at) for at, parameter in enumerate(named)]))
    return tuple([*arguments, *_open_arguments(parameters, arguments, function)])


def _open_arguments(
    parameters: list[inspect.Parameter], named: list[TargetArgument], function: Any
) -> Iterator[TargetArgument]:
    """Arguments without a name in the signature: a mask in `*args`, and keys that the source reads from `**kwargs`."""
    takes_masks = any(argument.role == "mask" for argument in named)
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL and not takes_masks:
            place = len(named) or None
            yield TargetArgument(parameter.name, "mask", required=False, by_place=True, place=place, is_open=True)
        elif parameter.kind is parameter.VAR_KEYWORD:
            for name in _keywords_read(function, parameter.name):
                if role_of(name) in ("mask", "lengths", "flag") and all(name != other.name for other in named):
                    yield TargetArgument(name, role_of(name), required=False)


def _keywords_read(function: Any, keywords: str) -> list[str]:
    """The names in `kwargs["name"]`, `kwargs.get("name")` and `kwargs.pop("name")`."""
    try:
        text = parsed_by(inspect.getsource, function)
    except (OSError, TypeError):
        return []
    names = re.findall(rf"\b{re.escape(keywords)}(?:\.(?:get|pop)\(|\[)\s*[\"'](\w+)[\"']", text)
    return list(dict.fromkeys(names))


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """A function with the signature of `function.forward` that calls `function.apply`, which takes no keywords."""

    @functools.wraps(function.forward)
    def apply(*places: Any, **keywords: Any) -> Any:
        bound = signature.bind(*places, **keywords)
        bound.apply_defaults()
        return function.apply(*bound.args)

    whole = inspect.signature(function.forward)
    first = next(iter(whole.parameters), "")
    has_context = first in ("ctx", "context", "self")
    signature = whole.replace(parameters=list(whole.parameters.values())[1 if has_context else 0 :])
    apply.__signature__ = signature  # type: ignore[attr-defined]
    return apply


def _argument(parameter: inspect.Parameter, at: int) -> TargetArgument:
    role = role_of(parameter.name)
    required = parameter.default is parameter.empty
    boolean = isinstance(parameter.default, bool) or parameter.annotation in (bool, "bool")
    if role == "cache" and boolean:
        role = "" if re.search(_CACHE_OFF, parameter.name.lower()) else "use_cache"
    if role in ("mask", "flag", "lengths"):
        tensor = "Tensor" in str(parameter.annotation)
        role = "flag" if boolean else ("mask" if tensor and role == "flag" else role)
        if boolean and re.search("pad|bias|alibi", parameter.name.lower()):
            role = ""
    return TargetArgument(
        parameter.name,
        role,
        required,
        None if required else parameter.default,
        parameter.kind is parameter.POSITIONAL_ONLY,
        at if parameter.kind is parameter.POSITIONAL_ONLY else None,
    )


def _of_schema(argument: Any) -> TargetArgument:
    """Parameters from a TorchScript schema."""
    required = not argument.has_default_value()
    return TargetArgument(argument.name, role_of(argument.name), required, None if required else argument.default_value)


def _resolved(arguments: list[TargetArgument]) -> tuple[TargetArgument, ...]:
    """The arguments, with roles that depend on other arguments: `src` is the context if there is a `tgt`, and `h` is
    not an input if there is an `x`."""
    roles = [argument.role for argument in arguments]
    names = [argument.name.lower() for argument in arguments]
    for at, argument in enumerate(arguments):
        if argument.role == "x" and any(role in ("x", "query") for role in roles[:at]):
            context = {"query", "key", "value"} - set(roles)
            is_context = bool(context) and "context" not in roles
            role = "context" if is_context and argument.name.lower() not in ("h", "batch") else "heads"
            if argument.name.lower() not in ("h",) and not is_context:
                role = ""
            arguments[at] = replace(argument, role=role)
            roles[at] = role
        if argument.role == "x" and argument.name == "src" and any(name in ("tgt", "trg") for name in names[at + 1 :]):
            arguments[at] = replace(argument, role="context")
            roles[at] = "context"
        if argument.role == "context" and not any(role in ("x", "query") for role in roles) and at == 0:
            arguments[at] = replace(argument, role="x")
            roles[at] = "x"
    has_input = any(role in ("x", "query", "packed") for role in roles)
    if arguments and not has_input and arguments[0].role in ("", "key_value"):
        arguments[0] = replace(arguments[0], role="x")
    return tuple(arguments)


def _from_text(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Built-in functions of PyTorch: their signature is the first line of their docstring that has one."""
    match = re.search(rf"{getattr(function, '__name__', '?')}(\(.*?\))", getattr(function, "__doc__", None) or "", re.S)
    if match is None:
        return []
    try:
        parsed = parsed_by(ast.parse, f"def f{match[1]}: pass").body[0]
    except SyntaxError:
        return []
    assert isinstance(parsed, ast.FunctionDef)
    given = parsed.args
    empty = [inspect.Parameter.empty] * (len(given.args) - len(given.defaults))
    defaults = [*empty, *(ast.literal_eval(node) for node in given.defaults)]
    pairs = [*zip(given.args, defaults, strict=True)]
    pairs += [
        (a, ast.literal_eval(d) if d else inspect.Parameter.empty)
        for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return [inspect.Parameter(a.arg, inspect.Parameter.KEYWORD_ONLY, default=d) for a, d in pairs]
