"""`load(..., weights="stored")`: linear layers hold the numbers of quantised files, all of them and no others.

The oracles are transformers' dequantisation of GGUF, and files of the other methods written from their definitions.
"""

from __future__ import annotations

import json
import math

import checkpoints
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from transformers import modeling_gguf_pytorch_utils as legacy

import gguf_files
import quantised_by_hand
from saccade import models
from saccade.make.models.checkpoints.gguf import _TYPES, row_order
from saccade.make.models.checkpoints.quantised import HELD_TYPES, WholeNumbers, gguf_weight
from saccade.make.models.checkpoints.transformers_reading import read_configuration, read_weights
from saccade.operator._products import unrounded
from saccade.operator.nn._rounded import HeldWeight, RoundedLinear
from slowly import diagonal

SIZES = dict(vocab_size=307, hidden_size=256, intermediate_size=448, num_hidden_layers=2, num_attention_heads=4)
KINDS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES)),
}
METHODS = {
    "gptq": dict(quant_method="gptq", bits=4, group_size=128, sym=False),
    "symmetric": dict(quant_method="gptq", bits=4, group_size=64, sym=True, checkpoint_format="gptq"),
    "version 2": dict(quant_method="gptq", bits=4, group_size=32, sym=False, checkpoint_format="gptq_v2"),
    "8 bits": dict(quant_method="gptq", bits=8, group_size=-1, sym=False),
    "shuffled": dict(quant_method="gptq", bits=8, group_size=64, desc_act=True, sym=False),
    "torchao, rows": dict(quant_method="torchao", quant_type={"default": {"bits": 8, "group": None}}),
    "torchao, groups": dict(quant_method="torchao", quant_type={"default": {"bits": 4, "group": 32}}),
    "awq": dict(quant_method="awq", bits=4, group_size=128, version="gemm", zero_point=True),
}
IDS = torch.randint(0, 307, (2, 23), generator=torch.Generator().manual_seed(1))


