"""A later token changes no earlier output, on every path.

Shape legend: L length, V width of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....support._restored import seeded
from ...findings._finding import Finding, Inapplicable, TargetError, Unmeasured
from .._bounds import Measure, mixed_by, training
from .._documents import Documents, drawn, exchanged
from .._lines import pattern_line
from .._probe import Probe
from .._shrink import smallest
from .._stack import Stack, padding_of

_UNMASKED = "without attention_mask"
# Kernels choose paths by length: one beyond each power of two, where tiles, chunks and buffers end.
_LENGTHS = (7, 17, 33, 65, 129)
_SHORT = 33


@dataclass(frozen=True)
class CallPath:
    """A way to call the stack with documents of one length."""

    name: str
    inputs: Callable[[Documents], Any]
    mode: Callable[[], AbstractContextManager[None]] = nullcontext


class Leak(NamedTuple):
    """A later token that reaches an earlier output."""

    token: int
    output: int
    size: float
    share: float  # of the outputs before the token


def _run(stack: Stack, measure: Measure) -> Iterator[Finding]:
    paths = list(_paths(stack))
    if stack.promises.causal is False:
        raise Inapplicable("it is bidirectional")
    short = drawn(stack.vocabulary, [stack.length(_LENGTHS[0])])[0]
    directions = {}
    for at, path in enumerate(paths):
        paths[at], directions[path.name] = _typed(stack, measure, path, short)
    # A model may need its mask: nobody but this probe calls it without.
    paths = [path for path in paths if path.name != _UNMASKED or directions[path.name] != "raises"]
    ways = {directions[path.name] for path in paths} - {"raises"}
    if stack.promises.causal is None and len(ways) == 1 and "causal" not in ways:
        way = ways.pop()
        reason = Inapplicable if "bidirectional:" in way else Unmeasured
        raise reason(f"nothing says that it is causal (otherwise causal=True), and {way}")
    for path in paths:
        finding = _leaking(stack, measure, path, {name for name, way in directions.items() if way == "causal"})
        if finding is not None:
            yield finding
            return


def _paths(stack: Stack) -> Iterator[CallPath]:
    def unmasked(documents: Documents) -> Any:
        return {name: value for name, value in stack.batch(documents).items() if name != "attention_mask"}

    yield CallPath("as the batch is made", stack.batch)
    inputs = stack.batch(drawn(stack.vocabulary, [stack.length(5)]))
    if padding_of(inputs) is not None and not stack.is_served:  # other masks may be what makes it causal
        yield CallPath(_UNMASKED, unmasked)
    if stack.modules and not mixed_by(stack):
        yield CallPath("in train mode", stack.batch, lambda: training(stack))


def _typed(stack: Stack, measure: Measure, path: CallPath, document: list[int]) -> tuple[CallPath, str]:
    """The path and its direction; where token_type_ids mark a prefix or an image that sees itself whole, the path with
    those of one type, under which it is causal."""
    direction = _direction(stack, measure, path, document)
    inputs = path.inputs([document])
    types = inputs.get("token_type_ids") if isinstance(inputs, Mapping) else None
    for value in (0, 1) if isinstance(types, Tensor) and direction not in ("causal", "raises") else ():

        def typed(documents: Documents, value: int = value) -> Any:
            made = path.inputs(documents)
            return {**made, "token_type_ids": torch.full_like(made["token_type_ids"], value)}

        plain = replace(path, inputs=typed)
        if (way := _direction(stack, measure, plain, document)) == "causal":
            return plain, way
    return path, direction


def _direction(stack: Stack, measure: Measure, path: CallPath, document: list[int]) -> str:
    """ "causal", "raises", or on which later tokens outputs depend, in words."""
    depends = torch.zeros(len(document), len(document), dtype=torch.bool)  # of outputs on tokens
    try:
        [before] = _outputs(stack, path, [document])
        for token in range(len(document)):
            [after] = _outputs(stack, path, [exchanged(document, stack.vocabulary, token, token + 1)])
            if (difference := measure.compare(after, before)) is not None:
                depends[list(difference.differing), token] = True
    except TargetError:
        return "raises"
    return _in_words(depends)


def _in_words(depends: Tensor) -> str:
    later = depends.triu(1)
    if not bool(later.any()):
        return "causal"
    if torch.equal(later, torch.ones_like(later).triu(1)):
        return "it is bidirectional: each output depends on later tokens on every path"
    if torch.equal(depends, depends.T):
        return "it is bidirectional: within a distance outputs depend on later tokens as on earlier ones"
    last = torch.stack([row.nonzero().max() if bool(row.any()) else torch.tensor(at) for at, row in enumerate(later)])
    sizes = last.unique_consecutive(return_counts=True)[1].tolist()
    if torch.equal(later, (last[:, None] == last).triu(1)):
        prefix = sizes[0] > 1 and max([1, *sizes[1:]]) == 1
        return (
            f"its first {sizes[0]} tokens are a prefix whose tokens see each other"
            if prefix
            else (f"tokens see each other in blocks of {', '.join(map(str, sizes))}")
        )
    at = int((last > torch.arange(len(last))).nonzero()[0])
    return f"it is neither causal nor bidirectional; output {at} depends on tokens up to {int(last[at])}"


def _leaking(stack: Stack, measure: Measure, path: CallPath, causal: set[str]) -> Finding | None:
    for length in dict.fromkeys(stack.length(length) for length in _lengths(stack)):
        document = drawn(stack.vocabulary, [length], seed=length)[0]
        leak = _first_leak(stack, measure, path, document)
        if leak is not None:
            return _finding(stack, measure, path, document, leak, causal)
    return None


def _lengths(stack: Stack) -> list[int]:
    window = stack.promises.window
    return sorted({*_LENGTHS, *([window + 3] if window and window < 512 else [])})


def _first_leak(stack: Stack, measure: Measure, path: CallPath, document: list[int]) -> Leak | None:
    """The effect of changing one token alone on the outputs before it."""
    # What the second token does, one output can show, and short documents have it.
    first = 1 if len(document) <= _SHORT else len(document) // 2
    tokens = sorted({first, len(document) // 2, len(document) - 1} & set(range(1, len(document))))
    rows = [document, *(exchanged(document, stack.vocabulary, token, token + 1) for token in tokens)]
    leak = None
    # Rows of one batch may reach each other, which is another fault, and a pack of all may be too long.
    together = [] if stack.is_served or stack.batch is stack.pack else [[rows]]
    for batches in (*together, [[row] for row in rows]):
        before, *after = [out for batch in batches for out in _outputs(stack, path, batch)]
        leaks = (_leak(measure, token, out, before) for token, out in zip(tokens, after, strict=True))
        if (leak := next(filter(None, leaks), None)) is None:
            break
    return leak


def _leak(measure: Measure, token: int, after: Tensor, before: Tensor) -> Leak | None:
    difference = measure.compare(after[:token], before[:token])
    if difference is None:
        return None
    return Leak(token, difference.position, difference.size, len(difference.differing) / token)


def _outputs(stack: Stack, path: CallPath, documents: Documents) -> list[Tensor]:
    """The outputs (L, V) of each document, one row each."""
    with seeded(0, devices=None), path.mode():
        return stack.outputs(documents, path.inputs)


def _finding(
    stack: Stack, measure: Measure, path: CallPath, document: list[int], leak: Leak, causal: set[str]
) -> Finding:
    documents, leak = smallest([document], lambda given: _first_leak(stack, measure, path, given[0]), leak)
    others = f"; {', '.join(sorted(causal))} it is causal" if causal else ""
    return PROBE.error(
        f"{path.name[0].upper()}{path.name[1:]}, a later token changes an earlier output: token {leak.token} of "
        f"{len(documents[0])} changes output {leak.output} by {leak.size:.3g}, and {leak.share:.0%} of the outputs "
        f"before it{others}",
        "Training learns to copy the next token: the loss is low, and generation fails.",
        "is_causal=True, or a triangle that is added to every mask  # on each path: with and without a mask, in "
        "training and in eval mode",
        documents,
        where=f"{path.name}: query {leak.output}, key {leak.token}",
        location=pattern_line(stack, stack.length(_LENGTHS[0])),
        length=len(document),
        query=leak.output,
        key=leak.token,
    )


PROBE = Probe("causality", "A later token changes no earlier output, on every path and at every length.", _run)
