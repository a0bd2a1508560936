"""What heads do for a text: the tokens' probabilities without some of them, and what each is worth to the loss.

Shape legend: L tokens, V vocabulary, E width, H heads of a call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ...intervention import Ablate, Scale
from ...intervention._edit import Edit
from ..maps import Run
from ._params import RequestError
from ._rereading import Rereading, rereading_of
from ._steps import READING

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
        """Log-probabilities (L, V) in nats of the token after each one; last hidden states (L, E)."""
        if off in self._kept:
            return self._kept[off]
        heads = {call: [head for other, head in off if other == call] for call, _ in off}
        found = self.edited({call: Ablate(chosen) for call, chosen in heads.items()}) if off else self.again.plain()[0]
        return self._keep(off, found)

    def edited(self, edits: Mapping[str, Edit], *, gradients: bool = False) -> Tensor:
        """The model's output with an edit of each of these calls of the run."""
        by_name: dict[int | str, Edit | Sequence[Edit]] = {self._names[call]: edit for call, edit in edits.items()}
        return self.again.edited(by_name, gradients=gradients)

    def _keep(self, off: Off, output: Tensor) -> Tensor:
        found = output.float().log_softmax(-1) if self.again.predicts else output.float()
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

    Of a language model the buffer is (2, L): log-probabilities in nats of each token after those before it, with all
    heads on and without those that are off; NaN for the first token. The header has both mean losses, and the most
    probable tokens after `row`. Of any other model the buffer is (1, L), |after - before| / |before| of the last hidden
    states.
    """
    with READING:
        try:
            readings = _readings(run)
            again, before, after = readings.again, readings.without(()), readings.without(tuple(off))
        except ValueError as error:
            raise _refusal(error) from None
    if row is not None and row >= len(again.tokens):
        raise RequestError(f"row: expected a token of the {again.side}, 0 to {len(again.tokens) - 1}, got {row}")
    if not again.predicts:
        change = (after - before).norm(dim=-1) / before.norm(dim=-1)
        return {"side": again.side, "loss": None, "next": None}, [change.cpu().numpy()[None]]
    tokens = np.stack([_of_tokens(again, given) for given in (before, after)])
    header = {
        "side": again.side,
        "loss": [_mean_loss(given) for given in tokens],
        "next": None if row is None else _next_tokens(again, before[row], after[row]),
    }
    return header, [tokens]


def _refusal(error: ValueError) -> RequestError:
    """In one sentence why a model's heads cannot be switched off."""
    return error if isinstance(error, RequestError) else RequestError(f"heads: {error}")


def _of_tokens(again: Rereading, given: Tensor) -> np.ndarray:
    """(L,) the log-probability of each token after those before it; NaN for the first."""
    own = given[:-1].gather(1, again.tokens[1:, None])[:, 0].cpu().numpy()
    return np.concatenate([np.full(1, np.nan, own.dtype), own])


def _mean_loss(tokens: np.ndarray) -> float:
    """In nats a token; NaN where no token has one before it."""
    return -float(tokens[1:].mean(dtype=np.float64)) if len(tokens) > 1 else math.nan


def _next_tokens(again: Rereading, before: Tensor, after: Tensor) -> list[tuple[str, float, float]]:
    """The most probable tokens before and after, (written, probability before, after), the largest of either first."""
    likely = [given.topk(min(MOST_NEXT, len(given))).indices.tolist() for given in (before, after)]
    among = sorted({*likely[0], *likely[1]}, key=lambda token: (-max(float(before[token]), float(after[token])), token))
    return [(again.write(token), math.exp(before[token]), math.exp(after[token])) for token in among]


def importance_of(run: Run) -> Answer:
    """The reply to `importance`: the text's loss, and its derivative by a gate on each head's output, in nats a token.

    The derivative at 1 is what a head is worth to first order (Michel et al., "Are Sixteen Heads Really Better than
    One?", 2019, equation 2). Negative: the head lowers the loss. The buffer has all heads of all calls, as in the run.
    """
    with READING:
        try:
            readings = _readings(run)
            again = readings.again
            if not again.predicts:
                raise RequestError(f"importance: {run.model} predicts no next tokens here, so there is no loss")
            gates = {
                call.id: torch.ones(call.shape[1], device=again.tokens.device, requires_grad=True) for call in run.calls
            }
            logits = readings.edited({call: Scale(None, gate) for call, gate in gates.items()}, gradients=True)
        except ValueError as error:
            raise _refusal(error) from None
        if len(logits) < 2:
            raise RequestError("importance: a text of one token has no loss, as no token comes before it")
        loss = torch.nn.functional.cross_entropy(logits[:-1].float(), again.tokens[1:])
        slopes = torch.autograd.grad(loss, list(gates.values()))
    return {"loss": loss.item()}, [torch.cat(slopes).cpu().numpy()]
