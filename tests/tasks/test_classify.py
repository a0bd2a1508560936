"""Texts of classes: what is learned, by which loss, from which batches, and how good it is."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from saccade import tasks
from saccade.models import load
from saccade.models.tokenizers.word_pieces import SPECIAL, train_word_pieces
from saccade.tasks._classes._results import expected_calibration_error
from saccade.tasks._example_task import ExampleObjective
from saccade.tasks._examples import TextExample
from saccade.training import Reporter, Settings
from tasks.conftest import SMALL, reviews, write_csv


def test_learns_what_can_be_learned(learned, files):
    report = tasks.test(learned, files / "unseen.csv")
    assert report.metrics["accuracy"] == report.metrics["macro F1"] == 1.0
    assert [one["label"] for one in tasks.predict(learned, ["a film so lovely", "dull actor"])] == [
        "positive",
        "negative",
    ]


@pytest.mark.slow
def test_does_not_learn_what_cannot_be_learned(files, tmp_path):
    """That truth reaches the model only through the training labels: nothing leaks from texts to be judged."""
    rows = reviews(211, 3)
    labels = np.random.default_rng(7).permutation([label for _, label in rows])
    rows = [(text, label) for (text, _), label in zip(rows, labels, strict=True)]
    shuffled = write_csv(tmp_path / "shuffled.csv", rows)
    run = tasks.train("classify", shuffled, tmp_path / "run", **SMALL)
    accuracy = tasks.test(run, files / "unseen.csv", baseline=False).metrics["accuracy"]
    assert abs(accuracy - 0.5) < 4 * 0.5 / 101**0.5


def test_transformers_opens_the_run_and_says_the_same(learned):
    """Catches a folder that only we can read: names, configuration, tokenizer."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(learned.folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(learned.folder)
    texts = ["the plot was a lovely story", "poor scene", "quux film!"]
    with torch.no_grad():
        logits = theirs(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    ours = [list(one["probabilities"].values()) for one in tasks.predict(learned, texts)]
    np.testing.assert_allclose(ours, logits.softmax(-1), atol=1e-6)
    assert [theirs.config.id2label[n] for n in range(2)] == list(learned.task.labels)


def test_of_equally_good_looks_the_lowest_loss_is_kept(learned):
    curve = [json.loads(line) for line in (learned.folder / "curve.jsonl").read_text().splitlines()]
    best = max(entry["accuracy"] for entry in curve)
    losses = [entry["validation_loss"] for entry in curve if entry["accuracy"] == best]
    assert len(losses) > 1 and losses[0] > min(losses)  # or this would show nothing
    source = learned.folder.parent / "reviews.csv"
    _, judged = learned.task.split(learned.task.read(source), 0.1, 0)
    items = learned.task.encode(learned.model, judged)
    with torch.no_grad():
        batch = learned.task.collate(learned.model, items)
        loss = learned.task.loss(learned.task.forward(learned.model, batch), batch, learning=False)
    assert loss.item() == pytest.approx(min(losses), abs=1e-4)


@pytest.fixture
def objective(learned):
    def make(batch=7, count=53, **options):
        words = [" ".join(("good", "bad")[n >> bit & 1] for bit in range(6)) for n in range(count)]  # each another one
        texts = [TextExample("film " * (n % 11) + words[n], "ab"[n % 5 == 0], f"text {n}") for n in range(count)]
        task = tasks.Classify(vocabulary=300, **options).fitted(texts)
        settings = Settings(steps=20, batch=batch, seed=3)
        return ExampleObjective(task, learned.model, texts, texts[:9], settings)

    return make


def test_an_epoch_has_each_example_once(objective):
    """Catches batches that repeat or that depend on what was asked before."""
    made = objective()
    seen = Counter()
    for step in range(7):
        rows = made.batch(step)
        pairs = zip(rows["input_ids"], rows["attention_mask"], strict=True)
        seen.update(tuple(row[mask.bool()].tolist()) for row, mask in pairs)
    assert max(seen.values()) == 1
    assert sum(seen.values()) == 49  # seven full batches of 53
    later, again = made.batch(12), objective().batch(12)
    assert all(torch.equal(later[name], again[name]) for name in later)
    assert not torch.equal(made.batch(5)["input_ids"], made.batch(12)["input_ids"])


@pytest.mark.parametrize("options", [{}, {"class_weights": True, "label_smoothing": 0.3}])
def test_parts_of_a_batch_weigh_what_they_are_a_mean_over(objective, options):
    """With weights of classes a mean over rows would give rare classes too much or too little."""
    made = objective(batch=13, **options)
    batch = made.batch(1)
    whole = made.loss(made.model, batch)
    parts = made.split(batch, 3)
    assert [len(part["labels"]) for part in parts] == [5, 4, 4]
    shares = [made.weight(part) / made.weight(batch) for part in parts]
    joined = sum(share * made.loss(made.model, part) for share, part in zip(shares, parts, strict=True))
    torch.testing.assert_close(joined, whole)


def test_the_loss_is_smoothed_and_weighed_only_while_learning(objective):
    made = objective(batch=13, class_weights=True, label_smoothing=0.3)
    batch = made.batch(0)
    logits = made._task.forward(made.model, batch)
    logs, truth = F.log_softmax(logits, -1), F.one_hot(batch["labels"], 2).float()
    counts = Counter("ab"[n % 5 == 0] for n in range(53))
    weights = torch.tensor([53 / (2 * counts[label]) for label in "ab"])
    expected = -((0.7 * truth + 0.15) * weights * logs).sum() / (truth * weights).sum()
    torch.testing.assert_close(made._task.loss(logits, batch, learning=True), expected)
    torch.testing.assert_close(made._task.loss(logits, batch, learning=False), -(truth * logs).sum() / 13)


def test_the_split_keeps_the_share_of_each_class(learned):
    examples = [TextExample(f"t{n}", "rare" if n % 10 == 0 else "usual", "") for n in range(230)]
    training, judged = learned.task.split(examples, 0.2, 11)
    assert Counter(example.label for example in judged) == {"usual": 41, "rare": 5}
    assert {example.text for example in training}.isdisjoint(example.text for example in judged)
    assert len(training) + len(judged) == 230
    assert judged == learned.task.split(examples, 0.2, 11)[1] != learned.task.split(examples, 0.2, 12)[1]


def test_calibration_error_is_the_mean_gap_over_bins():
    random = np.random.default_rng(2)
    probabilities = random.dirichlet(np.ones(3) * 0.4, size=997)
    probabilities[:3] = np.eye(3)  # confidence 1, at the very end of the last bin
    truth = random.integers(0, 3, size=997)
    # Neighbouring bins with gaps of opposite signs: together they would cancel.
    modest = (probabilities.max(1) > 13 / 15) & (probabilities.max(1) <= 14 / 15)
    truth[modest] = probabilities.argmax(1)[modest]
    expected = 0.0
    for n in range(15):
        inside = [row for row in range(997) if n / 15 < probabilities[row].max() <= (n + 1) / 15]
        if inside:
            right = np.mean([probabilities[row].argmax() == truth[row] for row in inside])
            expected += len(inside) / 997 * abs(right - np.mean([probabilities[row].max() for row in inside]))
    assert expected_calibration_error(probabilities, truth) == pytest.approx(expected, rel=1e-12)
    assert expected_calibration_error(np.eye(3), np.arange(3)) == 0.0


def test_metrics_of_a_case_by_hand(learned):
    """Catches truth and prediction swapped: precision and recall differ here."""
    outputs = [np.array([0.9, 0.1]), np.array([0.8, 0.2]), np.array([0.3, 0.7]), np.array([0.6, 0.4])]
    data = [TextExample("", label, "") for label in ("negative", "positive", "positive", "positive")]
    scores = learned.task.scores(outputs, data)
    assert scores["accuracy"] == 0.5
    assert scores["macro F1"] == pytest.approx((2 * 1 / (2 + 2) + 2 * 1 / (2 + 2)) / 2)
    details = learned.task.details(outputs, data).values
    assert details["confusion"] == [[1, 0], [2, 1]]
    assert details["classes"]["negative"] == pytest.approx({"precision": 1 / 3, "recall": 1.0, "F1": 0.5, "count": 1})


@pytest.mark.parametrize(("repeats", "learned"), [(50, True), (51, False)])
def test_words_that_are_unknown_anyway_are_not_learned_from(repeats, learned):
    """The trainer takes time by the square of a word's length; a word of over 100 characters has no pieces."""
    inner = train_word_pieces(["xy" * repeats, "a good film, a good plot"], 150)
    assert ("##xyxy" in inner.get_vocab()) == learned
    assert "good" in inner.get_vocab() and "##y" in inner.get_vocab()
    assert (inner.encode("xy" * repeats, add_special_tokens=False).tokens == ["[UNK]"]) != learned
    chinese, split = (train_word_pieces([text], 150).get_vocab() for text in ("电影" * 61, "电影 " * 61))
    assert chinese == split


def test_word_pieces_are_the_same_each_time():
    """The library's own trainer gives other ones each time, since it iterates over hash maps."""
    texts = [text for text, _ in reviews(97, 1)] + ["Ünïcode wörds ##a", "x" * 30]
    first, second = (train_word_pieces(texts, 150) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() <= 150
    assert first.encode("film [MASK] ##a").tokens[:3] == ["[CLS]", "film", "[MASK]"]
    assert "##a" not in first.encode("##a").tokens  # two signs and a letter, not a piece that a text can spell
    with pytest.raises(ValueError, match=r"vocabulary: the characters of the texts need at least \d+ pieces, got 9"):
        train_word_pieces(texts, 9)
    assert set(SPECIAL) <= set(first.get_vocab())


@pytest.mark.parametrize(("task", "cased"), [("classify", False), ("classify", True), ("tag", True)])
def test_a_cased_encoder_reads_capitals_and_accents(tmp_path, task, cased):
    """And transformers the same; of tags it is usual."""
    transformers = pytest.importorskip("transformers")
    texts = ["Die Grünen sind grün.", "Der Weg ist schon schön, PARIS."] * 3
    sizes = {"width": 6, "heads": 2, "layers": 1}
    kind = (
        tasks.Tag(**sizes, tags=("O", "B-x"))
        if task == "tag"
        else tasks.Classify(**sizes, labels=("a", "b"), cased=cased)
    )
    model = kind.new_model(kind.inputs(texts))
    model.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*texts, "grun SCHÖN Zürich [MASK] 漢字"]:
        assert model.tokenizer.encode(text).ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert load(tmp_path).tokenizer.encode(text).ids == model.tokenizer.encode(text).ids
    for one, other in (("schon", "schön"), ("Grünen", "grünen"), ("PARIS", "paris")):
        assert (model.tokenizer.encode(one).ids != model.tokenizer.encode(other).ids) == cased


def test_long_texts_are_cut_or_refused(learned):
    task, text = learned.task, "film " * 300
    cut = task.inputs([text])
    longer = task.changed({"longest": 1000})  # than the model reads
    assert [len(ids) for (ids,), _ in longer.encode(learned.model, cut)] == [256]
    assert [len(ids) for (ids,), _ in task.encode(learned.model, cut)] == [256]
    with pytest.raises(ValueError, match="text 1: 302 tokens are more than the 256 that are read; cut the text, or"):
        task.changed({"long": "refuse"}).encode(learned.model, cut)


@pytest.mark.slow
def test_windows_of_a_long_text(files, tmp_path):
    """What tells the class stands behind what a model reads at once; a text's logits are the mean over its windows."""
    padding = "film " * 17
    rows = [(padding + text, label) for text, label in reviews(120, 21)]
    data = write_csv(tmp_path / "long.csv", rows)
    options = {**SMALL, "longest": 19, "long": "slide", "patience": 99, "steps": 200}
    run = tasks.train("classify", data, tmp_path / "run", **options)
    assert tasks.test(run, data, baseline=False).metrics["accuracy"] > 0.9  # cut, the texts are all the same

    ids = run.model.tokenizer.encode(rows[0][0]).ids
    around = [run.model.tokenizer.before[0]], [run.model.tokenizer.after[0]]
    starts = [*range(0, len(ids) - 17, 8), len(ids) - 17]
    parts = torch.tensor([[*around[0], *ids[start : start + 17], *around[1]] for start in starts])
    expected = run.model.eval()(input_ids=parts).logits.double().mean(0).softmax(-1)
    (found,) = tasks.predict(run, [rows[0][0]], picture=tmp_path / "words.svg")
    assert "which says most for it" in (tmp_path / "words.svg").read_text()
    task = run.task
    (item,) = task.encode(run.model, task.read(data)[:1])
    batch = task.collate(run.model, [item])
    judged = task.loss(task.forward(run.model, batch), batch, learning=False).item()
    assert judged == pytest.approx(-expected.log()[task.labels.index(rows[0][1])].item(), abs=1e-5)

    seven = task.read(data)[:7]
    objective = task.objective(run.model, seven, seven, Settings(steps=1, batch=7, rate=1e-3))
    whole, parts = objective.batch(0), objective.split(objective.batch(0), 3)  # of whole texts, which have four windows
    assert [int(part["texts"][-1]) + 1 for part in parts] == [3, 2, 2] and len(whole["texts"]) > 7
    losses = [objective.loss(run.model, part).item() * objective.weight(part) for part in parts]
    assert sum(losses) / 7 == pytest.approx(objective.loss(run.model, whole).item(), rel=1e-4)
    assert list(found["probabilities"].values()) == pytest.approx(expected.tolist(), abs=1e-5)
    both = tasks.predict(run, [rows[0][0], "film"])  # windows of two texts in a batch
    assert both[0]["probabilities"] == pytest.approx(found["probabilities"], abs=1e-5)


def test_from_another_run(learned, files, tmp_path):
    """The body is the other run's, the head anew where the classes are others."""
    started = []

    class Look(Reporter):
        def started(self, prepared):
            started.append({name: value.clone() for name, value in prepared.trained.state_dict().items()})

    rows = [(text, f"{label[0]}{n % 2}") for n, (text, label) in enumerate(reviews(60, 9))]
    data = write_csv(tmp_path / "four.csv", rows)
    run = tasks.train(
        "classify", data, tmp_path / "run", initial=learned.folder, steps=3, precision="no", reporter=Look()
    )
    before = learned.model.state_dict()
    kept = [name for name in before if torch.equal(before[name], started[0][name]) and before[name].numel() > 1]
    assert set(before) - set(kept) == {"head.inner.out.weight", "head.inner.out.bias"}
    assert run.task.labels == ("n0", "n1", "p0", "p1")
    assert load(run.folder).label_names == ["n0", "n1", "p0", "p1"]
