"""Types without a family here open through transformers' own class, behind the interface of all models."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import opened
import pytest
import torch
import transformers
import zoo
from torch import nn
from transformers.modeling_gguf_pytorch_utils import read_field

import gguf_files
import saccade
from saccade import models
from saccade.inspection import as_text_model, open_model
from saccade.make.models.checkpoints import gguf

IDS, MASK = opened.batch(left=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[..., Path]:
    """The folder of a model of transformers."""

    def save(module: Any) -> Path:
        folder: Path = tmp_path_factory.mktemp("model")
        with checkpoints.quiet():
            module.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def neox(saved) -> Path:
    torch.manual_seed(5)
    sizes = zoo.sized(transformers.GPTNeoXConfig) | {"vocab_size": 400}
    folder = saved(transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes)))
    tokenizer = checkpoints.gpt2(folder / "gpt2")
    for file in tokenizer.glob("tokenizer*"):
        file.rename(folder / file.name)
    return folder


@pytest.mark.parametrize(
    "kind",
    [
        *("gemma3_text", "mamba"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("modernbert", "opt", "olmo2", "gpt_neox", "mixtral", "gpt_oss", "bloom")
        ),
    ],
)
def test_outputs_and_texts_have_the_bits_of_transformers(kind, tmp_path):
    """Only this compares padding on both sides, greedy texts and a saved copy of types that have no family here."""
    torch.manual_seed(5)
    with checkpoints.quiet():
        assert opened.compared(kind, tmp_path) == "equal, equal in bits"


@pytest.mark.slow
def test_types_that_read_no_token_ids(saved):
    """CLIP's text has outputs of other names, Whisper reads spectrograms and decodes, DINOv2 reads images."""
    small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40)
    text = transformers.CLIPTextConfig(vocab_size=97, **small, projection_dim=24, eos_token_id=2)
    clip = transformers.CLIPTextModelWithProjection(text).eval()
    model = models.load(saved(clip))
    with torch.no_grad():
        expected = clip(IDS, MASK)
        assert torch.equal(model(IDS, MASK).others["text_embeds"], expected.text_embeds)
    sizes = zoo.sized(transformers.WhisperConfig) | {"max_source_positions": 50}
    whisper = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes)).eval()
    model = models.load(saved(whisper))
    sounds = {"input_features": torch.randn(2, 16, 100), "decoder_input_ids": IDS[:2]}
    with torch.no_grad():
        assert torch.equal(model(**sounds).logits, whisper(**sounds).logits)
    dino = transformers.Dinov2Model(transformers.Dinov2Config(**small, image_size=16, patch_size=8)).eval()
    model = models.load(saved(dino))
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(model(images).last_hidden_state, dino(images).last_hidden_state)
    assert model.folder is not None
    processor = (getattr(transformers, "BitImageProcessorPil", None) or transformers.BitImageProcessor)(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    processor.save_pretrained(model.folder)
    pixels = torch.randint(0, 255, (3, 20, 30), dtype=torch.uint8).numpy()
    expected = processor(pixels, return_tensors="pt")["pixel_values"]
    assert torch.equal(model.prepare(pixels)["pixel_values"], expected)


@pytest.mark.slow
def test_rows_of_padding_are_0_and_losses_are_those_of_transformers(neox):
    model = models.load(neox)
    labels = torch.where(MASK != 0, IDS, -100)
    out = model(IDS, MASK, labels=labels, hidden_states=True)
    assert torch.equal(out.loss, model.module(IDS, attention_mask=MASK, labels=labels).loss)
    assert not out.logits[MASK == 0].any() and not out.last_hidden_state[MASK == 0].any()
    assert len(out.hidden_states) == 3 and torch.equal(out.hidden_states[-1], out.last_hidden_state)
    out.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_kernels_run_inside_a_call_and_nothing_of_it_stays(saved):
    """Only this sees a replaced method or function that outlives the call, which copies and saved files would have."""
    sizes = dict(vocab_size=97, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
    torch.manual_seed(2)
    plain = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, max_position_embeddings=2048)).eval()
    model = models.load(saved(plain))
    assert "GPTNeoXForCausalLM, type gpt_neox" in model.explain() and "no call yet" in model.explain()
    before = {name: dict(vars(module)) for name, module in model.named_modules() if module is not model}
    function, ids = torch.nn.functional.scaled_dot_product_attention, torch.randint(3, 97, (2, 600))
    with torch.no_grad():
        expected = plain(ids).logits
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=2e-5)
        assert "2 of 2 calls of attention taken" in model.explain()
        text = model.generate(ids, max_new_tokens=2)
        with model.accelerated(2**16):  # as many tokens as `embed` and `generate` have then
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=2e-5)
    assert "linear" in model.explain()
    assert torch.equal(text, plain.generate(ids, max_new_tokens=2, do_sample=False))
    assert before == {name: dict(vars(module)) for name, module in model.named_modules() if module is not model}
    assert torch.nn.functional.scaled_dot_product_attention is function
    again = copy.deepcopy(model)
    nn.init.zeros_(again.module.lm_head.weight)
    assert not again(ids).logits.any() and model(ids).logits.any()
    with saccade.watch(model) as watched, torch.no_grad():
        model(ids)
    assert len(watched.calls) == 2
    assert models.load().explain().startswith("Saccade's LanguageModel")


