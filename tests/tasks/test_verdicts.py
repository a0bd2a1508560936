"""What each task's run ends with: the same answer to every input, and a simple model, on the same validation data."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from saccade import cli, tasks
from saccade.tasks._baselines import strongest_regression
from saccade.tasks._graphs._baselines import two_hops
from saccade.tasks._runs._prepared import beside_simple
from saccade.tasks._task import sampled
from saccade.tasks._texts._markov_chain import DISCOUNT, MarkovChain
from saccade.tasks._texts._pairs import Pair
from saccade.tasks._texts._questions import Question
from saccade.training import Evaluation
from saccade.training.verdict import untrained
from tasks import pictures, sounds, test_answer, test_graph, test_mlm, test_translate

TINY = {"width": 8, "layers": 1, "heads": 2, "steps": 2, "batch": 7, "rate": 1e-9, "warmup": 1, "precision": "no"}
TEXTS = {**TINY, "vocabulary": 300}


def written(task, folder):
    """The data of a task and the options of its run."""
    if task == "answer":
        return test_answer.write_lines(folder / "questions.jsonl", test_answer.questions(61, 3)), TEXTS
    if task == "translate":
        pairs = test_translate.write_pair(folder / "train", test_translate.phrases(61, 3))
        return pairs, {**TEXTS, **test_translate.LANGUAGES}
    if task == "mlm":
        return test_mlm.written(folder / "weeks.txt", test_mlm.weeks(61, 3)), TEXTS
    if task == "image":
        return pictures.write_classes(folder / "shapes", 61, 3), {**TINY, "patch": 3}
    if task == "speech":
        return sounds.write_classes(folder / "tones", 61, 3), TINY
    if task == "words":
        sounds.write_words(folder / "words", 61, 7)
        return folder / "words" / "words.csv", {**TINY, "text": "text"}
    options = {**TINY, "layers": 2, "batch": None}
    return test_graph.write_npz(folder / "graph.npz", test_graph.communities()), options


METRICS = {"answer": "exact match", "translate": "BLEU", "mlm": "perplexity", "words": "character error"}


SLOW = [pytest.param(task, marks=pytest.mark.slow) for task in ("answer", "translate", "speech")]


@pytest.mark.parametrize("task", ["mlm", "image", "words", "graph", *SLOW])
def test_every_run_ends_beside_figures_of_the_same_metric(task, tmp_path):
    """Two steps learn nothing: the run is told from a result, by its own metric and a simple model's."""
    data, options = written(task, tmp_path)
    run = tasks.train("speech" if task == "words" else task, data, tmp_path / "run", **options, tensorboard=False)
    *_, same, simple = (run.folder / "verdict.txt").read_text().splitlines()
    metric = METRICS.get(task, "accuracy")
    mine, constant = re.fullmatch(rf"(?:not a result: )?{metric} ([\d.]+); .+ has ([\d.]+)", same).groups()
    low = metric in ("perplexity", "character error")
    worse = float(mine) >= float(constant) if low else float(mine) <= float(constant)
    assert same.startswith("not a result") == worse
    assert re.fullmatch(rf".+, a simple model, has {metric} [\d.]+: (less good than this model|as good as .+)", simple)


def test_predict_warns_of_masked_pieces_that_were_never_learned(tmp_path, capsys):
    data, options = written("mlm", tmp_path)
    run = tasks.train("mlm", data, tmp_path / "run", **options, tensorboard=False)
    (reason,) = untrained(run.folder)
    capsys.readouterr()
    assert cli.main(["predict", str(run.folder), "monday [MASK] monday"]) == 0
    assert f"saccade: warning: {reason}" in capsys.readouterr().err


def test_a_large_file_is_compared_with_a_sample_and_says_so(monkeypatch):
    """Above the limit a run ended without a simple model. Rows alternate by class, so every second would be one."""
    monkeypatch.setattr(tasks.Classify, "compared", 23)
    task = tasks.Classify()
    examples = [
        SimpleNamespace(text=f"a {word} film", label=word, place="here") for _ in range(47) for word in ("bad", "good")
    ]
    task = task.fitted(examples)
    run = SimpleNamespace(task=task, training=examples, validation=examples[:31])
    _, line = beside_simple(run, None, Evaluation(0.0, {"accuracy": 0.5}), finished=True)
    assert "a simple model of 23 of 94 examples, has accuracy 1.0000: as good as this model or better" in line


