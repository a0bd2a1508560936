"""What mixes batch items, positions, heads or projections is named, with the line; what does not is left alone.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saccade
from saccade.verification import Finding, Inapplicable, Promise, Reading
from saccade.verification.checks.mixing import _check as mixing
from saccade.verification.checks.mixing._heads import heads
from saccade.verification.findings._words import spans
from saccade.verification.subject._steady import exact
from saccade.verification.subject._subject import Subject
from saccade.verification.tracing._wiring import wiring
from slowly import slow_after

H, D = 3, 5
E = H * D
SELF = Reading("self", "BLD", E)


def split(x: Tensor, heads: int) -> Tensor:
    """(B, L, E) -> (B, H, L, D)"""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def untransposed(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], heads, x.shape[1], -1)


def widths_first(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], -1, heads).permute(0, 3, 1, 2)


def merge(x: Tensor) -> Tensor:
    """(B, H, L, D) -> (B, L, E)"""
    return x.transpose(1, 2).flatten(2)


def merge_untransposed(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[2], -1)


def merge_interleaved(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).flatten(2)


def repeated(x: Tensor, times: int) -> Tensor:
    return x.repeat_interleave(times, 1)


def tiled(x: Tensor, times: int) -> Tensor:
    return x.repeat(1, times, 1, 1)


Splits = tuple[Callable[[Tensor, int], Tensor], ...]


class Attention(nn.Module):
    """Self-attention with a place to break it at each step."""

    def __init__(
        self,
        splits: Splits = (split,) * 3,
        merged: Callable[[Tensor], Tensor] = merge,
        *,
        heads: int = H,
        kv_heads: int | None = None,
        repeats: Splits = (repeated,) * 2,
        causal: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.q_proj = nn.Linear(heads * D, heads * D)
        self.k_proj = nn.Linear(heads * D, self.kv_heads * D)
        self.v_proj = nn.Linear(heads * D, self.kv_heads * D)
        self.out_proj = nn.Linear(heads * D, heads * D)
        self.splits, self.merged, self.repeats, self.causal = splits, merged, repeats, causal

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def attended(self, x: Tensor) -> Tensor:
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (cut(one, n) for cut, one, n in zip(self.splits, self.projected(x), sizes, strict=True))
        k, v = (repeat(one, self.heads // self.kv_heads) for repeat, one in zip(self.repeats, (k, v), strict=True))
        return self.merged(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal))

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.attended(x))


def found(target: Any, reading: Reading = SELF, promise: Promise | None = None) -> list[Finding]:
    target = target.eval() if isinstance(target, nn.Module) else target
    return list(mixing.CHECK.run(Subject(target, reading, promise or Promise())))


def only_error(target: Any, reading: Reading = SELF, promise: Promise | None = None) -> Finding:
    (finding,) = found(target, reading, promise)
    assert (finding.severity, finding.family) == ("error", "mixing")
    return finding


def blamed(finding: Finding) -> str:
    assert finding.location is not None
    return finding.location.code


# --- heads and positions


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("place, role", [(0, "query"), (1, "key"), (2, "value")])
def test_a_view_without_a_transpose(place: int, role: str, causal: bool) -> None:
    splits = [split] * 3
    splits[place] = untransposed
    finding = only_error(Attention(tuple(splits), causal=causal))
    # (1, H, L, D) of (L, H*D): head 1 begins at chunk L of D channels, which is position L // H
    length = 7  # 5 divides the width
    assert finding.evidence == {"role": role, "index": [0, 1, 0, 0], "position": length // H}
    assert f"The {role} at place 0 of head 1 is made from position {length // H}" in finding.message
    assert blamed(finding) == "return x.view(x.shape[0], heads, x.shape[1], -1)"


@pytest.mark.parametrize("causal", [False, True])
def test_no_transposes_at_all_mix_though_each_row_is_its_own(causal: bool) -> None:
    finding = only_error(Attention((untransposed,) * 3, merge_untransposed, causal=causal))
    assert "run of positions" in finding.message


def test_merged_without_a_transpose() -> None:
    finding = only_error(Attention(merged=merge_untransposed))
    length, row = 7, 3
    first = row * H  # the first chunk of row 3 in (H, L, D)
    assert finding.evidence["row"] == row and finding.evidence["query"] == first % length
    assert finding.evidence["channels"][:D] == [*range(D)]
    assert blamed(finding) == "return x.reshape(x.shape[0], x.shape[2], -1)"


@pytest.mark.parametrize("place, role", [(0, "query"), (1, "key"), (2, "value")])
def test_one_projection_split_in_another_order(place: int, role: str) -> None:
    splits = [split] * 3
    splits[place] = widths_first
    finding = only_error(Attention(tuple(splits)))
    assert finding.evidence[role] == "interleaved" and finding.evidence["merged"] == "head by head"
    assert blamed(finding) == "return x.view(*x.shape[:2], -1, heads).permute(0, 3, 1, 2)"


def test_merged_in_another_order_than_split() -> None:
    finding = only_error(Attention(merged=merge_interleaved))
    assert finding.evidence["merged"] == "interleaved" and finding.evidence["query"] == "head by head"
    assert blamed(finding) == "return x.permute(0, 2, 3, 1).flatten(2)"


def test_interleaved_everywhere_is_a_convention() -> None:
    (finding,) = found(Attention((widths_first,) * 3, merge_interleaved))
    assert finding.severity == "warning" and "head 0 is channels 0, 3, 6" in finding.message


def test_one_other_split_for_all_three_is_a_choice() -> None:
    """Channels of free projections may be dealt out in any order that is the same for queries, keys and values."""
    (finding,) = found(Attention((widths_first,) * 3))
    assert finding.severity == "warning" and finding.evidence["merged"] == "head by head"
    assert finding.evidence["query"] == finding.evidence["key"] == finding.evidence["value"] == "interleaved"


def test_heads_merged_in_reverse() -> None:
    finding = only_error(Attention(merged=lambda o: merge(o.flip(1))))
    assert finding.evidence["lands"] == [2, 1, 0]


@pytest.mark.parametrize(
    "repeats, which", [((tiled, tiled), "keys"), ((tiled, repeated), "keys"), ((repeated, tiled), "values")]
)
def test_kv_heads_repeated_in_the_wrong_order(repeats: Splits, which: str) -> None:
    promise = Promise(kv_order="repeat_interleave")
    finding = only_error(Attention(heads=6, kv_heads=2, repeats=repeats), Reading("self", "BLD", 30), promise)
    assert finding.evidence == {"of": which, "reads": [0, 1, 0, 1, 0, 1], "expected": [0, 0, 0, 1, 1, 1]}
    assert "repeat_interleave" in finding.message
    assert blamed(finding) == "return x.repeat(1, times, 1, 1)"


@pytest.mark.parametrize("repeats", [(tiled, repeated), (repeated, tiled)])
def test_keys_in_another_order_than_values_need_no_promise(repeats: Splits) -> None:
    assert only_error(Attention(heads=6, kv_heads=2, repeats=repeats), Reading("self", "BLD", 30)).evidence["reads"]


def test_one_order_for_both_is_a_choice_until_another_is_promised() -> None:
    reading = Reading("self", "BLD", 30)
    (finding,) = found(Attention(heads=6, kv_heads=2, repeats=(tiled, tiled)), reading)
    assert finding.severity == "warning" and "is usual" in finding.message
    promised = Promise(kv_order="repeat")
    assert found(Attention(heads=6, kv_heads=2, repeats=(tiled, tiled)), reading, promised) == []
    error = only_error(Attention(heads=6, kv_heads=2), reading, promised)
    assert error.evidence["expected"] == [0, 1, 0, 1, 0, 1] and "k.repeat(1" in error.fix


def test_the_kv_heads_of_a_function() -> None:
    def tiling(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, *(tiled(tensor, q.shape[1] // tensor.shape[1]) for tensor in (k, v)))

    finding = only_error(tiling, Reading("attention", "BHLD", D), Promise(kv_order="repeat_interleave"))
    assert finding.evidence["reads"] == [0, 1, 0, 1, 0, 1]

    def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    assert found(right, Reading("attention", "BHLD", D)) == []


def test_a_head_that_reads_the_values_of_another() -> None:
    def first_for_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, torch.cat([v[:, :-1], v[:, :1]], 1))

    finding = only_error(first_for_last, Reading("attention", "BHLD", D, heads=4))
    assert finding.evidence["reads"] == [0, 1, 2, 0] and "nobody reads 3" in finding.message


# --- projections


class KeysOfQueries(Attention):
    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.q_proj(x), self.v_proj(x)


class ValuesOfKeys(Attention):
    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.k_proj(x)


class OneForBoth(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.k_proj = self.q_proj


class Unmixed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.attended(x)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(one, H) for one in self.qkv(x).chunk(3, -1))
        v = k
        return self.proj(merge(F.scaled_dot_product_attention(q, k, v)))


class OneHeadManyTimes(nn.Module):
    def __init__(self, copies: bool = False) -> None:
        super().__init__()
        head = [nn.Linear(E, D) for _ in range(3)]
        self.heads = nn.ModuleList([nn.ModuleList(head)] * H)
        if copies:
            self.heads = nn.ModuleList(nn.ModuleList(nn.Linear(E, D) for _ in range(3)) for _ in range(H))
        self.out = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        outs = [F.scaled_dot_product_attention(*(one(x) for one in head)) for head in self.heads]
        return self.out(torch.cat(outs, -1))


def test_a_projection_that_serves_twice_while_another_stands_idle() -> None:
    finding = only_error(KeysOfQueries())
    assert finding.evidence == {"shared": ["q_proj.weight"], "names": ["q_proj.weight"], "unused": ["k_proj.weight"]}
    assert only_error(ValuesOfKeys()).evidence["unused"] == ["v_proj.weight"]


def test_one_module_under_two_names() -> None:
    finding = only_error(OneForBoth())
    assert finding.evidence["names"] == ["q_proj.weight", "k_proj.weight"]
    assert blamed(finding) == "self.k_proj = self.q_proj"


def test_one_head_in_a_list_many_times() -> None:
    finding = only_error(OneHeadManyTimes())
    assert len(finding.evidence["shared"]) == 3
    assert blamed(finding) == "self.heads = nn.ModuleList([nn.ModuleList(head)] * H)"
    assert found(OneHeadManyTimes(copies=True)) == []


def test_values_that_are_the_keys() -> None:
    finding = only_error(Fused())
    assert finding.evidence == {"projection": "qkv.weight", "channels": [*range(2 * E, 3 * E)]}
    assert blamed(finding) == "v = k"


def test_no_output_projection() -> None:
    finding = only_error(Unmixed())
    assert finding.evidence == {"heads": H, "unused": ["out_proj.weight"]}
    bare = Unmixed()
    del bare.out_proj
    (told,) = found(bare)
    assert told.severity == "warning"  # the next module may hold it, as BERT's does
    assert found(Unmixed(heads=1), Reading("self", "BLD", D))[0].severity == "warning"  # unused, but nothing to mix


# --- batch items


class Batched(Attention):
    def __init__(self, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.change(self, x))


def test_an_item_that_moves_another() -> None:
    finding = only_error(Batched(lambda _, x: x - 1e-3 * x.mean(0, keepdim=True)))
    assert finding.evidence["changed item"] != finding.evidence["moved item"]
    assert "x.mean(0, keepdim=True)" in blamed(finding)


def test_items_that_meet_in_training_alone() -> None:
    def change(module: nn.Module, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True) if module.training else x

    assert "in training mode" in only_error(Batched(change)).message


def test_batch_normalisation_is_said_and_no_error() -> None:
    target = Batched(lambda module, x: module.norm(x.mT).mT)  # type: ignore[operator]
    target.norm = nn.BatchNorm1d(E)
    (finding,) = found(target)
    assert finding.severity == "warning" and "batch normalisation" in finding.message


def test_an_item_alone_that_is_another_than_among_others() -> None:
    finding = only_error(Batched(lambda _, x: x / x.shape[0]))
    assert "alone" in finding.message


def test_noise_in_eval_is_no_mixing() -> None:
    with pytest.raises(Inapplicable, match="random numbers"):
        found(Batched(lambda _, x: x + torch.randn_like(x)))


# --- right ones


class Rotary(Attention):
    def attended(self, x: Tensor) -> Tensor:
        q, k, v = (split(one, H) for one in self.projected(x))
        place = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        turned = [
            torch.cat(
                [
                    t[..., :1],
                    t[..., 1:3] * place.cos() + t[..., 3:] * place.sin(),
                    t[..., 3:] * place.cos() - t[..., 1:3] * place.sin(),
                ],
                -1,
            )
            for t in (q, k)
        ]
        return merge(F.scaled_dot_product_attention(*turned, v))


class Normed(Attention):
    """Queries normalised over all heads at once."""

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(x)
        return F.layer_norm(q, (E,)), F.layer_norm(k, (E,)), v


class Gated(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.attended(x) * self.gate(x).sigmoid())


class PerHead(nn.Module):
    """Parameters with an axis for heads, and no merge."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(E, H, D)) for _ in range(3))
        self.o = nn.Parameter(torch.zeros(H, D, E))  # as some begin

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("ble,ehd->bhld", x, one) for one in (self.q, self.k, self.v))
        return torch.einsum("bhld,hde->ble", F.scaled_dot_product_attention(q, k, v), self.o)


