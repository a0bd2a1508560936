"""Attention in other forms: exact sparse patterns, and mechanisms instead of softmax attention.

Begin with `patterns.py` and `_mechanism.py`; each mechanism is one file with its paper. Imports the operator.
"""

from __future__ import annotations

from . import feature_maps
from ._causal import LinearState as LinearState
from ._causal_padding import CausalPadding as CausalPadding, causal_padding_of as causal_padding_of
from ._mechanism import HeadSizes, Mechanism, MechanismConfig, Recurrent, State as State, Traits
from ._parse import parse_from
from ._random_features import draw_projection, random_features
from .block_topk import BlockTopKAttention as BlockTopKAttention, BlockTopKConfig, block_topk_attention, chosen_blocks
from .differential import (
    DifferentialAttention as DifferentialAttention,
    DifferentialConfig,
    differential_attention,
    initial_lambda,
)
from .gated import GatedAttention as GatedAttention, GatedConfig, gated_attention
from .gated_delta import (
    DeltaState as DeltaState,
    GatedDeltaConfig,
    GatedDeltaRule as GatedDeltaRule,
    gated_delta_rule,
    gated_delta_step,
)
from .linear import LinearAttention as LinearAttention, LinearConfig, linear_attention, linear_step
from .linformer import LinformerAttention as LinformerAttention, LinformerConfig, linformer_attention
from .longformer import LongformerAttention as LongformerAttention, LongformerConfig
from .nystrom import NystromAttention as NystromAttention, NystromConfig, nystrom_attention
from .performer import (
    PerformerAttention as PerformerAttention,
    PerformerConfig,
    PerformerState as PerformerState,
    performer_attention,
)
from .reformer import ReformerAttention as ReformerAttention, ReformerConfig, lsh_attention
from .sigmoid import SigmoidAttention as SigmoidAttention, SigmoidConfig, sigmoid_attention

__all__ = [
    "MECHANISMS",
    "BlockTopKConfig",
    "DifferentialConfig",
    "GatedConfig",
    "GatedDeltaConfig",
    "HeadSizes",
    "LinearConfig",
    "LinformerConfig",
    "LongformerConfig",
    "Mechanism",
    "MechanismConfig",
    "NystromConfig",
    "PerformerConfig",
    "Recurrent",
    "ReformerConfig",
    "SigmoidConfig",
    "Traits",
    "block_topk_attention",
    "chosen_blocks",
    "differential_attention",
    "draw_projection",
    "feature_maps",
    "gated_attention",
    "gated_delta_rule",
    "gated_delta_step",
    "initial_lambda",
    "linear_attention",
    "linear_step",
    "linformer_attention",
    "lsh_attention",
    "nystrom_attention",
    "parse",
    "performer_attention",
    "random_features",
    "sigmoid_attention",
]

MECHANISMS: tuple[type[MechanismConfig], ...] = (
    LinearConfig,
    GatedDeltaConfig,
    PerformerConfig,
    ReformerConfig,
    BlockTopKConfig,
    LongformerConfig,
    LinformerConfig,
    NystromConfig,
    SigmoidConfig,
    DifferentialConfig,
    GatedConfig,
)
"""Every mechanism there is, in the order of the table.

Example:
    >>> import saccade
    >>> [mechanism.name for mechanism in saccade.variants.MECHANISMS][:3]
    ['linear', 'gated-delta', 'performer']
"""


def parse(text: str, length: int | None = None) -> MechanismConfig:
    """The configuration written as `name` or `name:field=value,...`, such as "linear:feature_map=relu".

    Args:
        text: the name of a mechanism, and its fields.
        length: with a length, unset fields take what is usual for sequences of up to so many tokens; otherwise their
            defaults.

    Raises:
        ValueError: no such mechanism or field, or a value it cannot have; the message lists what is possible.

    Example:
        >>> import saccade
        >>> saccade.variants.parse("linear:feature_map=relu")
        LinearConfig(feature_map='relu', normalise=True)
        >>> saccade.variants.parse("linformer", length=512)
        LinformerConfig(length=512, rank=128, shared='none')
    """
    return parse_from(text, MECHANISMS, length)
