"""The training monitor: what it writes and when, what it leaves alone, and that nothing it does ends a training run.

Shape legend: B batch, H heads, L length.
"""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from saccade.models import DecoderLM, ModelConfig
from saccade.monitoring import AttentionMonitor, Histogram, TensorBoardLog, Thresholds
from saccade.monitoring._monitor import tag_of

B, L, V, H = 5, 23, 31, 2
SHARED = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Kept:
    """A log in memory."""

    def __init__(self):
        self.scalars_at, self.histograms_at, self.texts = {}, {}, []

    def scalars(self, values, step):
        self.scalars_at[step] = dict(values)

    def histograms(self, values, step):
        self.histograms_at[step] = dict(values)

    def text(self, tag, text, step):
        self.texts.append((tag, text, step))


def model(layers=2):
    torch.manual_seed(3)
    return DecoderLM(ModelConfig(V, width=12, layers=layers, heads=H, hidden=16, context=L))


def batch(seed=0, b=B):
    return torch.randint(0, V, (b, L), generator=torch.Generator().manual_seed(seed))


def loss_of(lm, tokens):
    return F.cross_entropy(lm(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(lm, monitor, steps, rate=1e-2):
    """Plain gradient descent; the losses."""
    optimizer, losses = torch.optim.SGD(lm.parameters(), lr=rate), []
    for step in range(steps):
        with monitor.step(step):
            loss = loss_of(lm, batch(step))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def hooks(lm):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in lm.modules() for kind in kinds)


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def broken_head():
    """A model whose first layer has a head without queries."""
    lm = model()
    with torch.no_grad():
        lm.decoder.blocks[0].attention.matrices()[0][0][:6] = 0.0
    return lm


def test_the_first_step_and_multiples_of_every_are_watched_and_no_other(kept):
    lm = model()
    monitor = AttentionMonitor(lm, kept, every=3)
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.1)
    for step in range(4, 14):
        with monitor.step(step):
            assert monitor.watching == (step in (4, 6, 9, 12))
            assert (hooks(lm) > 0) == monitor.watching
            loss_of(lm, batch(step)).backward()
        assert hooks(lm) == 0
        optimizer.step()
    assert list(kept.scalars_at) == [4, 6, 9, 12]
    assert list(kept.histograms_at) == [4, 6, 9, 12]


def test_training_is_the_same_to_the_bit():
    watched, plain = model(), model()
    F_before = F.scaled_dot_product_attention
    losses = train(watched, AttentionMonitor(watched, Kept(), every=1), 5)
    assert losses == train(plain, AttentionMonitor(plain, Kept(), every=1000), 5)
    for ours, theirs in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert F.scaled_dot_product_attention is F_before


def dense(lm, tokens):
    """What each layer's attention was, in float64 by the book, and its tensors with their gradients."""
    seen = []

    def keep(layer, observation):
        for tensor in (observation.query, observation.key, observation.value, observation.out):
            tensor.retain_grad()
        seen.append(observation)

    logits = lm(tokens[:, :-1], observe=keep)
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return seen


def numbers(observation):
    """(entropy, weight on the first key, largest logit) by head."""
    q, k = observation.query.detach().double(), observation.key.detach().double()
    length = q.shape[2]
    unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
    logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(unseen, -math.inf)
    weights = torch.softmax(logits, -1)
    entropy = torch.special.entr(weights).sum(-1).mean((0, 2))
    return entropy, weights[..., 0].mean((0, 2)), logits.amax((0, 2, 3))


