"""Published checkpoints that Saccade opens itself, as models that read text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...make.models import LanguageModel, Model, TransformersModel, load
from ...make.models.decoding.generating import GeneratingModel
from ...make.models.text.decoder import TextDecoder
from ...make.models.text.encoder import TextEncoder
from ...make.models.text.encoder_decoder import EncoderDecoder
from ...operator.nn.stacks import Stack
from ._models import LayerObserver, SaccadeModel, TextModel, Tokens
from ._transformers import of_transformers

Reader = TextEncoder | TextDecoder | EncoderDecoder


class PublishedModel(TextModel):
    """A published encoder or decoder of text; for an encoder-decoder its encoder."""

    def __init__(self, model: Reader, name: str):
        self.name, self._model = name, model
        self.tokenizer: Any = model.tokenizer
        stack: Any = self.stack
        mechanism = stack.blocks[0].attention.config.mechanism
        if mechanism is not None:
            raise ValueError(
                f"{name}: it uses {mechanism.name!r} instead of softmax attention, so there are no attention "
                "weights to look at"
            )
        self.heads = tuple(block.attention.config.heads for block in stack.blocks)
        self.causal = isinstance(model, TextDecoder)
        limits = (self.tokenizer.longest, model.settings.get("max_position_embeddings"))
        self.context = min((limit for limit in limits if limit is not None), default=None)
        self.before, self.after = self.tokenizer.before, self.tokenizer.after
        self.special = _special(self.tokenizer)

    @property
    def module(self) -> nn.Module:
        return self._model

    @property
    def positions(self) -> int | None:
        return self._model.longest

    @property
    def generator(self) -> GeneratingModel | None:
        return self._model if isinstance(self._model, GeneratingModel) else None

    @property
    def stack(self) -> Stack:
        return self._model.decoder if isinstance(self._model, TextDecoder) else self._model.encoder

    @property
    def embedding(self) -> nn.Embedding:
        return self._model.tokens

    def encode(self, text: str) -> Tokens:
        encoding = self.tokenizer.encode(text)
        vocabulary = self._model.tokens.num_embeddings
        if max(encoding.ids, default=0) >= vocabulary:
            token = self.written(max(encoding.ids))
            raise ValueError(
                f"{self.name}: the tokenizer has a token {token!r} that the model, with {vocabulary:,}, does not"
            )
        return Tokens(encoding.ids, encoding.spans)

    def written(self, token: int) -> str:
        return self.tokenizer.written(token)

    def _forward(self, tokens: Tensor, observe: LayerObserver) -> None:
        if isinstance(self._model, EncoderDecoder):
            self._model.encode(tokens, observe=observe)
        else:
            self._model(tokens, observe=observe)


def _special(tokenizer: Any) -> frozenset[int]:
    """Ids of the special tokens. The token for unknown words stands for a word, and is included only if it has another
    role as well."""
    unknown = {tokenizer.named.get("unk")} - {tokenizer.named.get(role) for role in ("bos", "eos", "cls", "sep")}
    return tokenizer.special - unknown


def open_published(source: str | Path) -> PublishedModel:
    """The checkpoint in a folder, or with a name on the hub, if Saccade has its family.

    Raises:
        FileNotFoundError, ValueError: as `saccade.models.load`; a family that does not read text; weights that are
            not finite.
    """
    model = load(source)
    if not isinstance(model, Reader):
        raise ValueError(
            f"{source}: {model.family.name} reads no tokens of a text; if it is a run of `saccade train`, "
            f"`saccade view INPUT --model {source}` shows its heads"
        )
    _check_finite(model, source)
    return PublishedModel(model, str(source))


def as_text_model(model: TextModel | Model) -> TextModel:
    """Wrap a model that `saccade.models.load` opened as a `TextModel`. A `TextModel` is returned as it is.

    Raises:
        TypeError: a model that does not read text.
    """
    if isinstance(model, TextModel):
        return model
    if isinstance(model, Reader):
        return PublishedModel(model, "unnamed" if model.folder is None else str(model.folder))
    if isinstance(model, TransformersModel):
        return of_transformers(model)
    if isinstance(model, Model) and not isinstance(model, LanguageModel):
        raise TypeError(f"model: expected one that reads text, got {model.family.name}")
    return SaccadeModel(model)


def _check_finite(model: Model, source: str | Path) -> None:
    spoilt = [name for name, tensor in model.state_dict().items() if not bool(torch.isfinite(tensor).all())]
    if spoilt:
        raise ValueError(f"{source}: damaged, {', '.join(spoilt[:3])} holds weights that are not finite numbers")
