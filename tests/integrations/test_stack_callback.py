"""Stacks that are verified before they are trained, and while they are."""

from __future__ import annotations

import logging
import random
from itertools import chain

import numpy as np
import pytest
import torch

import saccade
from saccade.monitoring import StackMonitor
from saccade.verification import StackError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from saccade.integrations.trainer import StackCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def fresh_accelerate():
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


class Flattening:
    """Joins documents as `DataCollatorWithFlattening`, and draws from every generator there is."""

    def __init__(self, restarts=True):
        self.own = torch.Generator().manual_seed(3)
        self.collator = transformers.DataCollatorWithFlattening(return_tensors="pt", return_position_ids=restarts)

    def __call__(self, features):
        drawn = random.random() + np.random.rand() + float(torch.rand(1)) + float(torch.rand(1, generator=self.own))
        batch = dict(self.collator(features))
        batch["labels"] = batch["labels"].where(batch["labels"] % 7 != int(drawn * 100) % 7, -100)
        return batch


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=47, hidden_size=24, intermediate_size=24, num_hidden_layers=1, num_attention_heads=3,
            head_dim=8, max_position_embeddings=64, pad_token_id=0, attention_dropout=0.1,
        )
    )  # fmt: skip


def trainer(path, collator, **options):
    drawn = np.random.default_rng(5)
    rows = [{"input_ids": drawn.integers(4, 47, size=length).tolist()} for length in (5, 11, 7, 3) * 6]
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "seed": 1}
    sizes = {"max_steps": 4, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    args = transformers.TrainingArguments(str(path), **{**quiet, **sizes, **options})
    return transformers.Trainer(llama(), args, train_dataset=rows, data_collator=collator)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param({name: True}, marks=pytest.mark.slow) for name in ("bf16", "gradient_checkpointing"))],
)
def test_a_right_training_hears_nothing_and_takes_the_same_steps(tmp_path, options, caplog):
    """State that moves unseen: weights, gradients, optimizer, train mode, four generators, autocast."""
    ends = []
    for watched in (False, True):
        random.seed(7)
        one = trainer(tmp_path, Flattening(), **options)
        if watched:
            callback = StackCallback(one, every=2)
            one.add_callback(callback)
        one.train()
        moments = [value for state in one.optimizer.state_dict()["state"].values() for value in state.values()]
        ends.append(
            [*one.model.state_dict().values(), *moments, torch.get_rng_state(), one.data_collator.own.get_state()]
        )
        ends[-1] += [torch.tensor(random.random()), torch.tensor(np.random.rand())]
    assert all(map(torch.equal, *ends))
    assert callback.report.ok, str(callback.report)
    assert not [record for record in caplog.records if record.name.startswith("saccade")]


def test_documents_that_see_each_other_end_it_before_a_step(tmp_path):
    one = trainer(tmp_path, Flattening(restarts=False))
    before = [value.clone() for value in one.model.state_dict().values()]
    one.add_callback(StackCallback(one))
    with pytest.raises(StackError, match="attends to document") as raised:
        one.train()
    assert all(map(torch.equal, before, one.model.state_dict().values()))
    [finding] = [finding for finding in raised.value.report.errors if finding.probe == "packing"]
    assert sum(map(len, finding.example)) <= 5


def joined(documents):
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    return {"input_ids": torch.tensor([[*chain(*documents)]]), "position_ids": positions[None]}


def sees_the_pack(model):
    model.forward = lambda position_ids=None, **named: type(model).forward(model, **named)


@pytest.mark.slow
def test_a_fault_that_comes_later_is_named_at_the_next_due_step(caplog):
    model = llama()
    monitor = StackMonitor(model, pack=joined, every=3, on_error="warn")
    monitor.step(0)
    assert monitor.report.ok
    sees_the_pack(model)
    monitor.step(2)
    assert monitor.report.ok
    with caplog.at_level(logging.WARNING, logger="saccade.monitoring"):
        monitor.step(3)
    assert "packing" in {finding.probe for finding in monitor.report.errors}
    [record] = caplog.records
    assert record.getMessage().startswith("step 3: ")


def test_a_stack_that_cannot_be_called_trains_on_with_the_reason(caplog):
    """It may need inputs that no documents have: that is no fault of the training."""

    class Needs(torch.nn.Embedding):
        def forward(self, input_ids, speaker=None):
            return super().forward(input_ids) + speaker[:, None]

    monitor = StackMonitor(Needs(31, 31), every=1)
    for step in range(3):
        monitor.step(step)
    [record] = caplog.records
    assert "NoneType" in record.getMessage()


def test_a_trainer_of_images_says_what_is_read(tmp_path):
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    one = transformers.Trainer(transformers.ViTForImageClassification(config), args)
    with pytest.raises(TypeError, match="which reads pixel_values"):
        StackMonitor(trainer=one, model=None).step(0)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"on_error": "stop"}])
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        StackMonitor(llama(), **wrong)
    with pytest.raises(TypeError, match="packs"):
        saccade.monitoring.StackMonitor(llama(), packs=joined)
