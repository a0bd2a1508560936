"""`saccade docs WORDS`: terms of the field find the guide that answers them, whatever our pages call it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from pages import ROOT

from saccade.support._documentation import _search, search
from saccade.support._documentation._synonyms import SYNONYMS


def sections() -> Iterator[dict[str, str]]:
    """All pages of docs/ as the site's index has them, with simpler anchors."""
    for file in sorted((ROOT / "docs").rglob("*.md")):
        place = file.relative_to(ROOT / "docs").with_suffix(".html").as_posix().replace("README", "index")
        text = re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        _, *parts = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)
        for title, body in zip(parts[::2], parts[1::2], strict=True):
            anchor = "" if title is parts[0] else f"#{title.casefold().replace(' ', '-')}"
            yield {"location": place + anchor, "title": re.sub(r"[`*]", "", title), "text": body}
    of_reference = {
        "title": "Attention",
        "text": "sentiment analysis, visualize attention, a causal mask, hyperparameters",
    }
    yield {"location": "reference/saccade.html#saccade.attention", **of_reference}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    (folder / "search").mkdir()
    (folder / "search" / "search_index.json").write_text(json.dumps({"docs": list(sections())}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("sentiment analysis", "tasks/classify.html"),
        ("named entity recognition", "tasks/tag.html"),
        ("named entities", "tasks/tag.html"),
        ("speech recognition", "tasks/speech.html"),
        ("permutation equivariance", "corrections.html"),
        ("visualize attention", "look.html"),
        ("Visualising the attention", "look.html"),
        ("hyperparameters", "tasks/search.html"),
        ("hyper-parameter search", "tasks/search.html"),
        ("translating", "tasks/translate.html"),
        ("reading comprehension", "tasks/answer.html"),
        ("grouped-query attention", "building.html"),
        ("rotary embeddings", "positions.html"),
        ("attention sinks", "what-models-show.html"),
        ("exploding gradients", "alarms.html"),
        ("out of memory", "remedies.html"),
        ("fine-tuned", "tasks/remedies.html"),
        ("overfitting", "tasks/remedies.html"),
        ("explainability", "heads.html"),
        ("GRU", "compare.html"),
        ("linear probe", "studying.html"),
        ("dropout", "pitfalls/dropout.html"),  # not the decisions, which speak of it more often
        ("sofmax", "pitfalls/softmax.html"),
        ("unit tests of zebras", "verifying.html"),
    ],
)
def test_terms_of_the_field_find_their_guide(words, page, site):
    assert search(site, words)[0].place.partition("#")[0] == page


def test_guides_come_before_the_reference_and_that_before_decisions(site, tmp_path):
    (tmp_path / "search").mkdir()
    places = ["decisions/nn.html", "reference/saccade.html", "remedies.html", "benchmarks/results/a.html"]
    docs = [{"location": place, "title": "Zebras", "text": "zebra"} for place in places]
    (tmp_path / "search" / "search_index.json").write_text(json.dumps({"docs": docs}), encoding="utf-8")
    assert [found.place for found in search(tmp_path, "zebra")] == [places[i] for i in (2, 1, 3, 0)]


def test_what_our_pages_call_a_term_is_a_title_of_theirs():
    """A page that gets another title would lose its synonyms without a word."""
    titles = [set(_search._stems(section["title"])) for section in sections()]
    titles.append(set(_search._stems("linear linformer performer reformer nystrom")))  # made by hooks
    titles.append(set(_search._stems("The operator and masks")))  # a notebook
    lost = [ours for ours in SYNONYMS if not any(set(_search._stems(ours)) <= title for title in titles)]
    assert lost == []


def test_stems_join_forms_of_a_word_and_leave_short_ones():
    for forms in ("visualize visualising visualization visual", "classify classifies classification classifier"):
        assert len(set(_search._stems(forms))) == 1, forms
    assert _search._stems("mask masks biases losses news nan") == ("mask", "mask", "bia", "los", "new", "nan")
