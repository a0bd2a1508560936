"""Heads removed from a run of a task: the same model with those heads masked, by the task's own test and trainer."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest
import torch

import saccade
from pruning.masked import masked
from saccade import cli, tasks
from saccade.intervention import Ablate
from saccade.models import load
from saccade.pruning._layers import attention_layers
from saccade.tasks._compression import _prune
from saccade.tasks._examples import TextExample
from saccade.tasks._runs._training import open_run
from saccade.training import Reporter, Stopped
from slowly import slow_but
from tasks.conftest import SMALL, reviews, write_csv
from tasks.test_distill import images, questioned, sounds, tagged
from tasks.test_forecast import SHAPE, series, table
from tasks.test_translate import LANGUAGES, phrases, write_pair

FEW = {"steps": 9, "batch": 19, "precision": "no", "rate": 6e-3, "every": 3, "tensorboard": False}


@pytest.fixture(scope="module")
def wide(files, tmp_path_factory):
    """A run of two layers of three heads that has learned a little."""
    out = tmp_path_factory.mktemp("wide") / "run"
    return tasks.train(
        "classify", files / "reviews.csv", out, **{**SMALL, "layers": 2, "heads": 3, "steps": 20, "every": 10}
    )


@pytest.fixture(scope="module")
def pruned(wide, files, tmp_path_factory):
    return tasks.prune(wide, tmp_path_factory.mktemp("pruned") / "run", heads="0.1,1.0,1.2")


@pytest.mark.slow
def test_a_pruned_run_is_the_run_with_its_heads_masked(wide, pruned, files):
    """By `saccade test` of the folder: what is written, read and predicted."""
    found = tasks.test(pruned.run.folder, files / "unseen.csv", baseline=False)
    opened = open_run(wide.folder, {})
    with saccade.intervene(opened.model, {0: Ablate([1]), 1: Ablate([0, 2])}):
        masked = tasks.test(opened, files / "unseen.csv", baseline=False)
    mine, theirs = (torch.from_numpy(np.array(report.tested.outputs)) for report in (found, masked))
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
    whole = tasks.test(wide, files / "unseen.csv", baseline=False)
    assert (mine - torch.from_numpy(np.array(whole.tested.outputs))).abs().max() > 1e-4  # or this would show nothing


def classified(folder):
    return write_csv(folder / "reviews.csv", reviews(41, 3)), {"vocabulary": 60}


def forecast(folder):
    return table(folder / "series.csv", series(101)), {**SHAPE, "patch": 5}


def written(folder):
    from tasks.sounds import write_words

    return write_words(folder / "words", 23, 3), {"text": "text"}


def translated(folder):
    return write_pair(folder / "pairs", phrases(41, 3)), {**LANGUAGES, "vocabulary": 300}


@pytest.mark.parametrize(
    "task, made",
    slow_but(
        [
            ("classify", classified),
            ("forecast", forecast),
            ("image", images),
            ("tag", tagged),
            ("answer", questioned),
            ("speech", sounds),
            ("speech", written),
            ("translate", translated),
        ],
        ("tag", tagged),
    ),
)
def test_heads_of_every_task_are_ranked_and_removed(tmp_path, task, made):
    """Each example's loss is that of the whole model with the same heads masked."""
    data, options = made(tmp_path)
    given = {"width": 24, "heads": 2, "layers": 2, "steps": 2, "batch": 7, "precision": "no", "tensorboard": False}
    run = tasks.train(task, data, tmp_path / "run", **{**given, **options, "layers": 2})
    pruned = tasks.prune(run, tmp_path / "pruned", keep=0.5)
    removed = {layer.path: layer.removed for layer in pruned.pruning.layers}
    whole, left = (open_run(folder, {}) for folder in (run.folder, tmp_path / "pruned"))
    examples = run.task.read(data)

    def losses(model):
        batches = [run.task.collate(model, [item]) for item in run.task.encode(model, examples)]
        with torch.no_grad():
            return torch.stack([run.task.loss(run.task.forward(model, one), one, learning=False) for one in batches])

    unmasked = losses(whole.model)
    for layer in attention_layers(whole.model):
        masked(layer.output, removed.get(layer.path, ()), layer.value_width)
    torch.testing.assert_close(losses(left.model), losses(whole.model), atol=1e-6, rtol=1e-6)
    assert (losses(left.model) - unmasked).abs().max() > 1e-5  # or this would show nothing


@pytest.mark.slow
def test_it_stays_a_run_of_its_task(wide, pruned, files):
    """Tested beside its baseline, trained from, pruned again; weights are fewer."""
    report = tasks.test(pruned.run.folder, files / "unseen.csv")
    assert len(report.baselines) == 1 and not report.note
    whole, left = pruned.pruning.parameters
    assert left == sum(p.numel() for p in load(pruned.run.folder).parameters()) < whole
    again = tasks.prune(pruned.run, pruned.run.folder.parent / "again", keep=2)
    assert [block.attention.config.heads for block in again.run.model.encoder.blocks] == [1, 1]
    assert pruned.metrics.keys() == {"before", "removed"} and pruned.judged == 22


