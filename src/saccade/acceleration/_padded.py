"""Computes layers only on the real tokens of a padded batch.

A layer does to each token the same, but for its attention, which is F.scaled_dot_product_attention's. So the real
tokens of all items can stand in one row, each seeing its own item: padding costs nothing (Krell et al., "Efficient
Sequence Packing without Cross-contamination", 2021). Whether a layer is like that its first call tells, which is
computed both ways.

Shape legend: B batch, L length, T real tokens, E width.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..operator import _observers
from ..operator._backends.native._run import interrupted, is_plain
from ..operator._derived import Snapshot, state
from ..operator._products import unrounded
from ._effects import CHANGES, Effects, same_random_numbers
from ._fused_layers import ARGUMENTS, GRADIENTS, INTERRUPTED, NOT_CALLED, PROVED, FusedLayer, is_replacement
from ._proof import same
from ._structure import Structure
from ._thread import THREAD, NotOfTokens
from ._tokens import MOST, TokenRows, tokens_of_mask, tokens_of_padding

_NO_PADDING = f"no padded batch came ({1 - MOST:.0%} padding or more, and no other mask)"
_OTHER_PADDING = "was called with other padding than the layer before it"
_UNKNOWN = "was called with an argument that is not of its tokens (a cache, a bias between tokens)"
_STEPS = 256  # layers that are computed again at most, where one asks for their padding
_HIDDEN = ("hidden_states", "src")
_MASKS = ("attention_mask", "src_key_padding_mask")


@dataclass(frozen=True, eq=False)
class PackedRows:
    """A layer's output for the real tokens in one row, and how to compute the padded output.

    Attributes:
        given: the output (B, L, E), 0 at padding. rows, state: the output as (B L, E), and its contents.
        row: (1, T, E). tokens: the real tokens.
        first: the input (B, L, E) of the first layer that was computed in a row, and `steps` all layers since then.
    """

    given: weakref.ref[Tensor]
    rows: Tensor
    state: Snapshot
    row: Tensor
    tokens: TokenRows
    first: Tensor
    steps: tuple[Callable[[Tensor], Tensor], ...]

    def whole(self) -> Tensor:
        """The output (B, L, E), with the values at padding that the original layers compute."""
        hidden = self.first
        with THREAD.held.uncounted(), same_random_numbers():
            for step in self.steps:
                hidden = step(hidden)
        return hidden


class Padded:
    """State shared by the layers of a model: the batch's real tokens and the output of the previous layer."""

    def __init__(self) -> None:
        self._mask: tuple[Tensor, Any, TokenRows | None] | None = None
        self._last: PackedRows | None = None

    def tokens(self, mask: Tensor, name: str, batch: int, length: int) -> TokenRows | None:
        """The real tokens of a batch with this mask; None if the batch is computed with its padding."""
        known, now = self._mask, (name, batch, length, mask.dtype, mask.shape, mask.stride(), state(mask))
        if known is None or known[0].data_ptr() != mask.data_ptr() or known[1] != now:
            tokens = tokens_of_mask(mask, batch, length) if name == _MASKS[0] else tokens_of_padding(mask)
            self._mask = known = mask.detach(), now, tokens
        return known[2]

    def packed(self, hidden: Any) -> PackedRows | None:
        """The packed output of the previous layer, if `hidden` is that output and unchanged."""
        last = self._last
        if last is None or not isinstance(hidden, Tensor) or last.given() is not hidden:
            return None
        same_memory = hidden.data_ptr() == last.rows.data_ptr()
        return last if same_memory and last.state.holds(last.rows, 0) else None

    def taken(self, hidden: Tensor, tokens: TokenRows) -> Tensor:
        """The real tokens of `hidden` in one row (1, T, E), from the previous layer if it has them."""
        last = None if hidden.is_inference() else self.packed(hidden)  # in-place changes of such are not counted
        return last.row if last is not None and last.tokens is tokens else tokens.take(hidden)

    def put(self, out: Tensor, given: PackedArguments, step: Callable[[Tensor], Tensor]) -> Tensor:
        last, whole = self.packed(given.hidden), given.tokens.put(out)
        before = (given.hidden, ()) if last is None or len(last.steps) >= _STEPS else (last.first, last.steps)
        rows = whole.flatten(0, 1)
        state = Snapshot(rows, brief=True)
        self._last = PackedRows(weakref.ref(whole), rows, state, out, given.tokens, before[0], (*before[1], step))
        return whole

    def forget(self) -> None:
        self._last = self._mask = None


