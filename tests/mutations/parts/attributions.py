"""Faults in `saccade.attribution`: what a sum over the residual stream may forget, and what it may mix up."""

from __future__ import annotations

from ..fault import Fault

HOME = "src/saccade/see/attribution"
TESTS = ("tests/attribution/test_attribution.py", "tests/attribution/test_attributed_models.py")

FAULTS = (
    Fault(
        "against-sign",
        f"{HOME}/_logits.py",
        "sign = torch.tensor([1.0, -1.0]",
        "sign = torch.tensor([1.0, 1.0]",
        TESTS,
        "Of two tokens the sum of logits is split, not the difference.",
    ),
    Fault(
        "norm-constant",
        f"{HOME}/_steps.py",
        "    constant = None if bias is None else exact(bias)\n    if isinstance(norm, nn.BatchNorm1d)",
        "    constant = None\n    if isinstance(norm, nn.BatchNorm1d)",
        TESTS,
        "The bias of a norm is in no component.",
    ),
    Fault(
        "norm-mean",
        f"{HOME}/_steps.py",
        "return readout - readout.mean(-1, keepdim=True) if self.centred else readout",
        "return readout",
        TESTS,
        "Components keep the mean that a layer norm takes off.",
    ),
    Fault(
        "running-mean",
        f"{HOME}/_steps.py",
        "shift = exact(norm.running_mean) * gain",
        "shift = 0 * gain",
        TESTS,
        "A batch norm's mean is in no component.",
    ),
    Fault(
        "output-bias",
        f"{HOME}/_residual.py",
        "        *bias_step(attention.output.bias),\n",
        "",
        TESTS,
        "The bias of an output projection is in no component.",
    ),
    Fault(
        "projection-bias",
        f"{HOME}/_residual.py",
        "made = matrix_step(weight[rows], None if bias is None else bias[rows])",
        "made = matrix_step(weight[rows], None)",
        TESTS,
        "The bias of queries and keys is in no component.",
    ),
    Fault(
        "rotary-forgotten",
        f"{HOME}/_residual.py",
        "        *_turned(model.stack.positions_of(layer), record.rows[at]),\n",
        "",
        TESTS,
        "Queries and keys are not turned to their positions.",
    ),
    Fault(
        "rotary-other-way",
        f"{HOME}/_residual.py",
        "[:, 0, 0]).T)]",
        "[:, 0, 0]))]",
        TESTS,
        "Queries and keys are turned back.",
    ),
    Fault(
        "key-of-another-group",
        f"{HOME}/_residual.py",
        "number // (shape.query_heads // shape.key_heads)",
        "number % shape.key_heads",
        TESTS,
        "A head is given the key of another group.",
    ),
    Fault(
        "value-of-another-group",
        f"{HOME}/_residual.py",
        "grouped = wanted.unflatten(0, (len(sources.values), -1))",
        "grouped = wanted.unflatten(0, (-1, len(sources.values))).transpose(0, 1)",
        TESTS,
        "A head's sources are values of another group.",
    ),
    Fault(
        "gate-of-sources",
        f"{HOME}/_residual.py",
        "wanted = wanted * record.gave[attention.gate][0].sigmoid().view_as(wanted)",
        "wanted = wanted * 1.0",
        TESTS,
        "The split over source tokens leaves the gate out.",
    ),
    Fault(
        "later-norms",
        f"{HOME}/_residual.py",
        "record.read[block.feed_forward_norm][at]) if after else [])",
        "record.read[block.feed_forward_norm][at]) if not after else [])",
        TESTS,
        "Components do not pass through the norms after them.",
    ),
    Fault(
        "key-norm",
        f"{HOME}/_residual.py",
        "attention.key_norm if key else attention.query_norm",
        "attention.query_norm",
        TESTS,
        "Keys get the norm of queries.",
    ),
    Fault(
        "head-bias",
        f"{HOME}/_logits.py",
        "contributions[BIASES] = contributions[BIASES] + sign @ exact(vocabulary.bias.flatten()[rows])",
        "pass",
        TESTS,
        "The bias of the vocabulary is in no component.",
    ),
    Fault(
        "token-type",
        f"{HOME}/_residual.py",
        "        parts[TYPE] = exact(embedding.kind)\n",
        "        pass\n",
        TESTS,
        "The token type is counted as the token's own.",
    ),
)