class Interleaved(nn.Module):
    """Queries, keys and values of a head side by side in one projection, as in GPT-NeoX."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.qkv(x), H).chunk(3, -1)
        return self.proj(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class ByPosition(nn.Module):
    """(L, B, E), heads and items in one axis, as in fairseq."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        length, batch, _ = x.shape
        q, k, v = (f(x).view(length, batch * H, D).transpose(0, 1) for f in (self.q, self.k, self.v))
        out = torch.bmm((torch.bmm(q, k.mT) / math.sqrt(D)).softmax(-1), v)
        return self.o(out.transpose(0, 1).reshape(length, batch, E))


class ByItem(Attention):
    """Each item by torch.vmap, inside of which nothing can be followed."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda one: super(ByItem, self).forward(one[None])[0])(x)


def encoder(norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(E, H, 19, batch_first=True, norm_first=norm_first)


@pytest.mark.parametrize(
    "make, reading",
    slow_after(
        9,
        [
            (Attention, SELF),
            (lambda: Attention(causal=True), SELF),
            (Rotary, SELF),
            (Normed, SELF),
            (Gated, SELF),
            (PerHead, SELF),
            (Interleaved, SELF),
            (ByPosition, Reading("self", "LBD", E)),
            (lambda: Attention(heads=6, kv_heads=2), Reading("self", "BLD", 30)),
            (lambda: Attention(heads=4, kv_heads=1), Reading("self", "BLD", 20)),
            (lambda: encoder(False), SELF),
            (lambda: encoder(True), SELF),
            (lambda: nn.MultiheadAttention(E, H, batch_first=True), Reading("qkv", "BLD", E, out=0)),
            (lambda: nn.TransformerDecoderLayer(E, H, 19, batch_first=True), Reading("cross", "BLD", E)),
            (lambda: F.scaled_dot_product_attention, Reading("attention", "BHLD", D)),
            (lambda: F.scaled_dot_product_attention, Reading("attention", "BLD", D)),
        ],
    ),
)
def test_right_ones_are_left_alone(make: Callable[[], Any], reading: Reading) -> None:
    torch.manual_seed(3)
    assert found(make(), reading) == []


def test_what_computes_inside_a_transform_is_not_judged() -> None:
    with pytest.raises(Inapplicable, match=r"inside of a torch\.func transform"):
        wiring(Subject(ByItem().eval(), SELF), 7)


def test_heads_are_found_as_they_are() -> None:
    subject = Subject(Attention(heads=6, kv_heads=2).eval(), Reading("self", "BLD", 30))
    found = wiring(exact(subject), 7)
    assert [projection.name for projection in found.projections] == ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    seen = heads(found)
    assert seen is not None
    assert (seen.count, seen.keys, seen.values) == (6, 2, 2)
    assert seen.reads_key == seen.reads_value == (0, 0, 0, 1, 1, 1) and seen.lands == (0, 1, 2, 3, 4, 5)
    last = found.rows[-1].made_from  # (30 elements, 7 positions, 30 + 10 + 10 channels)
    # an element comes from D channels of its own query, and from D keys and one value at each of 7 positions
    assert last.shape == (30, 7, 50) and set(last.sum((1, 2)).tolist()) == {D + 7 * (D + 1)}


@pytest.mark.parametrize(
    "numbers, words",
    [
        ([4], "4"),
        ([4, 5, 6, 9], "4 to 6 and 9"),
        ([0, 1, 3, 5, 6], "0 to 1, 3 and 5 to 6"),
        ([0, 2, 4, 6, 8], "0, 2, 4 and others"),
    ],
)
def test_channels_in_words(numbers: list[int], words: str) -> None:
    assert spans(numbers) == words


def test_one_head_that_is_written_twice() -> None:
    def twice(out: Tensor) -> Tensor:
        return merge(torch.cat([out[:, :-1], out[:, :1]], 1))

    finding = only_error(Attention(merged=twice))
    # the last head's query reaches nothing
    assert finding.evidence["channels"] == [*range(E - D, E)]
    assert "Channels 10 to 14 (5 of 15) of q_proj.weight reach no output" in finding.message


class Returned(Attention):
    """The heads themselves, under a name of their own."""

    def forward(self, x: Tensor) -> Tensor:
        joined = self.attended(x)
        merged = joined.flatten(2)
        return merged


def test_the_return_without_an_output_projection_is_blamed() -> None:
    error = only_error(Returned())
    assert "out_proj.weight is declared and never used" in error.message
    assert error.location is not None and error.location.code == "return merged"


def test_a_backward_that_raises_is_told_by_another_check() -> None:
    """Blocks of the output that are written where the next block's rescaling reads them."""

    class InPlace(Attention):
        def forward(self, *given: Tensor, **options: Tensor) -> Tensor:
            out = super().forward(*given, **options)
            scale = out.sigmoid()
            kept = out * scale
            scale.mul_(1.0)
            return kept

    with pytest.raises(Inapplicable, match="its backward pass raises, see gradients"):
        found(InPlace())


class OneForAnother(nn.Module):
    """The value is the key's part of a fused projection, in three spellings."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.out = 3, nn.Linear(24, 72), nn.Linear(24, 24)

    def joined(self, *parts: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in parts)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ByChunk(OneForAnother):
    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = parts[0], parts[1], parts[1]
        return self.joined(q, k, v)


class BySplit(OneForAnother):
    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(24, dim=-1)
        q = parts[0]
        v = parts[1]
        k = parts[1]
        return self.joined(q, k, v)


class ByUnbind(OneForAnother):
    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, 24)).unbind(2)
        queries = qkv[0]
        keys = qkv[2]
        values = qkv[2]
        return self.joined(queries, keys, values)


@pytest.mark.parametrize(
    ("target", "line"),
    [(ByChunk, "q, k, v = parts[0], parts[1], parts[1]"), (BySplit, "v = parts[1]"), (ByUnbind, "keys = qkv[2]")],
)
def test_the_line_that_takes_one_part_for_another_is_blamed(target: type[nn.Module], line: str) -> None:
    (finding,) = saccade.verify(target, isolated=False, checks=["mixing"]).errors
    assert "reach no output" in finding.message
    assert finding.location is not None and finding.location.code == line