class LayerStack:
    """Consecutive layers. A packed layer gives 0 at padding, so the next layer needs the same mask.

    Attributes:
        layers: the layers that may be computed in a row.
        whole: layers that read padding in their last call. While there are any, no layer is computed in a row.
    """

    def __init__(self, padded: Padded):
        self.padded = padded
        self.layers: list[PaddedLayer] = []
        self.whole: set[PaddedLayer] = set()
        self._before = self._now = _PaddedCall(-1)

    def enter(self, place: int) -> None:
        """Record that the layer with this index is called."""
        self._before, self._now = self._now if self._now.place < place else _PaddedCall(-1), _PaddedCall(place)

    def follows(self, hidden: Tensor, tokens: TokenRows | None) -> bool:
        """Whether this layer receives the padded output of the previous layer."""
        self._now.tokens = tokens
        last = self.padded.packed(hidden)
        alike = last is None or _alike(last.tokens, tokens)
        return alike and (self._before.place < 0 or _alike(self._before.tokens, tokens))

    def put(self, out: Tensor, given: PackedArguments, plain: Callable[..., Any]) -> Tensor:
        self._now.packed = True
        return self.padded.put(out, given, given.step(plain))

    def whole_of(self, hidden: Any) -> Any:
        """Hidden states (B, L, E) with the values at padding that the previous layers compute."""
        last = self.padded.packed(hidden)
        if last is not None:
            return last.whole()
        if self._before.packed:
            self.refuse("stands beside a layer that reads padding")
            warnings.warn(
                "saccade.accelerate(): a layer reads padding that the layers before it left out. It is computed "
                "from now on; the output of this call may be wrong",
                RuntimeWarning,
                stacklevel=2,
            )
        return hidden

    def refuse(self, reason: str) -> None:
        for layer in self.layers:
            if layer.state in (NOT_CALLED, PROVED):
                layer.state = reason


def _alike(a: TokenRows | None, b: TokenRows | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a.real, b.real))


@dataclass
class _PaddedCall:
    place: int
    tokens: TokenRows | None = None
    packed: bool = False


