"""ESM-2 against transformers' own, on tiny random checkpoints."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from published import (
    assert_agrees,
    assert_padded_equals_alone,
    assert_round_trip,
    assert_same_gradients,
    transformers,
    written,
)
from saccade import attention_weights, models
from saccade.inspection import look, open_model
from saccade.variants import LongformerConfig

SIZES = dict(
    vocab_size=33,
    mask_token_id=32,
    pad_token_id=1,
    hidden_size=42,
    num_hidden_layers=3,
    num_attention_heads=7,
    intermediate_size=53,
    max_position_embeddings=37,
    position_embedding_type="rotary",
    token_dropout=True,
    emb_layer_norm_before=False,
)


def config(**changes: object):
    return transformers().EsmConfig(**{**SIZES, **changes})


@pytest.fixture(autouse=True)
def _rotary_in_float64(monkeypatch):
    """transformers turns queries and keys in float32 whatever their dtype is; here both libraries do it in theirs."""
    transformers()
    from transformers.models.esm import modeling_esm as theirs

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + theirs.rotate_half(q) * sin, k * cos + theirs.rotate_half(k) * sin

    def waves(self: torch.nn.Module, x: Tensor, position_ids: Tensor, layer_type: None = None):
        angles = position_ids[..., None].double() * self.inv_freq.double()
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    monkeypatch.setattr(theirs, "apply_rotary_pos_emb", turned)
    monkeypatch.setattr(theirs.EsmRotaryEmbedding, "forward", waves)


def batch(seed: int = 1) -> dict[str, Tensor]:
    """Three proteins of 4, 16 and 8 tokens, padded on the right: <cls>, residues, some <mask>, <eos>.

    Shares of masked tokens are exact in float32, in which transformers computes them.
    """
    ids = torch.randint(4, 24, (3, 16), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(16) < torch.tensor([[4], [16], [8]])).long()
    ids[:, 0] = 0
    ids[1, [3, 7, 8]] = ids[2, [5, 6]] = 32
    ids[[0, 1, 2], mask.sum(1) - 1] = 2
    return {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("EsmModel", {}),
        ("EsmModel", {"emb_layer_norm_before": True, "num_hidden_layers": 1, "token_dropout": False}),
        ("EsmModel", {"position_embedding_type": "absolute", "layer_norm_eps": 1e-3}),
        ("EsmForMaskedLM", {}),
        ("EsmForMaskedLM", {"tie_word_embeddings": False, "rope_theta": 97.0}),
        ("EsmForSequenceClassification", {"num_labels": 5}),
        ("EsmForTokenClassification", {"num_labels": 5, "hidden_size": 26, "num_attention_heads": 1}),
    ],
)
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, changes):
    theirs = written(tmp_path / "a", name, config(**changes))
    inputs = batch()
    real = inputs["attention_mask"].bool()
    assert_agrees(theirs, tmp_path / "a", inputs, real=real)
    assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")


def test_learned_positions_leave_out_padding_that_no_mask_names(tmp_path):
    theirs = written(tmp_path, "EsmModel", config(position_embedding_type="absolute", token_dropout=False))
    ids = batch()["input_ids"]
    ids[1, 4] = ids[1, 9] = 1
    assert_agrees(theirs, tmp_path, {"input_ids": ids})


def test_gradients_of_all_weights(tmp_path):
    theirs = written(tmp_path, "EsmForMaskedLM", config())
    inputs = batch()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    ours = models.load(tmp_path, dtype=torch.float64)
    assert_same_gradients(theirs, ours, {**inputs, "labels": labels}, lambda out: out.loss)


def test_padding_on_either_side_equals_alone(tmp_path):
    written(tmp_path, "EsmModel", config())
    model = models.load(tmp_path, dtype=torch.float64)
    inputs = batch()
    lengths = inputs["attention_mask"].sum(1).tolist()
    left = {
        name: torch.stack([row.roll(16 - n) for row, n in zip(x, lengths, strict=True)]) for name, x in inputs.items()
    }
    right_map, left_map = model.contacts(**inputs), model.contacts(**left)
    means, left_means = model.residue_means(**inputs), model.residue_means(**left)
    assert_padded_equals_alone(model, inputs, filler=1)
    for item, n in enumerate(lengths):
        ids = inputs["input_ids"][item : item + 1, :n]
        contacts = model.contacts(ids)[0]
        assert torch.allclose(right_map[item, : n - 2, : n - 2], contacts, atol=1e-12)
        assert torch.allclose(left_map[item, 16 - n :, 16 - n :], contacts, atol=1e-12)
        assert int((right_map[item] > 0).sum()) == int((left_map[item] > 0).sum()) == (n - 2) ** 2
        expected = model(ids).last_hidden_state[0, 1:-1].mean(0)
        assert torch.allclose(means[item], expected, atol=1e-12)
        assert torch.allclose(left_means[item], expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_contacts_are_those_of_transformers(tmp_path, dtype):
    theirs = written(tmp_path, "EsmModel", config(attn_implementation="eager")).to(dtype)
    model = models.load(tmp_path, dtype=dtype)
    with torch.no_grad():
        (
            theirs.contact_head.regression.weight.mul_(300),
            model.contact_head.regression.weight.mul_(300),
        )  # away from one half
    inputs = batch()
    inputs["input_ids"][1, -1] = 7  # cut off without <eos>: transformers leaves its last residue out
    with torch.no_grad():
        expected, got = theirs.predict_contacts(inputs["input_ids"], inputs["attention_mask"]), model.contacts(**inputs)
    assert got.shape == expected.shape == (3, 14, 14)
    assert expected.std() > 0.05
    for item, n in enumerate(inputs["attention_mask"].sum(1).tolist()):
        assert torch.allclose(got[item, : n - 2, : n - 2], expected[item, : n - 2, : n - 2], rtol=0, atol=1e-5)
    if dtype == torch.float64:
        assert (got - expected)[1].abs().max() < 1e-10


def test_contacts_hold_the_maps_of_one_layer_and_item(tmp_path, monkeypatch):
    written(tmp_path, "EsmModel", config())
    model = models.load(tmp_path)
    alive: list[weakref.ref[Tensor]] = []
    sizes = []

    def counted(*args, **options):
        assert not [ref for ref in alive if ref() is not None]
        maps = attention_weights(*args, **options)
        alive.append(weakref.ref(maps))
        sizes.append(tuple(maps.shape))
        return maps

    monkeypatch.setattr("saccade.models.text.contacts.attention_weights", counted)
    with torch.no_grad():
        model.contacts(**batch())
    assert sizes == [(1, 7, 4, 4), (1, 7, 16, 16), (1, 7, 8, 8)] * 3


def test_rounded_frequencies_of_the_files_are_used(tmp_path):
    """Published weights were once float16, and their frequencies with them."""
    theirs = written(tmp_path, "EsmModel", config())
    theirs.rotary_embeddings.inv_freq.copy_(theirs.rotary_embeddings.inv_freq.half().float() * 1.01)
    theirs.save_pretrained(tmp_path)
    model = assert_agrees(theirs, tmp_path, batch(), real=batch()["attention_mask"].bool())
    assert torch.equal(model.encoder.positions.frequencies, theirs.rotary_embeddings.inv_freq.float())
    before = model(**batch()).last_hidden_state
    with torch.no_grad():
        model.encoder.positions.frequencies.mul_(2)
    assert not torch.allclose(before, model(**batch()).last_hidden_state)


def test_files_of_older_versions(tmp_path):
    """Frequencies in every layer, learned positions that rotary models do not read, the tied decoder written out."""
    theirs = written(tmp_path, "EsmForMaskedLM", config())
    stored = load_file(tmp_path / "model.safetensors")
    frequencies = stored.pop("esm.encoder.layer.*.attention.self.rotary_embeddings.inv_freq")
    old = {name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("beta", "bias"): t for name, t in stored.items()}
    for n in range(3):
        old[f"esm.encoder.layer.{n}.attention.self.rotary_embeddings.inv_freq"] = frequencies.clone()
    old["esm.embeddings.position_embeddings.weight"] = torch.randn(37, 42)
    old["esm.embeddings.position_ids"] = torch.arange(37)[None]
    old["lm_head.decoder.weight"] = old["esm.embeddings.word_embeddings.weight"].clone()
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = assert_agrees(theirs, tmp_path, batch(), real=batch()["attention_mask"].bool())
    assert model.report.unused == ("esm.embeddings.position_embeddings.weight",)
    assert len(model.report.tied) == 3
    half = models.load(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.encoder.positions.frequencies, frequencies)
    body = models.load(tmp_path, head="none")
    assert torch.equal(body(**batch()).last_hidden_state, models.load(tmp_path)(**batch()).last_hidden_state)


def test_a_window_over_everything_is_exact_attention(tmp_path):
    written(tmp_path, "EsmModel", config())
    window = LongformerConfig(window=64, global_tokens=())
    exact, windowed = models.load(tmp_path), models.load(tmp_path, mechanism=window)
    inputs = batch()
    assert torch.allclose(exact(**inputs).last_hidden_state, windowed(**inputs).last_hidden_state, atol=1e-5)
    with pytest.raises(ValueError, match=r"contacts: the mechanism 'longformer'"):
        windowed.contacts(**inputs)


def tokenizer_of_transformers(folder: Path):
    from transformers.models.esm.configuration_esm import get_default_vocab_list

    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(get_default_vocab_list()))
    return transformers().EsmTokenizer(str(folder / "vocab.txt"))


def test_tokens_are_those_of_transformers(tmp_path):
    theirs = tokenizer_of_transformers(tmp_path)
    ours = models.ProteinTokenizer.from_folder(tmp_path)
    pieces = [*"MKTAYIBJmka*- \n", "<mask>", "<cls>", "<pad>", "<null_1>", "<mas", "é"]
    generator = torch.Generator().manual_seed(0)
    proteins = [
        "".join(pieces[n] for n in torch.randint(len(pieces), (int(length),), generator=generator))
        for length in torch.randint(0, 30, (200,), generator=generator)
    ]
    assert [ours.encode(protein) for protein in proteins] == theirs(proteins)["input_ids"]
    longer = models.ProteinTokenizer([*ours.tokens, "AY", "AYI"])
    assert longer.encode("AAYIY")[1:-1] == [5, 34, 19]  # the longest token that fits
    padded, expected = ours(["MKTAY", "M<mask>"]), theirs(["MKTAY", "M<mask>"], padding=True, return_tensors="pt")
    assert all(torch.equal(padded[name], expected[name]) for name in ("input_ids", "attention_mask"))
    assert ours.decode(padded["input_ids"][1]) == "M<mask>"
    written(tmp_path, "EsmModel", config(num_hidden_layers=1))
    model = models.load(tmp_path)
    assert model.tokenizer.whole_many(proteins) == [ours.encode(protein) for protein in proteins]
    assert all(torch.equal(model.tokenizer(["MKTAY", "M<mask>"])[name], padded[name]) for name in padded)
    assert look(open_model(tmp_path), "MKTAYI").seen.text == "MKTAYI"
    assert models.embed(["MKTAYI"], tmp_path).shape == (1, 42)


def test_bad_input(tmp_path):
    theirs = written(tmp_path, "EsmModel", config())
    model = models.load(tmp_path)
    ids = batch()["input_ids"]
    for call, told in [
        (lambda: model.contacts(ids[:, :2]), r"input_ids: contacts need <cls>, residues and <eos>, .* got 2"),
        (lambda: model.residue_means(torch.tensor([[0, 5, 2], [0, 2, 2]])), r"input_ids: item 1 has no residue"),
        (lambda: model(ids, token_type_ids=ids), r"token_type_ids: ESM has none"),
        (lambda: model(ids, position_ids=ids), r"position_ids: positions are rotary"),
        (lambda: models.ProteinTokenizer(["<cls>", "A"]), r"vocab\.txt: .* <pad>, <eos>, <unk>, <mask>"),
        (lambda: models.ProteinTokenizer.from_folder(tmp_path)(["A"]), r"vocab\.txt: missing"),
    ]:
        with pytest.raises((ValueError, FileNotFoundError), match=told):
            call()
    for changes, told in [
        ({"is_decoder": True}, r"is_decoder: expected False"),
        (
            {"is_decoder": False, "position_embedding_type": "relative"},
            r"position_embedding_type: expected one of 'rotary', 'absolute'",
        ),
    ]:
        theirs.config.update(changes)
        theirs.config.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=told):
            models.load(tmp_path)


TASK = """
import sys
sys.modules["transformers"] = None
import torch
from saccade import attention_weights, models
model = models.load(sys.argv[1])
tokens = models.ProteinTokenizer.from_folder(sys.argv[1])(["MKT<mask>AYI", "GAV"])
with torch.no_grad():
    guesses = model(**tokens).logits[0, 4].softmax(-1)
    assert abs(float(guesses.sum()) - 1) < 1e-5
    assert model.contacts(**tokens).shape == (2, 7, 7)
    assert model.residue_means(**tokens).shape == (2, 42)
model.save(sys.argv[2])
"""


@pytest.mark.slow
def test_its_task_without_transformers(tmp_path):
    theirs = written(tmp_path / "a", "EsmForMaskedLM", config())
    tokenizer_of_transformers(tmp_path / "a")
    command = [sys.executable, "-c", TASK, str(tmp_path / "a"), str(tmp_path / "b")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert_agrees(theirs, tmp_path / "b", batch(), real=batch()["attention_mask"].bool())
    assert (tmp_path / "b" / "vocab.txt").read_text() == (tmp_path / "a" / "vocab.txt").read_text()
