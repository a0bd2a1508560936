"""`load(..., weights=...)`: every linear layer is the stored one, rounded, and everything else is as stored.

The oracle is transformers' float model whose linear layers round their weights and multiply in float64.
"""

from __future__ import annotations

import json
import subprocess
import sys

import checkpoints
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import saccade
from saccade import models
from saccade.operator._int4 import int4_weight
from saccade.operator._int8 import BLOCK
from saccade.operator._products import unrounded
from saccade.operator.nn._rounded import FORMS, RoundedLinear
from slowly import diagonal

SIZES = dict(vocab_size=307, hidden_size=192, intermediate_size=389, num_hidden_layers=2, num_attention_heads=3)
GPT2 = dict(vocab_size=307, n_embd=192, n_layer=2, n_head=3, n_positions=64, bos_token_id=0, eos_token_id=1)
SEQ2SEQ = dict(encoder_ffn_dim=389, decoder_ffn_dim=389, encoder_attention_heads=3, decoder_attention_heads=3)
SEQ2SEQ |= dict(vocab_size=307, d_model=192, encoder_layers=2, decoder_layers=2, max_position_embeddings=64)
KINDS = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**SEQ2SEQ)),
    "neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES)),
    "gpt1": lambda: transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**GPT2)),
}
LARGE = 2**15


def in_blocks(x):
    return F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def whole_numbers_of(weight):
    parts = in_blocks(weight.double())
    step = (parts.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)  # of a padding token's row, too
    return ((parts / step).round() * step).flatten(-2)[..., : weight.shape[-1]]


ROUND = {"bfloat16": Tensor.bfloat16, "int8": whole_numbers_of, "int4": lambda weight: int4_weight(weight).dense()}


def simulate(module, form):
    """Round the weights of the large linear layers. One that an embedding has, too, is rounded if it gives logits of
    a language model, in 8 bits instead of 4."""
    reads = type(module).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    tied = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    tables = {part.weight.shape for part in module.modules() if isinstance(part, nn.Embedding)}
    for part in module.modules():
        conv = type(part).__name__ == "Conv1D"
        if not (conv or isinstance(part, nn.Linear)) or part.weight.numel() < LARGE:
            continue
        if id(part.weight) in tied and not reads:
            continue
        own = "int8" if form == "int4" and part.weight.shape in tables else form
        weight = part.weight.detach().t() if conv else part.weight.detach()
        weight = ROUND[own](weight).double()

        def forward(x, weight=weight, bias=part.bias):
            return F.linear(x.double(), weight, None if bias is None else bias.double()).to(torch.float32)

        part.forward = forward
    return module


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def folder(kind):
        if kind not in made:
            torch.manual_seed(7)
            module, made[kind] = KINDS[kind]().eval(), tmp_path_factory.mktemp(kind)
            for name, parameter in module.named_parameters():
                if parameter.dim() == 2 and "emb" not in name and "wte" not in name:
                    parameter.data.mul_(3)  # as large as trained weights
                elif name.endswith("bias"):
                    parameter.data.normal_(std=0.1)
            with checkpoints.quiet():
                module.save_pretrained(made[kind])
        return made[kind]

    return folder


def batch(kind):
    torch.manual_seed(1)
    ids = torch.randint(3, 307, (3, 37))
    return {"input_ids": ids} | ({"decoder_input_ids": ids[:, :11]} if kind == "bart" else {})


