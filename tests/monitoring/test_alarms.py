"""The rules of the alarms on heads made to break them, one at a time; when an alarm begins, goes on and is over.

Shape legend: B batch, H heads, L length, D width.
"""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor

import saccade
from saccade.monitoring import Alarm, Alarms, CallRecord, GradientRecord, Thresholds
from saccade.monitoring._alarms import SEVERITIES

B, H, L, D = 3, 5, 37, 11


def tensors(b=B, heads=H, length=L, width=D):
    return [torch.randn(b, heads, length, width) for _ in range(3)]


def record(q, k, v, mask=None, *, name="blocks.7.attention", step=0, **how) -> CallRecord:
    """What watching would tell of this call."""
    seen = saccade.statistics(q, k, mask, value=v, received=False, **how)
    out = saccade.attention(q, k, v, mask, **how)
    norms = torch.where(seen.counted, out.norm(dim=-1), 0.0).sum((0, 2)) / seen.counted.sum((0, 2))
    return CallRecord(name, name, 7, 1, step, seen, norms.detach())


def dense(q, k, mask=None, bias=0.0) -> tuple[Tensor, Tensor]:
    """Logits and weights in float64, by the book."""
    logits = q.double() @ k.double().mT / q.shape[-1] ** 0.5 + bias
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if mask is None else mask
    return logits, torch.softmax(logits.masked_fill(~seen, -math.inf), -1)


def places(alarms: list[Alarm]) -> list[tuple[str, int | None]]:
    return [(alarm.kind, alarm.head) for alarm in alarms]


@pytest.fixture
def alarms():
    return Alarms()


def test_heads_with_nothing_wrong_set_off_nothing(alarms):
    for step in range(5):
        assert alarms.observe(record(*tensors(), saccade.Causal(), step=step)) == []
    assert alarms.fired == []


# --- one rule at a time -------------------------------------------------------------------------------------------


def test_a_head_whose_queries_are_zero_is_uniform(alarms):
    q, k, v = tensors()
    q[:, 2] = 0.0
    (alarm,) = alarms.observe(record(q, k, v, step=13))
    assert (alarm.kind, alarm.head, alarm.severity) == ("uniform head", 2, "warning")
    assert (alarm.layer, alarm.path, alarm.step) == (7, "blocks.7.attention", 13)
    assert alarm.numbers["evenness"] == pytest.approx(1.0, abs=1e-6)
    assert alarm.numbers["span"] == 0.0
    assert alarm.limits["uniform"] == Thresholds().uniform


def test_a_head_is_uniform_where_others_are_not_and_not_in_a_model_that_has_just_begun(alarms):
    q, k, v = tensors()
    begun = alarms.observe(record(q * 1e-2, k, v))
    assert begun == []  # all heads alike: evenness above 0.999, and nothing wrong
    q[:, 3] *= 1e-2
    assert places(alarms.observe(record(q, k, v))) == [("uniform head", 3)]


def test_a_head_that_looks_at_one_key_always_is_dead(alarms):
    q, k, v = tensors()
    q[:, 1], k[:, 1, 17] = 0.0, 0.0
    q[:, 1, :, 0], k[:, 1, 17, 0] = 9.0, 9.0
    (alarm,) = alarms.observe(record(q, k, v))
    _, weights = dense(q, k)
    assert (alarm.kind, alarm.head) == ("dead head", 1)
    assert alarm.numbers["weight"] == pytest.approx(weights[:, 1, :, 17].mean().item(), rel=1e-5)
    assert "on key 17 in every row" in alarm.message


def test_the_one_key_may_be_another_in_each_row_and_nothing_is_dead(alarms):
    q, k, v = tensors()
    # A previous-token head: entropy near 0, and in good health.
    before = torch.full((L, L), 0.0).fill_diagonal_(40.0).roll(-1, 1)
    assert alarms.observe(record(q, k, v, bias=before.expand(1, H, L, L).clone())) == []


def test_a_head_whose_output_is_nothing_beside_the_others_is_dead(alarms):
    q, k, v = tensors()
    v[:, 4] *= 1e-4
    (alarm,) = alarms.observe(record(q, k, v))
    assert (alarm.kind, alarm.head) == ("dead head", 4)
    _, weights = dense(q, k)
    norms = (weights @ v.double()).norm(dim=-1).mean((0, 2))
    assert alarm.numbers["out"] == pytest.approx(norms[4].item(), rel=1e-5)
    assert alarm.numbers["largest_out"] == pytest.approx(norms.max().item(), rel=1e-5)


