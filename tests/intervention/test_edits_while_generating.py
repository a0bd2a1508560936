"""Edits with a cache of keys and values: token by token they give what they give of the whole sequence.

Shape legend: B batch, L length, E width.
"""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade.intervention import Ablate, Bias, Freeze, Mask, Patch, Scale, Weights
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
    "masked": lambda source: Mask([1, 3], saccade.Window(2, 0)),
    "biased": lambda source: Bias([1, 2], saccade.ALiBi(SLOPES)),
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
@pytest.mark.parametrize("ends", [[5, 6, 7, 8, 9], [5, 9]])
@pytest.mark.parametrize("name", EDITS)
def test_a_cache_of_saccade(name, ends):
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
