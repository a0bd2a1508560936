"""Edits with a cache of keys and values: token by token they give what they give of the whole sequence.

Shape legend: B batch, L length, E width.
"""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import saccade
from saccade.intervention import Ablate, EditBias, EditMask, Freeze, Patch, Scale, Weights
from saccade.intervention._answer import RowCounts
from saccade.nn import AttentionConfig, BlockConfig, Decoder
from saccade.positions import RotaryConfig

B, L, E, H = 2, 9, 20, 4
PROMPT = 5  # tokens of the other run, and of the first forward
SLOPES = torch.tensor([0.5, 0.7, 0.3, 0.2], dtype=torch.float64)
EDITS = {
    "zero": lambda source: Ablate([1]),
    "zero of an item": lambda source: Ablate([1], items=1),
    "scaled": lambda source: Scale([1], 0.4),
    "sharpened": lambda source: Scale([1], 2.0, what="logits"),
    "masked": lambda source: EditMask([1, 3], saccade.Window(2, 0)),
    "biased": lambda source: EditBias([1, 2], saccade.ALiBi(SLOPES)),
    "function": lambda source: Weights([1], lambda weights, rows: weights * weights),
    **{
        what: lambda source, what=what: Patch([2, 1], source, what, range(PROMPT))
        for what in ("output", "query", "key", "value")
    },
    **{
        f"{what} at positions": lambda source, what=what: Patch([2, 1], source, what, [4, 2])
        for what in ("output", "query", "key", "value")
    },
}


def decoder() -> Decoder:
    attention = AttentionConfig(E, H, kv_heads=2, head_width=6, positions=RotaryConfig())
    return Decoder(BlockConfig(attention), 2).double()


def in_steps(model: Decoder, x: torch.Tensor, ends: list[int]) -> torch.Tensor:
    cache, starts = model.cache(), [0, *ends]
    return torch.cat([model(x[:, a:b], cache=cache) for a, b in zip(starts, ends, strict=False)], 1)


@torch.no_grad()
@pytest.mark.parametrize("name", EDITS)
def test_a_cache_of_saccade(name):
    ends = [5, 6, 9]  # one token at a time and several
    model, x, other = decoder(), *torch.randn(2, B, L, E, dtype=torch.float64)
    with saccade.watch(model, keep=True, alarms=False) as source:
        model(other[:, :PROMPT])
    edit = EDITS[name](source)
    with saccade.intervene(model, {1: edit}):
        expected = model(x)
    with saccade.intervene(model, {1: edit}) as run:
        found = in_steps(model, x, ends)
    assert run.changed == {"blocks.1.attention": len(ends)}
    assert not torch.allclose(expected, model(x))
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("what", ["output", "query", "key", "value"])
def test_positions_count_along_the_sequence_where_the_block_begins_behind_a_cache(what):
    """Row 1 of the forward is position 4 of the sequence, and of the source."""
    model, x, other = decoder(), *torch.randn(2, B, L, E, dtype=torch.float64)
    with saccade.watch(model, keep=True, alarms=False) as source:
        model(other)
    cache = model.cache()
    with saccade.intervene(model, {1: Patch([2, 1], source, what, [4])}):
        expected = model(x)[:, 3:]
    model(x[:, :3], cache=cache)
    with saccade.intervene(model, {1: Patch([2, 1], source, what, [4])}):
        found = model(x[:, 3:], cache=cache)
    assert not torch.allclose(expected, model(x)[:, 3:])
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("edit", [Freeze, lambda heads, source: Patch(heads, source, "output")])
def test_a_source_of_the_prompt_says_nothing_of_the_tokens_after_it(edit):
    """Of all positions in which the source has tokens, and no more: the rows after it are the model's own."""
    model, x, other = decoder(), *torch.randn(2, B, L, E, dtype=torch.float64)
    with saccade.watch(model, keep=True, alarms=False) as source:
        model(other[:, :PROMPT])
    with saccade.intervene(model, {1: edit([1], source)}):
        found = in_steps(model, x, [5, 6, 7, 8, 9])
    plain = model(x)
    # keys and values of the last layer do not depend on its outputs
    torch.testing.assert_close(found[:, PROMPT:], plain[:, PROMPT:], atol=1e-11, rtol=1e-9)
    assert not torch.allclose(found[:, :PROMPT], plain[:, :PROMPT])


CALLS = {  # (rows, keys) of calls one after the other, and the position of row 0 of each
    "a cache": [((5, 5), 0), ((1, 6), 5), ((3, 9), 6)],
    "a window of 4 keys": [((5, 5), 0), ((1, 4), 5), ((2, 5), 6), ((1, 4), 8)],
    "two texts": [((5, 5), 0), ((1, 4), 5), ((3, 3), 0), ((1, 4), 3)],
    "a cache from before": [((1, 8), 7), ((1, 9), 8)],
    "one beginning for two texts": [((3, 10), 7), ((1, 11), 10), ((2, 9), 7), ((1, 10), 9)],
    "a text, then a cache from before": [((5, 5), 0), ((1, 10), 9), ((1, 8), 7)],
}


