"""Generating from token ids: batches of unequal prompts against transformers and against each prompt alone."""

from __future__ import annotations

import json

import pytest
import torch

from models.families import test_gpt2, test_llama
from published import transformers, written
from saccade import models
from saccade.models import Sampling
from saccade.models.decoding.constraints import Constraints
from saccade.models.decoding.drawing import tokens_after
from saccade.models.decoding.step import DecoderStep
from saccade.models.generation import sample_tokens
from saccade.nn import KVCache

NAMES = {
    "GPT2LMHeadModel": {},
    "GPTNeoForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 4},
    "Qwen3ForCausalLM": {},
    "SmolLM3ForCausalLM": {"use_sliding_window": True, "sliding_window": 3, "no_rope_layers": [1, 0, 1]},
}


def pair(folder, name="Qwen3ForCausalLM", **changes):
    """transformers' model and ours, float64, so that no rounding chooses between two tokens."""
    config = (test_gpt2 if name.startswith("GPT") else test_llama).config(name, **{**NAMES[name], **changes})
    theirs = written(folder, name, config, spread=0.8).double()
    theirs.generation_config.pad_token_id = 100
    return theirs, models.load(folder, dtype=torch.float64)


def greedy(theirs, inputs, **options):
    return theirs.generate(**inputs, do_sample=False, **{"max_new_tokens": 12, "min_new_tokens": 0, **options})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_is_that_of_transformers_with_unequal_prompts(tmp_path, name):
    theirs, ours = pair(tmp_path, name)
    inputs = test_gpt2.batch("left")
    expected = greedy(theirs, inputs)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=12), expected)
    right = ours.generate(**test_gpt2.batch("right"), max_new_tokens=12)
    assert torch.equal(right[:, 13:], expected_of_right(ours))


def expected_of_right(ours):
    """Each prompt alone, without padding."""
    inputs = test_gpt2.batch("right")
    rows = []
    for ids, real in zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True):
        rows.append(ours.generate(ids[real][None], max_new_tokens=12)[0, int(real.sum()) :])
    return torch.stack(rows)


@pytest.mark.slow
def test_items_end_at_their_own_end_token(tmp_path):
    theirs, ours = pair(tmp_path)
    inputs = test_gpt2.batch("left")
    free = greedy(theirs, inputs)[:, 13:]
    ends = [int(free[0, 3]), int(free[2, 6])]
    expected = greedy(theirs, inputs, eos_token_id=ends)
    assert (expected[:, 13:] == 100).any()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "pad_token_id": 100}))
    ours = models.load(tmp_path, dtype=torch.float64)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=12), expected)
    first = greedy(theirs, inputs, eos_token_id=free[:, 2].tolist())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": free[:, 2].tolist()}))
    assert models.load(tmp_path, dtype=torch.float64).generate(**inputs, max_new_tokens=12).shape == first.shape


def test_repeated_tokens_are_penalised_as_transformers_does(tmp_path):
    theirs, ours = pair(tmp_path)
    ids = test_gpt2.batch()["input_ids"][1:2]
    got = ours.generate(ids, max_new_tokens=12, sampling=Sampling(temperature=0.0, repetition_penalty=1.7))
    assert torch.equal(got, greedy(theirs, {"input_ids": ids}, repetition_penalty=1.7))
    assert not torch.equal(got, greedy(theirs, {"input_ids": ids}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        {"no_repeat_ngram_size": 2, "repetition_penalty": 0.6},
        {"bad_words_ids": [[7], [9, 11]], "forced_eos_token_id": 2, "renormalize_logits": True},
        {"num_beams": 3, "length_penalty": 0.3, "min_length": 17, "no_repeat_ngram_size": 3},
    ],
)
def test_rules_of_the_files_are_kept(tmp_path, rules):
    theirs, ours = pair(tmp_path)
    inputs = test_gpt2.batch("left")
    free = greedy(theirs, inputs)
    banned = rules.get("bad_words_ids", []) + [[int(token)] for token in free[:, 14] if "bad_words_ids" in rules]
    ends = free[:, 15].tolist() if "min_length" in rules else [2]
    rules = {**rules, "pad_token_id": 100, "eos_token_id": ends} | ({"bad_words_ids": banned} if banned else {})
    (tmp_path / "generation_config.json").write_text(json.dumps(rules))
    theirs.generation_config = transformers().GenerationConfig.from_pretrained(tmp_path)
    expected = theirs.generate(**inputs, max_new_tokens=12)
    assert not torch.equal(expected, free)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=12), expected)


