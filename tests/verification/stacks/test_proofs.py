"""The corpus by itself: each faulty stack computes what a dense float64 model gives under exactly the wrong pairs and
positions that its case names, and its twin what documents alone are to give. Fails for a case whose fault is none, is
another, or is in its twin, too.
"""

from __future__ import annotations

import pytest
import torch
from stacks import report_table
from stacks.reports.case import Case, dense, inputs, outputs, places, promised
from stacks.reports.every import CASES
from stacks.reports.training import Gradients
from torch.nn.functional import cross_entropy

EQUAL, APART = 1e-9, 1e-6  # of the largest logit; transformers keeps norms and angles in float32
STACKS = [case for case in CASES if not isinstance(case.proof, Gradients)]
STEPS = [case for case in CASES if isinstance(case.proof, Gradients)]


def gap(out, truth):
    """(L,): how far each output is from the truth, of the largest; NaN in the truth is not compared."""
    apart = (out - truth).abs().nan_to_num(nan=float("inf")).amax(-1)
    return apart / truth.abs().max()


def truths(model, documents):
    return [
        dense(model, document, promised(model, len(document)), list(range(len(document)))).detach()
        for document in documents
    ]


def limit(model):
    return 1e-6 if hasattr(model, "config") else EQUAL


def wrong_truths(case: Case, model):
    """What a dense model gives for the rows of the faulty stack, under the wrong pairs and positions."""
    proof = case.proof
    if proof.path in ("decode", "bare", "second"):
        rows = [(document, [(at, 0, document)]) for at, document in enumerate(proof.documents)]
    else:
        made = inputs(case.faulty(), proof)
        rows = [(row, []) for row in made["input_ids"].tolist()]
        for at, (document, (row, start)) in enumerate(zip(*places(made, proof), strict=True)):
            rows[row][1].append((at, start, document))
    found = {}
    for at, (ids, held) in enumerate(rows):
        sees, positions = torch.eye(len(ids), dtype=torch.bool), list(range(len(ids)))
        for _, start, document in held:
            end = start + len(document)
            sees[start:end, start:end] = promised(model, len(document))
            positions[start:end] = range(len(document))
        for row, query, key in proof.pairs:
            if row == at:
                sees[query, key] = ~sees[query, key]
        out = dense(model, ids, sees, list(proof.positions.get(at, positions))).detach()
        found |= {document: out[start : start + len(tokens)] for document, start, tokens in held}
    return [found[at] for at in range(len(proof.documents))]


@pytest.mark.parametrize("case", STACKS, ids=lambda case: case.name)
def test_the_fault_is_the_one_that_is_said(case):
    torch.manual_seed(0)
    proof, skipped = case.proof, case.proof.prompt - 1 if case.proof.path == "decode" else 0
    right = outputs(case.right(), proof)
    faulty = outputs(case.faulty(), proof)
    model = case.right()["model"].double().eval()
    truth = truths(model, proof.documents)
    for out, exact in zip(right, truth, strict=True):
        assert gap(out, exact)[skipped:].max() < limit(model)
    differing = {
        (at, int(output))
        for at, (out, exact) in enumerate(zip(faulty, truth, strict=True))
        for output in (gap(out, exact)[skipped:] > APART).nonzero().flatten() + skipped
    }
    assert differing, "the faulty stack is right"
    if proof.differs is not None:
        assert differing == proof.differs
        return
    for out, exact in zip(faulty, wrong_truths(case, model), strict=True):
        assert gap(out, exact)[skipped:].max() < limit(model)


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_the_gradients_are_wrong_where_it_is_said(case):
    proof = case.proof
    documents = [document for documents in proof.micro_batches for document in documents]
    wrong = {}
    for name, arguments in (("right", case.right()), ("faulty", case.faulty())):
        model = arguments["model"].double()
        losses = [
            cross_entropy(
                dense(model, document, promised(model, len(document)), list(range(len(document))))[:-1],
                torch.tensor(document[1:]),
                reduction="sum",
            )
            for document in documents
        ]
        parameters = dict(model.named_parameters())
        loss = torch.stack(losses).sum() / sum(len(document) - 1 for document in documents)
        exact = torch.autograd.grad(loss, list(parameters.values()))
        arguments["step"](proof.micro_batches)
        wrong[name] = {
            parameter
            for (parameter, tensor), gradient in zip(parameters.items(), exact, strict=True)
            if not torch.allclose(tensor.grad, gradient, rtol=1e-6, atol=1e-10)
        }
    assert wrong["right"] == set()
    assert wrong["faulty"] == proof.wrong


def test_each_report_has_a_case_and_each_kind_three_planted_ones():
    kinds = {case.kind for case in CASES}
    planted = {kind: sum(case.kind == kind and case.report == "planted" for case in CASES) for kind in kinds}
    assert all(count >= 3 for count in planted.values()), planted
    assert len({case.report for case in CASES}) == 29  # 28 reports and "planted"


def test_the_page_has_the_cases():
    assert report_table.PAGE.read_text(encoding="utf-8") == report_table.page()
