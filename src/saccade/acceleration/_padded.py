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
from .._derived import WHOLE, Snapshot
from ..batching.packing import has_holes, real_row
from ._proof import next_proof, same
from ._spots import GRADIENTS, INTERRUPTED, NOT_CALLED, PROVED, Spot, is_spot
from ._structure import Structure
from ._thread import THREAD, AttentionOfTokens, NotOfTokens

_MOST = 0.9  # share of real tokens above which nothing is gained
_NO_PADDING = f"no padded batch came ({1 - _MOST:.0%} padding or more, and no other mask)"
_HIDDEN = ("hidden_states", "src")
_MASKS = ("attention_mask", "src_key_padding_mask")


_MIXING = (
    *(
        nn.modules.conv._ConvNd,
        nn.RNNBase,
        nn.modules.batchnorm._NormBase,
        nn.GroupNorm,
        nn.Fold,
        nn.Unfold,
        nn.Upsample,
    ),
    *(
        kind
        for name, kind in vars(nn.modules.pooling).items()
        if name.endswith(tuple("123d")) and isinstance(kind, type)
    ),
)


@dataclass(frozen=True, eq=False)
class Tokens:
    """The real tokens of one batch.

    Attributes:
        real: bool (B, L).
        places: int64 (T,), b * L + l of each.
        items: how many of the batch have one or more.
        attention: what the calls of attention of a packed row mean.
    """

    real: Tensor
    places: Tensor
    items: int
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
        self._mask: tuple[Snapshot, Tokens | None] | None = None
        self._last: tuple[Any, Snapshot, Tensor] | None = None  # an output (B, L, E), and the tokens it was made of

    def tokens(self, mask: Tensor, name: str, batch: int, length: int) -> Tokens | None:
        """Of the batch with this mask; None where it is computed as it is."""
        known = self._mask
        if known is None or not known[0].holds(mask, WHOLE if mask.is_inference() else batch * length):
            snapshot = Snapshot(mask)
            tokens = _tokens(mask, batch, length) if name == _MASKS[0] else _of_padding(mask)
            self._mask = known = snapshot, tokens
        return known[1]

    def taken(self, hidden: Tensor, tokens: Tokens) -> Tensor:
        """(1, T, E): what the layer before gave is there already."""
        last, self._last = self._last, None
        ready = last is not None and last[0]() is hidden and last[1].holds(hidden.flatten(0, 1), 0)
        return last[2] if last is not None and ready else tokens.take(hidden)

    def put(self, out: Tensor, tokens: Tokens) -> Tensor:
        whole = tokens.put(out)
        if not whole.is_inference():  # in-place changes of such are not counted
            self._last = weakref.ref(whole), Snapshot(whole.flatten(0, 1), brief=True), out
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
        self._proved_for = 0  # tokens

    def parts(self) -> list[nn.Module]:
        return list(self.module.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.state not in (NOT_CALLED, PROVED):
            return self.plain(*args, **kwargs)
        given = self._given(args, kwargs)
        if isinstance(given, str):
            self._refuse(given)
            return self.plain(*args, **kwargs)
        if not self.structure.intact():  # an adapter, perhaps, which may do to each token the same
            self.state, self.structure, self._watched = NOT_CALLED, Structure(self.parts(), is_spot), self.parts()[1:]
        tokens = given.tokens
        if self.state == PROVED and len(tokens.places) > 2 * self._proved_for:
            self.state = NOT_CALLED  # what reaches far does not reach another item before items are long
        if self.state == NOT_CALLED:
            return self._prove(given, args, kwargs)
        out = self._of_tokens(given)
        if out is None:
            return self.plain(*args, **kwargs)
        whole = self.padded.put(out[0], tokens)
        if self._due():
            first = self._first(self._again(args, kwargs))
            if self._prove_again(out[0], tokens.take(first)) is not out[0]:
                whole = first
        return (whole, *out[1]) if out[2] else whole

    def _prove(self, given: PackedArguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's own result. Items can only be seen to read each other where there are two."""
        expected = self.plain(*args, **kwargs)
        if given.tokens.items < 2:
            self._refuse("is proved by a padded batch of two texts or more")
            return expected
        out = self._of_tokens(given)
        if out is not None and self._agrees(out[0], expected, given.tokens):
            drawn = given.with_hidden(_drawn_like(given.hidden))
            packed, plain = self._of_tokens(drawn), self.plain(*drawn.args, **drawn.kwargs)
            if packed is not None and self._agrees(packed[0], plain, given.tokens):
                self.state, self._calls_left = PROVED, next_proof()
                self._proved_for = len(given.tokens.places)
        return expected

    def _agrees(self, out: Tensor, expected: Any, tokens: Tokens) -> bool:
        fine = same(out, tokens.take(self._first(expected)), self.longest)
        if not fine:
            self.state = "is not the same for each token but for its attention"
        return fine

    @staticmethod
    def _first(out: Any) -> Any:
        return out[0] if isinstance(out, tuple) else out

    def _of_tokens(self, given: PackedArguments) -> tuple[Tensor, tuple[Any, ...], bool] | None:
        """Of the row of tokens: the result, what is beside it, whether it came as a tuple. None sets the state."""
        tokens, before = given.tokens, given.tokens.attention.calls
        try:
            with THREAD.attending(tokens.attention):
                out = self.plain(*given.packed_args, **given.packed_kwargs)
            if tokens.attention.calls == before:
                raise NotOfTokens("calls no F.scaled_dot_product_attention")
        except NotOfTokens as error:
            self.state = str(error)
            return None
        except Exception as error:  # it may read sizes that a row of tokens has not: the model shall not notice
            self.state = f"raises {type(error).__name__} on a row of tokens"
            return None
        first, rest = (out[0], out[1:]) if isinstance(out, tuple) and out else (out, ())
        fits = isinstance(first, Tensor) and first.shape[:2] == (1, len(tokens.places))
        if not fits or any(x is not None for x in rest):
            self.state = "gives more than a tensor of tokens"
            return None
        return first, rest, isinstance(out, tuple)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedArguments | str:
        """The arguments with their tokens in a row; or why the layer is called as it is."""
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
        if mask is None or not is_plain(mask[1]):  # a mask that is a value, as "saccade" takes it, has no memory
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
        try:
            return PackedArguments(args, kwargs, hidden, mask[1], tokens, self.padded.taken(hidden, tokens))
        except _Unknown:
            return "was called with an argument that is not of its tokens (a cache, a bias between tokens)"


class PackedArguments:
    """A call of a layer, and the same of its real tokens in one row.

    Attributes:
        args, kwargs: as they came; `packed_args` and `packed_kwargs` with the tokens in a row.
        hidden: (B, L, E), `row` (1, T, E) its real tokens. mask: which says what is real; `tokens` is read from it.
    """

    def __init__(self, args: Any, kwargs: Any, hidden: Tensor, mask: Tensor, tokens: Tokens, row: Tensor):
        self.args, self.kwargs, self.hidden, self.mask, self.tokens, self.row = args, kwargs, hidden, mask, tokens, row
        self.packed_args = [self._packed(x) for x in args]
        self.packed_kwargs = {name: self._packed(x) for name, x in kwargs.items()}

    def with_hidden(self, hidden: Tensor) -> PackedArguments:
        """The same call with another (B, L, E)."""
        args = [hidden if x is self.hidden else x for x in self.args]
        kwargs = {name: hidden if x is self.hidden else x for name, x in self.kwargs.items()}
        return PackedArguments(args, kwargs, hidden, self.mask, self.tokens, self.tokens.take(hidden))

    def _packed(self, x: Any) -> Any:
        if x is self.mask:
            return None
        if x is self.hidden:
            return self.row
        if isinstance(x, tuple):
            return tuple(map(self._packed, x))
        if not isinstance(x, Tensor):
            if x is None or isinstance(x, bool | int | float | str):
                return x
            raise _Unknown
        if x.shape == self.hidden.shape:
            raise _Unknown  # another sequence, perhaps, of as many tokens: what is padding in it nobody said
        batch, length, _ = self.hidden.shape
        if x.dim() > 1 and x.shape[1] == length and x.shape[0] in (1, batch):
            return self.tokens.take(x)
        raise _Unknown


def mixes_tokens(layer: nn.Module) -> bool:
    """Whether a part of a layer is of a class that reads several tokens at once, beside its attention."""
    return any(isinstance(part, _MIXING) for part in layer.modules())


def _drawn_like(hidden: Tensor) -> Tensor:
    """Random numbers of the same size: the hidden states of a proof may happen to be zero or alike."""
    size = hidden.float().square().mean().sqrt().clamp(1e-3, 1e3)
    return (torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)) * size).to(hidden.dtype)


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
    return Tokens(real, places, int(real.any(1).sum()), AttentionOfTokens(documents, len(places), causal))