def test_a_first_token_is_forced_after_one_alone(tmp_path):
    theirs, ours = pair(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"forced_bos_token_id": 9, "pad_token_id": 100}))
    theirs.generation_config = transformers().GenerationConfig.from_pretrained(tmp_path)
    for ids in (torch.tensor([[5]]), torch.tensor([[5, 6]])):
        expected = theirs.generate(ids, max_new_tokens=4)
        assert (expected[0, ids.shape[1]] == 9) == (ids.shape[1] == 1)
        assert torch.equal(ours.generate(ids, max_new_tokens=4), expected)


@pytest.mark.slow
def test_a_folder_of_a_chat_model_generates(tmp_path):
    """Qwen's own settings: they draw, and penalise tokens of the text."""
    theirs, ours = pair(tmp_path, "Qwen3ForCausalLM")
    settings = dict(do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.7, min_p=0.1)
    (tmp_path / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [2, 1]}))
    ids = test_gpt2.batch()["input_ids"][1:2]
    expected = greedy(theirs, {"input_ids": ids}, repetition_penalty=1.7, eos_token_id=[2, 1])
    assert torch.equal(ours.generate(ids, max_new_tokens=12), expected)
    assert ours.end_tokens == (2, 1) and ours.repetition_penalty == 1.7
    given = Sampling(temperature=0.0)  # takes the place of what the files say about choosing a token
    assert torch.equal(ours.generate(ids, max_new_tokens=12, sampling=given), greedy(theirs, {"input_ids": ids}))


@pytest.mark.slow
def test_padding_without_a_mask_is_inferred_as_transformers_does(tmp_path):
    theirs, ours = pair(tmp_path)
    inputs = test_gpt2.batch("left")
    for end in (2, 100):  # padding that ends texts is read
        (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": 100, "eos_token_id": end}))
        expected = greedy(theirs, {"input_ids": inputs["input_ids"]}, eos_token_id=end)
        got = ours.generate(inputs["input_ids"], max_new_tokens=12)
        assert torch.equal(got, expected)
        assert torch.equal(got, ours.generate(**inputs, max_new_tokens=12)) == (end == 2)


@pytest.mark.slow
def test_padding_is_no_token_that_is_repeated(tmp_path):
    _, ours = pair(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"no_repeat_ngram_size": 1, "pad_token_id": 100}))
    inputs = test_gpt2.batch("right")
    with torch.no_grad():
        ours.head.weight[100] *= 40  # a likely token of some texts
    together = ours.generate(**inputs, max_new_tokens=12)[:, 13:]
    assert torch.equal(together, expected_of_right(ours))
    assert (together == 100).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache", [lambda: KVCache.static(3, 25), lambda: KVCache.window(3, 25), lambda: KVCache.streaming(3, 21)]
)
def test_every_cache_that_holds_all_tokens_gives_the_same(tmp_path, cache):
    _, ours = pair(tmp_path)
    inputs = test_gpt2.batch("left")
    expected = ours.generate(**inputs, max_new_tokens=12)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=12, cache=cache()), expected)


