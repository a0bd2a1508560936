"""The training step: train mode differs by dropout alone, gradients reach every head, accumulation and checkpointing
change nothing.

Shape legend: R rows, L length, H heads, V width of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....support._registered import registered
from ....support._restored import seeded
from ...findings._finding import Finding, Inapplicable
from ...subject._calling import guarded
from .._bounds import Difference, Measure, evaluating, mixed_by, training, without_dropout
from .._documents import Documents, drawn
from .._probe import Probe
from .._shrink import smallest
from .._stack import Stack
from .._state import Gradients, attributes, gradients_of
from ._targets import misplaced

_LENGTHS = (13, 5)
_NUDGE = 0.05  # of a weight, relative
# Attributes by which modules turn checkpointing on; transformers' own method sets more than its attribute.
_SWITCHES = (
    "gradient_checkpointing",
    "use_checkpoint",
    "checkpointing",
    "use_checkpointing",
    "activation_checkpointing",
)

Step = Callable[[list[Documents]], Any]


def _run(stack: Stack, measure: Measure) -> Iterator[Finding]:
    if stack.module is None and stack.step is None:
        raise Inapplicable("it has no module that could be trained, and no step is given")
    documents = drawn(stack.vocabulary, [stack.length(length) for length in _LENGTHS])
    documents = documents if stack.takes_padding else documents[:1]
    with training(stack), without_dropout(stack):
        mixed = mixed_by(stack)
        if mixed:
            yield replace(_mixed(mixed), severity="note")
        if stack.module is not None and any(part.requires_grad for part in stack.module.parameters()):
            if not mixed:
                yield from _modes(stack, measure, documents)
            yield from _heads(stack, measure, documents)
            yield from _checkpointing(stack, measure, documents)
            yield from misplaced(stack, PROBE)
        if stack.step is not None and not mixed:
            yield from _accumulation(stack, stack.step)


# Train mode and eval mode


def _mixed(name: str) -> Finding:
    return PROBE.error(
        f"In train mode {name} normalises by the mean of the batch, so each output depends on every token of it",
        "Train mode is not compared with eval mode, and neither are packs and micro-batches with single documents.",
        "nn.LayerNorm or nn.RMSNorm  # where documents are to be independent in training, too",
        [],
        where=name,
    )


def _modes(stack: Stack, measure: Measure, documents: Documents) -> Iterator[Finding]:
    if measure.compare(_in_train_mode(stack, documents, 0), _in_train_mode(stack, documents, 1)) is not None:
        return  # it draws more than dropout: noise of a router, for example

    def apart(given: Documents) -> Difference | None:
        with evaluating(stack):
            expected = torch.cat(stack.outputs(given))
        return measure.compare(_in_train_mode(stack, given, 0), expected)

    before = apart(documents)
    if before is None or not _any_attention_differs(stack, measure, stack.batch(documents)):
        return
    share = len(before.differing) / sum(map(len, documents))
    documents, difference = smallest(documents, apart, before)
    yield PROBE.error(
        f"In train mode without dropout an output differs by {difference.size:.3g} from eval mode",
        f"{min(share, 1):.0%} of the outputs differ: what is trained is not what is evaluated and served.",
        "Use one mask and one path for both modes",
        documents,
        difference,
        where="train mode",
    )


def _in_train_mode(stack: Stack, documents: Documents, seed: int) -> Tensor:
    """The outputs (sum of L, V) of all documents; those of padding are anybody's choice."""
    with seeded(seed, devices=None):
        return torch.cat(stack.outputs(documents))


def _any_attention_differs(stack: Stack, measure: Measure, inputs: Any) -> bool:
    """Whether attention is where the modes begin to differ; routers choose experts in other ways when they train."""
    inside, first_parting = (getattr(registered("verified_models"), name) for name in ("inside", "first_parting"))
    assert stack.module is not None
    train = inside(stack.module, lambda: stack.run(inputs))
    with evaluating(stack):
        evaluated = inside(stack.module, lambda: stack.run(inputs))
    if not train.calls or len(train.calls) != len(evaluated.calls):
        return True
    parting = first_parting(train, evaluated, measure.bound)
    # Weights that differ in a later layer may do so because of what is between: only the first layer tells.
    return parting is not None and parting.layer == train.calls[0].layer


# Gradients of heads


def _heads(stack: Stack, measure: Measure, documents: Documents) -> Iterator[Finding]:
    """Rows of the projections of an attention module that get no gradient."""
    assert stack.module is not None
    inputs = stack.batch(documents)
    if not all(bool(out.isfinite().all()) for out in stack.outputs(documents)):
        return  # gradients of NaN say nothing; the probe of batches names the output
    calls = registered("verified_models").inside(stack.module, lambda: stack.run(inputs)).calls
    layers = {call.name.partition("#")[0]: call for call in calls}
    cut = _first_cut(stack, measure, layers, inputs)
    if cut is None:
        return
    short = [documents[0][:2]]
    again = _first_cut(stack, measure, layers, stack.batch(short))
    shows = again is not None and (again.name, again.rows) == (cut.name, cut.rows)
    yield _without_gradient(cut, layers, short if shows else documents)


