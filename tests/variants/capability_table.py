"""The page of what each mechanism can and cannot do: `python tests/variants/capability_table.py` writes it."""

from __future__ import annotations

from pathlib import Path

from saccade.variants._table import capabilities

PAGE = Path(__file__).parents[2] / "docs" / "variants-table.md"
HEAD = """# What each variant can and cannot do

For people who choose a mechanism of attention ([how to choose](variants.md)). L is the length, d the width of a head;
other letters are the mechanism's own parameters. Time and memory are those of a forward pass.

`python tests/variants/capability_table.py` writes this page from the code (`Traits`);
`tests/variants/test_every_mechanism.py` tests that the entries are true.

"""


def page() -> str:
    """The page, as it is committed."""
    return HEAD + capabilities() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: written")
