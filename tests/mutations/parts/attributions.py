"""Faults in `saccade.attribution`: what a sum over the residual stream may forget, and what it may mix up."""

from __future__ import annotations

from ..fault import Fault

HOME = "src/saccade/see/attribution"
TESTS = (
    "tests/attribution/test_attribution.py",
    "tests/attribution/test_attributed_models.py",
    "tests/attribution/test_any_stream.py",
)

FAULTS = (
    Fault(
        "against-sign",
        f"{HOME}/_logits.py",
        "ours[chosen] - ours[other])[None]",
        "ours[chosen] + ours[other])[None]",
        TESTS,
        "Of two tokens the sum of logits is split, not the difference.",
    ),
    Fault(
        "norm-mean",
        f"{HOME}/_traced_run.py",
        'centred = x if name == "rms_norm" else x - x.mean(axes, keepdim=True)',
        'centred = x if name == "rms_norm" else x - x.mean(axes, keepdim=True).detach()',
        TESTS,
        "Components keep the mean that a layer norm takes off.",
    ),
    Fault(
        "running-mean",
        f"{HOME}/_traced_run.py",
        'self._leaf("added", constant.view(shape))',
        "constant.view(shape)",
        TESTS,
        "A batch norm's constant is in no component.",
    ),
    Fault(
        "norm-constant",
        f"{HOME}/_traced_run.py",
        'return out if bias is None else out + self._leaf("added", bias)',
        "return out if bias is None else out + bias",
        TESTS,
        "The bias of a norm is in no component.",
    ),
    Fault(
        "projection-bias",
        f"{HOME}/_traced_run.py",
        'return out + self._leaf("added", bias.view(shape))',
        "return out + bias.view(shape)",
        TESTS,
        "The bias of a linear layer is in no component.",
    ),
    Fault(
        "scale-of-norms",
        f"{HOME}/_traced_run.py",
        "            return _detached(func(*args, **kwargs))\n",
        "            return func(*args, **kwargs)\n",
        TESTS,
        "A norm of another library ends the stream.",
    ),
    Fault(
        "key-of-another-group",
        f"{HOME}/_why.py",
        "(0, place[1] // group, j)",
        "(0, place[1] % group, j)",
        TESTS,
        "A head is given the key of another group.",
    ),
    Fault(
        "value-of-another-group",
        f"{HOME}/_contributions.py",
        "grouped = wanted.unflatten(0, (call.value.shape[1], -1))",
        "grouped = wanted.unflatten(0, (-1, call.value.shape[1])).transpose(0, 1)",
        TESTS,
        "A head's sources are values of another group.",
    ),
    Fault(
        "gates-as-layers",
        f"{HOME}/_stream.py",
        "if sum(of_heads) == 1:",
        "if sum(of_heads) == 3:",
        TESTS,
        "What gated heads write is counted as a feed-forward layer's.",
    ),
    Fault(
        "products-as-gates",
        f"{HOME}/_stream.py",
        "found[each].leaves <= kept_apart and",
        "",
        TESTS,
        "A gated feed-forward layer passes on what it reads.",
    ),
    Fault(
        "feed-forward-bias",
        f"{HOME}/_contributions.py",
        "return mixes and made is not None",
        "return False and made is not None",
        TESTS,
        "The bias of a feed-forward layer is not that layer's.",
    ),
    Fault(
        "counted-tokens",
        f"{HOME}/_contributions.py",
        "(leaf is self._first or not counts)",
        "True",
        TESTS,
        "Positions are counted as the token's where ids are the numbers of their places.",
    ),
    Fault(
        "token-type",
        f"{HOME}/_contributions.py",
        "return TYPE if same and",
        "return POSITION if same and",
        TESTS,
        "The token type is counted as a position.",
    ),
    Fault(
        "sum-unchecked",
        f"{HOME}/_contributions.py",
        "        if found.differ(expected):",
        "        if False:",
        TESTS,
        "Shares that do not sum to the logit are returned.",
    ),
    Fault(
        "half-precision",
        f"{HOME}/_input.py",
        "module = copy.deepcopy(module).float()",
        "module = copy.deepcopy(module)",
        TESTS,
        "A hundred rounded shares are summed.",
    ),
)
