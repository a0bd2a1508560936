"""What heads do for a text: the tokens' probabilities without some of them, what each is worth to the loss, and what
each carries of what differs from another text.

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

MOST_NEXT = 10  # tokens of each of the two lists of likely next ones
MOST_KEPT = 2**24  # numbers of a reading that is kept, so that another row needs no forward: 64 MiB

Off = tuple[tuple[str, int], ...]
Answer = tuple[dict[str, Any], list[np.ndarray]]


class _Readings:
    """What a run's model gives with all heads on, and without those that were off last."""

    def __init__(self, run: Run):
        self.again = rereading_of(run)
        plain, self._names = self.again.plain()
        self._kept: dict[Off, Tensor] = {}
        self._keep((), plain)

    def without(self, off: Off) -> Tensor:
        """Log-probabilities (rows, V) in nats, as the model's `forward` predicts tokens; last hidden states (L, E)."""
        if off in self._kept:
            return self._kept[off]
        if not off:
            return self._keep((), self.again.plain()[0])
        heads = {call: [head for other, head in off if other == call] for call, _ in off}
        return self._keep(off, self.again.edited({self._names[call]: Ablate(which) for call, which in heads.items()}))

    def _keep(self, off: Off, output: Tensor) -> Tensor:
        found = output.float().log_softmax(-1) if isinstance(self.again.predicts, Predictions) else output.float()
        if found.numel() <= MOST_KEPT:
            self._kept = {key: value for key, value in self._kept.items() if key == ()} | {off: found}
        return found


_known: WeakKeyDictionary[Run, _Readings] = WeakKeyDictionary()


def _readings(run: Run) -> _Readings:
    if run not in _known:
        _known[run] = _Readings(run)
    return _known[run]


def forget(run: Run) -> None:
    """Free what is kept of a run that is closed."""
    _known.pop(run, None)


def without_heads(run: Run, off: Sequence[tuple[str, int]], row: int | None) -> Answer:
    """The reply to `heads`.

    Of a language model the buffer is (2, L): log-probabilities in nats of each token, with all heads on and without
    those that are off; NaN where the token is not predicted, as the first one. The header has both mean losses, and the
    most probable tokens after `row`, or, of a masked language model, in its place. Of any other model the buffer is
    (1, L), |after - before| / |before| of the last hidden states, and the header says why.
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
    asked = None if row is None else again.predicts.row_about(row)
    return {
        "side": again.side,
        "loss": [_mean_loss(given) for given in tokens],
        "next": None if asked is None else _next_tokens(again, before[asked], after[asked]),
        "masked": again.predicts.masked,
        "reason": None,
    }, [tokens]


def _refusal(error: ValueError) -> ParameterError:
    """In one sentence why a model's heads cannot be switched off."""
    return error if isinstance(error, ParameterError) else ParameterError(f"heads: {error}")


def _of_tokens(again: Rereading, predicted: Predictions, given: Tensor) -> np.ndarray:
    """(L,) the log-probability of each token; NaN of those that are not predicted."""
    found = np.full(len(again.tokens), np.nan, np.float32)
    places, rows = list(predicted.tokens), list(predicted.rows)
    found[places] = given[rows, again.tokens[places]].cpu().numpy()
    return found


def _mean_loss(tokens: np.ndarray) -> float:
    """In nats a token; NaN where none is predicted."""
    known = tokens[~np.isnan(tokens)]
    return -float(known.mean(dtype=np.float64)) if len(known) else math.nan


def _next_tokens(again: Rereading, before: Tensor, after: Tensor) -> list[tuple[str, float, float]]:
    """The most probable tokens before and after, (written, probability before, after), the largest of either first."""
    likely = [given.topk(min(MOST_NEXT, len(given))).indices.tolist() for given in (before, after)]
    among = sorted({*likely[0], *likely[1]}, key=lambda token: (-max(float(before[token]), float(after[token])), token))
    return [(again.write(token), math.exp(before[token]), math.exp(after[token])) for token in among]


def importance_of(run: Run) -> Answer:
    """The reply to `importance`: the text's loss, and its derivative by a gate on each head's output, in nats a token.

    Negative: the head lowers the loss, to first order by so much (`saccade.head_importance`). The buffer has all heads
    of all calls, as in the run.
    """
    with READING:
        try:
            again = _readings(run).again
            if isinstance(again.predicts, str):
                raise ParameterError(f"importance: there is no loss; {again.predicts}")
            if not again.predicts.tokens:
                raise ParameterError("importance: a text of one token has no loss, as no token comes before it")
            found = head_importance(again.module, [again.predicts], lambda _, predicted: _loss(again, predicted))
        except ValueError as error:
            raise _refusal(error) from None
    assert found.signed is not None
    return {"loss": found.loss}, [in_order_of_run(run, found.signed)]


def _loss(again: Rereading, predicted: Predictions) -> Tensor:
    places, rows = list(predicted.tokens), list(predicted.rows)
    return torch.nn.functional.cross_entropy(again.forward()[rows].float(), again.tokens[places])


def patched_from(
    run: Run, other: str, target: str | None, positions: str | None, by: str, ended: Callable[[], bool]
) -> Answer:
    """The reply to `patching`: the change of the metric when each head's output is restored from the clean run.

    The header has the metric in words and its value for both texts, and what stands out in sentences. The buffer has
    the effects, `by` "gradient" or "exact", of all heads of all calls, as in the run.

    MapClosed: after a head, the viewer has `ended`.
    """

    def told(done: int, total: int) -> None:
        run.progress = done, total
        if ended():
            raise MapClosed

    check_again(run, "patching")
    if not isinstance(run.source, TextModel):
        raise ParameterError(f"patching: expected one text, and {run.model} read a source and a target")
    with READING:
        try:
            places = listed_positions(positions)
            made = patch_texts(run.source, run.text, other, by=by, target=target, positions=places, progress=told)
        except ValueError as error:
            raise ParameterError(str(error)) from None
        finally:
            run.progress = None
    found = made.found
    header = {"of": made.measured, "clean": found.clean, "corrupted": found.corrupted}
    return {**header, "sentences": patching_sentences(found)}, [in_order_of_run(run, found.effects)]
