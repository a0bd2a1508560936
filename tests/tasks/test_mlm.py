"""Masked pieces: which are hidden, what of them is learned, and how good that is."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from saccade import tasks
from saccade.models.output_heads import IGNORED
from saccade.tasks._example_task import ExampleObjective
from saccade.tasks._runs._prepared import PreparedTaskRun
from saccade.tasks._runs._training import request
from saccade.training import Settings
from tasks.conftest import SMALL, reviews, write_csv

DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
OPTIONS = {**SMALL, "steps": 150, "dropout": 0.0, "every": 50}


def weeks(count: int, seed: int, shuffled: bool = False) -> list[str]:
    """A day, said several times: of a hidden one the others tell which it is. Shuffled, any days."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        days = draw.randrange(4, 20)
        found.append(" ".join(draw.choices(DAYS, k=days) if shuffled else [draw.choice(DAYS)] * days))
    return found


def written(path, lines):
    path.write_text("\n\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weeks")
    written(folder / "unseen.txt", weeks(53, 5))
    return tasks.train("mlm", written(folder / "weeks.txt", weeks(307, 3)), folder / "run", **OPTIONS)


@pytest.mark.slow
def test_learns_what_can_be_learned(learned):
    report = tasks.test(learned, learned.folder.parent / "unseen.txt")
    assert report.metrics["accuracy"] == 1.0 and 1.0 <= report.metrics["perplexity"] < 1.1
    simple = report.baselines["frequency of each piece"]
    assert simple["perplexity"] == pytest.approx(7, abs=0.7)
    assert report.baselines["a Markov chain between both neighbours"]["accuracy"] > 0.95  # all days are the same
    (found,) = tasks.predict(learned, ["friday [MASK] friday [MASK] friday"])
    assert [guesses[0]["piece"] for guesses in found["masks"]] == ["friday", "friday"]


@pytest.mark.slow
def test_does_not_learn_what_cannot_be_learned(tmp_path):
    """Would catch a hidden piece that reaches the model."""
    data = written(tmp_path / "weeks.txt", weeks(307, 3, shuffled=True))
    run = tasks.train("mlm", data, tmp_path / "run", **OPTIONS)
    report = tasks.test(run, written(tmp_path / "unseen.txt", weeks(211, 5, shuffled=True)))
    assert abs(report.metrics["accuracy"] - 1 / 7) < 4 * (6 / 7 / 7 / 211) ** 0.5
    assert report.metrics["perplexity"] > 6.5


