"""Compares a model before and after pruning: heads, FLOPs, and the loss and time on a text."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...see.attribution import head_importance
from ...support._lazy_names import renamed_arguments
from ..models import Model
from ..models.decoding.generating import GeneratingModel
from ._choice import choose_heads
from ._entry import prune
from ._heads import Heads
from ._layers import PrunableLayer, attention_layers
from ._report import PrunedLayer, Pruning, all_layers, as_json, attention_flops, parameters_line
from ._texts import LONGEST, Batch, mean_loss, perplexity, text_windows
from ._timing import ROUNDS, ForwardTimes, forward_times

Told = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Comparison:
    """A model before and after pruning. `compare_pruned` returns it.

    Attributes:
        pruning: the result of `prune`.
        layers: all attention layers, including unchanged ones.
        length: the sequence length that `flops` is computed for.
        flops: of all attention layers for one sequence, (before, after); see `attention_flops`.
        loss: per predicted token of the text, in nats, (before, after); None without a text.
        judged: number of tokens of the text used for the loss.
        forward: the time of a forward pass on a window of the text, before and after; None without a text.
    """

    pruning: Pruning
    layers: tuple[PrunedLayer, ...]
    length: int
    flops: tuple[int, int]
    loss: tuple[float, float] | None = None
    judged: int = 0
    forward: ForwardTimes | None = None

    def lines(self) -> list[tuple[str, str, str]]:
        """Rows of the report: name, values, remark."""
        lines = [
            parameters_line(self.pruning),
            (
                f"Attention, {self.length} tokens",
                f"{self.flops[0]:,} -> {self.flops[1]:,} FLOPs",
                f"{self.flops[1] / self.flops[0]:.1%}",
            ),
        ]
        if self.loss is not None:
            values = [f"{loss:.4f} ({perplexity(loss):,.1f})" for loss in self.loss]
            lines.append(("Loss (perplexity)", " -> ".join(values), f"on {self.judged:,} tokens"))
        return lines if self.forward is None else [*lines, self.forward.line()]

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            **as_json(Pruning(self.layers, self.pruning.parameters, self.pruning.note)),
            "attention_flops": {"length": self.length, "before": self.flops[0], "after": self.flops[1]},
            "loss": None
            if self.loss is None
            else {"tokens": self.judged, "before": self.loss[0], "after": self.loss[1]},
            "forward": None if self.forward is None else self.forward.as_json(),
        }


@renamed_arguments(told="progress")
def compare_pruned(
    model: Model,
    heads: str | None,
    *,
    keep: float | None = None,
    text: str | None = None,
    tokens: int = 32_768,
    progress: Told = lambda what, done, total: None,
) -> Comparison:
    """Prune a model in place, and compare it with the model before.

    Args:
        model: of `saccade.models`.
        heads: as in `prune`; None selects the least important heads on the text.
        keep: without `heads`, the share or the number of heads that stay.
        text: to measure loss and time on, with a copy of the unpruned model. If heads are ranked, every second window
            is used for ranking and the others for the loss.
        tokens: maximum number of tokens read from the text.
        progress: called with the current work, the finished amount and the total.

    Raises:
        ValueError: as of `prune`, `choose_heads` and `text_windows`; both heads and keep; a text of one window, if
            heads are ranked.
    """
    if heads is not None and keep is not None:
        raise ValueError(f"keep: selects heads to remove, but heads are given too; give heads or keep={keep}, not both")
    windows = [] if text is None else text_windows(model, text, most=tokens)
    if heads is None and len(windows) == 1:
        raise ValueError(
            f"data: the text has {windows[0]['input_ids'].numel()} tokens, which is one window; ranking and measuring "
            f"the loss need one each, so give more than {LONGEST} tokens, or heads"
        )
    judging = windows if heads is not None else windows[1::2]
    chosen = _least(model, windows[::2], keep, progress) if heads is None else heads
    length = min(LONGEST, model.context or LONGEST)
    before, whole = _Measured.of(model, judging, length, progress), copy.deepcopy(model) if judging else None
    pruning = prune(model, chosen)
    after = _Measured.of(model, judging, length, progress)
    timed = None
    if whole is not None:
        timed = forward_times(whole, model, judging, _counting(progress, "measuring the time", ROUNDS + 1))
    return Comparison(
        pruning,
        all_layers(before.layers, after.layers, pruning),
        length,
        (before.flops, after.flops),
        None if before.loss is None or after.loss is None else (before.loss, after.loss),
        sum(batch["input_ids"].numel() for batch in judging),
        timed,
    )


class _Measured(NamedTuple):
    """Heads, FLOPs and loss of a model."""

    layers: list[PrunableLayer]
    flops: int
    loss: float | None

    @classmethod
    def of(cls, model: Model, batches: list[Batch], length: int, progress: Told) -> _Measured:
        layers = attention_layers(model)
        prunable = [layer for layer in layers if not layer.refusal]
        flops = attention_flops(prunable, length, causal=isinstance(model, GeneratingModel))
        counted = _counting(progress, "measuring the loss", len(batches))
        return cls(layers, flops, mean_loss(model, batches, counted) if batches else None)


def _least(model: Model, batches: list[Batch], keep: float | None, progress: Told) -> Heads:
    """The least important heads."""
    if keep is None or not batches:
        raise ValueError("heads: none given; expected heads, or a share to keep and a text to rank them on")
    importance = head_importance(model, batches, progress=lambda done, total: progress("ranking heads", done, total))
    chosen = choose_heads(model, importance, keep)
    if not chosen:
        raise ValueError(f"keep: at {keep} every head stays")
    return [(path, head) for path, heads in chosen.items() for head in heads]


def _counting(progress: Told, what: str, total: int) -> Callable[[], None]:
    """A callback without arguments that counts its calls and reports progress."""
    done = itertools.count(1)
    return lambda: progress(what, next(done), total)
