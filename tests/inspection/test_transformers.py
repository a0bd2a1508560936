"""Tiny checkpoints of transformers, against the weights that transformers itself gives out.

All are opened by transformers here, as are those of families that Saccade has not; `test_published.py` has the others.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import checkpoints
import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from rich.console import Console

from saccade.inspection import as_text_model, collect, look, open_model, words_that_fit
from saccade.inspection._models import weights_of
from saccade.models import load
from saccade.models.checkpoints.transformers_reading import read_configuration
from saccade.viewer import as_json, print_look, render_report
from slowly import diagonal

TEXT = "The cat sat on the shelves, untouched: when Nobody knows catalogues, the man was gone."
MAKERS = {name: getattr(checkpoints, name) for name in ("bert", "roberta", "gpt2", "llama", "t5", "falcon", "gpt_oss")}


@pytest.fixture(autouse=True)
def of_transformers(monkeypatch):
    monkeypatch.setattr("saccade.inspection._open.is_known", lambda model_type: False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = MAKERS[name](tmp_path_factory.mktemp("models") / name)
        return made[name]

    return get


def dense(path, text):
    """transformers' own tokens and eager weights: ids, special, characters of each, (layers, heads, L, L)."""
    with checkpoints.quiet():
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    found = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True, return_tensors="pt")
    reader = model.get_encoder() if model.config.is_encoder_decoder else model
    with torch.no_grad():
        out = reader(input_ids=found["input_ids"], output_attentions=True)
    weights = torch.cat(out.attentions).double().numpy()
    return found["special_tokens_mask"][0].bool().tolist(), found["offset_mapping"][0].tolist(), weights


def on_words(special, spans, weights, words):
    """Weights summed over the key's tokens and averaged over the query's, one pair of words after the other."""
    ordinary = [i for i, name in enumerate(words) if name.start < name.stop]
    members = {i: [] for i in range(len(words))}
    around = [i for i in range(len(words)) if i not in ordinary]
    for token, (is_special, (start, stop)) in enumerate(zip(special, spans, strict=True)):
        if is_special:
            members[around.pop(0)].append(token)
        else:  # a token is of the word in which its last character is, or after it
            members[next(i for i in ordinary if words[i].stop >= max(stop, start + 1))].append(token)
    out = np.zeros((*weights.shape[:2], len(words), len(words)))
    for q, k in np.ndindex(len(words), len(words)):
        out[:, :, q, k] = weights[:, :, members[q]][..., members[k]].sum(-1).mean(-1)
    return out


# Falcon has no eager attention but in code of its own, GPT-OSS no sdpa. The others are families of Saccade's, which
# reach transformers only where a model's module is its.
OWN = [(name, way) for name in MAKERS if name not in ("falcon", "gpt_oss", "llama") for way in ("eager", "sdpa")]
RUN = [("falcon", "sdpa"), ("gpt_oss", "eager"), ("llama", "eager"), ("llama", "sdpa")]
RUN += [pytest.param(*case, marks=pytest.mark.slow) for case in OWN]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "implementation"), RUN)
def test_words_and_weights_are_those_of_transformers(folder, name, implementation, tmp_path):
    path = folder(name)
    config = json.loads((path / "config.json").read_text())
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    for file in path.iterdir():
        (chosen / file.name).symlink_to(file)
    (chosen / "config.json").unlink()
    (chosen / "config.json").write_text(json.dumps(config | {"_attn_implementation": implementation}))
    model = open_model(chosen)
    assert model.module.config._attn_implementation == implementation
    seen = collect(model, TEXT)
    expected = on_words(*dense(path, TEXT), seen.words)
    assert seen.weights.shape == expected.shape
    # Both are float32 softmaxes over fewer than 64 tokens, of logits up to a few hundred: each rounds by 2^-24 of its
    # logit, and a weight follows its logit.
    assert np.abs(seen.weights - expected).max() < 300 * 2**-22
    sums = seen.weights.sum(-1)
    assert np.abs(sums - expected.sum(-1)).max() < 1e-5 and (name == "gpt_oss") == (sums.min() < 0.99)
    assert seen.causal == (not np.triu(expected, 1).any()) == (name in ("gpt2", "llama", "falcon", "gpt_oss"))
    assert [word.text for word in seen.words if not word.special] == re.findall(r"\w+|[^\w\s]", TEXT)