@pytest.mark.parametrize("name", CALLS)
def test_where_the_rows_of_calls_stand(name):
    counts = RowCounts()
    counts.first_row("another call", 2, 2)
    assert [counts.first_row("call", *sizes) for sizes, _ in CALLS[name]] == [first for _, first in CALLS[name]]


@torch.no_grad()
@pytest.mark.parametrize("what", ["output", "query", "key", "value"])
def test_a_patch_is_used_again_with_a_cache_from_before_its_block(what):
    """Nothing of the first text is left in the edit. Two of the positions are of tokens that come later."""
    model, x, other = decoder(), *torch.randn(2, B, L, E, dtype=torch.float64)
    with saccade.watch(model, keep=True, alarms=False) as source:
        model(other)
    edit = Patch([2, 1], source, what, [2, 6, 8])
    with saccade.intervene(model, {1: edit}):
        expected = model(x)
    with saccade.intervene(model, {1: edit}):
        torch.testing.assert_close(in_steps(model, x, [5, 6, 7, 8, 9]), expected, atol=1e-11, rtol=1e-9)
    cache = model.cache()
    model(x[:, :PROMPT], cache=cache)
    with saccade.intervene(model, {1: edit}):
        found = torch.cat([model(x[:, n : n + 1], cache=cache) for n in range(PROMPT, L)], 1)
    torch.testing.assert_close(found, expected[:, PROMPT:], atol=1e-11, rtol=1e-9)


def test_positions_that_no_token_of_the_block_has():
    model, x = decoder(), torch.randn(B, L, E, dtype=torch.float64)
    with torch.no_grad(), saccade.watch(model, keep=True, alarms=False) as source:
        model(x)
    ran = []
    with pytest.raises(ValueError, match="positions: blocks.1.attention has 8 keys, got 8"):  # noqa: SIM117
        with torch.no_grad(), saccade.intervene(model, {1: Patch([1], source, "key", [2, 8])}):
            ran.append(in_steps(model, x[:, :8], [5, 8]))
    assert len(ran) == 1


def test_one_patch_on_two_threads():
    """Each thread has a text of its own, of another length; their steps alternate."""
    model, x, other = decoder(), *torch.randn(2, B, L, E, dtype=torch.float64)
    with torch.no_grad(), saccade.watch(model, keep=True, alarms=False) as source:
        model(other)
    edit, prompts = Patch([2, 1], source, "output", [6]), (5, 3)
    with torch.no_grad(), saccade.intervene(model, {1: edit}):
        expected = model(x)
    barrier, found = threading.Barrier(len(prompts)), {}

    def go(prompt: int) -> None:
        cache, steps = model.cache(), []
        with torch.no_grad(), saccade.intervene(model, {1: edit}):
            for begin, end in [(0, prompt), *((n, n + 1) for n in range(prompt, prompt + 4))]:
                barrier.wait(60)
                steps.append(model(x[:, begin:end], cache=cache))
        found[prompt] = torch.cat(steps, 1)

    threads = [threading.Thread(target=go, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt in prompts:
        torch.testing.assert_close(found[prompt], expected[:, : prompt + 4], atol=1e-11, rtol=1e-9)


class Windowed(nn.Module):
    """Rows of a text that attend to given keys of it; maybe checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.checkpointed = nn.Linear(6, 6), False

    def attend(self, rows: Tensor, keys: Tensor) -> Tensor:
        query, key = (self.project(part).unflatten(-1, (2, 3)).transpose(1, 2) for part in (rows, keys))
        return F.scaled_dot_product_attention(query, key, key)

    def forward(self, rows: Tensor, keys: Tensor) -> Tensor:
        return (
            checkpoint(self.attend, rows, keys, use_reentrant=False) if self.checkpointed else self.attend(rows, keys)
        )


def test_a_checkpoint_that_is_repeated_counts_no_rows():
    """The gradient is that of the rows as they stood, and the tokens after it stand where they did."""
    model, x = Windowed(), torch.randn(1, 7, 6)
    with torch.no_grad(), saccade.watch(model, keep=True, alarms=False) as source:
        model(*torch.randn(2, 1, 7, 6))
    found = []
    for model.checkpointed in (False, True):
        with saccade.intervene(model, {"*": Patch([1], source, "output", [5, 6])}):
            model(x[:, :5], x[:, :5])
            step = model(x[:, 5:6], x[:, 2:6])  # a window of 4 keys
            slope = torch.autograd.grad(step.square().sum(), model.project.weight)[0]
            found.append((step, slope, model(x[:, 6:7], x[:, 3:7])))
    assert torch.equal(found[1][2][:, 1], source.kept[""].out[:, 1, 6:7])
    for own, expected in zip(*found, strict=True):
        assert torch.equal(own, expected)
