"""Published tokenizers: the same ids, spans and batches as transformers' for the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from published import transformers, written_words
from saccade.models.tokenizers.text import open_tokenizer

TEXTS = [
    "The cat sat on the mat, and the dog didn't.",
    "Zoë said: “naïve” — \t漢字 🙂\n\n end",
    "",
    "a",
    "Dogs' mats: 1,234 of them!  Unbelievably long words, unbelievably.",
    "</s> [SEP] <|endoftext|>the cat",
]
PAIRS = list(zip(TEXTS, TEXTS[::-1], strict=True))


def words(folder: Path, **config: object) -> Path:
    """A folder as BERT's: vocab.txt and tokenizer_config.json."""
    (folder / "config.json").write_text('{"model_type": "bert"}')
    return written_words(folder, TEXTS, **config)


def pairs(folder: Path, **config: object) -> Path:
    """A folder as GPT-2's or RoBERTa's: vocab.json, merges.txt and tokenizer_config.json."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS * 5, vocab_size=311, special_tokens=special, show_progress=False)
    trained.save_model(str(folder))
    kind = str(config["tokenizer_class"])
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": kind.removesuffix("Tokenizer").lower()}))
    return folder


FOLDERS = [
    (words, {"do_lower_case": False, "model_max_length": 19}),
    (words, {"padding_side": "left", "truncation_side": "left"}),
    (words, {"tokenizer_class": "DistilBertTokenizer", "additional_special_tokens": ["<new>"]}),
    (words, {"added_tokens_decoder": {"97": {"content": "mats:", "special": False}}}),
    (pairs, {"tokenizer_class": "RobertaTokenizer"}),
    (pairs, {"tokenizer_class": "GPT2Tokenizer"}),
    (pairs, {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": True}),
]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("kind", "config"), FOLDERS)
def test_ids_spans_and_batches_are_those_of_transformers(tmp_path, kind, config, as_json):
    folder = kind(tmp_path, **config)
    theirs = transformers().AutoTokenizer.from_pretrained(folder)
    if as_json:
        folder = tmp_path / "json"
        theirs.save_pretrained(folder)
        (folder / "config.json").write_text((tmp_path / "config.json").read_text())
        assert not (folder / "vocab.txt").exists()
    ours = open_tokenizer(folder)
    assert ours.longest == config.get("model_max_length")
    assert ours.vocabulary == len(theirs)
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        encoding = ours.encode(text)
        assert encoding.ids == expected["input_ids"]
        assert encoding.spans == [tuple(span) for span in expected["offset_mapping"]]
        whole = theirs(text)["input_ids"]
        assert ours.whole(text) == whole == [*ours.before, *encoding.ids, *ours.after]
        assert ours.decode(whole) == theirs.decode(whole, skip_special_tokens=True)
        assert [ours.written(token) for token in whole] == theirs.convert_ids_to_tokens(whole)
    assert ours.special == set(theirs.all_special_ids)
    theirs.pad_token = theirs.pad_token or theirs.eos_token
    for texts in (TEXTS, PAIRS):
        for longest in (7, 12, 300):
            told = theirs(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
            batch = ours(texts, longest=longest)
            assert batch.keys() == told.keys()
            assert all(batch[name].equal(told[name]) for name in batch)


def test_streamed_pieces_are_the_text(tmp_path):
    tokenizer = open_tokenizer(pairs(tmp_path, tokenizer_class="GPT2Tokenizer"))
    for text in TEXTS:
        pieces = list(tokenizer.stream(tokenizer.encode(text).ids))
        assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text).ids)
        assert not any("\ufffd" in piece for piece in pieces)


def test_words_are_streamed_with_their_spaces(tmp_path):
    tokenizer = open_tokenizer(words(tmp_path))
    assert "".join(tokenizer.stream(tokenizer.whole("the cat sat on the mat"))) == "the cat sat on the mat"


def test_texts_are_cut_at_the_models_limit(tmp_path):
    tokenizer = open_tokenizer(words(tmp_path, model_max_length=19), longest=11)
    assert tokenizer(TEXTS)["input_ids"].shape == (6, 11)
    assert tokenizer.whole_many(TEXTS, 5)[0] == [*tokenizer.whole(TEXTS[0])[:4], tokenizer.named["sep"]]
    assert len(tokenizer.whole(TEXTS[0])) > 11


def test_a_tokenizer_json_alone_knows_its_roles(tmp_path):
    folder = words(tmp_path)
    transformers().AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "json")
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "tokenizer.json").write_bytes((tmp_path / "json" / "tokenizer.json").read_bytes())
    ours, other = open_tokenizer(alone), open_tokenizer(folder)
    assert ours.named == other.named
    assert all(a.equal(b) for a, b in zip(ours(PAIRS).values(), other(PAIRS).values(), strict=True))


def test_faults_are_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer; expected tokenizer\.json, vocab\.txt"):
        open_tokenizer(tmp_path)
    words(tmp_path)
    tokenizer = open_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="texts: empty"):
        tokenizer([])
    with pytest.raises(TypeError, match="texts: expected texts, or pairs of two texts, got 3"):
        tokenizer([3])
    with pytest.raises(ValueError, match="longest: expected an int above 2, the special tokens, got 2"):
        tokenizer("a", longest=2)
    with pytest.raises(ValueError, match=r"token: expected an id from 0 to \d+, got 999"):
        tokenizer.written(999)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CtrlTokenizer"}')
    with pytest.raises(ValueError, match=r"kind 'CtrlTokenizer' cannot be made from vocab\.txt"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match=r"tokenizer\.json: damaged, not a tokenizer"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"additional_special_tokens": 3}, r"tokenizer_config\.json: expected a list of special tokens, got 3"),
        ({"unk_token": "zz"}, r"vocab\.txt: 'zz' is missing from the vocabulary"),
        ({"cls_token": 5}, r"cls_token: expected a token, got 5"),
        ({"padding_side": "up"}, r"padding_side: expected 'right' or 'left', got 'up'"),
        ({"model_max_length": "long"}, r"model_max_length: expected a number of tokens, got 'long'"),
        ({"added_tokens_decoder": {"500": {"content": "<new>"}}}, r"'<new>' is to have the id 500, but gets \d+"),
        ([1], r"tokenizer_config\.json: damaged, expected an object"),
    ],
)
def test_settings_of_another_kind(tmp_path, config, message):
    words(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        open_tokenizer(tmp_path)
