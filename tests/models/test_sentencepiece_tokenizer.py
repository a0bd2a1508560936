"""SentencePiece models trained on the project's own pages, against transformers' tokenizers of the same folders."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import sentencepiece
import torch

from published import run_without_transformers, transformers, written
from saccade.models.tokenizers.sentencepiece import open_sentencepiece

DOCS = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
SENTENCES = [line for page in DOCS[:6] for line in page.read_text(encoding="utf-8").splitlines() if line.strip()]
ODD = [
    "",
    " ",
    "  Héllo the “mask” says  ﬁne 漢字 tokens. ㍿ end ",
    "a\tb\u3000c\n",
    "▁",
    "x" * 300,
    ">>fr<< a <<",
    "🙂 ok",
]

TASK = """
import json, sys
from saccade import models
from saccade.models.tokenizers.sentencepiece import open_sentencepiece
folder, texts = sys.argv[1], json.loads(sys.argv[2])
model, tokenizer = models.load(folder), open_sentencepiece(folder)
found = model.generate(**tokenizer(texts))
print(json.dumps([found.texts(), found.scores.tolist(), [tokenizer.decode(item[0]) for item in found.texts()]]))
"""
MARIAN = dict(
    d_model=20,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=5,
    decoder_attention_heads=5,
    encoder_ffn_dim=31,
    decoder_ffn_dim=31,
    eos_token_id=0,
    forced_eos_token_id=0,
    max_position_embeddings=64,
)
T5 = dict(d_model=18, d_kv=7, d_ff=31, num_layers=1, num_heads=3, decoder_start_token_id=0)


def train(path: Path, pages: list[Path], size: int, **options: object) -> None:
    sentencepiece.SentencePieceTrainer.train(
        input=[str(page) for page in pages],
        model_prefix=str(path.with_suffix("")),
        vocab_size=size,
        minloglevel=2,
        normalization_rule_name="nmt_nfkc",
        **options,
    )
    path.with_suffix(".model").rename(path)


@pytest.fixture(scope="module")
def t5(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("t5")
    train(folder / "spiece.model", DOCS[:6], 500, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    return folder


@pytest.fixture(scope="module")
def marian(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("marian")
    train(folder / "source.spm", DOCS[:6], 500)
    train(folder / "target.spm", DOCS[6:9], 400)
    pieces = {"</s>": 0, "<unk>": 1}
    for name in ("source.vocab", "target.vocab"):
        for line in (folder / name).read_text(encoding="utf-8").splitlines()[3:-20]:  # a few pieces are unknown
            pieces.setdefault(line.split("\t")[0], len(pieces))
    pieces |= {">>fr<<": len(pieces), "<pad>": len(pieces) + 1}
    (folder / "vocab.json").write_text(json.dumps(pieces))
    return folder


def their_marian(folder: Path):
    """transformers' tokenizer, which here leaves punctuation as it is, whether sacremoses is installed or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = transformers().MarianTokenizer.from_pretrained(folder)
    tokenizer.punc_normalizer = str
    return tokenizer


def as_likely(model: sentencepiece.SentencePieceProcessor, one: list[int], other: list[int]) -> bool:
    """Whether two segmentations of one text have one score: which of them comes first is each library's own affair.

    Of sums of float32, in any order, two may differ by their number times the sum's rounding.
    """
    own = model.get_piece_size()
    if [n for n in one if n >= own] != [n for n in other if n >= own]:
        return False
    pieces = [[n for n in ids if n < own] for ids in (one, other)]
    (first, second) = (sum(map(model.get_score, ids)) for ids in pieces)
    slack = max(map(len, pieces)) * abs(first) * torch.finfo(torch.float32).eps
    return model.decode(pieces[0]) == model.decode(pieces[1]) and abs(first - second) <= slack


def test_t5(t5):
    theirs, ours = transformers().T5Tokenizer.from_pretrained(t5), open_sentencepiece(t5)
    assert ours.vocabulary == len(theirs)
    texts = [*SENTENCES, *ODD, "The <extra_id_0> walks in<extra_id_99>park </s> it", "<extra_id_7><pad> <extra_id_100>"]
    model, ties = sentencepiece.SentencePieceProcessor(model_file=str(t5 / "spiece.model")), 0
    for text in texts:
        expected, found = theirs(text).input_ids, ours.whole(text)
        assert found == expected or as_likely(model, found, expected), text
        ties += found != expected
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True).strip(), text
    assert ties <= len(texts) // 50
    batch, expected = ours(SENTENCES[:5]), theirs(SENTENCES[:5], padding=True, return_tensors="pt")
    assert all(torch.equal(batch[name], expected[name]) for name in ("input_ids", "attention_mask"))
    assert ours(SENTENCES[:5], longest=7)["input_ids"].shape == (5, 7)
    assert ours.whole_many(["a b c d e f g"], longest=4)[0][-1] == 1


