"""Reads what a diagram's SVG says: texts, numbers, groups, colours."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

SVG = "{http://www.w3.org/2000/svg}"


def root(diagram):
    return ElementTree.fromstring(diagram.svg)


def texts(element):
    return ["".join(text.itertext()) for text in element.iter(f"{SVG}text")]


def group(diagram, title):
    """The group whose title begins so."""
    for part in root(diagram).iter(f"{SVG}g"):
        named = part.find(f"{SVG}title")
        if named is not None and named.text.startswith(title):
            return part
    raise AssertionError(f"no group {title!r}")


def numbers(element):
    """The numbers with decimals among the texts, in order."""
    found = [text.replace("−", "-") for text in texts(element)]
    return [float(text) for text in found if re.fullmatch(r"-?\d+\.\d+", text)]


def fills(element, tag="rect"):
    return [part.get("fill") for part in element.iter(f"{SVG}{tag}")]