def _first_cut(stack: Stack, measure: Measure, layers: dict[str, Any], inputs: Any) -> CutRows | None:
    assert stack.module is not None
    gradients = gradients_of(stack.modules, lambda: _backward(stack, inputs))
    parts = dict(stack.module.named_modules())
    for path in layers:
        for name, projection in parts[path].named_modules(prefix=path):
            cut = _cut_rows(projection, path, name, gradients)
            if cut is not None and _reaches_output(stack, measure, cut, inputs):
                return cut
    return None


class CutRows(NamedTuple):
    """Output channels of a projection whose weights get no gradient."""

    name: str
    path: str  # of the attention module
    weight: Tensor
    by_column: bool
    rows: list[int]
    of: int


def _cut_rows(projection: nn.Module, path: str, name: str, gradients: Gradients) -> CutRows | None:
    weight = getattr(projection, "in_proj_weight", None)  # of nn.MultiheadAttention
    name = f"{name}.in_proj_weight" if weight is not None else f"{name}.weight"
    kind = type(projection).__name__
    if weight is None and kind in ("Linear", "Conv1D"):
        weight = projection.weight
    if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
        return None
    gradient = gradients.get(weight, torch.zeros_like(weight))
    by_row = gradient.abs().amax(0 if kind == "Conv1D" else 1)  # Conv1D is transposed
    rows = ((by_row == 0) | ~by_row.isfinite()).nonzero().flatten().tolist()
    return CutRows(name, path, weight, kind == "Conv1D", rows, len(by_row)) if rows else None


def _reaches_output(stack: Stack, measure: Measure, cut: CutRows, inputs: Any) -> bool:
    """Whether the output changes with these rows: of an index that only chooses keys, and of distances that do not
    occur, it does not."""
    data = cut.weight.data
    generator = torch.Generator().manual_seed(3)
    nudges = torch.randint(2, data.shape, generator=generator).to(data) * 2 - 1
    try:
        nudged = data * (1 + _NUDGE * nudges)
        cut.weight.data = data.clone()
        if cut.by_column:
            cut.weight.data[:, cut.rows] = nudged[:, cut.rows]
        else:
            cut.weight.data[cut.rows] = nudged[cut.rows]
        with evaluating(stack):  # some draw random numbers in train mode
            after = stack.run(inputs)
    finally:
        cut.weight.data = data
    with evaluating(stack):
        before = stack.run(inputs)
    return measure.compare(after.flatten(0, 1), before.flatten(0, 1)) is not None


