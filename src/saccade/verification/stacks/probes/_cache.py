"""Step by step with the cache is the same as at once, past the window, and when the cache is used a second time.

Shape legend: L length, V width of an output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...findings._finding import Finding, Inapplicable
from ...subject._calling import guarded
from .._bounds import Difference, Measure
from .._documents import Documents, drawn, located
from .._probe import Probe
from .._shrink import smallest
from .._stack import Decoder, Stack

_LENGTH = 23


class Wrong(NamedTuple):
    """The first step that differs."""

    step: int  # tokens so far
    difference: Difference


def _run(stack: Stack, measure: Measure) -> Iterator[Finding]:
    if not stack.decoders:
        raise Inapplicable("no decode function is given, and none is found")
    for decoder in stack.decoders:
        finding = next(_found(stack, measure, decoder), None)
        if finding is not None:
            yield finding


def _found(stack: Stack, measure: Measure, decoder: Decoder) -> Iterator[Finding]:
    window = stack.promises.window
    length = stack.length(max(_LENGTH, 2 * window + 3) if window and window <= 256 else _LENGTH)
    first, second = drawn(stack.vocabulary, [length, stack.length(11)])
    for documents, prompt in (([first], 3), ([first, first], 3), ([second], 1)):
        if _last_wrong(stack, measure, decoder, documents, prompt) is not None:
            yield _finding(stack, measure, decoder, documents, prompt)
            return


def _wrong(stack: Stack, measure: Measure, decoder: Decoder, document: list[int], prompt: int) -> Wrong | None:
    """The first step whose logits are not those of the last token when all are read at once."""
    prompt = min(prompt, len(document))
    state: Any = None
    whole = _at_once(stack, document)
    for end in range(prompt, len(document) + 1):
        logits, state = _step(decoder, document[:end], state)
        if measure.compare(logits[None], whole[end - 1][None]) is None:
            continue
        # A model that is not causal reads the rest of the document, too.
        difference = measure.compare(logits[None], _at_once(stack, document[:end])[-1][None])
        if difference is not None:
            return Wrong(end, difference)
    return None


def _at_once(stack: Stack, document: list[int]) -> Tensor:
    inputs = stack.batch([document])
    [place] = located(inputs, [document])
    return stack.run(inputs)[place.row, place.columns]


def _step(decoder: Decoder, tokens: list[int], state: Any) -> tuple[Tensor, Any]:
    with torch.no_grad():
        logits, state = guarded(decoder.decode, tokens, state)
    return logits.detach().flatten().clone(), state


def _last_wrong(stack: Stack, measure: Measure, decoder: Decoder, documents: Documents, prompt: int) -> Wrong | None:
    """The documents decoded one after the other: what is wrong with the last."""
    for document in documents[:-1]:
        state: Any = None
        for end in range(min(prompt, len(document)), len(document) + 1):
            _, state = _step(decoder, document[:end], state)
    return _wrong(stack, measure, decoder, documents[-1], prompt)


def _finding(stack: Stack, measure: Measure, decoder: Decoder, documents: Documents, prompt: int) -> Finding:
    again = len(documents) > 1

    def shows(given: Documents) -> bool:
        # What is kept from one use to the next would make one document look wrong alone.
        return len(given) == len(documents) and _last_wrong(stack, measure, decoder, given, prompt) is not None

    small = smallest(documents, shows)
    wrong = _last_wrong(stack, measure, decoder, small, prompt)
    assert wrong is not None
    documents, window = small, stack.promises.window
    past = window is not None and wrong.step > window
    when = " when it is used a second time" if again else f", past the window of {window}" if past else ""
    return PROBE.error(
        f"Decoding with {decoder.name} differs from reading the same tokens at once{when}: logits after "
        f"{wrong.step} tokens (a prompt of {min(prompt, len(documents[-1]))}, then one by one) by "
        f"{wrong.difference.size:.3g}",
        "Generated text differs from what the model was trained to give, and grows worse with every token.",
        "Begin each sequence with an empty cache"
        if again
        else "position = cached + torch.arange(new)  # of queries "
        "and keys; and keep as many keys as the window has, the newest",
        documents,
        wrong.difference,
        where=decoder.name,
        step=wrong.step,
    )


PROBE = Probe(
    "cache", "Step by step with the cache is the same as at once, past the window and when it is used again.", _run
)