@pytest.mark.parametrize(("form", "kind"), diagonal([*FORMS], [*KINDS]))
@torch.no_grad()
def test_it_is_the_stored_model_with_rounded_layers(saved, kind, form):
    """Compared without rounding of inputs, which makes the last bits of one layer steps in the next; they are seen to
    be rounded, too. A layer that is rounded twice, not at all, or whose rows are in another order is further away."""
    folder, inputs = saved(kind), batch(kind)
    with checkpoints.quiet():
        stored = type(KINDS[kind]()).from_pretrained(folder).eval()
    expected = stored(**inputs).logits
    wanted = simulate(stored, form)(**inputs).logits
    model = models.load(folder, weights=form)
    apart = (wanted - expected).square().mean().sqrt()
    assert apart > 1e-4 * expected.square().mean().sqrt()  # there is something to tell
    with unrounded():
        weights_alone = model(**inputs).logits
    assert (weights_alone - wanted).square().mean().sqrt() < 0.03 * apart
    with_inputs = (model(**inputs).logits - wanted).square().mean().sqrt()
    least, most = {"bfloat16": (-1, 0.01), "int8": (0.1, 3), "int4": (0.02, 1)}[form]
    assert least * apart < with_inputs < most * apart
    plain = models.load(folder)
    for name, tensor in model.state_dict().items():  # everything else is as stored
        rounded = isinstance(model.get_submodule(name.rpartition(".")[0]), RoundedLinear)
        assert name.endswith((".packed", ".scales", ".halves")) or torch.equal(tensor, plain.state_dict()[name])
        assert rounded or not name.endswith((".packed", ".scales", ".halves"))
    large = [part for part in plain.modules() if hasattr(part, "weight") and "Embedding" not in type(part).__name__]
    count = sum(part.weight.numel() >= LARGE for part in large) + (kind == "gpt2")  # its output layer
    heads = sum(part.weight.shape == (307, part.weight.shape[-1]) for part in large) + (kind == "gpt2")
    rest = f" ({heads} of them in int8)" if form == "int4" and heads else ""
    assert f"{count} linear layers hold their weights in {form}{rest}:" in model.explain()


@pytest.mark.slow
@torch.no_grad()
def test_the_dtype_of_everything_else(saved, tmp_path):
    assert models.load(saved("llama"), weights="int8", dtype=torch.bfloat16).dtype == torch.bfloat16
    ids = batch("llama")["input_ids"]
    assert models.load(saved("llama"), weights="int8", dtype=torch.bfloat16)(ids).logits.dtype == torch.bfloat16
    neox = models.load(saved("neox"), weights="int8", dtype=torch.bfloat16).module
    assert neox.gpt_neox.rotary_emb.inv_freq.dtype == torch.float32
    for kind in ("llama", "neox"):
        with checkpoints.quiet():
            KINDS[kind]().half().save_pretrained(tmp_path / kind)
        for form in ("int8", "bfloat16"):
            model = models.load(tmp_path / kind, weights=form)
            assert model.dtype == model(ids).logits.dtype == torch.float32


@torch.no_grad()
def test_texts_continue_and_calls_are_seen_as_without():
    lm, plain = models.load(weights="int8"), models.load()
    ids = torch.tensor([[lm.tokenizer.start, *lm.tokenizer.encode("The children found a small boat near").ids]])
    divergence = F.kl_div(
        lm(ids).logits.log_softmax(-1), plain(ids).logits.log_softmax(-1), reduction="none", log_target=True
    )
    assert divergence.sum(-1).mean() < 1e-3
    assert torch.equal(lm.generate(ids, max_new_tokens=7)[:, :-7], ids)
    with saccade.watch(lm) as watched:
        lm(ids)
    assert len(watched.calls) == 4
    assert not watched.unobserved


@pytest.mark.slow
def test_attribution_is_that_of_the_weights_that_the_layers_stand_for():
    lm, same, text = models.load(weights="int8"), models.load(), "The cat sat on the"
    for name, part in lm.named_modules():
        if isinstance(part, RoundedLinear):
            same.get_submodule(name).weight.data.copy_(part.weight)
    found, wanted = (saccade.attribute(model, text, " mat") for model in (lm, same))
    assert abs(found.total - found.logit) < 1e-4
    assert abs(found.logit - wanted.logit) < 1e-4
    assert (torch.as_tensor(found.contributions) - torch.as_tensor(wanted.contributions)).abs().max() < 1e-4


