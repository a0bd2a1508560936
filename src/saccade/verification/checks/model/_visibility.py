"""The tokens that an output of a whole model depends on: no later one if the model is causal, at least one other, and
none of another batch item.

Shape legend: B batch, L length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ....support._numbers import rounded
from ...findings._finding import Finding
from ...findings._words import TRIANGLE
from ...subject._inputs import NamedInputs
from ...subject._subject import Subject
from ...tracing._batch_mixing import batch_mixing_line
from ._common import NOISE, error, fitting, judged, largest, pattern_line, whose

_LENGTHS = (2, 7, 13)


def effects(subject: Subject, length: int, seed: int = 0) -> Tensor:
    """(L, L): how much output i changes, at most, when token j becomes another; NaN counts as infinitely much."""
    inputs = subject.inputs(1, length, seed=seed)
    base = inputs.map(lambda tokens: tokens.repeat(length, 1))
    other: NamedInputs = base
    for at in range(length):
        other = other.changed([at], item=at, seed=seed + at + 1)
    with torch.no_grad():
        before, after = subject(base).out.double(), subject(other).out.double()
    apart = (after - before).abs().nan_to_num(nan=float("inf")).masked_fill(before.isnan() & after.isnan(), 0.0)
    return apart.amax(-1).T  # items are the tokens changed


def leaks(subject: Subject) -> Iterator[Finding]:
    """Outputs of a causal model that change with a later token."""
    for length in sorted({fitting(subject, wanted) for wanted in _LENGTHS}):
        changes = effects(subject, length)
        ahead = changes.triu(1)
        allowed = float(changes.tril().max()) or 1.0
        if float(ahead.max()) > NOISE * allowed:
            row, column = divmod(int(ahead.argmax()), length)
            if not _alone_moves(subject, length, row, column):
                return  # items of a batch that meet, which `batches` tells
            pairs = int((ahead > NOISE * allowed).sum())
            yield error(
                f"Output {row} changes by {ahead[row, column]:.3g} when {whose(subject)} {column}, which comes later, "
                f"becomes another ({length} tokens; {pairs} of {length * (length - 1) // 2} such pairs leak).",
                "In training the model reads the answer that it is to predict: its loss falls, and what it generates "
                "is far worse than the loss says.",
                f"scores = scores.masked_fill(~{TRIANGLE}, float('-inf'))  # in every layer, before the softmax",
                {
                    "length": length,
                    "output": row,
                    "token": column,
                    "change": rounded(ahead[row, column]),
                    "pairs": pairs,
                },
                pattern_line(subject, subject.inputs(2, length)),
            )
            return


def _alone_moves(subject: Subject, length: int, row: int, column: int) -> bool:
    """Whether output `row` changes with token `column` if the item is the only one of its batch."""
    inputs = subject.inputs(1, length)
    with torch.no_grad():
        before, after = subject(inputs).out[:, row], subject(inputs.changed([column], seed=column + 1)).out[:, row]
    return not torch.equal(before.nan_to_num(), after.nan_to_num())


def blindness(subject: Subject) -> Iterator[Finding]:
    """A model whose outputs depend on no token but their own, or on no later token although it is promised to read both
    ways."""
    length = fitting(subject, 7)
    if length < 2:
        return
    changes = effects(subject, length)
    floor = NOISE * (float(changes.max()) or 1.0)
    apart = ~torch.eye(length, dtype=torch.bool)
    own = changes.diagonal()
    if not (changes[apart] > floor).any():
        yield error(
            f"No output depends on any token but its own: all {length} tokens were changed, one at a time.",
            "The model does not use context: it can learn only token frequencies.",
            "out = torch.softmax(scores, dim=-1) @ value  # and the attention's output must reach the next layer",
            {"length": length},
        )
    elif bool((own <= floor).any()):
        at = int((own <= floor).nonzero()[0])
        yield error(
            f"Output {at} does not depend on {whose(subject)} {at}, its own ({length} tokens).",
            "Each prediction lacks the newest token, which is the most informative one.",
            f"{TRIANGLE}  # the diagonal is seen: tril(), not tril(-1)",
            {"length": length, "output": at},
            pattern_line(subject, subject.inputs(2, length)),
        )
    elif subject.promise.causal is False and not (changes.triu(1) > floor).any():
        yield error(
            f"It is an encoder, but no output depends on a later token ({length} tokens).",
            "Half of the context is never read, and positions near the beginning know almost nothing.",
            "is_causal=False  # and no triangular mask in an encoder",
            {"length": length},
        )


def batches(subject: Subject) -> Iterator[Finding]:
    """Findings about items that change with another item of the batch, or when they are the only item."""
    length = fitting(subject, 7)
    inputs = subject.inputs(3, length)
    with torch.no_grad():
        together = subject(inputs).out
        for changed in (1, 0):  # the middle one stays in place where items are turned round
            after = subject(inputs.changed(slice(0, length), item=changed)).out
            allowed = largest(after[[changed]], together[[changed]]).size or 1.0
            for item in {0, 1, 2} - {changed}:
                gap = largest(after[[item]], together[[item]])
                if gap.size > NOISE * allowed:
                    yield error(
                        f"Item {item} of a batch changes by {gap.size:.3g} (output {gap.position}) when item "
                        f"{changed} does.",
                        "The result for a sequence depends on the others in its batch.",
                        "x.transpose(1, 2).reshape(B, L, H * D)  # the batch axis stays apart in every view",
                        {"item": item, "other": changed, "position": gap.position, "change": rounded(gap.size)},
                        batch_mixing_line(subject, inputs),
                    )
                    return
        yield from _alone(subject, inputs)


def _alone(subject: Subject, inputs: NamedInputs) -> Iterator[Finding]:
    gap, counts = judged(subject, lambda model: largest(model(inputs.items([1])).out, model(inputs).out[1:2]))
    if gap.relative > counts:
        yield error(
            f"An item alone and the same item in a batch of {inputs.batch} differ by {gap.size:.3g} "
            f"(output {gap.position}, {gap.relative:.2g} of the largest output).",
            "Evaluation with another batch size gives different results.",
            "Nothing may be averaged, indexed or reshaped over the batch axis: look for mean(0), [0] and view(-1, ...)",
            {"batch": inputs.batch, "position": gap.position, "change": rounded(gap.size)},
            batch_mixing_line(subject, inputs),
        )
