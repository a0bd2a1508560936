"""The page of what each mechanism can and cannot do is what the code says."""

from __future__ import annotations

import dataclasses
import re

from looped import looped
from saccade.variants import MECHANISMS, Traits, patterns
from variants.capability_table import PAGE, page


def test_the_committed_page_is_what_the_code_says():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tests/variants/capability_table.py"


@looped("kind", MECHANISMS)
def test_everything_a_mechanism_says_stands_there(kind):
    text, traits = page(), kind.traits
    rows = [line for line in text.splitlines() if line.startswith(f"| [{kind.name}](#{kind.name})")]
    costs, abilities = rows
    assert all(part in costs for part in (traits.time, traits.memory, *traits.takes))
    able = [traits.causal, traits.bidirectional, traits.cross, traits.masks, traits.cached, traits.recurrent]
    cells = ["yes" if one is True else "no" for one in (*able, traits.grouped)]
    assert abilities.split(" | ")[1:] == [*cells[:-1], f"{cells[-1]} |"]
    for field in dataclasses.fields(Traits):
        value = getattr(traits, field.name)
        if isinstance(value, str) and field.name in ("causal", "bidirectional", "cross", "masks", "cached", "grouped"):
            assert f"- not {field.name}: {value}" in text


def test_names_and_sentences():
    """Names are taken once; a sentence that stands behind "since" begins small and ends without a full stop."""
    assert len({kind.name for kind in MECHANISMS}) == len(MECHANISMS)
    for kind in MECHANISMS:
        traits = kind.traits
        for name in ("choose", "avoid"):
            sentence = getattr(traits, name)
            assert sentence.endswith(".") and sentence[0].isupper(), (kind.name, name)
        for name in ("causal", "bidirectional", "cross", "masks", "cached", "recurrent", "grouped"):
            reason = getattr(traits, name)
            if isinstance(reason, str):
                assert not reason.endswith(".") and not reason[0].isupper(), (kind.name, name)
        assert traits.computes in ("softmax", "approximation", "other")
        assert set(traits.takes) <= {"bias", "scale", "softcap", "sink", "dropout"}


@looped("kind", MECHANISMS)
def test_costs_are_written_alike(kind):
    """O(...) with `^2`, and behind it what its letters mean, if they are not fields."""
    for cost in (kind.traits.time, kind.traits.memory):
        assert re.fullmatch(r"O\(.+\)(, .+)?", cost) and not re.search("[²³·*]", cost), cost


def test_every_pattern_stands_there():
    text = page()
    for name in ("sliding_window", "longformer", "sparse_strided", "sparse_fixed", "bigbird", "streaming"):
        assert hasattr(patterns, name) and f"| `{name}(" in text
