"""A mechanism: a way for queries to read keys and values, as a configuration and the module that it builds.

Shape legend: B batch, Hq / Hkv query and key-value heads (query head h reads h // (Hq // Hkv)), Lq / Lk lengths,
D key width, Dv value width, E model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .._masks import Mask


class HeadSizes(NamedTuple):
    """The sizes of the attention layer that a mechanism is built for.

    Args:
        width: E, the width of the tokens that the heads are projected from.
        heads: Hq, the number of query heads that the mechanism gets.
        kv_heads: Hkv, the number of key-value heads that the mechanism gets.
        head: D, the width of queries and keys.
        value_head: Dv, the width of values.

    Example:
        >>> import torch, saccade
        >>> sizes = saccade.variants.HeadSizes(width=16, heads=4, kv_heads=2, head=4, value_head=4)
        >>> mechanism = saccade.variants.SigmoidConfig().build(sizes)
        >>> mechanism(torch.ones(1, 4, 3, 4), torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4)).shape
        torch.Size([1, 4, 3, 4])
    """

    width: int
    heads: int
    kv_heads: int
    head: int
    value_head: int


@dataclass(frozen=True)
class Traits:
    """The features of a mechanism: True, or the reason why one is not supported.

    An ability is True, or a sentence that says why not; error messages and the table of mechanisms show that sentence.

    Args:
        paper: authors, title, year.
        computes: "softmax" (exactly that, of the keys it looks at), "approximation" of it, or "other".
        causal: no token sees a later one, in training, all at once.
        bidirectional: tokens see the whole sequence.
        cross: keys come from another sequence than the queries.
        masks: any mask; otherwise only `Causal()`, `Padding(...)` and both.
        cached: decodes with keys and values in an ordinary cache, equal to the parallel form.
        recurrent: decodes with a state of fixed size (`Recurrent`).
        grouped: fewer key-value heads than query heads.
        takes: the other arguments of `saccade.attention` it accepts: "bias", "scale", "softcap", "sink", "dropout".
        time, memory: of a forward pass, in L (length), d (head width) and the mechanism's own parameters; forward and
            backward together keep that memory.
        choose, avoid: one sentence each: when it is the right one, and when it is not.

    Example:
        >>> import saccade
        >>> traits = saccade.variants.LinearConfig.traits
        >>> traits.computes, traits.recurrent, traits.time
        ('other', True, 'O(L M d), M features (d for elu+1)')
        >>> saccade.variants.LinformerConfig.traits.causal
        'each projected key mixes all positions, later ones too'
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
    """The base class of mechanisms: how queries read keys and values. Abstract.

    A mechanism is a module (B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv) -> (B, heads, Lq, Dv). A subclass defines
    `forward`; a `MechanismConfig` builds it.

    Example:
        >>> import torch, saccade
        >>> class Uniform(saccade.variants.Mechanism):
        ...     def forward(self, query, key, value, mask=None, **options):
        ...         return saccade.attention(torch.zeros_like(query), key, value, mask)
        >>> value = torch.tensor([1.0, 2.0, 6.0]).view(1, 1, 3, 1)
        >>> Uniform()(value, value, value).flatten()
        tensor([3., 3., 3.])
    """

    calls_are_maps: ClassVar[bool] = False
    """Whether its calls of `saccade.attention` are maps from its queries to its keys, which watching may show."""

    @property
    def summed_block(self) -> int | None:
        """Number of tokens in a block. A cache keeps the sum of the keys of each block, and passes the sums as the
        option `sums`. None if the mechanism needs no sums."""
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
        """Start from the (weight, bias) of queries, keys and values, once these are drawn. Does nothing by default."""


State = Sequence[Tensor]
"""What a recurrent mechanism remembers: a NamedTuple of tensors, the batch first in each."""


def check_state(
    state: State | None, kind: type[Any], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> None:
    """TypeError or ValueError if this is neither None nor a state of this kind, with tensors of these shapes."""
    if state is None:
        return
    if not isinstance(state, kind):
        raise TypeError(f"state: expected the {kind.__name__} of an earlier step or None, got {type(state).__name__}")
    for name, part, shape in zip(kind._fields, state, shapes, strict=True):
        if part.shape != shape:
            raise ValueError(
                f"state: expected {name} of shape {tuple(shape)} for these tokens, got {tuple(part.shape)}"
            )
        if part.dtype != dtype:
            raise ValueError(f"state: expected {name} in {dtype} for these tokens, got {part.dtype}")
        if part.device != device:
            raise ValueError(f"state: expected {name} on {device} like these tokens, got {part.device}")


class Recurrent(Mechanism):
    """The base class of causal mechanisms whose past fits into a state of fixed size. Abstract.

    Example:
        >>> import torch, saccade
        >>> sizes = saccade.variants.HeadSizes(width=4, heads=1, kv_heads=1, head=4, value_head=4)
        >>> mechanism = saccade.variants.LinearConfig().build(sizes)
        >>> isinstance(mechanism, saccade.variants.Recurrent)
        True
        >>> x = torch.rand(1, 1, 3, 4)
        >>> first, state = mechanism.step(x[:, :, :2], x[:, :, :2], x[:, :, :2])
        >>> last, state = mechanism.step(x[:, :, 2:], x[:, :, 2:], x[:, :, 2:], state)
        >>> torch.allclose(torch.cat([first, last], 2), mechanism(x, x, x, saccade.Causal()))
        True
    """

    @abstractmethod
    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None, mask: Mask | None = None) -> Any:
        """Read new tokens after those in the state, causally: equal to `forward` over all of them with `Causal()`.

        Args:
            query: (B, Hq, L, D), any number of new tokens.
            key, value: (B, Hkv, L, D) and (B, Hkv, L, Dv) of the same tokens.
            state: what an earlier step gave; None: nothing came before. It is not changed.
            mask: `Padding` of the new tokens, or None. Padded ones leave no trace in the state.
            tokens: (B, L, E), an argument only where `MechanismConfig.reads_tokens`, as in `forward`.

        Returns:
            (out (B, heads, L, Dv), the state after these tokens).

        Raises:
            ValueError: a state of another shape, dtype or device; a mask that says more.
        """


@dataclass(frozen=True)
class MechanismConfig(ABC):
    """The base class of mechanisms as frozen values, for `saccade.nn.AttentionConfig(mechanism=...)`. Abstract.

    A subclass has a `name`, its `traits`, and a `build` that makes the module.

    Example:
        >>> import torch, saccade
        >>> mechanism = saccade.variants.LinearConfig(feature_map="relu")
        >>> mechanism.name, mechanism.traits.computes
        ('linear', 'other')
        >>> config = saccade.nn.AttentionConfig(width=8, heads=2, mechanism=mechanism)
        >>> saccade.nn.MultiHeadAttention(config)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    name: ClassVar[str]  # as the command line and tables call it
    traits: ClassVar[Traits]
    maps: ClassVar[int] = 1  # query-key pairs of heads for each head of values (differential attention: 2)
    shares_key: ClassVar[bool] = False  # keys are the queries: there is no projection to keys (Reformer)
    reads_tokens: ClassVar[bool] = False  # `forward` gets `tokens` too

    @classmethod
    def usual(cls, length: int) -> MechanismConfig:
        """The settings of the paper for sequences of up to `length` tokens. Comparisons take them for unset options."""
        return cls()

    @abstractmethod
    def build(self, heads: HeadSizes) -> Mechanism:
        """The module, with its parameters drawn. Raises ValueError if it does not fit these heads."""

    def at_depth(self, layer: int) -> MechanismConfig:
        """The same mechanism in layer `layer` of a stack, counted from 0."""
        return self
