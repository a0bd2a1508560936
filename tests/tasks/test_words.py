"""What words add to what a classifier says: shares that add up, and the picture of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from saccade import cli, tasks
from saccade.tasks._texts._word_picture import RIGHT, WRONG, most_sure
from saccade.tasks._texts._word_shares import token_shares, word_shares
from tasks.conftest import BAD, GOOD


class Linear(nn.Module):
    """A model that adds up its embeddings, each place with a weight of its own."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 5)
        self.places = nn.Parameter(torch.randn(7, 5))

    def forward(self, ids):
        return (self.tokens(ids) * self.places).sum((1, 2))


def test_shares_of_a_sum_are_its_parts():
    torch.manual_seed(3)
    model, ids = Linear(), [4, 4, 0, 9, 2, 7, 1]
    ordinary = torch.tensor([False, True, True, True, True, True, False])
    shares, total = token_shares(model, ids, ordinary, model)
    table = model.tokens.weight
    expected = ((table[ids] - table.mean(0)) * model.places).sum(1).detach().numpy() * ordinary.numpy()
    np.testing.assert_allclose(shares, expected, atol=1e-5)
    assert total == pytest.approx(expected.sum(), abs=1e-5)


def test_a_text_that_is_read_twice_has_none():
    """As an encoder-decoder does: half of what a word adds would be missing."""
    model = Linear()
    assert token_shares(model, [1] * 7, torch.ones(7).bool(), lambda ids: model(ids) + model(ids)) is None


def lead(run, text):
    """What is named, and its logit less that of the other class, for ids (P, L)."""
    named = [one["label"] for one in tasks.predict(run, [text])].pop()
    sign = 1 if named == run.task.labels[0] else -1
    return lambda rows: sign * (run.task.forward(run.model, {"input_ids": rows}) * torch.tensor([1, -1])).sum(1)


@pytest.mark.slow
def test_shares_are_the_gradient_along_the_way(learned):
    """The definition once more, with very many points and no hook. Catches a wrong way, and steps of special tokens."""
    model, text = learned.model, "the plot was a dull story"
    ids, value = model.tokenizer.whole(text), lead(learned, text)
    ordinary = torch.tensor([False, *[True] * (len(ids) - 2), False])
    own = model.tokens.weight[ids].detach()
    step = torch.where(ordinary[:, None], own - model.tokens.weight.mean(0), 0.0).detach()
    expected, count = torch.zeros(len(ids)), 4001
    for part in ((torch.arange(count) + 0.5) / count).split(500):
        x = (own - (1 - part[:, None, None]) * step).requires_grad_()
        hook = model.tokens.register_forward_hook(lambda module, given, output, x=x: x)
        (gradient,) = torch.autograd.grad(value(torch.tensor(ids).expand(len(part), -1)).sum(), x)
        hook.remove()
        expected += (gradient * step).sum(-1).sum(0) / count
    shares, total = token_shares(model, ids, ordinary, value)
    assert total > 1 and total == pytest.approx(float(expected.sum()), rel=0.01)
    np.testing.assert_allclose(shares, expected, atol=0.01 * abs(total))
    assert shares[0] == shares[-1] == 0.0


@pytest.mark.slow
def test_the_word_that_tells_the_class_adds_most(learned, files):
    """Also where a word has several pieces, beside signs, and in a text that is cut.

    A text without words has a class, too; one of the same class owes little to its words.
    """
    totals = []
    texts = [example.text for example in learned.task.read(files / "unseen.csv")[:23]] + ["(a dull, film)!"]
    for text in texts:
        found = word_shares(learned.model, text, learned.model.tokenizer.whole(text), lead(learned, text))
        telling = [share for word, share in zip(found.words, found.shares, strict=True) if word in GOOD + BAD]
        assert sum(found.shares) == pytest.approx(found.total, abs=0.01 * max(1.0, abs(found.total)))
        totals.append(found.total)
        assert found.total < 1 or max(telling) > 0.3 * found.total
    assert sum(total > 1 for total in totals) > 7
    assert found.words == ("(", "a", "dull", ",", "film", ")", "!")
    text = "plot lovely filmfilm " * 9
    (ids,) = learned.model.tokenizer.whole_many([text], 13)
    cut = word_shares(learned.model, text, ids, lead(learned, text))
    spans = learned.model.tokenizer.encode(text).spans[:11]
    assert len(cut.words) == len(text[: spans[-1][1]].split()) and cut.words[0] == "plot"


def test_the_most_sure_ones_are_shown_the_wrong_ones_first():
    sure = np.array([0.6, 0.9, 0.7, 0.99, 0.8, 0.5, 0.95])
    assert most_sure(sure, np.array([True, False, True, True, False, True, True])) == [1, 4, 3, 6, 2]
    assert len(most_sure(np.linspace(0.5, 1, 20), np.arange(20) % 2 == 0)) == WRONG + RIGHT


@pytest.mark.slow
def test_the_pictures(learned, files, tmp_path, capsys):
    picture = tmp_path / "words.svg"
    report = tasks.test(learned, files / "unseen.csv", baseline=False)
    report.save_picture(picture)
    assert picture.read_text().count("its words add") == RIGHT
    assert cli.main(["predict", str(learned.folder), "a lovely film", "--picture", str(picture)]) == 0
    assert "lovely" in picture.read_text()
    assert capsys.readouterr().err == f"picture: {picture}\n"  # what is on standard output is for programs
    assert cli.main(["predict", str(learned.folder), "a film", "--picture", "a.gif"]) == 2
    assert capsys.readouterr().err.endswith("pictures are written to a name that ends in .png or .svg\n")
    with pytest.raises(ValueError, match="picture: tag has a picture only of tests; see `saccade test --picture`"):
        tasks.Tag().predicted_picture(learned.model, [], [], "png")


def test_a_text_without_a_token_has_a_picture(learned, tmp_path):
    """A space of no width is a text, and no tokenizer has a piece for it."""
    tasks.predict(learned, "\u200b", picture=tmp_path / "words.svg")
    assert (tmp_path / "words.svg").read_text().endswith("</svg>\n")
