"""What is printed fits a narrow terminal, is plain where piped, and says the numbers of the study."""

from __future__ import annotations

import io
import json
import math

import pytest
from pretend import PretendModel, evenly, following, inducing, itself, looks_at, previous, randomly
from rich.console import Console
from test_coreference import document, knowing
from test_syntax import bank

from saccade.analysis import (
    COLUMNS,
    Probe,
    ProbeAccuracy,
    Text,
    as_numbers,
    as_rows,
    compare,
    study_coreference,
    study_corpus,
    study_syntax,
    tables,
)

TEXTS = [
    Text("a", "The cat sat on the mat, and the dog saw the cat.\nThe dog ran; the cat ran, too!"),
    Text("b", "Nobody saw the old man, nobody heard the old man, but the old man saw them all and was glad."),
]


def printed(show, study, width=80):
    stream = io.StringIO()
    show(Console(file=stream, width=width, highlight=False), study)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= width
    return [line.rstrip() for line in text.splitlines()]


def corpus(*layers, **more):
    return study_corpus(PretendModel(list(layers) or [[previous, inducing], [randomly(1), itself]], **more), TEXTS)


def test_corpus():
    found = printed(tables.print_corpus, corpus())
    assert found[0] == "pretend: 2 layers, 4 heads, on 2 texts, 48 tokens"
    rows = {line[:18].strip(): line for line in found[: found.index("Roles of the heads")]}
    assert rows["previous"].split()[-2:] == ["0.0", "1.00±.00"]
    assert rows["self"].split()[-2:] == ["1.1", "1.00±.00"]
    assert rows["repeat induction"].split()[-2:] == ["0.1", "1.00±.00"]
    roles = [line.split() for line in found[found.index("Roles of the heads") + 2 :]]
    assert ["previous", "1", "0.0", "1.00"] in roles and ["self", "1", "1.1", "1.00"] in roles
    assert ["repeat", "induction", "1", "0.1", "1.00"] in roles
    assert len(roles) == 4


def test_spread_is_over_the_texts_that_can_tell():
    more = [*TEXTS, Text("c", TEXTS[0].text.replace("cat", "cow")[9:])]
    found = study_corpus(PretendModel([[randomly(1), randomly(4)]], special=False), more)
    assert found.counts("delimiter").tolist() == [[2, 2]]  # two of three have a line break
    row = next(line for line in printed(tables.print_corpus, found) if line.startswith("delimiter"))
    assert "±" in row.split()[3]
    assert as_numbers(found)["thirds"]["delimiter"]["middle"]["deviation"] > 0


def test_a_score_that_nobody_can_have_is_named():
    found = printed(tables.print_corpus, corpus([previous], causal=True))
    assert "no case in these texts: next, dormant" in found
    one = study_corpus(PretendModel([[previous, itself]]), [*TEXTS[:1], Text("c", "too short")])
    found = printed(tables.print_corpus, one)
    assert "left out, too short: 1 text" in found
    assert not any("±" in line for line in found if not line.startswith("average"))  # one text has no spread


def test_comparison():
    found = printed(tables.print_comparison, compare(corpus(), corpus([previous, inducing], [itself, itself])))
    assert found[0] == "pretend -> pretend, on the same 2 texts, 48 tokens"
    at = found.index("Heads that changed most")
    assert found[at + 1].split() == ["head", "score", "before", "after", "difference"]
    assert found[at + 2].split()[:2] == ["1.0", "self"]
    assert "comparisons at once (95 %, Bonferroni)" in found[-1]
    same = printed(tables.print_comparison, compare(corpus(), corpus()))
    assert same[-1] == "no score of any head changed by 0.005 or more"
    other = printed(tables.print_comparison, compare(corpus(), corpus([previous])))
    assert other[-1] == "different layers or heads: only thirds of the layers are compared"


