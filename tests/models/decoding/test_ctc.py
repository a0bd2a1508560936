"""CTC decoding against sums over all alignments, and against transformers' tokenizer."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from published import transformers
from saccade.models.decoding.ctc import CtcVocabulary, beam_search, collapse, greedy


def texts(logits: torch.Tensor, blank: int) -> dict[tuple[int, ...], float]:
    """The log probability of every text of one item (L, V): the sum over all V ** L alignments."""
    rows = logits.double().log_softmax(-1).tolist()
    found: dict[tuple[int, ...], list[float]] = {}
    for alignment in itertools.product(range(logits.shape[1]), repeat=logits.shape[0]):
        text = collapse(alignment, blank)
        found.setdefault(text, []).append(sum(row[token] for row, token in zip(rows, alignment, strict=True)))
    return {text: torch.tensor(each, dtype=torch.float64).logsumexp(0).item() for text, each in found.items()}


@pytest.mark.parametrize(("frames", "vocabulary", "blank"), [(5, 3, 0), (4, 4, 2), (1, 5, 4), (7, 2, 0), (3, 1, 0)])
def test_a_wide_beam_is_the_sum_over_all_alignments(frames, vocabulary, blank):
    logits = 2 * torch.randn(3, frames, vocabulary, generator=torch.Generator().manual_seed(frames))
    found = beam_search(logits, blank=blank, beams=2000, best=2000)
    for item, hypotheses in zip(logits, found, strict=True):
        expected = texts(item, blank)
        assert {h.tokens for h in hypotheses} == expected.keys()
        for hypothesis in hypotheses:
            assert math.isclose(hypothesis.log_probability, expected[hypothesis.tokens], abs_tol=1e-12)
        ordered = [h.log_probability for h in hypotheses]
        assert ordered == sorted(ordered, reverse=True)
        assert math.isclose(math.fsum(map(math.exp, ordered)), 1, abs_tol=1e-12)


def test_the_likeliest_text_is_not_that_of_the_likeliest_alignment():
    """Graves et al. (2006), figure 2: two frames, blank .6 and A .4; "A" has .64, nothing .36."""
    logits = torch.tensor([[[0.6, 0.4], [0.6, 0.4]]]).log()
    assert greedy(logits) == [()]
    best, other = beam_search(logits, best=2)[0]
    assert best.tokens == (1,)
    assert math.isclose(math.exp(best.log_probability), 0.64, abs_tol=1e-6)
    assert math.isclose(math.exp(other.log_probability), 0.36, abs_tol=1e-6)


def test_narrow_beams_and_lengths():
    logits = 3 * torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    wide, narrow = beam_search(logits, [6, 3], beams=500), beam_search(logits, torch.tensor([6, 3]), beams=3, best=3)
    alone = beam_search(logits[1:, :3], beams=500)
    assert wide[1] == alone[0]
    for exact, found in zip(wide, narrow, strict=True):
        assert len(found) == 3
        assert found[0].log_probability <= exact[0].log_probability + 1e-12
    assert greedy(logits, [6, 3])[1] == greedy(logits[1:, :3])[0]
    assert beam_search(logits, [0, 6])[0] == [((), 0.0)]


def test_impossible_tokens_are_never_written():
    logits = torch.full((1, 3, 3), -torch.inf)
    logits[0, :, 2] = 0
    assert beam_search(logits, beams=5, best=5) == [[((2,), 0.0)]]


def test_texts_are_those_of_transformers(tmp_path):
    letters = ["[PAD]", "<s>", "</s>", "[UNK]", "|", *"ABCDEFG", "'"]
    (tmp_path / "vocab.json").write_text(json.dumps({letter: n for n, letter in enumerate(letters)}))
    logits = torch.randn(20, 30, len(letters), generator=torch.Generator().manual_seed(0))
    logits[..., [0, 4]] += 1
    for settings in ({}, {"do_lower_case": True, "word_delimiter_token": "'", "replace_word_delimiter_char": "_"}):
        settings = {"pad_token": "[PAD]", "unk_token": "[UNK]", **settings}
        tokenizer = transformers().Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"), **settings)
        tokenizer.save_pretrained(tmp_path)
        ours = CtcVocabulary.of_folder(tmp_path)
        expected = tokenizer.batch_decode(logits.argmax(-1))
        assert [ours.text(tokens) for tokens in greedy(logits)] == expected
        assert ours.text([99]) == tokenizer.decode([99])


def test_what_is_wrong_is_told(tmp_path):
    logits = torch.zeros(2, 3, 4)
    wrong = [
        (dict(logits=[1]), TypeError, "logits: expected a tensor of floats"),
        (dict(logits=logits[0]), ValueError, r"logits: expected shape \(batch, frames, vocabulary\), got \(3, 4\)"),
        (dict(logits=logits[:0]), ValueError, "logits: expected shape"),
        (dict(logits=logits * torch.nan), ValueError, "logits: hold NaN"),
        (dict(logits=logits, blank=4), ValueError, "blank: expected a token from 0 to 3, got 4"),
        (dict(logits=logits, lengths=[3]), ValueError, "lengths: expected 2 numbers from 0 to 3"),
        (dict(logits=logits, lengths=[3, 4]), ValueError, "lengths: expected 2 numbers from 0 to 3"),
        (dict(logits=logits, beams=0), ValueError, "beams: expected a positive int, got 0"),
        (dict(logits=logits, beams=2, best=3), ValueError, "best: expected at most the 2 beams, got 3"),
    ]
    for given, kind, told in wrong:
        with pytest.raises(kind, match=told):
            beam_search(**given)
    with pytest.raises(FileNotFoundError, match=r"vocab.json: missing"):
        CtcVocabulary.of_folder(tmp_path)
    (tmp_path / "vocab.json").write_text('{"eng": {"a": 1}}')
    with pytest.raises(ValueError, match=r"vocab.json: expected one object of tokens and their numbers"):
        CtcVocabulary.of_folder(tmp_path)
