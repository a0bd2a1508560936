"""Sentence vectors: encodes many texts with a model, sorted by length and packed without padding.

Shape legend: N texts, T tokens of a row, E width of the model, D dimension of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...operator.nn import packed_weights
from .checkpoints.sentence_files import POOLINGS, SentenceFiles, apply_dense, read_sentence_files
from .loading import load_body
from .model import Model
from .text.decoder import TextDecoder
from .text.encoder import TextEncoder
from .token_layout import TokenLayout, token_layout
from .tokenizers.sentencepiece import SentencePieceTokenizer
from .tokenizers.text import TextTokenizer
from .transformers_model import TransformersModel

TOKENS = 4096  # of a row, by default
CHUNK = 4096  # texts that are sorted and packed together; more would only use more memory
_MANY = 1000  # number of tokens that justifies packing weights

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Embedder:
    """A model with its tokenizer, pooling and normalisation.

    Args:
        model: an encoder of text, or another published model that reads text.
        files: the folder's settings of sentence vectors.
    """

    model: Model
    tokenizer: TextTokenizer | SentencePieceTokenizer
    files: SentenceFiles
    tokens_per_batch: int = TOKENS

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens of a text, special ones included."""
        limits = [limit for limit in (self.files.longest, self.tokenizer.longest) if limit is not None]
        return min(limits) if limits else None

    def chunk(self, texts: Sequence[str], progress: Callable[[int], None] | None = None) -> np.ndarray:
        """Vectors, float32 (N, D), of N texts; 0 for a text without tokens. TypeError for other values than texts.

        `progress` is called repeatedly with the number of newly finished texts.
        """
        texts = [self.files.prompt + _text(text) for text in texts]
        ids = self.tokenizer.whole_many([text.lower() for text in texts] if self.files.lower else texts, self.longest)
        empty = [n for n, row in enumerate(ids) if not row]
        ids = [row or [0] for row in ids]
        vectors: np.ndarray | None = None
        # Packing weights is worth its cost from some hundred tokens on.
        count = sum(map(len, ids))
        with _reading(self.model), self._packed(count):
            for batch in batches([len(row) for row in ids], self.tokens_per_batch):
                rows = self._vectors([ids[n] for n in batch]).float().cpu().numpy()
                if vectors is None:
                    vectors = np.empty((len(ids), rows.shape[1]), np.float32)
                vectors[batch] = rows
                if progress is not None:
                    progress(len(batch))
        assert vectors is not None
        vectors[empty] = 0
        return vectors

    def _packed(self, tokens: int) -> AbstractContextManager[Any]:
        """A block in which products read packed weights, for many tokens."""
        if isinstance(self.model, TransformersModel):
            return self.model.accelerated(tokens)
        return packed_weights(self.model) if tokens >= _MANY else nullcontext()

    def _vectors(self, ids: list[list[int]]) -> Tensor:
        states, layout = self._states(ids)
        vectors = torch.cat([_POOLS[name](states, layout) for name in self.files.pooling], -1)
        for dense in self.files.dense:
            vectors = apply_dense(dense, vectors)
        return F.normalize(vectors, dim=-1) if self.files.normalize else vectors

    def _states(self, ids: list[list[int]]) -> tuple[Tensor, TokenLayout]:
        """The last hidden states (1, T, E) of concatenated texts, and their layout."""
        lengths = torch.tensor([len(row) for row in ids])
        real = torch.arange(int(lengths.max())) < lengths[:, None]
        padded = torch.full(real.shape, self.tokenizer.pad)  # the only padding: token ids, not states
        padded[real] = torch.tensor([token for row in ids for token in row])
        padded, real = padded.to(self.model.device), real.to(self.model.device)
        if isinstance(self.model, TextEncoder) and self.model.request.mechanism is None:
            return self.model.packed_states(padded, real)
        layout = token_layout(len(ids), real.shape[1], real).packed(real.device)
        if isinstance(self.model, TransformersModel):
            return layout.take(self.model.states(padded, real.long())), layout
        return layout.take(self.model(padded, real).last_hidden_state), layout


