"""Masks with padding between real tokens, against transformers: such a batch is computed where its tokens stand."""

from __future__ import annotations

import pytest
import torch

from models.families import test_esm, test_llama, test_roberta, test_t5
from models.families.test_gpt2 import config as gpt_config
from published import transformers, written
from saccade import models
from saccade.models.text.encoder import TextEncoder

MISTRAL = {**test_llama.SIZES, "sliding_window": 4}
MODELS = {
    "GPTNeoForCausalLM": lambda library: gpt_config("GPTNeoForCausalLM"),
    "MistralForCausalLM": lambda library: library.MistralConfig(**MISTRAL),
    "EsmForMaskedLM": lambda library: test_esm.config(token_dropout=False),
    "RobertaModel": lambda library: test_roberta.config(),
    "T5ForConditionalGeneration": lambda library: library.T5Config(**test_t5.SIZES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_distances_across_a_hole_are_those_of_the_columns(tmp_path, name):
    theirs = written(tmp_path, name, MODELS[name](transformers()))
    ids = torch.randint(3, 31, (3, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 3:6], mask[1, 9:], mask[2, 1] = 0, 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name.startswith("T5"):
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    model = models.load(tmp_path)
    with torch.no_grad():
        expected, got = (
            m(**inputs, output_hidden_states=True) if m is theirs else m(**inputs) for m in (theirs, model)
        )
        expected = expected.decoder_hidden_states if name.startswith("T5") else expected.hidden_states
    real = mask.bool()
    assert torch.allclose(got.last_hidden_state[real], expected[-1][real], atol=1e-5)
    if isinstance(model, TextEncoder):  # a packed result, computed as the mask has it
        states, layout = model.packed_states(ids, mask)
        assert torch.equal(states, layout.take(got.last_hidden_state))
