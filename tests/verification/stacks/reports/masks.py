"""Masks that a path ignores, and flags that do not reach the mask."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from stacks.reports.case import Case, Proof
from stacks.reports.model import Call, Model, Unpacked, packed, padded
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class CausalKernel(Model):
    """The kernel is asked for `causal`, and ignores the mask that it is given."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, call: Call) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)


class ManualPath(Model):
    """With dropout, attention is computed by hand in training, without the triangle."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(1e-9)

    def reach(self, call: Call, count: int) -> Tensor:
        reached = super().reach(call, count)
        return torch.ones_like(reached) if self.training else reached


class SkippedWithoutMask(Model):
    """The triangle is joined to a mask; without a mask there is neither."""

    def reach(self, call: Call, count: int) -> Tensor:
        reached = super().reach(call, count)
        return torch.ones_like(reached) if call.mask is None else reached


class MaskOfQueries(Unpacked):
    """The padding mask hides rows of the scores where it should hide columns."""

    def padding(self, call: Call, count: int) -> Tensor:
        return torch.tensor(True) if call.mask is None else call.mask[:, None, :, None].bool()


class Long(Unpacked):
    """From 17 tokens on another kernel is chosen, and that ignores the mask."""

    def padding(self, call: Call, count: int) -> Tensor:
        return torch.tensor(True) if count > 16 else super().padding(call, count)


class BlocksIgnored(Unpacked):
    """A mask of pairs is read as one of padding: its first row."""

    def padding(self, call: Call, count: int) -> Tensor:
        if call.mask is None or call.mask.dim() == 2:
            return super().padding(call, count)
        return call.mask.any(-2, keepdim=True)


class StillCausal(Model):
    """Its flag reaches the layers, and not the mask."""

    def reach(self, call: Call, count: int) -> Tensor:
        return call.queries >= call.keys(count)


class HalfBidirectional(Model):
    """The flag reaches queries of even columns."""

    def reach(self, call: Call, count: int) -> Tensor:
        return (call.queries >= call.keys(count)) | (call.queries % 2 == 0)


class WindowFlag(Model):
    """`window` is kept, and no mask is made of it."""

    def reach(self, call: Call, count: int) -> Tensor:
        return call.queries >= call.keys(count)


class CausalFlag(Model):
    """`causal=True` is kept, and no mask is made of it."""

    def reach(self, call: Call, count: int) -> Tensor:
        behind = call.queries - call.keys(count)
        return behind >= -1


def case(report: str, kind: str, fault: str, probes: tuple[str, ...], words: tuple[str, ...], **more: Any) -> Case:
    promise = more.get("promise", {"causal": True})
    right, how = more.get("right", Model), more.get("how", {})
    return Case(
        report,
        kind,
        fault,
        probes,
        words,
        more["tokens"],
        lambda: {"model": more["faulty"](), **how, **promise},
        lambda: {"model": right(), **how, **promise},
        more["proof"],
    )


LEFT = {"batch": partial(padded, left=True, positions=True)}
HIDDEN = ("content of the padding", "mask does not hide")
LATER = ("later token changes an earlier output",)
DOCUMENT = [[7, 11, 13]]
AHEAD = frozenset({(0, 0, 1), (0, 0, 2), (0, 1, 2)})
LONGER = [list(range(5, 22)), [23, 29]]
bidirectional = partial(Model, causal=False)

CASES = (
    case(
        "AI-Hypercomputer/maxtext#878",
        "mask ignored",
        "the flash kernel is asked for `causal` and ignores the mask",
        ("batch",),
        HIDDEN,
        faulty=CausalKernel,
        how=LEFT,
        tokens=3,
        proof=Proof(frozenset({(1, 1, 0), (1, 2, 0)})),
    ),
    case(
        "keras-team/keras#23038",
        "mask ignored",
        "with dropout the triangle is dropped in training",
        ("causality", "training"),
        LATER,
        faulty=ManualPath,
        tokens=2,
        proof=Proof(AHEAD, documents=DOCUMENT, path="train"),
    ),
    case(
        "facebookresearch/xformers#103",
        "mask ignored",
        "without att_mask the triangle is skipped",
        ("causality",),
        LATER,
        faulty=SkippedWithoutMask,
        tokens=2,
        proof=Proof(AHEAD, documents=DOCUMENT, path="bare"),
    ),
    case(
        "planted",
        "mask ignored",
        "the padding mask hides queries, not keys",
        ("batch",),
        HIDDEN,
        faulty=MaskOfQueries,
        how=LEFT,
        tokens=3,
        proof=Proof(frozenset({(1, 1, 0), (1, 2, 0)})),
    ),
    case(
        "planted",
        "mask ignored",
        "from 17 tokens on the padding mask is ignored",
        ("batch",),
        HIDDEN,
        faulty=Long,
        how=LEFT,
        tokens=19,
        proof=Proof(
            frozenset((1, query, key) for query in (15, 16) for key in range(15)), {1: [0] * 16 + [1]}, documents=LONGER
        ),
    ),
    case(
        "planted",
        "mask ignored",
        "a mask of pairs is read as one of padding",
        ("packing",),
        ("attends to document",),
        faulty=BlocksIgnored,
        right=Unpacked,
        how={"pack": partial(packed, mask="blocks")},
        tokens=2,
        proof=Proof(frozenset((0, query, key) for query in (3, 4) for key in (0, 1, 2)), path="pack"),
    ),
    case(
        "huggingface/transformers#46077",
        "flag",
        "`bidirectional` reaches the layers and not the mask",
        ("reach",),
        ("bidirectional",),
        faulty=partial(StillCausal, causal=False),
        right=bidirectional,
        promise={"causal": False},
        tokens=3,
        proof=Proof(AHEAD, documents=DOCUMENT),
    ),
    case(
        "planted",
        "flag",
        "`bidirectional` reaches every other query",
        ("reach",),
        ("bidirectional",),
        faulty=partial(HalfBidirectional, causal=False),
        right=bidirectional,
        promise={"causal": False},
        tokens=4,
        proof=Proof(frozenset({(0, 1, 2)}), documents=DOCUMENT),
    ),
    case(
        "planted",
        "flag",
        "`window` reaches no mask",
        ("reach",),
        ("window",),
        faulty=partial(WindowFlag, window=2),
        right=partial(Model, window=2),
        promise={"causal": True, "window": 2},
        tokens=5,
        proof=Proof(frozenset({(0, 2, 0)}), documents=DOCUMENT),
    ),
    case(
        "planted",
        "flag",
        "`causal` reaches a triangle that begins one key late",
        ("causality",),
        LATER,
        faulty=CausalFlag,
        tokens=2,
        proof=Proof(frozenset({(0, 0, 1), (0, 1, 2)}), documents=DOCUMENT),
    ),
)
