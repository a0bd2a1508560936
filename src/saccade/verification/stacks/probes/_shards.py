"""The same outputs and the same loss, however many processes share the sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
from torch import Tensor

from ...findings._finding import Finding, Inapplicable, Unmeasured
from .._bounds import Difference, Measure
from .._documents import Documents, drawn, exchanged
from .._probe import Probe
from .._ranks import RankOutput, ranks
from .._stack import Stack, needs

_COUNTS = 1, 2, 3
_LENGTHS = 7, 4, 13  # together a multiple of 12, so of two parts for each rank
_MOST_TOKENS = 1152
_MOST_CHANGED = 48  # tokens that are changed one by one to see which outputs depend on them
_WHOLE_MASK = "saccade.distributed.plan(mask, length)  # the mask of the whole sequence, cut for the rows of each rank"

Call = Callable[[Documents], Tensor]  # (L, V)


def _run(stack: Stack, measure: Measure) -> Iterator[Finding]:
    shard = needs(stack.shard, "function for ranks (shard=)")
    documents = _documents(stack)
    whole = RankOutput(_model_output(stack, documents), None)
    for count in _COUNTS:
        with ranks(count, shard) as together:
            shared = together(documents)
            apart = measure.compare(shared.out, whole.out)
            if apart is not None:
                changes = _Changes(stack, measure, documents, apart.position)
                alone = changes.seen_by(lambda changed: _model_output(stack, changed))
                yield _unlike_model(documents, apart, count, alone, changes.seen_by(lambda it: together(it).out))
                return
        if whole.loss is not None and not _same_loss(measure, shared.loss, whole.loss):
            yield _other_loss(documents, shared.loss, whole.loss, count)
            return
        whole = whole._replace(loss=shared.loss)
    window = stack.promises.window
    if window is not None and window >= max(map(len, documents)):
        raise Unmeasured(f"a window of {window} keys is not left within the {len(documents[-1])} tokens that were run")


def _documents(stack: Stack) -> Documents:
    """Documents of one row, if there is room longer than the window."""
    total, most = sum(_LENGTHS), min(stack.longest or _MOST_TOKENS, _MOST_TOKENS)
    if most < total:
        raise Inapplicable(f"it takes at most {most} tokens, and ranks share {total} in this probe")
    lengths = list(_LENGTHS) if stack.pack is not None else [total]
    times = 1 + (stack.promises.window or 0) * 2 // max(lengths)
    return drawn(stack.vocabulary, [min(times, most // total) * length for length in lengths])


def _model_output(stack: Stack, documents: Documents) -> Tensor:
    """(L, V)."""
    if stack.pack is None:
        return stack.outputs(documents)[0]
    return torch.cat(stack.outputs(documents, stack.pack))


class _Changes:
    """Tokens that are changed one by one, to see on which of them one output depends."""

    def __init__(self, stack: Stack, measure: Measure, documents: Documents, position: int) -> None:
        self.measure, self.position = measure, position
        starts = [0, *accumulate(map(len, documents))]
        every = [(at, token) for at, document in enumerate(documents) for token in range(len(document))]
        step = -(-len(every) // _MOST_CHANGED)
        self.tokens = [starts[at] + token for at, token in every[::step]]
        self.documents = [documents] + [
            [
                exchanged(document, stack.vocabulary, token, token + 1) if n == at else document
                for n, document in enumerate(documents)
            ]
            for at, token in every[::step]
        ]

    def seen_by(self, call: Call) -> set[int]:
        """The changed tokens (positions in the row) that move the output."""
        before, *after = (call(documents)[[self.position]] for documents in self.documents)
        moved = [self.measure.compare(out, before) is not None for out in after]
        return {token for token, moves in zip(self.tokens, moved, strict=True) if moves}


def _unlike_model(documents: Documents, apart: Difference, count: int, alone: set[int], shared: set[int]) -> Finding:
    words, fix = _cause(documents, apart, alone, shared)
    named = "1 rank" if count == 1 else f"{count} ranks"
    return PROBE.error(
        f"On {named} {words}: it differs by {apart.size:.3g} from the model alone",
        f"{len(apart.differing)} of {sum(map(len, documents))} outputs differ. The loss looks plausible, and "
        "another model is trained.",
        fix,
        documents,
        apart,
        where=named,
        gained=sorted(shared - alone),
        lost=sorted(alone - shared),
    )


def _cause(documents: Documents, apart: Difference, alone: set[int], shared: set[int]) -> tuple[str, str]:
    """(what the output does, the fix), from the tokens that it depends on in the model and on ranks."""
    ends = list(accumulate(map(len, documents)))

    def document_of(token: int) -> int:
        return next(at for at, end in enumerate(ends) if token < end)

    here = apart.position
    gained, lost = sorted(shared - alone), sorted(alone - shared)
    foreign = [token for token in gained if document_of(token) != document_of(here)]
    if foreign:
        pair = f"document {document_of(here)} attends to document {document_of(foreign[0])} of its row"
        return f"{pair}, with output {here} of the row", _WHOLE_MASK
    if gained and gained[-1] > here:
        return f"output {here} depends on token {gained[-1]}, which comes later", _WHOLE_MASK
    if gained:
        return f"output {here} depends on token {gained[0]}, which the model hides from it, as a window", _WHOLE_MASK
    if lost:
        fix = "Send every rank the keys and values that its rows see: saccade.distributed.attention(..., plan=plan)"
        return f"output {here} does not depend on token {lost[0]}, which it sees in the model", fix
    fix = "position_ids = torch.arange(length), cut as the tokens are; no norm or pooling over the rows of one rank"
    return f"output {here} depends on the same tokens, at other positions, through another norm or another mask", fix


def _same_loss(measure: Measure, loss: float | None, expected: float) -> bool:
    return (
        loss is not None
        and measure.compare(torch.tensor([[loss]]).double(), torch.tensor([[expected]]).double()) is None
    )


def _other_loss(documents: Documents, loss: float | None, expected: float, count: int) -> Finding:
    return PROBE.error(
        f"On {count} ranks the loss is {'None' if loss is None else f'{loss:.6g}'}, on one {expected:.6g}, from the "
        "same outputs",
        "Labels are lost or counted twice where the row is cut, or ranks count alike with unequal numbers of labels.",
        "Shift labels before they are cut, and divide by the number of labels on all ranks: "
        "saccade.distributed.shard(batch, plan)",
        documents,
        where=f"loss on {count} ranks",
    )


PROBE = Probe("shards", "Outputs and loss are the same on 1, 2 and 3 ranks that share the sequence.", _run)
