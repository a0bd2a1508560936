"""A model pruned, with what it was before and what it is now: heads, arithmetic, and a text's loss and time."""

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
from ._layers import AttentionLayer, attention_layers
from ._report import PrunedLayer, Pruning, all_layers, as_json, attention_flops, parameters_line
from ._texts import LONGEST, Batch, mean_loss, perplexity, text_windows
from ._timing import ROUNDS, ForwardTimes, forward_times

Told = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Comparison:
    """A model before and after pruning. `compare_pruned` returns it.

    Attributes:
        pruning: the result of `prune`.
        layers: all attention layers, also those that lost nothing.
        length: the number of tokens that `flops` is for.
        flops: of all attention for one sequence of that length, (before, after); see `attention_flops`.
        loss: per predicted token of the text, in nats, (before, after); None without one.
        judged: tokens of the text it was measured on.
        forward: the time of a forward on a window of the text, before and after; None without one.

    Example:
        >>> import saccade
        >>> from saccade.pruning import compare_pruned
        >>> found = compare_pruned(saccade.inspection.open_model().lm, "0.1,0.2")
        >>> found.layers[0].heads, found.flops[1] < found.flops[0], found.loss
        ((8, 6), True, None)
    """

    pruning: Pruning
    layers: tuple[PrunedLayer, ...]
    length: int
    flops: tuple[int, int]
    loss: tuple[float, float] | None = None
    judged: int = 0
    forward: ForwardTimes | None = None

    def lines(self) -> list[tuple[str, str, str]]:
        """Name, values and remark of each number, for people."""
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
        """The same for programs."""
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
        heads: as in `prune`; None: those that matter least on the text.
        keep: without heads, the share that stays, or how many heads.
        text: what the loss and the time are measured on, with a copy of the model as it was; where heads are ranked,
            its windows rank and judge in turn.
        tokens: how many tokens of the text are read at most.
        progress: called with the current work, how much of it is done, and how much there is.

    Raises:
        ValueError: as of `prune`, `choose_heads` and `text_windows`; heads and keep; a text of one window, where one
            has to rank the heads and another to judge.

    Example:
        >>> import saccade
        >>> from saccade.pruning import compare_pruned
        >>> model = saccade.inspection.open_model().lm
        >>> found = compare_pruned(model, "0.1,0.2")
        >>> for line in found.lines():
        ...     print(line)
        ('Parameters', '3,737,856 -> 3,672,320', '98.2%')
        ('Attention, 256 tokens', '671,612,928 -> 629,637,120 FLOPs', '93.8%')
    """
    if heads is not None and keep is not None:
        raise ValueError(f"keep: heads are given, and keep={keep} says how many of them to choose; give one of both")
    windows = [] if text is None else text_windows(model, text, most=tokens)
    if heads is None and len(windows) == 1:
        raise ValueError(
            f"data: a text of {windows[0]['input_ids'].numel()} tokens is one window; one ranks the heads and another "
            f"judges, so give more than {LONGEST} tokens, or heads"
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
    """A model as it is at one time."""

    layers: list[AttentionLayer]
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
    """The heads that matter least."""
    if keep is None or not batches:
        raise ValueError("heads: none came, and without a share to keep and a text none can be chosen")
    found = head_importance(model, batches, progress=lambda done, total: progress("ranking heads", done, total))
    chosen = choose_heads(model, found, keep)
    if not chosen:
        raise ValueError(f"keep: at {keep} every head stays")
    return [(path, head) for path, heads in chosen.items() for head in heads]


def _counting(progress: Told, what: str, total: int) -> Callable[[], None]:
    """What tells, at each call, of one more."""
    done = itertools.count(1)
    return lambda: progress(what, next(done), total)
