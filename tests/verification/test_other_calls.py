"""Faults that the plain call does not have: with a mask, with a flag the other way, with padding by number; and what
could not be measured is counted.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import saccade
from saccade.verification import Check, Promise, Report
from saccade.verification.checks import CHECKS
from saccade.verification.subject._models import token_subject
from saccade.verification.subject._variants import _calls, variants

H, E = 3, 15
ROBUSTNESS = next(check for check in CHECKS if check.name == "robustness")  # its name selects the whole family


class Attention(nn.Module):
    """Causal self-attention. x: (batch, length, width); padding_mask (batch, length), True = token."""

    def __init__(self, hides: str = "both", fill: float = -torch.inf):
        super().__init__()
        self.hides, self.fill = hides, fill
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None, need_weights: bool = False) -> object:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, H, width // H).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(width // H)
        plain = padding_mask is None
        if self.hides == "both" or (self.hides == "plain" and plain) or (self.hides == "weights" and need_weights):
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, self.fill)
        if padding_mask is not None:
            scores = scores.masked_fill(~padding_mask[:, None, None, :], self.fill)
        weights = scores.softmax(-1)
        out = self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return (out, weights) if need_weights else out


class Scaled(nn.Module):
    """Self-attention. x: (batch, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x: Tensor, use_scale: bool = True) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT / (math.sqrt(E) if use_scale else 1.0)).softmax(-1) @ v


def verified(target: object, *checks: str | Check, promise: Promise | None = None) -> Report:
    torch.manual_seed(0)
    return saccade.verify(target, promise=promise, checks=checks or None, isolated=False)


def errors(report: Report) -> list[tuple[str, str]]:
    return [(finding.family, finding.message) for finding in report.errors]


@pytest.mark.slow
def test_a_triangle_that_a_padding_mask_replaces_is_an_error() -> None:
    (found,) = errors(verified(Attention("plain"), "causal-leak", ROBUSTNESS))
    assert found[0] == "causal-leak"
    assert found[1].startswith("With a `padding_mask` that hides nothing: Output")


@pytest.mark.slow
def test_a_triangle_of_one_path_alone_is_an_error_with_the_promise_and_without() -> None:
    promised = errors(verified(Attention("weights"), "causal-leak", promise=Promise(causal=True)))
    assert [family for family, _ in promised] == ["causal-leak"]
    assert promised[0][1].startswith("With need_weights=False: Output")
    found = dict(errors(verified(Attention("weights"), "causal-leak", ROBUSTNESS)))
    assert all(words.startswith("With need_weights=False: ") for words in found.values()) and found


@pytest.mark.slow
def test_the_same_attention_by_every_call_is_silent() -> None:
    assert not errors(verified(Attention(), "scale", "causal-leak", ROBUSTNESS))


def test_a_flag_that_ends_the_program_is_no_call_that_is_compared() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, debug: bool = False) -> Tensor:
        """q, k, v: (batch, heads, length, d)."""
        if debug:
            raise SystemExit(3)
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v

    assert not verified(attention, "scale").findings


@pytest.mark.slow
def test_a_flag_that_switches_something_off_warns_and_is_no_error() -> None:
    report = verified(Scaled(), "scale")
    assert report.ok
    assert [finding.message[:21] for finding in report.findings if finding.severity == "warning"] == [
        "With use_scale=False:"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("fill", "warned"), [(-1e4, True), (-1e9, False), (-torch.inf, False)])
def test_a_fill_that_logits_reach_warns_with_the_logit_at_which_it_leaks(fill: float, warned: bool) -> None:
    report = verified(Attention(fill=fill), "causal-leak")
    said = [finding for finding in report.findings if finding.severity == "warning"]
    assert report.ok and bool(said) == warned
    if warned:
        assert "below -9913 gives weight to hidden keys" in said[0].message
        leaks = torch.tensor([said[0].evidence["leaks_below"] - 30.0, fill]).softmax(-1)[1]
        keeps = torch.tensor([said[0].evidence["leaks_below"] + 30.0, fill]).softmax(-1)[1]
        assert leaks > 0 and keeps == 0


def masked(fill: float) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q, k, v: (batch, heads, length, d). mask (queries, keys), True = attend."""
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, fill)
        return scores.softmax(-1) @ v

    return attention


@pytest.mark.parametrize(("fill", "notes"), [(-1e20, 1), (-torch.inf, 0)])
def test_a_row_that_sees_nothing_and_averages_all_keys_is_noted(fill: float, notes: int) -> None:
    report = verified(masked(fill), "mask-meaning")
    assert report.ok
    assert len([finding for finding in report.findings if "averages all keys" in finding.message]) == notes


@pytest.mark.slow
def test_padding_that_averages_all_keys_is_noted() -> None:
    report = verified(Attention(fill=-1e20), "padding")
    assert any("all padding averages all keys" in finding.message for finding in report.findings)


def grouped(query: Tensor, key: Tensor, value: Tensor, summed: bool) -> Tensor:
    groups = key.shape[1]
    query = query.unflatten(1, (groups, -1))
    scores = torch.einsum("bgrqd,bgkd->bgrqk", query, key) / math.sqrt(query.shape[-1])
    scores = scores.sum(2, keepdim=True).expand_as(scores) if summed else scores
    return torch.einsum("bgrqk,bgkd->bgrqd", scores.softmax(-1), value).flatten(1, 2)


@pytest.mark.parametrize("summed", [True, False])
def test_queries_of_a_group_that_are_summed_are_an_error(summed: bool) -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (batch, heads, length, d); key and value (batch, kv_heads, length, d)."""
        return grouped(query, key, value, summed)

    found = errors(verified(attention, "mixing"))
    assert [family for family, _ in found] == ["mixing"] * summed
    assert not summed or "queries of several heads are summed" in found[0][1]