class PaddedLayer(FusedLayer):
    """One layer of a stack, computed on the real tokens in one row."""

    kind = "layer without padding"

    def __init__(self, name: str, module: nn.Module, stack: LayerStack):
        super().__init__(name, module)
        self.padded, self.stack, self.place = stack.padded, stack, len(stack.layers)
        stack.layers.append(self)
        self.names = tuple(inspect.signature(self.plain).parameters)
        self._proved_for = 0  # tokens

    def parts(self) -> list[nn.Module]:
        return list(self.module.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not THREAD.held.on:  # attention is answered on that thread alone
            self._refuse("was called on another thread")
            return self.plain(*args, **kwargs)
        self.stack.enter(self.place)
        if self.state not in (NOT_CALLED, PROVED):
            return self._whole(args, kwargs)
        given = self._given(args, kwargs)
        if not isinstance(given, str):
            return self._in_a_row(given, args, kwargs)
        self._refuse(given)
        reads_padding = self.state != PROVED or given in (_OTHER_PADDING, _UNKNOWN, ARGUMENTS)
        return self._whole(args, kwargs) if reads_padding else self.plain(*args, **kwargs)

    def _in_a_row(self, given: PackedArguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.structure.intact():  # an adapter, perhaps, which may do to each token the same
            self.state, self._watched = NOT_CALLED, self.parts()[1:]
            self.structure = Structure(self.parts(), is_replacement)
        tokens = given.tokens
        # What reaches far does not reach another item before items are long.
        if len(tokens.places) > 2 * self._proved_for or not self.structure.keeps_values():
            self.state = NOT_CALLED
        if self.state == NOT_CALLED:
            return self._prove(given, *self._with_padding(args, kwargs))
        self.stack.whole.discard(self)
        out = None if self.stack.whole else self._of_tokens(given, self.plain)
        if out is None:
            return self.plain(*args, **kwargs) if self.state == PROVED else self._whole(args, kwargs)
        new = self._new_size(*self._size(tokens))  # for which it may have another rule, and its row has another length
        if not (self._due() or new) or self._same_again(given, args, kwargs):
            whole = self.stack.put(out[0], given, self.plain)
        else:
            args, kwargs = self._with_padding(args, kwargs)
            whole = self._first(self._again(args, kwargs))
            with unrounded():
                row, exact = self._of_tokens(given, self.plain), self._first(self._again(args, kwargs))
                self._prove_again(out[0] if row is None else row[0], tokens.take(exact), new)
            self.stack.whole.add(self)
        return (whole, *out[1]) if out[2] else whole

    def _same_again(self, given: PackedArguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        with THREAD.held.uncounted(), unrounded():
            row = self._of_tokens(given, self.plain)
            return row is not None and same(
                row[0], given.tokens.take(self._first(self._again(args, kwargs))), self.longest
            )

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's original output, which may depend on padding."""
        self.stack.whole.add(self)
        args, kwargs = self._with_padding(args, kwargs)
        return self.plain(*args, **kwargs)

    def _with_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = dict(zip(self.names, args, strict=False)) | kwargs
        hidden: Any = next((named[name] for name in _HIDDEN if name in named), None)
        whole = self.stack.whole_of(hidden)
        given = tuple(whole if x is hidden else x for x in args)
        return given, {name: whole if x is hidden else x for name, x in kwargs.items()}

    def _prove(self, given: PackedArguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compare both computations and return the original output. A leak between items shows only in two or more."""
        expected = self._observed(args, kwargs)
        self.stack.whole.add(self)
        if given.tokens.items < 2 or len(given.tokens.places) == given.tokens.real.shape[1]:
            self._refuse("is proved by a padded batch of two texts or more, with more or fewer tokens than its length")
            return expected
        if self.state == NOT_CALLED:
            with THREAD.held.uncounted(), same_random_numbers(), unrounded():
                self._compare(given, self.plain(*args, **kwargs) if self.rounds else expected)
        if self.state == PROVED:
            self._proved_for = len(given.tokens.places)
            self._settle(*self._size(given.tokens))
            self.stack.whole.discard(self)
        elif self.state != NOT_CALLED:
            self.stack.refuse("stands beside a layer that reads padding")
        return expected

    def _compare(self, given: PackedArguments, expected: Any) -> None:
        try:
            plain = self._copy()
        except Exception as error:  # it may hold what has no copies
            self.state = f"raises {type(error).__name__} when it is copied"
            return
        effects = Effects(plain)
        out = self._of_tokens(given, plain)
        if out is None or not self._agrees(out[0], expected, given.tokens):
            return
        drawn = given.with_hidden(_drawn_like(given.hidden))
        packed, expected = self._of_tokens(drawn, plain), plain(*drawn.args, **drawn.kwargs)
        if packed is not None and self._agrees(packed[0], expected, given.tokens):
            self.state = CHANGES if effects.seen() else PROVED

    def _agrees(self, out: Tensor, expected: Any, tokens: TokenRows) -> bool:
        fine = same(out, tokens.take(self._first(expected)), self.longest)
        if not fine:
            self.state = "is not the same for each token but for its attention"
        return fine

    @staticmethod
    def _size(tokens: TokenRows) -> tuple[int, ...]:
        return *tokens.real.shape, len(tokens.places)

    @staticmethod
    def _first(out: Any) -> Any:
        return out[0] if isinstance(out, tuple) else out

    def _of_tokens(
        self, given: PackedArguments, plain: Callable[..., Any]
    ) -> tuple[Tensor, tuple[Any, ...], bool] | None:
        """Call the layer on the packed row: output, further outputs, whether it is a tuple. None sets the state."""
        tokens, before = given.tokens, given.tokens.attention.calls
        try:
            with THREAD.held.attending(tokens.attention):
                out = plain(*given.packed_args, **given.packed_kwargs)
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
        """The arguments with tokens packed into a row, or the reason why the layer is called with padding."""
        if torch.is_grad_enabled():
            return GRADIENTS
        if interrupted():
            return INTERRUPTED
        # Who looks on expects tokens where the model has them.
        if _observers.THREAD.observers:
            return "was called while its attention is observed"
        named = dict(zip(self.names, args, strict=False)) | kwargs
        hidden: Any = next((named[name] for name in _HIDDEN if name in named), None)
        mask: Any = next(((name, named[name]) for name in _MASKS if isinstance(named.get(name), Tensor)), None)
        if not is_plain(hidden) or hidden.dim() != 3:
            return ARGUMENTS
        batch, length, _ = hidden.shape
        known = mask is not None and is_plain(mask[1])  # a mask that is a value, as "saccade" takes it, has no memory
        tokens = self.padded.tokens(mask[1], mask[0], batch, length) if known else None
        if not self.stack.follows(hidden, tokens):
            return _OTHER_PADDING
        if tokens is None:
            return _NO_PADDING
        watched = self.watched()
        if watched is not None:
            return watched
        try:
            return PackedArguments(args, kwargs, hidden, mask[1], tokens, self.padded.taken(hidden, tokens))
        except _Unknown:
            return _UNKNOWN


class PackedArguments:
    """A layer's call with padding, and the same call for the real tokens in one row.

    Attributes:
        args, kwargs: as they came; `packed_args` and `packed_kwargs` with the tokens in a row.
        hidden: (B, L, E), `row` (1, T, E) its real tokens. mask: which says what is real; `tokens` is read from it.
    """

    def __init__(self, args: Any, kwargs: Any, hidden: Tensor, mask: Tensor, tokens: TokenRows, row: Tensor):
        self.args, self.kwargs, self.hidden, self.mask, self.tokens, self.row = args, kwargs, hidden, mask, tokens, row
        self.packed_args = [self._packed(x) for x in args]
        self.packed_kwargs = {name: self._packed(x) for name, x in kwargs.items()}

    def step(self, plain: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        """A function from hidden states (B, L, E) to the layer's output; it does not keep the states of this call."""
        hole = object()
        args = [hole if x is self.hidden else x for x in self.args]
        kwargs = {name: hole if x is self.hidden else x for name, x in self.kwargs.items()}

        def first(hidden: Tensor) -> Tensor:
            out = plain(
                *(hidden if x is hole else x for x in args),
                **{name: hidden if x is hole else x for name, x in kwargs.items()},
            )
            return out[0] if isinstance(out, tuple) else out

        return first

    def with_hidden(self, hidden: Tensor) -> PackedArguments:
        """The same call with other hidden states (B, L, E)."""
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


def _drawn_like(hidden: Tensor) -> Tensor:
    """Random hidden states of the same magnitude: real ones may be zero or equal and prove nothing."""
    size = hidden.float().square().mean().sqrt().clamp(1e-3, 1e3)
    return (torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)) * size).to(hidden.dtype)


class _Unknown(Exception):
    """An argument that cannot be packed by tokens, such as a cache or a bias between tokens."""
