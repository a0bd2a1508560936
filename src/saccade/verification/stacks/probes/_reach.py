"""The pairs that each layer and head sees are those that the configuration says, on every path.

Shape legend: R rows, H heads, L length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....support._registered import registered
from ...findings._finding import Finding, Inapplicable, TargetError, Unmeasured
from .._bounds import Measure
from .._documents import Documents, drawn, exchanged, ids_of, located
from .._layer_rules import LayerRules, Pattern, narrowed, rules_of
from .._lines import pattern_line
from .._probe import Probe
from .._shrink import smallest
from .._stack import Stack, padding_of

_LENGTH = 23
_FAINT = 1e-9  # of the largest change: less is rounding
_MOST_OUTPUTS = 2**26  # numbers in the logits of one document; longer windows are not reached
_LONGEST = 1100
_SHORT = 128  # tokens of a document that is run beside another one


class LayerPairs(NamedTuple):
    """The pairs (H, L, L) that one attention call gives weight to, among the tokens of one document."""

    name: str
    layer: int
    pairs: Tensor
    mass: Tensor  # (H, L): the sum of the weights of each query
    is_explained: bool


class Path(NamedTuple):
    """One way to give a document, and the layers' pairs on it."""

    name: str
    layers: list[LayerPairs]


class WrongReach(NamedTuple):
    """A pair that has weight and should not, or the other way round."""

    path: str
    layer: LayerPairs
    pattern: Pattern
    head: int
    query: int
    key: int
    share: float  # of the layer's pairs that are wrong


def _run(stack: Stack, measure: Measure) -> Iterator[Finding]:
    reason: Inapplicable | None = None
    observed: list[Finding] = []
    try:
        observed.extend(_observed(stack))
    except Inapplicable as error:
        reason = error
    yield from observed or _blind(stack, measure)  # layers say more than outputs
    if reason is not None:
        raise reason


def _observed(stack: Stack) -> Iterator[Finding]:
    """Findings about what layers are seen to do."""
    if stack.module is None:
        raise Inapplicable("it has no module whose layers could be watched")
    rules = rules_of(stack)
    wide = [width for width in (rules.widths if rules else []) if not _fits_in_run(stack, width)]
    # Models of others may copy a width when they are made, where narrowing does not reach it.
    if not wide or not type(stack.module).__module__.startswith("transformers."):
        yield from _findings(stack, rules)
        return
    with narrowed(stack, wide) as (narrow, few):
        said = f", with windows of {', '.join(map(str, few))} keys narrowed to {', '.join(map(str, few.values()))}"
        for finding in _findings(narrow, rules_of(narrow)):
            yield replace(finding, message=finding.message + said)


class Blindness(NamedTuple):
    """A token that outputs do not depend on, in words."""

    message: str
    effect: str
    fix: str


def _blind(stack: Stack, measure: Measure) -> Iterator[Finding]:
    """Outputs that depend on no token but their own, or not on their own; or on no later one, of what is to be
    bidirectional."""
    [document] = drawn(stack.vocabulary, [stack.length(7)])
    blindness = None if stack.is_served else _blindness(stack, measure, document)  # which gives the next token's
    if blindness is None:
        return

    def same(rows: Documents) -> Blindness | None:
        other = _blindness(stack, measure, rows[0])
        return other if other is not None and other.fix == blindness.fix else None

    [document], (words, effect, fix) = smallest([document], same, blindness)
    yield PROBE.error(words, effect, fix, [document], where="model", location=pattern_line(stack, len(document)))


def _blindness(stack: Stack, measure: Measure, document: list[int]) -> Blindness | None:
    if len(document) < 2:
        return None
    changed = [exchanged(document, stack.vocabulary, at, at + 1) for at in range(len(document))]
    before, *after = stack.outputs([document, *changed])
    apart = (torch.stack(after, 1) - before[:, None]).abs().nan_to_num(nan=float("inf")).amax(-1).cpu()  # (L, L)
    depends = apart > (_FAINT * float(apart.max()) if measure.dtype == torch.float64 else 0.0)
    own = torch.eye(len(document), dtype=torch.bool)
    if not bool((depends & ~own).any()):
        weights = (named for module in stack.modules for named in module.named_parameters())
        if any(not name.endswith("bias") and not bool(part.any()) for name, part in weights):
            return None  # a projection or gate that begins at zero hides everything before it
        fix = "out = torch.softmax(scores, dim=-1) @ value  # and it must reach the next layer"
        return Blindness("No output depends on any token but its own", "No context is read.", fix)
    if not bool(depends.diagonal().all()):
        at = int((~depends.diagonal()).nonzero()[0])
        words, effect = f"Output {at} does not depend on token {at}, its own", "Each prediction lacks the newest token."
        return Blindness(words, effect, "mask = query >= key  # tril(), not tril(-1)")
    if stack.promises.causal is False and not bool(depends.triu(1).any()):
        words, effect = (
            "It is to be bidirectional, and no output depends on a later token",
            "Half of the context is lost.",
        )
        return Blindness(words, effect, "is_causal=False  # and no triangle in the mask")
    return None