def test_metrics_are_those_of_transformers_logits(learned, tmp_path):
    """Perplexity over all hidden pieces alike, not a mean of means; guesses of a mask of one's own."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(learned.folder).eval()
    task, model = learned.task, learned.model
    texts = task.read(learned.folder.parent / "unseen.txt")
    nats, right = [], []
    for item in task.encode(model, texts):
        batch = task.collate(model, [item])
        with torch.no_grad():
            scores = theirs(batch["input_ids"]).logits.double().log_softmax(-1)
        hidden = batch["labels"] != IGNORED
        nats += (-scores[hidden].gather(1, batch["labels"][hidden][:, None])).flatten().tolist()
        right += (scores[hidden].argmax(-1) == batch["labels"][hidden]).tolist()
    found = task.scores(task.predict(model, texts), texts)
    assert found["perplexity"] == pytest.approx(np.exp(np.mean(nats)), rel=1e-5)
    assert found["accuracy"] == np.mean(right)
    tokenizer = transformers.AutoTokenizer.from_pretrained(learned.folder)
    text = "monday [MASK] friday"
    with torch.no_grad():
        row = theirs(**tokenizer(text, return_tensors="pt")).logits[0, 2].softmax(-1)
    (tmp_path / "texts.txt").write_text(f"\n{text}\n")
    with pytest.warns(UserWarning, match="1 of 2 inputs are empty and get no prediction"):
        empty, found = tasks.predict(learned, tmp_path / "texts.txt")
    assert empty == {"text": "", "masks": None}
    (guesses,) = found["masks"]
    expected = row.topk(5)
    assert [one["piece"] for one in guesses] == tokenizer.convert_ids_to_tokens(expected.indices.tolist())
    np.testing.assert_allclose([one["probability"] for one in guesses], expected.values, atol=1e-6)


@pytest.fixture
def objective(learned):
    texts = learned.task.read(learned.folder.parent / "weeks.txt")
    return ExampleObjective(learned.task, learned.model, texts, texts[:9], Settings(steps=20, batch=23, seed=3))


def test_parts_of_a_batch_add_up(objective):
    """Each counts by its hidden pieces, of which long texts have more."""
    batch, model = objective.batch(4), objective.model
    parts = objective.split(batch, 5)
    assert len({objective.weight(part) / len(part["labels"]) for part in parts}) > 1  # or this would show nothing
    with torch.no_grad():
        whole, *split = (float(objective.loss(model, part)) * objective.weight(part) for part in (batch, *parts))
    assert sum(split) == pytest.approx(whole)


def test_what_is_hidden_and_by_what(learned):
    task, model = learned.task, learned.model
    mask, special = model.tokenizer.named["mask"], model.tokenizer.special
    items = task.encode(model, task.read(learned.folder.parent / "weeks.txt"))
    counts = {"mask": 0, "same": 0, "other": 0}
    for n, item in enumerate(items):
        batch = task.collate(model, [item], np.random.default_rng((3, n)))
        ids, hidden = torch.tensor([item[0]]), batch["labels"] != IGNORED
        assert torch.equal(batch["labels"][hidden], ids[hidden])
        assert torch.equal(batch["input_ids"][~hidden], ids[~hidden])
        assert int(hidden.sum()) == max(1, round(0.15 * (len(item[0]) - 2)))
        assert not {int(token) for token in ids[hidden]} & set(special)
        for now, was in zip(batch["input_ids"][hidden].tolist(), ids[hidden].tolist(), strict=True):
            counts["mask" if now == mask else "same" if now == was else "other"] += 1
    count = sum(counts.values())
    for name, share in (("mask", 0.8), ("same", 0.1), ("other", 0.1)):
        # Any token may be drawn in the place of the last: also the mask and the true one.
        slack = 4 * (share * (1 - share) / count) ** 0.5 + 0.1 * 2 / model.tokenizer.vocabulary
        assert abs(counts[name] / count - share) < slack, name


def test_judged_texts_have_masks_of_their_own(learned):
    """Whatever shares their batch: or two runs would be judged by other pieces."""
    task, model = learned.task, learned.model
    items = task.encode(model, task.read(learned.folder.parent / "unseen.txt"))[:7]
    together = task.collate(model, items)
    for row, item in enumerate(items):
        alone, length = task.collate(model, [item]), len(item[0])
        assert all(torch.equal(together[name][row, :length], alone[name][0]) for name in ("input_ids", "labels"))


def test_long_texts_are_slid_over(learned, tmp_path):
    """Every piece stands in a window, in its order; or all but the first window would go unseen."""
    text = " ".join(DAYS * 5)
    path = written(tmp_path / "long.txt", [text, "monday"])
    task, model = learned.task.changed({"longest": 11}), learned.model
    examples = task.read(path)
    windows = task.windows(model, examples)
    assert [len(found) for found in windows] == [4, 1]
    inner = [token for ids, _ in windows[0] for token in ids[1:-1]]
    assert inner == model.tokenizer.encode(text).ids and max(len(ids) for ids, _ in windows[0]) == 11
    guesses = task.predict(model, examples)
    assert [len(one.truth) for one in guesses] == [4, 1]  # one in each window
    cut = task.changed({"long": "cut"})
    assert [len(found) for found in cut.windows(model, examples)] == [1, 1]
    with pytest.raises(ValueError, match=r"long.txt: line 1: 37 tokens are more than the 11 that are read"):
        task.changed({"long": "refuse"}).windows(model, examples)


def numbers(*between):
    return " ".join(f"w{n}" for n in range(*between))


def test_an_epoch_is_all_windows(tmp_path):
    """Not all texts, of which a long one has many windows."""
    data = written(tmp_path / "long.txt", [numbers(n, n + 200) for n in range(5)])
    sizes = {"width": 8, "layers": 1, "heads": 1, "vocabulary": 300, "longest": 12, "precision": "no"}
    run = request("mlm", data, tmp_path / "run", {**sizes, "epochs": 4, "accumulate": 30})
    assert run.settings.batch < 30  # fewer texts than parts, but more windows
    prepared = PreparedTaskRun.of(run, None)
    windows = sum(map(len, run.task.windows(prepared.trained, run.training)))
    assert windows > 64 and prepared.settings.batch == 32
    assert prepared.settings.steps == 4 * (windows // 32) and prepared.settings.looks.every == windows // 32
    seen = [prepared.objective.batch(step)["input_ids"] for step in range(windows // 32)]
    assert sum(map(len, seen)) == windows // 32 * 32
    assert prepared.introduction[-1].startswith(f"{windows} examples to train on")
    out = tasks.train("mlm", data, tmp_path / "run", **sizes, steps=2, accumulate=30).folder
    assert f"2, 32 examples each, {64 / windows:.1f} times the data" in (out / "README.md").read_text()


@pytest.mark.parametrize("lines", [[numbers(2000)], [numbers(40), numbers(100, 150), numbers(200, 205)]])
def test_a_long_text_is_split_inside(tmp_path, lines):
    """Each word is in one part, in its order, and neighbouring stretches are one text."""
    texts = tasks.Mlm(longest=20).read(written(tmp_path / "long.txt", lines))
    training, judged = tasks.Mlm(longest=20).split(texts, 0.2, 3)
    found = [word for part in (training, judged) for text in part for word in text.text.split()]
    assert sorted(found) == sorted(" ".join(lines).split())
    assert 0 < sum(len(text.text.split()) for text in judged) <= 0.4 * len(found)
    for text in [*training, *judged]:
        assert any(text.text.strip() in line for line in lines)
    assert any(len(text.text.split()) > 20 for text in training)
    whole, _ = tasks.Mlm(longest=20, long="cut").split([*texts, *texts], 0.2, 3)
    assert {text.text for text in whole} <= set(lines)


def test_other_tasks_begin_from_it(learned, tmp_path):
    table = write_csv(tmp_path / "reviews.csv", reviews(61, 3))
    run = tasks.train("classify", table, tmp_path / "run", initial=learned.folder, steps=1, rate=1e-9, precision="no")
    before, after = learned.model.state_dict(), run.model.state_dict()
    torch.testing.assert_close(after["tokens.weight"], before["tokens.weight"])
    assert run.model.tokenizer.encode("friday").ids == learned.model.tokenizer.encode("friday").ids


def test_bad_input(learned, tmp_path):
    with pytest.raises(ValueError, match="masked: must be above 0 and below 1, got 1.0"):
        tasks.Mlm(masked=1.0)
    with pytest.raises(ValueError, match=r"text 1: has no \[MASK\], so there is nothing to guess"):
        tasks.predict(learned, "monday")
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="empty.txt: holds no text"):
        learned.task.read(tmp_path / "empty.txt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="folder: holds no .txt files"):
        learned.task.read(tmp_path / "folder")
    table = write_csv(tmp_path / "table.csv", [("a", "b")])
    with pytest.raises(
        ValueError, match="no column 'review' in the first line, which must name them; it has 'text', 'label'"
    ):
        learned.task.changed({"text": "review"}).read(table)
