"""The training monitor in a real Lightning trainer, under both of its names."""

from __future__ import annotations

import csv
import importlib
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from saccade.models import DecoderLM, ModelConfig

B, L, V = 3, 23, 29

# Lightning's own advice and its dependencies' deprecations are not what is tested.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request):
    return importlib.import_module(request.param)


@pytest.fixture
def callback_of():
    """`AttentionCallback` as first imported once both names are known."""
    sys.modules.pop("saccade.integrations.lightning", None)
    yield lambda **options: importlib.import_module("saccade.integrations.lightning").AttentionCallback(**options)
    sys.modules.pop("saccade.integrations.lightning", None)


def module(pl, *, fail_at=None, dead_head=False):
    """A language model as Lightning wants it."""

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.lm = DecoderLM(ModelConfig(V, width=12, layers=2, heads=2, hidden=16, context=L))
            if dead_head:
                with torch.no_grad():
                    self.lm.decoder.blocks[1].attention.matrices()[0][0][:6] = 0.0
            self.forwards = 0

        def training_step(self, tokens, index):
            self.forwards += 1
            if self.forwards == fail_at:
                raise ZeroDivisionError("planted")
            return F.cross_entropy(self.lm(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

        def validation_step(self, tokens, index):
            self.lm(tokens[:, :-1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    return Module()


def data(count=4):
    tokens = torch.randint(0, V, (count * B, L), generator=torch.Generator().manual_seed(1))
    return DataLoader(tokens, batch_size=B)


def trainer(pl, tmp_path, callback, logger=False, **options):
    options = {"max_epochs": 1, **options}
    return pl.Trainer(
        accelerator="cpu",
        logger=logger,
        callbacks=[callback],
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
        **options,
    )


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return sum(len(getattr(part, kind)) for part in model.modules() for kind in kinds)


class Kept:
    def __init__(self):
        self.steps, self.texts = {}, []

    def scalars(self, values, step):
        self.steps[step] = dict(values)

    def histograms(self, values, step):
        assert set(values) == {
            f"attention/lm.decoder.blocks.{n:02d}.attention/{what}"
            for n in (0, 1)
            for what in ("query", "key", "value")
        }

    def text(self, tag, text, step):
        self.texts.append((step, text))


def test_every_nth_optimizer_step_is_written_and_nothing_is_left_behind(pl, tmp_path, callback_of):
    kept = Kept()
    model = module(pl)
    trainer(pl, tmp_path, callback_of(log=kept, every=2)).fit(model, data(5))
    assert list(kept.steps) == [0, 2, 4]
    tag = "attention/lm.decoder.blocks.01.attention"
    for values in kept.steps.values():
        assert values[f"{tag}/entropy"] > 0
        assert values[f"{tag}/gradient_query"] > 0
    assert hooks(model) == 0


@pytest.mark.slow
def test_training_is_the_same_to_the_bit(pl, tmp_path, callback_of):
    watched, plain = module(pl), module(pl)
    trainer(pl, tmp_path, callback_of(log=Kept(), every=1)).fit(watched, data())
    trainer(pl, tmp_path, callback_of(log=Kept(), every=1000)).fit(plain, data())
    for ours, theirs in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_of_several_batches_is_watched_whole(pl, tmp_path, callback_of):
    kept, counted = Kept(), []
    callback = callback_of(log=kept, every=1)
    model = module(pl)
    end = model.on_train_batch_end
    model.on_train_batch_end = lambda *a: (counted.append(callback.monitor.watching), end(*a))
    trainer(pl, tmp_path, callback, accumulate_grad_batches=2).fit(model, data(4))
    assert list(kept.steps) == [0, 1]
    assert counted == [True, False, True, False]


def test_validation_is_not_watched(pl, tmp_path, callback_of):
    kept = Kept()
    model = module(pl)
    fit = trainer(pl, tmp_path, callback_of(log=kept, every=1), accumulate_grad_batches=2, val_check_interval=1)
    seen = []
    model.on_validation_batch_start = lambda *a: seen.append(hooks(model))
    fit.fit(model, data(2), data(1))
    assert seen
    assert set(seen) == {0}
    assert list(kept.steps) == [0]


def test_numbers_go_to_the_trainers_loggers(pl, tmp_path, callback_of):
    loggers = importlib.import_module(f"{pl.__name__}.loggers")
    log = loggers.CSVLogger(tmp_path)
    trainer(pl, tmp_path, callback_of(every=2), logger=log).fit(module(pl), data(3))
    with open(f"{log.log_dir}/metrics.csv") as file:
        lines = list(csv.DictReader(file))
    column = "attention/lm.decoder.blocks.00.attention/max_logit"
    assert [int(line["step"]) for line in lines if line.get(column)] == [0, 2]


def test_tensorboard_gets_histograms_and_alarms_as_well(pl, tmp_path, callback_of):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = importlib.import_module(f"{pl.__name__}.loggers")
    log = loggers.TensorBoardLogger(tmp_path)
    trainer(pl, tmp_path, callback_of(every=2), logger=log).fit(module(pl, dead_head=True), data(3))
    read = EventAccumulator(log.log_dir, size_guidance={"histograms": 0})
    read.Reload()
    tag = "attention/lm.decoder.blocks.01.attention"
    assert [event.step for event in read.Scalars(f"{tag}/entropy")] == [0, 2]
    assert [event.step for event in read.Histograms(f"{tag}/key")] == [0, 2]
    (event,) = read.Tensors("attention/alarms/text_summary")
    assert b"uniform head in layer 1 (lm.decoder.blocks.1.attention), head 0" in event.tensor_proto.string_val[0]


def test_an_alarm_may_stop_the_training(pl, tmp_path, callback_of):
    kept = Kept()
    callback = callback_of(log=kept, every=1, stop_on=["uniform head"])
    fit = trainer(pl, tmp_path, callback)
    fit.fit(module(pl, dead_head=True), data(4))
    assert fit.global_step == 1
    assert [(alarm.kind, alarm.step) for alarm in callback.alarms] == [("uniform head", 0)]


def test_an_exception_in_a_step_leaves_nothing_behind(pl, tmp_path, callback_of):
    model = module(pl, fail_at=2)
    with pytest.raises(ZeroDivisionError, match="planted"):
        trainer(pl, tmp_path, callback_of(log=Kept(), every=1)).fit(model, data(4))
    assert hooks(model) == 0


def test_a_resumed_run_compares_with_what_was_before(pl, tmp_path, callback_of):
    first = callback_of(log=Kept(), every=1)
    fit = trainer(pl, tmp_path, first)
    fit.fit(module(pl), data(2))
    fit.save_checkpoint(tmp_path / "run.ckpt")
    second = callback_of(log=Kept(), every=1)
    again = trainer(pl, tmp_path, second, max_epochs=2)
    again.fit(module(pl), data(2), ckpt_path=tmp_path / "run.ckpt")
    assert again.global_step == 4
    before, after = first.state_dict()["alarms"], second.state_dict()["alarms"]
    assert before.keys() == after.keys()
    for name, heads in before.items():
        for was, now in zip(heads, after[name], strict=True):
            assert now[2] >= was[2]  # the highest evenness
            assert now[3] <= was[3]  # the lowest of the largest logits
            assert now != was


def test_options_are_checked_before_training(callback_of):
    with pytest.raises(ValueError, match="every: must be a whole number"):
        callback_of(every=0)


def test_without_lightning_the_extra_is_named(monkeypatch):
    import saccade.integrations.lightning as integration

    for name in [name for name in sys.modules if name.split(".")[0] in ("lightning", "pytorch_lightning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'lightning: is not installed \(pip install "lightning>=2.5"'):
        integration.callback_classes()
