"""Word alignments of translations: exact cross-attention weights between words, and their picture.

Shape legend: H heads, Lt / Ls tokens of target and source, T / S their words.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence

import numpy as np
import torch

from ....operator.nn.attention import Observation, weights_of
from ....see.inspection._targets import target_tokenizer
from ....see.inspection._words import Word, group
from ....support._restored import evaluating
from ...models.text.encoder_decoder import EncoderDecoder
from ._reader import AnyTokenizer


@dataclasses.dataclass(frozen=True)
class Alignment:
    """Cross-attention weights of a translation.

    Attributes:
        source, target: words, and special tokens.
        weights: (T, S), the mean over all heads of a layer; of a source word the sum over its tokens, of a target word
            the mean over the steps that write its tokens. Rows sum to 1.
        layer, layers: which one, counted from 0, of how many.
        heads: of that layer.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: np.ndarray
    layer: int
    layers: int
    heads: int

    @property
    def title(self) -> str:
        return f"cross-attention, decoder layer {self.layer + 1} of {self.layers}, mean of {self.heads} heads"


def alignment(model: EncoderDecoder, text: str, translation: str) -> Alignment:
    """The weights of the decoder layer with the most `information`."""
    source, target = model.tokenizer, target_tokenizer(model)
    columns, rows = _words(source, text), _words(target, translation)
    read_words, written_words = (tuple(word.label for word in words) for words in (columns, rows))
    every = cross_attention(model, source.whole(text), target.whole(translation))
    merged = [_merged(weights.mean(0).double().cpu().numpy(), rows, columns) for weights in every]
    layer = int(np.argmax([information(weights) for weights in merged]))
    return Alignment(read_words, written_words, merged[layer], layer, len(every), len(every[layer]))


def information(weights: np.ndarray) -> float:
    """Mutual information in nats of rows and columns of weights (T, S): 0 where all rows are equal.

    The mutual information of a row drawn evenly and a column drawn by its weights: H(mean row) - mean H(row).
    """
    return _entropy(weights.mean(0)) - float(np.mean([_entropy(row) for row in weights]))


def _entropy(shares: np.ndarray) -> float:
    real = shares[shares > 0]
    return -float((real * np.log(real)).sum())


def _merged(weights: np.ndarray, rows: Sequence[Word], columns: Sequence[Word]) -> np.ndarray:
    """Weights of words (T, S), from weights of tokens (Lt, Ls)."""
    summed = np.stack([weights[:, word.first : word.last].sum(1) for word in columns], 1)
    return np.stack([summed[word.first : word.last].mean(0) for word in rows])


def cross_attention(model: EncoderDecoder, source: Sequence[int], target: Sequence[int]) -> list[torch.Tensor]:
    """The exact weights (H, Lt, Ls) with which each decoder layer reads the source as it predicts each target token."""
    found: list[torch.Tensor] = []

    def observe(_: int, call: Observation) -> None:
        if call.cross:
            found.append(weights_of(call)[0])

    read, before = (torch.tensor([[*ids]], device=model.device) for ids in (source, [model.start or 0, *target[:-1]]))
    with evaluating(model), torch.no_grad():
        model(read, decoder_input_ids=before, observe=observe)
    return found


def _words(tokenizer: AnyTokenizer, text: str) -> list[Word]:
    """The words of a text with the tokens that the model reads for them, special ones included."""
    around = [[tokenizer.written(token) for token in some] for some in (tokenizer.before, tokenizer.after)]
    return group(text, tokenizer.encode(text).spans, before=around[0], after=around[1])


def alignment_picture(alignment: Alignment, kind: str) -> bytes:
    """A "png" or "svg": rows are words of the translation, columns words of the source."""
    from matplotlib.figure import Figure

    wide, high = (min(max(3.0, 0.42 * len(words) + 2), 24.0) for words in (alignment.source, alignment.target))
    figure = Figure(figsize=(wide + 1, high), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(alignment.weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set(xlabel="source", ylabel="translation")
    axes.set_title(alignment.title, fontsize=10)
    axes.set_xticks(range(len(alignment.source)), alignment.source, rotation=45, ha="right")
    axes.set_yticks(range(len(alignment.target)), alignment.target)
    figure.colorbar(image, label="weight")
    written = io.BytesIO()
    figure.savefig(written, format=kind, dpi=144)
    return written.getvalue()
