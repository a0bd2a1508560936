"""Maps of models that look ahead, and parts of texts too long for a map."""

from __future__ import annotations

import base64
import io
import json
import re

import numpy as np
import pytest
from pretend_lm import PretendText, broad, following, repeat
from pretend_random import TEXTS, random_model
from rich.cells import cell_len
from rich.console import Console

from saccade.inspection import _look as limits, look, short_number
from saccade.viewer import _report, as_json, print_look, render_report
from slowly import slow_but

LONG = " ".join(TEXTS[:3])


def printed(seen, width):
    out = io.StringIO()
    print_look(Console(file=out, width=width, legacy_windows=False), seen)
    return out.getvalue()


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def runs_of(html):
    """The passage as it reads: words and what stands between them."""
    passage = re.search(r'<p class="passage.*?>(.*?)</p>', html, re.DOTALL)[1]
    return re.sub(r"\s+", " ", re.sub(r"<.*?>", "", passage)).replace("&#39;", "'").strip()


def square_of(data):
    size = len(data["words"])
    rows = np.frombuffer(base64.b64decode(data["weights"]), np.uint8)
    return rows.reshape(len(data["heads"]), size, size)


def test_the_report_holds_the_whole_square():
    seen = look(random_model(0, "ahead"), TEXTS[0])
    html = render_report(seen, "1")
    data = data_of(html)
    assert data["causal"] is False and data["words"][0] == "[CLS]" and data["words"][-1] == "[SEP]"
    # Layers differ in heads: those that a layer lacks are not there.
    assert [(h["layer"], h["head"]) for h in data["heads"]] == list(seen.seen.places()) and len(data["heads"]) == 13
    expected = [seen.seen.weights[i, j].astype(float) for i, j in seen.seen.places()]
    assert (square_of(data) == np.floor(np.array(expected) * 100 + 0.5)).all()
    assert runs_of(html) == f"[CLS]{TEXTS[0]}[SEP]"
    assert html.count('class="w start"') == 2
    assert (
        "the weights of a word over all words sum to 1" in html
        and "<code>[CLS]</code> and <code>[SEP]</code> are tokens" in html
    )


def test_the_report_of_a_model_without_a_start_token():
    html = render_report(look(random_model(0, "nothing"), TEXTS[0]), "1")
    assert data_of(html)["causal"] is True and 'class="w start"' not in html
    assert "the words up to and including itself" in html and "The model adds no token before the text" in html
    assert runs_of(html) == TEXTS[0]


def test_a_square_cut_to_a_stretch_keeps_the_special_tokens(monkeypatch):
    monkeypatch.setattr(_report, "MOST_WEIGHTS", 13 * 14**2)
    seen = look(random_model(1, "ahead"), TEXTS[0])
    html = render_report(seen, "1")
    words = data_of(html)["words"]
    columns = seen.columns(len(words) - 2)
    assert 10 < len(words) <= 14 and [words[0], words[-1]] == ["[CLS]", "[SEP]"]
    assert words == [seen.seen.words[i].label for i in columns]
    assert f"This page holds the {seen.part(columns)}" in html


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["ahead", "nothing", "ending"], "ahead"))
@pytest.mark.parametrize("widths", [(40, 97), pytest.param((61, 200), marks=pytest.mark.slow)], ids=str)
def test_nothing_is_wider_than_the_terminal(kind, widths, monkeypatch):
    for text in (TEXTS[1], LONG, "Nobody"):
        for most in (1000, 2):
            monkeypatch.setattr(limits, "MOST_WORDS", most)
            seen = look(random_model(0, kind), text)
            for width in widths:
                shown = printed(seen, width)
                assert max(cell_len(line) for line in shown.splitlines()) <= width, shown


def test_wide_cells_show_every_weight_of_a_row():
    seen = look(random_model(0, "ahead"), "The cat saw the dog.", (1, 3))
    lines = printed(seen, 120).splitlines()
    for q, word in enumerate(seen.seen.words):
        row = next(
            line for line in lines if line.strip().startswith(word.label + " ") and re.search(r"[.\d]\d|·", line)
        )
        lines.remove(row)
        values = re.findall(r"\.\d\d|1\.00|·", row[len(word.label) :])
        assert values == [short_number(w) if w >= 0.005 else "·" for w in seen.seen.weights[1, 3, q]]


def test_narrow_cells_show_a_numbered_square():
    seen = look(PretendText([[following, broad]]), TEXTS[0], (0, 0))
    lines = printed(seen, 60).splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("   1 2 3"))
    above = [lines[top - 1].ljust(34)[2 * k : 2 * k + 2] for k in range(17)]  # numbers of columns run downward
    assert [(tens + lines[top].ljust(34)[2 * k + 1]).split() for k, tens in enumerate(above)] == [
        [],
        *([str(i)] if i < 10 else [f"{i // 10}{i % 10}"] for i in range(1, 16)),
        [],
    ]
    for q, word in enumerate(seen.seen.words):
        row = lines[top + 1 + q]
        assert row.endswith((f"{q:>2} " if not word.special else "   ") + word.label)
        cells = [row[2 * k] for k in range(17)]
        assert q == 16 or cells == ["█" if k == q + 1 else "·" for k in range(17)]  # the last row is even