def test_a_sample_is_of_all_kinds_and_always_the_same():
    data = list(range(97))
    assert sampled(data, 97) == data and sampled(data, 13) == sampled(data, 13)
    assert len(set(sampled(data, 13))) == 13 and {n % 2 for n in sampled(data, 13)} == {0, 1}
    assert list(sampled(range(97), 40)) == list(range(0, 97, 3))


def test_a_class_that_no_sampled_example_has_keeps_its_column():
    """Else every class behind it would be taken for another."""
    features = np.array([[1.0, 0.0], [0.0, 1.0]] * 5)
    classes = np.array([0, 2] * 5)
    found, _ = strongest_regression((features, classes), (features, classes), features)
    assert found.shape == (10, 3) and (found.argmax(1) == classes).all() and (found[:, 1] == 0).all()


def test_a_token_between_two_others_is_the_formula():
    """p(t | l, r) = p(t | l) p(r | t) / sum, by plain loops over counted pairs; token 6 is never seen."""
    draw, size = np.random.default_rng(3), 7
    rows = [draw.integers(0, 6, count).tolist() for count in (11, 13, 17)]
    tokens, pairs = [t for row in rows for t in row], [p for row in rows for p in itertools.pairwise(row)]
    single = [(tokens.count(t) + 1) / (len(tokens) + size) for t in range(size)]

    def after(a, b):
        followers = [second for first, second in pairs if first == a]
        if not followers:
            return single[b]
        kept = max(followers.count(b) - DISCOUNT, 0)
        return (kept + DISCOUNT * len(set(followers)) * single[b]) / len(followers)

    chain = MarkovChain(rows, size)
    for left, right in ((0, 1), (5, 5), (6, 2), (3, 6), (None, 4), (2, None), (None, None)):
        by_loops = [
            (single[t] if left is None else after(left, t)) * (1 if right is None else after(t, right))
            for t in range(size)
        ]
        np.testing.assert_allclose(chain.between(left, right), np.array(by_loops) / sum(by_loops), rtol=1e-12)


def test_two_hops_are_the_normalised_adjacency_squared():
    draw, nodes = np.random.default_rng(5), 11
    edges, x = draw.integers(0, nodes, (2, 23)), draw.normal(size=(nodes, 3))
    joined = np.eye(nodes)
    joined[edges[0], edges[1]] = joined[edges[1], edges[0]] = 1
    scale = 1 / np.sqrt(joined.sum(1))
    spread = scale[:, None] * joined * scale
    found = two_hops(torch.tensor(x, dtype=torch.float32), torch.tensor(edges))
    np.testing.assert_allclose(found.numpy(), spread @ spread @ x, rtol=1e-5, atol=1e-6)


def test_the_same_answer_to_every_input_is_the_most_frequent_one():
    pairs = [Pair("eins", "one", "here"), Pair("zwei", "two", "here"), Pair("2", "two", "here")]
    assert tasks.Translate(source="a", target="b").constant(None, pairs, pairs[:2]).outputs == ["two", "two"]
    asked = [Question("who ?", "Bob and Ann", answers, "here") for answers in ([("Ann", 8)], [("Ann", 8)], [])]
    other = Question("who ?", "nobody", (), "there")
    found = tasks.Answer().constant(None, asked, [asked[0], other]).outputs
    assert [(one.start, one.stop) for one in found] == [(8, 11), (0, 0)]


def test_texts_of_sounds_are_compared_with_none_where_that_is_nearer():
    """No text at all has a character error of 1; a frequent long one is worse."""
    task = tasks.Speech(text="text")
    texts = [[SimpleNamespace(text=text) for text in some] for some in (["yes", "no", "yes"], ["longest", "a", "b"])]
    found = [task.constant(None, some, some[:2]).outputs for some in texts]
    assert found == [["yes", "yes"], ["", ""]]