def _findings(stack: Stack, rules: LayerRules | None) -> Iterator[Finding]:
    document = drawn(stack.vocabulary, [_length(stack, rules)])[0]
    unobserved: dict[str, str] = {}
    paths = [Path(name, _layers(stack, inputs, document, unobserved)) for name, inputs in _inputs(stack, document)]
    if not any(path.layers for path in paths):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in unobserved.items())
        raise Unmeasured(f"no attention among its tokens could be observed{f' ({reasons})' if reasons else ''}")
    findings = [
        *_of_layers(_unexplained, stack, paths, document),
        *_unlike_rules(stack, rules, paths, document),
        *_of_layers(_itself_alone, stack, paths, document),
    ]
    yield from findings[:1] or [
        *_unlike_each_other(paths, document),
        *_of_layers(_without_sinks, stack, paths, document),
    ]
    _say_what_is_left(rules, len(document), unobserved)


def _length(stack: Stack, rules: LayerRules | None) -> int:
    widths = [width for width in (rules.widths if rules else []) if _fits_in_run(stack, width)]
    return stack.length(max([_LENGTH, *(width + 5 for width in widths)]))


def _fits_in_run(stack: Stack, width: int) -> bool:
    """Whether a document that leaves a window of this width can be run."""
    length = width + 5
    return length <= min(_LONGEST, stack.longest or length) and length * int(stack.vocabulary.max()) <= _MOST_OUTPUTS


def _say_what_is_left(rules: LayerRules | None, length: int, unobserved: Mapping[str, str]) -> None:
    """
    Raises:
        Unmeasured: a window longer than what was run, or layers that could not be observed.
    """
    if rules is not None and any(width >= length for width in rules.widths):
        raise Unmeasured(f"a window of {max(rules.widths)} keys is not left within the {length} tokens that were run")
    if unobserved:
        name, reason = next(iter(unobserved.items()))
        raise Unmeasured(f"{len(unobserved)} of its attention calls could not be observed; {name}: {reason}")


# Runs


def _inputs(stack: Stack, document: list[int]) -> Iterator[tuple[str, Any]]:
    """
    Raises:
        Unmeasured: the inputs say by themselves which tokens see each other, as those of a prefix do.
    """
    alone = stack.batch([document])
    types = alone.get("token_type_ids") if isinstance(alone, Mapping) else None
    if isinstance(types, Tensor) and len(types.unique()) > 1:
        raise Unmeasured("token_type_ids may mark tokens that see each other, which no configuration says")
    yield "as the batch is made", alone
    if padding_of(alone) is not None:
        yield "without attention_mask", {name: value for name, value in alone.items() if name != "attention_mask"}
    longer = stack.length(len(document) + 4)
    if stack.takes_padding and longer > len(document):
        generator = torch.Generator().manual_seed(5)
        other = stack.vocabulary[torch.randint(len(stack.vocabulary), (longer,), generator=generator)].tolist()
        padded = stack.batch([document, other])
        yield "in a padded batch", _row_of(padded, document) if len(document) > _SHORT else padded


def _row_of(inputs: Any, document: list[int]) -> Any:
    """The row of a document with its padding, alone: beside another row a long window takes twice the time."""
    ids = ids_of(inputs)
    row = located(inputs, [document])[0].row
    if not isinstance(inputs, Mapping) or any(
        not isinstance(value, Tensor) or value.dim() < 1 or len(value) != len(ids) for value in inputs.values()
    ):
        return inputs
    return {name: value[row : row + 1] for name, value in inputs.items()}


def _layers(stack: Stack, inputs: Any, document: list[int], unobserved: dict[str, str]) -> list[LayerPairs]:
    [place] = located(inputs, [document])
    try:
        seen = registered("verified_models").inside(stack.module, lambda: stack.run(inputs))
    except TargetError:  # another probe reports what raises on one path
        return []
    unobserved.update(seen.unobserved)
    rows, length = ids_of(inputs).shape
    return [
        LayerPairs(
            call.name,
            call.layer,
            call.pairs[place.row, :, place.columns, place.columns].cpu(),
            call.weights[place.row, :, place.columns].sum(-1).cpu(),
            call.is_explained,
        )
        for call in seen.calls
        if call.weights.shape[0] == rows and call.weights.shape[2:] == (length, length)
    ]


