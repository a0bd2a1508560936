"""What masks mean and which shapes they have: told by documentation, shown by what they hide."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.verification import Promise
from saccade.verification.subject._reading import Hints
from saccade.verification.subject.discovery._discover import discover
from saccade.verification.subject.discovery._documentation import (
    DocumentedSource,
    documented,
    documented_axes,
    meaning_of,
)


def scores_of(q, k):
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def kept_where_one(q, k, v, mask=None):
    scores = scores_of(q, k)
    return (scores if mask is None else scores.masked_fill(mask == 0, -1e9)).softmax(-1) @ v


def hidden_where_true(q, k, v, mask=None):
    scores = scores_of(q, k)
    return (scores if mask is None else scores.masked_fill(mask, -math.inf)).softmax(-1) @ v


def added(q, k, v, mask=None):
    scores = scores_of(q, k)
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def added_bias(q, k, v, attn_bias=None):
    return added(q, k, v, attn_bias)


def times_a_large_number(q, k, v, mask=None):
    scores = scores_of(q, k)
    return (scores if mask is None else scores + mask * -1e9).softmax(-1) @ v


def one_minus(q, k, v, attention_mask=None):
    scores = scores_of(q, k)
    if attention_mask is not None:
        scores = scores + (1.0 - attention_mask[:, None, None, :]) * torch.finfo(scores.dtype).min
    return scores.softmax(-1) @ v


def by_lengths(queries, keys, values, valid_lens=None):
    scores = torch.bmm(queries, keys.mT) / math.sqrt(queries.shape[-1])
    if valid_lens is not None:
        scores[torch.arange(keys.shape[1])[None, None] >= valid_lens[:, None, None].expand_as(scores)] = -1e6
    return torch.bmm(scores.softmax(-1), values)


def both(q, k, v, attn_mask=None, key_padding_mask=None):
    scores = scores_of(q, k)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None, :], -math.inf)
    return scores.softmax(-1) @ v


def required(q, k, v, mask):
    return scores_of(q, k).masked_fill(mask.unsqueeze(1) == 0, -1e9).softmax(-1) @ v


class Encoder(nn.Module):
    def __init__(self, d_model=24, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)

    def forward(self, x, mask=None):
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return self.attend(q, k, v, mask).transpose(1, 2).flatten(2)

    def attend(self, q, k, v, mask):
        return kept_where_one(q, k, v, None if mask is None else mask[:, None, None, :])


class CausalWithPadding(Encoder):
    def attend(self, q, k, v, mask):
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        if mask is not None:
            hidden = hidden | mask[:, None, None, :]
        return scores_of(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ v


class OnlyTriangles(Encoder):
    """Its mask is one for all items and heads."""

    def attend(self, q, k, v, mask):
        if mask is not None:
            assert mask.dim() == 2
        return kept_where_one(q, k, v, mask)


FOUND = [
    (kept_where_one, "mask", "attend", {"QK", "B1QK", "BHQK", "B11K"}),
    (hidden_where_true, "mask", "ignore", {"QK", "B1QK", "BHQK", "B11K"}),
    (added, "mask", "additive", {"QK", "B1QK", "BHQK", "B11K"}),
    (added_bias, "attn_bias", "additive", {"QK", "B1QK", "BHQK", "B11K"}),
    (times_a_large_number, "mask", "ignore", {"QK", "B1QK", "BHQK", "B11K"}),
    (one_minus, "attention_mask", "attend", {"BK"}),
    (required, "mask", "attend", {"BQK", "B1K"}),
    (by_lengths, "valid_lens", "attend", {"B"}),
    (F.scaled_dot_product_attention, "attn_mask", "attend", {"QK", "B1QK", "BHQK", "B11K"}),
    (Encoder(), "mask", "attend", {"BK"}),
    (CausalWithPadding(), "mask", "ignore", {"BK"}),
    (OnlyTriangles(), "mask", "attend", {"QK"}),
]


@pytest.mark.parametrize(("target", "argument", "meaning", "shapes"), FOUND)
def test_shapes_and_meaning_are_found_by_what_is_hidden(target, argument, meaning, shapes):
    masks = discover(target).reading.masks
    assert {mask.argument for mask in masks} == {argument}
    assert {mask.axes for mask in masks} == shapes
    assert {mask.meaning for mask in masks} == {mask.behaves for mask in masks} == {meaning}


@pytest.mark.parametrize(
    "target",
    [
        kept_where_one,
        hidden_where_true,
        added,
        times_a_large_number,
        one_minus,
        required,
        by_lengths,
        both,
        Encoder(),
        CausalWithPadding(),
    ],
)
def test_padding_is_hidden_through_the_reading(target):
    subject = discover(target)
    inputs = subject.inputs(2, 6)
    padding = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    side = "key" if "key" in inputs.tensors else "both"
    before = subject(inputs, padding=padding).out
    after = subject(inputs.changed([4, 5], side, item=1), padding=padding).out
    torch.testing.assert_close(after[1, ..., :4, :], before[1, ..., :4, :])
    assert not torch.equal(subject(inputs).out[1], before[1])


def test_two_masks_are_two_arguments():
    masks = discover(both).reading.masks
    assert [
        (mask.argument, mask.axes, mask.meaning) for mask in masks if not mask.by_pair and mask.argument != "attn_mask"
    ] == [("key_padding_mask", "BK", "ignore")]
    assert {mask.meaning for mask in masks if mask.argument == "attn_mask"} == {"attend"}


def test_one_argument_takes_padding_and_triangle_at_once():
    subject = discover(required)
    inputs = subject.inputs(2, 6)
    padding = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    triangle = torch.ones(6, 6, dtype=torch.bool).tril()
    out = subject(inputs, pairs=triangle, padding=padding).out
    seen = triangle & padding[:, None, None, :]
    torch.testing.assert_close(out, hidden_where_true(*inputs.tensors.values(), ~seen))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "by_pair", "by_key"),
    [
        (nn.MultiheadAttention(20, 4, batch_first=True), "attn_mask", "key_padding_mask"),
        (nn.TransformerEncoderLayer(20, 4, 32, batch_first=True), "src_mask", "src_key_padding_mask"),
        (nn.TransformerDecoderLayer(20, 4, 32, batch_first=True), "memory_mask", "memory_key_padding_mask"),
    ],
)
def test_pytorchs_masks_are_true_where_ignored(module, by_pair, by_key):
    masks = discover(module).reading.masks
    assert {(mask.argument, mask.axes, mask.merged, mask.meaning) for mask in masks} == {
        (by_pair, "QK", 0, "ignore"),
        (by_pair, "BHQK", 4, "ignore"),
        (by_key, "BK", 0, "ignore"),
    }


def inverted(q, k, v, mask=None):
    """mask: (batch, 1, queries, keys), True where a key may be attended to"""
    return hidden_where_true(q, k, v, mask)


def multiplied(q, k, v, mask=None):
    scores = scores_of(q, k)
    return (scores if mask is None else scores * mask).softmax(-1) @ v


def ignored(q, k, v, key_padding_mask=None):
    return scores_of(q, k).softmax(-1) @ v


def test_documentation_wins_over_behaviour_and_both_are_told():
    mask = discover(inverted).reading.masks[0]
    assert (mask.meaning, mask.documented, mask.behaves) == ("attend", "attend", "ignore")
    assert mask.axes == "B1QK"
    assert "True where a key may be attended to" in mask.words


@pytest.mark.slow
def test_what_hides_nothing_is_read_as_is_usual():
    (first, *_) = discover(multiplied).reading.masks
    assert (first.meaning, first.behaves) == ("attend", None)
    (padding, *_) = discover(ignored).reading.masks
    assert (padding.axes, padding.meaning, padding.behaves) == ("BK", "ignore", None)
    assert any("neither meaning hides a key completely" in words for words in discover(ignored).reading.assumed)


class Multiplied(nn.Module):
    """Axes of four broadcast, too, and scramble the output."""

    def __init__(self, width=24):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x, mask=None):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 3, width // 3).permute(2, 0, 3, 1, 4)
        scores = scores_of(q, k)
        scores = scores if mask is None else scores * mask[:, None, None, :]
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)


def test_a_shape_that_changes_the_output_while_it_hides_nothing_is_none():
    assert [mask.axes for mask in discover(Multiplied().eval()).reading.masks] == ["BK"]


def test_a_promise_wins_over_all():
    assert discover(inverted, promise=Promise(mask="ignore")).reading.masks[0].meaning == "ignore"


def test_the_user_may_name_the_mask():
    def odd(q, k, v, visible=None):
        return kept_where_one(q, k, v, visible)

    assert discover(odd).reading.masks == ()
    assert discover(odd, Hints(mask="visible")).reading.masks[0].argument == "visible"


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ("mask: True = attend", "attend"),
        ("mask: 1 = keep, 0 = drop", "attend"),
        ("mask (Tensor): boolean mask with True for positions that should be ignored", "ignore"),
        ("True where padded", "ignore"),
        ("True means ignore", "ignore"),
        ("0 for masked, 1 otherwise", "attend"),
        ("0 for masked tokens and 1 for real tokens", "attend"),
        ("1 for tokens that are not masked, 0 for tokens that are masked.", "attend"),
        ("positions with nonzero values are not allowed to attend", "ignore"),
        ("ones mark positions that may not be attended to", "ignore"),
        ("False hides a key", "attend"),
        ("zero entries are masked out", "attend"),
        ("added to the scores before the softmax", "additive"),
        ("additive mask of shape (B, 1, L, S)", "additive"),
        ("0.0 where visible, -inf elsewhere", "additive"),
        ("a boolean, or float values that are added to the scores; True = attend", "attend"),
        ("(batch, 1, length)", None),
        ("optional mask", None),
        ("padding mask of shape (1, 5)", None),
        ("the mask of 1 head", None),
    ],
)
def test_words_of_a_meaning(words, meaning):
    assert meaning_of(words) == meaning


TWO = DocumentedSource(
    '''
def f(x, src_mask=None, pad=None):
    """A layer.

    Args:
        x: (batch, length, width)
        src_mask: (L, S) booleans.
            True where attention is allowed.
        pad (Tensor): (batch, length), True at
            the padding.
    """
''',
    "",
)
COMMENTED = DocumentedSource(
    """
