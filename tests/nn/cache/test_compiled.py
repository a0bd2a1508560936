"""A static cache under torch.compile: one graph, compiled once, whatever the length."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nn.cache.decoding import BIASES, MASKS, Decoding
from saccade import Causal, FromTensor, Padding
from saccade.nn import AttentionConfig, BlockConfig, Decoder
from saccade.nn.cache import KVCache, StaticLayer
from saccade.positions import Rotary, RotaryConfig

CAPACITY = 41

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # PyTorch's


class Compiled(Decoding):
    """Decoding whose cache runs compiled, unless `eager` is set."""

    def __init__(self, mask="causal", bias="no bias", backend="eager"):
        super().__init__(StaticLayer(CAPACITY), mask, bias)
        torch._dynamo.reset()
        self.counter = CompileCounterWithBackend(backend)
        added, self.bias, mask = self.bias(), lambda: added, self.case.mask
        cache = self.cache
        self.compiled_append = torch.compile(
            lambda key, value, padding: cache.append(key, value, mask, added, padding),
            backend=self.counter,
            fullgraph=True,
        )
        self.compiled_offset = torch.compile(lambda rows, padding: cache.offset(rows, padding), backend="eager")
        self.eager = False

    def offset(self, rows, padding):
        return super().offset(rows, padding) if self.eager else self.compiled_offset(rows, padding)

    def append(self, key, value, padding):
        return super().append(key, value, padding) if self.eager else self.compiled_append(key, value, padding)


def decode(run, *, padded=False):
    run.eager = True
    run.step([6, 2, 4], side="left")
    run.eager = False
    for n in range(7):
        run.step([1, n % 2, 1] if padded else [1, 1, 1], side="right" if n else "left")
    return run.counter.frame_count


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_steps_are_compiled_once(mask):
    assert decode(Compiled(mask)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_is_compiled_once(mask):
    assert decode(Compiled(mask)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("bias", [name for name in BIASES if name != "no bias"])
def test_biases(bias):
    assert decode(Compiled("causal", bias)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_decoder(backend):
    attention = AttentionConfig(32, 4, kv_heads=2, head_width=16, positions=RotaryConfig())
    model, x = Decoder(BlockConfig(attention, hidden=17), 2).eval(), torch.randn(2, 17, 32)
    torch._dynamo.reset()
    counter, cache = CompileCounterWithBackend(backend), KVCache.static(2, 19)
    step = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        expected = model(x)
        parts = [model(x[:, :5], cache=cache)]
        parts += [step(x[:, at : at + 1], cache=cache) for at in range(5, 17)]
    assert counter.frame_count == 1 and cache.length == 17
    # Sums of 32 products of order 1 in float32, through two layers.
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_padding_and_turns_with_eager_steps():
    run = Compiled("window")
    run.step([5, 3, 1], side="left")  # the prompt too, from an empty cache
    for n in range(4):
        run.step([1, 1, 1])
        run.eager = True
        run.step([2, n % 3, 1], side="left")
        run.rollback([2, 0, 1])
        run.reorder([1, 0, 2])
        run.eager = False
    compiled = run.counter.frame_count
    run.step([1, 1, 1])
    assert run.counter.frame_count == compiled
    for n in range(3):
        run.step([1, 0, 1], side="left" if n % 2 else "right")


@pytest.mark.slow
def test_inductor():
    assert decode(Compiled("window", backend="inductor")) == 1


def compiled_step(cache, mask=None):
    torch._dynamo.reset()
    rotary = Rotary(6)

    @torch.compile(backend="eager", fullgraph=True)
    @torch.no_grad()
    def step(x):
        offset = cache.offset(1)
        seen = cache.append(rotary(x, offset), x, mask)
        return seen.value, offset, cache.length

    return step


def test_lengths_are_tensors_while_compiled_and_ints_again_afterwards():
    cache = StaticLayer(4)
    with torch.no_grad():
        cache.append(*[torch.ones(2, 1, 2, 6)] * 2, None)
    _, offset, length = compiled_step(cache)(torch.ones(2, 1, 1, 6))
    assert offset.tolist() == [2, 2] and length.tolist() == [3, 3]
    assert cache.length == 3 and cache.offset(1) == 3


def test_beyond_the_capacity_nothing_is_silent():
    cache = StaticLayer(3)
    with torch.no_grad():
        cache.append(*[torch.ones(2, 1, 2, 6)] * 2, None)
    step = compiled_step(cache)
    assert not step(torch.ones(2, 1, 1, 6))[0].isnan().any()
    assert step(torch.ones(2, 1, 1, 6))[0][:, :, 2].isnan().all()  # nobody can look, so it answers with NaN
    with torch.no_grad(), pytest.raises(ValueError, match="4 tokens and 1 new ones do not fit its capacity of 3"):
        cache.append(*[torch.ones(2, 1, 1, 6)] * 2, None)


@pytest.mark.slow
def test_a_mask_given_as_a_tensor_must_cover_the_capacity():
    cache = StaticLayer(5)
    with torch.no_grad():
        cache.append(*[torch.ones(2, 1, 2, 6)] * 2, None)
    step = compiled_step(cache, Causal() & FromTensor(torch.ones(4, 4, dtype=torch.bool)))
    with pytest.raises(Exception, match=r"a mask of shape \(4, 4\) for 5 queries and 5 keys"):
        step(torch.ones(2, 1, 1, 6))


@pytest.mark.slow
def test_padded_rows_are_left_out():
    cache = StaticLayer(5)
    with torch.no_grad():
        cache.append(*[torch.ones(2, 1, 2, 6)] * 2, None)
        new = torch.full((2, 1, 1, 6), 2.0)
        new[1] = torch.nan
        append = torch.compile(cache.append, backend="eager", fullgraph=True)
        seen = append(new, new, None, None, Padding(torch.tensor([[True], [False]])))
    assert cache.length.tolist() == [3, 2]
    assert seen.value[:, 0, :3, 0].tolist() == [[1, 1, 2], [1, 1, 0]]
    assert seen.mask.dense(1, 5)[:, 0, 0].tolist() == [[True, True, True, False, False], [False] * 5]
