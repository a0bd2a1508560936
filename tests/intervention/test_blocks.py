"""What a block leaves as it was, and with what else it may be combined.

Shape legend: B batch, L length, E width, H heads.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint as checkpoints

import saccade
from edited_models import MODELS, REAL, B, E, H, L
from saccade.acceleration import _rules
from saccade.intervention import Ablate, EditBias, EditMask, Freeze, Patch, Scale, Weights
from saccade.monitoring.calls import _thread
from saccade.nn import AttentionConfig, BlockConfig, Decoder, KVCache
from saccade.operator import _observers

EDITS = {"blocks.0": Scale([1], 0.3), "blocks.1": Ablate([0])}


def decoder(**options: bool) -> Decoder:
    return Decoder(BlockConfig(AttentionConfig(E, H)), 2, **options)


def state(model: nn.Module) -> list[object]:
    """What a block may touch."""
    hooks = [(len(one._forward_hooks), len(one._forward_pre_hooks), one.forward) for one in model.modules()]
    functions = F.scaled_dot_product_attention, checkpoints.CheckpointFunction, *vars(checkpoints).items()
    thread = (
        _observers.THREAD.observers,
        _observers.THREAD.editor,
        _thread.THREAD.held.watchers,
        _thread.THREAD.held.mode,
    )
    return [hooks, functions, thread, _get_current_function_mode_stack()]


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("here")


def test_everything_is_put_back_also_after_exceptions():
    model = nn.Sequential(decoder(), Fails())
    x, before = torch.randn(B, L, E), state(model)
    plain = model[0](x)
    with pytest.raises(KeyError), saccade.intervene(model, EDITS):
        model(x)
    with pytest.raises(ZeroDivisionError), saccade.intervene(model, EDITS), saccade.intervene(model[0], EDITS):
        model[0](x)
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="has query heads 0 to 3, got 7"), saccade.intervene(model[0], {1: Ablate(7)}):
        model[0](x)
    assert state(model) == before
    assert torch.equal(model[0](x), plain)


def test_a_forward_that_fails_in_the_block_does_not_end_it():
    model, x = nn.Sequential(decoder(), Fails()), torch.randn(B, L, E)
    with saccade.intervene(model[0], EDITS):
        expected = model[0](x)
    with saccade.intervene(model, EDITS) as run:
        with pytest.raises(KeyError):
            model(x)
        assert torch.equal(model[0](x), expected)
    assert run.changed == {"0.blocks.0.attention": 2, "0.blocks.1.attention": 2}


def test_blocks_nest_and_the_outer_edits_come_first():
    model, x, ones = decoder(), torch.randn(B, L, E), torch.ones(1, 1, 5)
    with saccade.intervene(model, {0: Ablate([1], ones)}):
        expected = model(x)
    with saccade.intervene(model, {0: Scale([1], 2.0)}), saccade.intervene(model.blocks, {0: Ablate([1], ones)}):
        assert torch.equal(model(x), expected)
    with saccade.intervene(model, {0: Ablate([1], ones)}), saccade.intervene(model, {0: Scale([1], 2.0)}):
        doubled = model(x)
    with saccade.intervene(model, {0: Ablate([1], 2 * ones)}):
        torch.testing.assert_close(model(x), doubled)


def test_copies_and_pickles_of_the_model_in_a_block_are_not_edited():
    model, x = decoder(), torch.randn(B, L, E)
    plain = model(x)
    with saccade.intervene(model, {0: Ablate([1])}):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert all(torch.equal(one(x), plain) for one in copies)
        model(x)


def test_other_threads_are_not_touched_and_are_counted():
    model, x, found = decoder(), torch.randn(B, L, E), {}
    plain = model(x)
    with saccade.intervene(model, {0: Ablate([1])}) as run:
        thread = threading.Thread(target=lambda: found.update(out=model(x)))
        thread.start()
        thread.join()
        model(x)
    assert torch.equal(found["out"], plain)
    assert [missed.count for missed in run.unobserved.values()] == [1]
    assert run.changed == {"blocks.0.attention": 1}


def test_threads_with_blocks_of_their_own_at_the_same_time():
    model, x, found = decoder(), torch.randn(B, L, E), {}
    expected = {}
    for head in range(2):
        with saccade.intervene(model, {0: Ablate([head])}):
            expected[head] = model(x)
    barrier = threading.Barrier(2)

    def go(head: int) -> None:
        with saccade.intervene(model, {0: Ablate([head])}):
            barrier.wait()
            found[head] = model(x)
            barrier.wait()

    threads = [threading.Thread(target=go, args=(head,)) for head in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[head], expected[head]) for head in range(2))


def test_generators_that_are_left_in_the_middle():
    model, x = decoder(), torch.randn(B, L, E)
    plain = model(x)

    def outputs():
        with saccade.intervene(model, {0: Ablate([1])}):
            while True:
                yield model(x)

    one, other = outputs(), outputs()
    edited = next(one)
    next(other)
    one.close()
    assert torch.equal(model(x), edited)  # the other's block is on
    other.close()
    assert torch.equal(model(x), plain)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.reentrant = decoder(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.inner(x)
        return checkpoints.checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("backward", ["in the block", "after it"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_training(reentrant, backward):
    """A backward pass that repeats the forward repeats it with the edits; counted is the forward alone."""
    model, x = Checkpointed(None), torch.randn(B, L, E)
    found = []
    for model.reentrant in (None, reentrant):
        leaves = [x.clone().requires_grad_(), *model.parameters()]
        with saccade.intervene(model, EDITS) as run:
            loss = model(leaves[0]).square().sum()
            if backward == "in the block":
                found.append(torch.autograd.grad(loss, leaves) if not model.reentrant else reached(loss, leaves))
        if backward == "after it":
            found.append(torch.autograd.grad(loss, leaves) if not model.reentrant else reached(loss, leaves))
        assert run.changed == {"inner.blocks.0.attention": 1, "inner.blocks.1.attention": 1}
        assert run.steps == 1 and not run.unobserved
    for own, expected in zip(*found, strict=True):
        assert torch.equal(own, expected)


def reached(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients by `backward`, which alone a reentrant checkpoint takes."""
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_function_that_one_module_calls_twice(reentrant):
    """The repetition of its second call is the second call again, and no hook of a module says so."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.checkpointed = MODELS["einsum"].make().double(), False

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                forward = self.inner.forward
                x = checkpoints.checkpoint(forward, x, use_reentrant=reentrant) if self.checkpointed else forward(x)
            return x

    model, x, found = Calls(), torch.randn(B, L, E, dtype=torch.float64), []
    model.num_heads = H
    for model.checkpointed in (False, True):
        leaves = [x.clone().requires_grad_(), *model.parameters()]
        with saccade.intervene(model, {"#2": [Scale([1], 0.3), Scale([2], 2.0, what="logits")]}) as run:
            loss = model(leaves[0]).square().sum()
        found.append(reached(loss, leaves))
        assert run.changed == {"#2": 1}
    for own, expected in zip(*found, strict=True):
        assert torch.equal(own, expected)


def test_checkpoints_in_checkpoints_and_saccades_own():
    plain, own = decoder(), decoder(checkpointing=True)
    own.load_state_dict(plain.state_dict())
    x, found = torch.randn(B, L, E), []
    for model, forward in ((plain, plain), (own, lambda x: checkpoints.checkpoint(own, x, use_reentrant=False))):
        with saccade.intervene(model.train(), EDITS):
            loss = forward(x).square().sum()
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_compiled_modules_are_named():
    model, x = decoder(), torch.randn(B, L, E)
    model.blocks[0].compile(backend="eager")
    plain = model(x)
    with saccade.intervene(model, {"blocks.1": Scale([1], 1.0)}) as run:
        assert torch.equal(model(x), plain)
    assert run.changed == {"blocks.1.attention": 1}
    assert "torch.compile" in run.unobserved["blocks.0"].reason


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_model_that_is_compiled_whole_is_refused(how):
    model, x = decoder(), torch.randn(B, L, E)
    if how == "wrapped":
        model = torch.compile(model, backend="eager", fullgraph=True)
    else:
        model.compile(backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match="no attention call matches 0.*compiled by torch.compile"):  # noqa: SIM117
        with saccade.intervene(model, {0: Ablate([1])}):
            model(x)


class Twice(nn.Module):
    """Layers that share their weights: one module, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = decoder().blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


