"""Models on shards against one process with the whole batch."""

from __future__ import annotations

import pytest
import torch
from shared_models import (
    beside_data_parallel,
    checkpointed,
    decoder,
    on_shards,
    own,
    own_refused,
    own_whole,
    refused,
    rows_apart,
    stack_on_shards,
    stack_whole,
    surrounded,
    trained_on_shards,
    trained_whole,
    untouched,
    whole,
)

WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}  # in the second layer only


@pytest.mark.parametrize(
    ("size", "kind", "layout", "packed", "more"),
    [
        (2, "llama", "ring", False, {}),
        (3, "llama", "gathered", True, {}),
        (2, "gpt2", "ulysses", True, {}),
        (3, "qwen2", "ring", False, WINDOW),
        (2, "mixtral", "gathered", True, {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
    ],
)
def test_logits_loss_and_all_gradients_are_those_of_one_process(ranks, size, kind, layout, packed, more):
    _assert_same(ranks(size).run(on_shards, kind, layout, packed, more), *whole(kind, packed, more))


@pytest.mark.parametrize(
    ("size", "kind", "packed", "more"),
    [
        (2, None, True, {}),
        (3, "gpt2", True, {}),
        (2, "qwen3", False, {**WINDOW, "head_dim": 4}),
        (2, "gpt_neo", False, {"attention_types": [[["local", "global"], 1]], "window_size": 5}),
    ],
)
def test_models_of_saccade_are_those_of_one_process(ranks, tmp_path, size, kind, packed, more):
    folder = None
    if kind is not None:
        decoder(kind, more).save_pretrained(folder := str(tmp_path))
    _assert_same(ranks(size).run(on_shards, folder, "ring", packed, {}, own), *own_whole(folder, packed))


@pytest.mark.parametrize(("plan_has_mask", "checkpointing"), [(False, False), (True, True)])
def test_modules_of_a_user_are_those_of_one_process(ranks, plan_has_mask, checkpointing):
    answers, (out, grads) = ranks(3).run(stack_on_shards, plan_has_mask, checkpointing), stack_whole()
    for got, _ in answers:
        torch.testing.assert_close(got, out, rtol=1e-12, atol=1e-12)
    for name, grad in grads.items():
        total = sum(shares[name] for _, shares in answers)
        torch.testing.assert_close(total, grad, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize(("make", "kind", "packed"), [(decoder, "gpt2", True), (own, None, False)])
def test_under_autocast_errors_are_those_of_one_process(ranks, make, kind, packed):
    """Against float32, at most twice the error that one process has in bfloat16, over all gradients."""
    exact, rounded = whole(kind, packed, {}, make), whole(kind, packed, {}, make, autocast=True)
    answers = ranks(2).run(on_shards, kind, "ring", packed, {}, make, True)
    logits = [values["logits"].float() for values in (exact[0], rounded[0], answers[0][0])]
    grads = [torch.cat([x.flatten() for x in made.values()]) for made in (exact[1], rounded[1])]
    grads.append(sum(torch.cat([x.flatten() for x in shares.values()]) for _, shares in answers))
    for truth, of_one, of_shards in (logits, grads):
        assert 0 < (of_shards - truth).norm() < 2 * (of_one - truth).norm() < truth.norm() / 10


@pytest.mark.slow
@pytest.mark.parametrize(("make", "kind", "more"), [(decoder, "mistral", {"sliding_window": 7}), (own, "qwen3", {})])
def test_300_steps_of_training_have_the_losses_of_one_process(ranks, tmp_path, make, kind, more):
    """Against float64, at most twice the error that one process has in float32: a wrong gradient would add up."""
    if make is own:
        decoder(kind, {**WINDOW, "head_dim": 4}).save_pretrained(kind := str(tmp_path))
    exact, rounded = (trained_whole(make, kind, more, dtype) for dtype in (torch.float64, torch.float32))
    for losses in ranks(2).run(trained_on_shards, make, kind, more):
        assert 0 < (losses - exact).abs().max() < 2 * (rounded - exact).abs().max() < 1e-5
    assert exact[:20].mean() > 2.5 > 1.5 > exact[-20:].mean()


@pytest.mark.parametrize("way", ["not reentrant", "reentrant", "wrapper"])
def test_layers_that_are_called_again_meet_the_same_plan(ranks, way):
    """Another plan, or dropped weights drawn anew, would give other gradients."""
    for before, after in ranks(2).run(checkpointed, way):
        assert len(before) == len(after) > 10 and before[1].abs().max() > 1e-5
        assert all(x.equal(y) for x, y in zip(before, after, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "own_model"), [("ddp", False), ("fsdp", False), ("ddp", True), ("fsdp", True)])
def test_beside_data_parallel_gradients_are_the_mean_over_rows(ranks, wrapper, own_model):
    losses, grads = rows_apart(own_model)
    answers = ranks(4).run(beside_data_parallel, wrapper, own_model)
    for row in range(2):
        total = sum(loss for loss, _ in answers[2 * row : 2 * row + 2])
        torch.testing.assert_close(total, losses[row], rtol=1e-5, atol=1e-5)
    for _, got in answers:
        assert got.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(got[name], grad, rtol=1e-5, atol=1e-5, msg=name)


def _assert_same(answers, values, grads):
    for got, _ in answers:
        torch.testing.assert_close(got["logits"], values["logits"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sum(got["loss"] for got, _ in answers), values["loss"], rtol=1e-5, atol=1e-5)
    assert grads and all(grad.abs().max() > 1e-5 for grad in grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(sum(shares[name] for _, shares in answers), grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("type", "MambaForCausalLM has type 'mamba'"),
        ("rotary", "scales by the length of the sequence (dynamic)"),
        ("own attention", "a layer reads its mask"),
        ("unknown mask", "layer model.layers.0.self_attn: its mask is"),
        ("documents", "shard: position_ids start anew"),
        ("padding", "shard: attention_mask (2, 61) hides keys"),
        ("hidden keys", "hides keys: padding belongs into the plan's mask"),
        ("own mask", "hides keys: padding belongs into the plan's mask"),
        ("positions", "LlamaForCausalLM: position_ids are missing"),
        ("rows", "expected the"),
        ("shift", "labels without shift_labels"),
        ("cache", "KV caches are not kept on shards"),
        ("weights", "output_attentions: not there on shards"),
    ],
)
def test_what_cannot_be_right_on_shards_is_an_error(ranks, fault, message):
    """Each of these would run, and give other numbers."""
    for answer in ranks(2).run(refused, fault):
        assert isinstance(answer, str) and message in answer, answer


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("sdpa", "calls F.scaled_dot_product_attention itself"),
        ("nothing", "Sequential made no call of saccade.attention"),
        ("convolution", "0 is a Conv1d, which mixes rows"),
        ("mechanism", "is a LinearAttention, which mixes rows"),
        ("backend", "backend 'chunked'"),
        ("layer drop", "layer_drop leaves out other layers"),
        ("weights", "Encoder: return_weights"),
        ("cache", "LanguageModel: cache: KV caches are not kept on shards"),
        ("shift", "LanguageModel: labels without shift_labels"),
        ("hidden keys", "hides keys: padding belongs into the plan's mask"),
        ("rows", "LanguageModel: input_ids is (1, "),
        ("context", "65 tokens are more than the model's 64 positions"),
        ("edit", "a call on shards cannot be edited"),
    ],
)
def test_what_cannot_be_right_in_modules_of_saccade_is_an_error(ranks, fault, message):
    for answer in ranks(2).run(own_refused, fault):
        assert isinstance(answer, str) and message in answer, answer


@pytest.mark.parametrize(("make", "kind"), [(decoder, "llama"), (own, None)])
def test_other_models_and_later_calls_are_left_alone(ranks, make, kind):
    assert ranks(2).run(untouched, make, kind) == [True, True]


def test_a_block_in_a_block_another_thread_and_layers_with_positional_arguments(ranks):
    """Positions of another thread's call would be this rank's, and the inner block would take the outer one's calls."""
    assert ranks(2).run(surrounded) == [(True, True)] * 2
