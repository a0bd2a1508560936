"""The committed table is what the committed numbers say, and its advice is theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from saccade.benchmark.variants import VariantComparison
from saccade.benchmark.variants.advice import advice
from saccade.benchmark.variants.tables import page

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.mark.slow
def test_the_page_is_that_of_the_numbers():
    made = VariantComparison.from_json((RESULTS / "compare.json").read_text(encoding="utf-8"))
    written = (RESULTS / "compare.md").read_text(encoding="utf-8")
    assert page(made) == written, "saccade compare --read benchmarks/results/compare.json --markdown ..."
    assert f"**{advice(made)}**" in written
    assert made.data["source"].startswith("the embedded model")
