"""Attributions against the model itself held at one run, in float64: sums, every component, every source."""

from __future__ import annotations

import pytest
import torch

import saccade
from linearised import HEADS, KV_HEADS, LAYERS, LENGTH, VOCABULARY, Linearised, decoder, ids
from saccade.attribution import Component
from saccade.inspection import weights_of
from saccade.positions import AlibiConfig, RotaryConfig, T5Config
from slowly import slow_after

# Sums of some hundred products of size 1 to 10 in float64.
CLOSE = dict(rtol=1e-10, atol=1e-10)
KINDS = {
    "pre rms": lambda: decoder("pre", "rms", bias=False, positions=RotaryConfig(turned=6, layout="interleaved")),
    "pre batch": lambda: decoder("pre", "batch"),
    "pre normed heads": lambda: decoder("pre", qk_norm="layer", eps=1e-3, positions=RotaryConfig(), gate=True),
    "pre rms normed heads": lambda: decoder("pre", "rms", qk_norm="rms", sink=True, softcap=3.0, scale=0.7),
    "post": lambda: decoder("post", positions=AlibiConfig()),
    "post rms": lambda: decoder("post", "rms", positions=RotaryConfig(), softcap=2.0, final_norm=True),
    "parallel": lambda: decoder("parallel", positions=T5Config(), fused=False),
    "attention only, post": lambda: decoder("post", hidden=0, window=saccade.Window(4, 0)),
}
POSITION, TARGET, AGAINST = 7, 5, 17


@pytest.fixture(params=slow_after(3, [*KINDS]), scope="module")
def model(request):
    return KINDS[request.param]()


def test_components_are_what_is_missing_without_them(model):
    """A component's share is the logit less the logit of the linear model without it. Would catch: a norm that later
    components skip, a bias counted twice or not at all, heads that change places."""
    found = saccade.attribute(model, ids(), TARGET, position=POSITION)
    held = Linearised(model, ids())
    whole, _ = held.without()
    assert torch.allclose(whole, held.logits, **CLOSE)
    missing = torch.stack([(whole - held.without(one)[0])[POSITION, TARGET] for one in found.components])
    assert torch.allclose(found.contributions, missing, **CLOSE)
    per_layer = HEADS + (model.decoder.config.hidden != 0)
    assert len(found.components) == len(set(found.components)) == 2 + LAYERS * per_layer + 1


def test_contributions_sum_to_the_models_own_logit(model):
    with torch.no_grad():
        logits = model(ids()).logits[0, POSITION]
    found = saccade.attribute(model, ids(), TARGET, position=POSITION)
    contrast = saccade.attribute(model, ids(), TARGET, against=AGAINST, position=POSITION - LENGTH)
    for one, expected in ((found, logits[TARGET]), (contrast, logits[TARGET] - logits[AGAINST])):
        assert one.logit == pytest.approx(float(expected), rel=1e-12, abs=1e-12)
        assert abs(one.remainder) < 1e-12
    assert saccade.attribute(model, ids()).target == int(model(ids()).logits[0, -1].argmax())
    assert found.probability == pytest.approx(float(logits.softmax(0)[TARGET]), rel=1e-9)


