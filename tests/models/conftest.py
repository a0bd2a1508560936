from __future__ import annotations

import pytest
import torch

from saccade.models import DecoderLM, LanguageModel, ModelConfig
from saccade.models.tokenizers.own import train_bpe

TEXT = "the cat sat on the mat. the dog sat on the cat's mat — “naïve” dogs do.\n" * 3


@pytest.fixture
def text():
    return TEXT


@pytest.fixture
def lm():
    """A tiny untrained model: vocabulary 283, context 23, 2 layers, 6 heads on 3 key/value heads."""
    torch.manual_seed(5)
    tokenizer = train_bpe([TEXT], 283)
    config = ModelConfig(tokenizer.vocabulary, width=24, layers=2, heads=6, kv_heads=3, hidden=17, context=23)
    model = DecoderLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return LanguageModel(model.eval(), tokenizer)
