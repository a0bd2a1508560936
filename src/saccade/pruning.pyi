from .make.pruning import (
    Comparison as Comparison,
    PrunedLayer as PrunedLayer,
    PrunedMultiheadAttention as PrunedMultiheadAttention,
    Pruning as Pruning,
    attention_flops as attention_flops,
    choose_heads as choose_heads,
    compare_pruned as compare_pruned,
    prune as prune,
)
