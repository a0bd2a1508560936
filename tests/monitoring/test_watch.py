"""Steps, names, choices; what is restored; nesting, threads, checkpoints, compiled models; what is refused."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import saccade
from saccade.monitoring.calls import _thread
from saccade.operator import _observers

B, L, H, D = 3, 7, 2, 5
E = H * D


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Linear(E, 3 * E)

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.parts(x).chunk(3, -1))
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.norm = nn.LayerNorm(E)

    def forward(self, x):
        return x + self.attn(self.norm(x))


class Model(nn.Module):
    def __init__(self, layers=3, again=None):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.again = again

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.again is None else checkpoint(layer, x, use_reentrant=self.again)
        return x


def hooks(model):
    return [
        (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._forward_hooks_always_called))
        for module in model.modules()
    ]


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    modes = _get_current_function_mode_stack()
    before = F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled()
    yield
    assert _get_current_function_mode_stack() == modes
    assert _observers.THREAD.observers == ()
    assert _thread.THREAD.held.watchers == () and _thread.THREAD.held.mode is None
    after = F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled()
    assert after == before


def names(seen):
    return [call.name for call in seen.calls]


def test_names_layers_and_steps():
    model, x = Model(), torch.randn(B, L, E)
    with saccade.watch(model) as seen:
        model(x)
        model(x)
    assert names(seen) == ["layers.0.attn", "layers.1.attn", "layers.2.attn"]
    assert [(call.path, call.order, call.layer) for call in seen.calls][2] == ("layers.2.attn", 1, 2)
    assert (seen.steps, seen.observed) == (2, 2)
    assert seen.aggregates["layers.1.attn"][1]["entropy"].count == 2 * B * L
    assert seen.aggregates["layers.1.attn"][1]["logits.max"].count == 2


def test_shared_layers_and_several_calls_have_names_of_their_own():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Layer()

        def forward(self, x):
            return self.block(self.block(self.block(x)))

    class Twice(nn.Module):
        def forward(self, x):
            x = x[:, None]
            return F.scaled_dot_product_attention(F.scaled_dot_product_attention(x, x, x), x, x)[:, 0]

    model = nn.Sequential(Shared(), Twice())
    with saccade.watch(model) as seen:
        model(torch.randn(B, L, E))
    assert names(seen) == ["0.block.attn", "0.block.attn#2", "0.block.attn#3", "1", "1#2"]
    assert [call.layer for call in seen.calls] == [0, 1, 2, 1, 1]
    assert [call.order for call in seen.calls] == [1, 2, 3, 1, 2]


def test_a_part_that_is_run_by_itself_is_a_step():
    model, x = Model(), torch.randn(B, L, E)
    with saccade.watch(model) as seen:
        model.layers[1](x)
        model(x)
    assert names(seen) == ["layers.1.attn", "layers.0.attn", "layers.2.attn"]
    assert [call.layer for call in seen.calls] == [1, 0, 2]
    assert seen.steps == 2
    assert seen.aggregates["layers.1.attn"][0]["logits.max"].count == 2
    assert seen.aggregates["layers.0.attn"][0]["logits.max"].count == 1


def test_every_nth_step():
    model, x, records = Model(1), torch.randn(B, L, E), []
    with saccade.watch(model, every=3, on_record=records.append) as seen:
        for _ in range(8):
            model(x)
            # Between and in skipped steps nothing of the watch is on.
            assert _observers.THREAD.observers == ()
    assert [record.step for record in records] == [0, 3, 6]
    assert (seen.steps, seen.observed) == (8, 3)
    assert "3 of 8 steps" in str(seen)


def test_another_mode_hides_no_attention_of_pytorchs_module():
    """`has_torch_function` is true of plain tensors while `torch.device` is a block, which is a mode."""
    model, x = nn.MultiheadAttention(E, H, batch_first=True).eval(), torch.randn(B, L, E)
    with torch.device("cpu"), saccade.watch(model) as watched:
        model(x, x, x)
    assert len(watched.calls) == 1 and not watched.unobserved


def test_skipped_steps_have_no_mode():
    model, modes = Model(1), []
    model.layers[0].norm.register_forward_hook(lambda *_: modes.append(len(_get_current_function_mode_stack())))
    with saccade.watch(model, every=2):
        for _ in range(4):
            model(torch.randn(B, L, E))
    assert modes == [1, 0, 1, 0]


def test_records_hold_the_statistics_and_the_output():
    model, x, records = Model(1), torch.randn(B, L, E), []
    with saccade.watch(model, on_record=records.append, received=True, top=2, histograms=["logits"]):
        out = model.layers[0].attn(model.layers[0].norm(x))
    (record,) = records
    assert (record.name, record.layer, record.order, record.step) == ("layers.0.attn", 0, 1, 0)
    assert record.statistics.top_keys.shape == (B, H, L, 2)
    assert record.statistics.received.sum((0, 2)).tolist() == pytest.approx([B * L] * H, rel=1e-5)
    assert int(record.statistics.heads["logits"]["counts"].sum()) == B * H * L * L
    norms = out.unflatten(-1, (H, D)).norm(dim=-1).mean((0, 1))
    torch.testing.assert_close(record.out_norm, norms.detach())


@pytest.mark.parametrize(
    "layers", [[0, 2], ["layers.0.*", "layers.2.attn"], lambda site, step: site.path.split(".")[1] != "1"]
)
def test_chosen_layers(layers):
    model = Model()
    with saccade.watch(model, layers=layers) as seen:
        model(torch.randn(B, L, E))
    assert names(seen) == ["layers.0.attn", "layers.2.attn"]
    assert not seen.unobserved


def test_chosen_heads():
    model, x = Model(2), torch.randn(B, L, E)
    with (
        saccade.watch(model) as whole,
        saccade.watch(model, heads=[1]) as one,
        saccade.watch(model, heads=[1, 0]) as two,
    ):
        model(x)
    for name, heads in whole.aggregates.items():
        assert one.aggregates[name] == {1: heads[1]}
        assert two.aggregates[name] == heads
    assert {line["head"] for line in one.table()} == {1}


def test_heads_and_layers_that_are_not_there_are_named(tmp_path):
    model, x = Model(2), torch.randn(B, L, E)
    with saccade.watch(model, heads=[1, 7]) as seen:
        model(x)
    assert list(seen.aggregates["layers.0.attn"]) == [1]
    assert seen.unobserved["layers.0.attn: head 7"].reason == "the call has 2 query heads"
    with saccade.watch(model, layers=[5]) as seen:
        model(x)
        model(x)
    said = "Nothing observed in 2 of 2 steps: `layers` matches none of the 4 attention calls that there were."
    assert str(seen) == said
    seen.save(tmp_path / "none.safetensors")
    assert str(saccade.monitoring.load(tmp_path / "none.safetensors")) == said


def test_a_call_with_another_number_of_heads_than_before_is_counted():
    class Changing(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    model, records = Changing(), []
    with saccade.watch(model, on_record=records.append) as seen:
        for heads in (2, 3, 2):
            x = torch.randn(B, heads, L, D)
            assert torch.equal(model(x), F.scaled_dot_product_attention(x, x, x))
    assert len(records) == 2
    assert seen.aggregates[""][1]["logits.max"].count == 2
    assert seen.unobserved["the model"].count == 1
    assert "3 query heads after a call of 2" in seen.unobserved["the model"].reason


def test_what_is_kept_is_the_latest_of_what_was_chosen():
    model, x = Model(), torch.randn(B, L, E)
    chosen = lambda site, step: site.layer == 1 and step < 2  # noqa: E731
    with saccade.watch(model, keep=chosen) as seen:
        for n in range(4):
            model(x + n)
    assert list(seen.kept) == ["layers.1.attn"]
    assert seen.kept["layers.1.attn"].step == 1
    with pytest.raises(KeyError, match=r"'layers.0.attn' was not kept. Kept: 'layers.1.attn'"):
        seen.weights("layers.0.attn", 0)


def test_kept_calls_are_copies():
    """A cache is overwritten in place, and so may be anything else that a model computes with."""

    class Overwriting(nn.Module):
        def forward(self, x):
            query, key = x[:, None].clone(), x[:, None].clone()
            mask = torch.ones(L, L, dtype=torch.bool)
            bias = torch.zeros(1, 1, L, L)
            out = F.scaled_dot_product_attention(query, key, key, mask) + F.scaled_dot_product_attention(
                query, key, key, bias
            )
            for tensor in (query, key, bias):
                tensor.fill_(float("nan"))
            mask.zero_()
            return out

    model, x = Overwriting(), torch.randn(B, L, D)
    with saccade.watch(model, keep=True) as seen:
        model(x)
    expected = (x @ x.mT * D**-0.5).softmax(-1)
    for name in ("", "#2"):
        torch.testing.assert_close(seen.weights(name, 0), expected)
        torch.testing.assert_close(seen.kept[name].lse[:, 0], (x @ x.mT * D**-0.5).logsumexp(-1))


def test_random_numbers_are_drawn_as_without_a_watch():
    class Dropping(nn.Module):
        def forward(self, x):
            x = x[:, None]
            out = F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)
            return F.dropout((out @ out.mT).softmax(-1), 0.4) @ x + saccade.attention(x, x, x, dropout=0.2)

    model, x = Dropping(), torch.randn(B, L, D)
    torch.manual_seed(1)
    plain, state = model(x), torch.get_rng_state()
    torch.manual_seed(1)
    with saccade.watch(model, keep=True, received=True) as seen:
        again = model(x)
    assert torch.equal(plain, again) and torch.equal(state, torch.get_rng_state())
    assert len(seen.calls) == 3
    # Weights are those before dropout.
    torch.testing.assert_close(seen.weights("").sum(-1), torch.ones(B, 1, L))


def test_exceptions_pass_restore_and_lose_nothing():
    class Breaking(Model):
        def forward(self, x):
            super().forward(x)
            raise LookupError("broken")

    model = Breaking()
    before = hooks(model)
    with pytest.raises(LookupError, match="broken"), saccade.watch(model) as seen:
        model(torch.randn(B, L, E))
    assert hooks(model) == before
    assert len(seen.calls) == 3
    with saccade.watch(model) as seen:
        for _ in range(2):
            with pytest.raises(LookupError):
                model(torch.randn(B, L, E))
            assert _observers.THREAD.observers == ()
    assert seen.aggregates["layers.0.attn"][0]["logits.max"].count == 2


def test_an_interrupt_leaves_nothing_on():
    class Interrupted(Model):
        def forward(self, x):
            super().forward(x)
            raise KeyboardInterrupt

    model, good = Interrupted(1), Model(1)
    holder = nn.ModuleList([model, good])
    with saccade.watch(holder) as seen, pytest.raises(KeyboardInterrupt):
        model(torch.randn(B, L, E))
    assert hooks(holder) == [(0, 0, 0)] * len(hooks(holder))
    assert names(seen) == ["0.layers.0.attn"]


@pytest.mark.parametrize("every", [1, 2])
def test_steps_go_on_after_an_interrupt(every):
    class Interrupted(Model):
        interrupts = False

        def forward(self, x):
            x = super().forward(x)
            if self.interrupts:
                raise KeyboardInterrupt
            return x

    model = Interrupted(1)
    holder, x = nn.ModuleList([model]), torch.randn(B, L, E)
    with saccade.watch(holder, every=every) as seen:
        model(x)
        model.interrupts = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model.interrupts = False
        model(x)
    assert seen.steps == 3
    assert seen.aggregates["0.layers.0.attn"][0]["logits.max"].count == (3 if every == 1 else 2)


def test_what_the_callback_raises_is_raised():
    def complain(record):
        raise RuntimeError("told")

    model = Model(1)
    with pytest.raises(RuntimeError, match="told"), saccade.watch(model, on_record=complain):
        model(torch.randn(B, L, E))


def test_an_observation_that_fails_is_counted_and_the_model_runs_on():
    model, x = Model(1), torch.randn(B, L, E)
    with saccade.watch(model, groups={"bad": torch.ones(L + 1, dtype=torch.bool)}) as seen:
        assert torch.equal(model(x), model(x))
    assert seen.unobserved["layers.0.attn"].count == 2
    assert "groups" in seen.unobserved["layers.0.attn"].reason


def test_groups_may_depend_on_the_call():
    model, records = Model(1), []
    first_half = lambda call: {"half": torch.arange(call.key.shape[2]) < 3}  # noqa: E731
    with saccade.watch(model, groups=first_half, on_record=records.append) as seen:
        model(torch.randn(B, L, E))
        model(torch.randn(B, L + 4, E))
    assert seen.aggregates["layers.0.attn"][0]["mass.half"].count == B * (2 * L + 4)
    assert [record.statistics.mass["half"].shape[2] for record in records] == [L, L + 4]


def test_watches_nest_on_one_model_on_parts_and_on_two():
    model, other, x = Model(2), Model(1), torch.randn(B, L, E)
    with saccade.watch(model) as outer:
        model(x)
        with saccade.watch(model) as inner, saccade.watch(model.layers[1]) as part, saccade.watch(other) as second:
            model(x)
            other(x)
        model(x)
    assert [seen.steps for seen in (outer, inner, part, second)] == [3, 1, 1, 1]
    assert names(outer) == names(inner) == ["layers.0.attn", "layers.1.attn"]
    assert names(part) == ["attn"]
    assert names(second) == ["layers.0.attn"]
    assert outer.aggregates["layers.1.attn"][0]["logits.max"].count == 3
    assert inner.aggregates["layers.1.attn"] == {
        head: {name: one for name, one in heads.items()} for head, heads in inner.aggregates["layers.1.attn"].items()
    }
    assert part.aggregates["attn"] == inner.aggregates["layers.1.attn"]


def test_a_watch_goes_on_when_entered_again_but_not_inside_of_itself():
    model, x = Model(1), torch.randn(B, L, E)
    seen = saccade.watch(model)
    for _ in range(2):
        with seen:
            model(x)
            with pytest.raises(RuntimeError, match="is on already"), seen:
                pass
        model(x)
    assert seen.steps == 2


def test_each_thread_watches_for_itself():
    model, x = Model(2), torch.randn(B, L, E)
    inside, done, results = threading.Barrier(2), threading.Barrier(2), {}

    def run(name, steps):
        with saccade.watch(model) as seen:
            inside.wait()
            for _ in range(steps):
                model(x)
            done.wait()
        results[name] = seen

    threads = [threading.Thread(target=run, args=args) for args in (("one", 2), ("two", 5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (results["one"].steps, results["two"].steps) == (2, 5)
    for name, steps, others in (("one", 2, 5), ("two", 5, 2)):
        aggregates = results[name].aggregates["layers.1.attn"][0]
        assert aggregates["logits.max"].count == steps
        assert results[name].unobserved[""].count == others
        assert "another thread" in results[name].unobserved[""].reason
    assert hooks(model) == [(0, 0, 0)] * len(hooks(model))


def test_parts_that_run_on_another_thread_are_counted_once():
    model, x = Model(2), torch.randn(B, L, E)
    with saccade.watch(model) as seen:
        for part in (model.layers[1], model.layers[1], model):
            thread = threading.Thread(target=part, args=(x,))
            thread.start()
            thread.join()
    assert not seen.calls
    assert {name: missed.count for name, missed in seen.unobserved.items()} == {"layers.1": 2, "": 1}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_forward_is_counted_once(reentrant):
    torch.manual_seed(0)
    plain, again = Model(2), Model(2, again=reentrant)
    again.load_state_dict(plain.state_dict())
    x = torch.randn(B, L, E, requires_grad=True)
    expected = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
    with saccade.watch(again) as seen:
        again(x).square().sum().backward()
    got = [x.grad, *(parameter.grad for parameter in again.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert seen.steps == 1
    assert names(seen) == ["layers.0.attn", "layers.1.attn"]
    assert seen.aggregates["layers.0.attn"][0]["logits.max"].count == 1


def test_copies_and_pickles_of_a_watched_model_are_not_watched():
    model, x = Model(1), torch.randn(B, L, E)
    with saccade.watch(model) as seen:
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        twin(x)
        again(x)
        torch.save(model.state_dict(), io.BytesIO())
        assert torch.equal(twin(x), model(x))
    assert seen.steps == 1


@pytest.mark.parametrize("model", [nn.Linear(E, E), nn.Sequential(nn.Linear(E, E), nn.ReLU(), nn.LayerNorm(E))])
def test_a_model_without_attention_says_so(model):
    with saccade.watch(model) as seen:
        model(torch.randn(B, E))
    assert str(seen) == "Nothing observed in 1 of 1 step: the model called no attention."
    assert "called no attention" in seen._repr_html_()
    assert seen.table() == [] and seen.aggregates == {}


def test_a_forward_that_never_runs_says_so():
    with saccade.watch(Model()) as seen:
        pass
    assert str(seen).startswith("Nothing observed: the model ran no forward pass")


def test_empty_batches_are_calls_without_samples():
    model = Model(1)
    with saccade.watch(model) as seen:
        model(torch.randn(0, L, E))
        model(torch.randn(B, 0, E))
        model(torch.randn(B, L, E))
    assert seen.aggregates["layers.0.attn"][0]["entropy"].count == B * L
    assert not seen.unobserved


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_transformed_calls_are_counted():
    model, x = Model(1), torch.randn(B, L, E)
    with saccade.watch(model) as seen:
        torch.func.vmap(model)(x[None])
    assert not seen.calls
    (missed,) = seen.unobserved.values()
    assert "torch.func" in missed.reason


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"every": 1.5}, TypeError, "every must be an int"),
        ({"heads": [-1]}, ValueError, "heads count from 0, got -1"),
        ({"layers": [0.5]}, TypeError, "layers must be layer numbers, names or paths, or a function"),
        ({"keep": 3.0}, TypeError, "keep must be"),
    ],
)
def test_bad_choices_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        saccade.watch(Model(1), **options)


def test_a_model_must_be_a_module():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got a function"):
        saccade.watch(F.softmax)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_run_and_what_is_inside_is_said_to_be_unseen(whole):
    torch.compiler.reset()
    model, x = Model(2), torch.randn(B, L, E)
    expected = model(x)
    if whole:
        model = torch.compile(model, backend="eager", fullgraph=True)
    else:
        model.layers[1] = torch.compile(model.layers[1], backend="eager", fullgraph=True)
    for _ in range(10):  # beyond the limit of recompilations, were there one for each watch
        with saccade.watch(model) as seen:
            torch.testing.assert_close(model(x), expected)
        (missed,) = seen.unobserved.values()
        assert missed.count == 1 and "compiled" in missed.reason
        assert names(seen) == ([] if whole else ["layers.0.attn"])
    torch.testing.assert_close(model(x), expected)


@torch.no_grad()
def test_a_compiled_function_inside_of_a_model_runs_on():
    torch.compiler.reset()
    attend = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="eager", fullgraph=True)

    class Calling(nn.Module):
        def forward(self, x):
            return attend(x)

    model, x = Calling(), torch.randn(B, H, L, D)
    expected = model(x)
    for _ in range(10):  # beyond the limit of recompilations
        with saccade.watch(model) as seen:
            torch.testing.assert_close(model(x), expected)
        assert seen.calls or seen.unobserved


@torch.no_grad()
def test_a_model_compiled_in_place():
    torch.compiler.reset()
    model, x = Model(2), torch.randn(B, L, E)
    expected = model(x)
    model.layers[0].compile(backend="eager", fullgraph=True)
    compiled = model.layers[0]._compiled_call_impl
    with saccade.watch(model) as seen:
        torch.testing.assert_close(model(x), expected)
    assert model.layers[0]._compiled_call_impl is compiled
    assert names(seen) == ["layers.1.attn"]
    assert "compiled" in seen.unobserved["layers.0"].reason


@pytest.mark.slow
def test_a_compiled_function_around_a_watched_model():
    torch.compiler.reset()
    model, x = Model(1), torch.randn(B, L, E)
    step = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
    with saccade.watch(model) as seen:
        torch.testing.assert_close(step(x), model(x).sum())
    assert seen.steps == 1
    torch.testing.assert_close(step(x), model(x).sum())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_trace_holds_nothing_of_the_watch():
    model, x = Model(1), torch.randn(B, L, E)
    with saccade.watch(model) as seen:
        traced = torch.jit.trace(model, x, check_trace=False)
    plain = torch.jit.trace(model, x, check_trace=False)
    assert [node.kind() for node in traced.inlined_graph.nodes()] == [n.kind() for n in plain.inlined_graph.nodes()]
    assert not seen.calls and "traced" in seen.unobserved[""].reason


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_is_said_to_be_unseen():
    model = nn.Sequential(torch.jit.trace(Layer(), torch.randn(B, L, E)), Layer())
    with saccade.watch(model) as seen:
        model(torch.randn(B, L, E))
    assert names(seen) == ["1.attn"]
    assert "TorchScript" in seen.unobserved["0"].reason
