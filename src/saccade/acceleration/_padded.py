"""Layers of a padded batch, computed on its real tokens alone.

A layer does to each token the same, but for its attention, which is F.scaled_dot_product_attention's. So the real
tokens of all items can stand in one row, each seeing its own item: padding costs nothing (Krell et al., "Efficient
Sequence Packing without Cross-contamination", 2021). Whether a layer is like that its first call tells, which is
computed both ways.

Shape legend: B batch, L length, T real tokens, E width.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import _tap
from .._backends.native._run import interrupted, is_plain
from ..batching.packing import has_holes, real_row
from ._spots import GRADIENTS, INTERRUPTED, NOT_CALLED, PROVED, Spot, same
from ._thread import THREAD, AttentionOfTokens, NotOfTokens

_MOST = 0.9  # share of real tokens above which nothing is gained
_NO_PADDING = f"no padded batch came ({1 - _MOST:.0%} padding or more, and no other mask)"
_HIDDEN = ("hidden_states", "src")
_MASKS = ("attention_mask", "src_key_padding_mask")


@dataclass(frozen=True, eq=False)
class Tokens:
    """The real tokens of one batch.

    Attributes:
        real: bool (B, L).
        places: int64 (T,), b * L + l of each.
        attention: what the calls of attention of a packed row mean.
    """

    real: Tensor
    places: Tensor
    attention: AttentionOfTokens

    def take(self, x: Tensor) -> Tensor:
        """(B, L, ...) or (1, L, ...) to (1, T, ...)."""
        whole = x.expand(self.real.shape[0], *x.shape[1:])
        return whole.flatten(0, 1)[self.places][None] if x.shape[0] > 1 else x[:, self.places % self.real.shape[1]]

    def put(self, x: Tensor) -> Tensor:
        """(1, T, ...) to (B, L, ...), 0 where no real token stands."""
        batch, length = self.real.shape
        whole = x.new_zeros(batch * length, *x.shape[2:])
        return whole.index_copy_(0, self.places, x[0]).view(batch, length, *x.shape[2:])


class Padded:
    """What the layers of a model share: the tokens of the batch at hand, and what the last layer gave."""

    def __init__(self) -> None:
        self._mask: tuple[Any, int, Tokens | None] | None = None  # of which mask, in which version
        self._last: tuple[Any, Tensor] | None = None  # an output (B, L, E), and the tokens it was made of

    def tokens(self, mask: Tensor, name: str, batch: int, length: int) -> Tokens | None:
        """Of the batch with this mask; None where it is computed as it is."""
        version = 0 if mask.is_inference() else mask._version
        known = self._mask
        if known is None or known[0]() is not mask or known[1] != version:
            found = _tokens(mask, batch, length) if name == _MASKS[0] else _of_padding(mask)
            self._mask = known = weakref.ref(mask), version, found
        return known[2]

    def taken(self, hidden: Tensor, tokens: Tokens) -> Tensor:
        """(1, T, E): what the layer before gave is there already."""
        last = self._last
        return last[1] if last is not None and last[0]() is hidden else tokens.take(hidden)

    def put(self, out: Tensor, tokens: Tokens) -> Tensor:
        whole = tokens.put(out)
        self._last = weakref.ref(whole), out
        return whole

    def forget(self) -> None:
        self._last = self._mask = None


class PaddedLayer(Spot):
    """One layer of a stack, its real tokens in one row."""

    kind = "layer without padding"

    def __init__(self, name: str, module: nn.Module, padded: Padded):
        super().__init__(name, module)
        self.padded = padded
        self.names = tuple(inspect.signature(self.plain).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.state not in (NOT_CALLED, PROVED):
            return self.plain(*args, **kwargs)
        given = self._given(args, kwargs)
        if isinstance(given, str):
            self._refuse(given)
            return self.plain(*args, **kwargs)
        tokens, packed_args, packed_kwargs = given
        before = tokens.attention.calls
        try:
            with THREAD.attending(tokens.attention):
                out = self.plain(*packed_args, **packed_kwargs)
            if tokens.attention.calls == before:
                raise NotOfTokens("calls no F.scaled_dot_product_attention")
        except NotOfTokens as error:
            self.state = str(error)
            return self.plain(*args, **kwargs)
        except Exception as error:  # it may read sizes that a row of tokens has not: the model shall not notice
            self.state = f"raises {type(error).__name__} on a row of tokens"
            return self.plain(*args, **kwargs)
        first, rest = (out[0], out[1:]) if isinstance(out, tuple) and out else (out, ())
        fits = isinstance(first, Tensor) and first.shape[:2] == (1, len(tokens.places))
        if not fits or any(x is not None for x in rest):
            self.state = "gives more than a tensor of tokens"
            return self.plain(*args, **kwargs)
        if self.state == NOT_CALLED:
            expected = self.plain(*args, **kwargs)
            plainly = expected[0] if isinstance(expected, tuple) else expected
            fine = same(first, tokens.take(plainly), self.longest())
            self.state = PROVED if fine else "is not the same for each token but for its attention"
            return expected
        whole = self.padded.put(first, tokens)
        return (whole, *rest) if isinstance(out, tuple) else whole

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tokens, list[Any], dict[str, Any]] | str:
        """The tokens, and the arguments with them packed; or why the layer is called as it is."""
        if torch.is_grad_enabled():
            return GRADIENTS
        if interrupted():
            return INTERRUPTED
        # Attention is answered on the thread that is accelerated; who looks on expects tokens where the model has them.
        if not THREAD.held.on or _tap.THREAD.observers:
            return "was called on another thread, or while its attention is observed"
        named = dict(zip(self.names, args, strict=False)) | kwargs
        hidden: Any = next((named[name] for name in _HIDDEN if name in named), None)
        mask: Any = next(((name, named[name]) for name in _MASKS if isinstance(named.get(name), Tensor)), None)
        if mask is None:
            return _NO_PADDING
        if not is_plain(hidden) or hidden.dim() != 3:
            return "was called with other arguments than are known"
        watched = self.watched()
        if watched is not None:
            return watched
        batch, length, _ = hidden.shape
        tokens = self.padded.tokens(mask[1], mask[0], batch, length)
        if tokens is None:
            return _NO_PADDING

        def packed(x: Any) -> Any:
            if x is mask[1]:
                return None
            if x is hidden:
                return self.padded.taken(hidden, tokens)
            if isinstance(x, tuple):
                return tuple(packed(one) for one in x)
            if not isinstance(x, Tensor):
                if x is None or isinstance(x, bool | int | float | str):
                    return x
                raise _Unknown
            if x.shape == hidden.shape:
                raise _Unknown  # another sequence, perhaps, of as many tokens: what is padding in it nobody said
            if x.dim() > 1 and x.shape[1] == length and x.shape[0] in (1, batch):
                return tokens.take(x)
            raise _Unknown

        try:
            return tokens, [packed(x) for x in args], {name: packed(x) for name, x in kwargs.items()}
        except _Unknown:
            return "was called with an argument that is not of its tokens (a cache, a bias between tokens)"


class _Unknown(Exception):
    """An argument that says nothing about tokens: a cache, a bias between tokens."""


def _tokens(mask: Tensor, batch: int, length: int) -> Tokens | None:
    """Of a mask (B, 1, L or 1, L): True or 0 = attend. None where it says more than padding and causality."""
    if tuple(mask.shape) not in ((batch, 1, 1, length), (batch, 1, length, length)):
        return None
    if mask.dtype == torch.bool:
        seen = mask[:, 0]
    elif not mask.is_floating_point():
        return None  # numbers whose meaning the model alone knows
    else:
        seen = mask[:, 0] == 0
        if not bool((seen | (mask[:, 0] <= torch.finfo(mask.dtype).min / 2)).all()):
            return None
    real = seen.any(1)
    if seen.shape[1] == 1:
        return _packed(real, causal=False)
    whole, rows = real[:, None, :], ~real[:, :, None]
    if bool(((seen == whole) | rows).all()):
        return _packed(real, causal=False)
    causal = torch.ones(length, length, dtype=torch.bool).tril_()
    return _packed(real, causal=True) if bool(((seen == (whole & causal)) | rows).all()) else None


def _of_padding(ignored: Tensor) -> Tokens | None:
    """Of src_key_padding_mask (B, L): True or -inf = padding."""
    hidden = ignored if ignored.dtype == torch.bool else ignored == -torch.inf
    only = ignored.dtype == torch.bool or bool((hidden | (ignored == 0)).all())
    return _packed(~hidden, causal=False) if only and ignored.dim() == 2 else None


def _packed(real: Tensor, causal: bool) -> Tokens | None:
    # A hole between real tokens would close, and distances across it shrink.
    if not 0 < int(real.sum()) <= _MOST * real.numel() or has_holes(real):
        return None
    places, documents = real_row(real)
    return Tokens(real, places, AttentionOfTokens(documents, len(places), causal))
