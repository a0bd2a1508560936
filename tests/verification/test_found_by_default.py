"""What is found without an option: every layout, the target's own errors, casts, rotations and squares of another size.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saccade
from saccade.verification import Finding, Report, TargetError
from saccade.verification.checks import _robustness as robustness
from saccade.verification.subject._check import Check
from saccade.verification.subject.discovery._discover import discover
from slowly import slow_but

E, H = 24, 3


def report(target: object, *checks: str | Check) -> Report:
    torch.manual_seed(0)
    return saccade.verify(target, isolated=False, checks=checks)


def only_error(target: object, *checks: str | Check) -> Finding:
    (finding,) = report(target, *checks).errors
    return finding


def blamed(finding: Finding) -> str:
    assert finding.location is not None
    return finding.location.code


# Layouts, and errors of the target


def of_length_first(q, k, v):
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), v)


def of_one_sequence(Q, K, V, mask):
    return (Q @ K.T / math.sqrt(Q.shape[-1]) + mask).softmax(-1) @ V


def test_every_layout_is_tried():
    assert discover(of_length_first).reading.layout == "LBHD"
    reading = discover(of_one_sequence).reading
    assert (reading.layout, reading.form) == ("LD", "attention")


def without_its_import(Q, K, V):
    return (Q @ K.T / cmath.sqrt(Q.shape[-1])).softmax(-1) @ V  # noqa: F821


def without_its_import_under_a_mask(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -nupmy.inf)  # noqa: F821
    return scores.softmax(-1) @ v


def of_no_method(Q, K, V):
    return (Q @ K.T / math.sqrt(Q.shape[-1])).soft_max(-1) @ V


class ViewedApart(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (one.view(len(x), H, x.shape[1], E // H) for one in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("target", "words", "line"),
    [
        (without_its_import, "NameError: name 'cmath' is not defined", "return (Q @ K.T / cmath.sqrt"),
        (without_its_import_under_a_mask, "NameError: name 'nupmy' is not defined", "scores = scores.masked_fill"),
        (of_no_method, "AttributeError: 'Tensor' object has no attribute 'soft_max'", "return (Q @ K.T"),
        (ViewedApart, "RuntimeError: view size is not compatible", "q, k, v = (one.view("),
    ],
)
def test_an_error_that_no_way_of_calling_mends_is_told_with_its_line(target: object, words: str, line: str):
    with pytest.raises(TargetError) as raised:
        discover(target)
    assert raised.value.error.startswith(words)
    assert raised.value.location is not None and raised.value.location.code.startswith(line)


def test_a_missing_import_is_told_without_options():
    finding = only_error(without_its_import, "scale")
    assert finding.fix == "Import or define that name: this line fails in every call."


class Square(nn.Module):
    """A causal mask that is as wide as something else than the sequence."""

    def __init__(self, width: str = "head"):
        super().__init__()
        self.num_heads, self.qkv = H, nn.Linear(E, 3 * E)
        self.side = {"head": E // H, "model": E}[width]

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, E // H)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(self.side, self.side, dtype=torch.bool).tril()
        scores = (q @ k.mT / (E // H) ** 0.5).masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def square_of_the_width(q, k, v):
    mask = torch.ones(q.shape[-1], q.shape[-1], dtype=torch.bool).tril()
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    ("target", "name"), [(Square(), "head_size"), (Square("model"), "embed_dim"), (square_of_the_width, "head_size")]
)
def test_a_mask_of_another_size_is_named(target: object, name: str):
    with pytest.raises(TargetError, match=rf"the mask is \({name}, {name}\), where \(length, length\)") as raised:
        discover(target)
    assert raised.value.location is not None and "masked_fill(~mask" in raised.value.location.code


class SlicedSquare(nn.Module):
    """A causal mask of a side, of which the length at hand is taken; with 8 that is a head's width, too."""

    def __init__(self, embed_dim: int = 24, head_size: int = 8):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(embed_dim, head_size, bias=False) for _ in range(3))
        self.register_buffer("mask", torch.tril(torch.ones(head_size, head_size)))

    def forward(self, x):
        T = x.shape[1]
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return scores.masked_fill(self.mask[:T, :T] == 0, -torch.inf).softmax(-1) @ v


def sliced_square_of_the_width(q, k, v):
    T, d = q.shape[-2:]
    mask = torch.ones(d, d, dtype=torch.bool, device=q.device).tril()
    return (q @ k.mT / d**0.5).masked_fill(~mask[:T, :T], -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (SlicedSquare, 'self.register_buffer("mask", torch.tril('),
        (SlicedSquare(24, 16), 'self.register_buffer("mask", torch.tril('),
        (sliced_square_of_the_width, "return (q @ k.mT"),
    ],
)
def test_a_mask_of_another_size_of_which_a_part_is_taken_is_named(target: object, line: str):
    finding = only_error(target, robustness.CHECK)
    assert "the mask is (head_size, head_size), where (length, length) is expected" in finding.message
    assert blamed(finding).startswith(line)


