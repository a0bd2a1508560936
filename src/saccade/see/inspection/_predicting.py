"""A text model that gives logits of tokens, and how well it predicts a text.

Shape legend: B texts, L tokens with the special ones, P places, V vocabulary.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...make.models.output_heads import ItemHead, TokenHead, VocabularyHead
from ...make.models.text.decoder import TextDecoder
from ...make.models.text.encoder import TextEncoder
from ._models import SaccadeModel, TextModel
from ._published import PublishedModel

MOST_MASKED = 16  # places of a text that are masked one at a time; each takes a forward


class NoTokenHead(ValueError):
    """A model without a head that gives logits of tokens."""


@dataclass(frozen=True, eq=False)
class Predictor:
    """A text model with its head for tokens. `as_predictor` returns it.

    Attributes:
        reader: encodes texts.
        module: the model that runs, with its head.
        mask: the id of the mask token of a masked model; None for a model that predicts the next token.
    """

    reader: TextModel
    module: nn.Module
    mask: int | None
    _logits: Callable[..., Tensor]  # of ids, and of `logits_to_keep` if the module takes it

    def logits(self, ids: Tensor) -> Tensor:
        """(B, L) to (B, L, V)."""
        return self._logits(ids.to(next(self.module.parameters()).device))

    def logits_at(self, ids: Tensor, column: int) -> Tensor:
        """(B, L) to (B, V): the logits of one column, without computing the earlier ones where the module can."""
        keep = ids.shape[1] - column
        can = "logits_to_keep" in inspect.signature(self.module.forward).parameters
        ids = ids.to(next(self.module.parameters()).device)
        return self._logits(ids, **({"logits_to_keep": keep} if can else {}))[:, -keep]

    def places(self, ids: Tensor) -> list[int]:
        """The columns of (1, L) whose tokens are predicted: all with a token before; for a masked model those that are
        not yet masked, at most 16, evenly spaced."""
        first, end = len(self.reader.before), ids.shape[1] - len(self.reader.after)
        if self.mask is None:
            return list(range(max(first, 1), end))
        known = [place for place in range(first, end) if int(ids[0, place]) != self.mask]
        count = min(len(known), MOST_MASKED)
        return [known[(2 * i + 1) * len(known) // (2 * count)] for i in range(count)]

    def predictions(self, ids: Tensor) -> Tensor:
        """(1, L) to (P, V): the logits of the token at each of `places`, from the tokens before it; for a masked model
        from all others, with only that token masked."""
        places = self.places(ids)
        if self.mask is None:
            return self.logits(ids)[0, [place - 1 for place in places]]
        masked = ids.repeat(len(places), 1)
        masked[range(len(places)), places] = self.mask
        return self.logits(masked)[range(len(places)), places]

    def loss(self, ids: Tensor) -> Tensor:
        """The mean of `losses`. ValueError if there are none."""
        return self.losses(ids).mean()

    def losses(self, ids: Tensor) -> Tensor:
        """(P,) -log p (nats) of the tokens at `places`; masked models: pseudo (Salazar et al. 2020, equation 1).

        ValueError if there is no such place.
        """
        places = self.places(ids)
        if not places:
            raise ValueError("text: it has no token that can be predicted from others; pass a longer one")
        logits = self.predictions(ids)
        return F.cross_entropy(logits.float(), ids[0, places].to(logits.device), reduction="none")

    def predicting(self, ids: Tensor) -> int:
        """The column of (1, L) whose logits predict the next token, or the only mask.

        ValueError if a masked model's text has no mask, or several.
        """
        if self.mask is None:
            return ids.shape[1] - len(self.reader.after) - 1
        masks = (ids[0] == self.mask).nonzero()[:, 0].tolist()
        if len(masks) != 1:
            written = self.reader.written(self.mask)
            raise ValueError(
                f"text: {self.reader.name} fills in masks: expected one {written} in the text, got {len(masks)}"
            )
        return int(masks[0])

    def token(self, word: str) -> int:
        """The token of a word, with a blank before it where tokens have one.

        ValueError if the word has several tokens.
        """
        forms = (f" {word}", word) if word[:1].isalnum() else (word,)
        forms_ids = [self.reader.encode(form).ids for form in forms]
        chosen = next((ids for ids in forms_ids if len(ids) == 1), forms_ids[0])
        if len(chosen) != 1:
            written_tokens = ", ".join(repr(self.reader.written(token)) for token in chosen)
            raise ValueError(f"target: expected one token, and {word!r} is {len(chosen)}: {written_tokens or 'none'}")
        written = self.reader.written(chosen[0])
        if written != word and re.fullmatch(r"[<\[]unk\w*[>\]]", written, re.IGNORECASE):
            raise ValueError(f"target: the tokenizer has no {word!r}; it would read {written}")
        return chosen[0]


def as_predictor(model: TextModel) -> Predictor:
    """A text model with its head for tokens.

    A model of transformers is opened again, with the head that its config.json names.

    Raises:
        NoTokenHead: no head gives logits of tokens.
    """
    if isinstance(model, SaccadeModel):
        return Predictor(model, model.module, None, model.lm.model)
    if isinstance(model, PublishedModel):
        return _of_published(model)
    from ._transformers import TransformersTextModel, with_token_head

    assert isinstance(model, TransformersTextModel)
    headed = with_token_head(model)
    if headed is None:
        raise _no_token_head(model.name)
    more = {"use_cache": False} if getattr(headed.module.config, "use_cache", None) is not None else {}
    module, mask = headed
    return Predictor(model, module, mask, lambda ids, **options: module(input_ids=ids, **more, **options).logits)


def _of_published(model: PublishedModel) -> Predictor:
    module: Any = model.module
    is_next = isinstance(module, TextDecoder) and not isinstance(module.head, ItemHead) and module.request.head
    mask = getattr(model.tokenizer, "named", {}).get("mask")
    fills = isinstance(module, TextEncoder) and isinstance(module.head, TokenHead) and mask is not None
    if not is_next and not (fills and isinstance(module.head.inner, VocabularyHead)):
        raise _no_token_head(model.name)
    return Predictor(model, module, None if is_next else mask, lambda ids, **options: module(ids, **options).logits)


def _no_token_head(name: str) -> NoTokenHead:
    return NoTokenHead(
        f"model: {name} reads a text without predicting its tokens: it is an encoder-decoder, or has no head for them; "
        "expected a language model, whose config.json names a ...ForCausalLM, ...LMHeadModel or ...ForMaskedLM"
    )
