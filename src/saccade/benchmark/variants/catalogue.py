"""The compared mechanisms, and their names on the command line."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from ...operator import variants
from .contenders import VariantContender
from .data import ProblemSizes
from .layers import OTHERS, attention_layer
from .readings import PATTERNS, ExactAttention, MaskedAttention, VariantAttention

ATTENTION = "attention"
TRIED = 64  # number of tokens for trying settings


def all_contenders(*, layers: bool = True) -> list[VariantContender]:
    """Exact attention first, then patterns, mechanisms and, with `layers`, layers."""
    reading = [VariantAttention(config.name, config.usual) for config in variants.MECHANISMS if not config.reads_tokens]
    contenders: list[VariantContender] = [ExactAttention(), *PATTERNS, *reading]
    if layers:
        projected = [
            attention_layer(config.name, config.usual) for config in variants.MECHANISMS if config.reads_tokens
        ]
        contenders += [attention_layer(ATTENTION), *projected, *OTHERS]
    return contenders


def chosen_contenders(names: Sequence[str] | None, *, layers: bool = True) -> list[VariantContender]:
    """The contenders with these names, and those with which they are compared; all contenders if the names are None.

    Raises:
        ValueError: an unknown name, an invalid setting.
    """
    if not names:
        return all_contenders(layers=layers)
    picked = [contender_named(name) for name in names]
    against = [contender for contender in all_contenders(layers=layers) if contender.whole]
    by_name = {contender.name: contender for contender in [*against, *picked]}
    kinds = [contender.kind for contender in against]
    return sorted(
        by_name.values(), key=lambda contender: kinds.index(contender.kind) if contender.kind in kinds else len(kinds)
    )


def contender_named(text: str) -> VariantContender:
    """The contender with the name `name`, or `name:setting=value,...`.

    Raises:
        ValueError: an unknown name, an invalid setting.
    """
    name, _, settings = text.partition(":")
    there = {contender.name: contender for contender in all_contenders()}
    if name not in there:
        raise ValueError(f"mechanism: expected one of {', '.join(there)}; got {name!r}")
    contender = there[name]
    if not settings:
        return contender
    if isinstance(contender, MaskedAttention):
        return _set(contender, text, settings)
    if name in {config.name for config in variants.MECHANISMS}:
        usual = functools.partial(variants.parse, text)
        usual(TRIED)
        return (
            replace(contender, name=text, usual=usual)
            if isinstance(contender, VariantAttention)
            else attention_layer(text, usual)
        )
    raise ValueError(f"mechanism: {name} has no settings, got {text!r}")


def _set(masked: MaskedAttention, text: str, settings: str) -> MaskedAttention:
    """Apply settings. They are tried at once, so that invalid ones raise an error before any measurement."""
    known = masked.settings(TRIED)
    pairs: list[tuple[str, int]] = []
    for part in settings.split(","):
        name, _, value = part.partition("=")
        if name not in known:
            raise ValueError(f"mechanism: {masked.name} has no setting {name!r}, expected {' or '.join(known)}")
        try:
            pairs.append((name, int(value)))
        except ValueError:
            raise ValueError(f"mechanism: expected whole numbers as name=number, got {text!r}") from None
    made = replace(masked, name=text, given=tuple(pairs))
    for causal in (True, False):
        sizes = ProblemSizes(1, 1, 1, 1, 1, TRIED, causal)
        if not made.refusal(sizes):
            made.mask(sizes)
    return made
