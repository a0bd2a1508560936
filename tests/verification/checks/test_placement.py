"""Dtype, device and state: what does not follow the module is named, with the line.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saccade
from saccade.verification import MaskReading, Reading
from saccade.verification.checks import _placement as placement
from saccade.verification.subject._subject import Subject

E, H = 33, 3
SELF = Reading("self", "BLD", E, heads=H)
HEADS = Reading("attention", "BHLD", 7, heads=3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def seen(self, scores: Tensor) -> Tensor:
        length = scores.shape[-1]
        return torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, H, E // H).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / (E // H) ** 0.5
        weights = scores.masked_fill(~self.seen(scores), -torch.inf).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, length, E))


class Buffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(300, 300).tril().bool(), persistent=False)

    def seen(self, scores: Tensor) -> Tensor:
        return self.mask[: scores.shape[-1], : scores.shape[-1]]


class Moved(Block):
    """A plain tensor that the call moves itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(300, 300).tril().bool()

    def seen(self, scores: Tensor) -> Tensor:
        return self.mask[: scores.shape[-1], : scores.shape[-1]].to(scores.device)


class Branching(Block):
    """Looks at numbers, which the meta device does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() < 1e9 else x


class Plain(Moved):
    def seen(self, scores: Tensor) -> Tensor:
        return self.mask[: scores.shape[-1], : scores.shape[-1]]


class OnTheCpu(Block):
    def seen(self, scores: Tensor) -> Tensor:
        return torch.ones(scores.shape[-2:]).tril().bool()


class InFloat32(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class GivesFloat32(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(torch.float32)


class AddsFloat32(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.zeros(E, device=x.device))


class Listed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.more = [nn.Linear(E, E), nn.Linear(E, E)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.more[1](self.more[0](x)))


class Method(Block):
    def __init__(self) -> None:
        super().__init__()
        self.before = partial(nn.Linear(E, E).forward)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.before(x))


class Loose(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.ones(E, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.gain)


class Projected(Block):
    """Random features that are no part of the state: a plain tensor, or a buffer that is not saved."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        features = torch.randn(E, E) / E**0.5
        if kind == "plain":
            self.features = features
        else:
            self.register_buffer("features", features, persistent=kind == "saved")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.features.to(x.device, x.dtype))


class KeepsNothing(Block):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: one for name, one in super().state_dict(*args, **kwargs).items() if "proj" not in name}


class LoadsNothing(Block):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return None


class KeepsMore(Block):
    def get_extra_state(self) -> Any:
        return {"made by": Reading}

    def set_extra_state(self, state: Any) -> None:
        pass


def findings(target: Any, reading: Reading = SELF) -> list[Any]:
    subject = Subject(target.eval() if isinstance(target, nn.Module) else target, reading)
    return list(placement.CHECK.run(subject))


@pytest.mark.parametrize(
    "target",
    [
        Block(),
        Buffer(),
        Moved(),
        Branching(),
        nn.TransformerEncoderLayer(E, H, 67, batch_first=True),
        saccade.nn.SelfAttention(E),
    ],
)
def test_right_modules_are_left_alone(target: nn.Module) -> None:
    assert findings(target) == []


def test_tensors_of_every_call_follow() -> None:
    def projected(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x @ w_q, x @ w_k, x @ w_v)

    constants = dict(zip(("w_q", "w_k", "w_v"), torch.randn(3, E, E), strict=True))
    assert findings(projected, Reading("self", "BLD", E, constants=constants)) == []


def test_right_functions_are_left_alone() -> None:
    mask = (MaskReading("attn_mask", "QK", "attend"),)
    assert findings(F.scaled_dot_product_attention, Reading("attention", "BHLD", 7, heads=3, masks=mask)) == []
    assert findings(saccade.attention, HEADS) == []
    padding = (MaskReading("key_padding_mask", "BK", "ignore"),)
    mha = nn.MultiheadAttention(E, H)
    assert findings(mha, Reading("qkv", "LBD", E, heads=H, out=0, masks=padding)) == []


WRONG = {
    "plain": (Plain(), "The tensor `mask` stays behind", "self.mask = torch.ones"),
    "on the cpu": (OnTheCpu(), "Moved to another device", "masked_fill(~self.seen(scores)"),
    "in float32": (InFloat32(), "in float64 it raises", "self.qkv(x)"),
    "gives float32": (GivesFloat32(), "the output is in float32", "torch.float32"),
    "adds float32": (AddsFloat32(), "in bfloat16 it raises", "self.qkv(x)"),
    "list": (Listed(), "`more` holds 2 modules", "self.more = ["),
    "method": (Method(), "`before` holds 1 module", "self.before = partial"),
    "tensor": (Loose(), "`gain` holds 1 tensor with gradients", "self.gain ="),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_module_is_named_once(name: str) -> None:
    module, words, code = WRONG[name]
    found = findings(module)
    assert [finding.severity for finding in found] == ["error"], found
    assert words in found[0].message and code in found[0].location.code


def remade(kind: str) -> list[Any]:
    """Of a class that `verify` can make again, as it is given one."""
    subject = Subject(Projected(kind).eval(), SELF, again=lambda: Projected(kind))
    return list(placement.CHECK.run(subject))


def test_what_is_random_and_not_saved_is_lost() -> None:
    assert remade("saved") == []
    for kind in ("plain", "buffer"):
        (found,) = remade(kind)
        assert found.severity == "error" and found.evidence["left_out"] == ["features"]
        assert "its state leaves out `features`" in found.message and "features" in found.location.code
    # the same each time it is made: nothing is lost
    assert list(placement.CHECK.run(Subject(Buffer().eval(), SELF, again=Buffer))) == []


@pytest.mark.parametrize(
    "target, severity, words",
    [
        (KeepsNothing(), "error", "Missing key"),
        (LoadsNothing(), "error", "gives another output"),
        (KeepsMore(), "warning", "UnpicklingError"),
    ],
)
def test_a_state_that_cannot_be_loaded(target: nn.Module, severity: str, words: str) -> None:
    before = {
        name: tensor.clone() for name, tensor in nn.Module.state_dict(target).items() if isinstance(tensor, Tensor)
    }
    (found,) = findings(target)
    assert found.severity == severity and words in found.message
    assert all(torch.equal(one, before[name]) for name, one in target.named_parameters())


def test_only_what_takes_the_mask_is_wrong() -> None:
    """The mask's path is tried, too: there a tensor is made on the CPU."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores + torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v

    assert findings(attend, HEADS) == []
    masked = Reading("attention", "BHLD", 7, heads=3, masks=(MaskReading("mask", "QK", "attend"),))
    found = findings(attend, masked)
    assert any("Moved to another device" in finding.message for finding in found)