@pytest.mark.slow
def test_marian(marian):
    theirs = their_marian(marian)
    ours = open_sentencepiece(marian)
    for text in [*SENTENCES, *ODD, ">>fr<< Hello world", "a </s> b<pad>c"]:
        assert ours.whole(text) == theirs(text).input_ids, text
        target = theirs(text_target=text).input_ids
        assert ours.targets.whole(text) == target, text
        written = theirs.decode(target, skip_special_tokens=True, use_source_tokenizer=False)
        assert ours.decode(target) == written, text
    unknown = ours.whole("Hello 漢")
    assert unknown[-2:] == [1, 0] and ours.pad == len(theirs) - 1


def test_spans_are_the_characters_of_each_token(t5, marian):
    text = "A mask says <extra_id_3> which ﬁne “tokens”"
    for folder in (t5, marian):
        tokenizer = open_sentencepiece(folder)
        found = tokenizer.encode(text)
        assert [*found.ids, *tokenizer.after] == tokenizer.whole(text)
        covered = [text[start:stop] for start, stop in found.spans]
        assert "".join(covered).replace(" ", "") == text.replace(" ", "")
        for token, part in zip(found.ids, covered, strict=True):
            piece = tokenizer.written(token).replace("▁", "")
            assert token == tokenizer.named["unk"] or piece == part.strip() or piece in "fine", (piece, part)


def test_texts_may_be_normalized_first(t5):
    tokenizer = open_sentencepiece(t5, normalize=str.lower)
    assert tokenizer.whole("MASK") == open_sentencepiece(t5).whole("mask")


def test_bad_files(t5, marian, tmp_path):
    with pytest.raises(FileNotFoundError, match="expected spiece.model, or source.spm"):
        open_sentencepiece(tmp_path)
    (tmp_path / "spiece.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match="spiece.model: damaged, or no SentencePiece model"):
        open_sentencepiece(tmp_path)
    (tmp_path / "spiece.model").write_bytes((t5 / "spiece.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"extra_ids": -1}')
    with pytest.raises(ValueError, match="extra_ids: expected an int from 0"):
        open_sentencepiece(tmp_path)
    with pytest.raises(TypeError, match="texts: expected text, got int"):
        open_sentencepiece(t5)([3])
    with pytest.raises(ValueError, match="texts: empty"):
        open_sentencepiece(t5)([])
    with pytest.raises(ValueError, match="token: expected one of the vocabulary's 600 ids, got 600"):
        open_sentencepiece(t5).decode([600])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["marian", "t5"])
def test_a_folder_translates_without_transformers(kind, request):
    folder, library = request.getfixturevalue(kind), transformers()
    if kind == "marian":
        tokenizer = their_marian(folder)
        last = len(tokenizer) - 1
        config = library.MarianConfig(vocab_size=last + 1, pad_token_id=last, decoder_start_token_id=last, **MARIAN)
        theirs, options = written(folder, "MarianMTModel", config, spread=2.0), {"bad_words_ids": [[last]]}
    else:
        tokenizer = library.T5Tokenizer.from_pretrained(folder)
        config = library.T5Config(vocab_size=640, **T5)
        unwritten = [[token] for token in range(len(tokenizer), 640)]  # which no tokenizer can decode
        theirs, options = (
            written(folder, "T5ForConditionalGeneration", config, spread=2.0),
            {"bad_words_ids": unwritten},
        )
    theirs.generation_config.update(num_beams=3, length_penalty=0.6, max_length=12, **options)
    theirs.save_pretrained(folder)
    texts = SENTENCES[:3]
    ids, scores, decoded = json.loads(run_without_transformers(TASK, folder, json.dumps(texts)))
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    expected = theirs.generate(**inputs, return_dict_in_generate=True, output_scores=True)
    for item, row in zip(ids, expected.sequences.tolist(), strict=True):
        assert item[0] == row[1 : len(item[0]) + 1]
    assert torch.allclose(torch.tensor(scores)[:, 0], expected.sequences_scores, atol=1e-5)
    assert decoded == [tokenizer.decode(item[0], skip_special_tokens=True).strip() for item in ids]
