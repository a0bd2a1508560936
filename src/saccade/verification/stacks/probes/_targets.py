"""The token that each output of a training step is trained to predict, read from the gradient of the logits.

The gradient of a cross-entropy by its logits is p - y: below 0 at the target alone, also with smoothed labels.
Shape legend: R rows, L length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....support._numbers import counted
from ...findings._finding import Finding, TargetError
from ...subject._calling import guarded
from .._documents import Documents, drawn, ids_of
from .._probe import Probe
from .._shrink import smallest
from .._stack import Stack, per_token
from .._state import gradients_of

_LENGTH, _LEAST = 13, 3  # tokens of the document; targets that are looked at, at least
_MOST = 0.9  # of all targets: a few may be equal by chance, or come from another loss
_WORDS = {
    0: ("the token that it reads", "labels are not shifted"),
    2: ("the token after the next one", "labels are shifted twice"),
    -1: ("the token before it", "labels are shifted the wrong way"),
}
_FIX = (
    "loss = cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())"
    "  # once: models of transformers shift labels themselves"
)


class Trained(NamedTuple):
    """Outputs of one step that are trained, and how many of them have the token at each distance as target."""

    outputs: int
    at: dict[int, int]

    def distance(self) -> int | None:
        """The distance of a causal model's targets, if it is a wrong one."""
        if self.outputs < _LEAST:
            return None
        return next((distance for distance in _WORDS if self.at[distance] > _MOST * self.outputs), None)


def misplaced(stack: Stack, probe: Probe) -> Iterator[Finding]:
    """The finding about a causal model that is trained on other tokens than the next ones."""
    documents = drawn(stack.vocabulary, [stack.length(_LENGTH)])
    run = _step(stack, documents)
    if run is None or stack.module is None or not _is_causal(stack, documents[0]):
        return

    def shows(given: Documents) -> tuple[int, Trained] | None:
        step = _step(stack, given)
        trained = None if step is None else _trained(stack, step)
        distance = None if trained is None else trained.distance()
        return None if trained is None or distance is None else (distance, trained)

    if (before := shows(documents)) is None:
        return
    documents, (distance, trained) = smallest(documents, shows, before)
    what, why = _WORDS[distance]
    yield probe.error(
        f"Each output is trained to predict {what}: {why}",
        f"{trained.at[distance]} of {counted(trained.outputs, 'target')} are that token; the loss falls, and the model "
        "learns no text.",
        _FIX,
        documents,
        where="labels of the training step",
        distance=distance,
    )


def _step(stack: Stack, documents: Documents) -> Callable[[], Any] | None:
    """A training step with these documents: the user's, or the loss of a model that is given labels."""
    if stack.step is not None:
        step = stack.step
        return lambda: guarded(step, [documents])
    inputs = stack.batch(documents)
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get("labels"), Tensor):
        return None

    def own() -> None:
        loss = getattr(guarded(stack.model, **{**stack.constants, **inputs}), "loss", None)
        if isinstance(loss, Tensor) and loss.requires_grad:
            guarded(loss.backward)

    return own


def _trained(stack: Stack, step: Callable[[], Any]) -> Trained | None:
    """The targets of a step; None if its logits of tokens or their gradient are not seen."""
    assert stack.module is not None
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        try:
            ids = ids_of(kwargs if "input_ids" in kwargs else args)
            logits = per_token(out, ids)
        except (TargetError, TypeError, ValueError, IndexError, KeyError, AttributeError):
            return
        if logits.requires_grad and logits.shape[-1] > int(ids.max()):
            logits.retain_grad()
            seen.append((ids.detach(), logits))

    hook = stack.module.register_forward_hook(keep, with_kwargs=True)
    try:
        gradients_of(stack.modules, step)
    finally:
        hook.remove()
    at = dict.fromkeys((*_WORDS, 1), 0)
    outputs = 0
    for ids, logits in seen:
        if logits.grad is None:
            continue
        for row, column in logits.grad.abs().amax(-1).nonzero().tolist():
            target, outputs = int(logits.grad[row, column].argmin()), outputs + 1
            for distance in at:
                inside = 0 <= column + distance < ids.shape[1]
                at[distance] += inside and int(ids[row, column + distance]) == target
    return Trained(outputs, at) if outputs else None


def _is_causal(stack: Stack, document: list[int]) -> bool:
    """Whether the model is promised to be causal, or another last token changes no earlier output."""
    if stack.promises.causal is not None:
        return stack.promises.causal
    other = next(int(token) for token in stack.vocabulary if int(token) != document[-1])
    (first,), (second,) = stack.outputs([document]), stack.outputs([[*document[:-1], other]])
    return torch.allclose(first[:-1], second[:-1], rtol=1e-6, atol=1e-9)
