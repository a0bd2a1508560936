"""Models from folders: nothing is fetched, no code of theirs is run, and what is missing is said."""

from __future__ import annotations

import json
import pickle
import socket

import pytest
import safetensors.torch
import torch
import transformers

from saccade.models import LanguageModel
from saccade.verification.subject._load import load as load_named
from saccade.verification.subject._models import token_subject

CONFIG = {
    "vocab_size": 97,
    "n_embd": 20,
    "n_layer": 2,
    "n_head": 5,
    "n_positions": 43,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def load(named):
    return load_named(f"hf:{named}")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def model():
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG)).eval()


def outputs(opened):
    subject = token_subject(opened)
    return subject(subject.inputs(2, 7)).out


def test_a_folder_of_safetensors_gives_the_model_that_was_saved(tmp_path, model):
    model.save_pretrained(tmp_path)
    opened = load(str(tmp_path))
    assert opened.assumed == ()
    assert torch.equal(outputs(opened), outputs(model))
    assert not opened.model.training


def test_a_half_precision_checkpoint_is_tested_in_float32(tmp_path, model):
    model.half().save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in load(str(tmp_path)).model.parameters()} == {torch.float32}


def test_a_configuration_alone_gives_random_weights_and_says_so(tmp_path, model):
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.save_pretrained(tmp_path)
    state = torch.get_rng_state()
    opened = load(str(tmp_path))
    assert torch.equal(torch.get_rng_state(), state)
    assert token_subject(opened).reading.assumed == ("its folder holds no weights: random ones are tested",)
    weight = opened.model.transformer.h[0].attn.c_attn.weight
    # standard deviation 1 / sqrt(20), of 20 * 60 draws: five standard errors
    assert abs(weight.std() * 20**0.5 - 1) < 5 / (2 * weight.numel()) ** 0.5


def test_pickled_tensors_are_read_without_running_code(tmp_path, model):
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    opened = load(str(tmp_path))
    assert torch.equal(outputs(opened), outputs(model))
    assert "pytorch_model.bin with weights_only" in opened.assumed[0]


class Bad:
    ran = False

    def __reduce__(self):
        return (setattr, (Bad, "ran", True))


def test_a_pickle_with_code_is_refused(tmp_path, model):
    model.config.save_pretrained(tmp_path)
    torch.save({"transformer.wte.weight": Bad()}, tmp_path / "pytorch_model.bin", pickle_module=pickle)
    with pytest.raises(ValueError, match="weights: "):
        load(str(tmp_path))
    assert not Bad.ran


def test_safetensors_win_over_a_pickle(tmp_path, model):
    model.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    assert torch.equal(outputs(load(str(tmp_path))), outputs(model))


def test_weights_that_are_missing_are_named(tmp_path, model):
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["transformer.h.1.attn.c_attn.weight"]
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"its config.json describes, missing: transformer.h.1.attn.c_attn.weight"):
        load(str(tmp_path))


def test_a_class_without_a_head_is_taken_from_the_configuration(tmp_path):
    config = transformers.BertConfig(vocab_size=97, hidden_size=20, num_hidden_layers=1, num_attention_heads=5)
    transformers.BertModel(config).save_pretrained(tmp_path)
    assert type(load(str(tmp_path)).model) is transformers.BertModel


def test_a_folder_of_saccades_own_model():
    from saccade.models.decoder_lm.checkpoint import EMBEDDED

    opened = load(str(EMBEDDED))
    assert isinstance(opened.model, LanguageModel)
    assert outputs(opened).shape[:2] == (2, 7)


def write(folder, config):
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "config.json: damaged, not JSON"),
        ("[3]", "config.json: damaged, expected an object of model settings"),
        ({"model_type": "nobodys", "auto_map": {"AutoModel": "code.Model"}}, "configuration: "),
    ],
)
def test_configurations_that_cannot_be_read(tmp_path, config, words):
    with pytest.raises(ValueError, match=words):
        load(write(tmp_path, config))


def test_code_beside_the_weights_is_not_run(tmp_path):
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = {"model_type": "nobodys", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    with pytest.raises(ValueError, match="configuration: "):
        load(write(tmp_path, config))
    assert not (tmp_path / "ran").exists()


def test_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"no such folder, and no model of this name in the local cache.*hf download"):
        load("nobody/no-such-model-at-all")
    with pytest.raises(ValueError, match="config.json is missing from the folder"):
        load(str(tmp_path))
    with pytest.raises(ValueError, match="no such folder, and no name of a model"):
        load("/no/such/folder/at/all")
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match="is a file; expected the folder of a model"):
        load(str(tmp_path / "model.bin"))


def test_a_model_in_the_local_cache(tmp_path, model, monkeypatch):
    cache = tmp_path / "models--nobody--tiny"
    snapshot = cache / "snapshots" / ("0" * 40)
    model.save_pretrained(snapshot)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert torch.equal(outputs(load("nobody/tiny")), outputs(model))


@pytest.mark.parametrize("weights", [True, False])
def test_a_folder_that_asks_for_a_kernel_of_the_hub_is_refused(tmp_path, model, weights, monkeypatch):
    (model if weights else model.config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attn_implementation": "org/name"}))
    monkeypatch.setattr(
        transformers.modeling_utils, "lazy_import_flash_attention", lambda *_, **__: pytest.fail("fetched")
    )
    with pytest.raises(ValueError, match="configuration: attn_implementation is 'org/name', code on the hub"):
        load(str(tmp_path))


def test_an_architecture_is_a_model_and_nothing_else_of_the_library(tmp_path, model):
    model.config.architectures = ["pipeline", "AutoModel", 7]
    model.config.save_pretrained(tmp_path)
    assert type(load(str(tmp_path)).model) is transformers.GPT2LMHeadModel


@pytest.mark.slow
def test_a_configuration_alone_that_asks_for_more_than_there_is(tmp_path, model, meta_device):
    model.config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for field, value, told in (
        ("n_layer", 10**9, "n_layer is 1,000,000,000"),
        ("vocab_size", 2**45, "there are no weights, nor memory for random ones"),
        ("n_head", 7, "configuration: "),
        ("architectures", 7, None),
    ):
        path.write_text(json.dumps(config | {field: value}))
        if told is None:
            assert type(load(str(tmp_path)).model) is transformers.GPT2LMHeadModel
            continue
        with pytest.raises(ValueError, match=told):
            load(str(tmp_path))
