"""The families of published models, a file each: what config.json says, the composition, the key map.

Begin with `bert.py`. Imports `nn` and what models have in common.
"""

from __future__ import annotations

from . import (
    bart,
    bert,
    distilbert,
    electra,
    esm,
    gat,
    gpt2,
    gpt_neo,
    graphormer,
    llama,
    marian,
    patchtst,
    roberta,
    t5,
    vit,
    wav2vec2,
)

GRAPHS = (gat.FAMILY, graphormer.FAMILY)  # without published weights: `new_graph_model` begins them
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
    *GRAPHS,
)
