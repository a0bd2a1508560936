"""Patching against models that take other heads' outputs by hand, and the first order of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

import saccade
from models_by_hand import (
    LENGTH,
    HandModel,
    bert,
    decoder,
    encoder,
    gpt2,
    hand_inputs,
    logits,
    near_texts,
    projection,
    tokens,
)
from saccade.attribution import CallHeads, HeadValues, Patching
from slowly import diagonal, slow_after

CLEAN, CORRUPTED = hand_inputs(seed=1), hand_inputs(seed=2)


def metric(out):
    out = logits(out)
    return (torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view_as(out) * out).tanh().sum()


def linear(out):
    return (torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view_as(out) * out).sum()


def share(patched, base, other):
    return float((patched - base) / (other - base))


def outputs_of(model, x):
    """What every part of every layer is, by layer."""
    with torch.no_grad():
        model(x)
    return [attention.last for attention in model.attention]


@pytest.mark.parametrize(
    ("what", "positions", "direction"),
    [
        ("output", None, "noising"),
        ("output", [1, 4], "denoising"),
        ("query", None, "denoising"),
        ("key", [1, 4], "denoising"),
        ("value", [1, 4], "noising"),
    ],
)
def test_exact_patching_is_the_model_with_the_head_replaced(what, positions, direction):
    model = HandModel()
    found = saccade.patching(
        model, CLEAN, CORRUPTED, metric, by="exact", what=what, positions=positions, direction=direction
    )
    base, source = (CORRUPTED, CLEAN) if direction == "denoising" else (CLEAN, CORRUPTED)
    rows = list(range(7)) if positions is None else positions
    own, others = outputs_of(model, base), outputs_of(model, source)
    with torch.no_grad():
        before, other = metric(model(base)), metric(model(source))
        for at, head in enumerate(found.exact.heads):
            layer = at // 3
            # what reaches the later layers' queries is not patched: only this head's own
            mixed = own[layer][what].clone()
            mixed[:, head.head, rows] = others[layer][what][:, head.head, rows]
            given = {"output": {head.head: mixed[:, head.head]}} if what == "output" else {what: mixed}
            patched = metric(model(base, {layer: given}))
            assert float(found.exact.values[at]) == pytest.approx(share(patched, before, other), abs=1e-12)
            assert float(found.metrics().values[at]) == pytest.approx(float(patched), abs=1e-12)
    assert found.exact.values.abs().min() > 1e-6
    assert [call.name for call in found.exact.calls] == [f"attention.{layer}" for layer in range(3)]
    assert found.gradient is None and found.agreement is None


@pytest.mark.parametrize("make", [decoder, bert, gpt2])
def test_exact_patching_is_a_hook_that_swaps_the_slice_of_the_head(make):
    if make in (bert, gpt2):
        pytest.importorskip("transformers")
    model = make().eval()
    clean, corrupted = tokens(1), tokens(2)
    found = saccade.patching(model, {key_of(make): clean}, corrupted, metric)
    read = {}
    for call in found.exact.calls:
        projection(model, make, call.name).register_forward_pre_hook(
            lambda module, given, name=call.name: read.update({name: given[0]})
        )
    with torch.no_grad():
        before, other = metric(model(corrupted)), metric(model(clean))
        from_clean = dict(read)
        for at, head in enumerate(found.exact.heads):
            heads = found.exact.calls[0].heads

            def swap(module, given, head=head, heads=heads):
                parts = list(given[0].chunk(heads, -1))
                parts[head.head] = from_clean[head.call].chunk(heads, -1)[head.head]
                return (torch.cat(parts, -1), *given[1:])

            handle = projection(model, make, head.call).register_forward_pre_hook(swap)
            patched = metric(model(corrupted))
            handle.remove()
            assert float(found.exact.values[at]) == pytest.approx(share(patched, before, other), abs=1e-10)


def key_of(make):
    return "tokens" if make is decoder else "input_ids"


def test_an_encoder_of_pytorch_is_patched_as_by_hand():
    model = encoder().eval()
    clean, corrupted = tokens(1), tokens(2)
    found = saccade.patching(model, clean, corrupted, metric, by="exact")

    def by_hand(ids, given=None):
        x, kept = model[0](ids), []
        for number, layer in enumerate(model[1].layers):
            own = layer.self_attn
            q, k, v = (
                part.unflatten(-1, (4, 5)).transpose(1, 2)
                for part in torch.nn.functional.linear(x, own.in_proj_weight, own.in_proj_bias).chunk(3, -1)
            )
            out = torch.softmax(q @ k.transpose(-2, -1) / 5**0.5, -1) @ v
            kept.append(out.clone())
            if given is not None and given[0] == number:
                out[:, given[1]] = given[2]
            x = layer.norm1(x + own.out_proj(out.transpose(1, 2).flatten(2)))
            x = layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))
        return metric(x), kept

    with torch.no_grad():
        (before, _), (other, kept) = by_hand(corrupted), by_hand(clean)
        for at, head in enumerate(found.exact.heads):
            layer = at // 4
            patched, _ = by_hand(corrupted, (layer, head.head, kept[layer][:, head.head]))
            assert float(found.exact.values[at]) == pytest.approx(share(patched, before, other), abs=1e-10)


@pytest.mark.parametrize("positions", [None, [0, 5]])
@pytest.mark.parametrize("what", ["output", "value"])
def test_both_ways_agree_where_the_metric_is_linear(what, positions):
    """One layer, nothing curved after it: the first order is all there is."""
    model = HandModel(layers=1, feed_forward=False)
    found = saccade.patching(model, CLEAN, CORRUPTED, linear, what=what, positions=positions)
    assert torch.allclose(found.exact.values, found.gradient.values, rtol=0, atol=1e-12)
    assert found.exact.values.abs().min() > 1e-4
    assert found.agreement[:2] == pytest.approx((1.0, 1.0)) and found.agreement.common == found.agreement.top == 1


@pytest.mark.parametrize(("what", "by_hand"), diagonal(["output", "query", "key", "value"], [True, False]))
def test_what_the_first_order_leaves_is_of_the_second(by_hand, what):
    """With inputs ten times nearer to each other the difference of the changes is a hundred times smaller; of grouped
    queries each head has its own part of the gradient of its key head."""
    left = []
    for near in (1e-3, 1e-4):
        model = HandModel() if by_hand else decoder()
        pair = (CLEAN, CLEAN + near * hand_inputs(seed=4)) if by_hand else near_texts(near)
        found = saccade.patching(model, *pair, metric, what=what)
        change = (found.exact.values - found.gradient.values) * (found.clean - found.corrupted)
        left.append(float(change.abs().max()))
        assert found.agreement.pearson > 0.999
    assert 30 < left[0] / left[1] < 300


def test_weights_are_patched_exactly_only():
    model = HandModel(layers=1)
    found = saccade.patching(model, CLEAN, CORRUPTED, metric, by="exact", what="weights")
    there, own = outputs_of(model, CLEAN)[0], outputs_of(model, CORRUPTED)[0]
    weights = torch.softmax(there["query"] @ there["key"].transpose(-2, -1) / 5**0.5, -1)
    with torch.no_grad():
        before, other = metric(model(CORRUPTED)), metric(model(CLEAN))
        for head in range(3):
            patched = metric(model(CORRUPTED, {0: {"output": {head: (weights @ own["value"])[:, head]}}}))
            assert float(found.exact.values[head]) == pytest.approx(share(patched, before, other), abs=1e-12)
    with pytest.raises(ValueError, match="weights can only be patched exactly; pass by='exact'"):
        saccade.patching(model, CLEAN, CORRUPTED, metric, what="weights")


def test_lengths_may_differ_with_positions():
    """Rows 0 and 2 of a text of 5 tokens in one of 7."""
    model, short = HandModel(), hand_inputs(length=5, seed=8)

    def last(out):
        return out[:, -1].tanh().sum()

    found = saccade.patching(model, short, CORRUPTED, last, positions=[0, 2])
    kept, own = outputs_of(model, short), outputs_of(model, CORRUPTED)
    with torch.no_grad():
        mixed = own[1]["output"][:, 2].clone()
        mixed[:, [0, 2]] = kept[1]["output"][:, 2, [0, 2]]
        patched = last(model(CORRUPTED, {1: {"output": {2: mixed}}}))
        ends = last(model(CORRUPTED)), last(model(short))
    assert float(found.exact.by_call()["attention.1"][2]) == pytest.approx(share(patched, *ends), abs=1e-12)
    with pytest.raises(ValueError, match="expected as many tokens, got clean 5 and corrupted 7 in attention.0"):
        saccade.patching(model, short, CORRUPTED, last)


def test_some_heads_are_patched_alone():
    told = []
    found = saccade.patching(
        HandModel(),
        (CLEAN,),
        lambda model: model(CORRUPTED),
        metric,
        by="exact",
        heads={1: [2], "attention.2": None},
        progress=lambda *step: told.append(step),
    )
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    whole = saccade.patching(HandModel(), CLEAN, CORRUPTED, metric, by="exact")
    measured = ~found.exact.values.isnan()
    assert measured.tolist() == [False] * 5 + [True] * 4
    assert torch.equal(found.exact.values[measured], whole.exact.values[measured])


def test_the_model_is_left_as_it_was():
    model = encoder().train()
    model[1].layers[0].eval()
    modes = [module.training for module in model.modules()]
    runs = [saccade.patching(model, tokens(1), tokens(2), metric) for _ in range(2)]
    assert torch.equal(runs[0].exact.values, runs[1].exact.values)
    assert torch.equal(runs[0].gradient.values, runs[1].gradient.values)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_agreement_is_that_of_scipy():
    exact = torch.tensor([0.5, -2.0, 0.5, 0.1, 3.0, 0.0, 0.5, 1.0, float("nan")], dtype=torch.float64)
    slope = torch.tensor([0.4, 2.5, 0.4, 0.1, 2.0, 0.0, 0.6, -9.0, 7.0], dtype=torch.float64)
    calls = (CallHeads("a", 0, 9),)
    found = Patching(HeadValues(calls, exact), HeadValues(calls, slope), 1.0, 0.0, "output", "denoising").agreement
    assert found.pearson == pytest.approx(stats.pearsonr(exact[:8], slope[:8]).statistic, abs=1e-12)
    assert found.spearman == pytest.approx(stats.spearmanr(exact[:8], slope[:8]).statistic, abs=1e-12)
    assert (found.top, found.common) == (2, 1)  # 3 and -2 here, -9 and 2.5 there


def test_it_is_printed_and_written_whole():
    found = saccade.patching(HandModel(), CLEAN, CORRUPTED, metric, through=(2, 1, "key"))
    written = json.loads(json.dumps(found.as_json()))
    assert written["through"] == [{"call": "attention.2", "heads": [1], "what": "key"}]
    assert written["metric"] == {"clean": found.clean, "corrupted": found.corrupted}
    assert [line["exact"] for line in written["heads"][6:]] == [None] * 3
    assert written["agreement"]["top"] == 2
    lines = str(found).splitlines()
    assert lines[0].startswith("output of each head of the corrupted run from the clean one, exactly: 0 is corrupted")
    assert lines[1] == "only through key of head 1 of attention.2"
    assert lines[6].split() == ["2", "attention.2"]
    assert "of the top 2 heads in common" in lines[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": lambda out: out[0]}, r"metric: expected a scalar, got .*\(7, 11\)"),
        ({"metric": lambda out: out.sum() / 0}, "metric: expected a finite number, got"),
        (
            {"metric": lambda out: metric(out).detach()},
            "metric: no gradient reaches the heads: .*by='exact' needs no gradient",
        ),
        ({"metric": lambda out: 3.0}, "metric: it is 3 for both clean and corrupted; there is nothing to explain"),
        ({"clean": CLEAN[:1]}, "expected the same batch, got clean 1 and corrupted 2 items in attention.0"),
        ({"clean": lambda model: (model(CLEAN), model(CLEAN))[0]}, "clean: expected one forward .*got 2"),
        ({"by": "exactly"}, "by must be of exact, gradient; got 'exactly'"),
        ({"by": ()}, "by must be of exact, gradient; got 'none'"),
        ({"what": "keys"}, "what must be one of output, weights, query, key, value; got 'keys'"),
        ({"direction": "both"}, "direction must be one of denoising, noising; got 'both'"),
        (
            {"heads": {7: [0]}},
            "heads: no attention call matches 7; there are attention.0, attention.1, attention.2",
        ),
        ({"heads": {1: [0, 3]}}, "heads: attention.1 has query heads 0 to 2, got 3"),
        ({"heads": {2: 0}, "through": (1, 0, "key")}, "heads: none of them comes before the receivers"),
        ({"positions": [7]}, "positions: the source has 7 rows in attention.0, got 7"),
        ({"through": (0, 0, "query")}, "through: no attention call comes before the receivers"),
        ({"through": ("attention.*", 0, "query")}, "through: 'attention.*' fits 3 calls"),
        ({"through": (2, 0, "output")}, "through: expected .layers, heads, 'query' | 'key' | 'value'."),
        ({"through": (2, 5, "key")}, "through: attention.2 has query heads 0 to 2, got 5"),
        ({"through": (2, 0, "key"), "what": "value"}, "through= needs what='output', got what='value'"),
        ({"model": torch.nn.Linear(11, 3).double()}, "model: it has no attention calls that can be patched"),
    ],
)
def test_bad_input_is_named(options, message):
    given = {"model": HandModel(), "clean": CLEAN, "corrupted": CORRUPTED, "metric": metric, **options}
    first = [given.pop(name) for name in ("model", "clean", "corrupted", "metric")]
    with pytest.raises(ValueError, match=message):
        saccade.patching(*first, **given)


def test_other_kinds_are_type_errors():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
        saccade.patching("model", CLEAN, CORRUPTED, metric)
    with pytest.raises(TypeError, match="metric: expected a scalar, got"):
        saccade.patching(HandModel(), CLEAN, CORRUPTED, lambda out: None)
    with pytest.raises(TypeError, match="corrupted: expected inputs of the model, such as token ids, got text"):
        saccade.patching(HandModel(), CLEAN, "some text", metric)


class Mixed(torch.nn.Module):
    """Layers whose items influence one another: the mean over the batch is part of each item."""

    def __init__(self, mixing):
        super().__init__()
        self.body, self.mixing = decoder(layers=4), mixing
        for block in self.body.decoder.blocks:
            block.register_forward_hook(lambda block, given, out: out + self.mixing * out.mean(0, keepdim=True))

    def forward(self, tokens):
        return self.body(tokens)


@pytest.mark.parametrize(
    ("what", "mixing", "items", "fewer"),
    [
        ("output", 0.01, 1, False),
        ("key", 0.0, 2, True),
        *(pytest.param(what, 0.0, 2, True, marks=pytest.mark.slow) for what in ("output", "query", "value")),
        pytest.param("output", 0.0, 1, True, marks=pytest.mark.slow),
    ],
)
def test_heads_of_one_batch_are_as_if_alone(what, mixing, items, fewer):
    """16 heads in two batches of 9 copies of the text; one by one where copies would not be independent."""
    model, clean, corrupted = Mixed(mixing).eval(), tokens(1, items), tokens(2, items)
    forwards = []
    model.body.decoder.blocks[3].register_forward_hook(lambda block, given, out: forwards.append(len(out)))
    found = saccade.patching(model, clean, corrupted, metric, by="exact", what=what, positions=[1, 4])
    assert forwards == [items] * 2 + ([9 * items] * 2 if fewer else [9, *[1] * 16])
    with torch.no_grad():
        with saccade.watch(model, keep=True) as source:
            other = metric(model(clean))
        before = metric(model(corrupted))
        for head, value in zip(found.exact.heads, found.exact.values, strict=True):
            patch = saccade.intervention.Patch([head.head], source, what, [1, 4])
            with saccade.intervene(model, {head.call: patch}):
                patched = metric(model(corrupted))
            assert float(value) == pytest.approx(share(patched, before, other), abs=1e-10)


class Several(torch.nn.Module):
    """Outputs for each item, for each pair of items, for all items, for each row, and in an object of another kind."""

    def __init__(self):
        super().__init__()
        self.body, self.forwards = decoder(layers=4), []

    def forward(self, tokens):
        out = self.body(tokens)
        self.forwards.append(len(out))
        last = out[:, -1]
        more = last @ last.T, [last.square().mean()], out.transpose(0, 1).flatten(0, 1)
        return {"logits": out, "more": more, "cache": SimpleNamespace(values=out)}


@pytest.mark.parametrize(
    ("metric", "is_batched"),
    slow_after(
        2,
        [
            (lambda out: out["logits"][0, -1, 3] - out["logits"][1, 2, 5], True),
            (lambda out: out["more"][0][0, -1], False),  # the last copy's last item, which is not patched
            (lambda out: out["more"][1][0], False),
            (lambda out: out["more"][2][-1, 3], False),  # rows first: each copy has rows of all items
            (lambda out: out["cache"].values[0, -1, 3], False),
        ],
    ),
    ids=["items", "pairs", "mean", "rows", "object"],
)
def test_a_batch_is_for_metrics_of_outputs_by_item(metric, is_batched):
    model, clean, corrupted = Several().eval(), tokens(1), tokens(2)
    found = saccade.patching(model, clean, corrupted, metric, by="exact")
    assert (2 in model.forwards[2:]) is not is_batched
    with torch.no_grad():
        with saccade.watch(model, keep=True) as source:
            other = metric(model(clean))
        before = metric(model(corrupted))
        for head, value in list(zip(found.exact.heads, found.exact.values, strict=True))[::5]:
            with saccade.intervene(model, {head.call: saccade.intervention.Patch([head.head], source)}):
                patched = metric(model(corrupted))
            assert float(value) == pytest.approx(share(patched, before, other), abs=1e-10)


@pytest.mark.slow
def test_a_model_of_a_fixed_batch_is_patched_one_by_one():
    model = Mixed(0.0).eval()
    forwards = []

    def fixed(block, given, out):
        forwards.append(len(out))
        return out.view(2, LENGTH, 24)

    model.body.decoder.blocks[3].register_forward_hook(fixed)
    found = saccade.patching(model, tokens(1), tokens(2), metric, by="exact")
    assert forwards == [2, 2, 18, *[2] * 16]
    assert found.exact.values.abs().min() > 0


def test_an_error_of_the_metric_is_raised_at_once():
    """Fails where it is taken for a model that cannot read copies, and all heads are run again."""
    model, corrupted = Several().eval(), tokens(2)
    with torch.no_grad():
        known = [model(ids)["logits"] for ids in (tokens(1), corrupted)]
    model.forwards.clear()

    def picky(out):
        if not any(torch.allclose(out["logits"], one) for one in known):
            raise RuntimeError("neither of the two")
        return out["logits"].sum()

    with pytest.raises(RuntimeError, match="neither of the two"):
        saccade.patching(model, tokens(1), corrupted, picky, by="exact")
    assert model.forwards == [2, 2, 18]
