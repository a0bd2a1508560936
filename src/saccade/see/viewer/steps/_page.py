"""The page of steps: one self-contained HTML file, for use offline.

Its script is `step.js`, made from `client/src/step/page.ts`; a browser without scripts shows the text.
"""

from __future__ import annotations

from html import escape
from importlib import resources
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

from .._report import GENERATOR, embedded_json
from ._text import steps_as_text

if TYPE_CHECKING:
    from ...inspection import Steps

HEIGHT = 860  # pixels of the frame in a notebook; the page scrolls


def render_steps(steps: Steps, version: str = "") -> str:
    """One offline HTML page that shows steps. Everything from the text is escaped.

    Example:
        >>> from saccade.inspection import example
        >>> from saccade.viewer import render_steps
        >>> page = render_steps(example())
        >>> page[:15], "Attention by hand" in page
        ('<!doctype html>', True)
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_asset("step.html.j2")).render(
        generator=f"{GENERATOR} {version}".strip(),
        title=steps.title,
        text=steps_as_text(steps),
        data=embedded_json(steps.as_json()),
        script=Markup(step_script().replace("</script", "<\\/script")),
    )


def framed_steps(steps: Steps) -> str:
    """An HTML element that shows steps in a notebook. Its styles and script apply only inside its frame."""
    return (
        f'<iframe title="{escape(steps.title)}" sandbox="allow-scripts" srcdoc="{escape(render_steps(steps))}" '
        f'style="width:100%;height:{HEIGHT}px;border:0"></iframe>'
    )


def step_script() -> str:
    """The script that shows steps in a page: an ES module."""
    return _asset("step.js")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