def test_a_heads_share_splits_over_the_tokens_it_reads(model):
    """Would catch: values of another group, a gate that is left out, weights of another row, keys that are hidden."""
    found = saccade.attribute(model, ids(), TARGET, position=POSITION)
    held = Linearised(model, ids())
    whole, calls = held.without()
    assert torch.allclose(found.sources.sum(1), found.contributions[[c.kind == "head" for c in found.components]])
    assert not found.sources[:, POSITION + 1 :].any()
    for layer, head in ((0, 1), (1, HEADS - 1), (2, 2)):
        call = calls[layer]
        weights = weights_of(call)[0, head, POSITION]
        values = call.value[0, head // (HEADS // KV_HEADS)]
        gate = model.decoder.blocks[layer].attention.gate
        place = found.heads.index(Component("head", layer, head))
        for token in (0, 3, POSITION):
            source = weights[token] * values[token]
            if gate is not None:
                source = source * _gates(model, layer)[POSITION, head]
            less, _ = held.without(Component("head", layer, head), source=source)
            missing = (whole - less)[POSITION, TARGET]
            assert torch.allclose(found.sources[place, token], missing, **CLOSE)


def _gates(model, layer):
    """(L, Hq, Dv) of a layer."""
    gates = []
    hook = model.decoder.blocks[layer].attention.gate.register_forward_hook(lambda *given: gates.append(given[-1]))
    model(ids())
    hook.remove()
    return gates[0][0].sigmoid().unflatten(-1, (HEADS, -1)).detach()


def test_a_pairs_logit_splits_over_what_was_written(model):
    """Every entry of the matrix. Would catch: rotary left out or of another place, a key of another group, a norm of
    queries or a bias forgotten on one side."""
    query, key, layer, head = 8, 3, 2, 4
    found = saccade.why_attends(model, ids(), query, key, head=(layer, head))
    held = Linearised(model, ids())
    call = held.without()[1][layer]
    scale = call.scale if call.scale is not None else call.query.shape[-1] ** -0.5
    missing = {"query": [], "key": []}
    for one in found.components:
        less = held.without(one)[1][layer]
        missing["query"].append((call.query - less.query)[0, head, query])
        missing["key"].append((call.key - less.key)[0, head // (HEADS // KV_HEADS), key])
    of_query, of_key = (torch.stack(side) for side in missing.values())
    assert torch.allclose(found.matrix, scale * of_query @ of_key.T, **CLOSE)
    assert len(found.components) == 2 + layer * (HEADS + (model.decoder.config.hidden != 0)) + 1
    assert torch.allclose(found.of_query, found.matrix.sum(1)) and torch.allclose(found.of_key, found.matrix.sum(0))


def test_the_logit_of_a_pair_is_the_models_own(model):
    """From the logits that the whole row's weights stand for: differences of logits are differences of log weights."""
    head, query = (1, 3), 9
    found = [saccade.why_attends(model, ids(), query, key, head=head) for key in (6, query)]
    weights = weights_of(Linearised(model, ids()).without()[1][1])[0, head[1], query]
    for one in found:
        assert abs(one.remainder) < 1e-11 * max(1.0, abs(one.logit))
        assert one.weight == pytest.approx(float(weights[one.key]), rel=1e-9)
        assert one.visible
        difference = torch.log(weights[one.key] / weights[query])
        assert one.logit - found[-1].logit == pytest.approx(float(difference), rel=1e-8, abs=1e-8)
    rather = saccade.why_attends(model, ids(), query, 6, head=head, against=query)
    assert rather.logit == pytest.approx(float(torch.log(weights[6] / weights[query])), rel=1e-8, abs=1e-8)
    assert torch.allclose(rather.matrix, found[0].matrix - found[-1].matrix) and abs(rather.remainder) < 1e-11
    hidden = saccade.why_attends(model, ids(), 4, 9, head=head)
    assert (hidden.visible, hidden.weight) == (False, 0.0) and abs(hidden.remainder) < 1e-11


@pytest.mark.parametrize(("key", "against", "name"), [(2, 9, "against"), (9, 2, "key")])
def test_no_weight_is_compared_with_one_of_zero(key, against, name):
    """A difference of logits is one of log weights; with a hidden token on one side it would be any number at all."""
    told = rf"^{name}: the mask hides '\d+' \(token 9\) from '\d+' \(token 4\), and .* a token that the query sees"
    with pytest.raises(ValueError, match=told):
        saccade.why_attends(decoder(), ids(), 4, key, head=(1, 3), against=against)


def test_without_a_head_the_one_that_attends_most_explains():
    model = decoder(positions=RotaryConfig())
    found = saccade.why_attends(model, ids(), 9, 2)
    weights = torch.stack([weights_of(call)[0, :, 9, 2] for call in Linearised(model, ids()).without()[1]])
    assert (found.layer, found.head) == divmod(int(weights.argmax()), HEADS)


def test_a_run_leaves_nothing_behind():
    model = KINDS["pre normed heads"]().train()
    saccade.attribute(model, ids())
    saccade.why_attends(model, ids(), 1, 0)
    assert model.training
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_vocabulary_is_of_the_models_size():
    with pytest.raises(ValueError, match=f"target: tokens are 0 to {VOCABULARY - 1}, got {VOCABULARY}"):
        saccade.attribute(decoder(), ids(), VOCABULARY)
