"""The models that can be attributed, and their input: a text, or token ids.

Shape legend: L tokens with the special ones, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...make.models import LanguageModel, Model
from ...make.models.inputs import check_ids
from ...make.models.output_heads import ItemHead, TokenHead, VocabularyHead
from ...make.models.text.decoder import TextDecoder
from ...make.models.text.encoder import TextEncoder
from ...make.models.text.encoder_decoder import EncoderDecoder
from ..inspection import TextModel, Word, as_text_model
from ..inspection._collect import read
from ..inspection._models import SaccadeModel
from ..inspection._steps._chosen_word import find_word
from ._record import Embedding, ResidualModel, Vocabulary
from ._steps import Diagonal, Step, applied, matrix_step, norm_steps

_NO_HEAD = "it has no head that gives logits of tokens; `why_attends` needs none"


@dataclass(frozen=True, eq=False)
class Input:
    """One text as a model reads it.

    Attributes:
        ids: (1, L).
        pieces: the text of each token.
        words: of the text; None for token ids.
        reader: encodes and decodes tokens; None if the model has no tokenizer.
        causal: whether no token sees a later one.
    """

    model: ResidualModel
    ids: Tensor
    pieces: tuple[str, ...]
    words: list[Word] | None
    reader: TextModel | None
    causal: bool

    def written(self, token: int) -> str:
        """The text of a token; without a tokenizer its number."""
        return str(token) if self.reader is None else self.reader.written(token)

    @property
    def labels(self) -> tuple[str, ...]:
        """Each token as it is shown, in quotes; part of a word of several tokens is shown with its word."""
        shown = [repr(piece) for piece in self.pieces]
        for word in self.words or ():
            if word.last - word.first > 1:
                for i in range(word.first, word.last):
                    shown[i] += f" of {word.text!r}"
        return tuple(shown)

    def place(self, name: str, wanted: int | str) -> int:
        """The column of a token: a number (negative ones count from the end), or the last token of a word."""
        return self.places(name, wanted)[-1]

    def places(self, name: str, wanted: int | str) -> list[int]:
        """The column of a token, or the columns of a word's tokens."""
        count = self.ids.shape[1]
        if isinstance(wanted, str):
            if self.words is None:
                raise ValueError(f"{name}: with token ids only positions are allowed, not words; got {wanted!r}")
            word = self.words[find_word(self.words, wanted)[0]]
            return list(range(word.first, word.last))
        if not isinstance(wanted, int) or isinstance(wanted, bool):
            raise TypeError(f"{name}: expected a position or a word of the text, got {wanted!r}")
        if not -count <= wanted < count:
            raise ValueError(f"{name}: the model reads {count} tokens, 0 to {count - 1}; got {wanted}")
        return [wanted % count]


def read_input(model: object, text: str | Tensor | Sequence[int]) -> Input:
    """Check and combine a model and its input.

    Raises:
        TypeError: neither a text nor ids; a model that is not made of Saccade's blocks. ValueError: a text without
            words or too long, a mechanism other than softmax attention.
    """
    inner = _model_of(model)
    opened = _residual_model(inner)
    if any(block.attention.config.mechanism is not None for block in opened.blocks):
        raise ValueError("model: expected softmax attention; its mechanism has no attention weights to split")
    causal = isinstance(inner, TextDecoder | LanguageModel)
    if isinstance(text, str):
        reader = as_text_model(model if isinstance(model, TextModel) else inner)
        tokens, words = read(reader, text)
        return Input(opened, reader.whole(tokens.ids), reader.pieces(text, tokens.spans), words, reader, causal)
    ids = _ids(text, opened.embedding.tokens.num_embeddings)
    writer = _reader(model, inner)
    pieces = tuple(str(token) if writer is None else writer.written(token) for token in ids[0].tolist())
    return Input(opened, ids, pieces, None, writer, causal)


