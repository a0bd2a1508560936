"""Results as text."""

from __future__ import annotations

from collections.abc import Sequence


def signed(value: float) -> str:
    """+1.234, -0.012."""
    return f"{value:+.3f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a name, a number and a remark; names flush left and numbers flush right."""
    names, numbers = (max(len(row[i]) for row in rows) for i in (0, 1))
    return [f"  {name:<{names}}  {number:>{numbers}}  {said}".rstrip() for name, number, said in rows]


def listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])