def f(
    x,
    mask=None,  # (b, n): 1 = real token
    bias=None,
):
    # bias is added to the logits
    return x
""",
    """
def f(
    x,
    mask=None,  # (b, n): 1 = real token
    bias=None,
):
    # bias is added to the logits
    return x
""",
)


def test_each_argument_has_its_own_words():
    names = ("x", "src_mask", "pad")
    assert documented(TWO, "src_mask", names)[0] == "attend"
    assert documented(TWO, "pad", names) == ("ignore", "pad (Tensor): (batch, length), True at the padding.")
    assert documented(TWO, "x", names) == (None, "")
    assert (documented_axes(TWO, "src_mask", names), documented_axes(TWO, "pad", names)) == ("QK", "BK")


def test_comments_are_words_too():
    assert documented(COMMENTED, "mask", ("x", "mask", "bias"))[0] == "attend"
    assert documented(COMMENTED, "bias", ("x", "mask", "bias"))[0] == "additive"
    assert documented_axes(COMMENTED, "mask", ("x", "mask", "bias")) == "BK"


def only_by_place(q, k, v, mask=None, /):
    return kept_where_one(q, k, v, mask)


def among_more(q, k, v, *more):
    return hidden_where_true(q, k, v, *more)


def all_by_place(*given):
    return kept_where_one(*given)


def among_keywords(q, k, v, **options):
    return hidden_where_true(q, k, v, options.get("attn_mask"))


def more_that_is_no_mask(q, k, v, *more):
    return kept_where_one(q, k, v)


class Delegating(Encoder):
    def forward(self, *given):
        return super().forward(*given)


@pytest.mark.parametrize(
    ("target", "argument", "meaning"),
    [
        (only_by_place, "mask", "attend"),
        (among_more, "more", "ignore"),
        (all_by_place, "given", "attend"),
        (among_keywords, "attn_mask", "ignore"),
        (Delegating(), "given", "attend"),
    ],
)
def test_masks_that_have_no_name_are_found_by_place(target, argument, meaning):
    subject = discover(target)
    assert {(mask.argument, mask.meaning) for mask in subject.reading.masks} == {(argument, meaning)}
    inputs = subject.inputs(2, 6)
    padding = torch.tensor([[True] * 4 + [False] * 2] * 2)
    before, after = (
        subject(one, padding=padding).out
        for one in (inputs, inputs.changed([4, 5], "key" if "key" in inputs.tensors else "both"))
    )
    torch.testing.assert_close(after[..., :4, :], before[..., :4, :])


def test_what_comes_by_place_and_hides_nothing_is_no_mask():
    assert discover(more_that_is_no_mask).reading.masks == ()


def items_and_heads_in_one(q, k, v, mask=None):
    batch, heads = q.shape[:2]
    scores = scores_of(q, k).flatten(0, 1)
    if mask is not None:
        assert mask.shape == scores.shape
        scores = scores.masked_fill(mask, -math.inf)
    return scores.softmax(-1).unflatten(0, (batch, heads)) @ v


@pytest.mark.slow
@pytest.mark.parametrize("target", [items_and_heads_in_one, nn.MultiheadAttention(20, 4, batch_first=True)])
def test_a_mask_of_batch_times_heads(target):
    subject = discover(target)
    (found,) = (mask for mask in subject.reading.masks if mask.merged)
    assert (found.axes, found.meaning, found.merged) == ("BHQK", "ignore", subject.reading.heads)
    inputs = subject.inputs(2, 5)
    pairs = torch.rand(2, found.merged, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.6
    pairs |= torch.eye(5, dtype=torch.bool)
    result = subject(inputs, pairs=pairs)
    if subject.form == "attention":
        torch.testing.assert_close(result.out, hidden_where_true(*inputs.tensors.values(), ~pairs))
    else:
        assert torch.equal(result.weights > 0, pairs)


def test_a_bias_that_a_kernel_takes_as_booleans_too_is_added():
    """In place of scores a causal mask is filled into: a boolean would lose it."""

    class Flash(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.qkv, self.proj = 4, nn.Linear(24, 72), nn.Linear(24, 24)

        def forward(self, x, attn_bias=None):
            q, k, v = (one.unflatten(-1, (4, 6)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            bias = torch.zeros(x.shape[1], x.shape[1]) if attn_bias is None else attn_bias
            bias = bias.expand(1, 1, *later.shape) if bias.dim() == 2 else bias
            bias = bias.masked_fill(later, -torch.finfo(q.dtype).max / 2)
            out = F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype) if bias.is_floating_point() else bias)
            return self.proj(out.transpose(1, 2).flatten(2))

    reading = discover(Flash()).reading
    assert {mask.meaning for mask in reading.masks} == {"additive"} and reading.masks[0].behaves == "additive"


class ReplacesItsOwn(nn.Module):
    """As in T5: a bias that is given takes the place of the module's own, and of the mask that goes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.relative = nn.Linear(24, 72), nn.Parameter(torch.randn(31))

    def forward(self, x: Tensor, mask: Tensor | None = None, position_bias: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        if position_bias is None:
            at = torch.arange(x.shape[1])
            position_bias = self.relative[(at[None] - at[:, None]).clamp(-15, 15) + 15]
            position_bias = position_bias if mask is None else position_bias + mask
        return ((q @ k.mT / 8**0.5 + position_bias).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_a_bias_that_replaces_the_own_is_added_and_nobody_promised_it() -> None:
    reading = discover(ReplacesItsOwn).reading
    assert {mask.meaning for mask in reading.masks if mask.argument == "position_bias"} == {"additive"}
    assert not any("as promised" in one for one in reading.assumed)
    (found,) = [one for one in reading.assumed if one.startswith("position_bias")]
    assert "added to the scores, by what it does" in found


def with_alibi(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if alibi is None else scores + alibi
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v


def test_what_is_promised_of_masks_is_none_of_a_bias_beside_them() -> None:
    reading = discover(with_alibi, promise=Promise(mask="attend")).reading
    meanings = {(mask.argument, mask.meaning) for mask in reading.masks}
    assert meanings == {("alibi", "additive"), ("mask", "attend")}


def hides_nothing(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores if mask is None else scores + 0.01 * mask).softmax(-1) @ v


@pytest.mark.parametrize("promised", [None, "ignore"])
def test_as_promised_is_said_of_promises_alone(promised: str | None) -> None:
    assumed = discover(hides_nothing, promise=Promise(mask=promised)).reading.assumed  # type: ignore[arg-type]
    (words,) = [one for one in assumed if one.startswith("mask: ")]
    assert ("as promised" in words) == (promised is not None)


@pytest.mark.parametrize("name", ["alibi", "bias"])
def test_a_switch_for_a_bias_is_no_mask_and_promises_nothing_causal(name: str) -> None:
    parts: dict[str, object] = {}
    exec(
        f"def attend(q, k, v, {name}=True):\n"
        f"    scores = q @ k.mT / q.shape[-1] ** 0.5\n"
        f"    at = torch.arange(q.shape[-2])\n"
        f"    return (scores - (at[:, None] - at).abs() if {name} else scores).softmax(-1) @ v\n",
        {"torch": torch},
        parts,
    )
    reading = discover(parts["attend"]).reading
    assert reading.causal_flag is None and not reading.masks
