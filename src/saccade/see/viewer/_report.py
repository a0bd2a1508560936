"""The report: one self-contained HTML file, for use offline.

Weights are stored as bytes of hundredths, only those on visible words, so every number on the page equals that in the
sentences. A long text is cut to the most surprising part, which the page notes.
"""

from __future__ import annotations

import base64
import json
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from markupsafe import Markup

from ..inspection import ROLE_NAMES, short_number

if TYPE_CHECKING:
    from ..inspection import Look, MapFinding

GENERATOR = "Saccade"
MOST_WEIGHTS = 1_500_000  # one byte each
MOST_IN_NOTEBOOK = 200_000  # a notebook stores its outputs
NOTEBOOK_HEIGHT = 720  # pixels; the report scrolls
_SHORT = {"previous": "prev.", "delimiter": "delim.", "duplicate": "dupl.", "repeat": "rep."}
STEPS = {"previous": -1, "next": 1, "self": 0}
MAIN = 0.3  # least weight that shows a finding about an average
_SIZES = ((30, "short"), (90, "middle"))


def render_report(look: Look, version: str, *, most: int | None = None) -> str:
    """One offline HTML page that shows a look. Everything from the text is escaped.

    Args:
        version: of Saccade, for the page's generator tag.
        most: the largest number of weights in the page.

    Example:
        >>> import saccade
        >>> from saccade.inspection import look, open_model
        >>> from saccade.viewer import render_report
        >>> page = render_report(look(open_model(), "The cat sat on the mat."), saccade.__version__)
        >>> page[:15], "looks mostly at" in page
        ('<!doctype html>', True)
    """
    columns = look.columns(_most_words(look, MOST_WEIGHTS if most is None else most))
    heads = [_head(look, layer, head) for layer, head in look.seen.places()]
    place = {word: i for i, word in enumerate(columns)}
    focus = {"layer": look.layer, "head": look.head, "query": place.get(look.query, len(columns) - 1)}
    return _template().render(
        generator=f"{GENERATOR} {version}",
        title=_title(look.seen.text),
        css=Markup(_asset("report.css")),
        script=Markup(_asset("report.js")),
        data=embedded_json(_data(look, columns, heads, focus)),
        facts=_facts(look),
        passage=_passage(look, columns),
        size=next((name for most, name in _SIZES if len(columns) <= most), "long"),
        first=" ".join(f"Note: {note}." for note in (look.note, look.other_layers, look.roles_note) if note),
        note=_note(look, columns),
        outside=list(look.outside),
        causal=look.seen.causal,
        around=list(dict.fromkeys(word.label for word in look.seen.words if word.special)),
        findings=[{"sentence": f.sentence, "link": _link(look, f, place)} for f in look.findings],
        heads=heads,
        columns=look.seen.heads,
        span="" if look.is_all(columns) else look.part(columns).capitalize(),
        focus={**focus, "name": f"{look.layer}.{look.head}"},
        rules=_rules(look.roles),
        measured_on=(look.roles or {}).get("text", {}),
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_asset("report.html.j2"))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def embedded_json(data: dict[str, Any]) -> Markup:
    """JSON that cannot close its script element."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _data(look: Look, columns: list[int], heads: list[dict[str, Any]], focus: dict[str, Any]) -> dict[str, Any]:
    return {
        "words": [look.seen.words[i].label for i in columns],
        "breaks": look.breaks(columns),
        "causal": look.seen.causal,
        "heads": [{"layer": h["layer"], "head": h["head"], "about": h["about"]} for h in heads],
        "focus": focus,
        "weights": base64.b64encode(_hundredths(look, columns)).decode("ascii"),
    }


def _hundredths(look: Look, columns: list[int]) -> bytes:
    """The rows of each head, the lower triangle or the square, one byte a weight."""
    everything = np.ones((len(columns), len(columns)), dtype=bool)
    q, k = np.nonzero(np.tril(everything) if look.seen.causal else everything)
    at = np.array(columns)
    layer, head = np.array(list(look.seen.places())).T
    w = look.seen.weights[layer[:, None], head[:, None], at[q], at[k]].astype(np.float64)
    return np.floor(w * 100 + 0.5).clip(0, 100).astype(np.uint8).tobytes()


def _most_words(look: Look, most: int) -> int:
    cells = most / look.seen.count * (2 if look.seen.causal else 1)
    return max(1, int(cells**0.5) - len(look.columns(1)))


def _head(look: Look, layer: int, head: int) -> dict[str, Any]:
    role = look.measured(layer, head)
    entropy = f"{look.habits['entropy'][layer, head]:.2f}"
    out = {"layer": layer, "head": head, "name": f"{layer}.{head}", "entropy": entropy, "mixed": role is None}
    if role is None:
        unknown = dict.fromkeys(("role", "short", "decided_by", "measured", "here"), "")
        return {**out, **unknown, "about": f"Entropy {entropy} nats in this text"}
    value = look.above(role["decided_by"], layer, head)
    here = "" if value is None else short_number(value)
    measured, decided_by = short_number(look.deciding(role)), ROLE_NAMES[role["decided_by"]]
    what = f"mixed, nearest to {decided_by}" if role["role"] == "mixed" else decided_by
    about = (
        f"{what[0].upper()}{what[1:]}: {measured} above chance when measured"
        + (f", {here} in this text" if here else "")
        + f". Entropy {entropy} nats."
    )
    return {
        **out,
        "role": ROLE_NAMES[role["role"]],
        "short": _SHORT.get(role["role"], role["role"]),
        "mixed": role["role"] == "mixed",
        "decided_by": decided_by,
        "measured": measured,
        "here": here,
        "about": about,
    }


def _facts(look: Look) -> str:
    map_ = look.seen
    parts = [
        f"{look.words:,} words and marks",
        f"{look.pieces:,} tokens",
        look.model,
        f"{map_.layers} layers × {map_.heads} heads",  # noqa: RUF001
    ]
    return " · ".join([*parts, look.source] if look.source else parts)


def _title(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


def _passage(look: Look, columns: list[int]) -> list[dict[str, Any]]:
    """The text in runs: words with their number on the page, and the text between them."""
    words, text = look.seen.words, look.seen.text
    runs: list[dict[str, Any]] = []

    def whole_at(i: int) -> int:
        return look.seen.at[i] if look.seen.at else i

    def between(piece: str) -> None:
        runs.append({"i": None, "text": piece, "breaks": False, "special": False, "touches": ""})

    def touching(i: int) -> list[str]:
        """The sides on which no blank separates this word from its neighbour."""
        beside = [(a, b) for a, b in ((i - 1, i), (i, i + 1)) if a >= 0 and b < len(columns)]
        return [
            "left" if b == i else "right"
            for a, b in beside
            if whole_at(columns[b]) == whole_at(columns[a]) + 1
            and words[columns[a]].stop == words[columns[b]].start
            and not (words[columns[a]].special or words[columns[b]].special)
        ]

    for i, at in enumerate(columns):
        word = words[at]
        if i and whole_at(at) != whole_at(columns[i - 1]) + 1:
            between(" … ")
        line_break = not word.special and not word.text.strip("\n")
        shown = word.label if line_break or word.special else word.text
        touches = "".join(f" touches-{side}" for side in touching(i))
        runs.append({"i": i, "text": shown, "breaks": line_break, "special": word.special, "touches": touches})
        if not word.special and i + 1 < len(columns) and whole_at(columns[i + 1]) == whole_at(at) + 1:
            between(text[word.stop : words[columns[i + 1]].start])
    if whole_at(columns[-1]) < len(words if look.whole is None else look.whole.words) - 1:
        between(" …")
    return runs


def _note(look: Look, columns: list[int]) -> str:
    if look.is_all(columns):
        return ""
    words = f"This page holds the {look.part(columns)}, read in the context of the whole text"
    about = (
        "Sentences and averages are about the whole text. A sentence without a link is about words outside this page."
    )
    return f"{words}: the rest of each row is on other words. {about}"


def _link(look: Look, finding: MapFinding, place: dict[int, int]) -> str:
    """The link to the place of the page that shows the finding, as layer.head.word; "" if the page does not show it."""
    if finding.layer is None:
        return ""
    pairs = _pairs(look, finding, place)
    w = look.seen.weights[finding.place]
    best = max(pairs, key=lambda pair: w[pair], default=None)
    if best is None or (len(pairs) > 1 and w[best] < MAIN):
        return ""
    return f"{finding.layer}.{finding.head}.{place[best[0]]}"


def _pairs(look: Look, finding: MapFinding, place: dict[int, int]) -> list[tuple[int, int]]:
    """(query word, key word) on the page for each pair of a finding."""
    map_, key = look.seen, finding.key
    rows = [i for i in place if not map_.words[i].special]
    if finding.query is not None and key is not None:
        return [(finding.query, key)] if {finding.query, key} <= place.keys() else []
    if finding.kind in STEPS:
        pairs = [(i, i + STEPS[finding.kind]) for i in rows]
        return [(q, k) for q, k in pairs if k in rows and look.number(k) - look.number(q) == STEPS[finding.kind]]
    return [(i, key) for i in rows if i != key] if key is not None and key in place else []


def _rules(roles: dict[str, Any] | None) -> list[str]:
    out = []
    for rule in (roles or {}).get("rules", ()):
        names = [ROLE_NAMES[name] for name in rule["roles"]]
        least, where = short_number(rule["at_least"]), rule["measured_on"]
        of = " of the largest possible entropy" if rule["roles"] == ["broad"] else ", whichever is larger"
        out.append(f"{' or '.join(names)}: at least {least}{of}, on {where}")
    return out


def framed(look: Look) -> str:
    """An HTML element that shows a look in a notebook. Its styles and script apply only inside its frame."""
    page = render_report(look, "in a notebook", most=MOST_IN_NOTEBOOK)
    title = f"What {look.model} attends to"
    return (
        f'<iframe title="{escape(title)}" sandbox="allow-scripts" srcdoc="{escape(page)}" '
        f'style="width:100%;height:{NOTEBOOK_HEIGHT}px;border:0"></iframe>'
    )
