"""Calls of PyTorch's flex_attention on an accelerated thread: answered through every reference, and trained on a CPU.

B batch, H heads, L length, D width.
"""

from __future__ import annotations

import threading

import pytest
import torch
from flex_functions import theirs
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import saccade

B, H, L, D = 2, 3, 37, 8
COMPILED = torch.compile(flex_attention, backend="eager")  # as models do on import


@pytest.fixture(autouse=True)
def eager_without_the_compiler(monkeypatch):
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def qkv():
    return [torch.randn(B, H, L, D, requires_grad=True) for _ in range(3)]


class Model(nn.Module):
    """A causal layer with a learned score of each distance."""

    def __init__(self, attend=flex_attention):
        super().__init__()
        self.attend, self.qkv, self.out = attend, nn.Linear(13, 3 * H * D), nn.Linear(H * D, 13)
        self.distances = nn.Parameter(torch.randn(H, 2 * L))
        self.block_mask = create_block_mask(self.causal, None, None, L, L, device="cpu")

    @staticmethod
    def causal(b, h, q, k):
        return q >= k

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)

        def by_distance(score, b, h, q, k):
            return score + self.distances[h, q - k + L]

        mixed = self.attend(query, key, value, by_distance, self.block_mask)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def dense(query, key, value, score_mod, block_mask):
    return theirs(query, key, value, score_mod, block_mask.mask_mod)[0]


def losses(model, steps=5):
    make, optimizer, found = torch.Generator().manual_seed(1), torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(steps):
        x = torch.randn(B, L, 13, generator=make)
        loss = (model(x) - x.roll(3, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of its compiler
@pytest.mark.parametrize("whole", [False, True], ids=["eager", "compiled"])
def test_a_model_trains_with_the_losses_of_the_dense_run(whole):
    model, plain = Model(), Model(dense)
    plain.load_state_dict(model.state_dict())
    trained = torch.compile(model, backend="eager") if whole else model
    with saccade.accelerate() as run:
        found = losses(trained)
    torch.testing.assert_close(found, losses(plain), rtol=1e-5, atol=1e-6)
    assert run.taken == 5 and not run.left
    assert found[-1] < found[0]


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_notices_the_switch_and_compiles_once_for_each_side():
    counter, model, x = CompileCounter(), Model(), torch.randn(B, L, 13)
    compiled, taken = torch.compile(model, backend=counter), []
    for _ in range(3):
        plain = compiled(x)
        with saccade.accelerate() as run:
            torch.testing.assert_close(compiled(x), plain, rtol=1e-5, atol=1e-5)
        taken.append(run.taken)
    assert taken == [1, 1, 1]
    assert counter.frame_count == 3  # the whole model, and its parts before and after the call


def test_every_reference_is_answered_inside_of_the_block_only():
    given = qkv()
    with torch.no_grad():
        expected = theirs(*given)[0]
    with saccade.accelerate() as run:
        for function in (flex_attention, module.flex_attention, COMPILED):
            out = function(*given)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
            out.sum().backward()  # PyTorch has no backward for it on a CPU
    assert run.taken == 3
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(*given)
    assert "flex_attention" not in str(run.left)


def test_what_is_returned_is_what_was_asked_for():
    given = qkv()
    with saccade.accelerate():
        pair = flex_attention(*given, return_lse=True)
        out, aux = flex_attention(*given, return_aux=AuxRequest(max_scores=True))
    expected = theirs(*given)
    torch.testing.assert_close(pair[1], expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux.max_scores, expected[2], rtol=1e-5, atol=1e-5)
    assert aux.lse is None and torch.equal(out, pair[0])


def test_other_threads_and_other_devices_go_to_pytorch():
    raised, given = [], qkv()

    def call():
        with pytest.raises(NotImplementedError, match="backward on CPU"):
            flex_attention(*given)
        raised.append(True)

    with saccade.accelerate() as run:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        with pytest.raises(ValueError, match="meta"):
            flex_attention(*(tensor.detach().to("meta") for tensor in given))
    assert raised and run.taken == 0 and sum(run.left.values()) == 1


def test_observers_see_a_call_of_flex_attention():
    model, x = Model(), torch.randn(B, L, 13)
    with saccade.accelerate(), saccade.watch(model, keep=True) as watched, torch.no_grad():
        model(x)
    (record,) = watched.calls
    assert record.source == "flex_attention"


@torch.no_grad()
def test_without_acceleration_the_call_is_counted_as_unobserved():
    model = Model().requires_grad_(False)
    with saccade.watch(model) as watched:
        model(torch.randn(B, L, 13))
    assert not watched.calls and "saccade.accelerate()" in watched.unobserved["flex_attention"].reason


def test_observers_keep_and_edit_a_call_of_flex_attention():
    model, x = Model(), torch.randn(B, L, 13)
    with saccade.accelerate(), torch.no_grad():
        expected = model(x)
        with saccade.watch(model, keep=True) as watched:
            model(x)
        with saccade.intervene(model, {0: saccade.intervention.Ablate(heads=[1])}):
            changed = model(x)
        with torch.no_grad():
            model.out.weight[:, D : 2 * D] = 0
        torch.testing.assert_close(changed, model(x), rtol=1e-4, atol=1e-5)
    assert not watched.unobserved and not torch.allclose(changed, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers and PyTorch's compiler, of themselves
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_model_of_transformers_that_compiled_flex_attention_trains():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 59, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 3}

    def loss_of(kind):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes)
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=kind)
        ids, real = torch.randint(0, 97, (2, 131)), torch.ones(2, 131, dtype=torch.long)
        real[1, 101:] = 0
        loss = model(ids, attention_mask=real, labels=ids.masked_fill(real == 0, -100)).loss
        loss.backward()
        return loss, [parameter.grad for parameter in model.parameters()]

    expected, right = loss_of("eager")
    with saccade.accelerate() as run:
        found, gradients = loss_of("flex_attention")
    assert run.taken == 2
    torch.testing.assert_close(found, expected)
    for mine, theirs_ in zip(gradients, right, strict=True):
        torch.testing.assert_close(mine, theirs_, rtol=1e-4, atol=1e-6)
