"""Effects of heads on a text: token probabilities without heads, each head's effect on the loss, and patching.

Shape legend: L tokens, V vocabulary, E width, H heads of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ...attribution import head_importance
from ...attribution._two_texts import listed_positions, patch_texts
from ...inspection import TextModel
from ...intervention import Ablate
from ..heads import patching_sentences
from ..maps import MapClosed, Run
from ._params import ParameterError
from ._rereading import Predictions, Rereading, in_order_of_run, rereading_of
from ._steps import READING, check_again

MOST_NEXT = 10  # tokens in each of the two lists of next tokens
MOST_KEPT = 2**24  # numbers of a kept output, so that another row needs no forward: 64 MiB

Off = tuple[tuple[str, int], ...]
Answer = tuple[dict[str, Any], list[np.ndarray]]


class _Readings:
    """Outputs of a run's model with all heads on, and without the heads of the latest request."""

    def __init__(self, run: Run):
        self.again = rereading_of(run)
        plain, self._names = self.again.plain()
        self._kept: dict[Off, Tensor] = {}
        self._keep((), plain)

    def without(self, off: Off) -> Tensor:
        """Log-probabilities (rows, V) in nats, as predicted by the model's `forward`; or last hidden states (L, E)."""
        if off in self._kept:
            return self._kept[off]
        if not off:
            return self._keep((), self.again.plain()[0])
        heads = {call: [head for other, head in off if other == call] for call, _ in off}
        return self._keep(off, self.again.edited({self._names[call]: Ablate(which) for call, which in heads.items()}))

    def _keep(self, off: Off, output: Tensor) -> Tensor:
        output_ = output.float().log_softmax(-1) if isinstance(self.again.predicts, Predictions) else output.float()
        if output_.numel() <= MOST_KEPT:
            self._kept = {key: value for key, value in self._kept.items() if key == ()} | {off: output_}
        return output_


_known: WeakKeyDictionary[Run, _Readings] = WeakKeyDictionary()


def _readings(run: Run) -> _Readings:
    if run not in _known:
        _known[run] = _Readings(run)
    return _known[run]


def forget(run: Run) -> None:
    """Free the kept outputs of a closed run."""
    _known.pop(run, None)


def without_heads(run: Run, off: Sequence[tuple[str, int]], row: int | None) -> Answer:
    """The reply to `heads`.

    For a language model the buffer is (2, L): log-probabilities in nats of each token, with all heads on and without
    those that are off; NaN for tokens that are not predicted, such as the first. The header has both mean losses, and
    the most probable tokens after `row`, or, for a masked language model, in its place. For other models the buffer is
    (1, L), |after - before| / |before| of the last hidden states, and the header has the reason.
    """
    with READING:
        try:
            readings = _readings(run)
            again, before, after = readings.again, readings.without(()), readings.without(tuple(off))
        except ValueError as error:
            raise _refusal(error) from None
    if row is not None and row >= len(again.tokens):
        raise ParameterError(f"row: expected a token of the {again.side}, 0 to {len(again.tokens) - 1}, got {row}")
    if isinstance(again.predicts, str):
        change = (after - before).norm(dim=-1) / before.norm(dim=-1)
        header = {"loss": None, "next": None, "masked": False, "reason": again.predicts}
        return {"side": again.side, **header}, [change.cpu().numpy()[None]]
    tokens = np.stack([_of_tokens(again, again.predicts, given) for given in (before, after)])
    predicted_row = None if row is None else again.predicts.row_about(row)
    return {
        "side": again.side,
        "loss": [_mean_loss(given) for given in tokens],
        "next": None if predicted_row is None else _next_tokens(again, before[predicted_row], after[predicted_row]),
        "masked": again.predicts.masked,
        "reason": None,
    }, [tokens]


def _refusal(error: ValueError) -> ParameterError:
    """The reason why a model's heads cannot be switched off, in one sentence."""
    return error if isinstance(error, ParameterError) else ParameterError(f"heads: {error}")


def _of_tokens(again: Rereading, predicted: Predictions, given: Tensor) -> np.ndarray:
    """(L,) the log-probability of each token; NaN for tokens that are not predicted."""
    log_p = np.full(len(again.tokens), np.nan, np.float32)
    places, rows = list(predicted.tokens), list(predicted.rows)
    log_p[places] = given[rows, again.tokens[places]].cpu().numpy()
    return log_p


def _mean_loss(tokens: np.ndarray) -> float:
    """The mean loss in nats a token; NaN if no token is predicted."""
    known = tokens[~np.isnan(tokens)]
    return -float(known.mean(dtype=np.float64)) if len(known) else math.nan


def _next_tokens(again: Rereading, before: Tensor, after: Tensor) -> list[tuple[str, float, float]]:
    """(text, probability before, after) of the most probable tokens before and after, the largest of either first."""
    likely = [given.topk(min(MOST_NEXT, len(given))).indices.tolist() for given in (before, after)]
    among = sorted({*likely[0], *likely[1]}, key=lambda token: (-max(float(before[token]), float(after[token])), token))
    return [(again.write(token), math.exp(before[token]), math.exp(after[token])) for token in among]


def importance_of(run: Run) -> Answer:
    """The reply to `importance`: the text's loss, and its derivative by a gate on each head's output, in nats a token.

    Negative: the head lowers the loss by that much, to first order (`saccade.head_importance`). The buffer has all
    heads of all calls, in the order of the run.
    """
    with READING:
        try:
            again = _readings(run).again
            if isinstance(again.predicts, str):
                raise ParameterError(f"importance: there is no loss; {again.predicts}")
            if not again.predicts.tokens:
                raise ParameterError("importance: a text of one token has no loss, as no token comes before it")
            importance = head_importance(again.module, [again.predicts], lambda _, predicted: _loss(again, predicted))
        except ValueError as error:
            raise _refusal(error) from None
    assert importance.signed is not None
    return {"loss": importance.loss}, [in_order_of_run(run, importance.signed)]


def _loss(again: Rereading, predicted: Predictions) -> Tensor:
    places, rows = list(predicted.tokens), list(predicted.rows)
    return torch.nn.functional.cross_entropy(again.forward()[rows].float(), again.tokens[places])


def patched_from(
    run: Run, other: str, target: str | None, positions: str | None, by: str, ended: Callable[[], bool]
) -> Answer:
    """The reply to `patching`: the change of the metric when each head's output is restored from the clean run.

    The header has the metric in words, its value for both texts, and sentences on the result. The buffer has the
    effects, `by` "gradient" or "exact", of all heads of all calls, in the order of the run.

    MapClosed: the viewer has `ended`, which is checked after each batch of heads.
    """

    def report(done: int, total: int) -> None:
        run.progress = done, total
        if ended():
            raise MapClosed

    check_again(run, "patching")
    if not isinstance(run.source, TextModel):
        raise ParameterError(f"patching: expected one text, and {run.model} read a source and a target")
    with READING:
        try:
            places = listed_positions(positions)
            made = patch_texts(run.source, run.text, other, by=by, target=target, positions=places, progress=report)
        except ValueError as error:
            raise ParameterError(str(error)) from None
        finally:
            run.progress = None
    effects = made.found
    header = {"of": made.measured, "clean": effects.clean, "corrupted": effects.corrupted}
    return {**header, "sentences": patching_sentences(effects)}, [in_order_of_run(run, effects.effects)]
