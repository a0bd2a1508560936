"""Texts of several labels: how they are read, what is learned of each, and how good it is."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from saccade import cli, tasks
from saccade.tasks._classes._results import several_scores
from saccade.tasks._example_task import ExampleObjective
from saccade.tasks._examples import TextExample
from saccade.tasks._runs._training import split_options
from saccade.tasks._several_labels import draw_labels
from saccade.training import Settings
from tasks.conftest import FILLING, SMALL, write_csv

WORDS = {"funny": ["witty", "comic"], "long": ["endless", "hours"], "sad": ["tears", "gloomy"]}
SEVERAL = {
    **SMALL, "steps": 200, "rate": 3e-3, "width": 64, "heads": 4, "dropout": 0.0, "label": "genre", "several": ";"
}  # fmt: skip


def films(count, seed):
    """Texts with a word for each label they have, and the labels as a cell."""
    draw, made = random.Random(seed), []
    for _ in range(count):
        labels = [label for label in WORDS if draw.random() < 0.4]
        words = [draw.choice(FILLING) for _ in range(draw.randrange(1, 4))] + [
            draw.choice(WORDS[one]) for one in labels
        ]
        draw.shuffle(words)
        made.append((" ".join(words), "; ".join(labels)))
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("films")
    write_csv(folder / "unseen.csv", films(101, 5), ("text", "genre"))
    return write_csv(folder / "films.csv", films(307, 3), ("text", "genre"))


@pytest.fixture(scope="module")
def learned(data):
    return tasks.train("classify", data, data.parent / "learned", **SEVERAL)


@pytest.mark.slow
def test_learns_each_label(learned, data):
    report = tasks.test(learned.folder, data.parent / "unseen.csv")
    assert report.metrics == {"micro F1": 1.0, "macro F1": 1.0, "subset accuracy": 1.0}
    found = tasks.predict(learned, ["witty tears film", "a story", "endless gloomy comic"])
    assert [one["labels"] for one in found] == [["funny", "sad"], [], ["funny", "long", "sad"]]


@pytest.mark.slow
def test_does_not_learn_what_cannot_be_learned(data, tmp_path):
    rows = films(307, 3)
    labels = np.random.default_rng(7).permutation([cell for _, cell in rows])
    shuffled = write_csv(tmp_path / "a.csv", [(text, cell) for (text, _), cell in zip(rows, labels, strict=True)])
    run = tasks.train("classify", shuffled, tmp_path / "run", **{**SEVERAL, "label": "label"})
    report = tasks.test(run, data.parent / "unseen.csv", baseline=False, label="genre")
    truth = run.task.truth(report.tested.data)
    found = np.asarray(report.tested.outputs) > 0.5
    # Of each label as often right as chance is, with the same counts.
    for real, said in zip(truth.T, found.T, strict=True):
        chance = real.mean() * said.mean() + (1 - real.mean()) * (1 - said.mean())
        assert abs((real == said).mean() - chance) < 4 * 0.5 / 101**0.5


@pytest.mark.slow
def test_transformers_opens_the_run_and_says_the_same(learned):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(learned.folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(learned.folder)
    assert theirs.config.problem_type == "multi_label_classification"
    texts = ["a witty film", "tears", "quux film!"]
    with torch.no_grad():
        logits = theirs(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    ours = [list(one["probabilities"].values()) for one in tasks.predict(learned, texts)]
    np.testing.assert_allclose(ours, logits.sigmoid(), atol=1e-6)
    assert [theirs.config.id2label[n] for n in range(3)] == list(learned.task.labels)


@pytest.mark.slow
def test_one_class_from_a_run_of_several(learned, tmp_path):
    """The head begins anew only for another number; what config.json says of the labels is the new task's."""
    data = write_csv(tmp_path / "a.csv", [(f"film {n}", "abc"[n % 3]) for n in range(30)])
    run = tasks.train("classify", data, tmp_path / "run", initial=learned.folder, steps=2, precision="no")
    assert "problem_type" not in json.loads((run.folder / "config.json").read_text())


def test_metrics_are_those_of_the_counts():
    """Catches a mean over the wrong axis: micro and macro F1 differ here, and so do precision and recall."""
    draw = np.random.default_rng(3)
    truth, outputs = draw.random((53, 5)) < [0.1, 0.3, 0.5, 0.7, 0.9], draw.random((53, 5))
    found = outputs > 0.5
    both, either = (truth & found).sum(0), truth.sum(0) + found.sum(0)
    expected = {
        "micro F1": 2 * both.sum() / either.sum(),
        "macro F1": (2 * both / either).mean(),
        "subset accuracy": sum(a.tolist() == b.tolist() for a, b in zip(truth, found, strict=True)) / 53,
    }
    assert several_scores(list(outputs), truth) == pytest.approx(expected)


@pytest.fixture
def kind():
    labels = [tuple(label for divisor, label in enumerate("abc", 2) if n % divisor == 0) for n in range(53)]
    examples = [TextExample(f"t{n}", labels[n], "") for n in range(53)]

    def make(**options):
        return tasks.ClassifySeveral(several=";", **options).fitted(examples), examples

    return make