@pytest.mark.parametrize("key", [1, "layer.attention#2"])
def test_one_call_of_a_module_that_is_called_twice(key):
    model, x = Twice(), torch.randn(B, L, E)
    middle = model.layer(x)
    with saccade.intervene(model.layer, {0: Ablate([1])}):
        expected = model.layer(middle)
    with saccade.intervene(model, {key: Ablate([1])}) as run:
        assert torch.equal(model(x), expected)
    assert run.changed == {"layer.attention#2": 1}


@pytest.mark.parametrize("name", ["Decoder", "F.sdpa", "nn.TransformerEncoder", "nn.MultiheadAttention with weights"])
@pytest.mark.parametrize("what", [["output"], ["query", "key", "value"]])
@torch.no_grad()
def test_everything_of_a_run_gives_that_run_again_to_the_bit(name, what):
    model = MODELS[name].make()
    x, other = torch.randn(2, B, L, E)
    with saccade.watch(model, keep=True, alarms=False) as source:
        expected = model(x)
    with saccade.intervene(model, {"*": [Patch(None, source, one) for one in what]}):
        assert torch.equal(model(x), expected)
        with saccade.watch(model, keep=True, alarms=False) as seen:
            model(other)
    for call, kept in source.kept.items():
        assert torch.equal(seen.kept[call].out, kept.out)


