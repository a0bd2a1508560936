"""Checkpoints that are damaged, foreign, hostile or do not fit: one clear message each; and what is declared."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

from published import transformers, written
from saccade import models
from saccade.models.checkpoints import reading
from saccade.models.checkpoints.reading import PICKLED, PICKLED_INDEX, SAFE, SAFE_INDEX
from saccade.variants import LinearConfig, LongformerConfig

SIZES = dict(
    vocab_size=29,
    hidden_size=14,
    num_hidden_layers=1,
    num_attention_heads=7,
    intermediate_size=13,
    max_position_embeddings=11,
)
BART = dict(
    vocab_size=29,
    d_model=14,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=7,
    decoder_attention_heads=7,
    encoder_ffn_dim=13,
    decoder_ffn_dim=13,
    max_position_embeddings=11,
)
IDS = torch.tensor([[3, 1, 4, 1, 5]])


def made(folder: Path, kind: str = "BertForMaskedLM", **changes: object) -> Path:
    written(folder, kind, transformers().BertConfig(**{**SIZES, **changes}))
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / SAFE)


def rewrite(folder: Path, values: dict[str, torch.Tensor]) -> None:
    safetensors.torch.save_file({name: tensor.clone() for name, tensor in values.items()}, folder / SAFE)


def settings(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def refused(folder: Path, message: str, **options: object) -> str:
    """The error has `message`; it is returned."""
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        models.load(folder, **options)
    return str(caught.value)


# Files


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_a_truncated_file(tmp_path, kept):
    path = made(tmp_path) / SAFE
    path.write_bytes(path.read_bytes()[:kept])
    refused(tmp_path, r"model\.safetensors: damaged, not a safetensors file \(")


@pytest.mark.parametrize(
    "content",
    [
        b"GIF89a" * 50,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**8) + b"{" * 100,
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}      ' + bytes(4),
        struct.pack("<Q", 64) + b'{"a":{"dtype":"F32","shape":[999999999,9],"data_offsets":[0,4]}}' + bytes(4),
    ],
    ids=["foreign", "giant header", "header beyond the file", "lying shape", "lying size"],
)
def test_a_foreign_file_or_a_lying_header(tmp_path, content):
    (made(tmp_path) / SAFE).write_bytes(content)
    refused(tmp_path, r"model\.safetensors: damaged, not a safetensors file \(")


class Code:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("plain", [False, True])
def test_code_in_a_pickle_never_runs(tmp_path, plain):
    (made(tmp_path) / SAFE).unlink()
    trap = tmp_path / "trap"
    if plain:
        (tmp_path / PICKLED).write_bytes(pickle.dumps({"weight": Code(trap)}))
        refused(tmp_path, r"pytorch_model\.bin: holds no tensors that PyTorch saved$")
    else:
        torch.save({"weight": Code(trap)}, tmp_path / PICKLED)
        refused(tmp_path, r"holds code or other objects than tensors \(posix.mkdir\), which are not loaded$")
    assert not trap.exists()


def test_a_pickle_of_tensors_opens_and_a_damaged_one_does_not(tmp_path):
    expected = models.load(made(tmp_path))(IDS).logits
    torch.save(tensors(tmp_path), tmp_path / PICKLED)
    (tmp_path / SAFE).unlink()
    assert torch.equal(models.load(tmp_path)(IDS).logits, expected)
    content = (tmp_path / PICKLED).read_bytes()
    (tmp_path / PICKLED).write_bytes(content[:-100])
    refused(tmp_path, r"pytorch_model\.bin: ")
    torch.save([torch.ones(3)], tmp_path / PICKLED)
    refused(tmp_path, "expected a dictionary of tensors, got list")


def test_a_folder_without_weights_or_settings(tmp_path):
    (made(tmp_path) / SAFE).unlink()
    refused(tmp_path, r"no weights; expected model\.safetensors, model\.safetensors\.index\.json")
    (tmp_path / "config.json").write_text('{"model_type": "bert"')
    refused(tmp_path, r"config\.json: damaged, not JSON")
    (tmp_path / "config.json").write_text("[1]")
    refused(tmp_path, r"config\.json: damaged, expected an object")
    (tmp_path / "config.json").write_text("[" * 100_000)
    refused(tmp_path, r"config\.json: damaged")
    (tmp_path / "config.json").unlink()
    refused(tmp_path, r"config\.json: missing from the model folder")


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("kind", ["Bert", "GPT2"])  # the second holds matrices transposed
def test_large_tensors_are_read_in_parts(tmp_path, monkeypatch, kind, pickled):
    sizes = SIZES if kind == "Bert" else dict(vocab_size=29, n_embd=14, n_layer=1, n_head=7, n_positions=11)
    written(tmp_path, f"{kind}Model", getattr(transformers(), f"{kind}Config")(**sizes))
    if pickled:
        torch.save(tensors(tmp_path), tmp_path / PICKLED)
        (tmp_path / SAFE).unlink()
    expected = models.load(tmp_path)(IDS).last_hidden_state
    monkeypatch.setattr(reading, "_MAPPED", 200)
    assert torch.equal(models.load(tmp_path)(IDS).last_hidden_state, expected)


def compressed(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


ODD = {
    "a tensor of layout torch.sparse_coo": lambda x: x.to_sparse(),
    "a tensor without values, on the meta device": lambda x: x.to("meta"),
    "a tensor of torch.qint8": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "a tensor of torch.complex64": lambda x: x.to(torch.complex64),
    "a tensor of torch.float8_e4m3fn": lambda x: x.to(torch.float8_e4m3fn),
    "a nested tensor": lambda x: torch.nested.nested_tensor([x[0], x[0, :3]]),
    "dict": lambda x: {"weight": x},
}


@pytest.mark.filterwarnings("ignore")  # nested and quantised tensors are prototypes
@pytest.mark.parametrize("kind", ODD)
def test_tensors_in_a_pickle_that_are_no_dense_numbers(tmp_path, kind):
    """Each would be a traceback, or numbers that are wrong."""
    values = tensors(made(tmp_path, "BertModel"))
    (tmp_path / SAFE).unlink()
    name = "embeddings.position_embeddings.weight"
    torch.save({**values, name: ODD[kind](values[name])}, tmp_path / PICKLED)
    assert "\n" not in refused(tmp_path, rf"{name}: expected a dense tensor of numbers, got {kind}")


def test_a_pickle_with_compressed_members_or_names_that_are_no_strings(tmp_path):
    """Mapped into memory, compressed bytes would be taken for numbers."""
    values = tensors(made(tmp_path, "BertModel"))
    (tmp_path / SAFE).unlink()
    torch.save(values, tmp_path / PICKLED)
    compressed(tmp_path / PICKLED)
    refused(tmp_path, r"pytorch_model\.bin: damaged \(members are compressed")
    torch.save({7: torch.ones(2), **values}, tmp_path / PICKLED)
    refused(tmp_path, "expected strings as names of tensors, got 7")


def test_integers_where_floats_are_expected(tmp_path):
    values, name = tensors(made(tmp_path, "BertModel")), "embeddings.LayerNorm.weight"
    rewrite(tmp_path, {**values, name: values[name].to(torch.int8)})
    refused(tmp_path, f"{name}: expected floats, got torch.int8")


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_settings_that_are_no_file(tmp_path, kind):
    """A pipe that nobody writes would wait for ever."""
    path = made(tmp_path) / "config.json"
    path.unlink()
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    refused(tmp_path, r"config\.json: expected a file")


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_a_wrapped_model(tmp_path, monkeypatch, prefix, pickled):
    """DataParallel and torch.compile put a prefix before all names; before some of them it is an error."""
    expected, values = models.load(made(tmp_path))(IDS).logits, tensors(tmp_path)
    wrapped = {prefix + name: tensor for name, tensor in values.items()}
    rewrite(tmp_path, wrapped)
    if pickled:
        torch.save(wrapped, tmp_path / PICKLED)
        (tmp_path / SAFE).unlink()
    monkeypatch.setattr(reading, "_MAPPED", 200)
    assert torch.equal(models.load(tmp_path)(IDS).logits, expected)
    rewrite(tmp_path, {**wrapped, "bert.extra": torch.ones(2)})
    assert f"unused: {prefix}bert.embeddings" in refused(tmp_path, "does not fit:")


def test_a_folder_of_an_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "peft_type": "LORA"}')
    told = "contains an adapter of 'org/base' .*not a whole model; merge it with peft: .*merge_and_unload"
    refused(tmp_path, told)
    (made(tmp_path) / "adapter_model.safetensors").write_bytes(b"")  # both: transformers would add the adapter
    refused(tmp_path, told)


# Shards


def shards(folder: Path) -> dict[str, str]:
    """Split the weights in two files with an index; name -> file."""
    values = tensors(folder)
    (folder / SAFE).unlink()
    places = {name: f"model-0000{n % 2 + 1}-of-00002.safetensors" for n, name in enumerate(sorted(values))}
    for file in set(places.values()):
        part = {name: tensor for name, tensor in values.items() if places[name] == file}
        safetensors.torch.save_file(part, folder / file)
    (folder / SAFE_INDEX).write_text(json.dumps({"weight_map": places}))
    return places


def test_shards_open_as_one_file_does(tmp_path):
    expected = models.load(made(tmp_path))(IDS).logits
    shards(tmp_path)
    assert torch.equal(models.load(tmp_path)(IDS).logits, expected)


def test_pickled_shards(tmp_path):
    expected = models.load(made(tmp_path))(IDS).logits
    values = tensors(tmp_path)
    (tmp_path / SAFE).unlink()
    names = sorted(values)
    places = {name: f"pytorch_model-{n % 2}.bin" for n, name in enumerate(names)}
    for file in set(places.values()):
        torch.save({name: values[name] for name in names if places[name] == file}, tmp_path / file)
    (tmp_path / PICKLED_INDEX).write_text(json.dumps({"weight_map": places}))
    assert torch.equal(models.load(tmp_path)(IDS).logits, expected)


def test_shards_that_do_not_fit_their_index(tmp_path):
    places = shards(made(tmp_path))
    index = tmp_path / SAFE_INDEX
    first, second = sorted(set(places.values()))
    one = next(name for name, file in places.items() if file == first)
    index.write_text(json.dumps({"weight_map": {**places, one: second}}))
    refused(tmp_path, f"does not fit its files: {one}")
    index.write_text(json.dumps({"weight_map": {**places, "extra": first}}))
    refused(tmp_path, "does not fit its files: extra")
    index.write_text(json.dumps({"weight_map": {**places, one: "../elsewhere.safetensors"}}))
    refused(tmp_path, "expected a file of its own folder")
    index.write_text(json.dumps({"metadata": {}}))
    refused(tmp_path, "damaged, expected weight_map")
    index.write_text(json.dumps({"weight_map": places}))
    part = safetensors.torch.load_file(tmp_path / second)
    safetensors.torch.save_file({**part, one: torch.ones(1)}, tmp_path / second)
    refused(tmp_path, f"{one} is in both {second} and {first}")
    (tmp_path / second).unlink()
    refused(tmp_path, f"{second}: missing from the model folder")


# Tensors


def test_every_mismatch_is_listed(tmp_path):
    values = tensors(made(tmp_path))
    del values["bert.embeddings.LayerNorm.bias"]
    values["bert.encoder.layer.0.output.dense.weight"] = torch.ones(13, 14)
    values["bert.encoder.layer.7.output.dense.weight"] = torch.ones(14, 13)
    rewrite(tmp_path, values)
    told = refused(tmp_path, "as BertForMaskedLM: does not fit:")
    assert told.splitlines()[1:] == [
        "  missing: bert.embeddings.LayerNorm.bias (14,), which is norm.bias",
        "  of another shape: bert.encoder.layer.0.output.dense.weight, which is "
        "encoder.blocks.0.feed_forward.down.weight: found (13, 14), expected (14, 13)",
        "  unused: bert.encoder.layer.7.output.dense.weight (14, 13)",
    ]


def test_a_long_list_is_cut_and_counted(tmp_path):
    values = tensors(made(tmp_path))
    rewrite(tmp_path, {**values, **{f"more.{n}": torch.ones(2) for n in range(27)}})
    told = refused(tmp_path, "does not fit:").splitlines()
    assert len(told) == 22
    assert told[-1] == "  and 7 more"


def test_old_endings_of_norms(tmp_path):
    expected = models.load(made(tmp_path))(IDS).logits
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    values = {}
    for name, tensor in tensors(tmp_path).items():
        for new, was in old.items():
            name = name.replace(new, was)
        values[name] = tensor
    assert any(name.endswith("gamma") for name in values)
    rewrite(tmp_path, values)
    model = models.load(tmp_path)
    assert torch.equal(model(IDS).logits, expected)
    model.save(tmp_path / "new")
    assert not any(name.endswith(("gamma", "beta")) for name in tensors(tmp_path / "new"))


def test_tied_tensors_are_held_once_and_may_not_differ(tmp_path):
    values, table = tensors(made(tmp_path)), "bert.embeddings.word_embeddings.weight"
    assert "cls.predictions.decoder.weight" not in values
    rewrite(tmp_path, {**values, "cls.predictions.decoder.weight": values[table]})
    model = models.load(tmp_path)
    assert model.report.tied == ("cls.predictions.decoder.weight",)
    assert str(model.report).endswith("tied: cls.predictions.decoder.weight")
    rewrite(tmp_path, {**values, "cls.predictions.decoder.weight": values[table] + 1})
    refused(tmp_path, f"cls.predictions.decoder.weight and {table} are tied by .*, but differ")


def test_the_dtype_is_as_asked_or_that_of_the_configuration_or_of_most_bytes(tmp_path):
    """As in transformers: a file of several dtypes is rounded only where config.json names the coarser one, or none."""
    values = tensors(made(tmp_path, "BertModel"))
    rewrite(tmp_path, {n: t if n.endswith("bias") else t.bfloat16() for n, t in values.items()})
    assert models.load(tmp_path).dtype == torch.float32 and not models.load(tmp_path).report.rounded
    settings(tmp_path, dtype=None, torch_dtype="float64")
    assert models.load(tmp_path).dtype == torch.float64
    settings(tmp_path, dtype="bfloat16")
    assert models.load(tmp_path).dtype == torch.bfloat16
    settings(tmp_path, dtype="int8")
    refused(tmp_path, "dtype: expected one of 'float32', .*, got 'int8'")
    settings(tmp_path, dtype=None, torch_dtype=None)
    assert models.load(tmp_path).dtype == torch.bfloat16
    rounded = models.load(tmp_path).report
    assert rounded.rounded and {*rounded.rounded} == {n for n in values if n.endswith("bias")}
    assert str(rounded).startswith("rounded to a coarser dtype: ")
    assert models.load(tmp_path, dtype=torch.float64).dtype == torch.float64
    assert not models.load(tmp_path, dtype=torch.float32).report.rounded
    refused(tmp_path, "dtype: expected one of torch.float32", dtype=torch.int8)
    rewrite(tmp_path, {n: t.to(torch.float8_e4m3fn) for n, t in values.items()})
    refused(tmp_path, r"model\.safetensors: holds F8_E4M3, expected one of F64, F32")


# Heads


def test_a_new_head_is_drawn_and_reported(tmp_path):
    made(tmp_path, "BertModel")
    refused(tmp_path, "missing: cls.predictions", head="masked-lm")
    model = models.load(tmp_path, head="sequence-classification", labels=["no", "yes", "perhaps"])
    assert model.report.initialised == ("head.inner.out.weight", "head.inner.out.bias")
    assert model.label_names == ["no", "yes", "perhaps"]
    assert model(IDS).logits.shape == (1, 3)
    assert 0 < float(model.head.inner.out.weight.detach().std()) < 0.06
    assert not model.head.inner.out.bias.any()
    model.save(tmp_path / "new")
    again = models.load(tmp_path / "new")
    assert again.label_names == ["no", "yes", "perhaps"]
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_a_classifier_of_another_number_of_labels_begins_anew(tmp_path):
    """Where labels are named; the body stays, and without names another size is still an error."""
    made(tmp_path, "BertModel")
    models.load(tmp_path, head="sequence-classification", labels=3).save(tmp_path / "three")
    first = models.load(tmp_path / "three")
    other = models.load(tmp_path / "three", head="sequence-classification", labels=list("abcde"))
    assert other.report.initialised == ("head.inner.out.weight", "head.inner.out.bias")
    assert other(IDS).logits.shape == (1, 5)
    assert torch.equal(other(IDS).last_hidden_state, first(IDS).last_hidden_state)
    same = models.load(tmp_path / "three", head="sequence-classification", labels=["x", "y", "z"])
    assert torch.equal(same(IDS).logits, first(IDS).logits)
    settings = json.loads((tmp_path / "three" / "config.json").read_text())
    settings["id2label"] = {"0": "a", "1": "b"}
    (tmp_path / "three" / "config.json").write_text(json.dumps(settings))
    refused(tmp_path / "three", r"of another shape: classifier.weight", head="sequence-classification")


def test_a_classifier_of_other_labels_begins_anew(tmp_path):
    """As many labels: each keeps its row under its name; other names mean other things."""
    made(tmp_path, "BertModel")
    models.load(tmp_path, head="sequence-classification", labels=["no", "yes", "so"]).save(tmp_path / "three")
    first = models.load(tmp_path / "three")
    moved = models.load(tmp_path / "three", head="sequence-classification", labels=["so", "no", "yes"])
    assert torch.equal(moved(IDS).logits, first(IDS).logits[:, [2, 0, 1]]) and not moved.report.initialised
    moved.save(tmp_path / "moved")
    assert models.load(tmp_path / "moved").label_names == ["so", "no", "yes"]
    other = models.load(tmp_path / "three", head="sequence-classification", labels=["no", "yes", "aha"])
    assert other.report.initialised == ("head.inner.out.weight", "head.inner.out.bias")
    assert not torch.isclose(other(IDS).logits, first(IDS).logits).any()
    numbered = models.load(tmp_path / "three", head="sequence-classification", labels=3)
    assert torch.equal(numbered(IDS).logits, first(IDS).logits)


def test_labels_in_another_order_of_a_head_that_is_attention(tmp_path):
    """GAT names classes by the mean of heads side by side, and labels are an axis of its scores, too."""
    sizes = {"num_features": 5, "hidden_size": 6, "num_attention_heads": 2, "num_output_heads": 2}
    model = models.new_graph_model("saccade-gat", head="node-classification", labels=["a", "b", "c"], **sizes).eval()
    model.save(tmp_path)
    moved = models.load(tmp_path, head="node-classification", labels=["c", "a", "b"])
    graph = torch.randn(4, 5), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    torch.testing.assert_close(moved(*graph).logits, model(*graph).logits[:, [2, 0, 1]])


def test_a_new_classifier_begins_with_a_pooler_where_the_files_have_none(tmp_path):
    theirs = made(tmp_path)  # of a masked language model
    model = models.load(theirs, head="sequence-classification", labels=3)
    parts = ("pooler.weight", "pooler.bias", "head.inner.out.weight", "head.inner.out.bias")
    assert model.report.initialised == parts
    assert 0 < float(model.pooler.weight.detach().std()) < 0.06
    model.save(tmp_path / "new")
    again = models.load(tmp_path / "new", head="sequence-classification")
    assert not again.report.initialised
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    values = tensors(tmp_path / "new")
    rewrite(tmp_path / "new", {name: tensor for name, tensor in values.items() if "pooler" not in name})
    refused(tmp_path / "new", "missing: bert.pooler.dense.weight", head="sequence-classification")


def test_the_head_of_the_file_is_kept_and_others_are_reported(tmp_path):
    made(tmp_path)
    body = models.load(tmp_path, head="none")
    assert body.head is None
    assert body(IDS).logits is None
    assert all(name.startswith("cls.predictions.") for name in body.report.unused)
    assert len(body.report.unused) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "masked"}, "head: BERT has 'masked-lm', .*'none'; got 'masked'"),
        ({"labels": 3}, "labels: need a head that classifies, got the head 'masked-lm'"),
        ({"head": "token-classification", "labels": []}, "labels: expected at least one"),
        ({"head": "token-classification", "labels": 0}, "labels: expected at least one"),
        ({"head": "token-classification", "labels": "yes"}, "labels: expected their number, or a list of names"),
    ],
)
def test_wrong_heads(tmp_path, options, message):
    refused(made(tmp_path), message, **options)


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mambo"}, "model_type: unknown family 'mambo', expected one of .*bert, .*gpt2, .*roberta"),
        ({"model_type": "mamba"}, "architectures: transformers' mamba has no class .*BertForMaskedLM.*; give head="),
        ({"model_type": 3}, "model_type: unknown family 3"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map: requires code of the checkpoint"),
        (
            {"architectures": ["BertForDreaming"]},
            "architectures: 'BertForDreaming' is not a supported head of BERT; give head=",
        ),
        ({"hidden_act": "sigmoid"}, "hidden_act: expected one of 'gelu', .*, got 'sigmoid'"),
        ({"hidden_size": -3}, "hidden_size: expected an int from 1 to 2147483647, got -3"),
        ({"hidden_size": "wide"}, "hidden_size: expected an int .*, got 'wide'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 26, as many as there are tensors"),
        ({"hidden_size": 21}, r"embeddings\.LayerNorm\.weight.*: found \(14,\), expected \(21,\)"),
        ({"is_decoder": True}, "is_decoder: expected False: other values are not supported, got True"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps: expected a positive number, got 0.0"),
        ({"model_type": None}, "model_type: unknown family None"),
        ({"architectures": "BertForDreaming"}, "architectures: 'BertForDreaming' is not a supported head of BERT"),
        ({"architectures": {"a": 1}}, "architectures: expected a list of class names"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: expected 'absolute'"),
    ],
)
def test_settings_that_mean_another_model(tmp_path, changes, message):
    settings(made(tmp_path), **changes)
    refused(tmp_path, message)


def test_one_name_of_a_class_names_the_head(tmp_path):
    expected = models.load(made(tmp_path))(IDS).logits
    settings(tmp_path, architectures="BertForMaskedLM")
    assert torch.equal(models.load(tmp_path)(IDS).logits, expected)


def test_a_setting_by_its_alias(tmp_path):
    """Ignored, it would be the default number of heads, and other numbers."""
    sizes = dict(vocab_size=29, n_embd=24, n_layer=1, n_head=3, n_positions=11)
    written(tmp_path, "GPT2Model", transformers().GPT2Config(**sizes))
    expected = models.load(tmp_path)(IDS).last_hidden_state
    settings(tmp_path, n_head=None, num_attention_heads=3)
    assert torch.equal(models.load(tmp_path)(IDS).last_hidden_state, expected)
    settings(tmp_path, n_head=4)
    refused(tmp_path, "n_head: expected 3, as num_attention_heads says, which names the same setting, got 4")


# Places


def test_names_that_are_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries for 20 seconds
    (tmp_path / "a file").write_text("")
    refused(tmp_path / "a file", "is a file; expected a model folder")
    refused(tmp_path / "nothing", "no such model folder")
    refused("not-a-name", "no such model folder .expected a folder with config.json and weights")
    told = refused("some-organisation/some-model", "some-organisation/some-model: no folder here")
    assert "a folder works without the hub: config.json, the weights and the tokenizer's files" in told
    assert "\n" not in told


def test_saving_writes_whole_files_and_what_stands_beside(tmp_path):
    (made(tmp_path) / "vocab.txt").write_text("a\n")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    steps = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(steps))
    models.load(tmp_path, dtype=torch.float16).save(tmp_path / "new")
    found = sorted(str(p.relative_to(tmp_path / "new")) for p in (tmp_path / "new").rglob("*") if p.is_file())
    assert found == ["1_Pooling/config.json", "config.json", SAFE, "modules.json", "vocab.txt"]
    assert models.load(tmp_path / "new").dtype == torch.float16
    saved = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (saved["dtype"], saved["architectures"]) == ("float16", ["BertForMaskedLM"])


@pytest.mark.parametrize("kind", ["Bert", "GPT2", "Bart"])
def test_dropout_of_weights_is_left_out_where_a_mechanism_has_none(tmp_path, kind):
    library = transformers()
    config = {
        "Bert": library.BertConfig(**SIZES),
        "GPT2": library.GPT2Config(vocab_size=61, n_embd=42, n_layer=1, n_head=7, n_positions=23),
        "Bart": library.BartConfig(**BART, attention_dropout=0.1),
    }[kind]
    written(tmp_path, f"{kind}Model", config)
    model = models.load(tmp_path, mechanism=LinearConfig())
    name = {"Bert": "attention_probs_dropout_prob", "GPT2": "attn_pdrop", "Bart": "attention_dropout"}[kind]
    assert model.report.left_out == (f"{name}=0.1",)
    assert str(model.report) == f"left out: {name}=0.1"
    inputs = {"decoder_input_ids": IDS} if kind == "Bart" else {}
    assert model(IDS, **inputs).last_hidden_state.isfinite().all()
    if kind == "Bart":  # what reads the source stays softmax attention
        assert model.decoder.blocks[0].cross.config.dropout == 0.1
    model.save(tmp_path / "new")
    assert models.load(tmp_path / "new").settings.number(name) == 0.1
    assert not models.load(tmp_path, mechanism=LongformerConfig(window=64, global_tokens=())).report.left_out


def test_a_model_of_saccades_own_has_one_head():
    for options in ({"head": "masked-lm"}, {"labels": 3}):
        with pytest.raises(ValueError, match="head: a model of Saccade's own has only 'causal-lm'"):
            models.load(**options)
    with pytest.raises(ValueError, match="dtype: expected one of torch.float32, .* got torch.int64"):
        models.load(dtype=torch.int64)