# Comparisons


def _unlike_rules(stack: Stack, rules: LayerRules | None, paths: list[Path], document: list[int]) -> Iterator[Finding]:
    if rules is None:
        return
    wrong = [
        place
        for path in paths
        for layer in path.layers
        if (patterns := rules.of(layer.layer)) and (place := _wrong(path.name, layer, patterns)) is not None
    ]
    if wrong:
        yield _as_finding(wrong, paths, document)
        return
    needed = [pattern for pattern in rules.needed if (pattern.width or len(document)) < len(document)]
    for path in paths if needed else ():
        if path.layers and not any(_fits(layer, pattern) for layer in path.layers for pattern in needed):
            place = _place(path.name, path.layers[0], needed[0])
            assert place is not None
            yield _as_finding([place], paths, document)
            return


def _fits(layer: LayerPairs, pattern: Pattern) -> bool:
    """Whether a head of the layer has this pattern."""
    return bool((layer.pairs == pattern.pairs(layer.pairs.shape[-1])).all(-1).all(-1).any())


def _wrong(path: str, layer: LayerPairs, patterns: tuple[Pattern, ...]) -> WrongReach | None:
    """The wrong pair that needs the fewest tokens, of the pattern that is nearest; None if each head fits one."""
    lengths = layer.pairs.shape[-1]
    fitting = torch.stack([(layer.pairs == pattern.pairs(lengths)).all(-1).all(-1) for pattern in patterns]).any(0)
    if bool(fitting.all()):
        return None
    places = [_place(path, layer, pattern, ~fitting) for pattern in patterns]
    return min((place for place in places if place is not None), key=lambda place: place.share)


def _place(path: str, layer: LayerPairs, pattern: Pattern, heads: Tensor | None = None) -> WrongReach | None:
    """The first wrong pair in one of these heads (H,), of all by default."""
    differ = layer.pairs != pattern.pairs(layer.pairs.shape[-1])
    if heads is not None:
        differ = differ & heads[:, None, None]
    if not bool(differ.any()):
        return None
    head, query, key = min(differ.nonzero().tolist(), key=lambda at: (max(at[1:]), at[0]))
    return WrongReach(path, layer, pattern, head, query, key, float(differ.double().mean()))


def _as_finding(wrong: list[WrongReach], paths: list[Path], document: list[int]) -> Finding:
    first = wrong[0]
    layer, pattern = first.layer, first.pattern
    sees = bool(layer.pairs[first.head, first.query, first.key])
    width = _width(layer.pairs[first.head])
    names = [path.name for path in paths]
    where_wrong = list(dict.fromkeys(place.path for place in wrong))
    right = [name for name in names if name not in where_wrong]
    only = f" {' and '.join(where_wrong)}" if right else ""
    measured = f"; {width} keys are seen, not {pattern.width}" if pattern.width and width != pattern.width else ""
    return PROBE.error(
        f"Layer {layer.layer}, head {first.head}{only}: query {first.query} "
        f"{'sees' if sees else 'does not see'} key {first.key}, where {pattern.argument} says {pattern.words}{measured}"
        + (f"; {' and '.join(right)} it is right" if right else ""),
        f"{first.share:.0%} of the pairs of this layer are wrong. The model computes with another context than it was "
        "trained with, and no error is raised.",
        _fix(pattern, width),
        [document[: max(first.query, first.key) + 1]],
        where=f"{layer.name}: layer {layer.layer}, head {first.head}, query {first.query}, key {first.key}",
        layers=sorted({place.layer.layer for place in wrong}),
        paths=where_wrong,
        argument=pattern.argument,
    )


def _width(pairs: Tensor) -> int:
    """How many keys the last query sees up to its own."""
    seen = pairs[-1].nonzero().flatten()
    return 0 if not len(seen) else len(pairs) - int(seen[0])


def _fix(pattern: Pattern, width: int) -> str:
    if pattern.width is None:
        return "mask = query >= key  # of each layer of this kind, on every path"
    if "chunk" in pattern.words:
        return f"mask = (query >= key) & (query // {pattern.width} == key // {pattern.width})  # on every path"
    off = "  # off by one: the query's own key counts" if abs(width - pattern.width) == 1 else "  # on every path"
    return f"mask = (query >= key) & (query - key < {pattern.width}){off}"


