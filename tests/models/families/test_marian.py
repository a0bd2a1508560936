"""Marian against transformers' own, on tiny random checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from published import (
    assert_agrees,
    assert_round_trip,
    assert_same_gradients,
    sources_and_targets,
    transformers,
    written,
)
from saccade import models

SIZES = dict(
    vocab_size=101,
    d_model=42,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=7,
    decoder_attention_heads=3,
    encoder_ffn_dim=53,
    decoder_ffn_dim=31,
    max_position_embeddings=17,
    pad_token_id=1,
    decoder_start_token_id=1,
    eos_token_id=0,
    forced_eos_token_id=0,
)
APART = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 89}


@pytest.fixture(autouse=True)
def places_in_their_dtype(monkeypatch):
    """transformers rounds its table to float32, whatever the dtype; in float64 that would be all that is compared."""

    def create_weight(self):
        count, width = self.weight.shape
        angles = np.arange(count)[:, None] / 10000 ** (2 * (np.arange(width) // 2) / width)
        table = np.concatenate((np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])), 1)
        return torch.from_numpy(table).to(self.weight.dtype)

    def forward(self, shape, past=0, position_ids=None):
        where = torch.arange(past, past + shape[1]) if position_ids is None else position_ids
        return create_weight(self)[where]

    transformers()
    from transformers.models.marian import modeling_marian

    monkeypatch.setattr(modeling_marian.MarianSinusoidalPositionalEmbedding, "forward", forward)


def write(folder, name="MarianMTModel", **changes: object):
    sizes = {**SIZES, **changes}
    theirs = written(folder, name, transformers().MarianConfig(**sizes))
    if hasattr(theirs, "final_logits_bias"):
        theirs.final_logits_bias.normal_()
        theirs.save_pretrained(folder)
    return theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("MarianModel", {"activation_function": "relu", "encoder_layers": 1}),
        ("MarianMTModel", {"activation_function": "swish", "scale_embedding": True}),
        ("MarianMTModel", {"d_model": 21}),
        ("MarianMTModel", APART),
    ],
)
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, changes):
    theirs = write(tmp_path / "a", name, **changes)
    inputs = sources_and_targets()
    inputs["decoder_input_ids"] = inputs["decoder_input_ids"].clamp(max=88)
    real = inputs["attention_mask"].bool(), inputs["decoder_attention_mask"].bool()
    assert_agrees(theirs, tmp_path / "a", inputs, real=real)
    if name == "MarianMTModel":  # a body saved alone holds the tables of positions, which are a formula here
        assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")


def test_gradients_of_all_weights_from_labels_alone(tmp_path):
    theirs = write(tmp_path, scale_embedding=True)
    inputs = sources_and_targets()
    labels = inputs["decoder_input_ids"].masked_fill(inputs["decoder_attention_mask"] == 0, -100)
    ours = models.load(tmp_path, dtype=torch.float64)
    inputs = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "labels": labels}
    assert_same_gradients(theirs, ours, inputs, lambda out: out.loss)


def test_tables_of_positions_in_the_files_are_left_out(tmp_path):
    """Early checkpoints hold them."""
    from safetensors.torch import load_file, save_file

    theirs = write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.{side}.embed_positions.weight": torch.zeros(17, 42) for side in ("encoder", "decoder")}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_agrees(
        theirs,
        tmp_path,
        sources_and_targets(),
        real=tuple(sources_and_targets()[n].bool() for n in sources_and_targets() if "mask" in n),
    )


def test_beams_are_those_of_transformers(tmp_path):
    """As published models ask for: padding is what targets begin with and may never come, and long texts end."""
    theirs = write(tmp_path)
    settings = dict(num_beams=4, bad_words_ids=[[1]], forced_eos_token_id=0, max_length=9, eos_token_id=0)
    theirs.generation_config.update(**settings)
    theirs.save_pretrained(tmp_path)
    inputs = {name: x for name, x in sources_and_targets().items() if not name.startswith("decoder")}
    expected = theirs.generate(**inputs, return_dict_in_generate=True, output_scores=True)
    found = models.load(tmp_path).generate(**inputs)
    assert torch.equal(found.ids[:, 0], expected.sequences[:, 1:])
    assert torch.allclose(found.scores[:, 0], expected.sequences_scores, atol=1e-5)


def test_one_embedding_serves_one_vocabulary(tmp_path):
    write(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"decoder_vocab_size": 101', '"decoder_vocab_size": 89'))
    with pytest.raises(ValueError, match="decoder_vocab_size: expected 101, as vocab_size"):
        models.load(tmp_path)
