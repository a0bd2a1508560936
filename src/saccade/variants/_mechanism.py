"""What a mechanism is: how queries read keys and values, as a value that configures it and a module that does it.

Shape legend: B batch, Hq / Hkv query and key-value heads (query head h reads h // (Hq // Hkv)), Lq / Lk lengths,
D key width, Dv value width, E model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from .._masks import Mask


class HeadSizes(NamedTuple):
    """The sizes of the attention that a mechanism stands in."""

    width: int  # E, of the tokens that the heads were projected from
    heads: int  # Hq, as the mechanism gets them
    kv_heads: int  # Hkv, likewise
    head: int  # D, of queries and keys
    value_head: int  # Dv


@dataclass(frozen=True)
class Traits:
    """What a mechanism can do. Where it cannot, the reason stands in place of True: a sentence for error and table.

    Args:
        paper: authors, title, year.
        computes: "softmax" (exactly that, of the keys it looks at), "approximation" of it, or "other".
        causal: tokens that see nothing later, in training, all at once.
        bidirectional: tokens that see the whole sequence.
        cross: keys from another sequence than the queries.
        masks: any mask; otherwise no more than `Causal()`, `Padding(...)` and both.
        cached: decodes with keys and values in an ordinary cache, equal to the parallel form.
        recurrent: decodes with a state of fixed size (`Recurrent`).
        grouped: fewer key-value heads than query heads.
        takes: arguments of `saccade.attention` it knows besides: "bias", "scale", "softcap", "sink", "dropout".
        time, memory: of a forward pass, in L (length), d (head width) and its own parameters; forward and backward
            together keep that memory.
        choose, avoid: one sentence each: when it is the right one, and when it is not.
    """

    paper: str
    computes: str
    time: str
    memory: str
    choose: str
    avoid: str
    causal: bool | str = True
    bidirectional: bool | str = True
    cross: bool | str = True
    masks: bool | str = True
    cached: bool | str = True
    recurrent: bool | str = False
    grouped: bool | str = True
    takes: tuple[str, ...] = ()


class Mechanism(nn.Module, ABC):
    """How queries read keys and values. (B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv) -> (B, heads, Lq, Dv)."""

    calls_are_maps: ClassVar[bool] = False
    """Whether its calls of `saccade.attention` are maps from its queries to its keys, which watching may show."""

    @property
    def summed_block(self) -> int | None:
        """Tokens in a block whose sum of keys a cache keeps and hands over as the option `sums`; None: no sums."""
        return None

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None = None, **options: Any) -> Tensor:
        """Read.

        Args:
            query: (B, Hq, Lq, D).
            key: (B, Hkv, Lk, D).
            value: (B, Hkv, Lk, Dv).
            mask: who sees whom, True = attend; None shows everything.
            **options: those in `Traits.takes`, as in `saccade.attention`; and `tokens` (B, Lq, E), what the heads were
                projected from, where `MechanismConfig.reads_tokens`.

        Raises:
            ValueError: a mask that the mechanism cannot honour (the message says why), sizes that do not fit.
        """

    def begin_from(self, projections: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Asked once the (weight, bias) of queries, keys and values were drawn: a mechanism may begin as they do."""


State = Sequence[Tensor]
"""What a recurrent mechanism remembers: a NamedTuple of tensors, the batch first in each."""


class Recurrent(Mechanism):
    """A causal mechanism whose past fits into a state of fixed size."""

    @abstractmethod
    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None, mask: Mask | None = None) -> Any:
        """Read new tokens after those in the state, causally: equal to `forward` over all of them with `Causal()`.

        Args:
            query: (B, Hq, L, D), any number of new tokens.
            key, value: (B, Hkv, L, D) and (B, Hkv, L, Dv) of the same tokens.
            state: what an earlier step gave; None: nothing came before. It is not changed.
            mask: `Padding` of the new tokens, or None. Padded ones leave no trace in the state.

        Returns:
            (out (B, heads, L, Dv), the state after these tokens).

        Raises:
            ValueError: a state of another shape, dtype or device; a mask that says more.
        """


@dataclass(frozen=True)
class MechanismConfig(ABC):
    """A mechanism as a frozen value, for `saccade.nn.AttentionConfig(mechanism=...)`."""

    name: ClassVar[str]  # as the command line and tables call it
    traits: ClassVar[Traits]
    maps: ClassVar[int] = 1  # query-key pairs of heads for each head of values (differential attention: 2)
    shares_key: ClassVar[bool] = False  # keys are the queries: there is no projection to keys (Reformer)
    reads_tokens: ClassVar[bool] = False  # `forward` gets `tokens` too

    @classmethod
    def usual(cls, length: int) -> MechanismConfig:
        """As its paper sets it, for sequences of up to `length` tokens: what comparisons take where nothing is said."""
        return cls()

    @abstractmethod
    def build(self, heads: HeadSizes) -> Mechanism:
        """The module, with its parameters drawn; ValueError where it does not fit these heads."""

    def at_depth(self, layer: int) -> MechanismConfig:
        """The same in that layer of a stack, counted from 0."""
        return self
