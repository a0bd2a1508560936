"""The README's textbook module, with one of its lines broken at a time: the report names that line."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest

import saccade

MODULE = Path(__file__).parents[2] / "docs" / "examples" / "textbook_attention.py"

# What is broken, the words that are replaced and those that replace them, and the families that fit.
MUTATIONS = {
    "no scale": (" / math.sqrt(self.head_dim)", "", "scale"),
    "scale by the model width": ("math.sqrt(self.head_dim)", "math.sqrt(embed_dim)", "scale"),
    "scale multiplied": ("/ math.sqrt(self.head_dim)", "* math.sqrt(self.head_dim)", "scale"),
    "softmax over the queries": ("softmax(dim=-1)", "softmax(dim=-2)", "softmax"),
    "softmax over the heads": ("softmax(dim=-1)", "softmax(dim=1)", "softmax"),
    "one key ahead": (".triu(1)", ".triu(2)", "causal-leak"),
    "strict triangle": (".triu(1)", ".triu(0)", "causal-blindness"),
    "zeros in place of -inf": ('float("-inf")', "0.0", "causal-leak mask-meaning"),
    "masked_fill thrown away": ("scores = scores.masked_fill", "scores.masked_fill", "causal-leak mask-meaning"),
    "polarity": ("masked_fill(future,", "masked_fill(~future,", "causal-leak causal-blindness mask-meaning"),
    "heads split without transposing": (
        "x.view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)",
        "x.view(batch, self.num_heads, length, self.head_dim)",
        "mixing causal-leak",
    ),
    "heads merged without transposing": (
        "(weights @ value).transpose(1, 2).reshape",
        "(weights @ value).reshape",
        "mixing causal-leak",
    ),
    "keys by the query's projection": ("self.key(x)", "self.query(x)", "mixing gradients"),
    "one projection for two": ("self.value = nn.Linear(embed_dim, embed_dim)", "self.value = self.key", "mixing"),
    "no output projection": ("return self.output(merged)", "return merged", "mixing gradients"),
    "dropout before the softmax": (
        "self.dropout(scores.softmax(dim=-1))",
        "self.dropout(scores).softmax(dim=-1)",
        "dropout",
    ),
    "dropout in evaluation": (
        "self.dropout(scores.softmax(dim=-1))",
        "nn.functional.dropout(scores.softmax(dim=-1), 0.1)",
        "dropout",
    ),
    "no gradient": ("query @ key.transpose", "query.detach() @ key.transpose", "gradients"),
    "a constant that overflows": ('float("-inf")', "-1e20", "precision"),
    "the batch size": ("x.view(batch, length, self", "x.view(2, -1, self", "robustness mixing"),
}
ALWAYS = ("no scale",)


def broken(old: str, new: str) -> tuple[str, str]:
    """The source with one replacement, and the line that it changed."""
    text = MODULE.read_text(encoding="utf-8")
    assert text.count(old) == 1
    source = text.replace(old, new)
    (line,) = [one.strip() for one in source.splitlines() if one not in text.splitlines()]
    return source, line


def verified(source: str):
    with harness.loaded(source, "textbook_attention") as names, harness.without_compile():
        return saccade.verify(
            names["TextbookAttention"], causal=True, arguments={"embed_dim": 48, "num_heads": 6}, isolated=False
        )


@pytest.mark.slow
def test_the_textbook_module_is_right():
    report = verified(MODULE.read_text(encoding="utf-8"))
    assert not [finding for finding in report.findings if finding.severity in ("error", "warning")], str(report)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in MUTATIONS]
)
def test_the_broken_line_is_named_by_the_first_error(name):
    old, new, families = MUTATIONS[name]
    source, line = broken(old, new)
    report = verified(source)
    assert report.errors, str(report)
    first = report.errors[0]
    assert first.family in families.split(), str(report)
    assert first.location is not None and first.location.code == line, str(report)
    assert source.splitlines()[first.location.line - 1].strip() == line
    assert len(report.errors) <= 1 + harness.MOST_OTHERS, str(report)