def _of_layers(
    find: Callable[[Stack, str, LayerPairs, list[int]], Finding | None],
    stack: Stack,
    paths: list[Path],
    document: list[int],
) -> list[Finding]:
    """The first finding about a layer, on any path."""
    found = (find(stack, path.name, layer, document) for path in paths for layer in path.layers)
    return list(islice(filter(None, found), 1))


def _itself_alone(stack: Stack, path: str, layer: LayerPairs, document: list[int]) -> Finding | None:
    """A layer whose queries see no key but their own; or one that is to be bidirectional, and some see no later key."""
    later = layer.pairs.any(0).triu(1).any(-1)[:-1]  # (L - 1,)
    alone = bool((layer.pairs == torch.eye(layer.pairs.shape[-1], dtype=torch.bool)).all())
    if alone and len(later):
        words, effect = "each query sees its own key alone", "The layer mixes no tokens: no context is read."
    elif stack.promises.causal is False and not bool(later.all()):
        first = int((~later).nonzero()[0])
        words = f"query {first} sees no later key, though the model is to be bidirectional"
        effect = f"{float((~later).double().mean()):.0%} of the outputs are computed without what follows them."
    else:
        return None
    return PROBE.error(
        f"Layer {layer.layer} {path}: {words}",
        effect,
        "A window counts keys, and None, not 0, is no window"
        if alone
        else "is_causal=False  # and on every path a mask without a triangle",
        [document[:2]] if alone else [document[: first + 2]],
        where=f"{layer.name}: layer {layer.layer}",
        paths=[path],
    )


def _unlike_each_other(paths: list[Path], document: list[int]) -> Iterator[Finding]:
    """The same layer sees other pairs of the same document on another path."""
    first = paths[0]
    for path in paths[1:]:
        others = {layer.name: layer for layer in path.layers}
        for layer in first.layers:
            other = others.get(layer.name)
            if other is None or other.pairs.shape != layer.pairs.shape or torch.equal(other.pairs, layer.pairs):
                continue
            differ = other.pairs != layer.pairs
            head, query, key = min(differ.nonzero().tolist(), key=lambda at: (max(at[1:]), at[0]))
            sees = bool(layer.pairs[head, query, key])
            yield PROBE.error(
                f"Layer {layer.layer}, head {head}: query {query} {'sees' if sees else 'does not see'} key {key} "
                f"{first.name}, and {'does not' if sees else 'sees it'} {path.name}",
                f"{float(differ.double().mean()):.0%} of the pairs of this layer depend on how the same document is "
                "given.",
                "Build the same mask on each path: with and without attention_mask, with and without padding",
                [document[: max(query, key) + 1]],
                where=f"{layer.name}: layer {layer.layer}, head {head}, query {query}, key {key}",
                paths=[first.name, path.name],
            )
            return


def _unexplained(stack: Stack, path: str, layer: LayerPairs, document: list[int]) -> Finding | None:
    """A kernel whose output is not that of the mask that it is given."""
    if layer.is_explained:
        return None
    return PROBE.error(
        f"Layer {layer.layer} {path}: the output is not that of the queries, keys, values and mask that its kernel is "
        "given",
        "The kernel leaves out a mask, a window, a sink or a bias, and no error is raised.",
        "Pass every argument on to the kernel, or choose another attention implementation",
        [document],
        where=f"{layer.name}: layer {layer.layer}",
        paths=[path],
    )


def _without_sinks(stack: Stack, path: str, layer: LayerPairs, document: list[int]) -> Finding | None:
    """A layer that has a parameter for sinks, and weights that sum to 1."""
    assert stack.module is not None
    part = dict(stack.module.named_modules()).get(layer.name.partition("#")[0])
    sinks = getattr(part, "sinks", None)
    whole = (layer.mass - 1).abs().amax(-1) < 1e-6  # (H,)
    if not (isinstance(sinks, Tensor) and sinks.numel() == len(whole) and bool((whole & (sinks > -20)).any())):
        return None
    head = int(whole.nonzero()[0])
    return PROBE.error(
        f"Layer {layer.layer}, head {head} {path}: its weights sum to 1, so its attention sink has no part in the "
        "softmax",
        "Each output is larger than the model was trained to give.",
        "Pass the sinks on to the kernel (s_aux, sinks), or choose an implementation that takes them",
        [document[:2]],
        where=f"{layer.name}.sinks: layer {layer.layer}, head {head}",
        paths=[path],
    )


PROBE = Probe(
    "reach", "Each layer and head sees the pairs that the configuration says, on every path.", _run, rounds=False
)
