"""The page of masks: a drawing of each, made by the mask itself."""

from __future__ import annotations

import inspect

import torch

import saccade
from saccade import Mask, PerHead

_LENGTH = 12
_CODE = f"""\
Causal()
Window(2, 0)
Window(2, 2)
Prefix(4)
Padding([9])
Documents([0] * 5 + [1] * 7)
Global([0, 6])
Dilated(3)
Strided(4)
Fixed(4)
Chunks(4)
Columns(4)
Blocks([[True, False, False], [True, True, False], [False, True, True]], size=4)
RandomBlocks(seed=3, size=2, count=1)
Edges([0, 2, 2, 7, 11], [1, 0, 2, 3, 5])
FromTensor(torch.eye({_LENGTH}, dtype=torch.bool).flip(0))
Predicate(lambda b, h, i, j: (i - j) % 3 == 0)
PerHead([Causal(), Window(1, 1)])
Causal() & Window(3, 0)
Window(2, 2) | Global([0])
~Window(1, 1)
Causal() & Documents([0] * 5 + [1] * 7)""".splitlines()
_HEAD = f"""# Masks

A mask says which query may look at which key. This page draws each class of mask on {_LENGTH} queries (down) and
{_LENGTH} keys (across); a filled cell attends. Masks combine with `&`, `|` and `~`. [The notebook on
masks](../notebooks/operator-and-masks.md) introduces them; [sparse patterns](../patterns.md) shows which published
models use which.

```python
from saccade import Causal, Window

print((Causal() & Window(3, 0)).picture(12, 12))
```
"""


def pages() -> dict[str, str]:
    """Markdown by its place on the site."""
    masks = [name for name in saccade.__all__ if _is_mask(getattr(saccade, name))]
    known = {"torch": torch, **{name: getattr(saccade, name) for name in masks}}
    drawn: dict[str, list[str]] = {}
    for code in _CODE:
        mask: Mask = eval(code, known)
        drawn.setdefault(type(mask).__name__, []).append(f"`{code}`\n\n{_drawing(mask)}")
    if missing := set(masks) - set(drawn):
        raise ValueError(f"no drawing of the masks {', '.join(sorted(missing))}: add them to {__file__}")
    sections = [_section(name, parts) for name, parts in drawn.items() if name in masks]
    combined = [part for name, parts in drawn.items() if name not in masks for part in parts]
    about = "`&` keeps the pairs that both masks keep, `|` those that either keeps, `~` those that the mask hides."
    sections.append("\n\n".join(["## Combined", about, *combined]))
    return {"reference/masks.md": "\n\n".join([_HEAD, *sections]) + "\n"}


def _section(name: str, parts: list[str]) -> str:
    about = (inspect.getdoc(getattr(saccade, name)) or "").partition("\n\n")[0].removesuffix("::")
    return "\n\n".join([f"## {name}", f"{about} See [`{name}`][saccade.{name}].", *parts])


def _drawing(mask: Mask) -> str:
    head = {"head": 1} if isinstance(mask, PerHead) else {}
    picture = mask.picture(_LENGTH, _LENGTH, **head)
    return f'<div class="drawing mask">{picture._repr_html_()}</div>'


def _is_mask(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Mask) and value is not Mask
