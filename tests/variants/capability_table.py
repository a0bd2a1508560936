"""The page of what each mechanism can and cannot do: `python tests/variants/capability_table.py` writes it."""

from __future__ import annotations

from pathlib import Path

from saccade.variants._table import capabilities

PAGE = Path(__file__).parents[2] / "docs" / "variants-table.md"
HEAD = """# What each variant can and cannot do

Written by `python tests/variants/capability_table.py` from what the code says of itself (`Traits`), which
`tests/variants/test_every_mechanism.py` holds to be true. L is the length, d the width of a head; other letters are the
mechanism's own parameters. Time and memory are those of a forward pass.

"""


def page() -> str:
    """The page, as it is committed."""
    return HEAD + capabilities() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: written")
