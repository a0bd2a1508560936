"""The page that `reach.py` writes: each reason once, and counts that agree with the types listed under the reasons."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

HERE, NAN = Path(__file__).parent, float("nan")


@pytest.fixture
def reach(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(HERE))
    import reach

    return reach


def test_the_counts_of_the_page_agree_with_its_types(reach):
    text = (HERE.parents[1] / reach.PAGE).read_text()
    counts = {name: (int(works), int(of)) for name, works, of in re.findall(r"- `(.+)`: (\d+) of (\d+) types", text)}
    assert list(counts) == list(reach.TOOLS)
    rows = re.findall(r"^\| (.*) \| ((?:all|attr|why|step|head|patch|path|prune).*) \|$", text, re.MULTILINE)
    assert len(rows) == text.count("\n| ") - 1 == len({reason for reason, _ in rows})
    failing = {name: [] for name in reach.TOOLS}
    for _, cell in rows:
        for part in cell.split("; "):
            tools, types = part.split(": ")
            for name in reach.TOOLS if tools == "all" else tools.split(", "):
                failing[name] += types.strip("`").split(", ")
    for name, (works, of) in counts.items():
        assert len(failing[name]) == len(set(failing[name])) == of - works


def test_a_reason_is_stated_once_with_its_tools_and_types(reach):
    found = {(kind, name): reach.WORKS for kind in "abc" for name in reach.TOOLS}
    found |= {("a", "prune"): "rare", ("b", "prune"): "often", ("c", "attribute"): "often", ("c", "prune"): "often"}
    assert reach.rows(found) == ["| often | prune: `b`; attribute, prune: `c` |", "| rare | prune: `a` |"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0, NAN, 0.0], "effects are not finite"),
        ([0.0, 0.0, 7.0], "the effects of all heads are 0"),
        ([0.0, 1.0, NAN], ""),
    ],
)
def test_effects_of_all_heads_of_the_patched_calls_are_checked(reach, values, words):
    calls = [SimpleNamespace(name="layers.1.attention.self", heads=2), SimpleNamespace(name="layers.10", heads=1)]
    found = SimpleNamespace(calls=calls, values=torch.tensor(values))
    with pytest.raises(AssertionError, match=words) if words else nullcontext():
        reach.check_effects(found, ["layers.1.attention"])


def test_errors_that_are_no_messages_of_ours_name_who_raised_them(reach):
    with pytest.raises(AttributeError) as caught:
        reach.check_effects(SimpleNamespace(), [])
    assert reach.reason(caught.value) == (
        "Saccade raises AttributeError: 'types.SimpleNamespace' object has no attribute 'calls'"
    )
    with pytest.raises(ValueError) as caught:
        reach.zoo.transformers.AutoConfig.for_model("nothing")
    assert reach.reason(caught.value).startswith("transformers raises ValueError: ")
    with pytest.raises(ValueError) as caught:
        reach.saccade.prune(torch.nn.Linear(2, 2), {0: [0]})
    assert reach.reason(caught.value).startswith("it has no attention whose heads can be removed, expected saccade.nn")