@pytest.mark.parametrize(
    ("name", "before", "after", "context"),
    [
        ("bert", ["[CLS]"], ["[SEP]"], 41),
        ("roberta", ["<s>"], ["</s>"], 39),
        ("gpt2", [], [], 43),
        ("llama", ["<s>"], [], 47),
        ("t5", [], ["</s>"], None),
    ],
)
def test_what_stands_around_a_text_and_how_long_it_may_be(folder, name, before, after, context):
    model = open_model(str(folder(name)))
    written = [[model.written(token) for token in around] for around in (model.before, model.after)]
    assert written == [before, after] and model.context == context and model.name == str(folder(name))
    assert model.layers == len(model.heads) and len(set(model.heads)) == 1
    if context is None:
        assert words_that_fit(model, "sat " * 2000) == 2000
        return
    room = model.room
    assert room == context - len(before) - len(after)
    ids = model.encode("sat " * context).ids[:room]
    model.run(model.whole(ids), lambda layer, call: None)  # the longest there is runs
    fit = words_that_fit(model, "sat " * 2 * context)
    assert 0 < fit <= room
    collect(model, "sat " * fit)
    with pytest.raises(ValueError, match=rf"this model reads {room} tokens at once, .* first {fit} of them"):
        collect(model, "sat " * (fit + 1))


def test_special_tokens_spelled_in_a_text_are_themselves(folder):
    seen = collect(open_model(folder("bert")), "The cat [SEP] the dog")
    assert [(w.text, w.special) for w in seen.words] == [
        ("[CLS]", True),
        ("The", False),
        ("cat", False),
        ("[SEP]", True),
        ("the", False),
        ("dog", False),
        ("[SEP]", True),
    ]
    assert seen.pieces == 4 and list(seen.ordinary) == [1, 2, 4, 5]


def test_an_unknown_word_is_a_word(folder):
    seen = collect(open_model(folder("bert")), "The \u732b sat")
    assert [(w.text, w.special) for w in seen.words][1:4] == [("The", False), ("\u732b", False), ("sat", False)]


def test_opening_and_running_leaves_nothing_behind(folder):
    from transformers.modeling_utils import AttentionInterface
    from transformers.utils import logging

    before = AttentionInterface.get_interface, torch.nn.functional.scaled_dot_product_attention
    told = logging.get_verbosity(), logging.is_progress_bar_enabled()
    model = open_model(folder("llama"))
    model.module.layers[1].train()

    def fail(layer, call):
        assert not model.module.layers[1].training
        assert not call.out.requires_grad
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        model.run(model.whole([5, 6, 7]), fail)
    assert model.module.layers[1].training and not model.module.layers[0].training
    assert (AttentionInterface.get_interface, torch.nn.functional.scaled_dot_product_attention) == before
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == told


def test_batches_of_one_length(folder):
    model = open_model(folder("llama"))
    tokens = torch.tensor([[1, 30, 31, 32, 33], [1, 40, 41, 42, 43]])
    together, alone = [], []
    model.run(tokens, lambda layer, call: together.append(weights_of(call)))
    model.run(tokens[1:], lambda layer, call: alone.append(weights_of(call)))
    assert [w.shape for w in together] == [(2, 6, 5, 5)] * 3
    for both, one in zip(together, alone, strict=True):
        assert torch.allclose(both[1:], one, atol=1e-5)


