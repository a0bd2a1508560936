"""Language models of `saccade train lm`: their test beside a trigram, and their continuations."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F

from saccade import cli, tasks
from saccade.models import load
from saccade.tasks._texts._kneser_ney import KneserNey

STORY = "the hen met the fox.\nthe fox met the owl.\n"
OPTIONS = """--layers 1 --heads 2 --width 16 --context 16 --vocabulary 270 --batch 8 --rate 1e-2 --precision no
--no-tensorboard""".split()


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """A run on a.txt alone: b.txt was held out."""
    folder = tmp_path_factory.mktemp("lm")
    (folder / "texts").mkdir()
    for name, count in (("a", 40), ("b", 4)):
        (folder / "texts" / f"{name}.txt").write_text(STORY * count)
    held = folder / "texts" / "b.txt"
    out = str(folder / "run")
    assert (
        cli.main(
            ["train", "lm", str(folder / "texts"), "--hold-out", str(held), "--out", out, *OPTIONS, "--steps", "60"]
        )
        == 0
    )
    return folder


def test_perplexities_are_those_of_the_models_own_logits(lm):
    """Of a text that fits into the context, by hand: per token, per word (9 words and signs and 2 ends of lines)."""
    text = "the owl met.\nthe\n"
    path = lm / "short.txt"
    path.write_text(text)
    report = tasks.test(lm / "run", path)
    model = load(lm / "run")
    ids = model.tokenizer.encode(text).ids
    assert len(ids) < 16
    with torch.no_grad():
        logits = model.model.eval()(torch.tensor([[model.tokenizer.start, *ids[:-1]]]))[0]
    nats = F.cross_entropy(logits.double(), torch.tensor(ids), reduction="sum").item()
    words = len(["the", "owl", "met", ".", "\n", "the", "\n"])
    assert report.metrics == pytest.approx(
        {
            "perplexity per word": math.exp(nats / words),
            "perplexity per token": math.exp(nats / len(ids)),
            "bits per character": nats / math.log(2) / len(text),
        },
        rel=1e-5,
    )
    assert report.tested.details == {"words": words, "tokens": len(ids)}
    assert report.task.cost(report.metrics) == report.metrics["perplexity per word"]


def test_the_trigram_learns_from_what_the_model_learned_from(lm):
    """Catches a trigram that has seen the held-out file, other tokens, and a baseline that is better and not told."""
    report = tasks.test(lm / "run", lm / "texts" / "b.txt")
    tokenizer = load(lm / "run").tokenizer
    known, asked = (tokenizer.encode(STORY * count).ids for count in (40, 4))
    trigram = KneserNey([known], 3, lambda _: 1 / tokenizer.vocabulary)
    nats = -math.fsum(math.log(trigram.probability(token, asked[:n])) for n, token in enumerate(asked))
    (found,) = report.baselines.values()
    assert found["perplexity per token"] == pytest.approx(math.exp(nats / len(asked)))
    better = report.metrics["perplexity per word"] > found["perplexity per word"]
    assert report.better == list(report.baselines) * better


def test_the_commands_go_on_and_judge(lm, capsys):
    run = str(lm / "run")
    assert cli.main(["predict", run, "the hen", "--set", "tokens=5"]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    model = load(lm / "run")
    assert found["text"] == "the hen" and 1 <= len(model.tokenizer.encode(found["continuation"]).ids) <= 5
    assert cli.main(["test", run, str(lm / "texts" / "b.txt"), "--picture", "x.png"]) == 2
    assert "not available for a language model; `saccade look` and `saccade view` draw" in capsys.readouterr().err
    assert cli.main(["test", run, str(lm / "nowhere.txt")]) == 2
    assert "nowhere.txt: no such file or folder" in capsys.readouterr().err


def test_without_its_texts_there_is_no_trigram(lm, tmp_path):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes((lm / "run" / name).read_bytes())
    report = tasks.test(tmp_path, lm / "texts" / "b.txt")
    assert report.baselines == {} and report.note == "no baseline: the run's folder does not say what it was trained on"


@pytest.mark.slow
def test_two_seeds(lm, tmp_path, capsys):
    out, text = tmp_path / "run", str(lm / "texts")
    assert cli.main(["train", "lm", text, "--out", str(out), *OPTIONS, "--steps=2", "--seed=5", "--seeds=2"]) == 0
    told = capsys.readouterr().out
    assert "\n2 seeds, validation data, mean and standard deviation: nats per token " in told
    runs = [out / "seed-5", out / "seed-6"]
    assert f'\n  saccade generate --model {runs[0]} "Once upon a time"' in told
    first, second = (tasks.test(run, text, baseline=False).metrics["perplexity per word"] for run in runs)
    mean, deviation = tasks.test_seeds(out, text, baseline=False).metrics["perplexity per word"]
    assert first != second
    assert (mean, deviation) == pytest.approx(((first + second) / 2, abs(first - second) / math.sqrt(2)))


def test_held_out_folders_and_other_working_folders(tmp_path, monkeypatch):
    """The trigram must not learn from what was held out, wherever the test is asked for."""
    for name, count in (("known/a.txt", 40), ("known/held/b.txt", 9)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(STORY * count)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "lm", "known", "--hold-out", "known/held", "--out", "run", *OPTIONS, "--steps=1"]) == 0
    monkeypatch.chdir(tmp_path / "known")
    report = tasks.test("../run", "held")
    assert not report.note and report.baselines
    training, validation = report.task.split(report.task.read(tmp_path / "known"), 0.1, 0)
    assert [one.path.name for one in training] == ["a.txt"] and [one.path.name for one in validation] == ["b.txt"]


def test_a_picture_that_there_is_not_costs_no_figures(lm, tmp_path, capsys):
    picture = ["--picture", str(tmp_path / "a.png")]
    for command, told in (("test", "perplexity per word"), ("predict", "continuation")):
        given = str(lm / "texts" / "b.txt")
        assert cli.main([command, str(lm / "run"), given, *picture]) == 2
        found = capsys.readouterr()
        assert told in found.out and "picture" in found.err
