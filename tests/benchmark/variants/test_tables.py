"""What the tables say of a comparison that is made of numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path as FilePath

import pytest

from comparisons import comparison, exact, full, line, point
from looped import looped
from saccade.benchmark.variants import ContenderResults, GradientReach, VariantComparison
from saccade.benchmark.variants.advice import advice
from saccade.benchmark.variants.tables import crossed, missing, page, path_table, sections, text
from saccade.benchmark.variants.trends import Crossover
from saccade.support._numbers import relative_error

RESULTS = FilePath(__file__).parents[3] / "benchmarks" / "results"


def test_the_text_of_everything():
    made = full()
    lines = text(made)
    assert lines[0] == "beads: causal, batch 1, 4/2 heads of width 16, float32"
    assert lines[1].startswith("Abacus, 2 of 3 cores")
    assert lines[-1] == advice(made)
    start = lines.index("Reading q, k and v: 512 tokens")
    assert [row.split() for row in lines[start + 1 : start + 5]] == [
        ["forward", "training", "is", "decode", "keeps", "memory", "error", "worst", "row"],
        ["exact", "-", "1.00", "s", "-", "-", "-", "-", "1e-07", "2e-07"],
        "some 250 ms 500 ms 2.00x 100 us 1.00 KiB 3.00 MiB 6.0 % 12 %".split(),
        "other - 100 ms 10.0x - - - (400 %) (800 %)".split(),
    ]
    layers = lines.index("Layers of equal width, with their projections: 512 tokens")
    assert lines[layers + 3].split() == "GRU - 1.00 s 2.00x - - - 0".split()


def test_who_is_missing_is_said():
    assert missing(full()) == [
        "late is not measured: cannot be causal: it mixes all tokens.",
        "some at 1k: would form about 9.0 GiB.",
        "No decoding step: other: it has no past.",
    ]


def test_reasons_that_are_alike_stand_once():
    made = comparison(
        *(ContenderResults(name, "reading", "other", "", points=(point(8, 1.0, no_decode="none"),)) for name in "ab"),
        ContenderResults(
            "c", "reading", "other", "", points=tuple(point(n, None, note="too long") for n in (2048, 4096, 5000))
        ),
    )
    assert missing(made) == ["c at 2k, 4k, 5000: too long.", "No decoding step: a, b: none."]


def test_growth_and_crossings():
    lengths = (512, 1024, 2048)
    made = comparison(exact({n: 1e-6 * n**2 for n in lengths}), line("a", {n: 1e-3 * n for n in lengths}))
    growth, faster = (section.table for section in sections(made)[-2:])
    assert growth.head[1] == "training grows"
    assert [row[:2] for row in growth.rows] == [["exact", "L^2.00"], ["a", "L^1.00"]]
    header, rows = faster.head, faster.rows
    assert rows[0][header.index("training faster")] == "-"
    assert rows[1][header.index("training faster")] == "from about 1,000"
    assert rows[1][header.index("forward faster")] == "-"


def test_one_length_has_no_growth():
    assert not any("growth" in section.title for section in sections(comparison(exact({512: 1.0}))))


@looped(
    ("found", "told"),
    [
        (Crossover("always"), "at every length"),
        (Crossover("measured", 1234.0), "from about 1,200"),
        (Crossover("extrapolated", 56789.0), "from about 57,000 *"),
        (Crossover("until", 700.0), "only below about 700"),
        (Crossover("never"), "never"),
        (Crossover("unknown"), "-"),
    ],
)
def test_crossings_in_words(found, told):
    assert crossed(found) == told


def test_paths():
    table = path_table(
        [
            GradientReach("a", 1, (1, 2, 4), (1.0, 0.011, 0.0)),
            GradientReach("b", 4, (1, 2), (1.0, 2e-7)),
            GradientReach("c", 1, (), (), "nothing arrives"),
        ]
    )
    assert table.head == ["", "d=1", "d=2", "d=4", "reaches"]
    assert table.rows == [
        ["a", "1.00", "0.01", "0", "2"],
        ["b, 4 layers", "1.00", "2e-07", "-", "1"],
        ["c", "-", "-", "-", "nothing arrives"],
    ]


def test_many_distances_are_thinned_and_the_last_stays():
    distances = tuple(2**n for n in range(15))
    header = path_table([GradientReach("a", 1, distances, (1.0,) * 15)]).head
    assert header[1:-1] == [f"d={4**n:,}" for n in range(8)]


def test_shares():
    assert [relative_error(number) for number in (3e-7, 4e-4, 5e-4, 0.064, 2.5)] == [
        "3e-07",
        "4e-04",
        "0.1 %",
        "6.4 %",
        "250 %",
    ]


def test_times_beyond_the_data_are_said_to_be():
    beyond = "The data has 512 tokens. Longer lengths are timed on its tokens in random order"
    assert any(beyond in row for row in text(full()))
    assert not any(beyond in row for row in text(comparison(exact({512: 1.0}))))
    assert not any("Longer lengths" in row for row in text(comparison(exact({1024: 1.0}), unlimited=True)))


def test_the_page():
    made = full()
    made.settings["command"] = "saccade compare --beads"
    written = page(made)
    assert written.startswith("# Which attention to choose\n\n    saccade compare --beads\n\nbeads: causal")
    assert f"**{advice(made)}**" in written
    assert "| some | 250 ms | 500 ms | 2.00x | 100 us | 1.00 KiB | 3.00 MiB | 6.0 % | 12 % |" in written
    assert "- late is not measured: cannot be causal: it mixes all tokens.\n" in written
    assert written.endswith("it has no past.\n")


def test_a_busy_machine_is_said_to_be_one():
    lengths = (512, 1024, 2048)
    made = comparison(exact({n: 1e-6 * n**2 for n in lengths}), line("falls", {512: 4.0, 1024: 2.0, 2048: 1.0}))
    noisy = ContenderResults(
        "noisy", "reading", "other", "", points=tuple(point(n, 1e-3 * n, spread=2.0) for n in lengths)
    )
    made.lines.append(noisy)
    made.machine["load_before"] = 3.5
    told = "\n".join(text(made))
    assert "! 3 of 9 rows are noisy: the middle half of their readings spans more than 15 % of the median." in told
    assert "! Other programs were running: the load average was 3.5 before the run." in told
    assert "! unclear: numbers that fall with length or follow no power law." in told
    assert "L^-" not in told
    growth, faster = (dict((row[0], row[1:]) for row in section.table.rows) for section in sections(made)[-2:])
    assert growth["falls"][0] == faster["falls"][1] == "unclear"
    assert growth["noisy"][0] == "L^1.00" and faster["noisy"][1].startswith("from about")
    assert [row[0] for row in sections(made)[0].table.rows] == ["exact", "falls", "noisy !"]


def test_a_quiet_machine_needs_no_warning():
    told = "\n".join(text(comparison(exact({n: 1e-6 * n**2 for n in (512, 1024, 2048)}))))
    assert "!" not in told and "unclear" not in told


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1.01, 2.0])
def test_tables_of_everyone_fit_a_line_of_text(noise):
    """Names and settings of everyone there is, with the widest of numbers."""
    made = VariantComparison.from_json((RESULTS / "compare.json").read_text(encoding="utf-8"))
    made.lines = [
        replace(
            one,
            points=tuple(
                point(
                    p.length,
                    123e-6 * p.length ** (1 + turn % 2),
                    forward=123e-6,
                    decode=456e-6 * p.length,
                    memory=p.memory,
                    error=23.79,
                    kept=512 * 1024,
                    spread=noise,
                    parameters=1_048_576,
                )
                for p in one.points
            ),
        )
        for turn, one in enumerate(made.lines)
    ]
    made.paths = [replace(path, gradients=tuple(min(g, 9.9e-4) for g in path.gradients)) for path in made.paths]
    lines = text(made)
    rows = lines[lines.index("") : next(n for n, row in enumerate(lines) if row.startswith("training:"))]
    assert len(rows) > 100
    widest = max(rows, key=len)
    assert len(widest) <= 100, widest
    assert all(
        any(part in row for row in lines) for one in made.lines if one.points for part in one.setting.split(", ")
    )


def test_nothing_measured_is_still_a_text():
    assert text(comparison())[-1].startswith("No advice")