class AsLongAsWide(nn.Module):
    """A mask of the longest input, which is as wide as a head by chance."""

    def __init__(self, block_size: int = 8):
        super().__init__()
        self.head_size = 8
        self.qkv = nn.Linear(24, 24)
        self.register_buffer("mask", torch.ones(block_size, block_size).tril())

    def forward(self, x):
        T = x.shape[1]
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return scores.masked_fill(self.mask[:T, :T] == 0, -torch.inf).softmax(-1) @ v


class OfAnySide(nn.Module):
    def __init__(self, n: int = 8):
        super().__init__()
        self.head_size = 8
        self.qkv, side = nn.Linear(24, 24), torch.arange(n)
        self.register_buffer("mask", (side[:, None] >= side).float())

    def forward(self, x):
        T = x.shape[1]
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return scores.masked_fill(self.mask[:T, :T] == 0, -torch.inf).softmax(-1) @ v


def test_a_limit_that_is_a_width_by_chance_is_no_mask_of_another_size():
    told = report(AsLongAsWide, robustness.CHECK)
    assert told.ok and "takes at most 8 tokens" in str(told) and "(head_size" not in str(told)


class SquareOfSomethingElse(OfAnySide):
    """A rotation (head_size, head_size) beside a mask of any side."""

    def forward(self, x):
        rotation = torch.zeros(self.head_size, self.head_size)
        return super().forward(x + 0 * rotation.sum())


@pytest.mark.slow
def test_a_square_that_is_no_mask_is_not_blamed():
    (found,) = [
        finding
        for finding in report(SquareOfSomethingElse(), robustness.CHECK).findings
        if "at most" in finding.message
    ]
    assert found.severity != "error" and "that may be chance" in found.message


def test_a_limit_of_which_nothing_is_known_is_told_with_care():
    (found,) = [finding for finding in report(OfAnySide(), robustness.CHECK).findings if "at most" in finding.message]
    assert found.severity != "error" and "8 is its head_size, too: that may be chance" in found.message


# Masks of zeros and ones that are added


