"""Model folders: round trip, whole files, and what is said about damaged ones."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import reduce

import pytest
import safetensors.torch
import torch

from looped import looped
from saccade.models import ModelConfig, load, save
from saccade.models.decoder_lm import checkpoint


@pytest.fixture
def folder(lm, tmp_path):
    save(lm, tmp_path / "model")
    return tmp_path / "model"


def test_round_trip(lm, folder, text):
    lm.heads = {"seed": 3, "heads": [{"layer": 0, "head": 1, "role": "self", "decided_by": "self", "score": 0.5}]}
    save(lm, folder)
    again = load(folder)
    assert again.model.config == lm.model.config
    assert again.heads == lm.heads
    assert again.tokenizer.encode(text) == lm.tokenizer.encode(text)
    assert not again.model.training
    for (name, ours), (other, theirs) in zip(
        lm.model.state_dict().items(), again.model.state_dict().items(), strict=True
    ):
        assert name == other
        assert theirs.dtype == torch.float32
        assert torch.equal(ours.bfloat16().float(), theirs)


def test_what_was_loaded_saves_to_the_same_bytes(folder, tmp_path):
    save(load(folder), tmp_path / "again")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_a_model_without_measured_heads(folder):
    assert load(folder).heads is None


def test_an_unfinished_write_leaves_the_old_file(lm, folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full_disk(tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.safetensors.torch, "save_file", full_disk)
    torch.nn.init.zeros_(lm.model.embedding.weight)
    with pytest.raises(OSError, match="No space left"):
        save(lm, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def _edit_config(folder, **changes):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


def _edit_weights(folder, edit):
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    edit(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


DAMAGE = {
    "header": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "model.safetensors: damaged, not a"),
    "cut": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-5]),
        "model.safetensors: damaged, not a safetensors file",
    ),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors: damaged, not a"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: missing from the model folder"),
    "key gone": (
        lambda f: _edit_weights(f, lambda t: t.pop("decoder.norm.weight")),
        "model.safetensors: does not fit the configuration: decoder.norm.weight is missing$",
    ),
    "key too many": (
        lambda f: _edit_weights(f, lambda t: t.update(other=torch.zeros(3))),
        "model.safetensors: does not fit the configuration: other is not part of the model$",
    ),
    "shape": (
        lambda f: _edit_weights(f, lambda t: t.update({"decoder.norm.weight": torch.zeros(7)})),
        r"decoder.norm.weight has shape \(7,\), expected \(24,\)$",
    ),
    "many problems": (lambda f: _edit_config(f, layers=5), r"model.safetensors: .* is missing \(and \d+ more\)$"),
    "config text": (lambda f: (f / "config.json").write_text("{"), "config.json: damaged, not JSON"),
    "config binary": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "config.json: damaged, not JSON"),
    "config list": (lambda f: (f / "config.json").write_text("[]"), "config.json: damaged, expected an object"),
    "config value": (lambda f: _edit_config(f, heads=5), "config.json: heads: must divide the width"),
    "config nested": (
        lambda f: (f / "config.json").write_text("[" * 10**5),
        "damaged, its values are nested too",
    ),
    "config huge base": (
        lambda f: _edit_config(f, rotary_base=10**400),
        "base: must be finite, got a whole",
    ),
    "config huge integer": (
        lambda f: _edit_config(f, hidden=10**400),
        "hidden: must be at most 16777216",
    ),
    "config huge width": (
        lambda f: _edit_config(f, width=6 * 2**20),
        r"embedding.weight has shape .* expected \(283, 6291456",
    ),
    "config huge hidden": (lambda f: _edit_config(f, hidden=10**6), r"does not fit .* expected \(2000000, 24\)"),
    "config huge layers": (lambda f: _edit_config(f, layers=2**16), r"layers is 65536, but the file has \d+ tensors$"),
    "config mechanism": (
        lambda f: _edit_config(f, mechanism={"name": "performer", "features": 10**12}),
        "model.safetensors: does not fit the configuration: ",
    ),
    "config mechanism beyond int64": (
        lambda f: _edit_config(f, mechanism={"name": "performer", "features": 10**400}),
        "model.safetensors: does not fit the configuration",
    ),
    "config of others": (
        lambda f: _edit_config(f, **{f"field{number}": 1 for number in range(9)}),
        r"unknown \['field0', 'field1', 'field2', 'field3', 'field4'\] and 4 more$",
    ),
    "config field": (lambda f: _edit_config(f, depth=5), r"config.json: .* unknown \['depth'\]"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: missing from the model folder"),
    "tokenizer text": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json: damaged, not a tokenizer"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: missing from the model folder"),
    "other tokenizer": (lambda f: _edit_config(f, vocabulary=300), "tokenizer.json: has 283 tokens, expected 300"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_in_one_line(folder, case, meta_device):
    damage, message = DAMAGE[case]
    damage(folder)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert str(folder) in str(caught.value)


HOSTILE = [
    10**400,
    -(10**400),
    2**63,
    -1,
    0,
    float("inf"),
    float("nan"),
    "",
    "x" * 10_000,
    "a\nb",
    [],
    {},
    None,
    True,
    [10**400],
    {"a": 10**400},
    {"name": "x" * 10_000},
    {"name": "performer", "features": -(10**400)},
    {"name": "performer", "kind": "x" * 10_000},
    {"name": "gated", "headwise": 10**400},
]


@pytest.mark.parametrize("field", [*(field.name for field in dataclasses.fields(ModelConfig)), "x" * 10_000])
def test_whatever_a_field_holds_the_error_is_one_short_line(folder, field, meta_device):
    whole = (folder / "config.json").read_text()
    for value in [*HOSTILE, *(reduce(lambda inner, _: [inner], range(deep), []) for deep in (50, 300))]:
        (folder / "config.json").write_text(whole)
        _edit_config(folder, **{field: value})
        try:
            load(folder)
        except ValueError as error:
            told = str(error).replace(str(folder), "")
            assert len(told) <= 300 and "\n" not in told and not re.search(r"\d{30}|x{300}", told)


@looped("field", ["vocabulary", "width", "layers", "heads", "kv_heads", "hidden", "context"])
def test_numbers_that_no_model_has_are_counted_in_digits(field):
    sizes = {"vocabulary": 300, "width": 24, "layers": 1, "heads": 2}
    with pytest.raises(ValueError, match=rf"^{field}: must be at most \d+, got \[401 digits\]$"):
        ModelConfig(**{**sizes, field: 10**400})
    with pytest.raises(ValueError, match=rf"^{field}: must .*-\[401 digits\]"):
        ModelConfig(**{**sizes, field: -(10**400)})


def test_no_weights_are_drawn_that_the_file_replaces(folder, monkeypatch):
    """On the meta device PyTorch would import its compiler for it, a second of each command."""
    drawn = []
    monkeypatch.setattr(torch.Tensor, "normal_", lambda tensor, *_, **__: drawn.append(tensor))
    load(folder)
    assert not drawn


def test_no_such_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such model folder"):
        load(tmp_path / "nowhere")


def test_weights_that_are_not_numbers(lm, folder):
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["embedding.weight"][3, 1] = float("nan")
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="damaged, embedding.weight contains numbers that are not finite"):
        load(folder)
