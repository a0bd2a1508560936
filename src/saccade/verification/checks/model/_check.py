"""Promise: a whole model keeps what its attention promises: causality, padding, batches, caches.

Shape legend: B batch, L length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....support._numbers import rounded
from ...findings._finding import Finding, Inapplicable
from ...subject._calling import guarded
from ...subject._check import Check
from ...subject._influence import is_causal
from ...subject._subject import Subject
from ...subject._token_models import PatchModel
from ._cache import caches
from ._common import NAME, NOISE, error, largest
from ._pad_ids import pad_ids
from ._padding import padding
from ._pairs import pairs
from ._visibility import batches, blindness, leaks


def _run(subject: Subject) -> Iterator[Finding]:
    if isinstance(subject.target, PatchModel):
        yield from _images(subject)
        return
    if subject.form != "tokens":
        raise Inapplicable("it is not a whole model of tokens or images")
    for part in (_sees, batches):
        findings = list(part(subject))
        yield from findings
        if findings:  # the other parts would say the same again
            return
    for part in (padding, pad_ids, caches, pairs):
        yield from part(subject)


def _sees(subject: Subject) -> Iterator[Finding]:
    if is_causal(subject):
        yield from leaks(subject)
    yield from blindness(subject)


def _images(subject: Subject) -> Iterator[Finding]:
    """Images of one batch do not influence each other."""
    patches = subject.target
    images = patches.pixels(3)
    other = images.clone()
    other[1] = patches.pixels(3, seed=1)[1]
    with torch.no_grad():
        before, after = (
            guarded(patches.model, pixel_values=pixels).last_hidden_state.flatten(1, -2) for pixels in (images, other)
        )
    allowed = largest(after[1:2], before[1:2]).size or 1.0
    gap = largest(after[[0, 2]], before[[0, 2]])
    if gap.size > NOISE * allowed:
        yield error(
            f"An image's output changes by {gap.size:.3g} when another image of its batch does.",
            "The result for an image depends on the others in its batch.",
            "The batch axis must stay apart in every view, softmax and mean",
            {"change": rounded(gap.size)},
        )


CHECK = Check(
    NAME,
    NAME,
    "A whole model keeps the promises of its attention, decoding included.",
    "Tokens are exchanged one at a time, padded on both sides, batched with others and decoded in steps, and all "
    "outputs compared.",
    "Correct layers can be combined wrongly: a mask that reaches one layer only, positions that "
    "forget the cache, a cross-attention that reads padding.",
    _run,
)