def test_a_head_that_leaves_most_weight_on_the_first_key_is_a_sink_and_that_is_a_note(alarms):
    q, k, v = tensors()
    bias = torch.zeros(1, H, 1, L)
    bias[0, 2, 0, 0] = 5.0
    (alarm,) = alarms.observe(record(q, k, v, bias=bias))
    _, weights = dense(q, k, bias=bias)
    assert (alarm.kind, alarm.head, alarm.severity) == ("sink", 2, "note")
    assert alarm.numbers["weight"] == pytest.approx(weights[:, 2, :, 0].mean().item(), rel=1e-5)
    assert "on the first key" in alarm.message


@pytest.mark.parametrize(("logit", "kind"), [(5.0, "sink"), (15.0, "dead head")])
def test_a_learned_sink_that_takes_the_weight_is_told(alarms, logit, kind):
    q, k, v = tensors()
    sink = torch.zeros(H)
    sink[3] = logit
    (alarm,) = alarms.observe(record(q, k, v, sink=sink))
    assert (alarm.kind, alarm.head) == (kind, 3)
    assert "on the learned sink" in alarm.message


def test_a_key_in_the_middle_is_a_sink_too(alarms):
    q, k, v = tensors()
    bias = torch.zeros(1, H, 1, L)
    bias[0, 0, 0, 23] = 5.0
    (alarm,) = alarms.observe(record(q, k, v, bias=bias))
    assert (alarm.kind, alarm.head) == ("sink", 0)
    assert "on key 23" in alarm.message


def test_logits_that_have_grown_are_told_and_logits_that_were_always_large_are_not(alarms):
    q, k, v = tensors()
    # One head only: a layer of which most heads are so sharp is saturated as well.
    large = q.clone()
    large[:, 1] *= 60
    assert alarms.observe(record(large, k, v, name="always.0")) == []
    assert alarms.observe(record(q, k, v, step=4)) == []
    (alarm,) = alarms.observe(record(large, k, v, step=5))
    logits, _ = dense(large, k)
    before, _ = dense(q, k)
    assert (alarm.kind, alarm.head, alarm.severity, alarm.step) == ("logit growth", 1, "warning", 5)
    assert alarm.numbers["logit"] == pytest.approx(logits[:, 1].max().item(), rel=1e-5)
    assert alarm.numbers["lowest_logit"] == pytest.approx(before[:, 1].max().item(), rel=1e-5)


def test_logits_where_no_run_survived_are_an_error_at_once(alarms):
    q, k, v = tensors()
    q[:, 4] *= 6000
    (alarm,) = alarms.observe(record(q, k, v))
    assert (alarm.kind, alarm.head, alarm.severity) == ("logit growth", 4, "error")


def test_a_layer_without_its_scale_is_saturated_and_half_of_its_heads_are_enough(alarms):
    q, k, v = tensors(width=64)
    scaled = q.clone()
    scaled[:, :2] *= 16
    assert alarms.observe(record(scaled, k, v, name="two.0")) == []
    scaled[:, 2] *= 16
    found = alarms.observe(record(scaled, k, v, name="three.0"))
    assert places(found) == [("saturated softmax", head) for head in range(3)]
    _, weights = dense(scaled, k)
    sharp = (weights.amax(-1) >= 0.95).double().mean((0, 2))
    assert [alarm.numbers["sharp_rows"] for alarm in found] == pytest.approx(sharp[:3].tolist())


def test_entropy_that_fell_in_the_whole_layer_has_collapsed(alarms):
    q, k, v = tensors(width=64)
    assert alarms.observe(record(q, k, v)) == []
    found = alarms.observe(record(q * 40, k, v, step=1))
    collapsed = [alarm for alarm in found if alarm.kind == "entropy collapse"]
    assert places(collapsed) == [("entropy collapse", head) for head in range(H)]
    _, weights = dense(q * 40, k)
    evenness = -(weights * weights.clamp(min=1e-300).log()).sum(-1).mean((0, 2)) / math.log(L)
    assert [alarm.numbers["evenness"] for alarm in collapsed] == pytest.approx(evenness.tolist(), rel=1e-4)
    assert collapsed[0].numbers["layer_evenness"] == pytest.approx(evenness.mean().item(), rel=1e-4)


