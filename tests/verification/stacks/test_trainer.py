"""Trainers and tokenizers: their collator, padding and training step are found by themselves."""

from __future__ import annotations

import pytest
import torch
from stacks.layered import found

import saccade

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def tiny():
    config = transformers.LlamaConfig(
        vocab_size=47, hidden_size=24, intermediate_size=24, num_hidden_layers=2, num_attention_heads=3,
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
    arguments = transformers.TrainingArguments(str(path), report_to=[], use_cpu=True)
    return kind(tiny(), arguments, data_collator=collated)


def test_a_trainer_is_enough(tmp_path):
    report = saccade.verify_stack(trainer(transformers.Trainer, tmp_path))
    assert report.ok, report
    assert not found(report, "training")
    assert any("training step" in words for words in report.assumed)


def test_a_loss_that_forgets_the_count_of_tokens(tmp_path):
    [finding] = found(saccade.verify_stack(trainer(MeanOfMeans, tmp_path)), "training")
    assert "a token of a short micro-batch weighs more" in finding.message


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
