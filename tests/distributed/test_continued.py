"""Prompts whose keys stay on their ranks, and the tokens behind them, against one process."""

from __future__ import annotations

import dataclasses
import functools
import operator

import pytest
import torch
import transformers
from shared_models import LENGTH, VOCABULARY, batch, decoder, own

from saccade import Causal, Documents, Padding, Window, distributed, models, nn, positions

PROMPT = LENGTH - 5
PIECES = ((PROMPT, PROMPT + 1), (PROMPT + 1, PROMPT + 4), (PROMPT + 4, LENGTH))
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}  # in the second layer only
UNEVEN = ((12, 0), (0, 12), (7, 12))  # tokens of a layer, and of the first one
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.mark.parametrize(
    ("size", "kind", "layout", "more"),
    [
        (3, "qwen2", "ring", WINDOW),
        (2, "gpt2", "ulysses", {}),
        *(
            pytest.param(size, kind, "gathered", more, marks=pytest.mark.slow)
            for size, kind, more in [
                (2, "gpt_oss", {"head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 7}),
                (3, "gemma3_text", {"head_dim": 4, "sliding_window": 7}),
                (2, "gemma2", {"head_dim": 4, "sliding_window": 7}),
                (2, "opt", {"ffn_dim": 20, "word_embed_proj_dim": 24}),
            ]
        ),
    ],
)
def test_tokens_behind_a_prompt_are_those_of_one_process(ranks, size, kind, layout, more):
    expected = continued(None, kind, layout, more)
    for answer in ranks(size).run(continued, kind, layout, more):
        assert isinstance(answer, torch.Tensor), answer
        torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)


def continued(rank, kind, layout, more):
    """Logits of a prompt on shards and of the tokens behind it, of which some are forgotten; one process: rank None."""
    model, ids, prompt = decoder(kind, more), batch(False)["input_ids"], LENGTH - 5
    with torch.no_grad():
        if rank is None:
            return model(ids, use_cache=False).logits
        plan = distributed.plan(Causal(), prompt, layout=layout)
        with distributed.context_parallel(model, plan):
            output = model(**distributed.shard({"input_ids": ids[:, :prompt]}, plan), use_cache=True)
            logits, cache = [plan.unshard(output.logits, 1)], output.past_key_values
            model(input_ids=ids[:, :2], past_key_values=cache)
            cache.crop(-2)
            for start, stop in ((prompt, prompt + 1), (prompt + 1, prompt + 4), (prompt + 4, LENGTH)):
                logits.append(model(input_ids=ids[:, start:stop], past_key_values=cache).logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    ("size", "kind", "layout", "dtype", "more"),
    [
        (2, None, "ring", torch.float32, {}),
        (3, None, "gathered", torch.float64, {}),
        (3, "gpt2", "ring", torch.float64, {}),
        (2, "qwen3", "ulysses", torch.float64, {**WINDOW, "head_dim": 4}),
        (3, "gpt_neo", "ring", torch.float32, {"attention_types": [[["local", "global"], 1]], "window_size": 5}),
    ],
)
def test_models_of_saccade_continue_a_prompt_as_one_process_does(ranks, tmp_path, size, kind, layout, dtype, more):
    folder = None
    if kind is not None:
        decoder(kind, more).save_pretrained(folder := str(tmp_path))
    expected = own_continued(None, folder, layout, dtype)
    answers = ranks(size).run(own_continued, folder, layout, dtype)
    for answer in answers:
        assert isinstance(answer, torch.Tensor), answer
        assert answer[:, PROMPT:].equal(answers[0][:, PROMPT:])
        torch.testing.assert_close(answer, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def own_continued(rank, folder, layout, dtype):
    """As `continued`, of a model of Saccade; the tokens forgotten are of another text."""
    model, ids = own(folder, {}).to(dtype), batch(False)["input_ids"]
    with torch.no_grad():
        if rank is None:
            return model(ids).logits
        plan, cache = distributed.plan(Causal(), PROMPT, layout=layout), model.cache()
        with distributed.context_parallel(model, plan):
            output = model(**distributed.shard({"input_ids": ids[:, :PROMPT]}, plan), cache=cache)
            logits = [plan.unshard(output.logits, 1)]
            assert cache.length == PROMPT and output.cache is cache
            model(ids[:, :2], cache=cache)
            cache.rollback(2)
            logits += [model(ids[:, start:stop], cache=cache).logits for start, stop in PIECES]
    return torch.cat(logits, 1)


class Behind(torch.nn.Module):
    """A module of a user: learned positions, and layers with rotary ones and a sink, ALiBi and a window, and T5's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.places = positions.Learned(LENGTH, 24)
        kinds = (
            {"positions": positions.RotaryConfig(), "sink": True, "kv_heads": 3, "qk_norm": "rms"},
            {"positions": positions.AlibiConfig(), "window": Window(7, 0)},
            {"positions": positions.T5Config(bidirectional=False), "softcap": 5.0},
        )
        self.decoder = nn.Decoder([nn.BlockConfig(nn.AttentionConfig(24, heads=6, **kind)) for kind in kinds])
        self.double().eval()
        torch.nn.init.normal_(self.decoder.blocks[0].attention.sink)
        torch.nn.init.normal_(self.decoder.positions[2].table)

    def forward(self, x, mask=None, cache=None):
        return self.decoder(self.places(x, 0 if cache is None else cache.length), mask, cache=cache)


def test_modules_of_a_user_continue_a_prompt_as_one_process_does(ranks):
    expected = behind(None)
    for answer in ranks(3).run(behind):
        assert isinstance(answer, torch.Tensor), answer
        torch.testing.assert_close(answer, expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def behind(rank):
    """Rows of a prompt, of the tokens behind it, and of these once more after the items of the batch have changed
    places; a mask that is data, and reaches over all of them."""
    model, mask = Behind(), Documents([0] * 9 + [1] * (LENGTH - 9))
    x = torch.randn(2, LENGTH, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    if rank is None:
        out = model(x, mask)
        return torch.cat((out, out[[1, 1, 0], PROMPT:].flatten(0, 1).expand(2, -1, -1)), 1)
    plan, cache = distributed.plan(Causal(), PROMPT), nn.KVCache.growing(3)
    with distributed.context_parallel(model, plan):
        outputs = [plan.unshard(model(plan.shard(x[:, :PROMPT], 1), mask, cache), 1)]
        outputs += [model(x[:, start:stop], mask, cache) for start, stop in PIECES]
        cache.rollback(torch.tensor([5, 5]))
        cache.reorder(items := torch.tensor([1, 1, 0]))
        again = model(x[items, PROMPT:], mask, cache)
    return torch.cat((*outputs, again.flatten(0, 1).expand(2, -1, -1)), 1)


@pytest.mark.parametrize("how", [models.Sampling(temperature=0), models.BeamSearch(beams=3), models.Sampling(seed=4)])
def test_generate_continues_a_prompt_on_shards(ranks, tmp_path, how):
    decoder("gpt2", {"initializer_range": 0.4}).save_pretrained(tmp_path)
    expected = generated(None, str(tmp_path), how)
    assert expected.shape[1] > 5 and len(expected.unique()) > 3
    for answer in ranks(2).run(generated, str(tmp_path), how):
        assert isinstance(answer, torch.Tensor) and answer.equal(expected), answer


def generated(rank, folder, how):
    """New tokens behind a prompt, whose last token `generate` is given."""
    model, ids = models.load(folder), batch(False)["input_ids"][:, :40]
    more = {"max_new_tokens": 12, "sampling": how}
    if rank is None:
        return model.generate(ids, **more)[:, 40:]
    plan, cache = distributed.plan(Causal(), 39), model.cache()
    with distributed.context_parallel(model, plan):
        with torch.no_grad():
            model(**distributed.shard({"input_ids": ids[:, :39]}, plan), cache=cache)
        return model.generate(ids[:, 39:], cache=cache, **more)[:, 1:]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("tokens", "decode: ranks disagree: argument input_ids is [[3]] on rank 0 and [[4]] on rank 1"),
        ("counts", "decode: ranks disagree: "),
        ("labels", "labels: a call behind a prompt has no loss on shards"),
        ("gradients", "a call behind a prompt records no gradients; call it under torch.no_grad()"),
        ("training", "dropout would differ by rank; call model.eval() behind a prompt"),
        ("dropout", "dropout would differ by rank, expected none behind a prompt"),
        ("documents", "the plan's mask Causal() & Documents"),
        ("padding", "the plan's mask Causal() & Padding"),
        ("another plan", "expected"),
        ("of one process", "expected"),
        ("in one process", "its keys are on shards; call the model in saccade.distributed.context_parallel"),
    ],
)
@pytest.mark.parametrize("make", [decoder, own])
def test_what_cannot_be_right_behind_a_prompt_is_an_error(ranks, make, fault, message):
    kind = "llama" if make is decoder else None
    for answer in ranks(2).run(refused, make, kind, fault):
        assert isinstance(answer, str) and message in answer, answer


def refused(rank, make, kind, fault):
    """The error of a call that cannot be right with a cache."""
    model = make(kind, {"attention_dropout": 0.5} if fault == "dropout" and make is decoder else {})
    ids = torch.arange(12)[None]
    mask = {"documents": Causal() & Documents([0] * 12), "padding": Causal() & Padding([12])}.get(fault, Causal())
    plan, other = distributed.plan(mask, 12), distributed.plan(Causal(), 12)
    new = ids[:, 3 + rank : 4 + rank] if fault == "tokens" else ids[:, : 1 + rank] if fault == "counts" else ids[:, :2]
    name = "past_key_values" if make is decoder else "cache"
    cache = transformers.DynamicCache(config=model.config) if make is decoder else model.cache()
    call = functools.partial(model, **{name: cache})
    try:
        with torch.no_grad():
            if fault == "of one process":
                call(ids)
                with distributed.context_parallel(model, other):
                    call(new)
            with distributed.context_parallel(model, plan):
                given = distributed.shard({"input_ids": ids}, plan)
                if make is decoder:
                    call = functools.partial(model, past_key_values=model(**given, use_cache=True).past_key_values)
                else:
                    call(**given)
                if fault not in ("another plan", "in one process", "gradients", "dropout", "training"):
                    call(new, labels=new if fault == "labels" else None)
        model.train(fault == "training")
        for part in model.modules() if fault == "dropout" else ():
            part.training = "Attention" in type(part).__name__
            if isinstance(part, nn.MultiHeadAttention):
                part.config = dataclasses.replace(part.config, dropout=0.5)
        with torch.set_grad_enabled(fault == "gradients"):
            if fault == "in one process":
                call(new)
            with distributed.context_parallel(model, other if fault == "another plan" else plan):
                call(new)
    except (TypeError, ValueError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("int8", "LanguageModel: cache: a KVCache (GrowingLayer in 8 bits of 0 tokens), expected a KVCache"),
        ("window", "LanguageModel: cache: a KVCache (WindowLayer of 0 tokens), expected a KVCache"),
        ("layer", "MultiHeadAttention: cache: a GrowingLayer (GrowingLayer of 0 tokens), expected a KVCache"),
        ("whole prompt", "DecoderLM: tokens is (1, 12), expected the 6 rows of plan.shard"),
        ("rollback", "rollback: expected one count, since on shards all items have as many tokens"),
        ("tokens", "decode: ranks disagree: argument tokens is [[0], [0]] on rank 0 and [[1], [1]] on rank 1"),
        ("two caches", "Pair: first and second: a call on shards takes one cache, got 2"),
    ],
)
def test_caches_that_cannot_be_on_shards_are_an_error(ranks, fault, message):
    for answer in ranks(2).run(unfit, fault):
        assert isinstance(answer, str) and message in answer, answer


def unfit(rank, fault):
    model, plan, ids = own(None, {}), distributed.plan(Causal(), 12), torch.arange(12)[None].expand(2, -1)
    cache = {"int8": model.cache("int8"), "window": nn.KVCache.window(2, 4)}.get(fault, model.cache())
    try:
        with torch.no_grad(), distributed.context_parallel(model, plan):
            if fault == "layer":
                model.model.decoder.blocks[0].attention(torch.zeros(1, plan.held(rank), 24), cache=cache[0])
            if fault == "whole prompt":
                model.next_logits(ids[:1], None, cache)
            model(plan.shard(ids, 1), cache=cache)
            if fault == "rollback":
                cache.rollback(torch.tensor([1, 2]))
            if fault == "tokens":
                model.model(torch.tensor([[rank], [rank]]), cache=cache)
        if fault == "two caches":
            with torch.no_grad(), distributed.context_parallel(pair := Pair(), plan):
                pair(torch.zeros(1, plan.held(rank), 24), nn.KVCache.growing(1), nn.KVCache.growing(1))
    except (TypeError, ValueError) as error:
        return str(error)


class Pair(torch.nn.Module):
    """A module with two caches, of which it uses one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiHeadAttention(nn.AttentionConfig(24, heads=3))

    def forward(self, x, first, second):
        return self.layer(x, cache=second[0])


class Twice(torch.nn.Module):
    """A layer that attends twice, by one cache or by two."""

    def __init__(self, caches):
        super().__init__()
        self.layer, self.caches = nn.MultiHeadAttention(nn.AttentionConfig(24, heads=3)), caches

    def forward(self, x, cache, mask=None, bias=None):
        for layer in self.caches:
            x = self.layer(x, mask, cache=None if cache is None else cache[layer], bias=bias)
        return x


def test_tensors_that_reach_behind_the_prompt_are_read_by_position(ranks):
    for rows in ranks(2).run(reaching):
        torch.testing.assert_close(rows, reaching(None), rtol=1e-12, atol=1e-12)


@torch.no_grad()
def reaching(rank):
    """Rows of a prompt and of the tokens behind it, with a mask and a bias that are tensors for more than these."""
    torch.manual_seed(5)
    x, bias = torch.randn(1, LENGTH, 24).double(), torch.randn(3, LENGTH + 4, LENGTH + 4).double()
    mask, bias = (torch.rand(LENGTH + 4, LENGTH + 4) < 0.6).tril(), bias[None]
    model = Twice((0, 1)).double()
    if rank is None:
        return model(x, None, mask[:LENGTH, :LENGTH], bias[..., :LENGTH, :LENGTH])
    plan, cache = distributed.plan(None, PROMPT), nn.KVCache.growing(2)
    model.eval()
    with distributed.context_parallel(model, plan):
        rows = [plan.unshard(model(plan.shard(x[:, :PROMPT], 1), cache, mask, bias), 1)]
        rows += [model(x[:, start:stop], cache, mask, bias) for start, stop in PIECES]
    return torch.cat(rows, 1)


def test_layers_that_keep_other_tokens_than_the_first_are_an_error(ranks):
    for answer in ranks(2).run(uneven):
        expected = [f"its cache has {held} tokens, expected {first} as in the first" for held, first in UNEVEN]
        assert len(answer) == 3 and all(map(operator.contains, answer, expected)), answer


@torch.no_grad()
def uneven(rank):
    """The errors of a cache that two layers share, of one with an empty layer, and of one with a shorter layer."""
    plan, errors = distributed.plan(Causal(), 12), []
    for caches, forget in (((0, 0), 0), ((0, 1), 12), ((0, 1), 5)):
        model, cache = Twice(caches).eval(), nn.KVCache.growing(2)
        try:
            with distributed.context_parallel(model, plan):
                model(torch.zeros(1, plan.held(rank), 24), cache)
                cache[1].rollback(forget)
                model(torch.zeros(1, 1, 24), cache)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_a_step_that_failed_can_be_cropped_and_repeated(ranks):
    for expected, repeated in ranks(2).run(failed):
        torch.testing.assert_close(repeated, expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def failed(rank):
    """Logits of a step, and of the same step after one in which the second layer raised an error."""
    model, ids = decoder("llama", {}).double(), torch.arange(13)[None]
    plan = distributed.plan(Causal(), 12)
    with distributed.context_parallel(model, plan):
        cache = model(**distributed.shard({"input_ids": ids[:, :12]}, plan), use_cache=True).past_key_values
        expected = model(ids[:, 12:], past_key_values=cache).logits
        cache.crop(-1)
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, 12:], past_key_values=cache)
        hook.remove()
        cache.crop(-1)
        return expected, model(ids[:, 12:], past_key_values=cache).logits


def test_a_cache_that_is_empty_again_takes_another_prompt(ranks):
    assert ranks(2).run(emptied) == [True, True]


@torch.no_grad()
def emptied(rank):
    """Whether the prompt of another plan, in the cache of a first one, has the logits of one process."""
    model, ids, cache = own(None, {}).double(), torch.arange(VOCABULARY)[None], nn.KVCache.growing(2)
    for length, forget in ((12, cache.reset), (20, lambda: cache.rollback(20)), (25, lambda: None)):
        plan = distributed.plan(None if length == 12 else Causal(), length)
        with distributed.context_parallel(model, plan):
            model(plan.shard(ids[:, :length], 1), cache=cache)
            if length < 25:
                forget()
            else:
                logits = model(ids[:, length:], cache=cache).logits
    return bool((logits - model(ids).logits[:, 25:]).abs().max() < 1e-12)