def test_entropy_that_was_never_there_has_not_collapsed(alarms):
    q, k, v = tensors(width=64)
    found = [alarms.observe(record(q * 40, k, v, step=step)) for step in range(3)]
    assert {alarm.kind for fired in found for alarm in fired} == {"saturated softmax"}


def gradients(q, k, v, name="blocks.7.attention", step=0) -> GradientRecord:
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = saccade.attention(q, k, v)
    of = torch.randn_like(out)
    found = dict(zip(("query", "key", "value"), torch.autograd.grad(out, (q, k, v), of), strict=True))
    return GradientRecord(
        name, name, 7, 1, step, {n: g.norm(dim=(0, 2, 3), p=2) for n, g in {**found, "out": of}.items()}
    )


def test_gradients_vanish_through_one_hot_weights_and_only_there(alarms):
    q, k, v = tensors()
    q[:, 2] *= 1e6
    alarms.observe(record(q, k, v))
    (alarm,) = alarms.observe_gradients(gradients(q, k, v))
    assert (alarm.kind, alarm.head) == ("vanishing gradients", 2)
    assert alarm.numbers["gain_query"] < alarm.limits["gain"]
    assert alarm.numbers["gradient_out"] > 1.0


@pytest.mark.parametrize("factor", [1e-3, 1.0, 8.0])
@pytest.mark.parametrize("loss", [1e-6, 1.0, 65536.0])
def test_what_comes_through_to_queries_and_keys_does_not_depend_on_scales(alarms, factor, loss):
    q, k, v = tensors()
    alarms.observe(record(q * factor, k, v * 1e3))
    told = gradients(q * factor, k, v * 1e3)
    told = dataclasses.replace(told, gradients={name: g * loss for name, g in told.gradients.items()})
    assert alarms.observe_gradients(told) == []


def test_gradients_that_were_not_measured_are_not_judged(alarms):
    q, k, v = tensors()
    told = gradients(q * 1e6, k, v)
    assert alarms.observe_gradients(told) == []  # no forward pass was seen
    alarms.observe(record(q * 1e6, k, v))
    without = dataclasses.replace(told, gradients={n: g for n, g in told.gradients.items() if n != "key"})
    assert alarms.observe_gradients(without) == []
    nothing = dataclasses.replace(told, gradients={n: g * 0 for n, g in told.gradients.items()})
    assert alarms.observe_gradients(nothing) == []


@pytest.mark.parametrize("side", ["query", "key"])
def test_gradients_that_come_through_on_one_side_have_not_vanished(alarms, side):
    q, k, v = tensors()
    alarms.observe(record(q, k, v))
    told = gradients(q, k, v)
    told = dataclasses.replace(told, gradients={n: g * (1e-9 if n == side else 1.0) for n, g in told.gradients.items()})
    assert alarms.observe_gradients(told) == []


def test_gradients_of_fewer_key_heads_count_for_the_query_heads_that_read_them(alarms):
    q, k, v = torch.randn(B, 6, L, D), torch.randn(B, 2, L, D), torch.randn(B, 2, L, D)
    q[:, 3:] *= 1e6
    alarms.observe(record(q, k, v))
    assert places(alarms.observe_gradients(gradients(q, k, v))) == [("vanishing gradients", h) for h in (3, 4, 5)]


# --- NaN ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "head"), [("query", 3), ("key", 1), ("value", 4)])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_the_first_number_that_is_not_finite_is_named(alarms, what, head, number):
    q, k, v = tensors()
    {"query": q, "key": k, "value": v}[what][1, head, 29, 5] = number
    (alarm,) = alarms.observe(record(q, k, v, step=3))
    assert (alarm.kind, alarm.severity, alarm.head, alarm.step) == ("not finite", "error", head, 3)
    row = "row" if what == "query" else "key"
    assert f"{what} of" in alarm.message
    assert f"first at item 1, {row} 29, channel 5" in alarm.message
    assert alarm.numbers["share"] == pytest.approx(1 / (B * L * D))