class Tokens(nn.Module):
    """Token ids (batch, length) in, a vector for each out; 0 is padding."""

    def __init__(self, hides: str) -> None:
        super().__init__()
        self.hides, self.table = hides, nn.Embedding(47, E, padding_idx=0)
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, input_ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.table(input_ids)).chunk(3, -1)
        real = input_ids != 0
        scores = q @ k.mT / math.sqrt(E)
        if self.hides:
            scores = scores.masked_fill(~(real[:, None, :] if self.hides == "keys" else real[:, :, None]), -1e9)
        return scores.softmax(-1) @ v


@pytest.mark.slow
@pytest.mark.parametrize(("hides", "error"), [("keys", False), ("rows", True)])
def test_padding_known_by_its_number_is_hidden_from_the_queries(hides: str, error: bool) -> None:
    found = errors(verified(Tokens(hides), "model"))
    assert [family for family, _ in found] == ["model"] * error
    assert not error or "the content of the padding on the right" in found[0][1]


class Transposed(nn.Module):
    """Self-attention. x: (batch, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(E, E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).T / math.sqrt(E)).softmax(-1) @ x


def test_a_batch_that_T_turns_is_no_module_of_one_sequence() -> None:
    (found,) = errors(verified(Transposed(), "scale"))
    assert "`.T`" in found[1] and "`.mT`" in found[1]


def on_a_gpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of tensors of three axes alone."""
    if q.dim() != 3:
        raise ValueError(f"expected three axes, got the shape {list(q.shape)}")
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1).to(torch.ones(1).cuda().device) @ v


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_device_is_named_though_another_layout_failed_first() -> None:
    (found,) = errors(verified(on_a_gpu, "scale"))
    assert "needs a device that this machine lacks" in found[1]


def test_the_headline_counts_what_was_not_measured() -> None:
    def by_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v: (batch, heads, length, d)."""
        return (-torch.cdist(q, k)).softmax(-1) @ v

    report = verified(by_distance, "scale", "softmax", "dropout")
    said = next(iter(str(report).split("\n\n")))
    assert "could not be measured: scale" in " ".join(said.split())


class Words(nn.Module):
    """Token ids (batch, length) in, logits out; `fault` is the call in which later tokens are seen."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.table, self.qkv = fault, nn.Embedding(47, E), nn.Linear(E, 3 * E)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False, debug: bool = False
    ) -> Tensor:
        q, k, v = self.qkv(self.table(input_ids)).chunk(3, -1)
        length = input_ids.shape[1]
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        given = attention_mask is not None
        leaks = {
            "debug": debug,
            "both": use_cache and given,
            "padding": debug and not real.all(),
            "length": use_cache and length > 16,
            "training": debug and self.training,
            "": False,
        }[self.fault]
        visible = torch.ones(length, length, dtype=torch.bool).tril(length if leaks else 0) & real.bool()[:, None]
        scores = (q @ k.mT / math.sqrt(E)).masked_fill(~visible, torch.finfo(q.dtype).min)
        return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    ("fault", "calls", "where"),
    [
        ("debug", ["debug=True"], "positions"),
        ("both", ["use_cache=True"], "with padding"),
        ("padding", ["debug=True"], "with padding"),
        ("length", ["use_cache=True"], "of 33 positions"),
        ("training", ["debug=True"], "in train mode"),
        ("", [], ""),
    ],
)
def test_a_whole_model_is_compared_where_its_flags_could_matter(fault: str, calls: list[str], where: str) -> None:
    torch.manual_seed(0)
    differing = variants(token_subject(Words(fault)), True)
    assert [one.words for one in differing] == calls
    assert all(where in one.where and one.harmless for one in differing)


def test_a_mask_and_a_flag_together_and_masks_of_both_types_are_calls() -> None:
    torch.manual_seed(0)
    subject = token_subject(Words("both"))
    words = {" and ".join(call.words for call in calls) for calls in _calls(subject, True)}
    mask = "an `attention_mask` that hides nothing"
    assert {
        mask,
        f"{mask}, of int64",
        f"use_cache=True and {mask}",
        f"use_cache=True and debug=True and {mask}",
    } <= words
