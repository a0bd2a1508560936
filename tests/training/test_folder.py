"""Whose folder it is: what may be resumed or replaced there, and what is never touched."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from pathlib import Path

import pytest

from saccade.models import load
from saccade.training import Reporter, Stopped, train_language_model
from saccade.training.run_folder.scalars import log_files
from training.test_run import files_of


class Notes(Reporter):
    """Keeps warnings, and stops the run at a step."""

    def __init__(self, stop=None):
        self.steps, self.warnings, self._stop = [], [], stop

    def step(self, step, loss, norm, rate, tokens_per_second):
        self.steps.append(step)
        if step == self._stop:
            signal.raise_signal(signal.SIGINT)

    def warned(self, message):
        self.warnings.append(message)


def put(folder, files):
    """Files of somebody else's."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


@pytest.fixture
def finished(make_run):
    run = make_run()
    train_language_model(run)
    return run


@pytest.mark.parametrize("left", [(), (".000000004.checkpoint.abcdefgh",), ("epoch1.pt", ".notes")])
def test_a_model_without_checkpoints_is_not_begun_anew_by_resuming(finished, left):
    out = finished.out
    for path in (out / "checkpoints").iterdir():
        path.unlink()
    for name in left:
        (out / "checkpoints" / name).write_text("x")
    before = files_of(out)
    wider = {**finished.shape, "width": 16}
    with pytest.raises(FileExistsError) as raised:
        train_language_model(dataclasses.replace(finished, resume=True, shape=wider))
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(f"{out}: has no checkpoint to resume from, only README.md, ")
    assert message.endswith(
        f"; go on from its weights with --from {out} and another --out, or replace what is there with --overwrite"
    )
    assert files_of(out) == before


def test_a_model_without_a_folder_of_checkpoints(finished):
    shutil.rmtree(finished.out / "checkpoints")
    before = files_of(finished.out)
    with pytest.raises(FileNotFoundError, match=r"nothing to resume \(no checkpoints in it\); go on from its weights"):
        train_language_model(dataclasses.replace(finished, resume=True))
    assert files_of(finished.out) == before


@pytest.mark.parametrize("resume", [False, True])
def test_another_projects_folder_is_left_alone(make_run, tmp_path, resume):
    out = tmp_path / "out"
    put(out, {"README.md": "my project", "checkpoints/epoch1.pt": "weights"})
    before = files_of(out)
    told = "has no checkpoint to resume from, only README.md, checkpoints/epoch1.pt; choose another --out$"
    with pytest.raises(FileExistsError, match=told if resume else "not a model folder, so it is not overwritten; choo"):
        train_language_model(make_run(resume=resume, overwrite=not resume))
    assert files_of(out) == before


OTHERS = [
    {"config.json": '{"architectures": ["LlamaForCausalLM"], "vocab_size": 32000}', "tokenizer.json": "{}"},
    {"config.json": '["not", {"an": "object"}]', "tokenizer.json": "{}"},
    {"config.json": "not JSON", "tokenizer.json": "{}"},
    {"config.json": '{"vocabulary": 61, "width": 32, "layers": 2, "heads": 2}'},
    {"last.safetensors": "another library's"},
    {"checkpoints/1.checkpoint": "another library's"},
    {"tensorboard/events.out.tfevents.1700000000.my-machine": "another library's log", "checkpoints/keep.txt": ""},
]


@pytest.mark.parametrize("files", OTHERS)
def test_other_libraries_models_are_not_overwritten(make_run, tmp_path, files):
    out = tmp_path / "out"
    theirs = {"README.md": "theirs", "tensorboard/notes.txt": "theirs", "model.safetensors": "theirs"}
    put(out, {**theirs, **files})
    before = files_of(out)
    with pytest.raises(FileExistsError, match="not a model folder, so it is not overwritten; choose another --out"):
        train_language_model(make_run(overwrite=True))
    assert files_of(out) == before