def test_the_loss_is_a_yes_or_no_for_each_label(kind):
    """Smoothed and weighed only while learning."""
    task, examples = kind(class_weights=True, label_smoothing=0.2)
    draw = torch.Generator().manual_seed(5)
    logits, truth = torch.randn(7, 3, generator=draw), torch.tensor(task.truth(examples[:7])).float()
    yes, no = F.logsigmoid(logits), F.logsigmoid(-logits)
    plain = -(truth * yes + (1 - truth) * no).mean()
    batch = {"labels": truth, "texts": torch.arange(7)}
    torch.testing.assert_close(task.loss(logits, batch, learning=False), plain)
    rare = torch.tensor([26 / 27, 35 / 18, 39 / 14])
    smooth = 0.8 * truth + 0.1
    learning = -(smooth * rare * yes + (1 - smooth) * no).mean()
    torch.testing.assert_close(task.loss(logits, batch, learning=True), learning)
    assert task.weight(batch, learning=True) == 7


@pytest.mark.slow
def test_parts_of_a_batch_add_up(learned, kind):
    task, examples = kind(class_weights=True)
    made = ExampleObjective(task, learned.model, examples, examples[:9], Settings(steps=20, batch=13, seed=3))
    batch = made.batch(1)
    parts = made.split(batch, 3)
    assert batch["labels"].shape == (13, 3) and [len(part["labels"]) for part in parts] == [5, 4, 4]
    joined = sum(made.weight(part) / made.weight(batch) * made.loss(made.model, part) for part in parts)
    torch.testing.assert_close(joined, made.loss(made.model, batch))


def test_the_split_leaves_each_label_a_text_to_learn_from(kind):
    task, examples = kind()
    examples[7] = TextExample("x", ("only",), "")
    for seed in range(5):
        training, judged = task.split(examples, 0.4, seed)
        assert (len(training), len(judged)) == (32, 21)
        assert {label for one in judged for label in one.label} <= {label for one in training for label in one.label}
        assert "only" in task.fitted(training).labels
        assert {one.text for one in training}.isdisjoint(one.text for one in judged)


def test_cells_and_lists_are_read_alike(tmp_path):
    kind = tasks.ClassifySeveral(several="|")
    write_csv(tmp_path / "a.csv", [("x", "a | b|a"), ("y", ""), ("z", "7")])
    lines = [{"text": "x", "label": ["a", "b"]}, {"text": "y", "label": []}, {"text": "z", "label": 7}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name in ("a.csv", "a.jsonl"):
        assert [example.label for example in kind.read(tmp_path / name)] == [("a", "b"), (), ("7",)]


def test_bad_input_is_one_line(tmp_path, kind):
    task, _ = kind()
    (tmp_path / "a.jsonl").write_text('{"text": "x", "label": ["a"]}\n{"text": "y", "label": ["a", 1.5]}\n')
    cases = [
        (task, tmp_path / "a.jsonl", r"a.jsonl: line 2: expected a label, a word or an integer, got 1.5$"),
        (
            task,
            write_csv(tmp_path / "b.csv", [("x", "a;d")]),
            "line 2: the label 'd' is not in the training data, which",
        ),
        (task, tmp_path, "is a folder; expected a table, where a text may have several labels"),
        (tasks.Classify(), tmp_path / "a.jsonl", r"line 1: expected .*, got \['a'\]; give several for more than one"),
    ]
    for one, path, message in cases:
        with pytest.raises(ValueError, match=message) as raised:
            one.read(path)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=r"label: expected two labels or more, the texts have 1$"):
        tasks.ClassifySeveral(several=";").fitted([TextExample("x", ("a",), "")])
    message = "several: expected the separator of labels, such as ';', for ClassifySeveral, and None for Classify, got "
    for kind_of, several in ((tasks.Classify, ";"), (tasks.ClassifySeveral, None), (tasks.ClassifySeveral, "")):
        with pytest.raises(ValueError, match=message):
            kind_of(several=several)
    assert type(split_options(tasks.Classify, {"several": ";"})[0]) is tasks.ClassifySeveral


@pytest.mark.slow
def test_the_baseline_is_a_regression_of_each_label(learned, data):
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    report = tasks.test(learned, data.parent / "unseen.csv")
    ((name, metrics),) = report.baselines.items()
    strength = float(name.rpartition("C = ")[2].rstrip(")"))
    training, _ = learned.task.split(learned.task.read(data), 0.1, 0)
    vectors = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    known = vectors.fit_transform([example.text for example in training])
    asked = vectors.transform([example.text for example in report.tested.data])
    columns = [
        LogisticRegression(C=strength, max_iter=1000).fit(known, column).predict_proba(asked)[:, 1]
        for column in learned.task.truth(training).T
    ]
    assert metrics == pytest.approx(several_scores(np.stack(columns, 1), learned.task.truth(report.tested.data)))


def test_a_picture_shows_precision_and_recall_where_they_are_equal():
    from matplotlib.figure import Figure

    figure = Figure()
    draw_labels(figure, {"sad": {"precision": 0.7, "recall": 0.7, "count": 3}})
    (axes,) = figure.axes
    precision, recall = axes.collections[1:]
    assert len(precision.get_facecolors()) and not len(recall.get_facecolors())  # hollow, around the other
    assert recall.get_sizes() > precision.get_sizes() and axes.get_xlabel() == "precision, recall"


@pytest.mark.slow
def test_the_commands(learned, data, tmp_path, capsys):
    picture = tmp_path / "labels.png"
    assert cli.main(["test", str(learned.folder), str(data.parent / "unseen.csv"), "--picture", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[6].split() == ["label", "precision", "recall", "F1", "count"]
    assert {line.split()[0] for line in lines[7:10]} == set(WORDS)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["predict", str(learned.folder), "witty tears"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"] == ["funny", "sad"]
    (shown,) = tasks.predict(learned, "witty tears")
    assert learned.task.line(shown).startswith(("funny 0.", "funny 1.", "sad 0.", "sad 1."))
    assert learned.task.line({**shown, "labels": []}).startswith("none (most probable: ")
