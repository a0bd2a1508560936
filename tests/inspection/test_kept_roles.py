"""`saccade heads --roles`: roles are kept beside the weights and found again; roles of other weights give a note."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys

import checkpoints
import pytest
import safetensors.torch

from saccade import cli
from saccade.inspection import look, measure_roles, open_model
from saccade.models import load, save
from saccade.models.checkpoints import kept_roles
from saccade.models.checkpoints.kept_roles import KeptRoles

TEXT = " ".join(checkpoints.LINES) * 3


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))


@pytest.fixture
def bert(tmp_path):
    return checkpoints.bert(tmp_path / "bert")


def changed(folder):
    """One weight of the model, a little larger."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    next(iter(tensors.values())).flatten()[0].add_(0.125)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.slow
def test_the_command_measures_and_look_finds(bert, capsys):
    assert cli.main(["heads", "--roles", "--model", str(bert), "--json", TEXT]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["kept"] == str(bert / "heads.json") and len(answer["heads"]) == 6
    assert answer["heads"] == measure_roles(open_model(bert), TEXT)["heads"]
    found = look(open_model(bert), checkpoints.LINES[0])
    assert [found.measured(layer, head)["role"] for layer in (0, 1) for head in range(3)] == [
        head["role"] for head in answer["heads"]
    ]
    assert cli.main(["heads", "--roles", "--model", str(bert)]) == 0  # docstrings
    out = capsys.readouterr().out
    assert "tokens of docstrings" in out and f"Kept in {bert / 'heads.json'}" in out
    assert cli.main(["look", "--model", str(bert), checkpoints.LINES[0]]) == 0
    assert "roles were not measured" not in capsys.readouterr().out


def test_roles_of_other_weights_and_damaged_files_are_not_used_and_a_note_says_why(bert, capsys, tmp_path):
    other = checkpoints.bert(tmp_path / "other", heads=2)
    roles = measure_roles(open_model(bert), TEXT)
    file = open_model(bert).kept_roles.write(roles)
    shutil.copy(file, other / "heads.json")
    changed(bert)
    for model in (bert, other):
        seen = look(open_model(model), checkpoints.LINES[0])
        assert seen.roles is None
        assert seen.roles_note.startswith(f"{model}/heads.json: measured on other weights; ")
        assert f"`saccade heads --roles --model {model}`" in seen.roles_note
    right = json.loads(file.read_text())
    del right["weights"]
    for text, said in (("{", "damaged, not JSON"), ("[]", "damaged"), ("{}", "damaged"), (json.dumps(right), "name")):
        file.write_text(text)
        assert cli.main(["look", "--model", str(bert), checkpoints.LINES[0], "--out", "page.html"]) == 0
        note = re.sub(r"\s", "", capsys.readouterr().out)
        assert f"Note:{file}:" in note and said.replace(" ", "") in note
        assert f"{file}: " in (tmp_path / "page.html").read_text()
    assert cli.main(["heads", "--roles", "--model", str(bert), TEXT]) == 0  # as the note says
    assert open_model(bert).roles and not open_model(bert).roles_note


@pytest.mark.slow
def test_the_first_file_that_fits_is_used(bert, tmp_path):
    place = open_model(bert).kept_roles
    roles = measure_roles(open_model(bert), TEXT)
    place.write(roles)
    place.cached.parent.mkdir(parents=True)
    place.cached.write_text(json.dumps(roles | {"heads": [], "weights": "0" * 64}))
    assert open_model(bert).roles["heads"] == roles["heads"] and open_model(bert).roles_note == ""
    save(load(), own := tmp_path / "own")
    place = open_model(own).kept_roles
    place.cached.write_text(json.dumps({"heads": [], "weights": place._digest}))
    assert load(own).heads == open_model(own).roles == {"heads": []}
    place.cached.write_text("{")
    assert load(own).heads == open_model(own).roles == load().heads


def test_weights_are_read_once(bert, monkeypatch):
    model = open_model(bert)
    model.kept_roles.write(measure_roles(model, TEXT))
    read = []
    digest = kept_roles.weights_digest
    monkeypatch.setattr(kept_roles, "weights_digest", lambda weights: read.append(weights) or digest(weights))
    place = (model := open_model(bert)).kept_roles
    place.cached.parent.mkdir(parents=True)
    shutil.copy(bert / "heads.json", place.cached)
    changed(bert)
    assert look(model, checkpoints.LINES[0]).roles is None
    assert read == [bert]


@pytest.mark.slow
def test_own_models_have_roles_from_training_until_they_are_measured(tmp_path):
    folder = tmp_path / "own"
    save(load(), folder)
    assert open_model(folder).roles == load().heads  # written with the weights, which are not named
    roles = measure_roles(open_model(folder), TEXT)
    open_model(folder).kept_roles.write(roles)
    assert open_model(folder).roles["heads"] == load(folder).heads["heads"] == roles["heads"]
    save(load(folder), again := tmp_path / "again")  # `weights` would be those of another file
    assert open_model(again).roles == load(folder).heads
    changed(folder)
    assert load(folder).heads is open_model(folder).roles is None
    assert "other weights" in open_model(folder).roles_note


def test_what_cannot_be_written_beside_the_weights_is_cached(bert, monkeypatch, tmp_path):
    place = open_model(bert).kept_roles
    roles = measure_roles(open_model(bert), TEXT)
    (bert / "heads.json").mkdir()  # no file can replace a folder
    assert place.write(roles) == place.cached and place.cached.is_relative_to(tmp_path / "cache")
    assert open_model(bert).roles["heads"] == roles["heads"]
    (bert / "heads.json").rmdir()
    assert place.write(roles) == bert / "heads.json" and not place.cached.exists()
    monkeypatch.setattr("saccade.inspection._open.folder_of", lambda name: bert)
    monkeypatch.setattr("saccade.inspection._open.is_hub_name", lambda name: True)
    fetched = open_model("org/name").kept_roles
    (bert / "heads.json").unlink()
    assert fetched.write(roles) == fetched.cached and open_model("org/name").roles["heads"] == roles["heads"]
    file = tmp_path / "model.gguf"
    assert KeptRoles(file, "").beside == tmp_path / "model.heads.json"
    assert len({KeptRoles(file, "").cached, place.cached, KeptRoles(tmp_path / "other.gguf", "").cached}) == 3


def test_what_does_not_go_with_roles(capsys):
    assert cli.main(["heads", "--roles", "--out", "roles.png", TEXT]) == 2
    assert "--out draws the other answers, not --roles" in capsys.readouterr().err
    assert cli.main(["heads", "--roles", "--importance", TEXT]) == 2
    assert "--roles and --importance cannot be combined" in capsys.readouterr().err
    assert cli.main(["heads", "--roles", "--by", "exact", TEXT]) == 2
    assert "--by goes with the overview" in capsys.readouterr().err