def test_adapters_train_and_cannot_be_merged(saved):
    peft = pytest.importorskip("peft")
    module = models.load(saved("neox"), weights="int8").module
    before = [buffer.clone() for buffer in module.buffers()]
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["query_key_value", "dense"], r=3), module)
    learned = [parameter for name, parameter in module.named_parameters() if "lora_" in name]
    optimizer, losses, ids = torch.optim.Adam(learned, 1e-2), [], batch("neox")["input_ids"]
    for _ in range(5):
        losses.append(module(input_ids=ids, labels=ids).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(old, new) for old, new in zip(before, module.buffers(), strict=True))
    with pytest.raises(RuntimeError, match="weight: the weights of a RoundedLinear"):
        module.gpt_neox.layers[0].attention.dense.merge()


def test_a_new_head_stays_as_it_is_drawn(saved):
    for kind in ("bert", "gpt2"):
        model = models.load(saved(kind), head="sequence-classification", labels=211, weights="int8")
        assert "linear layers hold" in model.explain()
        named = {name for name, parameter in model.named_parameters() if parameter.shape == (211, 192)}
        assert len(named) == 1


def test_what_cannot_be_done_is_said(saved, tmp_path):
    folder = saved("llama")
    for wrong, message in (
        (dict(weights="int7"), "weights: expected None or one of 'bfloat16', 'int8'"),
        (dict(weights="int8", dtype=torch.float64), "dtype: expected torch.float32 or torch.bfloat16 beside"),
        (dict(weights="bfloat16", dtype=torch.bfloat16), "dtype: expected torch.float32 beside weights='bfloat16'"),
        (dict(weights="int8", device="cuda"), "device: weights='int8' runs on the CPU, got 'cuda'"),
    ):
        with pytest.raises(ValueError, match=message):
            models.load(folder, **wrong)
    for kind in ("llama", "neox"):
        with pytest.raises(ValueError, match=r"save: .* holds its weight in int4"):
            models.load(saved(kind), weights="int4").save(tmp_path / "never")
    with pytest.raises(ValueError, match="save: "):
        models.load(weights="int8").save(tmp_path / "never")
    assert not (tmp_path / "never").exists()
    with pytest.raises(ValueError, match="expected a linear layer with its own weight"):
        saccade.prune(models.load(folder, weights="int8"), {0: [1]})


@pytest.mark.parametrize("kind", ["llama", "neox"])
def test_weights_that_are_not_finite(saved, tmp_path, kind):
    tensors = safetensors.torch.load_file(saved(kind) / "model.safetensors")
    name = next(name for name in tensors if name.endswith("1.mlp.down_proj.weight" if kind == "llama" else "4h.weight"))
    tensors[name][3, 5] = torch.nan
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((saved(kind) / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"weight: holds NaN or infinities, which int8 cannot hold"):
        models.load(tmp_path, weights="int8")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq, 3 bits"),
        ({"quant_method": "awq", "bits": 4}, "awq, 4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8 bits"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({}, "an unknown method"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "neox"])
def test_checkpoints_that_are_quantised_already(saved, tmp_path, kind, given, named):
    values = json.loads((saved(kind) / "config.json").read_text()) | {"quantization_config": given}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"quantization_config: the weights are quantised already \({named}\)"):
        models.load(tmp_path, weights="int8")


PEAK = """
import re, sys, pathlib
from saccade import models

def memory(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])

models.load(weights="int8")
before = memory("VmRSS")
model = models.load(sys.argv[1], weights="int8")
print(memory("VmHWM") - before, sum(t.nbytes for t in (*model.parameters(), *model.buffers())))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' account of the peak")
def test_the_peak_stays_far_below_the_floats(tmp_path):
    """250 MB of floats: what is held, a group of mapped bytes, and the layers that are being filled."""
    sizes = dict(vocab_size=4001, hidden_size=768, intermediate_size=2048, num_hidden_layers=8)
    with checkpoints.quiet():
        module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=12))
        module.save_pretrained(tmp_path)
    floats = sum(parameter.nbytes for parameter in module.parameters())
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    peak, held = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert held < 0.31 * floats
    assert peak < 0.65 * floats
