"""Step by step with the cache is the same as at once, past the window, and when the cache is used a second time.

Shape legend: L length, V width of an output.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....interception._hooks import hooked
from ...findings._finding import Finding, Inapplicable, TargetError
from ...subject._calling import guarded
from .._bounds import Difference, Measure
from .._documents import Documents, drawn
from .._lines import counting_line
from .._probe import Probe
from .._shrink import smallest
from .._stack import Decoder, Generate, Stack

_LENGTH = 13
_LONG = 68  # beyond 64 keys, where buffers and tiles end
_AHEAD = 4  # more tokens than decoders read and crop again
_STEPPED = 16  # a window that is passed step by step
_WIDEST = 512  # a window that is passed at all
_REST = 10**6  # tokens: all that are left
_BUT_TWO = -2  # all but two
_CHUNKS = (3, 1, _REST)


class Reader:
    """Reads documents at once, each long one a single time: decoders and prompts of several lengths share it."""

    def __init__(self, stack: Stack, measure: Measure):
        self.stack, self.measure = stack, measure
        self._read: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, document: list[int]) -> Tensor:
        """The outputs (L, V). A short document is read again, after whatever decoders have left in the model."""
        out = self._read.get(tuple(document))
        if out is None:
            [out] = self.stack.outputs([document])
            if len(document) >= _LONG:
                self._read[tuple(document)] = out
        return out


class WrongStep(NamedTuple):
    """The first step that differs."""

    step: int  # tokens so far
    difference: Difference


def _run(stack: Stack, measure: Measure) -> Iterator[Finding]:
    if not stack.decoders and stack.generate is None:
        raise Inapplicable("no decode function is given, and none is found")
    reader = Reader(stack, measure)
    for decoder, documents, pieces in _tries(stack):
        wrong = _last_wrong(reader, decoder, documents, pieces)
        if wrong is not None:
            yield _finding(reader, decoder, documents, pieces, wrong)
            return
    if stack.generate is not None:
        yield from _generated(stack, measure, stack.generate)


def _tries(stack: Stack) -> Iterator[tuple[Decoder, Documents, tuple[int, ...]]]:
    """(decoder, documents that are decoded one after the other, tokens of their first pieces; the others come one by
    one): step by step, again, past the window in steps and in the prompt, and in chunks where they reach the model."""
    window = stack.promises.window
    lengths = [_LENGTH, 7, 11]
    if window is not None and window <= _STEPPED:
        lengths[0] = 2 * window + 3
    elif window is not None and window <= _WIDEST:
        lengths += [window + 5]
    long, short, other, *wide = drawn(stack.vocabulary, [stack.length(length) for length in lengths])
    tries: list[tuple[Documents, tuple[int, ...]]] = [([long], (3,)), ([short, short], (3,)), ([other], (1,))]
    if window is not None and wide:
        tries.append((wide, (window - 2,)))
    if window is not None and window <= _WIDEST:
        tries.append((wide or [long], (window + 2,)))
    room = max(1, stack.length(_LONG + _AHEAD) - _AHEAD)
    tries.append((drawn(stack.vocabulary, [room], seed=1), (_BUT_TWO,)))
    for decoder in stack.decoders:
        yield from ((decoder, *each) for each in tries)
        if decoder.is_given and _takes_chunks(stack, decoder, other):
            yield decoder, [other], _CHUNKS


def _takes_chunks(stack: Stack, decoder: Decoder, document: list[int]) -> bool:
    """Whether several tokens after the first reach the model in one call: some functions give it the last one only."""
    tables = [part for module in stack.modules for part in module.modules() if isinstance(part, nn.Embedding)]
    read: list[list[int]] = []
    try:
        _, state = _step(decoder, document[:3], None)
        with hooked(tables, before=lambda _, places, __: read.extend(place.flatten().tolist() for place in places)):
            _step(decoder, document[:7], state)
    except TargetError:
        return False
    return document[3:7] in read


def _ends(length: int, pieces: tuple[int, ...]) -> list[int]:
    """How many tokens each call has read."""
    ends = [min(end, length) for end in accumulate(max(1, length + one) if one < 0 else one for one in pieces)]
    return list(dict.fromkeys([*ends, *range(ends[-1], length + 1)]))


def _wrong(reader: Reader, decoder: Decoder, document: list[int], pieces: tuple[int, ...]) -> WrongStep | None:
    """The first step whose logits are not those of the last token when all are read at once."""
    state: Any = None
    stack, measure, whole = reader.stack, reader.measure, reader(document)
    for end in _ends(len(document), pieces):
        logits, state = _step(decoder, document[:end], state)
        if measure.compare(logits[None], whole[end - 1][None]) is None:
            continue
        # A model that is not causal reads the rest of the document, too; a server may keep a wrong answer.
        whole_again = whole[end - 1] if stack.is_served else stack.outputs([document[:end]])[0][-1]
        difference = measure.compare(logits[None], whole_again[None])
        if difference is not None:
            return WrongStep(end, difference)
    return None


def _step(decoder: Decoder, tokens: list[int], state: Any) -> tuple[Tensor, Any]:
    with torch.no_grad():
        logits, state = guarded(decoder.decode, tokens, state)
    logits = torch.as_tensor(logits).detach()  # some functions work outside PyTorch, or keep axes of 1
    return logits.reshape(-1, logits.shape[-1])[-1].clone(), state


def _last_wrong(reader: Reader, decoder: Decoder, documents: Documents, pieces: tuple[int, ...]) -> WrongStep | None:
    """The documents decoded one after the other: what is wrong with the last."""
    for document in documents[:-1]:
        state: Any = None
        for end in _ends(len(document), pieces):
            _, state = _step(decoder, document[:end], state)
    return _wrong(reader, decoder, documents[-1], pieces)


def _finding(
    reader: Reader, decoder: Decoder, documents: Documents, pieces: tuple[int, ...], wrong: WrongStep
) -> Finding:
    stack = reader.stack
    uses, window = len(documents), stack.promises.window
    again = uses > 1

    def shows(given: Documents) -> WrongStep | None:
        # What is kept from one use to the next would make one document look wrong alone.
        return _last_wrong(reader, decoder, given, pieces) if len(given) == uses else None

    documents, wrong = smallest(documents, shows, wrong)
    past = window is not None and wrong.step > window
    prompt = f"a prompt of {_ends(len(documents[-1]), pieces)[0]}, then "
    how = prompt + ("one by one" if len(pieces) == 1 else "1 token, then all others in one call")
    when = " when it is used a second time" if again else f", past the window of {window}" if past else ""
    return PROBE.error(
        f"Decoding with {decoder.name} differs from reading the same tokens at once{when}: logits after {wrong.step} "
        f"tokens ({how}) by {wrong.difference.size:.3g}",
        "Generated text differs from what the model was trained to give, and grows worse with every token.",
        "Begin each sequence with an empty cache"
        if again
        else "position = cached + torch.arange(new)  # of queries "
        "and keys; and keep as many keys as the window has, the newest",
        documents,
        wrong.difference,
        where=decoder.name,
        location=counting_line(stack, stack.length(7)),
        step=wrong.step,
    )


# Batches of prompts


def _generated(stack: Stack, measure: Measure, generate: Generate) -> Iterator[Finding]:
    prompts = drawn(stack.vocabulary, [stack.length(length) for length in (7, 2, 5)])
    steps = max(1, min(_LENGTH - 2, (stack.longest or 10**6) - 7))
    if (wrong := _wrong_in_batch(stack, measure, generate, prompts, steps)) is None:
        return
    prompts, (row, step, difference) = smallest(
        prompts, lambda fewer: _wrong_in_batch(stack, measure, generate, fewer, steps), wrong
    )
    yield PROBE.error(
        f"generate() for {len(prompts)} prompts of {', '.join(str(len(prompt)) for prompt in prompts)} tokens, padded "
        f"on the left, differs from prompt {row} alone: logits of new token {step} by {difference.size:.3g}",
        "Generation in batches gives other texts than one by one.",
        "position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # and the mask for every cached key",
        prompts,
        difference,
        where="generate",
        row=row,
        step=step,
    )


def _wrong_in_batch(
    stack: Stack, measure: Measure, generate: Generate, prompts: Documents, steps: int
) -> tuple[int, int, Difference] | None:
    """(row, step, difference) of the first logits that are not those of the same tokens, read at once and alone."""
    with torch.no_grad():
        texts, logits = guarded(generate, prompts, steps)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        whole = stack.outputs([prompt + text])[0][len(prompt) - 1 :]
        for step in range(logits.shape[1]):
            difference = measure.compare(logits[row, step][None], whole[step][None])
            if difference is not None:
                return row, step, difference
    return None


PROBE = Probe(
    "cache", "Step by step with the cache is the same as at once, past the window and when it is used again.", _run
)