def _without_gradient(cut: CutRows, layers: dict[str, Any], documents: Documents) -> Finding:
    call = layers[cut.path]
    heads, width = call.weights.shape[1], cut.of // call.weights.shape[1]
    whole = "every row" if len(cut.rows) == cut.of else f"rows {cut.rows[0]} to {cut.rows[-1]} of {cut.of}"
    of_heads = sorted({row // width % heads for row in cut.rows}) if cut.of == heads * call.out.shape[-1] else []
    named = f", head {', '.join(map(str, of_heads))}" if of_heads and len(of_heads) < heads else ""
    return PROBE.error(
        f"No gradient reaches {whole} of {cut.name} in layer {call.layer}{named}",
        "These projections stay as they were initialised.",
        "Look for detach(), no_grad() or .data between the projection and the output",
        documents,
        where=f"{cut.name}: layer {call.layer}{named}",
        rows=cut.rows,
    )


def _backward(stack: Stack, inputs: Any) -> Tensor:
    """The output (R, L, V), after gradients of its random projection were left in the parameters."""
    with torch.enable_grad(), seeded(0, devices=None):
        out = stack.output(inputs)
        generator = torch.Generator().manual_seed(7)
        weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
        if out.requires_grad:
            guarded((out * weights).sum().backward)
    return out.detach()


def _name_of(stack: Stack, parameter: nn.Parameter | None) -> str:
    names = (name for module in stack.modules for name, own in module.named_parameters() if own is parameter)
    return next(names, "a parameter")


def _apart(gradients: Gradients, others: Gradients) -> tuple[float, nn.Parameter | None]:
    """(the largest difference relative to the largest gradient, its parameter)."""
    size = max((float(gradient.abs().max()) for gradient in gradients.values() if gradient.numel()), default=0.0) or 1.0
    largest: float = 0.0
    where: nn.Parameter | None = None
    for parameter in {**gradients, **others}:
        given, other = gradients.get(parameter), others.get(parameter)
        known = given if given is not None else other
        assert known is not None
        given, other = (torch.zeros_like(known) if value is None else value for value in (given, other))
        gap = float((given - other).abs().nan_to_num(float("inf")).max()) / size if known.numel() else 0.0
        if gap > largest:
            largest, where = gap, parameter
    return largest, where


# Checkpointing


def _checkpointing(stack: Stack, measure: Measure, documents: Documents) -> Iterator[Finding]:
    inputs = stack.batch(documents)
    plain = gradients_of(stack.modules, lambda: _backward(stack, inputs))
    again = gradients_of(stack.modules, lambda: _backward(stack, inputs))
    if _apart(plain, again)[0] > measure.bound:
        return
    with _checkpointed(stack) as is_on:
        if not is_on:
            return
        gradients = gradients_of(stack.modules, lambda: _backward(stack, inputs))
    apart, parameter = _apart(plain, gradients)
    where = _name_of(stack, parameter)
    if apart > measure.bound:
        yield PROBE.error(
            f"With checkpointing the gradient of {where} differs by {apart:.3g} of the largest gradient",
            "The repeated forward pass computes something else: another model is trained.",
            "Give the checkpointed function every argument that the plain call gets: mask, positions, no cache",
            documents,
            where=where,
            largest_difference=apart,
        )


@contextmanager
def _checkpointed(stack: Stack) -> Iterator[bool]:
    """Within, checkpointing is on; gives False where the module has no way to turn it on, or it is on already."""
    module: Any = stack.module
    if getattr(module, "is_gradient_checkpointing", False):
        yield False
        return
    if getattr(module, "supports_gradient_checkpointing", False):
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            yield True
        finally:
            module.gradient_checkpointing_disable()
        return
    switches = [(part, name, True) for part in module.modules() for name in _SWITCHES if vars(part).get(name) is False]
    with attributes(switches):
        yield bool(switches)


# Accumulation


def _accumulation(stack: Stack, step: Step) -> Iterator[Finding]:
    """Micro-batches of unequal numbers of tokens give the gradient of one batch."""
    first, second = drawn(stack.vocabulary, [stack.length(length) for length in _LENGTHS])
    if not stack.takes_padding:
        second = drawn(stack.vocabulary, [len(first)], seed=1)[0]

    def of(*batches: Documents) -> Gradients:
        return gradients_of(stack.modules, lambda: guarded(step, list(batches)))

    whole = of([first, second])
    if not whole:
        raise Inapplicable("step leaves no gradients in the parameters of its model")
    bound = max(1e-4, 64 * _apart(whole, of([second, first]))[0])

    def difference(given: Documents) -> tuple[float, nn.Parameter | None] | None:
        if len(given) != 2 or min(map(len, given)) < 2:
            return None
        apart = _apart(of(given), of(*([document] for document in given)))
        return apart if apart[0] > bound else None

    if (before := difference([first, second])) is None:
        return
    documents, (apart, parameter) = smallest([first, second], difference, before)
    crossing = _targets(stack, documents) != sum(_targets(stack, [document]) for document in documents)
    words, fix = _PADDING_PREDICTS if crossing else _why(stack, of, bound)
    finding = PROBE.error(
        f"Accumulated gradients of two micro-batches of {len(documents[0])} and {len(documents[1])} tokens differ by "
        f"{apart:.3g} of the largest from those of one batch of both: {words}",
        "Training depends on how a batch is divided: another number of micro-batches, or of devices, is another loss.",
        fix,
        documents,
        where=_name_of(stack, parameter),
        largest_difference=apart,
    )
    yield replace(finding, severity="warning") if crossing else finding


# Collators that pad on the left usually do this: one token in a row.
_PADDING_PREDICTS = (
    "padding before a row is trained to predict its first token",
    "labels[attention_mask.cumsum(-1) == 1] = -100  # the first token of each row",
)


def _targets(stack: Stack, documents: Documents) -> int:
    """How many labels of a batch the outputs before them are to predict."""
    inputs = stack.batch(documents)
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    return int((labels[:, 1:] != -100).sum()) if isinstance(labels, Tensor) and labels.dim() == 2 else 0


def _why(stack: Stack, of: Callable[..., Gradients], bound: float) -> tuple[str, str]:
    """(the cause, the fix), by the ratio of the gradients where all documents are of one length."""
    first, second = drawn(stack.vocabulary, [stack.length(_LENGTHS[0])] * 2)
    whole, split = of([first, second]), of([first], [second])
    both = [parameter for parameter in whole if parameter in split]
    flat, other = (torch.cat([gradients[own].double().flatten() for own in both]) for gradients in (whole, split))
    times = float(flat @ other / (flat @ flat).clamp(min=1e-300))
    if abs(times - 1) > 1e-3 and float((other - times * flat).abs().max() / flat.abs().max()) <= 10 * bound:
        words = f"they are {times:.3g} times as large for documents of one length"
        return words, "loss = loss / len(batches)  # before backward()"
    return (
        "a token of a short micro-batch weighs more than one of a long one",
        "loss = losses.sum() / tokens_of_all_micro_batches  # not the mean of each",
    )


PROBE = Probe(
    "training",
    "Train mode differs by dropout alone, gradients reach every head, accumulation and checkpointing change nothing.",
    _run,
)
