"""Models of real size: layers and tokens that repeat are left out; limits grow with a model and are never its fault."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from saccade.integrations._verification import size_of_weights
from saccade.verification import Limits, Reading
from saccade.verification.checks import CHECKS
from saccade.verification.running import _child, _deaths
from saccade.verification.running._run import run_check
from saccade.verification.subject import _shortened
from saccade.verification.subject._check import Check
from saccade.verification.subject._load import load
from saccade.verification.subject._subject import Subject
from saccade.verification.subject.discovery._discover import discover

TOKENS = torch.tensor([[3, 11, 2, 7, 5], [13, 1, 17, 4, 9]])


@pytest.fixture(autouse=True)
def small_counts_as_large(monkeypatch):
    monkeypatch.setattr(_shortened, "LARGE", 11)
    monkeypatch.setattr(_shortened, "_TOKENS", 19)


def gemma(layer_types, vocabulary=97):
    torch.manual_seed(5)
    config = transformers.Gemma2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=37,
        sliding_window=3,
        max_position_embeddings=64,
    )
    return transformers.Gemma2ForCausalLM(config).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def test_the_first_layer_of_each_kind_stays_and_the_first_tokens():
    window, full = "sliding_attention", "full_attention"
    whole = gemma([window, window, full, window, full])
    before = logits(whole)
    short, (words,) = _shortened.shortened(whole)
    by_hand = gemma([window, full], vocabulary=19)
    own = whole.state_dict()
    tensors = {name.replace("layers.2.", "layers.1."): own[name] for name in own if ".layers." not in name}
    tensors |= {
        name: own[name.replace("layers.1.", "layers.2.")] for name in by_hand.state_dict() if ".layers." in name
    }
    by_hand.load_state_dict(
        {name: tensor[:19] if tensor.shape[0] == 97 else tensor for name, tensor in tensors.items()}
    )
    assert "2 of 5 model.layers (0, 2) and 19 of 97 tokens" in words
    assert torch.equal(logits(short), logits(by_hand))
    assert [layer.self_attn.layer_idx for layer in short.model.layers] == [0, 1]
    assert len(whole.model.layers) == whole.config.num_hidden_layers == 5
    assert torch.equal(logits(whole), before)


def test_parameters_are_shared():
    whole = gemma(["full_attention"] * 4)
    short = _shortened.shortened(whole)[0]
    first = short.model.layers[0].self_attn.q_proj.weight
    assert first is whole.model.layers[0].self_attn.q_proj.weight


def test_a_model_of_few_parameters_keeps_its_layers_and_not_its_tokens():
    whole = gemma(["full_attention"] * 4)
    count = sum(parameter.numel() for parameter in whole.parameters())
    short, (words,) = _shortened.shortened(whole, whole=count)
    assert len(short.model.layers) == 4 and "19 of 97 tokens" in words and "layers" not in words
    assert len(_shortened.shortened(whole, whole=count - 1)[0].model.layers) == 2


def test_a_layer_that_differs_from_the_others_stays():
    class Leaky(nn.Linear):
        pass

    whole = gemma(["full_attention"] * 5)
    whole.model.layers[3].mlp.down_proj = Leaky(37, 32, bias=False)
    whole.model.layers[4].forward = lambda x, *_, **__: x
    words = _shortened.shortened(whole)[1][0]
    assert "3 of 5 model.layers (0, 3, 4)" in words


def test_what_needs_all_its_layers_is_tested_whole():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(97, 8)
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 11, batch_first=True) for _ in range(4))

        def forward(self, tokens):
            x = self.table(tokens)
            for at in range(4):
                x = self.layers[at](x)
            return x

    subject = discover(Counts())
    assert len(subject.target.layers) == 4 and not any("large" in one for one in subject.reading.assumed)


def test_a_model_from_a_folder_is_shortened_and_the_report_says_so(tmp_path):
    gemma(["full_attention"] * 4).save_pretrained(tmp_path)
    subject = discover(load(f"hf:{tmp_path}"))
    assert len(subject.target.model.layers) == 2 and subject.reading.vocabulary == 19
    assert "2 of 4 model.layers (0, 1)" in subject.reading.assumed[0]
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size_of_weights(str(tmp_path)) == 2 * size == _child._known_size(f"hf:{tmp_path}")


def test_limits_grow_with_the_model():
    assert Limits(60.0, 4.0).of_size(3 * 2**30) == Limits(240.0, 16.0)


class Hungry(nn.Module):
    """Raises as PyTorch does where memory ends."""

    def __init__(self, floats, asked):
        super().__init__()
        self.weight, self.asked = nn.Parameter(torch.zeros(floats)), asked

    def forward(self, x):
        raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {self.asked} bytes.")


@pytest.mark.parametrize(
    ("floats", "asked", "blamed"),
    [(5 * 2**20, 5242880, False), (5 * 2**20, 9 * 2**30, True), (7, 5242880, True)],
    ids=["a large model", "a large model that asks for gigabytes", "a small one"],
)
def test_our_limit_is_not_the_fault_of_a_large_model(floats, asked, blamed):
    subject = Subject(Hungry(floats, asked), Reading("self", "BLD", 11, 1))
    check = Check("scale", "scale", "", "", "", lambda one: iter((one(one.inputs()),)))
    done = run_check(check, subject)
    assert [finding.severity for finding in done.findings] == (["error"] if blamed else [])
    assert done.outcome.status == ("failed" if blamed else "n/a")
    assert blamed or "not measured" in done.outcome.reason


@pytest.mark.parametrize(("size", "status"), [(2**25, "n/a"), (7, "failed")])
def test_a_large_model_that_is_slow_is_not_to_blame(size, status):
    told = _deaths.as_message(_deaths.ChildDeath("time", "scale", 0, 60.0), CHECKS, size)
    assert told.outcome.status == status and bool(told.findings) == (status == "failed")