def test_the_table_of_unmeasured_heads_says_where_the_weight_goes():
    shown = printed(look(PretendText([[following, broad], [broad]]), TEXTS[0]), 100)
    assert "roles were not measured for this model" in shown
    assert re.search(r"^0 +next 1\.00 +-$", shown, re.MULTILINE)  # chance is no habit
    assert re.search(r"^1 +-$", shown, re.MULTILINE)  # a layer with one head


def test_a_part_of_a_long_text(monkeypatch):
    monkeypatch.setattr(limits, "MOST_WORDS", 30)
    names = [f"w{i}" for i in range(90)]
    seen = look(PretendText([[repeat, broad]], causal=True), " ".join([*names, "w37", "again"]), (0, 0))
    shown = printed(seen, 120)
    assert shown.startswith("92 words and marks, 92 tokens, ")
    assert "words 29 to 48 and 81 to 92 of 92; the rest of a row falls on other words" in shown
    html = render_report(seen, "1")
    assert "This page holds the words 29 to 48 and 81 to 92 of 92, read in the context of the whole text" in html
    assert runs_of(html) == f"[CLS] … {' '.join(names[28:48])} … {' '.join(names[80:])} w37 again[SEP]"
    numbers = json.loads(json.dumps(as_json(seen), allow_nan=False))
    assert numbers["whole"]["part"] == [[29, 48], [81, 92]] and numbers["whole"]["words"] == 92
    assert len(numbers["words"]) == 34 and [len(row) for row in numbers["heads"][0]["weights"]] == list(range(1, 35))
    shares = [each["share"] for each in numbers["whole"]["received"]]
    assert len(shares) == 20 and shares == sorted(shares, reverse=True)
    assert numbers["whole"]["received"][0] == {"text": "[CLS]", "number": 0, "share": shares[0]} and shares[0] > 0.4
    at_w37 = next(f for f in numbers["findings"] if f["kind"] == "copy")
    assert [numbers["words"][at_w37[name]]["text"] for name in ("query", "key")] == ["w37", "w38"]


def test_what_lies_outside_of_a_part_is_told():
    seen = look(PretendText([[following, broad]]), TEXTS[0], (0, 0), rows=(3, 5))
    assert "'the' (word 5) looks at 'mat' (word 6) 1.00" in seen.outside
    assert "Outside" in printed(seen, 120) and "Outside of this part, in layer 0 head 0" in render_report(seen, "1")


def columns_drawn(lines):
    """The numbers above the columns of a square, read downward, and where breaks stand among them."""
    top = next(i for i, line in enumerate(lines) if "┊" in line)
    heads = [line for line in lines[top : top + 4] if set(line.strip()) <= set(" 0123456789┊")]
    wide = max(map(len, heads))
    stacked = ["".join(line.ljust(wide)[i] for line in heads) for i in range(wide)]
    return [each.strip() for each in stacked if each.strip()]


def test_captions_rows_and_columns_agree_and_breaks_are_drawn(monkeypatch):
    monkeypatch.setattr(limits, "MOST_WORDS", 100)
    names = [f"w{i}" for i in range(240)]
    model = PretendText([[repeat, broad]], before=("[CLS]",), after=("[SEP]",))
    seen = look(model, " ".join([*names, "w37", "again"]), (0, 0))
    for width in (50, 75):
        lines = printed(seen, width).splitlines()
        caption = " ".join(lines[next(i for i, line in enumerate(lines) if line.startswith("words ")) :])
        first, last, start, stop = map(
            int, re.match(r"words (\d+) to (\d+) and (\d+) to (\d+) of 242", caption).groups()
        )
        shown = [*range(first, last + 1), *range(start, stop + 1)]
        rows = [int(m[1]) for line in lines if (m := re.search(r" +(\d+) (?:w\d+|again)$", line))]
        assert rows == shown
        drawn = columns_drawn(lines)
        assert [int(each) for each in drawn if each[0] != "┊"] == shown
        assert [i for i, each in enumerate(drawn) if each[0] == "┊"] == [0, 1 + last - first + 1]
        assert sum(set(line) == {"┄"} for line in lines) == 2 and stop == 242  # [SEP] follows the last word
    page = set(data_of(render_report(seen, "1"))["words"])
    assert {f"w{i - 1}" for i in shown if i < 241} <= page  # the page shows what the terminal does


@pytest.mark.slow
def test_figures_of_squares_and_parts(monkeypatch):
    pytest.importorskip("matplotlib")
    from saccade.viewer import draw_figure

    seen = look(random_model(0, "ahead"), TEXTS[0])
    svg = draw_figure(seen, "svg").decode()
    assert svg.count("[CLS]") == 2 and svg.count("[SEP]") == 2  # each once as a row and once as a column
    monkeypatch.setattr(limits, "MOST_WORDS", 3)
    assert "<svg" in draw_figure(look(random_model(0, "nothing"), TEXTS[0]), "svg").decode()
