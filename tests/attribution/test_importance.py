"""Importance of heads against models whose output projections are cut up by hand, and finite differences."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from scipy import stats

import saccade
from models_by_hand import HandModel, bert, decoder, encoder, gpt2, hand_inputs, logits, tokens, with_factors
from saccade.attribution import CallHeads, HeadImportance, HeadValues
from saccade.intervention import Ablate
from slowly import slow_after

MODELS = [decoder, encoder, bert, gpt2]
BATCHES = [tokens(seed) for seed in (1, 2, 3)]


def built(make):
    if make in (bert, gpt2):
        pytest.importorskip("transformers")
    return make()


def loss(model, batch):
    """Curved in the outputs, so that a slope is no difference."""
    found = logits(model(batch))
    return (torch.sin(torch.arange(found.numel(), dtype=torch.float64)).view_as(found) * found).tanh().mean()


def by_hand(model, make, batch, factors, heads):
    with torch.no_grad():
        return float(loss(with_factors(model, make, factors, heads).eval(), batch))


@pytest.mark.parametrize("make", slow_after(2, MODELS))
def test_the_gradient_is_that_of_a_gate_by_finite_differences(make):
    model, step = built(make), 1e-4
    found = saccade.head_importance(model, BATCHES, loss)
    assert len(found.heads) == sum(call.heads for call in found.values.calls) >= 6
    for at, head in enumerate(found.heads):
        heads = found.values.calls[0].heads
        slopes = [
            sum(
                sign * by_hand(model, make, batch, {(head.call, head.head): 1 + sign * step}, heads) for sign in (1, -1)
            )
            / (2 * step)
            for batch in BATCHES
        ]
        slopes = torch.tensor(slopes, dtype=torch.float64)
        # central differences: step^2 times a third derivative, and 2e-16 / step of rounding
        assert float(found.signed.values[at]) == pytest.approx(float(slopes.mean()), abs=1e-9)
        assert float(found.values.values[at]) == pytest.approx(float(slopes.abs().mean()), abs=1e-9)
    assert (found.values.values - found.signed.values.abs()).max() > 1e-6  # signs differ: the two means are two
    assert found.values.values.min() > 1e-7  # and nothing above is 0 against 0


@pytest.mark.parametrize("make", slow_after(2, MODELS))
def test_ablation_is_the_loss_of_a_model_with_the_head_zeroed(make):
    model = built(make)
    found = saccade.head_importance(model, BATCHES, loss, by="ablation")
    heads = found.values.calls[0].heads
    before = [by_hand(model, make, batch, {}, heads) for batch in BATCHES]
    assert found.loss == pytest.approx(sum(before) / 3, abs=1e-12)
    for at, head in enumerate(found.heads):
        rises = [
            by_hand(model, make, batch, {(head.call, head.head): 0.0}, heads) - own
            for batch, own in zip(BATCHES, before, strict=True)
        ]
        interval = stats.t.interval(0.95, 2, loc=sum(rises) / 3, scale=stats.sem(rises))
        assert float(found.values.values[at]) == pytest.approx(sum(rises) / 3, abs=1e-12)
        assert (float(found.low.values[at]), float(found.high.values[at])) == pytest.approx(interval, rel=1e-5)
        assert abs(sum(rises)) > 1e-7


@pytest.mark.parametrize("by", slow_after(2, ["gradient", "ablation", "greedy"]))
def test_a_loss_of_several_numbers_has_intervals_over_them(by):
    """Oracle: each number as the loss of its own, and Student's interval of SciPy."""
    model, keep = decoder(), {"keep": 7} if by == "greedy" else {}

    def losses(model, batch):
        return logits(model(batch))[:, :5, 0].T.tanh().mean(1)

    found = saccade.head_importance(model, BATCHES[:1], losses, by=by, **keep)
    alone = [
        saccade.head_importance(
            model, BATCHES[:1], lambda model, batch, i=i: losses(model, batch)[i], by="ablation" if keep else by
        )
        for i in range(5)
    ]
    maps = [one.signed or one.values for one in alone]
    rises = torch.stack([one.values for one in maps]).numpy()
    low, high = stats.t.interval(0.95, 4, loc=rises.mean(0), scale=stats.sem(rises))
    ours = (
        (found.signed, found.signed_low, found.signed_high)
        if by == "gradient"
        else (found.values, found.low, found.high)
    )
    for one, other in zip(ours, (rises.mean(0), low, high), strict=True):
        assert one.values.numpy() == pytest.approx(other, rel=1e-5)
    assert found.batches == 1 and found.loss == pytest.approx(sum(one.loss for one in alone) / 5)
    assert by != "gradient" or torch.equal(found.values.values, found.signed.values.abs())


