"""`intervene(model, {layers: edits})`: the attention calls of a model, changed while a block runs."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from ...operator._call import ObservedCall
from ...operator._masks._data import describe
from ...operator._observers import padding_in_place
from ..monitoring import CallSite
from ..monitoring._record import StepCounts
from ..monitoring._walk import ModuleHook, ModuleWalk, is_compiled
from ..monitoring.calls._thread import edited_by
from ..monitoring.calls._transformers import attention_functions
from ._answer import BlockEdits, EditsOfCall, RowCounts
from ._checkpoints import Repeating, repeated_with
from ._edit import Edit

Layers = int | str


class CallName(NamedTuple):
    """A key for the call of exactly this name, if there is one. A string also matches other calls of its module."""

    name: str


class NoCall(ValueError):
    """Edits matched no call of a model: whether it has calls, and those that could not be reached, as text."""

    def __init__(self, message: str, *, there: bool = False, lost: str = "") -> None:
        super().__init__(message)
        self.there, self.lost = there, lost


class Intervention(StepCounts):
    """Edits that change a model's calls while its block runs. `saccade.intervene` returns it.

    It is a context manager; a second block continues the counts.

    Attributes:
        changed: by call name, how many calls were changed.
        unobserved: by name, calls that could not be reached: how often, and why.
        steps: forwards of the model, or of a module within it that was called by itself.

    Example:
        >>> import torch, saccade
        >>> model = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> with saccade.intervene(model, {0: saccade.intervention.Ablate([1])}) as run:
        ...     _ = model(torch.randn(2, 5, 16)), model(torch.randn(2, 7, 16))
        >>> list(run.changed.values()), run.steps
        ([2], 2)
    """

    edits_calls = True
    may_idle = False  # whether a block without a run of the model is allowed

    def __init__(self, model: nn.Module, edits: Sequence[tuple[Layers | CallName, Edit]]) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {describe(model)}")
        if isinstance(model, torch.jit.ScriptModule):
            raise ValueError("model is TorchScript, whose calls cannot be changed: use the module it was made from")
        super().__init__()
        self._model, self._edits = model, edits
        self.changed: dict[str, int] = {}
        self._rows = RowCounts()
        self._unmet = dict.fromkeys(key for key, _ in edits if not isinstance(key, CallName))
        self._seen: dict[str, CallSite] = {}
        self._walk = ModuleWalk(model, 1, self)

    def __enter__(self) -> Intervention:
        stack = self._walk.enter("intervene", padding_in_place(), repeated_with(self))
        edited_by(EditsOfCall)
        self._rows = RowCounts()
        if not is_compiled(self._model):  # compiled models may compile their hooks, too
            stack.callback(self._model.register_forward_hook(ModuleHook(self._whole_forward, "")).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._walk.leave()
        if kind is None:
            self._all_met()
            self._all_reached()

    def now(self) -> Repeating:
        place, rows = self._walk.place(), self._rows.copy()

        @contextlib.contextmanager
        def repeating() -> Iterator[None]:
            with padding_in_place(), attention_functions(), repeated_with(self), self._walk.repeat(place):
                before, self._rows = self._rows, rows.copy()
                try:
                    yield
                finally:
                    self._rows = before

        return repeating

    @property
    def module(self) -> nn.Module | None:
        return self._walk.module

    def missed(self, name: str, reason: str) -> None:
        if not self._walk.repeating:
            super().missed(name, reason)

    def missing(self, what: str, reason: str) -> Callable[[], None]:
        if self._walk.hidden:
            return lambda: None
        return functools.partial(self.missed, f"{self._walk.path}: {what}" if self._walk.path else what, reason)

    def observe(self, call: ObservedCall) -> None:
        pass

    def not_shown(self, source: str, reason: str) -> None:
        pass

    def edits(self, source: str) -> tuple[BlockEdits, ...]:
        if self._walk.hidden:
            return ()
        site = self._walk.site(source)
        self._seen[site.name] = site
        for key in [key for key in self._unmet if fits(site, key)]:
            del self._unmet[key]
        edits = self._at(site)
        if edits and not self._walk.repeating:
            self.changed[site.name] = self.changed.get(site.name, 0) + 1
        return (BlockEdits(edits, site, self._rows),) if edits else ()

    def _at(self, site: CallSite) -> tuple[Edit, ...]:
        return tuple(edit for key, edit in self._edits if fits(site, key))

    def _whole_forward(self, *_: Any) -> None:
        if self._walk.here and not self._walk.repeating:
            self._all_met()

    def _all_met(self) -> None:
        """ValueError if edits matched no call."""
        if not self._unmet:
            return
        lost = "; ".join(f"{name or 'the model'}: {what.reason}" for name, what in self.unobserved.items())
        lost = f". Not reached: {lost}" if lost else ""
        if not self.steps and self.may_idle:
            return
        if not self.steps:
            raise ValueError(
                "intervene: nothing was changed, as no forward of the model ran inside the block on this thread "
                f"(a model compiled by torch.compile runs past it: run the original module){lost}"
            )
        names = ", ".join(repr(key) for key in self._unmet)
        there = ", ".join(name or "'' (the model's own)" for name in self._seen) or "none"
        hint = self._heads_named()
        message = f"intervene: no attention call matches {names}{hint}; there are {there}{lost}"
        raise NoCall(message, there=bool(self._seen), lost=lost)

    def _heads_named(self) -> str:
        """A hint for keys such as 1.4, meant as layer.head."""
        named = (re.fullmatch(r"(\d+)\.(\d+)", str(key)) for key in self._unmet)
        match = next(filter(None, named), None)
        if match is None:
            return ""
        return f"; a key names a layer, and heads go into the edit, as {{{match[1]}: Ablate([{match[2]}])}}"

    def _all_reached(self) -> None:
        """ValueError if edits are for positions that no text of the block has."""
        for name, end in self._rows.ends.items():
            for edit in self._at(site := self._seen[name]):
                lost = edit._unreached(site, end)
                if lost is not None:
                    raise ValueError(lost)


def intervene(model: nn.Module, edits: Mapping[Layers, Edit | Sequence[Edit]]) -> Intervention:
    """Change the attention calls of a model while a block runs.

    All calls that `saccade.watch` observes can be changed: calls of Saccade's modules, of
    F.scaled_dot_product_attention, of nn.MultiheadAttention, of Hugging Face models with any attention implementation,
    and attention written by hand. Calls that cannot be reached are listed under `unobserved`. Gradients flow through
    the edited calls. After the block, also after an exception, the model is as before; other threads are not affected.

    Edits are exact, in linear memory: masks, scales and biases of some heads are values, and heads that are ablated or
    patched completely are not computed (on a CPU in float32, bfloat16 and float16). Attention written by hand stays
    dense.

    Blocks nest; the outer block's edits come first, and a `watch` sees the calls as they are computed. A call with
    edits may be computed by another kernel than without, with other rounding. `observe=` and `return_weights=True` of
    Saccade's modules show a call without edits.

    A region that `torch.utils.checkpoint` repeats in a backward pass is repeated with its edits, also after the block.
    Within the block, models of `saccade.models` compute padding as well, so that items and positions are those of the
    batch.

    Args:
        model: the module whose forwards are changed.
        edits: by layers, one edit or several, which are applied in their order: `Ablate`, `Scale`, `EditMask`,
                `EditBias`, `Weights`, `Patch`, `Freeze` of `saccade.intervention`. Layers are a call's name or path as
                in `watch`, a pattern of these (* and ? as in file names), or a part of the path between dots:
                "layers.3" matches "model.layers.3.self_attn". An int is the `layer` of a `CallSite`, the first number
                in the path: 1 matches "encoder.blocks.1.attention", but in an nn.Sequential "0.blocks.1.attention" is
                layer 0.

    Returns:
        A context manager, an `Intervention`.

    Raises:
        TypeError: a model that is not a module, or an edit of another type.
        ValueError: no edits, layers that match no call (at the end of the forward; the existing calls are listed),
            heads that a call does not have, or a call that cannot be changed.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> model = saccade.nn.Encoder(config, layers=2)
        >>> with saccade.intervene(model, {"blocks.1": saccade.intervention.Ablate(heads=[0, 2])}) as run:
        ...     out = model(torch.randn(2, 5, 16))
        >>> run.changed, run.unobserved
        ({'blocks.1.attention': 1}, {})
    """
    if not isinstance(edits, Mapping):
        raise TypeError(f"edits must be a dict of layers and edits, got {describe(edits)}")
    if not edits:
        raise ValueError("edits must hold at least one edit, got none")
    pairs: list[tuple[Layers, Edit]] = []
    for layers, given in edits.items():
        if isinstance(layers, bool) or not isinstance(layers, (int, str)):
            raise TypeError(f"edits: layers must be a number, name or path, got {describe(layers)}")
        several = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
        wrong = [edit for edit in several if not isinstance(edit, Edit)]
        if wrong or not several:
            got = describe(wrong[0]) if wrong else "none"
            raise TypeError(f"edits: {layers!r} must have edits, such as Ablate([0]), got {got}")
        pairs += [(layers, edit) for edit in several]
    return Intervention(model, pairs)


def fits(site: CallSite, wanted: Layers | CallName) -> bool:
    """Whether a key of the edits matches a call."""
    if isinstance(wanted, CallName):
        return site.name == wanted.name
    if isinstance(wanted, int):
        return site.layer == wanted
    if fnmatchcase(site.name, wanted) or fnmatchcase(site.path, wanted):
        return True
    return f".{wanted}." in f".{site.path}."
