"""Language modelling as an objective: windows of a text, and the cross-entropy of each next token.

Shape legend: B batch, L context, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ....operator.nn.stacks import LayerObserver
from ...models import DecoderLM
from ..objective import Evaluation, Objective
from ..settings import LanguageSettings
from .corpus import Corpus
from .evaluation import cross_entropy, evaluate
from .shared import SharedWindows
from .windows import draw_copying, draw_windows, whole_windows

if TYPE_CHECKING:
    from accelerate import Accelerator


class LanguageObjective(Objective):
    """Next-token prediction on windows (B, L + 1): inputs are all tokens but the last, targets all but the first.

    Args:
        model: the decoder to train.
        corpus: the tokens.
        start: the start token.
        settings: batch, seed, repeats, copying and evaluation.

    Example:
        >>> import torch, saccade
        >>> from saccade.training import Corpus, LanguageObjective, LanguageSettings
        >>> model = saccade.models.DecoderLM(saccade.models.ModelConfig(5, width=8, layers=1, heads=2, context=4))
        >>> text = torch.arange(100) % 4 + 1
        >>> objective = LanguageObjective(model, Corpus(text, text), 0, LanguageSettings(steps=10, batch=3))
        >>> batch = objective.batch(step=0)
        >>> batch.shape, objective.loss(model, batch).shape
        (torch.Size([3, 5]), torch.Size([]))
    """

    model: DecoderLM

    def __init__(self, model: DecoderLM, corpus: Corpus, start: int, settings: LanguageSettings):
        self.model, self._training, self._start, self._settings = model, corpus.training, start, settings
        whole = whole_windows(corpus.validation, start=start, context=model.config.context)
        self._validation = spread(whole, settings.looks.evaluate_windows)
        self._shared: SharedWindows | None = None

    def batch(self, step: int) -> Tensor:
        config = self.model.config
        return draw(step, self._training, self._start, config.vocabulary, config.context, self._settings)

    def split(self, batch: Tensor, parts: int) -> list[Tensor]:
        return list(batch.tensor_split(parts))

    def weight(self, part: Tensor) -> int:
        return part.shape[0]

    def tokens(self, batch: Tensor) -> int:
        return batch[:, 1:].numel()

    def loss(self, model: nn.Module, part: Tensor, observe: LayerObserver | None = None) -> Tensor:
        return loss_of(model, part, observe, self._shared)

    def share_sequences(self, processes: int) -> None:
        self._shared = SharedWindows(processes) if processes > 1 else None

    def evaluate(self, model: nn.Module, accelerator: Accelerator | None = None) -> Evaluation:
        return Evaluation(evaluate(model, self._validation, accelerator=accelerator, shared=self._shared))


def loss_of(
    model: nn.Module, windows: Tensor, observe: LayerObserver | None = None, shared: SharedWindows | None = None
) -> Tensor:
    """Mean cross-entropy in nats of windows (B, L + 1), whose first token is not predicted; with `shared`, what this
    process's rows add to it."""
    if shared is not None:
        logits, targets = shared.predicted(model, windows, observe)
        return cross_entropy(logits, targets, "sum") / windows[:, 1:].numel()
    logits = model(windows[:, :-1]) if observe is None else model(windows[:, :-1], observe=observe)
    return cross_entropy(logits, windows[:, 1:])


def draw(step: int, tokens: Tensor, start: int, vocabulary: int, context: int, settings: LanguageSettings) -> Tensor:
    """The windows of a step for all processes. Equal arguments give equal windows."""
    seed, batch = settings.seed, settings.batch
    if step < settings.copying:
        return draw_copying(vocabulary, start=start, context=context, batch=batch, seed=seed, step=step)
    return draw_windows(
        tokens,
        start=start,
        context=context,
        batch=batch,
        seed=seed,
        step=step - settings.copying,
        repeats=settings.repeats,
    )


def spread(windows: Tensor, count: int | None) -> Tensor:
    """`count` evenly spaced windows; all windows if there are fewer or `count` is None."""
    if count is None or count >= windows.shape[0]:
        return windows
    return windows[torch.arange(count) * windows.shape[0] // count]
