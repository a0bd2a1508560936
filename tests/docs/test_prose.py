"""The check of the documentation's English (`.ci/prose.py`) finds what it is for, and little else."""

from __future__ import annotations

import importlib.util

import pytest
from pages import ROOT

_SPEC = importlib.util.spec_from_file_location("prose", ROOT / ".ci" / "prose.py")
prose = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(prose)

BAD = [
    "A mechanism refuses what it cannot do.",
    "What is not said is usual for `--context`.",
    "The backend is told the mask.",
    "An introduction for who has never seen it.",
    "It needs no dense mask nobody brought.",
    "For text without end.",
    "The likeliest token is taken.",
    "PyTorch's kernel is preferred to `native` at no size.",
    "This page lists them, and what came.",
    "This page has how to switch them on.",
    "Dropout draws other numbers than PyTorch's.",
    "What cannot be seen is named and counted.",
    "Means wash single tokens out.",
    "`value` is for its range and norms alone.",
    "It reads no mask, nor does it return weights.",
    "The check mends the module.",
    "The loop waits in vain.",
    "A classifier begins anew.",
    "The check wants two lengths.",
    "For those who carry on: the parts.",
    "It puts a window in the place of a full mask.",
    "The largest weight, of equal ones the first.",
    "Another call gets other ones.",
    "The output is no tensor that a graph can hold.",
    "The heads of a layer, None: none.",
    "The mask that says the same for all keys.",
]
GOOD = [
    "Options you give are used as they are.",
    "Inferred settings are listed under `assumed`.",
    "Unobserved calls are counted, with the reason.",
    "Unsupported options raise an error.",
    "`native` is used at every size.",
    "For unbounded streams, or people who know PyTorch.",
    "`--long refuse` raises an error; mentions of amending are fine.",
    "In a tie the first wins; None if there is no key that the row sees, or of equal size.",
]


def test_each_pattern_finds_one_bad_sentence():
    found = [
        [
            pattern
            for pattern, advice in prose.ADVICE.items()
            if advice in (v.advice for v in prose.phrases(prose.paragraphs(bad)))
        ]
        for bad in BAD
    ]
    assert [len(patterns) for patterns in found] == [1] * len(BAD)
    assert {pattern for patterns in found for pattern in patterns} == set(prose.ADVICE)


@pytest.mark.parametrize("good", GOOD)
def test_plain_sentences_are_not_reported(good):
    assert not prose.violations(f"# Title\n\nFor you. {good}\n", "docs/page.md")


def test_code_is_not_prose():
    code = "```python\nx = 'refused'  # the likeliest\n```\n\n    it is told what was said\n\nText of `likeliest`.\n"
    assert not list(prose.phrases(prose.paragraphs(f"# Title\n\nText.\n\n{code}")))
    assert prose.readability(f"# Title\n\nText.\n\n{code}")[0] == 5


def test_long_sentences_are_reported_with_their_line_and_short_ones_beside_them_are_not():
    short, long = "Ten words make a sentence that anybody can read here. ", "Word " + "word " * 34 + "word. "
    page = f"# Title\n\nFor you. {short * 9}\n\n- {short}{long}{short}\n"
    (found,) = prose.violations(page, "docs/page.md")
    assert found.line == 5 and found.advice.startswith("36 words")
    assert not prose.violations(page.replace("word word", "word", 1), "docs/page.md")
    assert not prose.violations(page, "docs/decisions/page.md")


def test_long_guides_are_reported_and_long_references_are_not():
    page = "# Title\n\nFor you. " + "Two words. " * 448 + "One.\n"
    assert not prose.violations(page, "docs/page.md")
    (found,) = prose.violations(page.replace("One.", "Two words."), "docs/page.md")
    assert found.words == "901 words"
    assert not prose.violations(page + page, "docs/contract.md")


@pytest.mark.parametrize(
    "begin", ["## A heading", "- an item", "| a | table |", "![a picture](x.svg)", "```sh\nls\n```"]
)
def test_a_page_starts_with_a_paragraph(begin):
    (found,) = prose.violations(f"# Title\n\n{begin}\n\nText.\n", "docs/page.md")
    assert "whom the page is for" in found.advice
    assert not prose.violations(f"# Title\n\nFor `code`.\n\n{begin}\n", "docs/page.md")


def test_the_first_sentence_of_a_page_says_whom_it_is_for():
    (found,) = prose.violations("# Title\n\nSaccade has pages. You read them.\n", "docs/page.md")
    assert found.advice.startswith("the first sentence")
    assert not prose.violations("# Title\n\nIf you read pages,\nread on. Saccade has them.\n", "docs/page.md")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ('def f():\n    """First line.\n\n    It is\n    told the mask.\n    """', 2),
        ('raise ValueError("one line "\n    "is told here")', 1),
        ('raise ValueError(f"{name} is told {value}")', 1),
    ],
)
def test_strings_of_code_are_prose(code, line):
    (found,) = prose.violations(code, "src/saccade/module.py")
    assert found.words == "is told" and found.line == line


def test_names_and_values_in_code_are_not_prose():
    code = 'told = "it" if refused else "refuses"  # the likeliest\ncut("cut or refuse", "`refused`", "refused: why")\n'
    assert not prose.violations(code, "src/saccade/module.py")


def test_parameters_and_docstrings_begin_with_what_they_name():
    code = 'def f(told, mask):\n    """What it is told."""\n\nclass MaskOptions:\n    """What is shown"""\n'
    assert [found.words for found in prose.signatures(code)] == ["told", "f: What ..."]
    [found] = prose.signatures('def g(mask):\n    """Whether it hides a key."""\n')
    assert found.words == "g: Whether it ..."
    assert not list(prose.signatures('"""What a file is."""\ndef f(mask):\n    """Whatever the mask hides."""\n'))
