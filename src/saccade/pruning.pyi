from .make.pruning import (
    Pruning as Pruning,
    attention_flops as attention_flops,
    choose_heads as choose_heads,
    prune as prune,
)
