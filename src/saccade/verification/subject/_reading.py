"""How a target must be called: a value that the user gives or that `discovery` finds.

Axes are named by letters: B batch, H heads, L length, D head width (of attention proper) or model width (of modules).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

Form = Literal["attention", "self", "cross", "qkv", "tokens"]
Meaning = Literal["attend", "ignore", "additive"]


@dataclass(frozen=True)
class Promise:
    """The author's promises about the target. A promise that is None is not made, and the observed behaviour decides.

    Unset `positions`: a note says whether the order matters. Unset `kv_order`: "repeat" is a warning.

    Example:
        >>> import torch, saccade
        >>> from saccade.verification import Promise
        >>> def doubled(q, k, v):
        ...     return torch.softmax(2.0 * q @ k.mT, dim=-1) @ v
        >>> saccade.verify(doubled, causal=False, promise=Promise(scale=2.0), checks=["scale"], isolated=False).ok
        True
    """

    causal: bool | None = None
    window: int | None = None  # keys that a query sees before its own, itself not counted; with causal=False each way
    positions: bool | None = None  # whether it knows the order of its input
    scale: float | None = None  # of the logits; None: one over the root of the head width; 0: averages, on purpose
    mask: Meaning | None = None  # what True (or a float) in its mask means
    # which of n key heads query head h of n * times reads: h // times, or h % n
    kv_order: Literal["repeat_interleave", "repeat"] | None = None


@dataclass(frozen=True)
class Hints:
    """The user's information on how to call the target. The rest is found by trials; a `Reading` holds all of it.

    Example:
        >>> import torch, saccade
        >>> from saccade.verification import Hints
        >>> def attend(q, k, v):  # (batch, length, heads, width)
        ...     return torch.einsum("bhqk,bkhd->bqhd", (torch.einsum("bqhd,bkhd->bhqk", q, k) / 4).softmax(-1), v)
        >>> how = Hints(form="attention", layout="BLHD", embed_dim=16)
        >>> saccade.verify(attend, causal=False, how=how, checks=["scale"], isolated=False).ok
        True
    """

    form: Form | None = None
    layout: str | None = None
    embed_dim: int | None = None
    num_heads: int | None = None
    mask: str | None = None  # the name of the mask argument
    out: int | str | None = None
    weights: int | str | None = None


@dataclass(frozen=True)
class MaskReading:
    """One mask argument.

    `axes` gives its shape by letters out of B H Q K and 1: "QK", "BQK", "B1QK", "BHQK", "11QK", "BK", "B11K", ...; "B"
    alone is a length for each batch item. `meaning` is the one that callers rely on: the promise or the documentation
    where they name it, else the behaviour.

    Example:
        >>> from saccade.verification import MaskReading
        >>> MaskReading("key_padding_mask", axes="BK", meaning="ignore").by_pair
        False
        >>> MaskReading("attn_mask", axes="QK", meaning="additive", dtype="float32").by_pair
        True
    """

    argument: str | int  # keyword, or place among the positional arguments
    axes: str
    meaning: Meaning
    dtype: str = "bool"  # of what is passed: "bool", "int64"; "float32" and additive masks: the inputs' dtype
    fill: float = float("-inf")  # of an additive mask, where nothing is seen
    documented: Meaning | None = None  # what its documentation says, whatever it does
    words: str = ""  # of the documentation that says it
    behaves: Meaning | None = None  # what it does, None where nothing that it does hides a key
    merged: int = 0  # of axes "BHQK": the heads that are one axis with the batch, (B*H, Q, K) as nn.MultiheadAttention
    required: bool = False  # without a mask to give, one that hides nothing is given

    @property
    def by_pair(self) -> bool:
        """Whether the mask has an axis of queries, so that different queries may see different keys."""
        return "Q" in self.axes


@dataclass(frozen=True)
class CacheReading:
    """The way in which keys and values of earlier calls reach a later call.

    kind "passed": `argument` takes what an earlier call returned at `returned` (place in its tuple, or attribute). In
    the first call it takes what `make` gives, and None without `make`. kind "made": `argument` takes an object that
    `make` gives, changed in place. kind "inside": the module keeps it; `reset` names the method that empties it.

    `position` names an argument that takes the first position of the call (`start_pos`). `positions` names one that
    takes the numbers of all of its positions, with its axes, "BL" or "L". `flag` names one that must be True for
    caching (`use_cache`). `out` says where the output is with a cache, if it is elsewhere. `step` names a method that
    is called with one position at a time in place of the module.

    Example:
        >>> from saccade.verification import CacheReading
        >>> CacheReading("passed", argument="past", returned=1, flag="use_cache").kind
        'passed'
        >>> CacheReading("inside", reset="clear").reset
        'clear'
    """

    kind: Literal["passed", "made", "inside"]
    argument: str | int | None = None
    returned: int | str | tuple[int, ...] | None = None  # several places are passed as one tuple
    make: Any = None
    reset: str | None = None
    position: str | None = None
    flag: str | None = None
    step: str | None = None
    out: int | str | None = None  # None: as in calls that do not cache
    positions: tuple[str, str] | None = None


@dataclass(frozen=True)
class Reading:
    """The way to call a target, and the meaning of its numbers.

    form "attention": (q, k, v[, mask]), attention proper without projections of its own.
    form "self": forward(x); "cross": forward(x, context); "qkv": forward(query, key, value), each projected inside.
    form "tokens": a whole model, of token numbers.

    Example:
        >>> import torch, saccade
        >>> from saccade.verification import Reading
        >>> attention = torch.nn.functional.scaled_dot_product_attention
        >>> how = Reading("attention", layout="BHLD", width=16, heads=4, kv_heads=4)
        >>> saccade.verify(attention, causal=False, how=how, checks=["scale"], isolated=False).ok
        True
    """

    form: Form
    layout: str  # of each input: "BHLD" "BLHD" "BLD" "LBD" "LD" "HLD"; "BL" for tokens
    width: int  # D of attention proper, else the model width; of tokens: 0
    heads: int | None = None  # of attention proper: those to give; of modules: those known
    kv_heads: int | None = None
    value_width: int | None = None  # Dv of attention proper, of form "qkv" the input's; None: as the keys
    context_width: int | None = None  # of form "cross" and "qkv", None: the same
    names: tuple[str, ...] = ()  # keywords of the inputs; empty: given by place
    out: int | str | None = None  # place in the returned tuple, attribute or key; None: what is returned is the output
    out_layout: str | None = None  # None: as the inputs
    weights: int | str | None = None  # where attention weights are, if they are returned
    weights_axes: str = "BHQK"  # or "BQK", "BHKQ", "HQK", "QK"
    masks: tuple[MaskReading, ...] = ()
    own_masks: tuple[MaskReading, ...] = ()  # of form "cross": of the queries' own sequence, Q and K both of it
    causal_flag: str | None = None  # a boolean argument that makes it causal (`is_causal`)
    constants: dict[str, Any] = field(default_factory=dict)  # other keywords of every call
    cache: CacheReading | None = None
    unread_cache: str = ""  # of a cache that seems to be there and that no trial could use: why, in words
    max_length: int | None = None  # the longest input that is known to be taken
    only_length: int | None = None  # the one length that is taken; checks that need another are not measured
    vocabulary: int = 0  # of form "tokens"
    # of a whole model: how many inputs before its own its layers see by its configuration, None: all
    windows: frozenset[int | None] = frozenset((None,))
    assumed: tuple[str, ...] = ()  # in words, for the report
    call: Any = None  # an adapter, called instead of the target with the target first: see `saccade.verify`


_LENGTH = 19  # of the context, whatever the input's: a mask of the own sequence fits nothing else


@dataclass(frozen=True)
class WithContext:
    """Calls the target with a context of random numbers, the same for each batch item and in each call."""

    name: str | None  # None: by place
    width: int
    is_sequence_first: bool
    call: Any = None

    def __call__(self, target: Any, *places: Any, **keywords: Any) -> Any:
        first = next(tensor for tensor in (*places, *keywords.values()) if isinstance(tensor, Tensor))
        context = self._context(first)
        if self.name is None:
            places = (*places[:1], context, *places[1:])
        else:
            keywords[self.name] = context
        return target(*places, **keywords) if self.call is None else self.call(target, *places, **keywords)

    def _context(self, first: Tensor) -> Tensor:
        batch = first.shape[1 if self.is_sequence_first else 0]
        generator = torch.Generator().manual_seed(7)
        drawn = torch.randn(1, _LENGTH, self.width, generator=generator).to(first.device, first.dtype)
        drawn = drawn.expand(batch, -1, -1)
        return (drawn.transpose(0, 1) if self.is_sequence_first else drawn).contiguous()


def own_part(reading: Reading) -> Reading:
    """A reading of form "cross" with the context filled in: form "self", with the masks of the queries' sequence."""
    name = reading.names[1] if reading.names else None
    call = WithContext(name, reading.context_width or reading.width, reading.layout == "LBD", reading.call)
    return replace(
        reading,
        form="self",
        masks=reading.own_masks,
        own_masks=(),
        names=reading.names[:1],
        context_width=None,
        weights=None,
        cache=None,
        call=call,
    )
