"""Whole runs: what is written, what is kept, and what is refused before anything is touched."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import signal

import pytest
import torch
from rich.console import Console

from saccade import prune
from saccade.models import load
from saccade.training import Diverged, EvaluationSettings, Reporter, train_language_model
from saccade.training.progress import ConsoleReporter


def files_of(folder):
    """The bytes of every file below a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_writes_a_model_a_curve_and_a_card(make_run):
    run = make_run()
    lm = train_language_model(run)
    assert {path.name for path in run.out.iterdir()} == {
        "README.md",
        "checkpoints",
        "config.json",
        "curve.jsonl",
        "last.safetensors",
        "model.safetensors",
        "task.json",
        "tokenizer.json",
        "verdict.txt",
    }
    curve = [json.loads(line) for line in (run.out / "curve.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in curve] == [2, 4]
    card = (run.out / "README.md").read_text()
    assert "4 of 4" in card
    assert "validation loss as stored" in card
    stored = load(run.out)
    for name, parameter in lm.model.state_dict().items():
        assert torch.equal(parameter, stored.model.state_dict()[name])


class WorseAndWorse(Reporter):
    """Spoils the weights after the second look, so that those are the best."""

    def started(self, prepared):
        self.lm, self.looks, self.kept = prepared.lm, 0, None

    def looked(self, entry, sample, best):
        self.looks += 1
        assert best == (self.looks <= 2)
        if self.looks == 2:
            self.kept = self.lm.model.embedding.weight.detach().bfloat16().float().clone()
            torch.nn.init.normal_(self.lm.model.embedding.weight, std=5.0)


def test_the_best_weights_are_kept_and_the_last_beside_them(make_run):
    reporter = WorseAndWorse()
    run = make_run(steps=6)
    lm = train_language_model(run, reporter)
    assert reporter.looks == 3
    assert torch.equal(lm.model.embedding.weight, reporter.kept)
    assert (run.out / "last.safetensors").read_bytes() != (run.out / "model.safetensors").read_bytes()


class StopAt(Reporter):
    def __init__(self, step):
        self.stop = step

    def step(self, step, loss, norm, rate, tokens_per_second):
        if step == self.stop:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("step", [1, 3])
def test_an_interrupted_run_keeps_what_there_is(make_run, step):
    run = make_run()
    with pytest.raises(KeyboardInterrupt):
        train_language_model(run, StopAt(step))
    load(run.out)
    assert f"{step} of 4" in (run.out / "README.md").read_text()
    assert (run.out / "last.safetensors").exists()


def test_starting_from_a_model(make_run, tmp_path):
    first = train_language_model(make_run(out=tmp_path / "first"))
    started = []

    class Look(Reporter):
        def started(self, prepared):
            lm = prepared.lm
            started.append((lm.tokenizer.to_json(), lm.model.embedding.weight.detach().clone(), lm.model.config))

    run = make_run(initial=tmp_path / "first", shape={"dropout": 0.1})
    train_language_model(run, Look())
    ((tokenizer, embedding, config),) = started
    assert tokenizer == first.tokenizer.to_json()
    assert torch.equal(embedding, first.model.embedding.weight)
    assert config.dropout == 0.1
    assert "| starts from | first |" in (run.out / "README.md").read_text()
    other = make_run(initial=tmp_path / "first", shape={"layers": 2, "context": 13}, out=tmp_path / "none")
    expected = r"first: has another shape: layers 1 \(asked for 2\), context 11 \(asked for 13\)"
    with pytest.raises(ValueError, match=expected):
        train_language_model(other)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_pruned_model_goes_on_with_the_heads_it_has(make_run, tmp_path):
    first = train_language_model(make_run(out=tmp_path / "first"))
    prune(first, {0: [1]})
    first.save(tmp_path / "pruned")
    for steps, resume in ((4, False), (5, True)):
        found = train_language_model(make_run(steps, initial=tmp_path / "pruned", resume=resume))
        assert found.model.decoder.blocks[0].attention.config.heads == 1


def test_held_out_files_are_not_trained_on(make_run, story, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    held = folder / "held.txt"
    held.write_text("zebra quagga okapi " * 30)
    (folder / "other.txt").write_text(story.read_text())
    lengths = []

    class Look(Reporter):
        def started(self, prepared):
            lengths.append((prepared.lm.tokenizer.encode("zebra").ids, prepared.corpus.validation.shape[0]))

    train_language_model(make_run(text=folder, hold_out=(held,)), Look())
    ((zebra, validation),) = lengths
    assert len(zebra) == 5  # no merge was learned from it
    assert validation > 200
    with pytest.raises(ValueError, match="nothing is left to train on"):
        train_language_model(make_run(text=held, hold_out=(held,), out=tmp_path / "none"))


def test_characters(make_run, story):
    lm = train_language_model(make_run(vocabulary=None))
    assert lm.tokenizer.vocabulary <= len(set(story.read_text())) + 2


def test_an_existing_model_is_refused_and_overwritten_on_request(make_run):
    train_language_model(make_run())
    before = files_of(make_run().out)
    with pytest.raises(FileExistsError, match=r"^out: \S*out is not empty; .*, or overwrite=True or resume=True$"):
        train_language_model(make_run())
    assert files_of(make_run().out) == before
    train_language_model(make_run(overwrite=True, steps=2))
    assert "2 of 2" in (make_run().out / "README.md").read_text()
    run = make_run(overwrite=True)
    steep = dataclasses.replace(run.settings, rate=1e30, clip=1e30, looks=EvaluationSettings(every=4))
    with pytest.raises(Diverged, match="; .*out still holds the model of the run before$"):
        train_language_model(dataclasses.replace(run, settings=steep))
    assert "2 of 2" in (make_run().out / "README.md").read_text()


@pytest.mark.slow
def test_an_interrupted_overwriting_leaves_a_model_that_fits_together(make_run):
    train_language_model(make_run())
    out = make_run().out
    (out / "heads.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt):
        train_language_model(make_run(overwrite=True, shape={"layers": 2}), StopAt(1))
    lm = load(out)
    assert lm.model.config.layers == 2
    assert lm.heads is None


def test_only_model_folders_are_overwritten(make_run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="not a model folder, so it is not overwritten"):
        train_language_model(make_run(overwrite=True))
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match="file: is a file, expected a folder"):
        train_language_model(make_run(out=tmp_path / "file", overwrite=True))


def test_bad_input_leaves_no_folder(make_run, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    cases = [
        ({"text": tmp_path / "nowhere"}, FileNotFoundError, "nowhere: no such file"),
        ({"text": short}, ValueError, r"tokens are too short for one window of 11 .*; give more text or a smaller"),
        ({"shape": {"heads": 5}}, ValueError, "heads: must divide the width, got heads=5 and width=12"),
        ({"vocabulary": 100}, ValueError, "vocabulary: .* at least 257, got 100"),
        ({"hold_out": (tmp_path / "gone.txt",)}, FileNotFoundError, "gone.txt: no such file"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            train_language_model(make_run(**options))
        assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written(make_run, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=r"file/model: cannot be written \(Not a directory\)"):
        train_language_model(make_run(out=tmp_path / "file" / "model"))


def test_piped_output_is_plain(make_run):
    run, written = make_run(), io.StringIO()
    with ConsoleReporter(run, Console(file=written, width=60)) as reporter:
        train_language_model(run, reporter)
    lines = written.getvalue().splitlines()
    assert "\x1b" not in written.getvalue()
    assert lines[0].endswith("parameters: 1 layers, 2 heads, width 12, context 11, 283 tokens in the vocabulary")
    assert sum(line.startswith("step") and "gradient norm" not in line for line in lines) == 2
    assert lines[-3].startswith("best weights, over the whole validation text")


def test_the_beginning_of_a_run_is_written_before_its_first_step(make_run):
    """Into a file, which Python buffers: what is not flushed is not there yet."""
    run, seen = make_run(), []

    class Watched(ConsoleReporter):
        def step(self, *told):
            seen.append(path.read_text())
            super().step(*told)

    path = run.out.with_name("said.txt")
    with path.open("w") as file, Watched(run, Console(file=file, width=60)) as reporter:
        train_language_model(run, reporter)
    assert re.search(
        r"parameters: 1 layers.*\n.* tokens to train on, .*; 4 steps into .*\non cpu in float32, eval", seen[0]
    )
    assert seen[0].endswith("evaluated every 2 steps\n")


@pytest.mark.slow
def test_a_terminal_gets_a_bar(make_run):
    run, written = make_run(), io.StringIO()
    console = Console(file=written, width=120, force_terminal=True)
    with ConsoleReporter(run, console) as reporter:
        train_language_model(run, reporter)
    assert "4/4" in written.getvalue()
    assert "loss " in written.getvalue() and "tokens/s" not in written.getvalue()
