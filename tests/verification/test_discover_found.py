"""Published styles whose arguments mislead: what is given to them, and what is no cache.

Shape legend: B batch, L length, E model width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.verification import Undecided
from saccade.verification._verify import verify
from saccade.verification.subject.discovery._discover import discover
from slowly import slow_after

E, H, V = 24, 4, 61


class Whisper(nn.Module):
    """Returns its scores beside the output; hooks fill its `kv_cache`."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(E, E) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None, kv_cache: dict | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (one(x).unflatten(-1, (H, -1)).transpose(1, 2) for one in (self.query, self.key, self.value))
        qk = q @ k.mT / (E // H) ** 0.5
        qk = qk if mask is None else qk + mask[: x.shape[1], : x.shape[1]]
        return self.out((qk.softmax(-1) @ v).transpose(1, 2).flatten(2)), qk.detach()


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * freqs[None, :, None]
    return torch.view_as_real(turned).flatten(3).type_as(x)


class LlamaAttention(nn.Module):
    """Of the published reference: the caller slices the rotations."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.head_dim = H, E // H
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(E, E, bias=False) for _ in range(4))
        self.register_buffer("cache_k", torch.zeros(16, 64, H, E // H), persistent=False)
        self.register_buffer("cache_v", torch.zeros(16, 64, H, E // H), persistent=False)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (one(x).unflatten(-1, (H, -1)) for one in (self.wq, self.wk, self.wv))
        q, k = rotated(q, freqs_cis), rotated(k, freqs_cis)
        kept = [tensor.detach().clone() for tensor in (self.cache_k, self.cache_v)]
        for whole, new in zip(kept, (k, v), strict=True):
            whole[:batch, start_pos : start_pos + length] = new.detach()
        self.cache_k, self.cache_v = kept
        past = [value[:batch, :start_pos] for value in kept]
        k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / math.sqrt(self.head_dim)
        scores = scores if mask is None else scores + mask
        return self.wo((scores.float().softmax(-1).type_as(q) @ v.transpose(1, 2)).transpose(1, 2).flatten(2))


class Llama(nn.Module):
    """The same as a whole model, which slices them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.output = nn.Embedding(V, E), nn.Linear(E, V, bias=False)
        self.layers = nn.ModuleList([LlamaAttention() for _ in range(2)])
        angles = torch.outer(torch.arange(64), 10000.0 ** (-torch.arange(0, E // H, 2) / (E // H)))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        length = tokens.shape[1]
        x = self.tok_embeddings(tokens)
        mask = torch.full((length, length), -torch.inf, device=x.device).triu(1)
        mask = torch.hstack([torch.zeros(length, start_pos, device=x.device), mask]).type_as(x)
        for layer in self.layers:
            x = x + layer(F.rms_norm(x, (E,)), start_pos, self.freqs_cis[start_pos : start_pos + length], mask)
        return self.output(x)


class SequenceFirst(nn.Module):
    """As in PyTorch's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(V, E), nn.Linear(E, V)
        self.layer = nn.TransformerEncoderLayer(E, H, 37)

    def forward(self, src: Tensor) -> Tensor:
        """
        Arguments:
            src: Tensor, shape ``[seq_len, batch_size]``
        """
        mask = nn.Transformer.generate_square_subsequent_mask(len(src), device=src.device)
        x = self.embedding(src)
        return self.linear(self.layer(x, src_mask=mask.to(x.dtype), is_causal=True))


def test_scores_are_nothing_to_pass_on() -> None:
    reading = discover(Whisper()).reading
    assert (reading.out, reading.cache) == (0, None)


def test_a_cache_whose_rotations_come_from_the_caller_is_not_tried() -> None:
    """Only the caller knows which rows of its table belong to a later piece."""
    reading = discover(LlamaAttention()).reading
    assert reading.cache is None and "freqs_cis made for positions from 0 on" in reading.assumed


@pytest.mark.slow
def test_tokens_with_the_position_at_which_they_begin() -> None:
    module = Llama().eval()
    subject = discover(module)
    assert subject.form == "tokens" and subject.reading.constants == {"start_pos": 0}
    inputs = subject.inputs(2, 5)
    torch.testing.assert_close(subject(inputs).out, module(inputs["tokens"], 0))
    report = verify(module, isolated=False, checks=["causal-leak", "model"])
    assert report.ok and report.causal, f"\n{report}"


def test_a_start_that_is_ignored_is_found() -> None:
    class Ignoring(Llama):
        def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
            return super().forward(tokens, 0)

    report = verify(Ignoring(), isolated=False, checks=["model"])
    assert [finding.family for finding in report.errors] == ["model"], f"\n{report}"


def test_tokens_that_are_documented_as_length_first() -> None:
    module = SequenceFirst().eval()
    subject = discover(module)
    assert subject.reading.layout == "LB"
    inputs = subject.inputs(3, 5)
    torch.testing.assert_close(subject(inputs).out, module(inputs["tokens"].T).transpose(0, 1))
    report = verify(module, isolated=False, checks=["causal-leak", "causal-blindness", "model"])
    assert report.ok and report.causal, f"\n{report}"
    assert "src (length, batch)" in report.called


class Window(nn.Module):
    """Swin's: a table of positions for windows of 3 x 3, and no other length."""

    def __init__(self, positions: int = 9, axis: int = -1, scale: float = (E // H) ** -0.5, sees: int = 9) -> None:
        super().__init__()
        self.num_heads, self.axis, self.scale = H, axis, scale
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.table = nn.Parameter(torch.randn(H, positions, positions))
        self.register_buffer("hidden", torch.ones(positions, positions).triu(sees) * -torch.inf if sees < 9 else None)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * self.scale + self.table
        if mask is not None:  # (windows, N, N), added
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        if self.hidden is not None:
            scores = scores + self.hidden.nan_to_num(0.0)
        return self.proj((scores.softmax(self.axis) @ v).transpose(1, 2).flatten(2))


@pytest.mark.slow
def test_one_length_alone_is_measured_at_that_length() -> None:
    names = ["scale", "softmax", "mixing", "order", "precision", "dropout", "dtype and device"]
    report = verify(Window(), isolated=False, checks=names)
    measured = {outcome.name for outcome in report.outcomes if outcome.status == "passed"}
    assert report.ok and not report.findings, f"\n{report}"
    assert measured == set(names) - {"order", "dropout"}, f"\n{report}"
    unmeasured = {outcome.name: outcome.reason for outcome in report.outcomes if not outcome.measured}
    assert "9 positions and no other" in unmeasured["order"], f"\n{report}"


@pytest.mark.parametrize(
    ("options", "check"),
    slow_after(1, [({"scale": 1.0}, "scale"), ({"axis": -2}, "softmax"), ({"sees": 2}, "causal-leak")]),
)
def test_faults_of_one_length_alone_are_named(options: dict[str, Any], check: str) -> None:
    report = verify(Window(**options), isolated=False, checks=["scale", "softmax", "causal-leak", "mixing"])
    assert {error.check for error in report.errors} == {check}, f"\n{report}"


def test_one_length_that_is_the_width_of_a_head_may_be_an_axis_that_is_mistaken() -> None:
    with pytest.raises(Undecided, match=f"it takes inputs of {E // H} positions and of no other number") as caught:
        discover(Window(E // H))
    assert "--adapter FILE.py:NAME" in str(caught.value)

    def padded(target: nn.Module, x: Tensor) -> Tensor:
        length = x.shape[1]
        return target(F.pad(x, (0, 0, 0, 33 - length)))[:, :length]

    report = verify(Window(33), how=padded, embed_dim=E, isolated=False, checks=["scale"])
    assert report.ok and any(outcome.status == "passed" for outcome in report.outcomes), f"\n{report}"


class ClassAttention(nn.Module):
    """As in CaiT, arXiv 2103.17239: the first token alone attends, and comes out alone."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.q, self.kv, self.proj = H, nn.Linear(E, E), nn.Linear(E, 2 * E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        k, v = (one.unflatten(-1, (H, -1)).transpose(1, 2) for one in self.kv(x).chunk(2, -1))
        q = self.q(x[:, :1]).unflatten(-1, (H, -1)).transpose(1, 2)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_one_that_gives_no_output_for_each_position_is_not_said_to_take_one_length() -> None:
    with pytest.raises(Undecided, match="no output for each of 7 positions") as caught:
        discover(ClassAttention())
    assert "of no other number" not in str(caught.value) and f"returns [2, 1, {E}]" in str(caught.value)
