"""Paths of transformers models that are found by themselves: padding on the left, the other attention."""

from __future__ import annotations

import pytest
import torch
from stacks.layered import found

import saccade
from slowly import slow_but

transformers = pytest.importorskip("transformers")


def tiny(kind, config, **more):
    torch.manual_seed(0)
    sizes = {"vocab_size": 47, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
    return kind(config(**sizes, **more)).eval()


class PositionsFromRight(transformers.LlamaForCausalLM):
    """Counts by twos where a row is padded on the left, whatever position_ids say."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, **more):
        if attention_mask is not None and attention_mask.dim() == 2 and not attention_mask[:, 0].all():
            position_ids = 2 * torch.arange(input_ids.shape[1])[None].expand(input_ids.shape)
        return super().forward(input_ids, attention_mask, position_ids, **more)


@pytest.mark.slow
def test_padding_on_the_left():
    report = saccade.verify_stack(tiny(PositionsFromRight, transformers.LlamaConfig, intermediate_size=24))
    [finding] = found(report, "batch")
    assert "in a batch" in finding.message and len(finding.example) <= 2
    assert any("padding on the left" in words for words in report.assumed)


class Drops(transformers.GPT2LMHeadModel):
    """Its eager path gives other logits."""

    def forward(self, *places, **more):
        returned = super().forward(*places, **more)
        if self.config._attn_implementation == "eager":
            returned.logits = returned.logits.roll(1, -1)
        return returned


@pytest.mark.slow
@pytest.mark.parametrize("attention", slow_but(["sdpa", "eager"], "sdpa"))
def test_the_other_attention_implementation(attention):
    """Fails where only what is given as second= is compared, or the implementation is not set back."""
    model = tiny(Drops, transformers.GPT2Config)
    model.set_attn_implementation(attention)
    report = saccade.verify_stack(model)
    [finding] = found(report, "agreement")
    other = {"sdpa": "eager", "eager": "sdpa"}[attention]
    assert f"its {other} attention gives other outputs" in finding.message
    assert model.config._attn_implementation == attention
    assert saccade.verify_stack(tiny(transformers.GPT2LMHeadModel, transformers.GPT2Config)).ok


@pytest.mark.slow
def test_a_batch_that_is_given_is_the_only_one():
    model = tiny(PositionsFromRight, transformers.LlamaConfig, intermediate_size=24)
    ids = lambda documents: {"input_ids": torch.tensor(documents)}  # noqa: E731
    report = saccade.verify_stack(model, batch=ids)
    assert not found(report, "batch")


def test_a_head_for_whole_texts_is_tested_by_its_body():
    """Fails where the caches of a classifier are read for logits of each token, which it has not."""
    config = {"intermediate_size": 24, "pad_token_id": 0}
    report = saccade.verify_stack(tiny(transformers.LlamaForSequenceClassification, transformers.LlamaConfig, **config))
    assert report.ok and not report.findings, report
    assert not found(report, "cache")