@pytest.mark.parametrize("name", ["Decoder", "F.sdpa", "einsum", "nn.MultiheadAttention with weights"])
def test_a_mean_over_one_item_changes_nothing(name):
    model, x = MODELS[name].make(), torch.randn(1, L, E)
    if hasattr(model, "attention"):
        model = model.attention
        run = lambda: model(x, x, x, key_padding_mask=~REAL[:1])[0]  # noqa: E731
    else:
        run = lambda: model(x)  # noqa: E731
    plain = run()
    with saccade.intervene(model, {"*": Ablate([1, 2], "mean")}):
        assert torch.equal(run(), plain)


def test_a_frozen_pattern_passes_gradients_through_values_alone():
    model, x = MODELS["F.sdpa"].make(), torch.randn(B, L, E, requires_grad=True)
    with saccade.watch(model, keep=True, alarms=False) as source:
        model(x)
    with saccade.intervene(model, {"*": Freeze(None, source)}):
        out = model(x)
    grads = torch.autograd.grad(out.sum(), [*model.query.parameters(), *model.key.parameters()], allow_unused=True)
    assert all(one is None or not one.any() for one in grads)
    assert torch.autograd.grad(model(x).sum(), model.value.weight)[0].any()


COMBINED = {
    "mean": Ablate([1], "mean"),
    "zero": Ablate([1]),
    "masked": EditMask([1], saccade.Window(1, 1)),
    "sharpened": Scale([1], 2.0, what="logits"),
    "biased": EditBias([1], saccade.ALiBi(torch.rand(H))),
}


@torch.no_grad()
@pytest.mark.parametrize("name", COMBINED)
def test_accelerated_and_watched_in_either_order(name, monkeypatch):
    monkeypatch.setattr(_rules, "small", lambda call: None)
    monkeypatch.setattr(_rules, "_biased", lambda meaning: None)
    model, x, edit = MODELS["nn.TransformerEncoder"].make().eval(), torch.randn(B, L, E), COMBINED[name]
    path = "encoder.layers.1.self_attn"
    with saccade.intervene(model, {1: edit}):
        expected = model(x)[REAL]
    one, two = (saccade.intervene(model, {1: edit}) for _ in range(2))
    inside, outside = (saccade.watch(model, keep=True, alarms=False) for _ in range(2))
    with saccade.accelerate() as taken, one, inside:
        torch.testing.assert_close(model(x)[REAL], expected, atol=2e-6, rtol=1e-5)
    with outside, two, saccade.accelerate():
        torch.testing.assert_close(model(x)[REAL], expected, atol=2e-6, rtol=1e-5)
    assert taken.calls == 2
    assert one.changed == two.changed == {path: 1}
    for watched in (inside, outside):
        if name == "biased":  # of some heads: no one call says it
            assert list(watched.kept) == ["encoder.layers.0.self_attn"] and list(watched.unobserved) == [path]
        else:
            assert not watched.unobserved and len(watched.kept) == 2
        if name == "masked":
            weights = watched.weights(path)[:, 1]
            far = (torch.arange(L)[:, None] - torch.arange(L)).abs() > 1
            assert not weights[:, far].any() and torch.allclose(weights.sum(-1)[REAL], torch.ones(()))


def test_a_watch_names_calls_alike_where_some_cannot_be_shown():
    model = MODELS["F.sdpa"].make()

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = model

        def forward(self, x: Tensor) -> Tensor:
            return self.part(self.part(self.part(x)))

    model, x = Three(), torch.randn(B, L, E)
    with (
        saccade.watch(model, alarms=False) as seen,
        saccade.intervene(model, {"part#2": EditBias([1], torch.randn(L, L))}),
    ):
        model(x)
    assert [call.name for call in seen.calls] == ["part", "part#3"]
    assert list(seen.unobserved) == ["part#2"]


