from __future__ import annotations

import functools
import io
import re

import pytest
from looks import LONG, SHORT, make
from rich.cells import cell_len
from rich.console import Console

from saccade.inspection import short_number
from saccade.viewer import print_look

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def printed(look, width=80, **options):
    out = io.StringIO()
    print_look(Console(file=out, width=width, legacy_windows=False, **options), look)
    return out.getvalue()


def in_colour(look, width=80):
    return printed(look, width, force_terminal=True, color_system="truecolor", no_color=False)


look_of = functools.cache(make)


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 61, 80, 97, 200])
@pytest.mark.parametrize(
    "text",
    [
        SHORT,
        LONG,
        "Nobody",
        "\u732b\u304c\u5ea7\u308b\u3002\u732b\u304c\u5ea7\u308b\u3002",
        "antidisestablishmentarianism " * 5,
    ],
)
def test_nothing_is_wider_than_the_terminal(width, text):
    look = look_of(text)
    for shown in (printed(look, width), ESCAPE.sub("", in_colour(look, width))):
        assert max(cell_len(line) for line in shown.splitlines()) <= width


def test_plain_output_has_no_escape_codes_and_colour_has():
    assert "\x1b" not in printed(make())
    assert "\x1b[" in in_colour(make())
    no_colour = printed(make(), force_terminal=True, color_system="truecolor", no_color=True)
    assert not re.search(r"\x1b\[[0-9;]*[34]8;", no_colour)


def test_words_come_before_tables_and_every_sentence_is_there():
    look = make()
    lines = printed(look, 200).splitlines()
    sentences = ["\u2022 " + f.sentence for f in look.findings]
    assert lines[2 : 2 + len(sentences)] == sentences


def test_wide_cells_show_the_weights_in_digits():
    look = make(head=(1, 1))
    shown = printed(look, 120)
    assert "Layer 1 head 1, repeat .62" in shown
    row = next(line for line in shown.splitlines() if line.strip().startswith("cat"))
    values = re.findall(r"\.\d\d|1\.00|\u00b7", row)
    weights = look.seen.weights[1, 1, 2, :3]
    assert values == [short_number(w) if w >= 0.005 else "\u00b7" for w in weights]


def test_narrow_cells_show_shades_and_each_row_ends_in_its_word():
    look = make(head=(0, 3))
    shown = printed(look, 50).splitlines()
    first = next(i for i, line in enumerate(shown) if line.endswith("<s>"))
    rows = shown[first : first + len(look.seen.words)]
    for q, (row, word) in enumerate(zip(rows, look.seen.words, strict=True)):
        assert row[2 * (q + 1) :] == " " + word.label
        shades = [row[2 * k] for k in range(q + 1)]
        expected = [
            ("\u00b7" if w < 0.05 else "\u2591\u2592\u2593\u2588"[min(3, int(w * 4))])
            for w in look.seen.weights[0, 3, q, : q + 1]
        ]
        assert shades == expected


def test_a_long_text_is_cut_to_a_stretch_and_says_so():
    look = make(LONG)
    shown = printed(look, 80)
    told = " ".join(shown.split())
    match = re.search(
        r"words (\d[^;]*) of 149, around the clearest finding; the rest of a row falls on other words", told
    )
    runs = [[int(n) for n in run.split(" to ")] for run in match[1].split(" and ")]
    numbers = [n for run in runs for n in range(run[0], run[-1] + 1)]
    assert len(numbers) < 40 and set(look.ends) <= {0, *numbers}
    ends = [line.split()[-1] for line in shown.splitlines() if re.match(r"[·░▒▓█]", line)]
    ends = [name for name in ends if name not in ("<s>", "more")]
    assert ends == [look.seen.words[n].label for n in numbers]


def test_table_holds_role_scores_and_entropy():
    look = make()
    shown = printed(look, 80)
    for name in ("prev.", "repeat", "sink", "self", "mixed"):
        assert shown.count(name) >= 2
    chance = sum(1 / n for n in range(3, 17)) / 14  # of the word before, for words that have one
    above = (look.habits["previous"][0, 0] - chance) / (1 - chance)
    assert f".62 {short_number(above)}" in shown
    assert f"{look.seen.entropy()[1, 4]:.2f}" in shown
    many = printed(make(layers=1), 30)
    assert many.count("layer head") == 3  # five heads, two a line


def test_unmeasured_roles_are_said_to_be_so():
    assert "roles were not measured for this model" in printed(make(roles=False), 120)


def test_the_text_cannot_control_the_terminal():
    shown = printed(make("evil \x1b[2J\x07 [bold]text[/bold] word"))
    assert "\x1b" not in shown and "\x07" not in shown and "bold" in shown
