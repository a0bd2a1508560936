"""Beam search against a search of all texts, and against transformers' own."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import Tensor

from published import transformers, written
from saccade import models
from saccade.models.decoding.beam import BeamSearch, search
from saccade.models.decoding.constraints import Constraints
from saccade.models.decoding.drawing import draw
from saccade.models.decoding.step import DecoderStep

VOCABULARY, END, LONGEST = 11, 3, 4


class Table:
    """A model whose next token depends on the item and the last two tokens: logits `table[item, before, last]`."""

    def __init__(self, items: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.table = 2 * torch.randn(
            items, VOCABULARY, VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64
        )
        self.items, self.before, self.calls = torch.arange(items), torch.zeros(items, dtype=torch.int64), []

    def step(self, ids: Tensor) -> Tensor:
        self.calls.append(len(ids))
        before = ids[:, -2] if ids.shape[1] > 1 else self.before
        self.before = ids[:, -1]
        return self.table[self.items, before, ids[:, -1]]

    def reorder(self, items: Tensor) -> None:
        self.items, self.before = self.items[items], self.before[items]


def all_texts(table: Table, item: int, allowed, penalty: float, ends=(END,)) -> list[tuple[float, list[int]]]:
    """Every text of the allowed tokens that ends, or is as long as any may be, with its score, best first."""
    scores = table.table[item].log_softmax(-1)
    found = []
    for length in range(1, LONGEST + 1):
        for text in itertools.product(allowed, repeat=length):
            if any(token in ends for token in text[:-1]) or (text[-1] not in ends and length < LONGEST):
                continue
            told = [0, 0, *text]
            total = sum(scores[told[i], told[i + 1], told[i + 2]] for i in range(length))
            found.append((float(total) / length**penalty, list(text)))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.7, 2.0])
@pytest.mark.parametrize("allowed", [(5, 7, END), (2, END)])
def test_beams_for_all_texts_find_the_best_ones(penalty, allowed):
    """With two tokens and an end there are 8 unfinished texts of 3 tokens: 8 beams hold them all."""
    banned = tuple((token,) for token in range(VOCABULARY) if token not in allowed)
    rules = Constraints(LONGEST, ends=(END,), banned=banned)
    table = Table(3)
    beams = BeamSearch(8, length_penalty=penalty, early_stopping="never", n_best=5)
    if penalty < 0:  # no bound on what longer texts could gain: search on until none is left
        beams = BeamSearch(8, length_penalty=penalty, early_stopping=False, n_best=1)
    found = search(table, torch.zeros(3, 1, dtype=torch.int64), beams, rules)
    for item, texts in enumerate(found.texts()):
        expected = all_texts(table, item, allowed, penalty)[: beams.n_best]
        assert texts[: len(expected)] == [text for _, text in expected]
        scores = torch.tensor([score for score, _ in expected], dtype=torch.float64)
        assert torch.allclose(found.scores[item, : len(expected)], scores, atol=1e-12)
        assert not any(texts[len(expected) :])


def test_ends_leave_room_for_beams_that_go_on():
    """Nine of eleven tokens are ends, and likelier than the others; longer texts have the higher scores."""
    table, ends = Table(2), tuple(range(2, VOCABULARY))
    table.table[..., 2:] += 6.0
    rules = Constraints(LONGEST, ends=ends)
    found = search(table, torch.zeros(2, 1, dtype=torch.int64), BeamSearch(8, 4.0, "never"), rules)
    for item, texts in enumerate(found.texts()):
        score, text = all_texts(table, item, range(VOCABULARY), 4.0, ends)[0]
        assert texts == [text] and abs(float(found.scores[item, 0]) - score) < 1e-12


def test_items_that_are_done_leave_the_batch():
    table = Table(3)
    table.table[1, ..., END] += 50.0  # item 1 ends at once
    rules = Constraints(6, ends=(END,))
    found = search(table, torch.zeros(3, 1, dtype=torch.int64), BeamSearch(2), rules, pad=9)
    assert table.calls[:3] == [3, 6, 4]
    assert found.texts()[1][0] == [END]
    assert (found.ids[1, 0, 1:] == 9).all()
    alone = Table(3)
    alone.table = table.table[2:]
    alone.items, alone.before = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    assert search(alone, torch.zeros(1, 1, dtype=torch.int64), BeamSearch(2), rules).texts()[0] == found.texts()[2]


def test_drawn_texts_keep_to_the_constraints():
    start = torch.tensor([[5], [6], [7]])
    rules = Constraints(9, 3, (END,), no_repeat_ngram=2, banned=((2,), (5, 4)), forced_first=6, forced_last=END)
    for seed in range(3):
        texts = [item[0] for item in draw(Table(3, seed), start, models.Sampling(1.5, seed=seed), rules).texts()]
        for begun, text in zip(start[:, 0].tolist(), texts, strict=True):
            pairs = list(itertools.pairwise([begun, *text]))
            assert text[0] == 6 and END not in text[:3] and 2 not in text and (5, 4) not in pairs
            assert len(set(pairs[:-1])) == len(pairs[:-1]) and text[-1] == END
    with_likeliest = draw(Table(2), start[:2], models.Sampling(0.0), Constraints(5, ends=(END,)))
    table = Table(2)
    for text, item in zip(with_likeliest.texts(), range(2), strict=True):
        before, last = 0, int(start[item, 0])
        for token in text[0]:
            assert token == table.table[item, before, last].argmax()
            before, last = last, token


@pytest.mark.parametrize(
    "options",
    [
        dict(num_beams=4),
        dict(num_beams=3, length_penalty=2.5, num_return_sequences=3),
        dict(num_beams=5, length_penalty=-1.0, early_stopping=True, num_return_sequences=2),
        dict(num_beams=4, length_penalty=0.3, early_stopping="never", no_repeat_ngram_size=2),
        dict(num_beams=4, min_new_tokens=5, no_repeat_ngram_size=1, bad_words_ids=[[7], [9, 11], [4, 5, 6]]),
        dict(num_beams=4, bad_words_ids=[[7], [9], [21], [30]], renormalize_logits=True),
        dict(num_beams=2, forced_bos_token_id=13, forced_eos_token_id=1, eos_token_id=[1, 17, 23, 31]),
        dict(num_beams=3, length_penalty=2.0, early_stopping=True, eos_token_id=[*range(1, 23)], min_new_tokens=2),
        dict(num_beams=3, length_penalty=2.0, early_stopping=False, eos_token_id=[*range(1, 23)], min_new_tokens=2),
    ],
)
def test_an_encoder_decoder_finds_the_texts_of_transformers(tmp_path, options):
    sizes = dict(vocab_size=37, d_model=18, d_kv=7, d_ff=31, num_layers=1, num_heads=3, decoder_start_token_id=0)
    theirs = written(tmp_path, "T5ForConditionalGeneration", transformers().T5Config(**sizes), spread=3.0)
    theirs.generation_config.update(**options, max_new_tokens=9)
    theirs.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 37, (5, 9), generator=generator)
    mask = (torch.arange(9) < torch.tensor([[5], [9], [2], [7], [1]])).long()
    expected = theirs.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_scores=True)
    model = models.load(tmp_path)
    n = options.get("num_return_sequences", 1)
    found = model.generate(ids, mask, search=models.BeamSearch(**{**vars(model.search), "n_best": n}))
    assert_same_texts(found, expected.sequences.view(5, n, -1)[..., 1:])
    assert torch.allclose(found.scores, expected.sequences_scores.view(5, n), atol=1e-5)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"repetition_penalty": 1.9}])
def test_lengths_count_all_tokens_that_targets_begin_with(tmp_path, options):
    sizes = dict(vocab_size=37, d_model=18, d_kv=7, d_ff=31, num_layers=1, num_heads=3, decoder_start_token_id=0)
    theirs = written(tmp_path, "T5ForConditionalGeneration", transformers().T5Config(**sizes), spread=3.0)
    theirs.generation_config.update(**options, max_length=9, min_length=5, forced_bos_token_id=13, eos_token_id=[1, 8])
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(2, 37, (3, 9), generator=torch.Generator().manual_seed(1))
    for begun in (torch.tensor([[0]]), torch.tensor([[0, 5, 17]])):
        begun = begun.expand(3, -1)
        expected = theirs.generate(ids, decoder_input_ids=begun)[:, None, begun.shape[1] :]
        found = models.load(tmp_path).generate(ids, decoder_input_ids=begun)
        assert_same_texts(found, expected)
        assert (found.ids[..., 0] == 13).all() == (begun.shape[1] == 1)


def assert_same_texts(found, sequences):
    """What stands behind an end token is not compared: where the padding token is 0, transformers puts another.

    A text that was cut short would have another score.
    """
    assert found.ids.shape == sequences.shape
    real = torch.arange(sequences.shape[-1]) < found.lengths[..., None]
    assert torch.equal(found.ids[real], sequences[real])


def test_a_decoder_finds_the_texts_of_transformers(tmp_path):
    """The same search over prompts of unequal length."""
    config = transformers().GPT2Config(
        vocab_size=37, n_positions=29, n_embd=20, n_layer=2, n_head=5, eos_token_id=1, pad_token_id=0, bos_token_id=1
    )
    theirs = written(tmp_path, "GPT2LMHeadModel", config, spread=3.0)
    ids = torch.randint(2, 37, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(7) >= torch.tensor([[2], [0], [5]])).long()
    ids = ids * mask
    expected = theirs.generate(
        ids,
        attention_mask=mask,
        num_beams=4,
        num_return_sequences=2,
        max_new_tokens=8,
        length_penalty=0.7,
        return_dict_in_generate=True,
        output_scores=True,
    )
    step = DecoderStep(models.load(tmp_path), mask)
    found = search(step, ids, BeamSearch(4, length_penalty=0.7, n_best=2), Constraints(8, ends=(1,)))
    assert_same_texts(found, expected.sequences.view(3, 2, -1)[..., 7:])
    assert torch.allclose(found.scores, expected.sequences_scores.view(3, 2), atol=1e-5)


def test_files_that_ask_for_another_search_are_refused(tmp_path):
    sizes = dict(vocab_size=37, d_model=18, d_kv=7, d_ff=31, num_layers=1, num_heads=3)
    written(tmp_path, "T5ForConditionalGeneration", transformers().T5Config(**sizes))
    for settings, message in (
        ({"repetition_penalty": 1.5, "num_beams": 2}, "repetition_penalty: expected 1, since beams are not penalised"),
        ({"num_return_sequences": 2}, "num_return_sequences: expected 1: other values are not supported, got 2"),
        ({"stop_strings": ["."]}, r"stop_strings: expected \[\]: other values are not supported"),
        ({"watermarking_config": {"bias": 2.5}}, "watermarking_config: expected None: other values are not supported"),
        ({"do_sample": True, "min_p": 0.1}, "min_p: expected 0: other values are not supported, got 0.1"),
        ({"max_length": 3}, "max_length: expected more than the 3 tokens that texts begin with, got 3"),
        ({"num_beams": 4, "do_sample": True}, "num_beams: expected 1, since beams are not drawn"),
        ({"bad_words_ids": [3]}, "bad_words_ids: expected a list of lists of tokens"),
        ({"eos_token_id": "x"}, "eos_token_id: expected a token id, or a list of them"),
        ([], "generation_config.json: damaged, expected an object of settings"),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match=message):
            models.load(tmp_path).generate(torch.ones(1, 2).long(), decoder_input_ids=torch.ones(1, 3).long())
    (tmp_path / "generation_config.json").write_text(
        '{"do_sample": true, "top_p": 0.7, "min_length": 4, "max_length": 9}'
    )
    model = models.load(tmp_path)
    assert model.search == models.Sampling(1.0, 50, 0.7)
    assert model.constraints == Constraints(8, 3, (1,))


def test_bad_settings():
    start = torch.zeros(1, 1, dtype=torch.int64)
    for call, message in (
        (lambda: BeamSearch(0), "beams: expected an int of at least 1, got 0"),
        (lambda: BeamSearch(2, n_best=3), "n_best: 3 texts of 2 beams"),
        (lambda: BeamSearch(early_stopping="soon"), "early_stopping: expected True, False or 'never', got 'soon'"),
        (lambda: Constraints(0), "max_new_tokens: expected an int of at least 1, got 0"),
        (lambda: Constraints(2, 3), "min_new_tokens: 3 are more than max_new_tokens=2"),
        (lambda: Constraints(banned=((),)), "banned: a sequence is empty"),
        (
            lambda: search(Table(1), start, BeamSearch(12), Constraints()),
            "beams: 12 are more than the 11 tokens of the vocabulary",
        ),
        (
            lambda: search(Table(1), start, BeamSearch(2), Constraints(ends=(11,))),
            "ends: tokens must be from 0 to 10, got 11",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
