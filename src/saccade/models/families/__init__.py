"""The families of published models, a file each: what config.json says, the composition, the key map.

Begin with `bert.py`. Imports `nn` and what models have in common.
"""

from __future__ import annotations

from . import bert, distilbert, electra, gpt2, gpt_neo, llama, roberta

FAMILIES = (
    bert.FAMILY,
    roberta.FAMILY,
    distilbert.FAMILY,
    electra.FAMILY,
    gpt2.FAMILY,
    gpt_neo.FAMILY,
    llama.FAMILY,
)