def blocks(kind, features, width):
    """Random blocks of a type, of which each scale is a finite number, some of them subnormal."""
    number = next(number for number, (name, *_) in _TYPES.items() if name == kind)
    _, count, size = _TYPES[number]
    data = torch.randint(0, 256, (features, width // count, size), dtype=torch.uint8)
    scale = torch.randn(features, width // count, 1).mul(
        torch.tensor([1e-5, 0.1])[torch.arange(features) % 2, None, None]
    )
    for at in {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}.get(kind, (0,)):
        data[:, :, at : at + 2] = scale.half().view(torch.uint8)
    return number, data


def five_bits(data, kind):
    """Q5_0 and Q5_1, which transformers leaves to the package gguf: number by number, as ggml-quants.c takes them."""
    first = 2 if kind == "Q5_0" else 4
    halves = data[..., :first].contiguous().view(torch.float16).float()
    high = sum(data[..., first + byte].long() << 8 * byte for byte in range(4))
    each = [data[..., first + 4 + n % 16].long() >> n // 16 * 4 & 15 | (high >> n & 1) << 4 for n in range(32)]
    q = torch.stack(each, -1).float()
    return (halves[..., :1] * (q - 16) if kind == "Q5_0" else halves[..., :1] * q + halves[..., 1:]).flatten(1)


@pytest.mark.parametrize("kind", HELD_TYPES)
def test_blocks_are_held_with_the_numbers_of_the_file(kind, tmp_path):
    """Only this sees a bit of a type in the wrong place, a rounded scale and rows in another order."""
    dequantize = pytest.importorskip("transformers.integrations.gguf.dequant").dequantize
    torch.manual_seed(0)
    features, width = 131, 768
    number, data = blocks(kind, features, width)
    file, rows = tmp_path / "blocks", torch.randperm(features)
    file.write_bytes(b"seven b" + data.numpy().tobytes())
    whole = five_bits(data, kind) if kind in ("Q5_0", "Q5_1") else dequantize(data.flatten(), number)
    expected = whole.view(features, width)
    assert torch.equal(gguf_weight(file, 7, kind, features, width, None).dense(), expected)
    assert torch.equal(gguf_weight(file, 7, kind, features, width, rows).dense(), expected[rows])
    data[3, 1, 208 if kind == "Q6_K" else 0 :][:2] = torch.tensor([torch.nan]).half().view(torch.uint8)
    file.write_bytes(b"seven b" + data.numpy().tobytes())
    with pytest.raises(ValueError, match="blocks: holds scales that are not finite"):
        gguf_weight(file, 7, kind, features, width, None)


def test_rows_are_moved_as_transformers_moves_them():
    """Only this sees the rows of a Llama's queries, which llama.cpp stores in another order."""
    weight = torch.randn(96, 32)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        processor = legacy.LlamaTensorProcessor(config=heads)
        order = row_order(nn.Linear(1, 1), name, (96, 32), processor)
        assert torch.equal(weight[order], torch.from_numpy(processor.process(weight.numpy(), name).weights))
    assert row_order(nn.Linear(1, 1), "blk.0.attn_v.weight", (96, 32), processor) is None
    conv, plain = transformers.pytorch_utils.Conv1D(1, 1), legacy.GPT2TensorProcessor(config={})
    assert torch.equal(row_order(conv, "blk.0.attn_qkv.weight", (96, 32), plain), torch.arange(96))
    with pytest.raises(ValueError, match=r"output_norm.weight: transformers does more than to reorder its rows"):
        row_order(nn.Linear(1, 1), "output_norm.weight", (96, 32), legacy.Gemma2TensorProcessor(config={}))


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory):
    model = gguf_files.tiny(192, 256)
    sizes = {"lfm2.embedding_length": 192, "lfm2.feed_forward_length": 256}
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "model.gguf", model, **sizes), model


@torch.no_grad()
def test_a_gguf_file_is_held(lfm2, tmp_path, monkeypatch):
    """Without rounding of inputs it is the float model of the file; the output layer has a copy of its own of the
    embedding, and layers below 32,768 weights stay floats and are named. transformers reads no tensor that is held."""
    file, expected = lfm2
    reader = pytest.importorskip("transformers.integrations.gguf.reader").LazyGgufTensor
    whole, shapes = reader.__getitem__, []
    monkeypatch.setattr(reader, "__getitem__", lambda self, key: shapes.append(self.shape) or whole(self, key))
    model = models.load(file, weights="stored")
    assert [shape for shape in shapes if math.prod(shape) >= 2**15] == [(261, 192 // 32 * 34)]  # the embedding
    linear = {name: part for name, part in expected.named_modules() if isinstance(part, nn.Linear)}
    for name, part in linear.items():
        held = model.module.get_submodule(name)
        assert isinstance(held, RoundedLinear) == (part.weight.numel() >= 2**15)
        assert torch.equal(held.weight + 0, part.weight)
    assert not isinstance(model.module.model.embed_tokens.weight, HeldWeight)
    with unrounded():
        assert torch.equal(model(IDS % 250).logits, expected(IDS % 250).logits)
    apart = (model(IDS % 250).logits - expected(IDS % 250).logits).square().mean().sqrt()
    assert 1e-4 < apart / expected(IDS % 250).logits.square().mean().sqrt() < 0.05
    count = sum(part.weight.numel() >= 2**15 for part in linear.values())
    assert f"{count} linear layers hold their weights in Q8_0:" in model.explain()
    small = {f"blk.1.attn_{name}.weight (Q8_0)" for name in "kv"}
    assert set(model.report.dequantised) == {"token_embd.weight (Q8_0)", *small}
    assert model.generate(IDS[:1, :5] % 250, max_new_tokens=3).shape == (1, 8)
    body = models.load(file, weights="stored", head="none")
    assert torch.equal(body(IDS % 250).last_hidden_state, model.module.model(IDS % 250)[0])
    with pytest.raises(ValueError, match=r"save: .* holds its weight in Q8_0"):
        model.save(tmp_path / "never")


@torch.no_grad()
def test_a_gguf_file_that_is_read_with_the_package_gguf_is_held(tmp_path):
    pytest.importorskip("gguf")
    expected = gguf_files.qwen2(192, 256)
    sizes = {"qwen2.embedding_length": 192, "qwen2.feed_forward_length": 256}
    model = models.load(gguf_files.write(tmp_path / "model.gguf", expected, **sizes), weights="stored")
    with unrounded():
        assert torch.equal(model(IDS % 250).logits, expected(IDS % 250).logits)
    assert "11 linear layers hold their weights in Q8_0:" in model.explain()
    assert sum("blk." in name for name in model.report.dequantised) == 4  # keys and values, below 32,768 weights


@pytest.mark.parametrize(("method", "kind"), diagonal([*METHODS], [*KINDS]))
@torch.no_grad()
def test_packed_layers_are_read_and_held(kind, method, tmp_path):
    """A number, a zero or a column in the wrong place gives other logits, and so does a layer that is left out."""
    torch.manual_seed(0)
    with checkpoints.quiet():
        expected = quantised_by_hand.write(
            tmp_path, KINDS[kind]().eval(), METHODS[method], shuffled=method == "shuffled"
        )
    wanted = expected(IDS).logits
    for form in (None, "stored"):
        model = models.load(tmp_path, weights=form)
        with unrounded():
            assert torch.allclose(model(IDS).logits, wanted, atol=1e-5 * wanted.abs().max().item())
        assert len(model.report.dequantised) == (0 if form else 14 if kind == "llama" else 8)
    assert (model(IDS).logits - wanted).square().mean() < 0.03 * wanted.square().mean()  # with rounded inputs
    bits = f", {METHODS[method]['bits']} bits" if "bits" in METHODS[method] else ""
    assert f"8 linear layers hold their weights in {METHODS[method]['quant_method']}{bits}:" in model.explain()
    assert sum(isinstance(part, RoundedLinear) for part in models.load(tmp_path, weights="int8").modules()) >= 8


def test_what_cannot_be_held_is_said(lfm2, tmp_path):
    with checkpoints.quiet():
        quantised_by_hand.write(tmp_path / "odd", KINDS["llama"](), METHODS["gptq"] | {"group_size": 96})
        KINDS["llama"]().save_pretrained(tmp_path / "floats")
    for folder, reason in (("odd", "not held: groups of 96"), ("floats", "it holds floats")):
        with pytest.raises(ValueError, match=rf"weights: 'stored' found no linear layer .*{folder}.*: .*{reason}"):
            models.load(tmp_path / folder, weights="stored")
    tensors = safetensors.torch.load_file(tmp_path / "odd" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    for part, value, message in (
        ("scales", tensors[f"{name}.scales"][1:].clone(), rf"{name}.scales: has the shape \(4, 256\); gptq, 4 bits in"),
        ("qzeros", None, rf"{name}.qzeros: missing; gptq needs it beside {name}.qweight"),
        ("g_idx", torch.full((448,), 5, dtype=torch.int32), rf"{name}.g_idx: names groups beyond 5"),
    ):
        changed = {own: x for own, x in (tensors | {f"{name}.{part}": value}).items() if x is not None}
        safetensors.torch.save_file(changed, tmp_path / "odd" / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            models.load(tmp_path / "odd")
    values = json.loads((tmp_path / "odd" / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "torchao"}
    (tmp_path / "odd" / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="quantization_config names torchao, and no weight has _weight_qdata"):
        models.load(tmp_path / "odd")
    int4 = {f"{name}._weight_qdata": torch.zeros(2, 2, dtype=torch.uint8), f"{name}._weight_scale": torch.ones(2, 2)}
    kinds = {f"{name}.weight": json.dumps({"_type": "Int4Tensor"})}
    safetensors.torch.save_file(int4, tmp_path / "odd" / "model.safetensors", kinds)
    with pytest.raises(ValueError, match=rf"{name}.weight: is torchao's Int4Tensor, which only torchao reads"):
        models.load(tmp_path / "odd")
    for wrong in ({"checkpoint_format": "marlin"}, {"bits": 3}, {"quant_method": "awq", "version": "gemv"}):
        values["quantization_config"] = METHODS["gptq"] | wrong
        (tmp_path / "odd" / "config.json").write_text(json.dumps(values))
        with pytest.raises(ValueError, match=r"quantization_config: the weights are quantised already \((gptq|awq), "):
            models.load(tmp_path / "odd")


@torch.no_grad()
def test_what_is_dequantised_is_saved_as_floats(tmp_path):
    """A configuration that still names the method makes the folder unreadable."""
    with checkpoints.quiet():
        quantised_by_hand.write(tmp_path / "packed", KINDS["llama"]().eval(), METHODS["awq"])
    model = models.load(tmp_path / "packed")
    model.save(tmp_path / "floats")
    assert torch.equal(models.load(tmp_path / "floats")(IDS).logits, model(IDS).logits)


def test_zeros_beyond_a_byte_are_not_held():
    """They would run into the other fields of the form, and the kernel would read past the scales."""
    whole = WholeNumbers(
        torch.zeros(5, 32, dtype=torch.uint8), torch.ones(5, 1).half(), torch.full((5, 1), -92), torch.zeros(32).long(),
        32, 4,
    )  # fmt: skip
    assert whole.held() == "zeros beyond 8 bits"


@pytest.mark.slow
@torch.no_grad()
def test_a_packed_folder_keeps_how_it_generates_and_can_be_inspected(tmp_path):
    with checkpoints.quiet():
        expected = quantised_by_hand.write(tmp_path, KINDS["neox"]().eval(), METHODS["gptq"])
    settings = {"eos_token_id": [7, 11], "repetition_penalty": 1.25}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    model = models.load(tmp_path, weights="stored")
    assert (set(model.end_tokens), model.repetition_penalty) == ({7, 11}, 1.25)
    module = read_weights(type(expected), read_configuration(tmp_path), tmp_path, dtype=torch.float32).module
    assert torch.allclose(module(IDS).logits, expected(IDS).logits, atol=1e-5 * expected(IDS).logits.abs().max().item())
