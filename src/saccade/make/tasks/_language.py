"""`lm`: tests a language model of `saccade train lm` beside a trigram, and continues texts with it.

It is trained by `saccade.training`, as no other task is: on windows of a text, not on examples.

Shape legend: N tokens of a text, L context.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...support._restored import evaluating
from .._task_options import Recipe
from ..models import LanguageModel, Model, Sampling, generate
from ..models.decoder_lm.checkpoint import load_own
from ..training import Objective, Settings
from ..training.language.corpus import read_texts, split_tail
from ..training.run_folder.layout import LANGUAGE
from ._examples import read_lines
from ._task import Baseline, Details, Task, Tested
from ._texts._kneser_ney import KneserNey

WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+|(?:[^\w\s]|_)+|\n")
_TRAINED = "a language model is trained by `saccade train lm`, or by saccade.training in Python"


class LanguageText(NamedTuple):
    """A text to predict, or, without a path, one to continue."""

    text: str
    path: Path | None = None


@dataclasses.dataclass(frozen=True)
class Language(Task):
    """Tests and continuations of a language model.

    Args:
        tokens: of a continuation, at most.
        hold_out: files that were not trained on; without any, the last tenth of all text was held out.
    """

    tokens: int = 48
    hold_out: tuple[str, ...] = ()

    name = LANGUAGE
    protocol = (
        "each token from half a context before it at least; words are runs of letters, digits or signs, and ends of "
        "lines"
    )
    scratch = tuning = Recipe(epochs=1, rate=1e-3)
    reading = ("tokens",)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens: must be at least 1, got {self.tokens}")

    # --- data ---------------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> list[LanguageText]:
        return [LanguageText(text, file) for file, text in read_texts(path).items()]

    def files(self, path: Path) -> Sequence[Path]:
        return sorted(path.rglob("*.txt")) if path.is_dir() else [path]

    def split(
        self, data: Sequence[LanguageText], share: float, seed: int
    ) -> tuple[list[LanguageText], list[LanguageText]]:
        if self.hold_out:
            held = {file.resolve() for path in self.hold_out for file in self.files(Path(path))}
            kept = [text for text in data if text.path is None or text.path.resolve() not in held]
            return kept, [text for text in data if text not in kept]
        training, validation = split_tail("\n".join(text.text for text in data), share)
        return [LanguageText(training)], [LanguageText(validation)]

    def inputs(self, texts: Sequence[str]) -> list[LanguageText]:
        return [LanguageText(text) for text in texts]

    def read_inputs(self, path: Path) -> list[LanguageText]:
        return self.inputs(read_lines(path))

    # --- model --------------------------------------------------------------------------------------------------------

    def new_model(self, training: Sequence[Any]) -> Model:
        raise ValueError(_TRAINED)

    def objective(
        self, model: Model, training: Sequence[Any], validation: Sequence[Any], settings: Settings
    ) -> Objective:
        raise ValueError(_TRAINED)

    def open_model(self, source: Path | str) -> LanguageModel:
        return load_own(Path(source))

    def predict(self, model: Model, data: Sequence[LanguageText]) -> list[list[float]] | list[str]:
        """For a file the negative log-likelihood (N,) of each token; for a text its most probable continuation."""
        assert isinstance(model, LanguageModel)
        with evaluating(model):
            if all(text.path is None for text in data):
                greedy = Sampling(temperature=0.0)
                return ["".join(generate(model, text.text, self.tokens, greedy)) for text in data]
            return [token_losses(model, model.tokenizer.encode(text.text).ids) for text in data]

    # --- results ------------------------------------------------------------------------------------------------------

    def scores(self, outputs: Sequence[Sequence[float]], data: Sequence[LanguageText]) -> dict[str, float]:
        nats, tokens = sum(map(math.fsum, outputs)), sum(map(len, outputs))
        words = sum(len(words_of(text.text)) for text in data)
        return {
            "perplexity per word": math.exp(nats / words),
            "perplexity per token": math.exp(nats / tokens),
            "bits per character": nats / math.log(2) / sum(len(text.text) for text in data),
        }

    def validated_by(self, share: float, seed: int) -> str:
        return ", ".join(self.hold_out) or f"the last {share:g} of it"

    def cost(self, scores: Mapping[str, float]) -> float:
        return next(iter(scores.values()))

    def baselines(
        self,
        model: Model,
        training: Sequence[LanguageText],
        validation: Sequence[LanguageText],
        tested: Sequence[LanguageText],
    ) -> list[Baseline]:
        """A trigram model of the same tokens, so that likelihoods can be compared."""
        known, asked = ([model.tokenizer.encode(text.text).ids for text in some] for some in (training, tested))
        trigram = KneserNey(known, 3, lambda _: 1 / model.tokenizer.vocabulary)
        losses = [
            [-math.log(trigram.probability(token, ids[max(0, n - 2) : n])) for n, token in enumerate(ids)]
            for ids in asked
        ]
        return [Baseline("trigram of the same tokens (Kneser-Ney)", losses)]

    def details(self, outputs: Sequence[Sequence[float]], data: Sequence[LanguageText]) -> Details:
        """How many `words` and `tokens` were predicted."""
        words, tokens = sum(len(words_of(text.text)) for text in data), sum(map(len, outputs))
        table = f"{words:,} words, signs and ends of lines; {tokens:,} tokens"
        return Details({"words": words, "tokens": tokens}, table)

    def picture(self, tested: Tested, kind: str) -> bytes:
        raise ValueError(
            "picture: not available for a language model; `saccade look` and `saccade view` draw what it attends to"
        )

    def shown(self, example: LanguageText, output: str) -> dict[str, Any]:
        return {"text": example.text, "continuation": output}

    def line(self, shown: Mapping[str, Any]) -> str:
        return " ".join(f"{shown['text']}{shown['continuation']}".split())


def words_of(text: str) -> list[str]:
    """Runs of letters (with inner apostrophes), digits or other signs, and ends of lines; spaces are left out."""
    return WORD.findall(text)


def token_losses(lm: LanguageModel, ids: list[int], batch: int = 16) -> list[float]:
    """-ln p of each token, from windows that overlap by half; only the later half of a window counts."""
    context = lm.model.config.context
    tokens, half = torch.tensor(ids), context // 2
    windows = [(0, 0)] + [(s, s + context - half) for s in range(half, max(len(ids) - context, 0) + half, half)]
    losses = torch.full((len(ids),), math.nan)
    with torch.no_grad():
        for first in range(0, len(windows), batch):
            part = windows[first : first + batch]
            rows = [tokens[start : start + context] for start, _ in part]
            inputs = torch.full((len(rows), context), lm.tokenizer.start)
            for row, piece in zip(inputs, rows, strict=True):
                row[1 : len(piece)] = piece[: len(row) - 1][: len(piece) - 1]
            logits = lm.model(inputs)
            for (start, counted), piece, out in zip(part, rows, logits, strict=True):
                loss = F.cross_entropy(out[: len(piece)].float(), piece, reduction="none")
                losses[counted : start + len(piece)] = loss[counted - start :]
    assert not losses.isnan().any()
    values: list[float] = losses.tolist()
    return values