def test_greedy_removal_is_the_best_head_of_each_round():
    model, heads = decoder(), 4
    found = saccade.head_importance(model, iter(BATCHES[:2]), loss, by="greedy", keep=3)
    names = [call.name for call in found.values.calls]
    left, gone = set(itertools.product(names, range(heads))), {}

    def mean_without(more):
        return sum(by_hand(model, decoder, batch, {**gone, **more}, heads) for batch in BATCHES[:2]) / 2

    whole = mean_without({})
    before = whole
    for step in found.removed:
        tried = {head: mean_without({head: 0.0}) for head in left}
        rises = {head: loss - before for head, loss in tried.items()}
        before = min(tried.values())
        best = min(tried, key=tried.__getitem__)
        assert (step.head.call, step.head.head) == best
        assert step.loss == pytest.approx(tried[best], abs=1e-12)
        assert step.rise == pytest.approx(tried[best] - whole, abs=1e-12)
        assert step.low < step.rise < step.high
        gone[best] = 0.0
        left.remove(best)
    assert {(head.call, head.head) for head, _ in found.ranked()[:3]} == left and len(left) == 3
    measured = {(head.call, head.head): value for head, value in found.ranked()}
    assert {head: measured[head] for head in rises} == pytest.approx(rises, abs=1e-12)  # when they were last tried
    assert [head for head, _ in found.ranked()[:2:-1]] == [step.head for step in found.removed]


def test_calls_of_a_shared_layer_are_measured_apart():
    """A pattern or path would gate both calls at once."""
    model, x = HandModel(2, shared=True), hand_inputs()
    found = saccade.head_importance(model, [x], lambda model, x: model(x).tanh().sum(), by="ablation")
    assert [call.name for call in found.values.calls] == ["attention.0", "attention.0#2"]
    with torch.no_grad():
        whole = model(x).tanh().sum()
        for at, head in enumerate(found.heads):
            layer, zero = at // 3, torch.zeros(2, 7, 2, dtype=torch.float64)
            expected = model(x, {layer: {"output": {head.head: zero}}}).tanh().sum() - whole
            assert float(found.values.values[at]) == pytest.approx(float(expected), abs=1e-10)


def test_the_model_is_left_as_it_was():
    model = encoder().train()
    model[1].layers[0].eval()
    modes = [module.training for module in model.modules()]
    weight = model[0].weight
    weight.grad = torch.ones_like(weight)
    with torch.no_grad():  # gradients are the function's own affair
        found = [saccade.head_importance(model, BATCHES, loss) for _ in range(2)]
    assert torch.equal(found[0].values.values, found[1].values.values)  # no dropout
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert sum(parameter.grad is not None for parameter in model.parameters()) == 1
    with pytest.raises(ZeroDivisionError):
        saccade.head_importance(model, BATCHES, lambda model, batch: 1 / 0)
    assert [module.training for module in model.modules()] == modes


def test_one_backward_pass_finds_all_heads():
    passes = []

    def counted(model, batch):
        found = loss(model, batch)
        found.register_hook(lambda gradient: passes.append(gradient))
        return found

    saccade.head_importance(decoder(), BATCHES, counted)
    assert len(passes) == len(BATCHES)


@pytest.mark.slow
def test_progress_counts_the_forwards():
    def told(**options):
        steps = []
        saccade.head_importance(decoder(), BATCHES[:2], loss, progress=lambda *step: steps.append(step), **options)
        return steps

    assert told() == [(1, 2), (2, 2)]
    assert told(by="ablation") == [(n + 1, 18) for n in range(18)]  # 8 heads and none, twice
    assert told(by="greedy", keep=6) == [(n + 1, 30) for n in range(30)]  # 8 and 7 heads, twice


def importance(values, removed=()):
    calls = (CallHeads("a", 0, 2), CallHeads("b", 1, 3))
    return HeadImportance(
        "ablation", HeadValues(calls, torch.tensor(values).double()), None, None, 0.0, 1, None, removed
    )


def test_the_least_important_heads_leave_one_of_each_call():
    found = importance([0.1, -5.0, 4.0, 3.0, 2.0])
    assert found.least(keep=3) == {"a": [1], "b": [2]}  # not both heads of a
    assert found.least(keep=0.9) == found.least(keep=0.8) == {"a": [1]}  # 4.5 heads are 4
    assert found.least(keep=2) == {"a": [1], "b": [1, 2]}
    assert found.least(keep=1.0) == found.least(keep=5) == {}
    assert [str(head) for head, _ in found.ranked()] == ["1.0", "1.1", "1.2", "0.0", "0.1"]
    for keep in (0, 0.0, 1.5, 6, -1, True, "half", float("nan")):
        with pytest.raises(ValueError, match="a share in .0, 1. or a number of heads from 1 to 5"):
            found.least(keep)
    with pytest.raises(ValueError, match="1 head for 2 calls, and one of each must stay"):
        found.least(1)


def test_heads_of_two_calls_of_one_layer_are_told_by_their_calls():
    calls = (CallHeads("decoder.0.self", 0, 2), CallHeads("decoder.0.cross", 0, 2), CallHeads("decoder.1.self", 1, 2))
    found = HeadImportance("ablation", HeadValues(calls, torch.arange(6).double()), None, None, 0.0, 1)
    shown = "1.1 5, 1.0 4, decoder.0.cross.1 3, decoder.0.cross.0 2, decoder.0.self.1 1"
    assert str(found).splitlines()[-1] == f"most: {shown}"