@pytest.mark.slow
def test_overwriting_and_resuming_touch_only_what_is_ours(make_run):
    run = make_run(looks={"tensorboard": True})
    train_language_model(run)
    mine = {
        "thesis.tex": "years of work",
        ".README.md.swp": "an editor's",
        "checkpoints/.notes": "mine",
        "checkpoints/1.checkpoint": "mine",
        "tensorboard/notes.txt": "mine",
        "tensorboard/events.out.tfevents.1700000000.my-machine": "another run's",
    }
    put(run.out, mine)
    (run.out / "checkpoints" / ".ipynb_checkpoints").mkdir()
    (log,) = log_files(run.out / "tensorboard")
    old = log.read_bytes()
    notes = Notes(stop=3)
    with pytest.raises(Stopped):
        train_language_model(dataclasses.replace(run, overwrite=True), notes)
    assert notes.warnings == []
    resumed = Notes()
    train_language_model(dataclasses.replace(run, resume=True), resumed)
    assert resumed.steps == [4]
    assert len(resumed.warnings) == 1  # where it goes on
    after = files_of(run.out)
    assert {name: after[name].decode() for name in mine} == mine
    assert old not in after.values()
    assert (run.out / "checkpoints" / ".ipynb_checkpoints").is_dir()


@pytest.mark.slow
def test_what_a_kill_leaves_before_the_first_checkpoint_is_begun_anew_and_overwritten(make_run, tmp_path):
    whole = make_run(out=tmp_path / "whole")
    train_language_model(whole)
    for way in ({"resume": True}, {"overwrite": True}):
        run = make_run(out=tmp_path / next(iter(way)), **way)
        put(run.out, {"tensorboard/events.out.tfevents.1700000000.000000": ""})
        (run.out / "checkpoints").mkdir()
        for name in (
            "checkpoints/.000000000.checkpoint.abcde_12",
            "checkpoints/.saccade-can-write",
            ".config.json.abcde_12",
        ):
            (run.out / name).write_text("broken off")
        train_language_model(run)
        names = ("model.safetensors", "last.safetensors", "config.json")
        assert all((run.out / name).read_bytes() == (whole.out / name).read_bytes() for name in names)
        assert not (run.out / "tensorboard").exists()
        assert not list((run.out / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_damaged_model_with_checkpoints_is_still_ours(finished):
    (finished.out / "config.json").write_text("{")
    train_language_model(dataclasses.replace(finished, overwrite=True))
    assert load(finished.out).model.config.width == finished.shape["width"]


@pytest.mark.slow
def test_no_readable_checkpoint_says_what_to_do(finished):
    for path in (finished.out / "checkpoints").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="none of its checkpoints can be read: .*; go on from its weights with --from"):
        train_language_model(dataclasses.replace(finished, resume=True))
    (finished.out / "config.json").unlink()
    with pytest.raises(ValueError, match="none of its .*bytes.; replace what is there with --overwrite$"):
        train_language_model(dataclasses.replace(finished, resume=True))


@pytest.mark.slow
def test_the_way_out_is_one(finished, make_run, tmp_path):
    """What the message advises works."""
    shutil.rmtree(finished.out / "checkpoints")
    train_language_model(make_run(initial=finished.out, out=tmp_path / "next"))
    assert "| starts from | out |" in (tmp_path / "next" / "README.md").read_text()
    train_language_model(dataclasses.replace(finished, overwrite=True))
    assert load(finished.out).model.config.width == finished.shape["width"]


@pytest.mark.slow
def test_an_old_checkpoint_that_cannot_be_removed_is_told_as_that(make_run, monkeypatch):
    unlink = Path.unlink

    def stubborn(self, **options):
        if self.name == "000000000.checkpoint":
            raise PermissionError(13, "Permission denied", str(self))
        unlink(self, **options)

    monkeypatch.setattr(Path, "unlink", stubborn)
    notes, run = Notes(), make_run()
    train_language_model(run, notes)
    assert notes.warnings == ["step 4: old checkpoints could not be removed (Permission denied); training goes on"]
    assert {path.stem for path in (run.out / "checkpoints").iterdir()} == {"000000000", "000000002", "000000004"}
    assert len((run.out / "curve.jsonl").read_text().splitlines()) == 2
    assert json.loads((run.out / "config.json").read_text())["width"] == 12