@pytest.mark.slow
def test_progress_is_told_layer_by_layer(folder):
    model, told = open_model(folder("llama")), []
    look(model, TEXT, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    look(model, TEXT, rows=(2, 3), progress=lambda done, total: told.append((done, total)))
    assert told[3:] == [(i, 9) for i in range(1, 10)]  # statistics, rows of links, the words around what is told


@pytest.mark.slow
def test_the_embedded_model_is_one_of_them():
    assert open_model().name == "embedded" and open_model().causal
    lm = load()
    assert as_text_model(lm).lm is lm and as_text_model(open_model()).layers == lm.model.config.layers


# What cannot be opened


def copy(source, target):
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_folders_that_are_none(tmp_path):
    form = "a folder of config.json, model.safetensors and tokenizer.json, as `saccade train lm` or as save_pretrained"
    with pytest.raises(FileNotFoundError, match=rf"config.json: missing from the model folder; .* {form}"):
        open_model(tmp_path)
    for name in ("nowhere", "./no/where", "no/where/at-all", str(tmp_path / "no")):
        with pytest.raises(FileNotFoundError, match=rf"{name}: no such model folder; .* {form} .* its owner, such as"):
            open_model(name)
    (tmp_path / "config.json").write_text('{"hello": 1}')
    with pytest.raises(ValueError, match=rf"config.json: neither .* nor a model_type .* {form}"):
        open_model(tmp_path)
    with pytest.raises(ValueError, match=rf"config.json: is a file; .* {form}"):
        open_model(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: damaged, not JSON"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(
        ValueError, match=r"configuration: .*nothing-known.*; model.safetensors and tokenizer.json: missing"
    ):
        open_model(tmp_path)


def test_damaged_files(tmp_path, folder):
    cut = copy(folder("bert"), tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cut: weights: .*file not fully covered"):
        open_model(cut)
    (cut / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model.safetensors: missing from the model folder"):
        open_model(cut)
    garbled = copy(folder("gpt2"), tmp_path / "garbled")
    (garbled / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"garbled: tokenizer: "):
        open_model(garbled)
    for file in garbled.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"garbled: tokenizer: .*tokenizer.json: missing from the model folder"):
        open_model(garbled)


@pytest.mark.slow
def test_weights_that_do_not_fit(tmp_path, folder):
    wrong = copy(folder("bert"), tmp_path / "wrong")
    weights = safetensors.torch.load_file(wrong / "model.safetensors")
    missing = {name: tensor for name, tensor in weights.items() if "layer.1.attention.self.query" not in name}
    safetensors.torch.save_file(missing, wrong / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError,
        match=r"wrong: expected the weights its config.json describes, missing: .*layer.1.*query.bias, ",
    ):
        open_model(wrong)
    wider = json.loads((wrong / "config.json").read_text()) | {"intermediate_size": 41}
    (wrong / "config.json").write_text(json.dumps(wider))
    with pytest.raises(ValueError, match=r"dense.bias has the shape \(37,\), by config.json it is \(41,\) \(6 do not"):
        open_model(wrong)
    (wrong / "config.json").write_text(json.dumps(wider | {"intermediate_size": 37}))
    without_pooler = {name: tensor for name, tensor in weights.items() if "pooler" not in name}
    assert len(without_pooler) < len(weights)
    safetensors.torch.save_file(without_pooler, wrong / "model.safetensors", {"format": "pt"})
    assert open_model(wrong).layers == 2
    spoilt = {**weights, "embeddings.word_embeddings.weight": weights["embeddings.word_embeddings.weight"] / 0}
    safetensors.torch.save_file(spoilt, wrong / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"wrong: damaged, embeddings.word_embeddings.weight holds weights that are not"
    ):
        open_model(wrong)


def test_a_tokenizer_of_another_model(tmp_path, folder):
    wrong = copy(folder("bert"), tmp_path / "wrong")
    (wrong / "tokenizer.json").write_bytes((folder("llama") / "tokenizer.json").read_bytes())
    (wrong / "tokenizer_config.json").write_bytes((folder("llama") / "tokenizer_config.json").read_bytes())
    with pytest.raises(ValueError, match=r"the tokenizer has a token '.*' that the model, with 90, does not"):
        open_model(wrong)


@pytest.mark.slow
def test_models_whose_attention_nobody_sees(tmp_path):
    for name in ("mamba", "bloom"):
        path = getattr(checkpoints, name)(tmp_path / name)
        told = rf"{name}: no attention call could be observed in {name.capitalize()}Model: it has none, or computes"
        with pytest.raises(ValueError, match=told) as raised:
            open_model(path)
        assert ("layers 0 and 1 of layers are MambaMixer" in str(raised.value)) == (name == "mamba")


@pytest.mark.slow
def test_layers_without_attention_are_named(tmp_path, capsys):
    """The terminal, the page and the JSON say what they are, and which layers the shown ones are."""
    found = look(open_model(checkpoints.jamba(tmp_path / "jamba")), TEXT)
    assert found.seen.layers == 2
    words = (
        "layers 0, 2 and 3 of layers are JambaMambaMixer: no attention weights there. Layers with attention, counted "
        "from 0 here: 1 and 4"
    )
    assert found.other_layers == words == as_json(found)["other_layers"]
    print_look(Console(width=300), found)
    assert f"Note: {words}." in capsys.readouterr().out
    assert f"Note: {words}." in render_report(found, "0")


def test_a_model_that_reads_no_text(tmp_path):
    with pytest.raises(ValueError, match=r"vit: ViTModel reads no tokens of a text"):
        open_model(checkpoints.vit(tmp_path / "vit"))


def test_a_folder_is_never_looked_up(folder, monkeypatch):
    asked = []
    inner = transformers.AutoConfig.from_pretrained

    def remember(source, *, local_files_only, **more):
        asked.append((source, local_files_only))
        return inner(source, local_files_only=local_files_only, **more)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", remember)
    open_model(folder("bert"))
    assert set(asked) == {(str(folder("bert")), True)}


@pytest.fixture
def asks(folder, tmp_path):
    """A folder whose config.json has these fields, too."""

    def make(name="bert", **fields):
        path = tmp_path / "asks"
        shutil.copytree(folder(name), path, dirs_exist_ok=True)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | fields))
        return path

    return make


@pytest.mark.parametrize(
    ("key", "value"),
    diagonal(
        ["attn_implementation", "_attn_implementation"],
        ["org/name", "paged|org/name", "org/name@v1:f", {"": "org/name"}],
    ),
)
def test_a_folder_cannot_ask_for_code_of_the_hub(asks, key, value, monkeypatch):
    fetched = []
    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", lambda *a, **k: fetched.append(a))
    with pytest.raises(ValueError, match=r"attn_implementation is '.*org/name.*', code on the hub, which is not run"):
        open_model(asks(**{key: value}))
    assert not fetched


