"""The token that each output of a training step is trained to predict, read from the gradient of the logits.

The gradient of a cross-entropy by its logits is p - y: below 0 at the target alone, also with smoothed labels.
Shape legend: R rows, L length, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ....support._numbers import counted
from ...findings._finding import Finding, Inapplicable, TargetError
from ...subject._calling import guarded
from .._documents import IDS, Documents, drawn, exchanged, ids_of
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
_FIX = "loss = cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())"


class Forward(NamedTuple):
    """A forward in a step: token ids (R, L), logits (R, L, V), and how many tensors of an output have their shape."""

    ids: Tensor
    logits: Tensor
    alike: int


class Trained(NamedTuple):
    """Outputs of one step that are trained, and how many of them have the token at each distance as target."""

    outputs: int
    at: dict[int, int]
    is_alone: bool  # no other output is as wide: heads for later tokens are

    def distance(self) -> int | None:
        """The distance of nearly all targets."""
        if self.outputs < _LEAST:
            return None
        return next((distance for distance, count in self.at.items() if count > _MOST * self.outputs), None)


def misplaced(stack: Stack, probe: Probe) -> Iterator[Finding]:
    """The finding about a causal model that is trained on other tokens than the next ones."""
    documents = drawn(stack.vocabulary, [stack.length(_LENGTH)])
    if stack.module is None or stack.promises.causal is False:
        return

    def shows(given: Documents) -> tuple[int, Trained] | None:
        trained = _trained(_forwards(stack, given))
        distance = trained.distance()
        is_wrong = distance in _WORDS and (distance != 2 or trained.is_alone)
        return (distance, trained) if distance is not None and is_wrong else None

    if (before := shows(documents)) is None or not _reads_up_to_own(stack, documents[0]):
        return
    fix = _fix(stack, documents)
    documents, (distance, trained) = smallest(documents, shows, before)
    what, why = _WORDS[distance]
    yield probe.error(
        f"Each output is trained to predict {what}: {why}",
        f"{trained.at[distance]} of {counted(trained.outputs, 'target')} are that token; the loss falls, and the model "
        "learns no text.",
        fix,
        documents,
        where="labels of the training step",
        distance=distance,
    )


def _fix(stack: Stack, documents: Documents) -> str:
    """Code by which each output predicts the next token, by what the model does with labels that are its own tokens."""
    if stack.step is not None:
        return _FIX
    try:
        moved = _trained(_forwards(stack, documents, ids_of(stack.batch(documents)).long())).distance()
    except (TargetError, Inapplicable):  # of a model that takes no such labels: the finding stands
        return _FIX
    if moved == 1:
        return "labels = input_ids.clone()  # the model moves labels by one token itself"
    if moved == 0:
        return "labels = torch.nn.functional.pad(input_ids[:, 1:], (0, 1), value=-100)  # the model moves no labels"
    return _FIX


def _step(stack: Stack, documents: Documents, labels: Tensor | None) -> Callable[[], Any] | None:
    """A training step with these documents: the user's, or the loss of a model that is given labels, its batch's or
    these."""
    if stack.step is not None:
        step = stack.step
        return lambda: guarded(step, [documents])
    inputs = stack.batch(documents)
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get("labels"), Tensor):
        return None
    inputs = inputs if labels is None else {**inputs, "labels": labels}

    def own() -> None:
        loss = getattr(guarded(stack.model, **{**stack.constants, **inputs}), "loss", None)
        if isinstance(loss, Tensor) and loss.requires_grad:
            guarded(loss.backward)

    return own


def _forwards(stack: Stack, documents: Documents, labels: Tensor | None = None) -> list[Forward]:
    """The forwards of a training step whose logits of tokens are seen; none where there is no such step."""
    assert stack.module is not None
    step = _step(stack, documents, labels)
    if step is None:
        return []
    forwards: list[Forward] = []

    thread = threading.get_ident()

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if threading.get_ident() != thread:
            return
        try:
            ids = ids_of(kwargs if any(name in kwargs for name in IDS) else args)
            logits = per_token(out, ids)
        except (TargetError, Inapplicable, TypeError, ValueError, IndexError, KeyError, AttributeError):
            return
        if logits.requires_grad and logits.shape[-1] > int(ids.max()):
            logits.retain_grad()
            held = tree_leaves(dict(out) if isinstance(out, Mapping) else getattr(out, "__dict__", out))
            alike = [one for one in held if isinstance(one, Tensor) and one.shape[-2:] == logits.shape[-2:]]
            forwards.append(Forward(ids.detach(), logits, len(alike)))

    hook = stack.module.register_forward_hook(keep, with_kwargs=True)
    try:
        gradients_of(stack.modules, step)
    finally:
        hook.remove()
    return forwards


def _trained(forwards: list[Forward]) -> Trained:
    at = dict.fromkeys((*_WORDS, 1), 0)
    outputs = 0
    for ids, logits, _ in forwards:
        if logits.grad is None:
            continue
        for row, column in logits.grad.abs().amax(-1).nonzero().tolist():
            target, outputs = int(logits.grad[row, column].argmin()), outputs + 1
            for distance in at:
                inside = 0 <= column + distance < ids.shape[1]
                at[distance] += inside and int(ids[row, column + distance]) == target
    return Trained(outputs, at, all(forward.alike <= 1 for forward in forwards))


def _reads_up_to_own(stack: Stack, document: list[int]) -> bool:
    """Whether the first output of the step that another token changes is that token's own. It is not in models of both
    directions, nor in those that move their tokens or hidden states: their targets are at other distances."""
    middle = len(document) // 2
    other = exchanged(document, stack.vocabulary, middle, middle + 1)
    forwards = [_forwards(stack, [row])[:1] for row in (document, other)]
    if not all(forwards):
        return False
    (first,), (second,) = forwards
    changed = (first.ids != second.ids).nonzero().tolist() if first.ids.shape == second.ids.shape else []
    if len(changed) != 1:
        return False
    row, column = changed[0]
    differs = ~torch.isclose(first.logits[row], second.logits[row], rtol=1e-6, atol=1e-9).all(-1)
    return differs.nonzero().flatten().tolist()[:1] == [column]
