"""The families of published models, a file each: what config.json says, the composition, the key map.

Begin with `bert.py`. Imports `nn` and what models have in common.
"""

from __future__ import annotations

from . import bart, bert, distilbert, electra, esm, gpt2, gpt_neo, llama, marian, patchtst, roberta, t5, vit, wav2vec2

FAMILIES = (
    bert.FAMILY,
    roberta.FAMILY,
    distilbert.FAMILY,
    electra.FAMILY,
    esm.FAMILY,
    gpt2.FAMILY,
    gpt_neo.FAMILY,
    llama.FAMILY,
    t5.FAMILY,
    bart.FAMILY,
    marian.FAMILY,
    vit.FAMILY,
    vit.DEIT,
    wav2vec2.FAMILY,
    patchtst.FAMILY,
)
