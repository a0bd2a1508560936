"""Arguments of other libraries, such as `is_causal=True`, and their names in Saccade.

The core functions take them as `**unknown: NoReturn`, which costs a call without them an empty dict, and `named` leaves
that out of the signature that people and tools see. `advised` wraps what takes longer: modules, variants, `merge`.
`with_arguments_of` is for a function that hands on all it is given.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ._masks._data import zeros_and_ones

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


def named(function: F) -> F:
    """The function, whose signature does not show `**unknown`."""
    shown = inspect.signature(function)
    kept = [one for one in shown.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = shown.replace(parameters=kept)  # type: ignore[attr-defined]
    return function


def with_arguments_of(original: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorator for `f(*args, **options)`: it gives `f` the signature of `original`, and the errors of `original` for
    unknown arguments."""
    own = inspect.signature(original)

    def with_its_signature(function: Callable[..., R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError:
                unknown = {name: value for name, value in kwargs.items() if name not in own.parameters}
                if unknown:
                    raise refused(run, unknown) from None
                try:
                    own.bind(*args, **kwargs)
                except TypeError as error:
                    raise TypeError(f"{function.__qualname__}(): {error}") from None
                raise

        returned = inspect.signature(function).return_annotation
        run.__signature__ = own.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return run

    return with_its_signature


def advised(function: F) -> F:
    """A wrapper of the function. Its TypeError for an argument name of another library names the equivalent of
    Saccade."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            # An argument that it does not take was never bound: nothing has run, and no error is hidden.
            takes = inspect.signature(function).parameters
            unknown = {name: value for name, value in kwargs.items() if name not in takes}
            if not unknown:
                raise
            raise refused(function, unknown, args) from None

    # Of its own for each function: PyTorch's compiler counts what it compiled by code, and gives up after eight.
    run.__code__ = run.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def refused(
    function: Callable[..., Any], unknown: Mapping[str, Any], advised_with: tuple[Any, ...] | None = None
) -> TypeError:
    """The TypeError for unknown arguments. For an argument name of another library it names the equivalent of Saccade.

    Args:
        advised_with: the positional arguments of the call of `advised`; for a method, the module is the first.
    """
    takes = inspect.signature(function).parameters
    module = advised_with[0] if advised_with and "self" in takes else None
    has_dropout = "dropout" in takes or advised_with is not None
    told = [repr(name) for name in unknown if name not in _ADVICE]
    for name, value in unknown.items():
        if name in _ADVICE:
            advice = _of_module(name, value, module) or _possible(_ADVICE[name](value, has_dropout), takes, module)
            told.append(f"{name!r}: {advice}")
    return TypeError(f"{function.__qualname__}() got an unexpected keyword argument {'; '.join(told)}")


def _of_module(name: str, value: Any, module: Any) -> str:
    """Advice for an argument that belongs to a module's constructor; "" for any other."""
    decoder = getattr(module, "decoder", module)
    if name in ("is_causal", "causal") and getattr(decoder, "causal", False) is True:
        if value is not False:
            return "leave it out, it is causal by itself"
        return f"give causal=False to {type(decoder).__name__}, when the module is made"
    if name == "dropout_p" and module is not None and value == 0:
        return "leave it out; a module in eval mode drops nothing"
    return ""


def _possible(advice: str, takes: Mapping[str, Any], module: Any) -> str:
    """The advice; or another advice if the function lacks the argument that the advice names."""
    if "return_weights" in takes and "attention_weights" in advice:
        return "write return_weights=True"
    wanted = re.match(r"write (\w+)=", advice)
    if wanted is None or wanted[1] in takes:
        return advice
    if "plan" in takes and wanted[1] == "mask":
        return "give the mask to saccade.distributed.plan"
    config = getattr(module, "config", None)
    # A block's configuration has a dropout of its own, which is not that of the weights.
    for made in (getattr(config, "attention", None), config):
        if hasattr(made, wanted[1]):
            return f"give {wanted[1]}= to {type(made).__name__}, when the module is made"
    return f"it takes {', '.join(name for name in takes if name != 'self')}"


def _leave_out(why: str) -> Callable[[Any, bool], str]:
    return lambda value, has_dropout: f"leave it out, {why}"


def _is_causal(value: Any, has_dropout: bool) -> str:
    if value is False:
        return "leave it out, nothing is masked without a mask"
    return (
        "write mask=Causal(), where the last query stands at the last key; "
        "F.scaled_dot_product_attention's first query stands at the first key, mask=Causal().at(0), the same if Lq = Lk"
    )


def _causal(value: Any, has_dropout: bool) -> str:
    if value is False:
        return "leave it out, nothing is masked without a mask"
    return "write mask=Causal(), where the last query stands at the last key, as in flash-attn since 2.1"


def _attn_mask(value: Any, has_dropout: bool) -> str:
    if value is None:
        return "leave it out"
    if isinstance(value, Tensor) and value.is_floating_point():
        return "write mask=attn_mask.bool()" if zeros_and_ones(value) else "write bias=attn_mask, added to the scores"
    if isinstance(value, Tensor) and value.dtype != torch.bool:
        return "write mask=attn_mask.bool(), True = attend"
    return "write mask=attn_mask, True = attend"


def _window_size(value: Any, has_dropout: bool) -> str:
    if not (isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(side, int) for side in value)):
        return "write mask=Window(left, right), None for an open side"
    if all(side < 0 for side in value):
        return "leave it out, both sides are open"
    left, right = (None if side < 0 else side for side in value)
    return f"write mask=Window({left}, {right})" + (f", or with causal=True mask=Window({left}, 0)" if right else "")


def _dropout(value: Any, has_dropout: bool) -> str:
    if value == 0:
        return "leave it out, nothing is dropped without dropout="
    if not has_dropout:
        return "leave it out, this takes the weights before dropout"
    return "write dropout=, which drops whether a module trains or not"


# By name: what to write instead, of the value given and of whether the function has dropout.
_ADVICE: dict[str, Callable[[Any, bool], str]] = {
    "mask": lambda value, has_dropout: "write mask=",
    "is_causal": _is_causal,
    "attn_mask": _attn_mask,
    "dropout_p": _dropout,
    "enable_gqa": _leave_out("fewer key heads than query heads are always shared"),
    "causal": _causal,
    "window_size": _window_size,
    "softmax_scale": lambda value, has_dropout: "write scale=",
    "scale": lambda value, has_dropout: "write scale=",
    "score_mod": lambda value, has_dropout: (
        "leave it out" if value is None else "write bias=Score(score_mod).at(0), or call saccade.flex_attention"
    ),
    "block_mask": lambda value, has_dropout: (
        "leave it out" if value is None else "call saccade.flex_attention, or write mask=Predicate(mask_mod).at(0)"
    ),
    "alibi_slopes": lambda value, has_dropout: "write bias=ALiBi(slopes), slopes (Hq,)",
    "deterministic": _leave_out("results repeat bit by bit but on the backends that explain() says lack it"),
    "return_attn_probs": lambda value, has_dropout: "call attention_weights, or attention_with_lse for the lse",
    "need_weights": lambda value, has_dropout: "call attention_weights",
    "key_padding_mask": lambda value, has_dropout: "write mask=Padding(~key_padding_mask): here True = attend",
    "attention_mask": lambda value, has_dropout: "write mask=Padding(attention_mask.bool())",
}
