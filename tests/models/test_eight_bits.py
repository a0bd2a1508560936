"""`save` of models that hold linear layers in 8 bits: torchao's files, which transformers and `load` read."""

from __future__ import annotations

import json

import pytest
import safetensors
import torch
import transformers

from saccade import models
from saccade.operator._backends.native import _kernels
from slowly import slow_after

pytestmark = pytest.mark.skipif(_kernels.module is None, reason="no native kernels")
SIZES = dict(vocab_size=307, hidden_size=256, num_hidden_layers=2, num_attention_heads=4)
IDS = torch.randint(0, 307, (2, 11), generator=torch.Generator().manual_seed(1))
WHOLE = {  # as torchao 0.18 writes it
    "_type": "IntxUnpackedToInt8Tensor",
    "_data": {
        "target_dtype": {"_type": "torch.dtype", "_data": "int8"},
        "block_size": [1, 128],
        "dtype": {"_type": "torch.dtype", "_data": "float32"},
        "activation_quantization": None,
    },
    "_tensor_data_names": ["qdata", "scale", "zero_point"],
}


def made(kind, folder, **options):
    """A small model of transformers, saved."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def contents(folder):
    """The tensors of a folder, dequantised from their definition, and its metadata."""
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        raw = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    found = {}
    for name, tensor in raw.items():
        base, _, part = name.rpartition("_weight_")
        if not base:
            found[name] = tensor
        elif part == "qdata":
            scale, zero = (raw[f"{base}_weight_{other}"].repeat_interleave(128, 1) for other in ("scale", "zero_point"))
            found[f"{base}weight"] = (tensor.double() - zero) * scale
    return found, metadata


@pytest.mark.parametrize("kind, tied", slow_after(2, [("Llama", False), ("Llama", True), ("GPTNeoX", False)]))
def test_a_saved_model_has_the_same_numbers_again(kind, tied, tmp_path):
    original = made(kind, tmp_path / "floats", intermediate_size=384, tie_word_embeddings=tied)
    model = models.load(tmp_path / "floats", weights="int8")
    model.save(tmp_path / "saved")
    found, metadata = contents(tmp_path / "saved")
    assert sorted(json.loads(metadata["tensor_names"])) == sorted(found)
    whole = {name for name in found if json.loads(metadata[name])["_type"] != "Tensor"}
    assert all(json.loads(metadata[name]) == WHOLE for name in whole)
    linear = {f"{name}.weight" for name, part in original.named_modules() if isinstance(part, torch.nn.Linear)}
    assert whole == (linear - {"lm_head.weight"} if tied else linear)
    weights = dict(original.named_parameters(remove_duplicate=False))
    assert found.keys() == weights.keys() - ({"lm_head.weight"} if tied else set())
    for name, weight in weights.items():
        if name in whole:  # half a step of each block
            step = weight.unflatten(1, (-1, 128)).abs().amax(2).repeat_interleave(128, 1) / 127
            assert ((found[name] - weight).abs() <= 0.51 * step).all(), name
        elif name in found:
            assert torch.equal(found[name], weight), name
    again = models.load(tmp_path / "saved", weights="stored")
    kept = "hidden_states" if tied else "logits"  # the tied output layer is in floats again
    with torch.no_grad():
        got, want = (one(IDS, hidden_states=True) if tied else one(IDS) for one in (again, model))
        assert torch.equal(getattr(got, kept)[-1], getattr(want, kept)[-1])
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "torchao"
    floats = models.load(tmp_path / "saved")
    floats.save(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


@pytest.mark.parametrize("kind, options", [("Llama", dict(intermediate_size=200)), ("GPT2", dict(n_positions=64))])
def test_what_torchao_cannot_hold_is_saved_in_floats(kind, options, tmp_path):
    """Widths that are no multiples of 128, and transposed layers."""
    made(kind, tmp_path / "floats", **options)
    model = models.load(tmp_path / "floats", weights="int8")
    model.save(tmp_path / "saved")
    found, metadata = contents(tmp_path / "saved")
    floats = [name for name in found if json.loads(metadata.get(name, '{"_type": "Tensor"}'))["_type"] == "Tensor"]
    assert sum("down_proj" in name or "c_fc.weight" in name for name in floats) == 2
    with torch.no_grad():
        want, got = model(IDS).logits, models.load(tmp_path / "saved")(IDS).logits
    assert 1e-4 < (got - want).abs().max() / want.abs().max() < 0.05  # activations are not rounded
