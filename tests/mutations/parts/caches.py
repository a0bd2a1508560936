"""Faults in the caches and modules of saccade.nn."""

from __future__ import annotations

from ..fault import Fault

LAYER, WINDOW = "src/saccade/operator/nn/cache/layer.py", "src/saccade/operator/nn/cache/window.py"
EQUALITY, SEQUENCES, BOUNDS = (
    "tests/nn/cache/test_equality.py",
    "tests/nn/cache/test_sequences.py",
    "tests/nn/cache/test_bounds.py",
)

FAULTS = (
    Fault(
        "cache-offset",
        LAYER,
        "start = self.lengths() - arriving.left",
        "start = self.lengths() * 0 - arriving.left",
        (EQUALITY,),
        "New tokens get the positions of the first ones.",
    ),
    Fault(
        "left-padding-slot",
        "src/saccade/operator/nn/cache/fitting.py",
        "first = np.broadcast_to(self._before - self._arriving.left, self._batch)",
        "first = np.broadcast_to(self._before, self._batch)",
        (EQUALITY, SEQUENCES),
        "Left-padded tokens are written behind a gap.",
    ),
    Fault(
        "reorder-lengths",
        LAYER,
        "self._choose_lengths(items.numpy())",
        "items.numpy()",
        (SEQUENCES,),
        "Beam search keeps the old lengths.",
    ),
    Fault(
        "items-bound",
        LAYER,
        "(items < 0) | (items >= batch)",
        "(items < 0) | (items > batch)",
        (BOUNDS, SEQUENCES),
        "An item just beyond the batch raises no clear error.",
    ),
    Fault(
        "rollback-halfway",
        "src/saccade/operator/nn/cache/layers.py",
        "layer._rolled_back(count)\n",
        "...\n",
        (SEQUENCES, BOUNDS),
        "A rollback that one layer refuses changes the layers before it.",
    ),
    Fault(
        "ring-slot",
        WINDOW,
        "self.sinks + (place - self.sinks) % self.ring",
        "self.sinks + place % self.ring",
        (EQUALITY,),
        "With sinks, a token is stored in another slot than it is looked for.",
    ),
    Fault(
        "ring-lasting",
        WINDOW,
        "(place >= after[:, None] - self.ring)",
        "(place > after[:, None] - self.ring)",
        (EQUALITY,),
        "The oldest token of a full ring is not written.",
    ),
    Fault(
        "window-kept",
        WINDOW,
        "recent = before - (self.window - 1) + np.arange(self.window - 1)",
        "recent = before - self.window + np.arange(self.window - 1)",
        (EQUALITY,),
        "A long chunk does not see the newest token of the cache.",
    ),
    Fault(
        "static-room",
        "src/saccade/operator/nn/cache/static.py",
        "if after.max(initial=0) > self.capacity:",
        "if after.max(initial=0) >= self.capacity:",
        (BOUNDS,),
        "The last slot can never be used.",
    ),
    Fault(
        "cache-bias-rows",
        "src/saccade/operator/nn/cache/fitting.py",
        "rows = (before - arriving.left)[:, None] + np.arange(arriving.rows)\n    return _picked",
        "rows = (before * 0)[:, None] + np.arange(arriving.rows)\n    return _picked",
        (EQUALITY,),
        "A dense bias of new tokens is that of the first rows.",
    ),
    Fault(
        "aligned-direction",
        "src/saccade/operator/nn/cache/aligning.py",
        "(np.arange(length) + by[:, None]) % length",
        "(np.arange(length) - by[:, None]) % length",
        ("tests/nn/test_mechanism.py",),
        "Items of unequal length are moved the wrong way.",
    ),
    Fault(
        "post-norm",
        "src/saccade/operator/nn/blocks.py",
        "return norm(x + dropped(self.dropout, layer(x)))",
        "return x + dropped(self.dropout, norm(layer(x)))",
        ("tests/nn/test_blocks.py",),
        "Post-norm blocks do not normalise the sum.",
    ),
    Fault(
        "torch-mask-inverted",
        "src/saccade/operator/nn/_torch_masks.py",
        "return ~given, None",
        "return given, None",
        ("tests/nn/test_from_torch.py", "tests/nn"),
        "True of PyTorch's masks is taken for attend.",
    ),
    Fault(
        "left-padding-position",
        "src/saccade/operator/nn/masking.py",
        "torch.from_numpy(-first)",
        "torch.from_numpy(first)",
        ("tests/nn/test_attention.py", "tests/nn"),
        "Left-padded tokens stand further ahead, not at 0.",
    ),
)