def test_logits_that_overflow_are_named_by_row_and_key(alarms):
    q, k, v = tensors()
    q[2, 3, 31], k[2, 3, 19] = 1e30, 1e30
    (alarm,) = alarms.observe(record(q, k, v))
    assert (alarm.kind, alarm.head) == ("not finite", 3)
    assert "logits of head 3" in alarm.message
    assert "item 2, row 31, key 19" in alarm.message


def test_what_follows_from_the_first_nan_is_counted_and_not_told_again(alarms):
    q, k, v = tensors()
    broken = q.clone()
    broken[0, 2] = math.nan
    names = [f"blocks.{n}.attention" for n in range(3)]
    for step in range(2):
        for name in names:
            healthy = name == names[0] and step == 0
            alarms.observe(record(q if healthy else broken, k, v, name=name, step=step))
    (alarm,) = alarms.fired
    assert (alarm.name, alarm.step, alarm.last_step, alarm.count) == (names[1], 0, 1, 5)
    assert not alarm.over
    alarms.observe(record(q, k, v, name=names[1], step=2))
    assert alarms.fired[0].over
    alarms.observe(record(broken, k, v, name=names[1], step=3))
    assert [alarm.step for alarm in alarms.fired] == [0, 3]


def test_nan_where_nobody_looks_is_no_alarm(alarms):
    q, k, v = tensors()
    lengths = torch.tensor([L, 29, 17])
    for item, length in enumerate(lengths.tolist()):
        k[item, :, length:], v[item, :, length:], q[item, :, length:] = math.nan, math.inf, math.nan
    assert alarms.observe(record(q, k, v, saccade.Padding(lengths, lengths))) == []


# --- rows that say nothing -------------------------------------------------------------------------------------------


def test_few_keys_set_off_nothing_whatever_the_weights_are(alarms):
    for keys in (1, 2, 7):
        q, k, v = torch.randn(B, H, L, D), torch.randn(B, H, keys, D), torch.randn(B, H, keys, D)
        assert alarms.observe(record(q * 500, k, v, name=f"cross{keys}.0")) == []


def test_padding_hides_no_dead_head_and_makes_none(alarms):
    q, k, v = tensors()
    lengths = torch.tensor([L, 11, 23])
    padding = saccade.Padding(lengths, lengths)
    assert alarms.observe(record(q, k, v, padding, name="fine.0")) == []
    q[:, 1], k[:, 1, 3] = 0.0, 0.0
    q[:, 1, :, 0], k[:, 1, 3, 0] = 9.0, 9.0
    assert places(alarms.observe(record(q, k, v, padding))) == [("dead head", 1)]


def test_items_padded_on_the_left_have_their_own_first_key(alarms):
    q, k, v = tensors()
    real = torch.ones(B, L, dtype=torch.bool)
    bias = torch.zeros(B, H, 1, L)
    for item, start in enumerate((0, 9, 20)):
        real[item, :start] = False
        bias[item, 2, 0, start] = 14.0
    (alarm,) = alarms.observe(record(q, k, v, saccade.Padding(real, real), bias=bias))
    assert (alarm.kind, alarm.head) == ("dead head", 2)
    assert "on the first key" in alarm.message


def test_single_rows_of_decoding_are_put_together_before_they_are_judged():
    alarms = Alarms(Thresholds(rows=8))
    q, k, v = tensors(b=1)
    q[:, 1], k[:, 1, 3], q[:, 2] = 0.0, 0.0, 0.0
    q[:, 1, :, 0], k[:, 1, 3, 0] = 9.0, 9.0
    found = []
    for end in range(16, 24):
        rows = record(q[:, :, end - 1 : end], k[:, :, :end], v[:, :, :end], saccade.Causal(), step=end)
        found.append(places(alarms.observe(rows)))
    # Every single row looks at "the same key always"; only together do they show who does.
    assert found == [[]] * 7 + [[("uniform head", 2), ("dead head", 1)]]


def test_a_head_that_sees_too_little_is_left_out_of_its_layer(alarms):
    q, k, v = tensors(heads=2)
    mask = saccade.PerHead([saccade.Window(2, 2), saccade.Window(30, 30)])
    q[:, 1] = 0.0
    assert places(alarms.observe(record(q, k, v, mask))) == [("uniform head", 1)]


