"""Models that read text, whoever made them: tokens with their characters, and observable attention calls.

Shape legend: B texts, L tokens with the special ones, Hq query heads.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...make.models import LanguageModel
from ...make.models.checkpoints.kept_roles import KeptRoles, well_formed
from ...make.models.decoding.generating import GeneratingModel
from ...make.models.tokenizers.own import START
from ...operator._call import ObservedCall
from ...operator._weights import attention_weights
from ...operator.nn.stacks import Stack
from ...support._restored import evaluating

LayerObserver = Callable[[int, ObservedCall], None]
M = TypeVar("M", bound="TextModel")


class Tokens(NamedTuple):
    """The tokens of a text, without special tokens around it: ``ids[i]`` stands for the characters ``spans[i]``.

    Example:
        >>> from saccade.inspection import open_model
        >>> text = "The owlet sat."
        >>> tokens = open_model().encode(text)
        >>> [text[start:stop] for start, stop in tokens.spans]
        ['The', ' o', 'w', 'let', ' sat', '.']
    """

    ids: list[int]
    spans: list[tuple[int, int]]


class _LastCall(Exception):
    """All layers were observed: ends the run."""


class TextModel(ABC):
    """A model, its tokenizer, and its attention calls, layer after layer. `open_model` and `as_text_model` return one.

    The model reads ``before``, the tokens of the text, and ``after``: start tokens, [CLS] and [SEP], or nothing.
    Layers are the attention calls of one forward pass in order; a layer without attention is not counted.

    Example:
        >>> from saccade.inspection import open_model
        >>> model = open_model()
        >>> model.heads, model.causal, model.context, model.room
        ((8, 8, 8, 8), True, 256, 255)
        >>> ids = model.whole(model.encode("The cat sat.").ids)
        >>> model.run(ids, lambda layer, call: print(layer, tuple(call.query.shape)))
        0 (1, 8, 6, 32)
        1 (1, 8, 6, 32)
        2 (1, 8, 6, 32)
        3 (1, 8, 6, 32)
    """

    name: str
    heads: tuple[int, ...]  # query heads, by layer
    causal: bool  # whether no word sees a later one, in any layer
    context: int | None  # the most tokens it reads at once, special ones included; None if unlimited
    trained: int | None = None  # the context in training, where `with_context` allows more
    before: tuple[int, ...]
    after: tuple[int, ...]
    special: frozenset[int]  # ids of special tokens, also where they are spelled in the text
    other_layers: str = ""  # what layers without attention are, and which the others are; "" where all have some
    kept_roles: KeptRoles | None = None  # the place of its roles; None for a model in memory, and the embedded one
    _roles: dict[str, Any] | None = None

    @property
    def roles(self) -> dict[str, Any] | None:
        """Roles as `measure_roles` returns them; None if unmeasured, or for the reason in `roles_note`."""
        return self._roles_and_note()[0]

    @property
    def roles_note(self) -> str:
        """Why the roles on disk are not used; "" if they are, or if there are none."""
        return self._roles_and_note()[1]

    def _roles_and_note(self) -> tuple[dict[str, Any] | None, str]:
        if self._roles is not None or self.kept_roles is None:
            return self._roles, ""
        self._roles, note = self.kept_roles.read(self.heads)
        return self._roles, note

    @property
    def layers(self) -> int:
        return len(self.heads)

    @property
    def room(self) -> int | None:
        """The most tokens of a text that it reads at once."""
        return None if self.context is None else max(0, self.context - len(self.before) - len(self.after))

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The model as a module."""

    @property
    def generator(self) -> GeneratingModel | None:
        """The model for generating text; None if Saccade cannot generate with it."""
        return None

    @property
    def positions(self) -> int | None:
        """The number of position embeddings; None if positions are computed (rotary), without a limit."""
        return self.context

    def with_context(self: M, context: int) -> M:
        """The same model with another context, which may be longer than that in training.

        Raises:
            ValueError: not a whole number, no room for a token beside the special ones, or more tokens than position
                embeddings.
        """
        special = len(self.before) + len(self.after)
        if not isinstance(context, int) or isinstance(context, bool) or context <= special:
            raise ValueError(
                f"context: expected a whole number of tokens, at least {special + 1}: one of the text and "
                f"{special} around it, got {context!r}"
            )
        if self.positions is not None and context > self.positions:
            raise ValueError(
                f"context: {self.name} has learned {self.positions:,} positions, and {context:,} tokens need as many; "
                "a model with rotary positions reads longer texts"
            )
        longer_model = copy.copy(self)
        if self.context is not None and context > self.context:
            longer_model.trained = self.context
        longer_model.context = context
        return longer_model

    @property
    def stack(self) -> Stack | None:
        """The blocks that make the calls, one call each; None for modules that are not Saccade's."""
        return None

    @property
    def embedding(self) -> nn.Embedding | None:
        """The token embedding, None if it cannot be identified."""
        return None

    @abstractmethod
    def encode(self, text: str) -> Tokens:
        """The tokens of ``text``, of any length."""

    @abstractmethod
    def written(self, token: int) -> str:
        """The text of a token: ``[SEP]``."""

    @abstractmethod
    def _forward(self, tokens: Tensor, observe: LayerObserver) -> None: ...

    def run(self, tokens: Tensor, observe: LayerObserver) -> None:
        """Read ``tokens`` (B, L), whole inputs of one length, and call ``observe(layer, call)`` layer after layer.

        In evaluation mode, without gradients. Observers must not change a call; no calls are kept.
        """
        with evaluating(self.module), torch.no_grad():
            self._forward(tokens.to(next(self.module.parameters()).device), observe)

    def run_calls(self, tokens: Tensor, observe: LayerObserver) -> None:
        """As `run`, but stop after the last call: the logits of a long text would fill the memory."""

        def tell(layer: int, call: ObservedCall) -> None:
            observe(layer, call)
            if layer == self.layers - 1:
                raise _LastCall

        with suppress(_LastCall):
            self.run(tokens, tell)

    def pieces(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        """The texts of all tokens that the model reads for a text; ``spans`` are those of the text's tokens."""
        first, last = ([self.written(token) for token in around] for around in (self.before, self.after))
        return (*first, *(text[start:stop] for start, stop in spans), *last)

    def whole(self, ids: Sequence[int]) -> Tensor:
        """(1, L): the model's input for a text with these tokens."""
        return torch.tensor([[*self.before, *ids, *self.after]])


def weights_of(call: ObservedCall, **chosen: Any) -> Tensor:
    """The exact attention weights of an observed call, (B, Hq, Lq, Lk).

    ``rows``, ``keys`` and ``heads`` select a part, as in ``saccade.attention_weights``.

    Example:
        >>> from saccade.inspection import open_model, weights_of
        >>> model = open_model()
        >>> ids = model.whole(model.encode("The cat sat.").ids)
        >>> model.run(ids, lambda layer, call: print(layer, tuple(weights_of(call).shape)))
        0 (1, 8, 6, 6)
        1 (1, 8, 6, 6)
        2 (1, 8, 6, 6)
        3 (1, 8, 6, 6)
    """
    return attention_weights(
        call.query,
        call.key,
        **call.scoring(),
        **chosen,
    )


class SaccadeModel(TextModel):
    """A language model of Saccade: every text begins with ``<s>``, and attention is causal."""

    causal = True
    after = ()

    def __init__(self, lm: LanguageModel):
        config = lm.model.config
        if config.mechanism is not None:
            raise ValueError(
                f"model: it uses {config.mechanism.name!r} instead of softmax attention, so there are no "
                "attention weights to look at"
            )
        self.lm = lm
        self.name = getattr(lm, "name", "unnamed")
        self.heads = config.heads_by_layer
        self.context = config.context
        self.before = (lm.tokenizer.start,)
        self.special = frozenset(self.before)
        if lm.heads is not None and not well_formed(lm.heads, self.heads):
            raise ValueError(
                f"model: the heads of {self.name} are damaged, expected what measure_roles returns, or None"
            )
        self._roles = lm.heads

    @property
    def module(self) -> nn.Module:
        return self.lm.model

    @property
    def positions(self) -> None:
        return None  # they are rotary

    def with_context(self, context: int) -> SaccadeModel:
        longer_model = super().with_context(context)
        longer = copy.copy(self.lm.model)
        longer.config = replace(longer.config, context=context)
        longer_model.lm = LanguageModel(longer, self.lm.tokenizer, self.lm.heads, self.name)
        return longer_model

    @property
    def generator(self) -> GeneratingModel:
        return self.lm

    @property
    def stack(self) -> Stack:
        return self.lm.model.decoder

    @property
    def embedding(self) -> nn.Embedding:
        return self.lm.model.embedding

    def encode(self, text: str) -> Tokens:
        encoding = self.lm.tokenizer.encode(text)
        return Tokens(encoding.ids, encoding.spans)

    def written(self, token: int) -> str:
        return START if token in self.special else self.lm.tokenizer.decode([token])

    def _forward(self, tokens: Tensor, observe: LayerObserver) -> None:
        self.lm.model(tokens, observe=observe)


def with_progress(model: TextModel, progress: Callable[[int, int], None], passes: int) -> TextModel:
    """A copy of the model that calls ``progress(done, total)`` after each layer of each of so many passes."""
    counted, forward, done = copy.copy(model), model._forward, itertools.count(1)

    def counting(tokens: Tensor, observe: LayerObserver) -> None:
        def tell(layer: int, call: ObservedCall) -> None:
            observe(layer, call)
            progress(next(done), passes * model.layers)

        forward(tokens, tell)

    counted._forward = counting  # type: ignore[method-assign]
    return counted
