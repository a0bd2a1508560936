"""Models on shards against one process with the whole batch."""

from __future__ import annotations

import pytest
import torch
from shared_models import (
    beside_data_parallel,
    checkpointed,
    counted_on_shards,
    counted_whole,
    decoder,
    encoded_on_shards,
    encoded_whole,
    encoder,
    on_shards,
    own,
    own_encoder,
    own_encoder_refused,
    own_pooled,
    own_refused,
    own_whole,
    pooled_on_shards,
    pooled_whole,
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

from saccade.distributed._transformers import ENCODERS

SETTINGS = {
    "esm": {"position_embedding_type": "rotary"},
    "modernbert": {"local_attention": 10, "global_attn_every_n_layers": 2},
    "ultrabert": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
}
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


@pytest.mark.parametrize(
    ("size", "kind", "layout", "head", "padded"),
    [
        (3, "roberta", "ring", "ForMaskedLM", True),
        (2, "modernbert", "ulysses", "ForTokenClassification", True),
        *(
            pytest.param(size, kind, layout, head, size == 2, marks=pytest.mark.slow)
            for size, layout in ((2, "ring"), (2, "ulysses"), (3, "ring"), (3, "ulysses"))
            for head in ("ForMaskedLM", "ForTokenClassification")
            for kind in ENCODERS
        ),
    ],
)
def test_encoders_are_those_of_one_process(ranks, size, kind, layout, head, padded):
    more = SETTINGS.get(kind, {}) if kind != "esm" or padded else {}  # ESM has two kinds of positions
    answers = ranks(size).run(encoded_on_shards, encoder, kind, more, padded, layout, head)
    _assert_same(answers, *encoded_whole(encoder, kind, more, padded, head))


@pytest.mark.parametrize(
    ("size", "kind", "head", "padded"),
    [
        (2, "roberta", "masked-lm", True),
        *(
            pytest.param(size, kind, head, size == 3, marks=pytest.mark.slow)
            for size in (2, 3)
            for head in ("masked-lm", "token-classification")
            for kind in ("bert", "distilbert", "electra", "esm", "roberta", "xlm-roberta")
        ),
    ],
)
def test_encoders_of_saccade_are_those_of_one_process(ranks, tmp_path, size, kind, head, padded):
    more = {"position_embedding_type": "rotary"} if kind == "esm" and padded else {}
    encoder(kind, more, {"masked-lm": "ForMaskedLM"}.get(head, "ForTokenClassification")).save_pretrained(tmp_path)
    answers = ranks(size).run(encoded_on_shards, own_encoder, str(tmp_path), {}, padded, "ring", head)
    _assert_same(answers, *encoded_whole(own_encoder, str(tmp_path), {}, padded, head))


def test_positions_of_an_encoder_are_those_given_or_its_own(ranks):
    for outputs in ranks(2).run(counted_on_shards):
        torch.testing.assert_close(outputs, counted_whole(), rtol=1e-5, atol=1e-5)


def test_encoders_of_saccade_pool_no_vector_of_a_ranks_first_row(ranks, tmp_path):
    encoder("bert", {}, "").save_pretrained(tmp_path)
    assert ranks(2).run(own_pooled, str(tmp_path)) == [(True, False)] * 2


def test_a_head_that_pools_works_on_the_rows_of_all_ranks(ranks):
    _assert_same(ranks(2).run(pooled_on_shards), *pooled_whole())


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
    grads_that_vanish = ("key.bias", "k_lin.bias")  # softmax takes no notice of what is added to all keys
    for got, _ in answers:
        torch.testing.assert_close(got["logits"], values["logits"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sum(got["loss"] for got, _ in answers), values["loss"], rtol=1e-5, atol=1e-5)
    assert grads and all(x.abs().max() > 1e-5 for name, x in grads.items() if not name.endswith(grads_that_vanish))
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
        ("weights", "output_attentions: not there on shards"),
        ("not shifted", "labels without shift_labels: the mean is over all ranks' labels"),
        ("shifted", "expected what distributed.shard(batch, plan, shift_labels=False) returns"),
        ("uncounted", "labels without num_items_in_batch"),
        ("pools", "BertForSequenceClassification has a head that may pool rows"),
        ("token dropout", "token_dropout scales by the share of masked tokens"),
        ("decodes", "BertForMaskedLM has type 'bert'"),
        ("no positions", "BertForMaskedLM: position_ids are missing"),
        ("tuple", "return_dict is False, expected True"),
        ("own loss", "labels: its loss is not transformers' own"),
        ("one layer", "BertModel called transformers' attention functions 1 times, expected 2"),
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
        ("flex", "calls flex_attention itself"),
        ("nothing", "Sequential made no call of saccade.attention"),
        ("convolution", "0 is a Conv1d, which mixes rows"),
        ("mechanism", "is a LinearAttention, which mixes rows"),
        ("backend", "backend 'chunked'"),
        ("layer drop", "layer_drop leaves out other layers"),
        ("weights", "Encoder: return_weights"),
        ("shift", "LanguageModel: labels without shift_labels"),
        ("not shifted", "LanguageModel: labels without shift_labels"),
        ("hidden keys", "hides keys: padding belongs into the plan's mask"),
        ("rows", "LanguageModel: input_ids is (1, "),
        ("context", "65 tokens are more than the model's 64 positions"),
        ("edit", "a call on shards cannot be edited"),
    ],
)
def test_what_cannot_be_right_in_modules_of_saccade_is_an_error(ranks, fault, message):
    for answer in ranks(2).run(own_refused, fault):
        assert isinstance(answer, str) and message in answer, answer


@pytest.mark.parametrize(
    ("kind", "head", "changes", "message"),
    [
        ("bert", "ForMaskedLM", {"shift_labels": 0}, "Bert: shift_labels: its loss reads the label of each row itself"),
        ("bert", "ForMaskedLM", {"num_items_in_batch": None}, "Bert: labels without num_items_in_batch"),
        ("bert", "ForMaskedLM", {"position_ids": None}, "Bert: position_ids are missing"),
        ("bert", "", {}, "Bert: labels: it has no head with logits"),
        ("bert", "ForSequenceClassification", {}, "head is a ItemHead, which mixes rows"),
        ("esm", "ForMaskedLM", {}, "Esm: token_dropout scales by the share of masked tokens"),
    ],
)
def test_what_cannot_be_right_in_encoders_of_saccade_is_an_error(ranks, tmp_path, kind, head, changes, message):
    more = {"token_dropout": True, "mask_token_id": 2} if kind == "esm" else {}
    encoder(kind, more, head).save_pretrained(tmp_path)
    for answer in ranks(2).run(own_encoder_refused, str(tmp_path), changes):
        assert isinstance(answer, str) and message in answer, answer


@pytest.mark.parametrize(("make", "kind"), [(decoder, "llama"), (own, None)])
def test_other_models_and_later_calls_are_left_alone(ranks, make, kind):
    assert ranks(2).run(untouched, make, kind) == [True, True]


def test_a_block_in_a_block_another_thread_and_layers_with_positional_arguments(ranks):
    """Positions of another thread's call would be this rank's, and the inner block would take the outer one's calls."""
    assert ranks(2).run(surrounded) == [(True, True)] * 2
