"""The table of model families, from the families themselves."""

from __future__ import annotations

from saccade.models.families import FAMILIES

_HEAD = """# Model families

Every `model_type` that `saccade.models.load` reads without other libraries, and the heads it builds on the body. A
head's name is what `load(..., head=)` takes; the class is what config.json names under `architectures`.
[Published models](../models/README.md) says what is covered and what is not.

| `model_type` | class | heads |
|---|---|---|
"""


def pages() -> dict[str, str]:
    """Markdown by its place on the site."""
    rows = []
    for family in FAMILIES:
        heads = ", ".join(f"`{name}`" for name in family.heads) or "-"
        rows += [f"| `{kind}` | `{begin}{family.body}` | {heads} |" for kind, begin in family.types.items()]
    return {"reference/families.md": _HEAD + "\n".join(rows) + "\n"}