def test_what_is_written_is_what_dense_attention_says(kept):
    lm = model()
    with AttentionMonitor(lm, kept, per_head=True).step(0):
        loss_of(lm, batch()).backward()
    found = kept.scalars_at[0]
    for layer, observation in enumerate(dense(lm, batch())):
        at = f"attention/decoder.blocks.{layer:02d}.attention"
        entropy, first, logit = numbers(observation)
        assert found[f"{at}/entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
        assert found[f"{at}/entropy_lowest"] == pytest.approx(entropy.min().item(), rel=1e-4)
        assert found[f"{at}/sink_mass"] == pytest.approx(first.mean().item(), rel=1e-4)
        assert found[f"{at}/sink_mass_highest"] == pytest.approx(first.max().item(), rel=1e-4)
        assert found[f"{at}/max_logit"] == pytest.approx(logit.max().item(), rel=1e-4)
        for name in ("query", "key", "value", "out"):
            tensor = getattr(observation, name)
            gradient, norm = tensor.grad.norm().item(), tensor.norm(dim=-1).mean().item()
            assert found[f"{at}/gradient_{name}"] == pytest.approx(gradient, rel=1e-4)
            assert found[f"{at}/norm_{name}"] == pytest.approx(norm, rel=1e-4)
        for head in range(H):
            assert found[f"{at}/head_{head:02d}/entropy"] == pytest.approx(entropy[head].item(), rel=1e-4)
            own = observation.key.grad[:, head].norm().item()
            assert found[f"{at}/head_{head:02d}/gradient_key"] == pytest.approx(own, rel=1e-4)
    assert found["attention/alarms_open"] == 0


def test_histograms_hold_every_entry_of_q_k_and_v(kept):
    lm = model()
    with AttentionMonitor(lm, kept).step(0):
        loss_of(lm, batch()).backward()
    for layer, observation in enumerate(dense(lm, batch())):
        for name in ("query", "key", "value"):
            held = kept.histograms_at[0][f"attention/decoder.blocks.{layer:02d}.attention/{name}"]
            entries = getattr(observation, name).detach()
            assert sum(held.counts) == pytest.approx(entries.numel())
            assert held.edges[0] == pytest.approx(entries.min().item())
            assert held.edges[-1] == pytest.approx(entries.max().item())
            # Bins of heads were spread over common ones: the share below 0 moves by less than a bin's.
            middle = np.searchsorted(held.edges, 0.0)
            below = (entries < 0).double().mean().item()
            assert sum(held.counts[:middle]) / entries.numel() == pytest.approx(below, abs=0.06)


def test_without_gradients_and_histograms_none_are_written(kept):
    lm = model()
    with AttentionMonitor(lm, kept, gradients=False, histograms=False).step(0):
        loss_of(lm, batch()).backward()
    assert not any("gradient" in tag for tag in kept.scalars_at[0])
    assert any("entropy" in tag for tag in kept.scalars_at[0])
    assert kept.histograms_at == {}


def test_micro_batches_of_one_step_are_one(kept):
    lm, whole = model(), Kept()
    tokens = batch(b=6)
    with AttentionMonitor(lm, whole).step(0):
        loss_of(lm, tokens).backward()
    with AttentionMonitor(lm, kept).step(0):
        for part, share in ((tokens[:4], 4 / 6), (tokens[4:], 2 / 6)):
            (loss_of(lm, part) * share).backward()
    together, parts = whole.scalars_at[0], kept.scalars_at[0]
    for tag, value in together.items():
        if "norm_" not in tag:  # means of unequal parts, each counted once
            assert parts[tag] == pytest.approx(value, rel=1e-4), tag
    for tag, held in whole.histograms_at[0].items():
        assert sum(kept.histograms_at[0][tag].counts) == pytest.approx(sum(held.counts))


def test_a_scaled_loss_is_scaled_back(kept):
    lm, scaled = model(), Kept()
    with AttentionMonitor(lm, kept).step(0):
        loss_of(lm, batch()).backward()
    monitor = AttentionMonitor(lm, scaled)
    monitor.begin(0, loss_scale=1024.0)
    (loss_of(lm, batch()) * 1024.0).backward()
    monitor.end()
    assert kept.scalars_at[0] == pytest.approx(scaled.scalars_at[0], rel=1e-5)


# --- alarms -----------------------------------------------------------------------------------------------------------


def test_alarms_are_written_counted_and_handed_over(kept, broken_head, caplog):
    told = []
    monitor = AttentionMonitor(broken_head, kept, every=2, on_alarm=told.append)
    train(broken_head, monitor, 3, rate=1e-9)
    (alarm,) = monitor.alarms
    assert (alarm.kind, alarm.layer, alarm.head, alarm.step) == ("uniform head", 0, 0, 0)
    assert [(one.kind, one.head, one.step) for one in told] == [("uniform head", 0, 0)]
    ((tag, text, step),) = kept.texts
    assert (tag, step) == ("attention/alarms", 0)
    assert "uniform head in layer 0 (decoder.blocks.0.attention), head 0" in text
    assert "whether its projections get a gradient" in text
    assert [values["attention/alarms_open"] for values in kept.scalars_at.values()] == [1, 1]
    assert caplog.records == []


def test_by_default_alarms_are_logged_one_line_for_a_call(kept, caplog):
    lm = model()
    with torch.no_grad():
        lm.decoder.blocks[1].attention.matrices()[0][0][:] = 0.0  # both heads
    train(lm, AttentionMonitor(lm, kept), 1)
    (line,) = caplog.records
    assert (line.name, line.levelno) == ("saccade.monitoring", logging.WARNING)
    assert "uniform head in layer 1 (decoder.blocks.1.attention), head 0, step 0" in line.getMessage()
    assert "(also heads 1)" in line.getMessage()


def test_an_alarm_may_be_asked_to_stop_training_and_raises_nothing(kept, broken_head, caplog):
    monitor = AttentionMonitor(broken_head, kept, stop_on={"warning"})
    train(broken_head, monitor, 1)
    assert monitor.should_stop is monitor.alarms[0] or monitor.should_stop == monitor.alarms[0]
    for other in ("error", "logit growth"):
        monitor = AttentionMonitor(broken_head, kept, stop_on=other)
        train(broken_head, monitor, 1)
        assert monitor.should_stop is None


def test_nan_is_named_with_its_first_place_and_training_goes_on(kept, caplog):
    lm = model(layers=3)
    with torch.no_grad():
        lm.decoder.blocks[1].attention.matrices()[1][0][8, 4] = math.nan  # a row of the second head's keys
    monitor = AttentionMonitor(lm, kept)
    losses = train(lm, monitor, 2)
    assert all(math.isnan(loss) for loss in losses)
    (alarm,) = monitor.alarms
    assert (alarm.kind, alarm.name, alarm.head) == ("not finite", "decoder.blocks.1.attention", 1)
    assert "key of key-value head 1 is not finite, first at item 0, key 0, channel 2" in alarm.message
    assert caplog.records[0].levelno == logging.ERROR


def test_what_heads_did_before_can_be_kept_and_given_back(kept):
    lm = model()
    monitor = AttentionMonitor(lm, kept)
    train(lm, monitor, 1)
    state = json.loads(json.dumps(monitor.state_dict()))
    later = AttentionMonitor(lm, kept)
    later.load_state_dict(state)
    assert later.state_dict() == state


# --- nothing here ends a training run ---------------------------------------------------------------------------------


def test_an_exception_in_the_step_leaves_nothing_behind(kept):
    lm = model()
    monitor = AttentionMonitor(lm, kept)
    with pytest.raises(ZeroDivisionError), monitor.step(0):
        loss_of(lm, batch())
        raise ZeroDivisionError
    assert hooks(lm) == 0
    assert not monitor.watching
    with monitor.step(50):
        loss_of(lm, batch()).backward()
    assert 50 in kept.scalars_at


class FullDisk(Kept):
    def scalars(self, values, step):
        raise OSError(28, "No space left on device")


def test_a_log_that_cannot_be_written_ends_alone(broken_head, caplog):
    monitor = AttentionMonitor(broken_head, FullDisk(), every=1, on_alarm=lambda alarm: None)
    train(broken_head, monitor, 3, rate=1e-9)
    (line,) = caplog.records
    assert (
        "the log of the attention monitor ends here: OSError: [Errno 28] No space left on device" in line.getMessage()
    )
    assert monitor.alarms[0].count == 3


def test_a_listener_that_fails_ends_the_monitor_and_not_the_training(kept, broken_head, caplog):
    def fail(alarm):
        raise RuntimeError("no pager")

    plain = model()
    plain.load_state_dict(broken_head.state_dict())
    losses = train(broken_head, AttentionMonitor(broken_head, kept, every=1, on_alarm=fail), 3)
    assert losses == train(plain, AttentionMonitor(plain, Kept(), every=1000), 3)
    assert [line.getMessage() for line in caplog.records if "ends here" in line.getMessage()] == [
        "step 0: the attention monitor ends here: RuntimeError: no pager"
    ]
    assert list(kept.scalars_at) == [0]


def test_a_model_without_attention_is_told_once(kept, caplog):
    lm = torch.nn.Linear(3, 1)
    monitor = AttentionMonitor(lm, kept, every=1)
    for step in range(3):
        with monitor.step(step):
            lm(torch.randn(2, 3)).sum().backward()
    assert [line.getMessage() for line in caplog.records] == ["step 0: not observed: Linear: it made no attention call"]


def test_only_the_first_process_watches(monkeypatch, kept):
    lm = model()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, written in ((1, []), (0, [0])):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        train(lm, AttentionMonitor(lm, kept), 1)
        assert list(kept.scalars_at) == written


# --- logs -----------------------------------------------------------------------------------------------------------


def events(folder):
    """What TensorBoard reads in the folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    read.Reload()
    return read


@SHARED
def test_tensorboard_is_the_default_and_holds_numbers_histograms_and_alarms(tmp_path, monkeypatch, broken_head, caplog):
    monkeypatch.chdir(tmp_path)
    train(broken_head, AttentionMonitor(broken_head, every=2), 3)
    (folder,) = (tmp_path / "runs").iterdir()
    read = events(folder)
    tag = "attention/decoder.blocks.01.attention"
    kept = Kept()
    again = model()
    with torch.no_grad():
        again.decoder.blocks[0].attention.matrices()[0][0][:6] = 0.0
    train(again, AttentionMonitor(again, kept, every=2), 3)
    for step, event in zip((0, 2), read.Scalars(f"{tag}/entropy"), strict=True):
        assert (event.step, event.value) == (step, pytest.approx(kept.scalars_at[step][f"{tag}/entropy"], rel=1e-6))
    for event in read.Histograms(f"{tag}/query"):
        held = kept.histograms_at[event.step][f"{tag}/query"]
        assert event.histogram_value.num == pytest.approx(B * H * (L - 1) * 6)
        assert event.histogram_value.min == pytest.approx(held.edges[0], rel=1e-6)
        assert event.histogram_value.bucket == pytest.approx(held.counts)
        assert event.histogram_value.bucket_limit == pytest.approx(held.edges[1:])
    (event,) = read.Tensors("attention/alarms/text_summary")
    assert b"uniform head in layer 0" in event.tensor_proto.string_val[0]


@SHARED
def test_a_folder_is_a_tensorboard_log_in_it(tmp_path):
    lm = model()
    train(lm, AttentionMonitor(lm, tmp_path / "here"), 1)
    assert "attention/alarms_open" in events(tmp_path / "here").Tags()["scalars"]


class ScalarsAlone:
    def __init__(self):
        self.added = []

    def add_scalar(self, tag, value, step):
        self.added.append((tag, value, step))


def test_a_writer_gets_what_it_can_take(broken_head, caplog):
    writer = ScalarsAlone()
    train(broken_head, AttentionMonitor(broken_head, writer), 1)
    assert ("attention/alarms_open", 1, 0) in writer.added


def test_without_a_log_alarms_are_still_told(broken_head, caplog):
    train(broken_head, AttentionMonitor(broken_head, False), 1)
    assert "uniform head" in caplog.text


def test_a_log_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"log: expected a folder, a SummaryWriter, .* or False, got list"):
        AttentionMonitor(model(), [])


def test_tensorboard_that_is_missing_is_named_with_its_extra(monkeypatch, tmp_path):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorboard" else find(name))
    told = r'tensorboard: is not installed \(pip install "accelerate>=1.0".*\); log=False needs none'
    with pytest.raises(ModuleNotFoundError, match=told):
        AttentionMonitor(model(), tmp_path)


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "3"])
def test_every_is_a_whole_number(every, kept):
    with pytest.raises(ValueError, match=f"every: must be a whole number of steps from 1 on, got {every!r}"):
        AttentionMonitor(model(), kept, every=every)


def test_unknown_kinds_and_options_are_refused(kept):
    with pytest.raises(ValueError, match=r"stop_on: 'fire' is none of dead head, entropy collapse, error"):
        AttentionMonitor(model(), kept, stop_on=["fire"])
    with pytest.raises(TypeError, match="evry"):
        AttentionMonitor(model(), kept, evry=3)


def test_thresholds_may_be_ones_own(kept, caplog):
    lm = model()
    monitor = AttentionMonitor(lm, kept, thresholds=Thresholds(sink=0.01))
    train(lm, monitor, 1)
    assert {alarm.kind for alarm in monitor.alarms} == {"sink"}
    assert caplog.records == []  # notes are no warnings


def test_tags_sort_and_name_one_call_each():
    names = {
        "decoder.blocks.3.attention": "decoder.blocks.03.attention",
        "blocks.12.attention": "blocks.12.attention",
        "h.7": "h.07",
        "7": "07",
        "layers.0.layers.10.a2": "layers.00.layers.10.a2",
        "blocks.0.attention#2": "blocks.00.attention.call_2",
        "": "model",
        "#2": "model.call_2",
    }
    assert {name: tag_of(name) for name in names} == names


def middle_sum(edges, counts):
    """The sum of all entries, were they in the middle of their bins."""
    return sum(c * (a + b) / 2 for a, b, c in zip(edges, edges[1:], counts, strict=False))


rows = st.lists(st.integers(0, 50), min_size=3, max_size=3)
places = st.tuples(st.floats(-5, 5), st.floats(0.125, 5))


@given(st.lists(st.tuples(places, rows), min_size=1, max_size=4))
def test_several_histograms_together_keep_all_entries_and_their_range(parts):
    edges = [np.linspace(low, low + width, 4).tolist() for (low, width), _ in parts]
    counts = [row for _, row in parts]
    held = Histogram.together(edges, counts)
    assert sum(held.counts) == pytest.approx(sum(map(sum, counts)))
    assert min(held.counts) >= -1e-9
    real = [e for e, c in zip(edges, counts, strict=True) if sum(c)]
    if real:
        assert held.edges[0] == pytest.approx(min(e[0] for e in real))
        assert held.edges[-1] == pytest.approx(max(e[-1] for e in real))
        # Spread evenly, bins keep their mean but for half of a new bin's width.
        theirs = sum(middle_sum(e, c) for e, c in zip(edges, counts, strict=True))
        wide = (held.edges[-1] - held.edges[0]) / len(held.counts)
        assert middle_sum(held.edges, held.counts) == pytest.approx(theirs, abs=sum(held.counts) * wide / 2)


def test_equal_numbers_make_a_histogram_too():
    assert Histogram.together([[2.0, 2.0, 2.0]], [[0, 7]]) == Histogram((2.0, 2.0), (7.0,))
    both = Histogram.together([[2.0, 2.0], [1.0, 3.0]], [[7], [4]])
    assert sum(both.counts) == pytest.approx(11)
    assert Histogram.together([], []) == Histogram((0.0, 0.0), (0.0,))


def test_a_summary_writer_is_a_log():
    writer = ScalarsAlone()
    TensorBoardLog(writer).scalars({"a": 1.0}, 3)
    TensorBoardLog(writer).histograms({"b": Histogram((0.0, 1.0), (2.0,))}, 3)
    TensorBoardLog(writer).text("c", "d", 3)
    assert writer.added == [("a", 1.0, 3)]