def test_syntax(tmp_path):
    found = printed(tables.print_syntax, study_syntax(PretendModel([[previous, following]]), bank(tmp_path)))
    assert found[0] == "pretend: relations of 3 sentences, 15 words"
    amod = next(line for line in found if line.split()[:2] == ["amod", "dep→head"])
    assert amod.split() == [
        "amod",
        "dep→head",
        "2",
        "0.1",
        "1.00",
        ".34-1",
        "-",
        "+1",
        "1.00",
        "-",
    ]  # both in even ones
    causal = study_syntax(PretendModel([[previous]], causal=True, context=9), bank(tmp_path))
    assert "causal model: 10 of 20 cases are left out, since their answer comes later" in printed(
        tables.print_syntax, causal
    )


def test_coreference():
    found = printed(tables.print_coreference, study_coreference(PretendModel([[looks_at(knowing)]]), [document()]))
    assert found[0] == "pretend: antecedents in 1 document, 14 words"
    row = next(line for line in found if line.startswith("all"))
    assert row.split() == ["all", "3", "0.0", "1.00", ".44-1", "-", "-4", ".67", ".00", ".33"]


def knows(layer, accuracy, converged=True):
    return ProbeAccuracy(
        layer, accuracy, (accuracy - 0.02, accuracy + 0.02), accuracy - 0.5, (-0.01, 0.3), 0.25, converged
    )


def probe():
    layers = (knows(0, 0.5), knows(1, 0.75), knows(2, 0.625, converged=False))
    return Probe("pretend", ("A", "B"), "A", 0.4, (math.nan, math.nan), layers, (300, 100), (30, 10), 2, 3, 5)


def test_probe():
    found = printed(tables.print_probe, probe())
    assert found[1] == "learned from 300 words of 30 sentences, tested on 100 words of 10 sentences"
    assert any(line.startswith("(all A)        .40    -") for line in found)
    assert any(
        line.split() == ["1", ".75", ".73-.77", "+0.25", "(-0.01", "to", "+0.30)", ".25", "+0.50"] for line in found
    )
    assert any(line.startswith("2              .63?") for line in found)
    assert "? the optimizer stopped before its end" in found
    out = "left out: 5 sentences not needed, 2 sentences too long, 3 words without a token or a label"
    assert " ".join(found[-2:]) == out


def test_numbers_are_what_json_takes(tmp_path):
    trees = bank(tmp_path)
    studies = [
        corpus(),
        compare(corpus(), corpus()),
        compare(corpus(), corpus([evenly])),
        study_syntax(PretendModel([[previous]]), trees),
        study_coreference(PretendModel([[looks_at(knowing)]]), [document()]),
        probe(),
    ]
    for study in studies:
        again = json.loads(json.dumps(as_numbers(study), allow_nan=False))
        assert again
    numbers = as_numbers(studies[0])
    assert numbers["heads"][0]["scores"]["previous"]["mean"] == pytest.approx(1)
    assert numbers["heads"][0]["scores"]["previous"]["texts"] == 2
    assert numbers["heads"][3]["role"] == "self"
    assert numbers["thirds"]["self"]["middle"]["mean"] is None
    relation = next(r for r in as_numbers(studies[3])["relations"] if r["relation"] == "det")
    assert relation["cases"] == 3 and relation["offset"]["offset"] == 2
    assert as_numbers(studies[5])["layers"][2]["converged"] is False


def test_rows_for_csv(tmp_path):
    rows = list(as_rows(corpus()))
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert rows[0][:5] == ("corpus", "pretend", "previous", 0, 0) and rows[0][5] == pytest.approx(1)
    rows = list(as_rows(study_syntax(PretendModel([[previous, following]]), bank(tmp_path))))
    assert ("syntax", "pretend", "amod, dependent to head", 0, 1, 1.0, None, None, 2) in rows
    rows = list(as_rows(study_coreference(PretendModel([[looks_at(knowing)]]), [document()])))
    assert rows[0] == ("coreference", "pretend", "all", 0, 0, 1.0, None, None, 3)
    rows = list(as_rows(probe()))
    assert len(rows) == 6 and rows[0] == ("probe", "pretend", "accuracy", 0, None, 0.5, None, 0.4, 100)
    assert rows[3][2:6] == ("control", 1, None, 0.25)
