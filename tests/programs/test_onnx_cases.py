"""The test cases for FlexAttention that the `onnx` package carries, inputs and outputs alike.

Their score functions are graphs; here each stands as a function. `prob_mod` (of two cases) changes weights, which is no
part of PyTorch's FlexAttention; those that scale all weights scale the output.
"""

from __future__ import annotations

import pytest
import torch

import saccade

pytest.importorskip("onnx")

SCORES = {
    "test_flexattention_score_mod": lambda score, b, h, q, k: score + 0.5,
    "test_flexattention_causal_mask": lambda score, b, h, q, k: torch.where(q >= k, score, -torch.inf),
    "test_flexattention_soft_cap": lambda score, b, h, q, k: 20.0 * torch.tanh(score / 20.0),
    "test_flexattention_relative_positional": lambda score, b, h, q, k: score + (q - k),
}
SCALES = {"test_flexattention_scaled": 0.1}
PROBABILITIES = {"test_flexattention_prob_mod": 0.5}


def cases():
    from onnx.backend.test.case.node import collect_testcases

    made = collect_testcases("FlexAttention")
    return {case.name: case for case in made if "expanded" not in case.name}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of other operators, whose cases the package makes as well
def test_every_case():
    found = cases()
    assert len(found) >= 11
    for name, case in found.items():
        (node,) = (node for node in case.model.graph.node if node.op_type == "FlexAttention")
        wanted = {attribute.name for attribute in node.attribute}
        assert wanted <= {"score_mod", "prob_mod", "scale"}
        assert ("score_mod" in wanted, "scale" in wanted, "prob_mod" in wanted) == (
            name in SCORES,
            name in SCALES,
            name in PROBABILITIES,
        )
        for inputs, (expected,) in case.data_sets:
            given = [torch.from_numpy(array.copy()) for array in inputs]
            out = saccade.flex_attention(*given, SCORES.get(name), scale=SCALES.get(name), enable_gqa=True)
            out = out * PROBABILITIES.get(name, 1.0)
            torch.testing.assert_close(out, torch.from_numpy(expected.copy()), rtol=case.rtol, atol=case.atol, msg=name)