class Products(nn.Module):
    """Layers whose residual stream begins with a product by `@`, so that it looks like scores."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(E, E) / E)
        self.streams: list[weakref.ref[Tensor]] = []
        self.alive = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.square
        for _ in range(100):
            query = x.unflatten(-1, (1, E)).transpose(1, 2)
            x = x + (torch.softmax(query @ query.mT, -1) @ query)[:, 0]
            self.streams.append(weakref.ref(x))
        self.alive = sum(stream() is not None for stream in self.streams)
        return x


def test_features_of_many_layers_are_not_held_meanwhile():
    model = Products()
    with torch.no_grad(), saccade.intervene(model, {"*": Scale(None, 0.5)}) as run:
        model(torch.randn(B, L, E))
    assert len(run.changed) == 100 and model.alive < 40


@pytest.mark.parametrize("name", ["F.sdpa", "grouped by hand"])
@pytest.mark.parametrize("to", ["mean", "resample"])
def test_an_output_of_another_item_is_read_before_it_is_ablated(name, to):
    model, x = MODELS[name].make(), torch.randn(B, L, E)
    others = [item for item in range(B) if item != 1]
    found = []
    for edits in ([Ablate([0], to, items=[1])], [Ablate([0], to, items=[1]), Ablate([0], items=others)]):
        with torch.no_grad(), saccade.intervene(model, {"*": edits}):
            found.append(model(x)[1])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("edit", [Ablate(items=[]), Scale(None, 3.0, items=[]), Scale(None, 3.0, "logits", items=[])])
def test_no_items_of_a_batch_of_one_are_changed(edit):
    model, x = MODELS["F.sdpa"].make(), torch.randn(1, L, E)
    with torch.no_grad():
        expected = model(x)
        with saccade.intervene(model, {"*": edit}):
            torch.testing.assert_close(model(x), expected)


def test_weights_of_no_queries():
    with torch.no_grad(), saccade.intervene(inner := MODELS["Decoder"].make(), {"*": Weights([0], lambda w, _: w)}):
        assert inner(torch.randn(B, 0, E)).shape == (B, 0, E)


def test_a_block_that_ends_on_another_thread_lets_go_of_its_model():
    model = MODELS["F.sdpa"].make()
    block, held = saccade.intervene(model, {"*": Scale(None, 0.3)}), weakref.ref(model)
    block.__enter__()
    model(torch.randn(1, L, E))
    other = threading.Thread(target=block.__exit__, args=(None, None, None))
    other.start()
    other.join()
    del model, block, other
    gc.collect()
    assert held() is None


def test_a_block_in_which_nothing_ran_says_so():
    model = MODELS["F.sdpa"].make()
    message = "nothing was changed, as no forward of the model ran"
    with pytest.raises(ValueError, match=message), saccade.intervene(model, {99: Scale(None, 0.3)}):
        pass
    x = torch.randn(1, L, E)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match=message), saccade.intervene(model, {"*": Scale(None, 0.3)}):
        compiled(x)


def test_a_patch_reaches_its_rows_where_a_cache_drops_keys():
    """A source of 5 tokens; a window of 4 keys: the sixth token's row has no counterpart, whatever the cache holds."""
    torch.manual_seed(0)
    model = Decoder(BlockConfig(AttentionConfig(12, 3, window=saccade.Window(3, 0))), 1).eval()
    x, others = torch.randn(1, 9, 12), torch.randn(1, 5, 12)
    with torch.no_grad(), saccade.watch(model, keep=True) as source:
        model(others)
    with torch.no_grad():
        plain = model(x)
        cache = KVCache.window(1, 4)
        with saccade.intervene(model, {"*": Patch([1], source)}):
            rows = [model(x[:, :5], cache=cache), *(model(x[:, n : n + 1], cache=cache) for n in range(5, 9))]
    changed = (torch.cat(rows, 1) - plain).abs().amax((0, 2)) > 1e-5
    assert changed.tolist() == [True] * 5 + [False] * 4


@pytest.mark.parametrize(("key", "blocks"), [(0, [0, 1]), ("blocks.1", [1])])
def test_an_int_is_the_first_number_in_a_path(key, blocks):
    model = nn.Sequential(decoder())
    with saccade.intervene(model, {key: Scale([1], 0.3)}) as run:
        model(torch.randn(B, L, E))
    assert list(run.changed) == [f"0.blocks.{block}.attention" for block in blocks]