@pytest.mark.slow
def test_draws_are_those_of_each_distribution(tmp_path):
    """Sampled in a batch: each item by its own distribution, within five standard deviations."""
    _, ours = pair(tmp_path)
    inputs = test_gpt2.batch("left")
    sampling, count = Sampling(temperature=0.8, top_k=3, seed=1), 900
    many = {name: x.repeat(count // 3, 1) for name, x in inputs.items()}
    drawn = ours.generate(**many, max_new_tokens=1, sampling=sampling)[:, -1].view(-1, 3)
    with torch.no_grad():
        expected = sampling.probabilities(ours(**inputs).logits[:, -1])
    for item in range(3):
        share = torch.bincount(drawn[:, item], minlength=101) / len(drawn)
        assert ((share - expected[item]).abs() <= 5 * (expected[item] * (1 - expected[item]) / len(drawn)).sqrt()).all()
    again = ours.generate(**many, max_new_tokens=1, sampling=sampling)[:, -1].view(-1, 3)
    assert torch.equal(again, drawn)


@pytest.mark.slow
def test_items_that_have_ended_are_computed_no_more(tmp_path):
    _, ours = pair(tmp_path)
    inputs = test_gpt2.batch("left")
    free = ours.generate(**inputs, max_new_tokens=12)[:, 13:]
    seen = []

    class Counted(DecoderStep):
        def step(self, ids):
            seen.append(len(ids))
            return super().step(ids)

    ends = {int(free[0, 1]), int(free[1, 1])} - set(free[2].tolist())
    assert len(ends) == 2
    step = Counted(ours, inputs["attention_mask"])
    rules = Constraints(12, ends=tuple(ends))
    tokens = list(tokens_after(step, inputs["input_ids"], Sampling(temperature=0.0), rules, pad=100))
    assert seen == [3, 3, *[1] * 10]
    assert torch.equal(torch.stack(tokens, 1)[2], free[2])


def test_bad_input(tmp_path):
    _, ours = pair(tmp_path, "GPT2LMHeadModel")
    ids = torch.ones(2, 25, dtype=torch.int64)
    for options, message in [
        ({"max_new_tokens": 7}, "max_new_tokens: 7 after 25 tokens, but the model has 31 positions; ask for at most 6"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be at least 1, got 0"),
        (
            {"attention_mask": torch.zeros(2, 25).long(), "max_new_tokens": 6},
            "attention_mask: item 0 has no real token",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            ours.generate(ids, **options)
    with pytest.raises(ValueError, match="input_ids: ids must be from 0 to 100, got 101"):
        ours.generate(ids + 100)
    with pytest.raises(ValueError, match="generate: needs the head 'causal-lm', and this model has none"):
        models.load(tmp_path, head="none").generate(ids)
    assert ours.generate(ids, max_new_tokens=6).shape == (2, 31)


@pytest.mark.slow
def test_seen_tokens_of_padding_are_not_penalised(tmp_path):
    _, ours = pair(tmp_path)
    inputs = test_gpt2.batch("left")
    sampling = Sampling(temperature=0.0, repetition_penalty=1.7)
    together = ours.generate(**inputs, max_new_tokens=8, sampling=sampling)
    for item, real in enumerate(inputs["attention_mask"].bool()):
        alone = ours.generate(inputs["input_ids"][item, real][None], max_new_tokens=8, sampling=sampling)
        assert torch.equal(alone[0, -8:], together[item, -8:])


def test_a_padding_token_that_there_is_not_is_not_written(tmp_path):
    _, ours = pair(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": -1, "eos_token_id": [500, 7]}))
    assert ours.pad_token == 7


@pytest.mark.slow
def test_texts_end_where_the_context_does_and_tokens_do_not(tmp_path):
    _, ours = pair(tmp_path, max_position_embeddings=17)
    assert ours.context == 17 and ours.longest is None
    prompt = [3, 1, 4]
    drawn = list(sample_tokens(ours, prompt, 50, Sampling(temperature=0.0)))
    assert len(drawn) == 14
    longer = ours.generate(torch.tensor([prompt]), max_new_tokens=19)
    assert longer.shape == (1, 22) and longer[0, 3:17].tolist() == drawn
    streamed = sample_tokens(ours, prompt, 50, Sampling(temperature=0.0), KVCache.streaming(3, window=11))
    assert len(list(streamed)) == 50
