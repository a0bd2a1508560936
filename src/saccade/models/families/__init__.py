"""The families of published models, a file each: what config.json says, the composition, the key map.

Begin with `bert.py`. Imports `nn` and what models have in common.
"""

from __future__ import annotations

from . import bart, bert, gpt2, marian, t5

FAMILIES = (bert.FAMILY, gpt2.FAMILY, t5.FAMILY, bart.FAMILY, marian.FAMILY)
