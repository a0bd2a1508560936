"""The pictures of the documentation that `saccade diagram` makes: file and arguments."""

from __future__ import annotations

from pathlib import Path

from pages import ROOT

from saccade.cli import main

FAMILIES = ("bert", "gpt2", "llama", "t5", "bart", "marian", "vit", "wav2vec2", "esm", "patchtst", "gat", "graphormer")
DIAGRAMS = {
    "attention": ["attention"],
    "attention-plain": ["attention", "--plain"],
    "multi-head": ["multi-head"],
    "block-pre-norm": ["block"],
    "block-post-norm": ["block", "--model", "vaswani"],
    "block-graph": ["block", "--model", "gat"],
    "transformer": ["transformer", "--model", "vaswani"],
    "decoder-step": ["decoder-step"],
    "variants": ["variants"],
    **{f"model-{name}": ["transformer", "--model", name] for name in FAMILIES},
}


def path_of(name: str) -> Path:
    return ROOT / "docs" / "figures" / f"{name}.svg"


def draw(name: str, target: Path) -> None:
    assert main(["diagram", *DIAGRAMS[name], "--out", str(target)]) == 0