def embed(
    texts: Sequence[str],
    model: Model | str | Path,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    tokens_per_batch: int = TOKENS,
    weights: str | None = None,
    progress: Progress | None = None,
) -> np.ndarray:
    r"""A vector for each text, in float32.

    Texts are sorted by length and concatenated to rows without padding. Pooling, normalisation, the maximum length, a
    dense layer and a prompt before each text follow the sentence-transformers files in the model's folder; without them
    a vector is the mean of the last hidden states of all tokens, special ones included. Longer texts are truncated. A
    text without tokens, such as "" for a tokenizer without special ones, has the vector 0.

    Args:
        texts: N texts.
        model: from `load`, or an argument for `load`. Its head is not used.
        pooling: "mean", "first", "last", "max", "mean-sqrt" (sum / sqrt(n)) or "weighted-mean" (token n has weight n);
            None: as in the files.
        normalize: whether to normalise vectors to length 1; None: as in the files.
        tokens_per_batch: maximum number of tokens in a row, unless a single text is longer.
        weights: as in `load`, for an argument of `load`; a model that is open already has its weights.
        progress: `progress(done, total)`, called after every row with numbers of texts.

    Returns:
        (N, D) float32; row n is the vector of `texts[n]`.

    Raises:
        TypeError: not a list of texts, or not a text model.
        ValueError: an empty list, unknown pooling or weights, `weights` beside a model that is open already, an
            unsupported step in the files.
        FileNotFoundError: no such model, or no tokenizer files.

    Example:
        >>> import tempfile, transformers, saccade
        >>> sizes = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> with tempfile.TemporaryDirectory() as folder:  # as a published model's folder
        ...     transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folder)
        ...     with open(folder + "/vocab.txt", "w") as file:
        ...         print("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", sep="\n", file=file)
        ...     vectors = saccade.models.embed(["a cat", "a dog", "dog"], folder)
        >>> vectors.shape
        (3, 8)
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(f"texts: expected a list of texts, got {type(texts).__name__}")
    if not texts:
        raise ValueError("texts: empty, expected at least one text")
    embedder = open_embedder(
        model, pooling=pooling, normalize=normalize, tokens_per_batch=tokens_per_batch, weights=weights
    )
    done = 0

    def report(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, len(texts))

    return np.concatenate([embedder.chunk(texts[n : n + CHUNK], report) for n in range(0, len(texts), CHUNK)])


def open_embedder(
    model: Model | str | Path,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    tokens_per_batch: int = TOKENS,
    weights: str | None = None,
) -> Embedder:
    """The model with its tokenizer and settings; arguments and errors as of `embed`."""
    if pooling is not None and pooling not in POOLINGS:
        raise ValueError(f"pooling: expected one of {', '.join(POOLINGS)}, got {pooling!r}")
    if isinstance(tokens_per_batch, bool) or not isinstance(tokens_per_batch, int) or tokens_per_batch < 1:
        raise ValueError(f"tokens_per_batch: expected an int above 0, got {tokens_per_batch!r}")
    if isinstance(model, (str, Path)):
        model = load_body(model, weights)
    elif weights is not None:
        raise ValueError(f"weights: the model is open already; load it with weights={weights!r}")
    if not isinstance(model, Model):
        raise TypeError(f"model: expected a model from saccade.models.load, or its folder, got {type(model).__name__}")
    if not isinstance(model, (TextEncoder, TextDecoder, TransformersModel)):
        raise TypeError(f"model: expected a published encoder or decoder of text, got {type(model).__name__}")
    files = SentenceFiles() if model.folder is None else read_sentence_files(model.folder)
    if pooling is not None:
        files = replace(files, pooling=(pooling,))
    if normalize is not None:
        files = replace(files, normalize=normalize)
    return Embedder(model, model.tokenizer, files, tokens_per_batch)


def batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices of texts, longest first, in groups of at most `tokens` tokens; a longer text is a group of its own."""
    group: list[int] = []
    room = tokens
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        if group and lengths[n] > room:
            yield group
            group, room = [], tokens
        group.append(n)
        room -= lengths[n]
    if group:
        yield group


def _counts(layout: TokenLayout) -> Tensor:
    return torch.bincount(layout.items, minlength=layout.batch)


def _maximum(states: Tensor, layout: TokenLayout) -> Tensor:
    return torch.stack([text.amax(0) for text in states[0].split(_counts(layout).tolist())])


def _mean_sqrt(states: Tensor, layout: TokenLayout) -> Tensor:
    return layout.mean(states) * _counts(layout).to(states).sqrt()[:, None]


def _weighted_mean(states: Tensor, layout: TokenLayout) -> Tensor:
    weights = (layout.positions() + 1)[..., None].to(states)
    return layout.mean(states * weights) / layout.mean(weights)


_POOLS: dict[str, Callable[[Tensor, TokenLayout], Tensor]] = {
    "first": lambda states, layout: layout.first(states),
    "max": _maximum,
    "mean": lambda states, layout: layout.mean(states),
    "mean-sqrt": _mean_sqrt,
    "weighted-mean": _weighted_mean,
    "last": lambda states, layout: layout.last(states),
}


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"texts: expected texts, got {type(text).__name__}")
    return text


@contextmanager
def _reading(model: Model) -> Iterator[None]:
    """Evaluation mode and no gradients within the context."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for part in training:
            part.training = True