@pytest.mark.slow
def test_it_learns_on_with_fewer_heads(wide, files, tmp_path):
    """The trainer writes, reads and resumes a model whose layers have unequal heads."""

    class StopsAt(Reporter):
        def step(self, step, loss, norm, rate, tokens_per_second):
            if step == 5:
                signal.raise_signal(signal.SIGTERM)

    given = {"keep": 0.5, **FEW}
    whole = tasks.prune(wide, tmp_path / "whole", **given)
    with pytest.raises(Stopped):
        tasks.prune(wide, tmp_path / "stopped", reporter=StopsAt(), **given)
    tasks.prune(wide, tmp_path / "stopped", resume=True, **given)
    for name in ("model.safetensors", "last.safetensors"):
        assert (tmp_path / "stopped" / name).read_bytes() == (whole.run.folder / name).read_bytes()
    left = [block.attention.config.heads for block in load(whole.run.folder).encoder.blocks]
    assert sum(left) == 3 and whole.metrics.keys() == {"before", "removed", "trained"}
    judged = tasks.test(whole.run.folder, files / "unseen.csv", baseline=False).metrics["accuracy"]
    assert judged > 0.4


def test_heads_are_ranked_by_each_examples_own_derivative(wide):
    """Derivatives of unequal sign would cancel in a batch (Michel et al. 2019, equation 2)."""
    examples = [TextExample(text, label, "") for text, label in (("a good film", "negative"), ("dull", "positive"))]
    model = load(wide.folder)
    losses = torch.zeros(2, 6, dtype=torch.float64)
    for row, item in enumerate(wide.task.encode(model, examples)):
        batch = wide.task.collate(model, [item])
        gates = torch.ones(2, 3, requires_grad=True)
        hooks = [
            block.attention.output.register_forward_pre_hook(
                lambda module, given, gate=gate: (given[0] * gate.repeat_interleave(8),)
            )
            for block, gate in zip(model.encoder.blocks, gates, strict=True)
        ]
        wide.task.loss(wide.task.forward(model, batch), batch, learning=False).backward()
        losses[row] = gates.grad.flatten()
        for hook in hooks:
            hook.remove()
    ranked = _prune._ranked(wide.task, load(wide.folder), examples, 5, lambda *told: None).values.values
    torch.testing.assert_close(ranked.double(), losses.abs().mean(0), rtol=1e-4, atol=1e-8)
    assert not torch.allclose(losses.abs().mean(0), losses.mean(0).abs(), rtol=1e-2)  # or this would show nothing


@pytest.mark.slow
def test_what_was_not_worth_it_says_so_and_what_would_be(wide, tmp_path, monkeypatch):
    """Of six heads the run can lose one without harm; with four or three its accuracy falls by a fifth."""

    def scores(judge, model):
        heads = sum(block.attention.config.heads for block in model.encoder.blocks)
        return {"accuracy": 0.85 if heads >= 5 else 0.68}

    monkeypatch.setattr(_prune._Judge, "scores", scores)
    made = tasks.prune(wide, tmp_path / "half", keep=0.5)
    whole, left = made.pruning.parameters
    first, second, third = made.verdict
    share = f"{1 - left / whole:.1%}"
    assert first == f"not worth it: accuracy 0.8500 -> 0.6800 for {share} fewer parameters (20.0% worse)"
    assert second.startswith("keep 0.875 would be: accuracy 0.8500 -> 0.8500 for ")
    assert "steps, epochs or minutes" in third and str(made).endswith("\n".join(made.verdict))
    assert made.as_json()["verdict"] == list(made.verdict)
    assert tasks.prune(wide, tmp_path / "one", keep=5).verdict == ()
    chosen = tasks.prune(wide, tmp_path / "chosen", heads="0.1,1.0,1.2")
    assert chosen.verdict == (first, third)


@pytest.mark.slow
def test_the_command(wide, files, tmp_path, capsys):
    out = tmp_path / "run"
    given = ["prune", str(wide.folder), "--keep", ".5", "--out", str(out)]
    assert cli.main([*given, "--steps", "3"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith(f"parameters, from {wide.folder} without 3 heads")
    assert any(line.startswith("accuracy  ") and "before -> heads removed -> trained on, 22" in line for line in told)
    assert told[-1] == f"Written  {out}"
    assert cli.main([*given, "--force", "--json", "--data", str(files / "unseen.csv")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["examples"] == 10 and found["metrics"].keys() == {"before", "removed"}
    assert not (out / "last.safetensors").exists() and not list((out / "checkpoints").glob("*.safetensors"))
    assert cli.main(["test", str(out), str(files / "unseen.csv"), "--no-baseline"]) == 0


def test_bad_input(wide, files, tmp_path, capsys):
    out = tmp_path / "out"
    cases = [
        ({}, "keep, heads: expected how many heads stay, or those that go, got neither"),
        ({"keep": 1.0}, "keep: at 1.0 every head stays"),
        ({"heads": "0.7"}, "heads: layer 0 has the heads 0 to 2, got 7"),
        ({"keep": 0.5, "rate": 1e-3}, "rate: sets how the model is trained again; give one of steps, epochs, minutes"),
        ({"keep": 0.5, "resume": True}, "resume: continues training; give one of steps, epochs, minutes, too"),
        ({"keep": 0.5, "data": tmp_path / "none.csv"}, "none.csv: no such file or folder"),
    ]
    for options, message in cases:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            tasks.prune(wide, out, **options)
    with pytest.raises(TypeError, match="width: no option of prune"):
        tasks.prune(wide, out, keep=0.5, width=3)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="out: .* is the folder of the run it starts from; give another folder"):
            tasks.prune(wide, wide.folder, keep=0.5, overwrite=overwrite)
    assert not out.exists()
    assert cli.main(["prune", str(wide.folder), "--keep", ".5"]) == 2
    assert "--out: missing" in capsys.readouterr().err
