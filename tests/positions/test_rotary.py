"""Rotary positions against the formula written with complex numbers."""

from __future__ import annotations

import pickle

import pytest
import torch

from saccade.positions import Rotary


def turned_by_complex_numbers(x: torch.Tensor, offset: int, base: float) -> torch.Tensor:
    """Feature pair (d, d + D/2) of the token at position m, as a complex number times exp(i m base^(-2d/D))."""
    width = x.shape[-1]
    out = torch.empty_like(x)
    for m in range(x.shape[-2]):
        for d in range(width // 2):
            angle = torch.tensor((offset + m) * base ** (-2 * d / width), dtype=torch.float64)
            z = torch.complex(x[..., m, d], x[..., m, d + width // 2]) * torch.polar(torch.ones_like(angle), angle)
            out[..., m, d], out[..., m, d + width // 2] = z.real, z.imag
    return out


@pytest.mark.parametrize(("offset", "base"), [(0, 10000.0), (11, 10000.0), (101, 500.0)])
def test_is_the_complex_formula(offset, base):
    x = torch.randn(2, 3, 7, 10, dtype=torch.float64)
    torch.testing.assert_close(Rotary(10, base)(x, offset), turned_by_complex_numbers(x, offset, base))


def test_float32_is_the_float64_result_rounded():
    x = torch.randn(2, 3, 13, 6)
    exact = Rotary(6)(x.double(), 3001)
    # Two products and a sum of numbers below the pair's length; cos and sin rounded to float32.
    assert (Rotary(6)(x, 3001) - exact).abs().max() <= 4 * torch.finfo(torch.float32).eps * x.abs().max() * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keeps_shape_and_dtype(dtype):
    turned = Rotary(6)(torch.randn(2, 3, 5, 6, dtype=dtype))
    assert turned.shape == (2, 3, 5, 6)
    assert turned.dtype == dtype


def test_logits_depend_on_distance_only():
    rotary = Rotary(14)
    query, key = torch.randn(2, 1, 1, 7, 14, dtype=torch.float64).unbind(0)

    def logits(offset):
        return rotary(query, offset) @ rotary(key, offset).transpose(-1, -2)

    torch.testing.assert_close(logits(0), logits(577))
    same = query[:, :, :1].expand(1, 1, 7, 14)
    by_distance = rotary(same) @ rotary(same).transpose(-1, -2)
    torch.testing.assert_close(by_distance[..., 1:, 1:], by_distance[..., :-1, :-1])
    assert not torch.allclose(by_distance[..., 0, 0], by_distance[..., 3, 0])


def test_lengths_are_kept():
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(Rotary(8)(x, 19).norm(dim=-1), x.norm(dim=-1))


def test_offset_continues_the_sequence_whatever_was_asked_before():
    x = torch.randn(1, 2, 131, 6, dtype=torch.float64)
    whole = Rotary(6)(x)
    rotary = Rotary(6)
    parts = [rotary(x[:, :, start:stop], start) for start, stop in ((97, 131), (0, 5), (5, 97))]
    torch.testing.assert_close(torch.cat((parts[1], parts[2], parts[0]), dim=2), whole, rtol=0, atol=0)


def test_tables_made_in_inference_mode_serve_training():
    rotary = Rotary(6)
    with torch.inference_mode():
        rotary(torch.randn(1, 1, 5, 6))
    x = torch.randn(1, 1, 5, 6, requires_grad=True)
    rotary(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_has_nothing_to_save_and_pickles():
    rotary = Rotary(6, 77.0)
    x = torch.randn(1, 1, 5, 6)
    turned = rotary(x)
    assert not rotary.state_dict()
    assert torch.equal(pickle.loads(pickle.dumps(rotary))(x), turned)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Rotary(7), "width: .* must be even, got 7"),
        (lambda: Rotary(0), "width: .* got 0"),
        (lambda: Rotary(6, base=1.0), "base: must be greater than 1, got 1.0"),
        (lambda: Rotary(6)(torch.zeros(1, 1, 5, 8)), r"x: last axis must be 6 wide, got shape \(1, 1, 5, 8\)"),
        (lambda: Rotary(6)(torch.zeros(1, 1, 5, 6), -1), "offset: positions start at 0, got -1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