def test_what_is_least_can_be_ablated_as_it_is():
    model = decoder()
    found = saccade.head_importance(model, BATCHES[:1], loss, by="greedy", keep=6)
    edits = {name: Ablate(heads) for name, heads in found.least(keep=6).items()}
    with saccade.intervene(model, edits), torch.no_grad():
        now = float(loss(model, BATCHES[0]))
    assert now == pytest.approx(found.removed[-1].loss, abs=1e-12)


def test_the_loss_of_the_output_is_found():
    pytest.importorskip("transformers")
    batches = [{"input_ids": batch, "labels": batch} for batch in BATCHES]
    found = saccade.head_importance(gpt2(), batches)
    same = saccade.head_importance(gpt2(), batches, lambda model, batch: model(**batch)["loss"])
    assert torch.equal(found.values.values, same.values.values)
    with pytest.raises(ValueError, match="loss: the model's output has none"):
        saccade.head_importance(gpt2(), BATCHES)


def test_it_is_printed_and_written_whole():
    found = saccade.head_importance(decoder(), BATCHES[:2], loss, by="greedy", keep=6)
    written = json.loads(json.dumps(found.as_json()))
    assert [line["head"] for line in written["heads"]] == [0, 1, 2, 3] * 2
    assert [(step["layer"], step["head"]) for step in written["removed"]] == [step.head[1:] for step in found.removed]
    lines = str(found).splitlines()
    title = "rise of the loss without each head, in the last round that tried it"
    assert lines[0] == f"{title}; 2 batches, loss {found.loss:.3g}"
    assert lines[2].split() == ["layer", "call", "head", "0", "head", "1", "head", "2", "head", "3"]
    assert [line.split()[:2] for line in lines[3:5]] == [
        ["0", "decoder.blocks.0.attention"],
        ["1", "decoder.blocks.1.attention"],
    ]
    one = saccade.head_importance(decoder(), BATCHES[:1], loss)
    assert one.low is None and set(one.table()[0]) == {"call", "layer", "head", "value", "signed"}
    assert saccade.head_importance(decoder(), BATCHES, loss).table()[0].keys() >= {"low", "high"}


def wrong(change):
    return lambda model, batch: change(loss(model, batch))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": wrong(lambda one: one.expand(2, 5))}, r"loss: expected a scalar, got .*\(2, 5\)"),
        ({"loss": wrong(lambda one: one * float("nan"))}, "loss: expected a finite number, got nan"),
        (
            {"loss": wrong(lambda one: one.detach())},
            "loss: no gradient reaches the heads: .*by='ablation' needs no gradient",
        ),
        ({"loss": wrong(lambda one: one.item())}, "loss: no gradient reaches the heads"),
        ({"loss": lambda model, batch: model.embedding.weight.sum()}, "loss: no gradient reaches the heads"),
        ({"loss": lambda model, batch: 1.0, "by": "ablation"}, "loss: it ran no forward of the model"),
        ({"batches": []}, "batches: expected at least one batch, got none"),
        ({"batches": [], "by": "greedy"}, "batches: expected at least one batch, got none"),
        ({"by": "taylor"}, "by must be one of gradient, ablation, greedy; got 'taylor'"),
        ({"keep": 0.5}, "keep: only for by='greedy'"),
        ({"by": "greedy", "keep": 9}, "a number of heads from 1 to 8, got 9"),
        ({"to": "mean"}, "to: only for ablation"),
        *(
            (
                {"batches": [BATCHES[0], BATCHES[1][:1]], "by": by, "to": "mean"},
                "attention has one item: give batches of several",
            )
            for by in ("ablation", "greedy")
        ),
        ({"batches": [BATCHES[0][:1]], "by": "ablation", "to": "resample"}, "attention has one"),
        ({"model": torch.nn.Sequential(torch.nn.Embedding(31, 5))}, "no attention call matches"),
    ],
)
def test_bad_input_is_named(options, message):
    given = {"model": decoder(), "batches": BATCHES, "loss": loss, **options}
    with pytest.raises(ValueError, match=message):
        saccade.head_importance(given.pop("model"), given.pop("batches"), given.pop("loss"), **given)


def test_other_kinds_are_type_errors():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
        saccade.head_importance("model", BATCHES)
    with pytest.raises(TypeError, match="loss: expected a scalar, got"):
        saccade.head_importance(decoder(), BATCHES, lambda model, batch: None)
    with pytest.raises(TypeError, match=r"batches: expected several batches, .* got one dict; write \[batch\]"):
        saccade.head_importance(decoder(), {"input_ids": BATCHES[0]})
    with pytest.raises(TypeError, match="batches: expected inputs of the model, such as token ids, got text"):
        saccade.head_importance(decoder(), ["some text"])
