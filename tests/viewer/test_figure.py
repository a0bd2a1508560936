from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
from looks import LONG, SHORT, make

from saccade.viewer import as_json, draw_figure

pytest.importorskip("matplotlib")


@pytest.mark.slow
@pytest.mark.parametrize("text", [SHORT, LONG, "Nobody", "$a_b$ costs 50% {\\x} \u732b"])
def test_figures_of_any_text(text):
    svg = draw_figure(make(text), "svg").decode()
    assert "<svg" in svg and "Saccade" in svg
    if text == SHORT:
        assert draw_figure(make(text), "svg").decode() == svg  # the same look, the same file


@pytest.mark.slow
def test_a_long_text_is_cut_to_what_a_page_holds():
    png = draw_figure(make(LONG), "png")
    assert png.startswith(b"\x89PNG")
    width, height = (int.from_bytes(png[i : i + 4], "big") / 300 for i in (16, 20))
    assert 5 < height < width < 8


@pytest.mark.slow
def test_a_figure_says_which_words_it_shows_and_parts_passages(monkeypatch):
    from matplotlib.axes import Axes

    told, lines = [], []
    real = Axes.set_title
    monkeypatch.setattr(Axes, "set_title", lambda self, text, **how: (told.append(text), real(self, text, **how)))
    for name in ("axvline", "axhline"):
        monkeypatch.setattr(Axes, name, lambda self, at, **how: lines.append(at))
    draw_figure(make(), "svg")
    assert told == ["layer 1 head 1\nall 15 words"] and lines == []
    look = make(LONG)
    draw_figure(look, "svg")
    columns = look.columns(60)
    assert told[-1].splitlines()[1] == look.part(columns) != "" and len(columns) == 61
    rows = [at for at in look.breaks(columns[1:]) if at]  # <s> looks at nothing else, so it has no row
    assert lines == [*(at - 0.5 for at in look.breaks(columns)), *(at - 0.5 for at in rows)] != []


@pytest.mark.slow
def test_the_figure_shows_the_chosen_head_and_what_is_masked_does_not_look_like_zero():
    from matplotlib.image import imread

    first, second = (imread(io.BytesIO(draw_figure(make("The cat saw the dog", head=(0, h)), "png"))) for h in (0, 2))
    assert first.shape == second.shape and not np.array_equal(first, second)
    colours, counts = np.unique(second[..., :3].reshape(-1, 3), axis=0, return_counts=True)
    grey = [
        n for colour, n in zip(colours, counts, strict=True) if np.allclose(colour, [0.89, 0.898, 0.914], atol=0.005)
    ]
    assert sum(grey) > 0.05 * counts.sum()  # 10 of 25 cells


def test_json_holds_the_numbers():
    look = make("The cat saw the cat.")
    numbers = json.loads(json.dumps(as_json(look), allow_nan=False))
    assert [w["text"] for w in numbers["words"]] == ["<s>", "The", "cat", "saw", "the", "cat", "."]
    assert all(numbers["text"][w["start"] : w["stop"]] == w["text"] for w in numbers["words"][1:])
    assert [f["sentence"] for f in numbers["findings"]] == [f.sentence for f in look.findings]
    assert len(numbers["heads"]) == 10
    for head in numbers["heads"]:
        for q, row in enumerate(head["weights"]):
            assert len(row) == q + 1 and math.isclose(sum(row), 1, abs_tol=7e-6)
        assert head["role"] == look.measured(head["layer"], head["head"])["role"]
        assert head["here"]["repeat"] is not None
    assert as_json(make("The cat"))["heads"][0]["here"]["repeat"] is None