def test_flash_attention_is_left_to_what_there_is_and_other_names_are_refused(asks, monkeypatch):
    monkeypatch.setattr(transformers.modeling_utils, "is_kernels_available", lambda: True)  # else it is not fetched
    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", lambda *a, **k: pytest.fail("run"))
    assert open_model(asks(attn_implementation="flash_attention_2")).module.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="attn_implementation is 'quick'; expected one of eager, sdpa, flex_attention"):
        open_model(asks(attn_implementation="quick"))


def test_parts_of_a_configuration_are_looked_at(monkeypatch):
    inner = transformers.BertConfig(attn_implementation="flash_attention_2")
    outer = transformers.EncoderDecoderConfig(encoder=inner.to_dict(), decoder=inner.to_dict())
    outer.decoder._attn_implementation = outer.encoder._experts_implementation = "deepgemm/x"
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *a, **k: outer)
    with pytest.raises(
        ValueError, match=r"^configuration: attn_implementation is 'deepgemm/x', .*; expected one of eager, sdpa, flex"
    ):
        read_configuration(Path("any"))
    outer.decoder._attn_implementation = None
    with pytest.raises(
        ValueError, match=r"^configuration: experts_implementation is .*; expected one of eager, batched_mm, .*mm$"
    ):
        read_configuration(Path("any"))
    outer.decoder._attn_implementation, outer.encoder._experts_implementation = "flash_attention_3", "deepgemm"
    outer.more = [{"attn_implementation": "flash_attention_2"}]
    read_configuration(Path("any"))
    assert outer.decoder._attn_implementation is outer.encoder._experts_implementation is None
    assert outer.more == [{"attn_implementation": None}]


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1,000,000,000, and its weights are 29 tensors"),
        ("hidden_size", 6 * 10**6, r"it needs [\d,]+ numbers, and its weights hold [\d,]+"),
        ("intermediate_size", 10**400, ": "),
        ("num_attention_heads", 7, "configuration: "),
        ("vocab_size", float("nan"), "configuration: "),
    ],
)
def test_sizes_that_cannot_be_are_told_before_the_model_is_made(asks, field, value, told, meta_device, monkeypatch):
    if "weights" in told:
        monkeypatch.setattr(transformers.AutoModel, "from_pretrained", lambda *_, **__: pytest.fail("made"))
    with pytest.raises(ValueError, match=told) as raised:
        open_model(asks("llama", **{field: value}))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("num_labels", 3 * 10**9, "num_labels is 3,000,000,000; expected at most 1,000,000$"),
        ("num_labels", 10**400, r"num_labels is \[401 digits\]; expected at most"),
        ("text_config", {"num_hidden_layers": 10**10}, "num_hidden_layers is 10,000,000,000, and its weights are 29 "),
        ("model_type", 10**400, r"configuration: .*\[401 digits\]"),
        ("model_type", "x" * 10**4, "configuration: .*xx"),
        ("attn_implementation", "x" * 10**4, "; expected one of eager, sdpa, flex_attention"),
        ("attn_implementation", "x/" * 10**4, "code on the hub, which is not run; expected one of eager"),
    ],
)
def test_what_a_configuration_says_is_told_in_short_and_not_worked_through(asks, field, value, told):
    with pytest.raises(ValueError, match=told) as raised:
        open_model(asks("llama", **{field: value}))
    assert len(str(raised.value).replace(str(asks("llama")), "")) <= 300


@pytest.mark.parametrize("text", ["[" * 10**5, '{"model_type":' * 10**5])
def test_a_configuration_that_is_nested_too_deeply(folder, tmp_path, text):
    shutil.copytree(folder("bert"), tmp_path / "deep")
    (tmp_path / "deep" / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json: damaged, its values are nested too deeply"):
        open_model(tmp_path / "deep")


def test_a_folder_is_opened_without_the_hub(folder, monkeypatch):
    inner, seen = transformers.AutoTokenizer.from_pretrained, []
    monkeypatch.setattr(
        transformers.AutoTokenizer,
        "from_pretrained",
        lambda *a, **k: seen.append(huggingface_hub.constants.HF_HUB_OFFLINE) or inner(*a, **k),
    )
    before = huggingface_hub.constants.HF_HUB_OFFLINE
    open_model(folder("bert"))
    assert seen == [True] and before == huggingface_hub.constants.HF_HUB_OFFLINE


def test_without_transformers(folder, monkeypatch):
    path = folder("falcon")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'needs transformers, .* pip install "transformers>=5.0"'):
        open_model(path)
    with pytest.raises(ValueError, match="hub need huggingface_hub, which is not installed: pip install .*hub"):
        open_model("org/name")
