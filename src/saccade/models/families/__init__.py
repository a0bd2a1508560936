"""The families of published models, a file each: what config.json says, the composition, the key map.

Begin with `bert.py`. Imports `nn` and what models have in common.
"""

from __future__ import annotations

from . import bert, esm, gat, gpt2, graphormer, patchtst

GRAPHS = (gat.FAMILY, graphormer.FAMILY)  # without published weights: `new_graph_model` begins them
FAMILIES = (bert.FAMILY, esm.FAMILY, gpt2.FAMILY, patchtst.FAMILY, *GRAPHS)