def test_a_tokenizer_texts_and_vectors(neox):
    model = models.load(neox)
    texts = ["the cat sat", "on the mat", "the old man was gone"]
    vectors = models.embed(texts, model, pooling="mean")
    alone = [model.module.gpt_neox(model.tokenizer(text)["input_ids"])[0][0].mean(0) for text in texts]
    torch.testing.assert_close(torch.from_numpy(vectors), torch.stack(alone).detach(), rtol=0, atol=1e-5)
    sampling = models.Sampling(temperature=0)
    written = "".join(models.generate(model, "the cat", tokens=5, sampling=sampling))
    ids = model.tokenizer(["the cat"])["input_ids"]
    expected = model.module.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
    assert written == model.tokenizer.decode(expected)
    best = model.generate(ids, max_new_tokens=4, sampling=models.BeamSearch(beams=3))
    assert torch.equal(best, model.module.generate(ids, max_new_tokens=4, num_beams=3, do_sample=False))
    drawn = [model.generate(ids, sampling=models.Sampling(seed=seed)).tolist() for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert as_text_model(model).heads == open_model(neox).heads == (4, 4)
    with pytest.raises(ValueError, match="max_new_tokens: must be at least 1, got 0"):
        model.generate(ids, max_new_tokens=0)
    assert model.longest == 96 and model.generate(ids, max_new_tokens=100).shape[1] == ids.shape[1] + 100  # rotary
    with pytest.raises(ValueError, match="input_ids: ids must be from 0 to"):
        model.generate(ids + 1000)


@pytest.mark.slow
def test_heads_and_labels(saved):
    sizes = dict(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40)
    config = transformers.DebertaV2Config(**sizes, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})
    folder = saved(transformers.DebertaV2ForSequenceClassification(config))
    stored = models.load(folder)
    assert stored.request.head == "sequence-classification" and stored.label_names == ["no", "yes"]
    turned = models.load(folder, labels=["yes", "no"])
    assert turned.label_names == ["yes", "no"]
    assert torch.equal(turned(IDS).logits, stored(IDS).logits.flip(1)) and not turned.report.initialised
    fresh = models.load(folder, labels=["a", "b", "c"])
    assert set(fresh.report.initialised) == {"classifier.weight", "classifier.bias"}
    assert fresh(IDS).logits.shape == (3, 3)
    renamed = models.load(folder, labels=["a", "b"])
    assert set(renamed.report.initialised) == {"classifier.weight", "classifier.bias"}
    body = models.load(folder, head="none")
    assert body(IDS).last_hidden_state.shape == (3, 11, 32) and "classifier.bias" in body.report.unused
    for options, message in (
        ({"head": "dreams"}, "head: transformers' deberta-v2 has 'masked-lm', .*'none'; got 'dreams'"),
        ({"head": "none", "labels": 2}, "labels: need a head that classifies, got the head None"),
        ({"head": "masked-lm"}, "expected the weights its config.json describes, missing: "),
        (
            {"mechanism": saccade.variants.LinearConfig()},
            "mechanism: replaces attention in Saccade's own",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            models.load(folder, **options)


@pytest.mark.slow
def test_as_many_classes_as_tokens(saved):
    """Fails where logits of texts (B, K) are taken for those of tokens, and set to 0 at padding."""
    sizes = dict(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40)
    config = transformers.GPTNeoXConfig(**sizes, num_labels=IDS.shape[1], pad_token_id=0)
    model = models.load(saved(transformers.GPTNeoXForSequenceClassification(config)))
    real = torch.ones_like(IDS)
    real[0, 7:] = 0
    assert bool((model(IDS, real).logits != 0).all())


@pytest.mark.slow
def test_parameters_that_are_missing_and_tensors_that_are_not_used(neox, tmp_path, meta_device):
    from safetensors.torch import load_file, save_file

    tensors = load_file(neox / "model.safetensors")
    (tmp_path / "config.json").write_text((neox / "config.json").read_text())
    save_file({**tensors, "more.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert models.load(tmp_path).report.unused == ("more.weight",)
    rounded = models.load(tmp_path, dtype=torch.bfloat16)
    assert rounded.dtype == torch.bfloat16 and "embed_out.weight" in rounded.report.rounded
    name = next(name for name in tensors if "dense.weight" in name)
    save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"missing: {name}"):
        models.load(tmp_path)
    settings = json.loads((neox / "config.json").read_text())
    for more, message in (
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map: requires code of the checkpoint"),
        ({"attn_implementation": "org/name"}, "code on the hub, never run"),
        ({"hidden_size": 6 * 10**6}, "configuration: it needs .* numbers, and its weights hold"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(settings | more))
        with pytest.raises(ValueError, match=message):
            models.load(tmp_path)


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory):
    """A GGUF file, and the model with its numbers."""
    model = gguf_files.tiny()
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "model.gguf", model), model


@pytest.mark.slow
def test_a_gguf_file_is_the_dequantised_model(lfm2, tmp_path):
    file, expected = lfm2
    model = models.load(file)
    ids = torch.randint(3, 250, (2, 9))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
        assert torch.equal(models.load(file, head="none")(ids).last_hidden_state, expected.model(ids)[0])
    assert model.dtype == torch.float32 and "blk.1.attn_q.weight (Q8_0)" in model.report.dequantised
    assert models.load(file, dtype=torch.bfloat16).dtype == torch.bfloat16
    plain = models.load(gguf_files.write(tmp_path / "plain.gguf", gguf_files.tiny(), quantised=False))
    assert str(plain.report) == "every tensor used as it is"
    assert model.tokenizer.decode(model.tokenizer("the cat")["input_ids"][0]) == "the cat"
    assert open_model(file).heads == (4,)  # the other layer is a convolution
    model.save(tmp_path / "saved")
    again = models.load(tmp_path / "saved")
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.tokenizer.encode("the cat").ids == model.tokenizer.encode("the cat").ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, "GGUF of version 1; expected version 2 or 3, little-endian"),
        ({"version": 3 << 24}, "written for big-endian machines; expected"),
        ({"split.count": 4, "split.no": 1}, "part 2 of 4; join the parts with llama.cpp first"),
        (
            {"general.architecture": "dream"},
            "architecture: transformers reads no GGUF file of 'dream'; expected",
        ),
        ({"general.architecture": None}, "architecture: transformers reads no GGUF file of 'None'; expected"),
    ],
)
def test_gguf_files_that_cannot_be_read(changes, message, tmp_path):
    file = gguf_files.write(tmp_path / "model.gguf", gguf_files.tiny(), **changes)
    with pytest.raises(ValueError, match=message) as raised:
        models.load(file)
    assert str(raised.value).startswith(str(file)) and "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_gguf_file_that_ends_early(lfm2, tmp_path):
    """Cut anywhere, in the header or in the tensors; also a file that is none."""
    whole, file = lfm2[0].read_bytes(), tmp_path / "model.gguf"
    for length in (0, 3, 20, 100, 3000, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="truncated"):
            models.load(file)
        with pytest.raises(ValueError, match="truncated"):
            open_model(file)
    file.write_bytes(b"PK" + whole)
    with pytest.raises(ValueError, match="not a GGUF file"):
        models.load(file)


