"""An encoder-decoder's own promises: the source is read, both ways, and its padding never.

Shape legend: B batch, L decoder tokens, S source tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....support._numbers import rounded
from ...findings._finding import Finding, TargetError
from ...subject._calling import guarded
from ...subject._inputs import NamedInputs
from ...subject._subject import Subject
from ...subject._token_models import EncoderDecoderModel
from ._common import NAME, NOISE, LargestDifference, error, fitting, given, judged, largest, lost_line, output

_warning = partial(Finding, NAME, NAME, "warning")

_LENGTH = 6  # of sources


def pairs(subject: Subject) -> Iterator[Finding]:
    """All checks of an encoder-decoder; a source that is never read makes the others meaningless."""
    target = subject.target
    if not isinstance(target, EncoderDecoderModel):
        return
    source = subject.inputs(3, _LENGTH, seed=3)
    tokens = subject.inputs(3, fitting(subject, 5), seed=4)
    for part in (_is_read, _each_its_own, _both_ways):
        findings = list(part(subject, tokens, source))
        yield from findings
        if findings:
            return
    if target.masks[0] is not None:
        yield from _padding(subject, tokens, source)


def _is_read(subject: Subject, tokens: NamedInputs, source: NamedInputs) -> Iterator[Finding]:
    """Findings for source tokens that do not change an output: each output must depend on each source token."""
    before = _decoded(subject, tokens, source["tokens"])
    own = largest(_decoded(subject, tokens.changed(slice(0, tokens.length)), source["tokens"]), before).size or 1.0
    for at in range(source.length):
        changed = source.changed([at])["tokens"]
        moved = (_decoded(subject, tokens, changed) - before).abs().amax((0, 2))
        unread = (moved <= NOISE * own).nonzero()
        if len(unread):
            yield error(
                f"Output {int(unread[0])} of the decoder does not depend on source token {at} "
                f"({source.length} source tokens, {tokens.length} decoder tokens).",
                "The decoder generates without reading the source that it should translate or summarise.",
                "x = x + self.cross_attention(self.norm(x), context, context)  # in every decoder layer, unmasked",
                {"source": at, "output": int(unread[0])},
            )
            return


def _each_its_own(subject: Subject, tokens: NamedInputs, source: NamedInputs) -> Iterator[Finding]:
    """Another item's source must not change an output."""
    before = _decoded(subject, tokens, source["tokens"])
    other = _decoded(subject, tokens, source.changed(slice(0, source.length), item=1)["tokens"])
    allowed = largest(other[1:2], before[1:2]).size or 1.0
    gap = largest(other[[0, 2]], before[[0, 2]])
    if gap.size > NOISE * allowed:
        yield error(
            f"The decoder's output {gap.position} of an item changes by {gap.size:.3g} when another item's source "
            "does.",
            "Items read each other's sources: a translation depends on what it was batched with.",
            "key = self.key(context).view(B, S, H, D).transpose(1, 2)  # the batch axis stays first",
            {"position": gap.position, "change": rounded(gap.size)},
        )


def _both_ways(subject: Subject, tokens: NamedInputs, source: NamedInputs) -> Iterator[Finding]:
    """The encoder's outputs, if they are available, must depend on later source tokens."""
    before = _encoded(subject, tokens, source["tokens"])
    after = _encoded(subject, tokens, source.changed([source.length - 1])["tokens"])
    if before is None or after is None:
        return
    moved = (after - before).abs().amax((0, 2))
    if not (moved[:-1] > NOISE * moved.max()).any():
        yield error(
            f"The encoder is causal: of its {source.length} outputs only the last depends on the last source token.",
            "The encoder reads half of its context, though nothing of the source is to be predicted.",
            "is_causal=False  # no triangular mask in the encoder",
            {"source": source.length - 1},
        )


def _padding(subject: Subject, tokens: NamedInputs, source: NamedInputs) -> Iterator[Finding]:
    """Findings: padded source tokens, with other ids or in another number, must not change the outputs."""
    real = torch.ones(3, source.length, dtype=torch.long, device=subject.device)
    real[1, 2:] = 0
    other = torch.where(real.bool(), source["tokens"], source.changed(slice(0, source.length))["tokens"])

    def content(subject: Subject) -> LargestDifference:
        return largest(_decoded(subject, tokens, other, real), _decoded(subject, tokens, source["tokens"], real))

    def length(subject: Subject) -> LargestDifference:
        short = _decoded(subject, tokens.items([1]), source["tokens"][1:2, :2])
        return largest(short, _decoded(subject, tokens, source["tokens"], real)[1:2])

    gap, counts = judged(subject, content)
    what = "tokens change"
    if gap.relative <= counts:
        (gap, counts), what = judged(subject, length), "tokens are left away"
    worst = gap
    if worst.relative > counts:
        yield error(
            f"The decoder's output {worst.position} changes by {worst.size:.3g} when only padded source {what}.",
            "A translation depends on how long the longest source of its batch is.",
            "The source's mask must be given to the encoder's self-attention and to every cross-attention",
            {"position": worst.position, "relative": rounded(worst.relative)},
            lost_line(subject, tokens, real, source=source["tokens"], source_mask=real),
        )
        return
    real[1] = 0
    empty = _decoded(subject, tokens, source["tokens"], real)
    if not empty[1].isfinite().all():
        yield _warning(
            "An item whose source is nothing but padding gives NaN.",
            "A loss over all items is NaN as soon as one batch is filled up with an empty item.",
            "torch.nan_to_num(weights)  # or a large negative number in place of -inf",
            {"item": 1},
        )


def _decoded(subject: Subject, tokens: NamedInputs, source: Tensor, mask: Tensor | None = None) -> Tensor:
    more: dict[str, Any] = {} if mask is None else {"source_mask": mask}
    with torch.no_grad():
        return output(subject, given(subject, tokens, source=source, **more))


def _encoded(subject: Subject, tokens: NamedInputs, source: Tensor) -> Tensor | None:
    """The encoder's output (B, S, E), from the encoder or else from the result of the whole model; None if neither has
    it."""
    model: Any = subject.target.model
    encoder = model.get_encoder() if hasattr(model, "get_encoder") else getattr(model, "encode", None)
    with torch.no_grad():
        if encoder is None or encoder is model:  # transformers' own answer where it knows of no encoder
            returned = getattr(given(subject, tokens, source=source), "encoder_last_hidden_state", None)
        else:
            returned = guarded(encoder, **{subject.target.names[0]: source})
    encoded = getattr(returned, "last_hidden_state", returned)
    if encoded is not None and (not isinstance(encoded, Tensor) or encoded.dim() != 3):
        raise TargetError("its encoder gives no output for each source token", None)
    return encoded