# --- the life of an alarm ---------------------------------------------------------------------------------------------


def flickering(alarms, pattern):
    """Uniform where the pattern has a 1; the steps at which the alarm fired."""
    q, k, v = tensors()
    flat = q.clone()
    flat[:, 0] = 0.0
    calls = [alarms.observe(record(flat if on == "1" else q, k, v, step=n)) for n, on in enumerate(pattern)]
    return [n for n, fired in enumerate(calls) if fired]


def test_an_alarm_fires_once_and_counts_what_follows(alarms):
    assert flickering(alarms, "0111") == [1]
    (alarm,) = alarms.fired
    assert (alarm.step, alarm.last_step, alarm.count, alarm.over) == (1, 3, 3, False)


def test_an_alarm_that_flickers_is_one_and_one_that_comes_back_is_another(alarms):
    assert flickering(alarms, "1010011000100") == [0, 10]
    first, second = alarms.fired
    assert (first.count, first.last_step, first.over) == (4, 6, True)
    assert (second.step, second.over) == (10, False)


def test_gradients_do_not_end_alarms_of_the_forward_pass_nor_the_other_way_round(alarms):
    q, k, v = tensors()
    flat = q.clone()
    flat[:, 0] = 0.0
    flat[:, 2] *= 1e6
    for step in range(5):
        alarms.observe(record(flat, k, v, step=step))
        alarms.observe_gradients(gradients(flat, k, v, step=step))
    assert {alarm.kind: (alarm.head, alarm.count, alarm.over) for alarm in alarms.fired} == {
        "uniform head": (0, 5, False),
        "logit growth": (2, 5, False),
        "vanishing gradients": (2, 5, False),
    }


def test_each_alarm_is_told_when_it_fires():
    told = []
    alarms = Alarms(on_alarm=told.append)
    flickering(alarms, "011000010")
    assert [(alarm.step, alarm.count) for alarm in told] == [(1, 1), (7, 1)]


def test_the_step_may_be_another_count_than_that_of_forwards(alarms):
    q, k, v = tensors()
    q[:, 2] = 0.0
    (alarm,) = alarms.observe(record(q, k, v, step=3), step=1500)
    assert (alarm.step, alarm.last_step) == (1500, 1500)


def test_what_heads_did_before_can_be_kept_and_given_back():
    q, k, v = tensors(width=64)
    before = Alarms()
    before.observe(record(q, k, v))
    after = Alarms()
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert {alarm.kind for alarm in after.observe(record(q * 40, k, v))} == {
        "entropy collapse",
        "saturated softmax",
        "logit growth",
    }
    new = Alarms()
    assert {alarm.kind for alarm in new.observe(record(q * 40, k, v))} == {"saturated softmax"}


# --- the values --------------------------------------------------------------------------------------------------


def test_an_alarm_says_where_what_and_what_to_do(alarms):
    q, k, v = tensors()
    q[:, 2] = 0.0
    (alarm,) = alarms.observe(record(q, k, v, step=13))
    assert str(alarm).startswith(
        "warning: uniform head in layer 7 (blocks.7.attention), head 2, step 13: its weights are uniform"
    )
    assert alarm.advice
    assert alarm.severity in SEVERITIES
    assert Alarm.from_dict(json.loads(json.dumps(alarm.to_dict()))) == alarm
    with pytest.raises(dataclasses.FrozenInstanceError):
        alarm.head = 1


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "1", None, True])
def test_thresholds_are_positive_numbers(value):
    with pytest.raises(ValueError, match=f"sharp: must be a positive finite number, got {value!r}"):
        Thresholds(sharp=value)


def test_thresholds_may_be_ones_own(alarms):
    q, k, v = tensors()
    strict = Alarms(Thresholds(uniform=0.5, formed=0.99))
    assert {alarm.kind for alarm in strict.observe(record(q, k, v))} == {"uniform head"}
    assert alarms.observe(record(q, k, v)) == []


def test_the_old_name_of_an_argument_still_works():
    fired = []
    with pytest.warns(DeprecationWarning, match="argument told is on_alarm now"):
        assert Alarms(told=fired.append) is not None
    with pytest.raises(TypeError, match="told"):
        saccade.monitoring.Thresholds(told=1)
