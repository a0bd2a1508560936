"""The decoder reads the source of its own row, and no padding of it; the encoder reads in both directions.

Shape legend: R rows, L decoder tokens, S source tokens, V width of an output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...findings._finding import Finding, Inapplicable, TargetError
from ...subject._calling import guarded
from ...subject._token_models import EncoderDecoderModel
from .._bounds import Measure
from .._documents import Documents, drawn, exchanged, ids_of
from .._lines import lost_line
from .._pad_ids import PadId, pad_id
from .._probe import Probe
from .._stack import Stack

_SOURCE, _REAL = 6, 2  # tokens of a source, and of one that is padded
_ROW = 1  # whose source is changed


def _run(stack: Stack, measure: Measure) -> Iterator[Finding]:
    pair = None if stack.subject is None else stack.subject.target
    if not isinstance(pair, EncoderDecoderModel):
        raise Inapplicable("it has no encoder of another text")
    sources = drawn(stack.vocabulary, [_SOURCE] * 3)
    # Not of the user's batches, which bring sources of their own.
    tokens = {"tokens": torch.tensor(drawn(stack.vocabulary, [stack.length(5)] * 3, seed=1))}
    for finding in (*_read(stack, tokens, sources), *_others(stack, measure, tokens, sources)):
        yield finding
        return
    yield from _both_ways(stack, pair, tokens, sources)
    yield from _padding(stack, measure, pair, tokens, sources)


def _read(stack: Stack, tokens: Any, sources: Documents) -> Iterator[Finding]:
    """Source tokens that no bit of some output depends on."""
    before = stack.run(tokens, source=torch.tensor(sources))
    for at in range(_SOURCE):
        changed = [exchanged(source, stack.vocabulary, at, at + 1) for source in sources]
        same = (stack.run(tokens, source=torch.tensor(changed)) == before).all(-1).all(0)  # (L,)
        if bool(same.any()):
            output = int(same.nonzero()[0])
            yield PROBE.error(
                f"Output {output} of the decoder does not depend on source token {at} ({_SOURCE} source tokens)",
                "The decoder generates without reading the source that it should translate or summarise.",
                "x = x + self.cross_attention(self.norm(x), context, context)  # in every decoder layer, unmasked",
                sources[:1],
                where="cross-attention",
                source=at,
                output=output,
            )
            return


def _others(stack: Stack, measure: Measure, tokens: Any, sources: Documents) -> Iterator[Finding]:
    """Outputs of a row that change with another row's source."""
    other = [exchanged(source, stack.vocabulary) if at == _ROW else source for at, source in enumerate(sources)]
    before, after = (stack.run(tokens, source=torch.tensor(given)) for given in (sources, other))
    for row in {0, 1, 2} - {_ROW}:
        difference = measure.compare(after[row], before[row])
        if difference is not None:
            yield PROBE.error(
                f"Output {difference.position} of row {row} changes by {difference.size:.3g} when the source of row "
                f"{_ROW} does",
                "Rows read each other's sources: a translation depends on what it is batched with.",
                "key = self.key(context).view(B, S, H, D).transpose(1, 2)  # the batch axis stays first",
                sources,
                difference,
                where="cross-attention",
            )
            return


def _both_ways(stack: Stack, pair: EncoderDecoderModel, tokens: Any, sources: Documents) -> Iterator[Finding]:
    """The encoder's outputs, where they are available, depend on later source tokens."""
    changed = [exchanged(source, stack.vocabulary, _SOURCE - 1) for source in sources]
    before, after = (_encoded(stack, pair, tokens, torch.tensor(given)) for given in (sources, changed))
    if before is not None and after is not None and torch.equal(before[:, :-1], after[:, :-1]):
        yield PROBE.error(
            f"The encoder is causal: of its {_SOURCE} outputs only the last depends on the last source token",
            "The encoder reads half of its context, though nothing of the source is to be predicted.",
            "is_causal=False  # no triangular mask in the encoder",
            sources[:1],
            where="encoder",
        )


def _encoded(stack: Stack, pair: EncoderDecoderModel, tokens: Any, source: Tensor) -> Tensor | None:
    """The encoder's output (R, S, E), by itself or in the result of the whole model."""
    model: Any = pair.model
    encoder = model.get_encoder() if hasattr(model, "get_encoder") else getattr(model, "encode", None)
    try:
        with torch.no_grad():
            if encoder is None or encoder is model:  # transformers' own answer where it knows of no encoder
                returned = guarded(pair, ids_of(tokens), source=source)
                returned = getattr(returned, "encoder_last_hidden_state", None)
            else:
                returned = guarded(encoder, **{pair.names[0]: source})
    except TargetError:
        return None
    encoded = getattr(returned, "last_hidden_state", returned)
    return encoded if isinstance(encoded, Tensor) and encoded.dim() == 3 else None


def _padding(
    stack: Stack, measure: Measure, pair: EncoderDecoderModel, tokens: Any, sources: Documents
) -> Iterator[Finding]:
    """Outputs with a padded source are those with the source alone, whatever the padding holds."""
    assert stack.subject is not None
    source = torch.tensor(sources)
    if pair.masks[0] is None:
        known = pad_id(stack.subject, source)
        if known is None:
            return
        pad, more = known, {}
        padded = source.clone()
        padded[_ROW, _REAL:] = known.number
        fillings = [padded]
    else:
        pad = PadId(0, None)
        real = torch.ones_like(source)
        real[_ROW, _REAL:] = 0
        more = {"source_mask": real}
        others = torch.tensor([exchanged(row, stack.vocabulary) for row in sources])
        fillings = [source, torch.where(real.bool(), source, others)]
    one = {name: value[_ROW : _ROW + 1] for name, value in tokens.items()}
    alone = stack.run(one, source=source[_ROW : _ROW + 1, :_REAL])[0]
    for filling in fillings:
        out = stack.run(tokens, source=filling, **more)[_ROW]
        difference = measure.compare(out, alone)
        if difference is not None:
            yield PROBE.error(
                f"With {_SOURCE - _REAL} tokens of padding behind its source, output {difference.position} of the "
                f"decoder differs by {difference.size:.3g}",
                "A translation depends on how long the longest source of its batch is.",
                "The source's mask must be given to the encoder's self-attention and to every cross-attention",
                [sources[_ROW][:_REAL]],
                difference,
                where=pair.masks[0] or f"padding id {pad.number}",
                location=pad.location or lost_line(stack, tokens, [ids_of(tokens), filling], source=filling, **more),
            )
            return


PROBE = Probe(
    "source", "The decoder reads its own row's source and none of its padding; the encoder reads both ways.", _run
)
