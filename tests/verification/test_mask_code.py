"""The lines that findings tell people to write do what they say, for each shape and meaning of a mask.

Shape legend: B batch, H heads, Lq / Lk lengths, D head width.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.verification import MaskReading
from saccade.verification.subject._calling import mask_tensor
from saccade.verification.subject._inputs import NamedInputs
from saccade.verification.tracing._mask_code import MaskCode

B, H, LQ, LK, D = 2, 3, 5, 7, 11
AXES = {4: "QK BQK B1QK BHQK 11QK HQK BK B1K B11K K B", 3: "QK BQK B1QK BK B1K B11K K B"}


def made(axes: str, meaning: str, dtype: str, rank: int) -> tuple[MaskCode, Tensor, dict[str, Tensor]]:
    """The code, what it should show (B, H, Lq, Lk), or (B, Lq, Lk), and the variables that it names."""
    generator = torch.Generator().manual_seed(5)
    shape = (B, H if rank == 4 else 1, LQ, LK)
    scores, value = torch.randn(shape, generator=generator), torch.randn(*shape[:2], LK, D, generator=generator)
    inputs = NamedInputs({"query": torch.zeros(*shape[:3], D), "key": value, "value": value})
    shown = torch.rand([size if letter in axes else 1 for letter, size in zip("BHQK", shape, strict=True)]) < 0.5
    shown[..., 0] = False  # a key that nothing shows
    shown[(0,) * (shown.dim() - 2)][0] = False  # and a row that sees nothing
    if axes == "B":
        shown = torch.arange(LK).expand(B, 1, 1, LK) < torch.tensor([0, 4]).view(B, 1, 1, 1)
    mask = MaskReading("seen", axes, meaning, dtype)  # type: ignore[arg-type]
    names = {"seen": mask_tensor(mask, shown, inputs), "scores": scores, "value": value}
    if rank == 3:
        shown, names["scores"], names["value"] = shown[:, 0], scores[:, 0], value[:, 0]
    return MaskCode(mask, rank), shown.expand(names["scores"].shape), names


CASES = [
    pytest.param(axes, meaning, dtype, rank, id=f"{axes}-{meaning}-{dtype}-{rank}")
    for rank in AXES
    for axes, (meaning, dtype) in itertools.product(
        AXES[rank].split(),
        [("attend", "bool"), ("ignore", "bool"), ("attend", "int64"), ("ignore", "float32"), ("additive", "float32")],
    )
    if axes != "B" or (meaning, dtype) == ("attend", "int64")
]


@pytest.mark.parametrize(("axes", "meaning", "dtype", "rank"), CASES)
def test_each_line_does_what_it_says(axes: str, meaning: str, dtype: str, rank: int) -> None:
    code, shown, names = made(axes, meaning, dtype, rank)
    own = {**names, "torch": torch, "L": LK}
    weights = names["scores"].masked_fill(~shown, -torch.inf).softmax(-1)
    exec(code.hiding, own)
    torch.testing.assert_close(own["scores"].softmax(-1), weights, equal_nan=True)
    kept = weights.masked_fill(eval(code.rows, own), 0.0)
    assert kept.equal(weights.nan_to_num()) and weights.isnan().any()
    value = names["value"].masked_fill(eval(code.keys, own), torch.nan)
    assert value.isnan().all(-1).equal(~shown.any(-2)) and value.shape == names["value"].shape


@pytest.mark.parametrize("meaning", ["attend", "ignore", "additive"])
def test_a_fused_call_is_given_what_it_takes(meaning: str) -> None:
    code, shown, names = made("BK", meaning, "float32" if meaning == "additive" else "bool", 4)
    own = {**names, "torch": torch}
    exec(MaskCode(code.mask, is_fused=True).hiding, own)
    query, key = torch.randn(B, H, LQ, D), torch.randn(B, H, LK, D)
    found = F.scaled_dot_product_attention(query, key, names["value"], attn_mask=own["attn_mask"])
    expected = F.scaled_dot_product_attention(query, key, names["value"], attn_mask=shown)
    torch.testing.assert_close(found.nan_to_num(), expected.nan_to_num())
