"""Colours by role, light and dark.

Queries are blue, keys orange, values green and weights magenta in every picture. The hues are those of Okabe and Ito,
"Color Universal Design" (2008), which readers with any colour vision tell apart, darkened or lightened until text
in them stands out from its ground by 4.5 to 1 (WCAG 2.2, 1.4.3).
"""

from __future__ import annotations

THEMES = ("auto", "light", "dark")

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1b1f24",
    "soft": "#57606a",  # secondary text: shapes, captions
    "line": "#6e7781",  # arrows
    "edge": "#c4ccd4",  # other borders
    "wash": "#f3f5f7",
    "hidden": "#e4e8ec",
    "query": "#0a5cb5",
    "query-wash": "#dfedfb",
    "key": "#a34a00",
    "key-wash": "#fdebd7",
    "value": "#08704f",
    "value-wash": "#d9f3e8",
    "weight": "#a32a67",
    "weight-wash": "#fbe6f0",
    "heat": "#cf3f87",
    "pair": "#b8467f",
}
DARK = {
    "paper": "#0f1318",
    "ink": "#e9edf2",
    "soft": "#a7b1bc",
    "line": "#8c97a3",
    "edge": "#424c57",
    "wash": "#1a2028",
    "hidden": "#262d36",
    "query": "#7db9fb",
    "query-wash": "#11304f",
    "key": "#ffb26b",
    "key-wash": "#482b0e",
    "value": "#62d8b0",
    "value-wash": "#0d3d2f",
    "weight": "#f593c3",
    "weight-wash": "#47193a",
    "heat": "#c23b80",
    "pair": "#d9669f",
}
# Heads in order: strokes and text, and the background of their boxes.
_HEADS = (
    ("#0a5cb5", "#dfedfb", "#7db9fb", "#11304f"),
    ("#a34a00", "#fdebd7", "#ffb26b", "#482b0e"),
    ("#08704f", "#d9f3e8", "#62d8b0", "#0d3d2f"),
    ("#a32a67", "#fbe6f0", "#f593c3", "#47193a"),
    ("#6b4fbb", "#ece7fa", "#baa6ff", "#2c2255"),
    ("#7a6200", "#f8efc4", "#e2cb55", "#3a3208"),
    ("#006d7d", "#d6f0f4", "#5fd3e4", "#08363e"),
    ("#b3261e", "#fbe5e3", "#ff9a92", "#4a1714"),
)
HEADS = len(_HEADS)
for _number, (_stroke, _wash, _dark, _dark_wash) in enumerate(_HEADS):
    LIGHT |= {f"head{_number}": _stroke, f"head{_number}-wash": _wash}
    DARK |= {f"head{_number}": _dark, f"head{_number}-wash": _dark_wash}


def head_role(number: int) -> str:
    """The colour of a head, counted from 0; colours repeat after eight."""
    return f"head{number % HEADS}"