def _model_of(model: Any) -> Model:
    if isinstance(model, TextModel):
        model = model.lm if isinstance(model, SaccadeModel) else model.module
    if isinstance(model, LanguageModel | TextDecoder | TextEncoder | EncoderDecoder):
        return model
    if type(model).__module__.partition(".")[0] == "transformers":
        raise TypeError(
            f"model: {type(model).__name__} is a module of transformers, whose blocks cannot be split; open its folder "
            "with saccade.models.load(folder) instead"
        )
    raise TypeError(
        "model: expected a language model of Saccade, or a text model opened by saccade.models.load, got "
        f"{type(model).__name__}"
    )


def _ids(given: Any, vocabulary: int) -> Tensor:
    if not isinstance(given, Tensor):
        if not isinstance(given, Sequence) or not all(isinstance(token, int) for token in given):
            raise TypeError(f"text: expected a text, or token ids, got {type(given).__name__}")
        given = torch.tensor(given, dtype=torch.int64)
    ids = given[None] if given.ndim == 1 else given
    if len(ids) != 1:
        raise ValueError(f"text: expected the ids of one text, (length,) or (1, length), got {tuple(given.shape)}")
    check_ids("text", ids, vocabulary)
    return ids


def _reader(model: Any, inner: Model) -> TextModel | None:
    """The tokenizer's decoder; None for a model made in memory, without a tokenizer."""
    if isinstance(model, TextModel):
        return model
    try:
        return as_text_model(inner)
    except FileNotFoundError:
        return None


# The families


def _residual_model(model: Model) -> ResidualModel:
    if isinstance(model, LanguageModel):
        inner = model.model
        table = inner.embedding.weight
        vocabulary = Vocabulary(table, None, lambda x: F.linear(x, table))
        return ResidualModel(
            inner,
            inner.decoder,
            Embedding(inner.embedding),
            lambda ids, observe: inner(ids, observe=observe),
            vocabulary,
        )
    if isinstance(model, EncoderDecoder):
        return ResidualModel(
            model,
            model.encoder,
            Embedding(model.tokens, _part(model, "source_places", "places"), norm=_part(model, "source_norm")),
            lambda ids, observe: model.encode(ids, observe=observe),
            None,
            "the encoder of an encoder-decoder gives no logits; `why_attends` needs none",
        )
    if isinstance(model, TextDecoder):
        places, stack = _part(model, "places"), model.decoder
        decoder_vocabulary = _of_decoder(model)
        return ResidualModel(
            model,
            stack,
            Embedding(model.tokens, places),
            lambda ids, observe: model(ids, observe=observe),
            decoder_vocabulary,
            _NO_HEAD,
        )
    assert isinstance(model, TextEncoder)
    places, types, norm, project = (_part(model, name) for name in ("places", "types", "norm", "project"))
    embedding = Embedding(model.tokens, places, None if types is None else types.weight[0], norm, project)
    encoder_vocabulary = _of_encoder(model)
    return ResidualModel(
        model, model.encoder, embedding, lambda ids, observe: model(ids, observe=observe), encoder_vocabulary, _NO_HEAD
    )


def _part(model: nn.Module, *names: str) -> Any:
    """The module under the first of these names that the family uses; None if it uses none."""
    return next((part for part in (getattr(model, name, None) for name in names) if part is not None), None)


def _of_decoder(model: TextDecoder) -> Vocabulary | None:
    if model.request.head is None or isinstance(model.head, ItemHead):
        return None
    head: Any = model.tokens if model.head is None else model.head
    return Vocabulary(head.weight, getattr(head, "bias", None), model.next_token_logits)


def _of_encoder(model: TextEncoder) -> Vocabulary | None:
    if not isinstance(model.head, TokenHead) or not isinstance(model.head.inner, VocabularyHead):
        return None
    inner = model.head.inner
    own: Any = inner._embedding[0] if inner.out is None else inner.out
    bias = getattr(own, "bias", None)

    def steps(x: Tensor) -> list[Step]:
        dense = matrix_step(inner.dense.weight, inner.dense.bias)
        read = applied([dense], x)
        made = inner.activation(read)
        share = torch.where(read == 0, 0.0, made / torch.where(read == 0, 1.0, read))
        return [dense, Diagonal(share), *norm_steps(inner.norm, made)]

    fixed = ("the activation of the head, as a factor of each feature",)
    return Vocabulary(own.weight, inner.bias if bias is None else bias, inner, steps, fixed)
