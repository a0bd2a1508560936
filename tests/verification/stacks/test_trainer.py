"""Trainers and tokenizers: their collator, padding and training step are found by themselves."""

from __future__ import annotations

import types

import pytest
import torch
from stacks.dense import Dense
from stacks.layered import found, probed

import saccade
from slowly import slow_after

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def tiny():
    config = transformers.LlamaConfig(
        vocab_size=47, hidden_size=24, intermediate_size=24, num_hidden_layers=1, num_attention_heads=3,
        head_dim=8, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def collated(features):
    width = max(len(feature["input_ids"]) for feature in features)
    rows = [[*feature["input_ids"], *[0] * (width - len(feature["input_ids"]))] for feature in features]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


class MeanOfMeans(transformers.Trainer):
    """Its loss leaves out the number of tokens in all micro-batches."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs) / self.current_gradient_accumulation_steps


def trainer(kind, path):
    return kind(tiny(), arguments(path, gradient_accumulation_steps=2), data_collator=collated)


def arguments(path, **more):
    return transformers.TrainingArguments(str(path), report_to=[], use_cpu=True, **more)


def test_a_trainer_is_enough(tmp_path):
    report = saccade.verify_stack(trainer(transformers.Trainer, tmp_path))
    assert report.ok, report
    assert not found(report, "training")
    assert any("training step" in words for words in report.assumed)


def test_a_loss_that_forgets_the_count_of_tokens(tmp_path):
    [finding] = probed("training", trainer(MeanOfMeans, tmp_path))
    assert "a token of a short micro-batch weighs more" in finding.message


@pytest.mark.slow
def test_accumulation_is_tested_only_where_gradients_are_accumulated(tmp_path):
    """Fails where a trainer that takes whole batches is accused of a loss that it never divides."""
    report = saccade.verify_stack(MeanOfMeans(tiny(), arguments(tmp_path), data_collator=collated))
    assert report.ok and not report.findings
    assert any("gradient_accumulation_steps is 1" in words for words in report.assumed)


def padded_left(features):
    """As transformers' collators pad on the left: the first token is a label, and padding comes before it."""
    made = collated([{"input_ids": feature["input_ids"][::-1]} for feature in features])
    return {name: value.flip(-1) for name, value in made.items()}


@pytest.mark.slow
def test_labels_that_padding_predicts_are_a_warning(tmp_path):
    """Fails where a row's first token, a label of padding on the left, is taken for wrong weights of tokens."""
    kept = arguments(tmp_path, gradient_accumulation_steps=2)
    report = saccade.verify_stack(transformers.Trainer(tiny(), kept, data_collator=padded_left))
    assert [(finding.probe, finding.severity) for finding in report.findings] == [("training", "warning")]
    assert "padding before a row is trained to predict its first token" in report.findings[0].message


class Rows(torch.utils.data.Dataset):
    """Examples of one form."""

    def __init__(self, row):
        self.row = row

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.row


class PaddingFree:
    """Examples that are packs already, whose lengths tell where positions restart; without them, at each example."""

    def __init__(self, reads="seq_lengths"):
        self.reads = reads

    def __call__(self, examples):
        ids = torch.tensor([[token for one in examples for token in one["input_ids"]]])
        lengths = [length for one in examples for length in one.get(self.reads, [len(one["input_ids"])])]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


class KeepsLengths(transformers.Trainer):
    def _set_signature_columns_if_needed(self):
        self._signature_columns = ["input_ids", "labels", "seq_lengths"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reads", "is_right"),
    slow_after(
        1,
        [
            (KeepsLengths, "lengths", False),  # another column
            (KeepsLengths, "seq_lengths", True),
            (transformers.Trainer, "seq_lengths", False),  # remove_unused_columns takes it away
        ],
    ),
)
def test_examples_that_are_packed_before_the_collator(tmp_path, kind, reads, is_right):
    """Fails where a collator is only given examples of one document, or columns that the trainer removes."""
    examples = Rows({"input_ids": [5, 6, 7], "seq_lengths": [2, 1]})
    report = saccade.verify_stack(
        kind(tiny(), arguments(tmp_path), data_collator=PaddingFree(reads), train_dataset=examples)
    )
    assert report.ok is is_right, report
    assert {finding.probe for finding in report.findings} == (set() if is_right else {"packing"})


@pytest.mark.slow
def test_a_collator_that_takes_one_length_is_not_given_others(tmp_path):
    """Fails where the collator that a Trainer has by itself raises before any probe runs."""
    report = saccade.verify_stack(transformers.Trainer(tiny(), arguments(tmp_path)))
    assert report.ok, report
    assert any("documents of one length only" in words for words in report.assumed)


@pytest.mark.slow
def test_random_masking_of_a_collator_is_turned_off(tmp_path):
    class Masks:
        mlm = True

        def __call__(self, features):
            made = collated(features)
            return {**made, "input_ids": torch.full_like(made["input_ids"], 3)} if self.mlm else made

    report = saccade.verify_stack(transformers.Trainer(tiny(), arguments(tmp_path), data_collator=Masks()))
    assert report.ok, report
    assert any("(mlm) is turned off" in words for words in report.assumed)


def columns(features):
    made = collated(features)
    return {**made, "lengths": [len(feature["input_ids"]) for feature in features], "text": ["-"] * len(features)}


@pytest.mark.parametrize(
    "parts",
    [
        {"collate_fn": columns},
        {"train_dataloader": torch.utils.data.DataLoader(Rows({"input_ids": [5, 6]}), collate_fn=columns)},
        {"train_dataloader": lambda: torch.utils.data.DataLoader(Rows({"input_ids": [5]}), collate_fn=columns)},
        {"train_loader": torch.utils.data.DataLoader(Rows((torch.tensor([5, 6]), torch.tensor([6, 7]))))},
    ],
)
def test_trainers_of_other_makers(parts):
    """Fails where another trainer's collator is not found, or its targets and texts are given to the model."""
    report = saccade.verify_stack(types.SimpleNamespace(model=Dense(), **parts))
    assert report.ok, report
    assert {outcome.name: outcome.status for outcome in report.outcomes}["batch"] == "passed"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"model": Dense()}, "expected data_collator, collate_fn or train_dataloader"),
        ({"collate_fn": columns}, "expected one that has its model"),
        ({"model": Dense(), "collate_fn": lambda rows: rows[0]["image"]}, "KeyError: 'image'.*give it as batch="),
    ],
)
def test_trainers_without_a_part_are_told_which_argument_to_give(parts, words):
    with pytest.raises(TypeError, match=words):
        saccade.verify_stack(trainer=types.SimpleNamespace(**parts), model=None)


@pytest.mark.slow
def test_padding_of_a_tokenizer():
    class Tokenizer:
        pad_token_id, padding_side, all_special_ids = 0, "left", [0]

        def pad(self, rows, padding, return_tensors):
            width = max(len(row["input_ids"]) for row in rows)
            ids = torch.tensor([[0] * (width - len(row["input_ids"])) + row["input_ids"] for row in rows])
            return {"input_ids": ids}  # without the mask: a token of padding is read

    report = saccade.verify_stack(tiny(), tokenizer=Tokenizer())
    assert any("on the left" in words for words in report.assumed)
    assert [finding.probe for finding in report.findings if finding.severity == "error"] == ["batch"]
