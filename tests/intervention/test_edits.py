"""Every edit in every model, outputs and gradients, against the same model with dense weights that are rewritten.

Shape legend: B batch, L length, E width.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import saccade
from edit_cases import CASES, Case, Sizes, one_of_each_stage
from edited_models import MODELS, REAL, B, E, EditedModel, L, by_oracle
from rewritten_attention import Oracle


def kept(model: nn.Module, x: Tensor) -> saccade.monitoring.ModelWatch:
    with torch.no_grad(), saccade.watch(model, keep=True, alarms=False) as source:
        model(x)
    return source


def by_hand(model: nn.Module, kind: EditedModel, x: Tensor, case: Case | None = None) -> tuple[Tensor, Oracle]:
    oracle = Oracle({} if case is None else {kind.call: case.rewrite})
    with pytest.MonkeyPatch.context() as patch:
        by_oracle(patch, oracle, kind, model)
        return model(x), oracle


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Of a sum with other weights everywhere."""
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = torch.autograd.grad((out.double() * weights).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(one) if own is None else own for own, one in zip(found, leaves, strict=True)]


def edited(model: nn.Module, kind: EditedModel, x: Tensor, name: str) -> tuple[Tensor, Tensor, Case]:
    """What the edit gives, what it should give, and the edit."""
    other = torch.randn(B, L, E, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(x.dtype)
    source = kept(model, other)
    clean = by_hand(model, kind, other)[1].calls[kind.call]
    width = clean["value"].shape[-1]
    case = CASES[name](Sizes(B, L, kind.keys, kind.group, width, REAL if kind.padded else None), source, clean)
    site = list(source.kept)[kind.call]
    with torch.set_grad_enabled(not case.forward_only):
        expected, _ = by_hand(model, kind, x, case)
        with saccade.intervene(model, {site: case.edits}) as run:
            found = model(x)
    assert run.changed == {site: 1} and not run.unobserved
    if kind.padded:
        expected, found = expected[REAL], found[REAL]
    return found, expected, case


# In these models every edit is tried on each run of the suite; in the others those that show the most, and among the
# slow tests one of each stage.
OFTEN = ("F.sdpa grouped", "einsum, rows first", "Decoder", "grouped by hand")
TELLING = ("mean", "all_at_once", "of_patched_weights")
PAIRS = [
    pytest.param(name, case, marks=() if name in OFTEN[:2] or case in TELLING else pytest.mark.slow)
    for number, name in enumerate(MODELS)
    for case in CASES
    if name in OFTEN or case in (*TELLING, *one_of_each_stage(number))
]


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_edits(name, case):
    kind = MODELS[name]
    if kind.in_place and case.split()[0] in ("query", "key", "sharpened", "all_at_once"):
        with pytest.raises(ValueError, match="queries and keys of this attention cannot be changed: its model changes"):
            edited(kind.make().double(), kind, torch.randn(B, L, E, dtype=torch.float64), case)
        return
    model = kind.make().double()
    x = torch.randn(B, L, E, dtype=torch.float64, requires_grad=True)
    found, expected, case = edited(model, kind, x, case)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)
    if not case.forward_only:
        leaves = [x, *case.leaves, *model.parameters()]
        for own, wanted in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
            torch.testing.assert_close(own, wanted, atol=1e-10, rtol=1e-8)


# In float32 kernels leave hidden heads out and make tiles of weights. Attention by hand is dense in any type.
PAIRS_FLOAT32 = [
    (name, case)
    for number, (name, kind) in enumerate(MODELS.items())
    for case in CASES
    if not kind.in_place
    and (
        name in ("Decoder", "F.sdpa grouped")
        or case in one_of_each_stage(number)
        or (case == "of_weights" and kind.place in ("operator", "sdpa"))
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), PAIRS_FLOAT32)
def test_edits_in_float32(name, case):
    kind = MODELS[name]
    model = kind.make()
    x = torch.randn(B, L, E, requires_grad=True)
    found, expected, case = edited(model, kind, x, case)
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-5, rtol=1e-4)
    if not case.forward_only:
        leaves = [x, *case.leaves, *model.parameters()]
        for own, wanted in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
            torch.testing.assert_close(own, wanted, atol=2e-4, rtol=1e-3)
