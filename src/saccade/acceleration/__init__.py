"""Unchanged models on Saccade's kernels: their calls of F.scaled_dot_product_attention, and their other layers.

Begin with `_acceleration.py`, the switch. Calls: `_answers.py` and `_rules.py`. Layers: `_model.py` puts them in place,
`_finding.py` recognises them, `_fused_layers.py`, `_joined_projections.py` and `_padded.py` compute them,
`_methods.py` sets them on modules. `_rounding.py` measures 8 bits on samples, by the figures of `_output_errors.py`.
Imports the operator, `_hooks` and products.
"""

from __future__ import annotations

from ._acceleration import Acceleration, accelerate
from ._output_errors import OutputError
from ._rounding import LayerRounding, Rounding

__all__ = ["Acceleration", "LayerRounding", "OutputError", "Rounding", "accelerate"]
