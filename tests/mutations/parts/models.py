"""Faults in variants, batching, acceleration and generation."""

from __future__ import annotations

from ..fault import Fault

SIGMOID, DIFFERENTIAL = "src/saccade/operator/variants/sigmoid.py", "src/saccade/operator/variants/differential.py"
PACKING, PADDING = "src/saccade/operator/batching/packing.py", "src/saccade/operator/batching/padding.py"

FAULTS = (
    Fault(
        "sigmoid-gradient",
        SIGMOID,
        "    dq *= problem.scale\n",
        "",
        ("tests/variants/test_sigmoid.py",),
        "The gradient of the queries lacks the scale.",
    ),
    Fault(
        "sigmoid-count",
        SIGMOID,
        "seen = shown if seen is None else seen & shown",
        "seen = shown if seen is None else seen",
        ("tests/variants/test_sigmoid.py",),
        "Keys that a bias hides are counted.",
    ),
    Fault(
        "differential-factor",
        DIFFERENTIAL,
        "return (out * (1 - initial)).to(one.dtype)",
        "return out.to(one.dtype)",
        ("tests/variants/test_differential.py",),
        "The output is not multiplied by 1 - lambda.",
    ),
    Fault(
        "differential-dropout",
        DIFFERENTIAL,
        "dropout=another(dropout)",
        "dropout=dropout",
        ("tests/variants/test_differential.py", "tests/variants"),
        "Both maps drop the same weights.",
    ),
    Fault(
        "blocks-own",
        "src/saccade/operator/variants/block_topk.py",
        "open_ = number < own if limits is None",
        "open_ = number <= own if limits is None",
        ("tests/variants/test_block_topk.py",),
        "The own block is read twice.",
    ),
    Fault(
        "packed-positions",
        PACKING,
        "np.arange(sum(lengths)) - np.repeat(starts, lengths)",
        "np.arange(sum(lengths)) - 0 * np.repeat(starts, lengths)",
        ("tests/batching/test_packing.py",),
        "Positions go on from one sequence to the next.",
    ),
    Fault(
        "left-side",
        PADDING,
        "return np.arange(length) >= length - np.array(lengths)[:, None]",
        "return np.arange(length) > length - np.array(lengths)[:, None]",
        ("tests/batching/test_padding.py",),
        "The first token of a left-padded row is padding.",
    ),
    Fault(
        "padded-positions",
        PADDING,
        "np.cumsum(subset.table.host, axis=1) - 1, 0",
        "np.cumsum(subset.table.host, axis=1), 0",
        ("tests/batching/test_padding.py",),
        "Left-padded positions begin at 1.",
    ),
    Fault(
        "token-budget",
        "src/saccade/operator/batching/sampler.py",
        "if (at + 1 - start) * longest > self.tokens:",
        "if (at - start) * longest > self.tokens:",
        ("tests/batching/test_sampler.py",),
        "Batches hold one item more than the budget of tokens.",
    ),
    Fault(
        "rank",
        "src/saccade/operator/batching/sampler.py",
        "return [step[self.rank].tolist() for step",
        "return [step[0].tolist() for step",
        ("tests/batching/test_sampler.py",),
        "Every process gets the same batches.",
    ),
    Fault(
        "acceleration-stays",
        "src/saccade/acceleration/_acceleration.py",
        "held.blocks.close()",
        "...",
        ("tests/acceleration/test_acceleration.py",),
        "PyTorch's function stays replaced.",
    ),
    Fault(
        "acceleration-nested",
        "src/saccade/acceleration/_acceleration.py",
        "held.on = tuple(run for run in held.on if run is not self)",
        "held.on = ()",
        ("tests/acceleration/test_acceleration.py",),
        "The end of an inner block switches the outer one off.",
    ),
    Fault(
        "top-p",
        "src/saccade/make/models/decoding/sampling.py",
        "reached_before = probabilities.cumsum(-1) - probabilities >= p",
        "reached_before = probabilities.cumsum(-1) >= p",
        ("tests/models/test_generation.py",),
        "The token that reaches p is dropped.",
    ),
    Fault(
        "top-k-ties",
        "src/saccade/make/models/decoding/sampling.py",
        "logits < logits.topk(k).values[..., -1:]",
        "logits <= logits.topk(k).values[..., -1:]",
        ("tests/models/test_generation.py",),
        "The k-th token is dropped.",
    ),
    Fault(
        "full-context",
        "src/saccade/make/models/decoding/generating.py",
        "key=lambda n: cache.reach(length + n)",
        "key=lambda n: cache.reach(length + n + 1)",
        ("tests/models/test_generation.py",),
        "Generation stops one token too early.",
    ),
)
