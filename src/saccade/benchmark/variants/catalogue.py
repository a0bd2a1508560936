"""Who takes part, and how each is named on a command line."""

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
TRIED = 64  # tokens, where settings are tried


def all_contenders(*, layers: bool = True) -> list[VariantContender]:
    """Exact attention first, then patterns, mechanisms and, where wanted, layers."""
    reading = [VariantAttention(config.name, config.usual) for config in variants.MECHANISMS if not config.reads_tokens]
    found: list[VariantContender] = [ExactAttention(), *PATTERNS, *reading]
    if layers:
        projected = [attention_layer(one.name, one.usual) for one in variants.MECHANISMS if one.reads_tokens]
        found += [attention_layer(ATTENTION), *projected, *OTHERS]
    return found


def chosen_contenders(names: Sequence[str] | None, *, layers: bool = True) -> list[VariantContender]:
    """Those of these names, and what they are measured against; None: everyone.

    Raises:
        ValueError: a name that nobody has, a setting that cannot be.
    """
    if not names:
        return all_contenders(layers=layers)
    picked = [contender_named(name) for name in names]
    against = [one for one in all_contenders(layers=layers) if one.whole]
    found = {one.name: one for one in [*against, *picked]}
    kinds = [one.kind for one in against]
    return sorted(found.values(), key=lambda one: kinds.index(one.kind) if one.kind in kinds else len(kinds))


def contender_named(text: str) -> VariantContender:
    """The contender that is called `name`, or `name:setting=value,...` with settings of its own.

    Raises:
        ValueError: no such name, a setting that cannot be.
    """
    name, _, settings = text.partition(":")
    there = {one.name: one for one in all_contenders()}
    if name not in there:
        raise ValueError(f"mechanism: expected one of {', '.join(there)}; got {name!r}")
    one = there[name]
    if not settings:
        return one
    if isinstance(one, MaskedAttention):
        return _set(one, text, settings)
    if name in {config.name for config in variants.MECHANISMS}:
        usual = functools.partial(variants.parse, text)
        usual(TRIED)
        return (
            replace(one, name=text, usual=usual) if isinstance(one, VariantAttention) else attention_layer(text, usual)
        )
    raise ValueError(f"mechanism: {name} has no settings, got {text!r}")


def _set(masked: MaskedAttention, text: str, settings: str) -> MaskedAttention:
    """With these settings; they are tried at once, so that invalid ones raise an error before any work."""
    known = masked.settings(TRIED)
    found: list[tuple[str, int]] = []
    for part in settings.split(","):
        name, _, value = part.partition("=")
        if name not in known:
            raise ValueError(f"mechanism: {masked.name} has no setting {name!r}, expected {' or '.join(known)}")
        try:
            found.append((name, int(value)))
        except ValueError:
            raise ValueError(f"mechanism: expected whole numbers as name=number, got {text!r}") from None
    made = replace(masked, name=text, given=tuple(found))
    for causal in (True, False):
        sizes = ProblemSizes(1, 1, 1, 1, 1, TRIED, causal)
        if not made.refusal(sizes):
            made.mask(sizes)
    return made
