"""`mlm`: an encoder predicts masked tokens of texts. Other tasks start from its weights.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2019), section 3.1, task 1.

Shape legend: B texts of a batch, L tokens of the longest, M masked tokens of a text, N of a batch, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...operator.nn.stacks import LayerObserver
from ...support._numbers import named_values
from .._task_registry import MlmOptions
from ..models import Model
from ..models.output_heads import IGNORED
from ._example_task import JUDGED, Batch, widened
from ._examples import ENDINGS, read_lines, read_table
from ._task import Baseline, Tested
from ._texts._markov_chain import MarkovChain
from ._texts._reader import padded
from ._texts._text_task import LONGEST, EncoderTask

MASKED, REPLACED = 0.8, 0.9  # of the chosen tokens: up to here the mask, up to there any token, the rest as it is
LIKELY = 5  # guesses that are told of a mask
_BARS = 30


@dataclasses.dataclass(frozen=True)
class MaskedText:
    """A text with tokens to predict.

    Args:
        own: whether it has masks of its own, to be filled; otherwise they are drawn.
        place: where it stands, for messages.
    """

    text: str
    own: bool
    place: str


@dataclasses.dataclass(frozen=True)
class Guesses:
    """The predictions for the masked tokens of a text.

    Args:
        truth: (M,) ids; `IGNORED` of masks that the text has of its own.
        surprise: (M,) -log p(truth) in nats; of such masks 0.
        right: (M,) whether the most probable token is the true one.
        likely: of each mask of the text's own the most probable tokens, as written, with their probabilities.
    """

    truth: np.ndarray
    surprise: np.ndarray
    right: np.ndarray
    likely: tuple[tuple[tuple[str, float], ...], ...] = ()


Window = tuple[list[int], bool]
"""Tokens that are read at once, the special ones around them included, and `MaskedText.own`."""


@dataclasses.dataclass(frozen=True)
class Mlm(MlmOptions, EncoderTask):
    r"""Masked tokens of texts.

    For validation, long texts are cut into stretches of 256 words (or `longest`), and a share of them is split off.
    Empty lines are skipped. Some guessed tokens are not hidden, so that the model cannot rely on the mask. Logits are
    computed only for guessed tokens.

    Args:
        text: the column of texts, of a table.
        masked: share of a text's tokens that are guessed, at least one: of ten of them eight are hidden by the mask,
            one is replaced by any other token, and one is unchanged.
        long: "slide": overlapping windows over texts that are too long; "cut": only their beginnings are read;
            "refuse": an error.

    Raises:
        ValueError: an option outside of its range.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "texts.csv")
        ...     _ = path.write_text("text\nthe cat sat\nthe dog ran\n")
        ...     texts = saccade.tasks.Mlm(masked=0.3).read(path)
        >>> [text.text for text in texts]
        ['the cat sat', 'the dog ran']
    """

    head = "masked-lm"
    longs = ("slide", "cut", "refuse")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.masked < 1.0:
            raise ValueError(f"masked: must be above 0 and below 1, got {self.masked}")

    # --- data ---------------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> list[MaskedText]:
        return [text for text in self._read(path, own=False) if not self.is_empty(text)]

    def inputs(self, texts: Sequence[str]) -> list[MaskedText]:
        return [MaskedText(text, True, f"text {n}") for n, text in enumerate(texts, 1)]

    def read_inputs(self, path: Path) -> list[MaskedText]:
        return self._read(path, own=True)

    def is_empty(self, example: MaskedText) -> bool:
        return not example.text.strip()

    def _read(self, path: Path, *, own: bool) -> list[MaskedText]:
        """Rows of a table, or lines of a file; texts without a word are included."""
        found = [MaskedText(text, own, place) for place, text in self._texts(path)]
        if all(map(self.is_empty, found)):
            raise ValueError(f"{path}: holds no text")
        return found

    def _texts(self, path: Path) -> Iterator[tuple[str, str]]:
        if path.suffix.lower() in ENDINGS:
            for place, (text,) in read_table(path, (self.text,)):
                if not isinstance(text, str):
                    raise ValueError(f"{place}: expected a text, got {text!r:.40}")
                yield place, text
            return
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path}: holds no .txt files")
        for file in files:
            yield from ((f"{file}: line {n}", line) for n, line in enumerate(read_lines(file), 1))

    def split(self, data: Sequence[MaskedText], share: float, seed: int) -> tuple[list[MaskedText], list[MaskedText]]:
        """If windows slide over texts, texts are split inside, since there may be only one text: in stretches of as
        many words as a window has tokens. Windows themselves need a tokenizer, which is learned from the training
        part."""
        if self.long != "slide":
            return super().split(data, share, seed)
        words = self.longest or LONGEST
        stretches = [(n, part) for n, one in enumerate(data) for part in _stretches(one.text, words)]
        training, judged = (_grown(data, part) for part in super().split(stretches, share, seed))
        return training, judged

    def text_of(self, example: MaskedText) -> str:
        return example.text

    def read_by(self, model: Model, data: Sequence[MaskedText]) -> list[Window]:
        return [window for windows in self.windows(model, data) for window in windows]

    def windows(self, model: Model, examples: Sequence[MaskedText]) -> list[list[Window]]:
        """The windows of each text, of which a long one has several (`long="slide"`)."""
        limit = self.reader.limit(model.tokenizer)
        return [self._windows(model.tokenizer.encode(example.text).ids, limit, model, example) for example in examples]

    def _windows(self, ids: list[int], limit: int | None, model: Model, example: MaskedText) -> list[Window]:
        before, after = list(model.tokenizer.before), list(model.tokenizer.after)
        around = len(before) + len(after)
        self.reader.refuse_long(model.tokenizer, example.place, around + len(ids))
        room = None if limit is None else limit - around
        parts = [ids] if room is None else [ids[n : n + room] for n in range(0, len(ids), room)]
        windows = [([*before, *part, *after], example.own) for part in parts if part]
        return windows[:1] if self.long == "cut" else windows

    def encode(self, model: Model, examples: Sequence[MaskedText | Window]) -> list[Window]:
        """All windows of all texts in order; windows of `read_by` stay as they are."""
        if "mask" not in model.tokenizer.named:
            raise ValueError("initial: its tokenizer has no mask, which this task hides tokens by")
        windows: list[Window] = []
        for example in examples:
            windows += self.read_by(model, [example]) if isinstance(example, MaskedText) else [example]
        return windows

    def length(self, item: Window) -> int:
        return len(item[0])

    def collate(self, model: Model, items: Sequence[Window], random: np.random.Generator | None = None) -> Batch:
        """`labels` (B, L), the hidden tokens; `wanted` (B, L), which are guessed.

        Judged texts have their own masks, always the same, whatever shares their batch.
        """
        rows, truths, mask = [], [], model.tokenizer.named["mask"]
        for ids, own in items:
            generator = random or np.random.default_rng(zlib.crc32(np.array(ids).tobytes()))
            hidden, truth = (ids, {}) if own else self._hidden(model, ids, generator)
            rows.append(hidden)
            truths.append(truth)
        batch = padded(model, rows)
        labels = torch.full_like(batch["input_ids"], IGNORED)
        for row, truth in enumerate(truths):
            labels[row, list(truth)] = torch.tensor(list(truth.values()), dtype=torch.int64)
        own_masks = torch.tensor([own for _, own in items])[:, None] & (batch["input_ids"] == mask)
        return {**batch, "labels": labels, "wanted": (labels != IGNORED) | own_masks}

    def _hidden(self, model: Model, ids: list[int], random: np.random.Generator) -> tuple[list[int], dict[int, int]]:
        """The tokens with some of them masked, and the masked ones by position."""
        tokenizer, special = model.tokenizer, model.tokenizer.special
        places = [n for n, token in enumerate(ids) if token not in special] or [len(tokenizer.before)]
        count = max(1, round(self.masked * len(places)))
        chosen = sorted(random.permutation(places)[:count].tolist())
        found = list(ids)
        for place, how, other in zip(
            chosen, random.random(count), random.integers(tokenizer.vocabulary, size=count), strict=True
        ):
            if how < REPLACED:
                found[place] = tokenizer.named["mask"] if how < MASKED else int(other)
        return found, {place: ids[place] for place in chosen}

    # --- loss ---------------------------------------------------------------------------------------------------------

    def forward(self, model: nn.Module, batch: Batch, observe: LayerObserver | None = None) -> Tensor:
        """The logits (N, V) of the masked tokens."""
        given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        more = {} if observe is None else {"observe": observe}
        logits = model(**given, logits_of=batch["wanted"], **more).logits
        return widened(logits)

    def loss(self, result: Tensor, batch: Batch, *, learning: bool) -> Tensor:
        return F.cross_entropy(result, batch["labels"][batch["wanted"]], ignore_index=IGNORED)

    def weight(self, batch: Batch, *, learning: bool) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def logits(self, result: Tensor, batch: Batch) -> list[Tensor]:
        return [result]

    def outputs(self, model: nn.Module, result: Tensor, batch: Batch) -> list[Guesses]:
        truth = batch["labels"][batch["wanted"]]
        scores = result.log_softmax(-1)
        surprise = -scores.gather(1, truth.clamp(min=0)[:, None])[:, 0].masked_fill(truth == IGNORED, 0.0)
        right = result.argmax(-1) == truth
        counts = batch["wanted"].sum(1).tolist()
        parts = zip(*(tensor.cpu().split(counts) for tensor in (truth, surprise, right, scores)), strict=True)
        return [
            Guesses(ids.numpy(), nats.double().numpy(), hits.numpy(), _likely(model, of[ids == IGNORED]))
            for ids, nats, hits, of in parts
        ]

    def predict(self, model: Model, data: Sequence[MaskedText], rows: int = JUDGED) -> list[Guesses]:
        counts = [len(windows) for windows in self.windows(model, data)]
        found = iter(super().predict(model, data, rows))
        guesses = [_joined([next(found) for _ in range(count)]) for count in counts]
        for example, one in zip(data, guesses, strict=True):
            if example.own and not one.likely:
                mask = model.tokenizer.written(model.tokenizer.named["mask"])
                raise ValueError(f"{example.place}: has no {mask}, so there is nothing to guess")
        return guesses

    # --- metric and picture -------------------------------------------------------------------------------------------

    def scores(self, outputs: Sequence[Guesses], data: Sequence[MaskedText]) -> dict[str, float]:
        """Perplexity exp(mean surprise) and accuracy, over all masked tokens."""
        surprise, right = (
            np.concatenate([getattr(guesses, name) for guesses in outputs]) for name in ("surprise", "right")
        )
        return {"perplexity": math.exp(surprise.mean()), "accuracy": float(right.mean())}

    @property
    def protocol(self) -> str:
        return f"of each window the same {self.masked:.0%} of the pieces are guessed in every test"

    def cost(self, scores: Mapping[str, float]) -> float:
        return scores["perplexity"]

    def baselines(
        self,
        model: Model,
        training: Sequence[MaskedText | Window],
        validation: Sequence[MaskedText | Window],
        tested: Sequence[MaskedText | Window],
    ) -> list[Baseline]:
        """Token frequencies, and a Markov chain conditioned on the neighbours of a masked token."""
        chain = MarkovChain([ids for ids, _ in self.encode(model, training)], model.tokenizer.vocabulary)
        mask = model.tokenizer.named["mask"]

        def between(ids: list[int], place: int) -> np.ndarray:
            near = (ids[n] if 0 <= n < len(ids) else mask for n in (place - 1, place + 1))
            return chain.between(*(None if token == mask else token for token in near))

        return [
            self.constant(model, training, tested),
            Baseline("a Markov chain between both neighbours", self._guessed(model, tested, between)),
        ]

    def constant(
        self, model: Model, training: Sequence[MaskedText | Window], tested: Sequence[MaskedText | Window]
    ) -> Baseline:
        """Token frequencies with add-one smoothing: p = (n + 1) / (all + V)."""
        special, size = model.tokenizer.special, model.tokenizer.vocabulary
        tokens = [token for ids, _ in self.encode(model, training) for token in ids if token not in special]
        counts = np.bincount(tokens, minlength=size) + 1
        share = counts / counts.sum()
        return Baseline("frequency of each piece", self._guessed(model, tested, lambda ids, place: share))

    def _guessed(
        self,
        model: Model,
        tested: Sequence[MaskedText | Window],
        share: Callable[[list[int], int], np.ndarray],
    ) -> list[Guesses]:
        """The predictions of a simple model; `share` gives its probabilities (V,) at a position of a window."""
        found = []
        for example in tested:
            truth, surprise, right = [], [], []
            for window in self.encode(model, [example]):
                batch = self.collate(model, [window])
                ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
                for place in np.flatnonzero(batch["wanted"][0].numpy()).tolist():
                    probability = share(ids, place)
                    truth.append(labels[place])
                    surprise.append(-math.log(probability[labels[place]]))
                    right.append(int(probability.argmax()) == labels[place])
            found.append(Guesses(np.array(truth), np.array(surprise), np.array(right)))
        return found

    def picture(self, tested: Tested, kind: str) -> bytes:
        """The accuracy for each of the most frequent masked tokens."""
        from matplotlib.figure import Figure

        truth, right = (np.concatenate([getattr(one, name) for one in tested.outputs]) for name in ("truth", "right"))
        pieces, counts = np.unique(truth, return_counts=True)
        shown = pieces[np.argsort(-counts, kind="stable")[:_BARS]][::-1]
        figure = Figure(figsize=(7, 1.5 + 0.22 * len(shown)), layout="constrained")
        axes = figure.subplots()
        names = [f"{tested.model.tokenizer.written(int(piece))}  {(truth == piece).sum():,}" for piece in shown]
        axes.barh(range(len(shown)), [right[truth == piece].mean() for piece in shown], color="#4477aa")
        axes.set_yticks(range(len(shown)), names)
        axes.set(xlim=(0, 1), xlabel="share guessed right", title="The most frequent masked pieces, and their counts")
        written = io.BytesIO()
        figure.savefig(written, format=kind, dpi=144)
        return written.getvalue()

    def shown(self, example: MaskedText, output: Guesses) -> dict[str, Any]:
        masks = [[{"piece": piece, "probability": share} for piece, share in likely] for likely in output.likely]
        return {"text": example.text, "masks": masks}

    def line(self, shown: Mapping[str, Any]) -> str:
        guesses = [named_values((guess["piece"], guess["probability"]) for guess in mask) for mask in shown["masks"]]
        return f"{' | '.join(guesses)}  {' '.join(shown['text'].split())}"


def _stretches(text: str, words: int) -> list[range]:
    """Spans of characters with `words` words each, which cover the text."""
    starts = [match.start() for match in re.finditer(r"\S+", text)][words::words]
    return [range(*ends) for ends in itertools.pairwise([0, *starts, len(text)])]


def _grown(data: Sequence[MaskedText], stretches: Sequence[tuple[int, range]]) -> list[MaskedText]:
    """The parts of texts with these numbers as texts; neighbouring parts are joined."""
    found: list[tuple[int, range]] = []
    for number, part in stretches:
        if found and (found[-1][0], found[-1][1].stop) == (number, part.start):
            part = range(found.pop()[1].start, part.stop)
        found.append((number, part))
    return [dataclasses.replace(data[n], text=data[n].text[part.start : part.stop]) for n, part in found]


def _likely(model: nn.Module, scores: Tensor) -> tuple[tuple[tuple[str, float], ...], ...]:
    """The most probable tokens of each row of log-probabilities (N, V)."""
    assert isinstance(model, Model)
    best = scores.topk(min(LIKELY, scores.shape[-1]))
    rows = zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
    return tuple(
        tuple((model.tokenizer.written(token), share) for token, share in zip(tokens, shares, strict=True))
        for tokens, shares in rows
    )


def _joined(parts: Sequence[Guesses]) -> Guesses:
    """The predictions for the windows of one text."""
    if not parts:
        return Guesses(np.zeros(0, int), np.zeros(0), np.zeros(0, bool))
    truth, surprise, right = (
        np.concatenate([getattr(one, name) for one in parts]) for name in ("truth", "surprise", "right")
    )
    return Guesses(truth, surprise, right, tuple(likely for one in parts for likely in one.likely))
