"""Tiny models of published families get no error but those that the page of models explains."""

from __future__ import annotations

from pathlib import Path

import pytest
import zoo

PAGE = Path(__file__).parents[2] / "docs" / "verify-models.md"
# One family for each form that was once taken for a fault; `python tests/verification/zoo.py` runs them all.
FAMILIES = (
    "gemma3_text",
    "gpt_oss",
    "flaubert",
    "deberta-v2",
    "mixtral",
    "gemma3n_text",
    "deepseek_v3",
    "convbert",
    "longformer",
    "t5",
    "neomme",
    "phimoe",
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_error_but_what_is_explained(family):
    assert not zoo.unexplained(family, zoo.run(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", "bert", "t5", "mamba2", "mixtral", "xlnet", "whisper"])
def test_no_error_of_a_stack_but_what_is_explained(family):
    report = zoo.run_stack(family)
    assert not zoo.unexplained(family, report)
    assert {error.check for error in report.errors} == zoo.EXPLAINED_STACKS.get(family, set())


def test_the_page_explains_what_is_excepted():
    page = PAGE.read_text(encoding="utf-8")
    assert not [one for one in zoo.EXPLAINED | zoo.EXPLAINED_STACKS if f"`{one}`" not in page]
