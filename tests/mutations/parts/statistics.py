"""Faults in the statistics."""

from __future__ import annotations

from ..fault import Fault

TILED, HEADS = "src/saccade/operator/_statistics/_tiled.py", "src/saccade/operator/_statistics/_heads.py"
PLACES, HISTOGRAMS = "src/saccade/operator/_statistics/_rows.py", "src/saccade/operator/_statistics/_histograms.py"
NUMBERS, POISON = "tests/statistics/test_numbers.py", "tests/statistics/test_poison.py"
BINS = "tests/statistics/test_histograms.py"

FAULTS = (
    Fault(
        "entropy-rescaling",
        TILED,
        "self.shifted = carry * (self.shifted + self.total * rise) +",
        "self.shifted = carry * self.shifted +",
        (NUMBERS,),
        "Entropy is wrong where the largest logit rises.",
    ),
    Fault(
        "previous-next",
        TILED,
        "(self.place, self.place - 1, self.place + 1, first)",
        "(self.place, self.place + 1, self.place - 1, first)",
        (NUMBERS,),
        "The previous and the next key are exchanged.",
    ),
    Fault(
        "distance-sign",
        TILED,
        "(self.place[..., None] - keys.index).abs()",
        "(self.place[..., None] - keys.index)",
        (NUMBERS,),
        "Distances ahead and back cancel.",
    ),
    Fault(
        "sink-share",
        TILED,
        "return log_total + more, torch.exp(-more), torch.exp(ahead - more)",
        "return log_total + more, torch.ones_like(more), torch.exp(ahead - more)",
        (NUMBERS,),
        "The weights are not lowered by the sink's share.",
    ),
    Fault(
        "first-bad-key",
        TILED,
        "at = keys.start + bad.to(torch.uint8).argmax(-1)",
        "at = bad.to(torch.uint8).argmax(-1)",
        (POISON, NUMBERS),
        "The first NaN is counted from its tile.",
    ),
    Fault(
        "ties",
        TILED,
        "torch.topk((ordered << 32) - places,",
        "torch.topk((ordered << 32) + places,",
        (NUMBERS, "tests/statistics"),
        "Of equal weights the last key comes first.",
    ),
    Fault(
        "native-previous-next",
        "src/saccade/operator/_statistics/_fused.py",
        '"previous": numbers.previous, "next": numbers.next',
        '"previous": numbers.next, "next": numbers.previous',
        (NUMBERS,),
        "The kernels' previous and next key are exchanged.",
    ),
    Fault(
        "padded-rows-inverted",
        PLACES,
        "return ~mask.queries.contains",
        "return mask.queries.contains",
        (NUMBERS, "tests/statistics"),
        "Averages are taken over padded rows and no others.",
    ),
    Fault(
        "padded-rows-joined",
        PLACES,
        "torch.stack(torch.broadcast_tensors(*some)).any(0)",
        "torch.stack(torch.broadcast_tensors(*some)).all(0)",
        ("tests/statistics/test_identities.py",),
        "A row that only one of two paddings names is averaged.",
    ),
    Fault(
        "norm-of-padding",
        HEADS,
        "torch.where(rows, norms, 0.0).sum((0, 2)) / rows.sum((0, 2))",
        "torch.where(rows, norms, 0.0).mean((0, 2))",
        (NUMBERS, "tests/statistics"),
        "Padded rows count as vectors of norm 0.",
    ),
    Fault(
        "octave-bin",
        HISTOGRAMS,
        "(torch.frexp(weights).exponent + OCTAVES)",
        "(torch.frexp(weights).exponent + OCTAVES - 1)",
        (BINS,),
        "Weights fall one octave too low.",
    ),
    Fault(
        "last-bin",
        HISTOGRAMS,
        "place.clamp_(0, BINS - 1)",
        "place.clamp_(0, BINS)",
        (BINS,),
        "The largest entry falls out of the histogram.",
    ),
)