def cast(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + mask.float()
    return scores.softmax(-1) @ v


def cast_to(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    return scores.softmax(-1) @ v


def cast_and_documented(q, k, v, mask=None):
    """mask: added to the scores, 0 or -inf."""
    return cast(q, k, v, mask)


def cast_where_boolean(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
    return scores.softmax(-1) @ v


@pytest.mark.slow
def test_a_boolean_mask_that_is_cast_and_added_is_named():
    finding = only_error(cast, "mask-meaning")
    assert "A boolean `mask` is cast to 0 and 1 and added to the scores" in finding.message
    assert blamed(finding) == "scores = scores + mask.float()"


def cast_in_brackets(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + ((mask[:, :]).float())
    return scores.softmax(-1) @ v


def cast_by_another_name(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        added = mask.unsqueeze(0).unsqueeze(0)
        added = added.float()
        scores = scores + added
    return scores.softmax(-1) @ v


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "line"),
    [
        (cast_in_brackets, "scores = scores + ((mask[:, :]).float())"),
        (cast_by_another_name, "added = added.float()"),
    ],
)
def test_a_cast_in_brackets_or_by_another_name_is_named(target: Callable[..., Tensor], line: str):
    finding = only_error(target, "mask-meaning")
    assert "A boolean `mask` is cast to 0 and 1 and added to the scores" in finding.message
    assert blamed(finding) == line


def hidden_by_numbers(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        added = mask[:, :]
        added = (1.0 - (added).to(scores.dtype)) * torch.finfo(scores.dtype).min
        scores = scores + added
    return scores.softmax(-1) @ v


def sum_made_wider(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = (scores + mask).float()
    return scores.softmax(-1).to(v.dtype) @ v


def both_made_wider(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.float() + mask[:, :].float()
    return scores.softmax(-1).to(v.dtype) @ v


def weights_cast_back(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return (scores if mask is None else scores + mask).softmax(-1).to(v.dtype) @ v


WIDER = [sum_made_wider, both_made_wider, weights_cast_back, hidden_by_numbers]


@pytest.mark.parametrize("target", slow_but(WIDER, both_made_wider, hidden_by_numbers))
def test_scores_that_are_cast_are_no_cast_of_the_mask(target: Callable[..., Tensor]):
    assert "is cast to 0 and 1" not in str(report(target, "mask-meaning"))


class MadeWithoutItsImport(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = cmath.sqrt(dim)  # noqa: F821

    def forward(self, x):
        return (x @ x.mT / self.scale).softmax(-1) @ x


def test_a_name_that_a_constructor_misses_is_told_without_options():
    told = str(report(MadeWithoutItsImport, "scale"))
    assert "NameError: name 'cmath' is not defined" in told
    assert "--arg" not in told


def test_a_scale_of_0_that_is_not_kept_has_no_factor():
    promise = saccade.verification.Promise(scale=0)
    told = str(saccade.verify(sum_made_wider, isolated=False, checks=["scale"], promise=promise))
    assert "where 0 is expected" in told
    assert "nan" not in told


@pytest.mark.slow
def test_a_cast_to_a_dtype_is_a_warning_and_numbers_that_are_meant_are_none():
    assert "is cast to 0 and 1" in str(
        [finding for finding in report(cast_to, "mask-meaning").findings if finding.severity == "warning"]
    )
    for right in (cast_and_documented, cast_where_boolean):
        assert "is cast to 0 and 1" not in str(report(right, "mask-meaning"))
    promised = saccade.verify(
        cast, isolated=False, checks=["mask-meaning"], promise=saccade.verification.Promise(mask="additive")
    )
    assert promised.ok


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(E, E) for _ in range(3))

    def forward(self, x):
        scores = self.q(x) @ self.k(x).mT / E**0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = scores + mask.to(scores.dtype)
        return scores.softmax(-1) @ self.v(x)


def test_a_causal_mask_of_zeros_and_ones_that_is_added_is_named():
    finding = only_error(Adding(), "causal-leak")
    assert "A causal mask of zeros and ones is added to the scores" in finding.message
    assert blamed(finding) == "scores = scores + mask.to(scores.dtype)"


# Rotations


class Rotary(nn.Module):
    """Queries and keys (B, H, L, D), rotated along an axis; by pairs of halves, or by complex numbers."""

    def __init__(self, axis: int, by_complex: bool = False):
        super().__init__()
        self.axis, self.by_complex, self.qkv = axis, by_complex, nn.Linear(E, 3 * E)

    def turned(self, x: Tensor) -> Tensor:
        width = x.shape[-1] // 2
        angles = torch.outer(torch.arange(x.shape[self.axis]), 10.0 ** -torch.arange(width)).to(x.dtype)
        angles = angles.view([x.shape[self.axis] if at == self.axis else 1 for at in range(3)] + [width])
        if self.by_complex:
            pairs = torch.view_as_complex(x.unflatten(-1, (width, 2)).contiguous())
            return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
        one, other = x.chunk(2, -1)
        return torch.cat((one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, E // H)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(self.turned(q), self.turned(k), v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("by_complex", [False, True])
@pytest.mark.parametrize(("axis", "is_right"), [(0, False), (1, False), (2, True)])
def test_rotations_along_another_axis_than_the_sequence_are_named(axis: int, is_right: bool, by_complex: bool):
    module = Rotary(axis, by_complex)
    if is_right:
        assert report(module, "order").ok
        return
    finding = only_error(module, "order")
    assert "not between positions" in finding.message
    assert "polar" in blamed(finding) if by_complex else "angles.cos()" in blamed(finding)


# The line of a part that is thrown away


class Fused(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]):
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(E, 3 * E), nn.Linear(E, E), attend

    def forward(self, x):
        return self.out(self.attend(self.qkv(x).unflatten(-1, (3, H, E // H))).transpose(1, 2).flatten(2))


def keys_twice(qkv):
    q, k, v = qkv.unbind(2)
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    scores = k @ k.mT / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v


def keys_as_values(qkv):
    q, k, v = qkv.unbind(2)
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    weights = scores.softmax(-1)
    return weights @ k


def queries_taken_twice(qkv):
    qkv = qkv.permute(2, 0, 3, 1, 4)
    q, k, v = qkv[0], qkv[0], qkv[2]
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    ("attend", "line"),
    [
        (keys_twice, "scores = k @ k.mT / q.shape[-1] ** 0.5"),
        (keys_as_values, "return weights @ k"),
        (queries_taken_twice, "q, k, v = qkv[0], qkv[0], qkv[2]"),
    ],
)
def test_a_part_of_a_fused_projection_that_is_thrown_away_is_blamed_where_another_takes_its_place(
    attend: Callable[..., Tensor], line: str
):
    finding = only_error(Fused(attend), "mixing")
    assert "reach no output" in finding.message
    assert blamed(finding) == line