def test_a_gguf_file_that_is_read_with_the_package_gguf(tmp_path):
    pytest.importorskip("gguf")
    expected = gguf_files.qwen2()
    model = models.load(gguf_files.write(tmp_path / "model.gguf", expected))
    ids = torch.randint(3, 250, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=0, atol=1e-5)
    assert "qwen2.rope.scaling.factor=4.0" in model.report.left_out
    assert model.tokenizer.decode(model.tokenizer("the cat")["input_ids"][0]) == "the cat"


def test_the_metadata_of_a_gguf_file_are_those_that_its_package_reads(tmp_path):
    package = pytest.importorskip("gguf")
    file = gguf_files.write(tmp_path / "model.gguf", gguf_files.qwen2())
    quick, plain = gguf._quick(package.GGUFReader)(file), package.GGUFReader(file)
    for name, field in plain.fields.items():
        assert read_field(quick, name) == read_field(plain, name) and quick.fields[name].types == field.types
    assert len(read_field(quick, "tokenizer.ggml.tokens")) == gguf_files.qwen2().config.vocab_size
    calls = []
    read = gguf.read_once(lambda path, **options: calls.append(options) or {"config": {"vocab_size": 3}})
    read(file)["config"].clear()
    assert read(file) == {"config": {"vocab_size": 3}} and calls == [{}]


def test_a_llama_in_gguf_needs_its_package(tmp_path):
    """Files of most architectures are read with the package gguf; without it the error has the command."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        file = gguf_files.write(tmp_path / "model.gguf", gguf_files.tiny(), **{"general.architecture": "llama"})
        with pytest.raises(ModuleNotFoundError, match="a GGUF file of llama needs gguf, which is not installed: pip"):
            models.load(file)


def test_loads_that_overlap_stay_contained():
    """Fails where the end of the first load switches the hub and its kernels on for the second."""
    from transformers.integrations import hub_kernels

    from saccade.make.models.checkpoints.transformers_reading import contained

    before = hub_kernels.get_kernel
    inside, ended = threading.Event(), threading.Event()

    def second():
        with contained():
            inside.set()
            with pytest.raises(ImportError, match="code on the hub"):
                hub_kernels.get_kernel("org/name")
        ended.set()

    with contained():
        other = threading.Thread(target=second)
        other.start()
        assert not inside.wait(0.1)
    assert ended.wait(60)
    other.join()
    assert hub_kernels.get_kernel is before


@pytest.mark.slow
def test_inputs_for_each_token_do_not_stay_where_padding_moves(neox):
    model, real = models.load(neox), torch.ones_like(IDS)
    real[0, 7:] = 0
    with pytest.raises(ValueError, match="position_ids: has an entry for each token"):
        model.generate(IDS, real, position_ids=real.cumsum(1), max_new_tokens=2)
