"""Whether a call returns the weights that it used.

Shape legend: B batch, H heads, Lq / Lk lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...support._restored import seeded
from ..findings._finding import Finding, Inapplicable, Severity, TargetError, Unmeasured
from ..subject._check import Check
from ..subject._inputs import NamedInputs
from ..subject._source import rates_of, return_of_several, with_rates
from ..subject._subject import CallResult, Subject
from ..tracing._probe import copied
from ..tracing._trace import TracedAttention, measured, traced

_BATCH, _LENGTH, _KEYS = 2, 7, 11
# Weights are at most 1 and computed in float32 at least; what is returned may have gone through another sum.
_OFF = 1e-4
_RATE = 0.25
_FIX = "return output, weights  # those that multiply the values, before dropout"
_EFFECT = "The output is unaffected, but plots and losses that use these weights are wrong."


def _run(subject: Subject) -> Iterator[Finding]:
    if subject.reading.weights is None:
        raise Inapplicable("it returns no weights")
    asked = list(_test_calls(subject))
    if not asked:
        raise Unmeasured("the weights that it uses could not be followed, or differ from call to call")
    for result, attention, hidden, plain in asked:
        difference = _compared(result, attention, hidden, plain)
        if difference is not None:
            yield _finding(subject, attention, *difference)
            return
    yield from _with_dropout(subject)


def _test_calls(subject: Subject) -> Iterator[tuple[CallResult, TracedAttention, Tensor | None, TracedAttention]]:
    """Calls without and with masks: the returned weights, the weights that were used, the pairs that are hidden, and
    the weights without a mask."""
    for keys in (_KEYS, None):
        own = subject.fresh()
        try:
            inputs = own.inputs(_BATCH, min(_LENGTH, own.reading.max_length or _LENGTH), keys)
            result = _call(own, inputs)
            if result.weights is not None and not _alike(result.weights, _call(own, inputs).weights):
                return  # noise, or dropout that is on in eval mode
        except (Inapplicable, TargetError):
            continue
        plain = _measured(own, inputs, {}, result)
        if plain is None:
            return
        yield result, plain, None, plain
        for masks in own.masks(inputs):
            try:
                result = _call(own, inputs, **masks)
            except (Inapplicable, TargetError):
                continue
            masked = _measured(own, inputs, masks, result)
            if masked is not None:
                hidden = ~masks["pairs"][None, None] if "pairs" in masks else ~masks["padding"][:, None, None]
                yield result, masked, hidden, plain
        return


def _call(subject: Subject, inputs: NamedInputs, **masks: Tensor) -> CallResult:
    with torch.no_grad():
        return subject(copied(inputs), **masks)


def _measured(
    subject: Subject, inputs: NamedInputs, masks: dict[str, Tensor], result: CallResult
) -> TracedAttention | None:
    """The attention that may have the returned weights: the last one with weights of their shape."""
    if result.weights is None:
        return None
    try:
        attentions, again = (measured(subject, inputs, **masks) for _ in range(2))
    except (Inapplicable, TargetError):
        return None
    if not all(_alike(attention.weights, other.weights) for attention, other in zip(attentions, again, strict=True)):
        return None
    # of others it is for the checks of softmax and mask to tell
    attentions = tuple(seen for seen in attentions if seen.normalised == "key" and seen.weights.isfinite().all())
    fits = [seen for seen in attentions if _shape_fits(seen.weights, result.weights)]
    exact = [seen for seen in fits if _same(result.weights, seen.weights)]
    best = exact or fits
    return best[-1] if best else None


def _shape_fits(weights: Tensor, returned: Tensor) -> bool:
    heads = returned.shape[1] in (1, weights.shape[1])
    return heads and sorted(returned.shape[2:]) == sorted(weights.shape[2:]) and len(returned) in (1, len(weights))


def _same(returned: Tensor, weights: Tensor) -> bool:
    """Whether the returned weights are the expected ones, of each head or averaged over the heads."""
    if returned.shape[-2:] != weights.shape[-2:]:
        return False
    wanted = weights if returned.shape[1] == weights.shape[1] else weights.mean(1, keepdim=True)
    return torch.allclose(returned.double(), wanted.double().expand(returned.shape), rtol=0, atol=_OFF, equal_nan=True)


def _compared(
    result: CallResult, traced: TracedAttention, hidden: Tensor | None, plain: TracedAttention
) -> tuple[str, dict[str, Any]] | None:
    """Message and evidence of the difference between the returned weights and the used weights; None if they agree."""
    returned = result.weights
    assert returned is not None
    if _same(returned, traced.weights) or _in_another_order(returned, traced.weights):
        return _hidden_weight(returned, traced, hidden)
    under = "" if hidden is None else "Under a mask, "
    what = _explanation(returned, traced, plain)
    sums = returned.double().sum(-1)
    return f"{under}the weights that it returns are not those that multiply the values: {what}.", {
        "returned_shape": list(returned.shape),
        "used_shape": list(traced.weights.shape),
        "smallest_row_sum": sums.min().item(),
        "largest_row_sum": sums.max().item(),
    }


def _hidden_weight(
    returned: Tensor, traced: TracedAttention, hidden: Tensor | None
) -> tuple[str, dict[str, Any]] | None:
    """Message and evidence for masked keys with a weight above 0 that is too small for the comparison of weights to
    report."""
    if hidden is None:
        return None
    here = hidden & (traced.weights == 0) & (returned != 0)
    if returned.shape[1] != traced.weights.shape[1]:
        here = hidden & (traced.weights == 0).all(1, keepdim=True) & (returned != 0)
    if not here.any():
        return None
    item, head, row, column = (int(index) for index in here.nonzero()[0])
    weight = returned[item, head, row, column].item()
    return (
        f"The weight that it returns for query {row} and the hidden key {column} (head {head}, item {item}) is "
        f"{weight:.3g}, not 0, which is what was used.",
        {"weight": weight},
    )


def _explanation(returned: Tensor, traced: TracedAttention, plain: TracedAttention) -> str:
    """A description of the returned weights."""
    weights = traced.weights
    if _same(returned.mT, weights):
        return "queries and keys are exchanged"
    if traced.logits is not None and _equal(returned, traced.logits):
        return "they are the scores that enter the softmax"
    if traced.softened is not None and _same(returned, traced.softened):
        return "they are as they were before something else, a mask say, was applied to them"
    if plain is not traced and _same(returned, plain.weights):
        return "they are those without the mask, so that hidden keys have a weight"
    heads = weights.shape[1]
    if returned.shape[1] == 1 < heads:
        if _equal(returned, weights.sum(1, keepdim=True)):
            return (
                f"they are the sum over the {heads} heads, and their rows sum to {heads}, where their mean is expected"
            )
        for head in range(heads):
            if _equal(returned, weights[:, head : head + 1]):
                return f"they are only those of head {head}"
    elif heads > 1:
        order = _order(returned, weights)
        if order is not None:
            return f"heads are in another order: head 0 has the weights of head {order[0]}"
    return _numbers(returned, weights)


def _numbers(returned: Tensor, weights: Tensor) -> str:
    if returned.shape != weights.shape:
        weights = weights.mean(1, keepdim=True)
    sums = returned.double().sum(-1)
    row_sums = (
        "" if torch.allclose(sums, torch.ones_like(sums), atol=1e-3) else f"; their rows sum to {sums.min():.3g} and up"
    )
    if returned.shape != weights.shape:
        return f"they have the shape {list(returned.shape)}{row_sums}"
    off = (returned.double() - weights.double()).abs().nan_to_num(0.0)
    at = tuple(int(index) for index in torch.unravel_index(off.argmax(), off.shape))
    item, head, row, column = at
    return (
        f"for query {row} and key {column} (head {head}, item {item}) it returns {returned[at]:.3g}, and "
        f"{weights[at]:.3g} was used{row_sums}"
    )


def _order(returned: Tensor, weights: Tensor) -> list[int] | None:
    order = []
    for head in range(weights.shape[1]):
        own = [at for at in range(weights.shape[1]) if _equal(returned[:, head], weights[:, at])]
        if len(own) != 1:
            return None
        order.append(own[0])
    return order if len(set(order)) == len(order) else None


def _in_another_order(returned: Tensor, weights: Tensor) -> bool:
    """Whether the returned weights are the same in another order of keys. Other checks test whether these are the right
    keys."""
    if returned.shape != weights.shape:
        return False
    order = torch.empty(weights.shape[-1], dtype=torch.long)
    order[weights[0, 0, -1].argsort()] = returned[0, 0, -1].argsort()
    return _same(returned[..., order], weights)


def _alike(tensor: Tensor | None, other: Tensor | None) -> bool:
    """Whether both tensors are close, or both None; NaN equals NaN."""
    return tensor is other or (
        tensor is not None and other is not None and torch.allclose(tensor, other, equal_nan=True)
    )


def _equal(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and torch.allclose(
        tensor.double(), other.double(), rtol=1e-4, atol=_OFF, equal_nan=True
    )


def _with_dropout(subject: Subject) -> Iterator[Finding]:
    """Whether the weights returned in train mode contain dropout."""
    rates = rates_of(subject)
    if not rates:
        return
    own = with_rates(subject, rates, _RATE)
    try:
        inputs = own.inputs(_BATCH, min(_LENGTH, own.reading.max_length or _LENGTH))
        with seeded(0), own.training():
            looked = traced(own, inputs)
    except (Inapplicable, TargetError):
        return
    returned = looked.result.weights
    for attention in looked.attentions:
        if returned is None or not _shape_fits(attention.weights, returned) or attention.softened is None:
            continue
        if _same(returned, attention.weights) and not _same(returned, attention.softened):
            gone, usual = int((returned == 0).sum()), _convention(subject)
            words = (
                f"In training the weights that it returns have dropout in them: {gone} of {returned.numel()} are "
                f"0, and rows sum to {returned.double().sum(-1).min():.3g} and up."
            )
            words += f" {usual} so." if usual else ""
            evidence = {"zeros": gone, "of": returned.numel()}
            yield _finding(subject, attention, words, evidence, "warning" if usual else "error")
            return


def _convention(subject: Subject) -> str:
    """The library whose modules return such weights, in words; empty: none."""
    parts = () if subject.module is None else tuple(subject.module.modules())
    if any(isinstance(part, nn.MultiheadAttention) for part in parts):
        return "PyTorch's own nn.MultiheadAttention returns them"
    if any(type(part).__module__.startswith("transformers.models.") for part in parts):
        return "Models of transformers return them"
    return ""


def _finding(
    subject: Subject, traced: TracedAttention, words: str, evidence: dict[str, Any], severity: Severity = "error"
) -> Finding:
    line = return_of_several(subject) or traced.lines.get("values")
    return Finding("weights", "weights", severity, words[0].upper() + words[1:], _EFFECT, _FIX, evidence, line)


CHECK = Check(
    "weights",
    "weights",
    "Returned weights are those that were used: hidden keys 0, no dropout.",
    "What is returned is compared with the weights that multiply the values, as they are followed through the call, "
    "with and without masks, in eval and in training.",
    "Weights are used to understand a model; wrong weights give wrong explanations.",
    _run,
)
