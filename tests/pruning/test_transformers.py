"""transformers' own modules, pruned in place: equal to masking with each implementation, and saved."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import saccade
from pruning.masked import EXACT, assert_equals_masked, masked
from published import transformers
from saccade import models, prune
from saccade.integrations.transformers import register, unregister
from saccade.models.pruned_heads import PRUNED, UNREADABLE
from saccade.pruning._layers import attention_layers

SIZES = dict(
    vocab_size=61,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    intermediate_size=29,
    max_position_embeddings=64,
    pad_token_id=1,
)
GROUPED = dict(SIZES, num_key_value_heads=3)
GPT2 = dict(vocab_size=61, n_embd=24, n_layer=2, n_head=6, n_positions=64)
OPT = dict(SIZES, ffn_dim=29, word_embed_proj_dim=24)
SIDE = dict(layers=2, attention_heads=6, ffn_dim=29)
DISTIL = dict(vocab_size=61, dim=24, n_layers=2, n_heads=6, hidden_dim=29)
# class, configuration, its sizes, the attention of a layer, its output projection
CASES = {
    "BERT": ("BertModel", SIZES, "encoder.layer.{n}.attention.self", "encoder.layer.{n}.attention.output.dense"),
    "ELECTRA": ("ElectraModel", SIZES, "encoder.layer.{n}.attention.self", "encoder.layer.{n}.attention.output.dense"),
    "DistilBERT": (
        "DistilBertModel",
        DISTIL,
        "transformer.layer.{n}.attention",
        "transformer.layer.{n}.attention.out_lin",
    ),
    "GPT-2": ("GPT2Model", GPT2, "h.{n}.attn", "h.{n}.attn.c_proj"),
    "OPT": ("OPTModel", OPT, "decoder.layers.{n}.self_attn", "decoder.layers.{n}.self_attn.out_proj"),
    "Llama": ("LlamaModel", GROUPED, "layers.{n}.self_attn", "layers.{n}.self_attn.o_proj"),
    "Qwen3": ("Qwen3Model", dict(GROUPED, head_dim=4), "layers.{n}.self_attn", "layers.{n}.self_attn.o_proj"),
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()
    yield
    unregister()


def made(name: str, class_name: str | None = None):
    library = transformers()
    base, sizes, attention, output = CASES[name]
    torch.manual_seed(0)
    config = getattr(library, base.removesuffix("Model") + "Config")(**sizes)
    model = getattr(library, class_name or base)(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model, attention, output


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = (torch.arange(9) < torch.tensor([[9], [6]])).long()
    return {"input_ids": torch.randint(2, 61, (2, 9)).where(mask.bool(), 1), "attention_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "saccade"])
@pytest.mark.parametrize("name", CASES)
def test_pruned_in_place_is_masked(name, implementation):
    model, attention, output = made(name)
    model.set_attn_implementation(implementation)
    grouped = "num_key_value_heads" in CASES[name][1]
    removed = {attention.format(n=0): [0, 3, 5] if grouped else [0, 5], attention.format(n=1): [2, 3]}
    given = batch()
    real = given["attention_mask"].bool()
    assert_equals_masked(
        model,
        removed,
        {attention.format(n=n): (output.format(n=n), 4) for n in range(2)},
        lambda one: one(**given).last_hidden_state[real],
    )
    first = model.get_submodule(attention.format(n=0))
    assert first.heads_left.numbers == ((1, 2, 4) if grouped else (1, 2, 3, 4))
    if grouped:
        assert (first.num_key_value_groups, first.k_proj.out_features) == (1, 12)
        assert model.get_submodule(attention.format(n=1)).num_key_value_groups == 2
    if name == "GPT-2":
        assert (first.num_heads, first.split_size, first.c_attn.nf, first.c_proj.nx) == (4, 16, 48, 16)
    if name == "BERT":
        assert (first.num_attention_heads, first.all_head_size) == (4, 16)


@pytest.mark.parametrize(("name", "class_name"), [("GPT-2", "GPT2LMHeadModel"), ("Llama", "LlamaForCausalLM")])
def test_generating_with_a_cache_writes_what_the_masked_model_writes(name, class_name):
    model, _, output = made(name, class_name)
    whole = copy.deepcopy(model)
    prefix = model.base_model_prefix
    masked(whole.get_submodule(f"{prefix}.{output.format(n=1)}"), [2, 3], 4)
    prune(model, {1: [2, 3]})
    ids = torch.randint(2, 61, (2, 5))
    given = dict(attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1] * 5]), max_new_tokens=7, do_sample=False)
    both = [
        one.generate(ids, **given, pad_token_id=1, eos_token_id=None, output_logits=True, return_dict_in_generate=True)
        for one in (model, whole)
    ]
    for mine, theirs in zip(*(torch.stack(found.logits)[None] for found in both), strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize(("name", "class_name"), [("BERT", "BertForMaskedLM"), ("GPT-2", "GPT2LMHeadModel")])
def test_what_transformers_saves_saccade_opens(name, class_name, tmp_path):
    model, _, _ = made(name, class_name)
    report = prune(model, "0.0,0.5,1.3")
    assert report.note == UNREADABLE
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[PRUNED] == {"0": [0, 5], "1": [3]}
    given = batch()
    real = given["attention_mask"].bool()
    got = models.load(tmp_path)(**given).logits[real]
    torch.testing.assert_close(got, model(**given).logits[real], rtol=1e-10, atol=1e-10)
    prune(model, {0: [0]})
    assert getattr(model.config, PRUNED) == {"0": [0, 1, 5], "1": [3]}


def test_sides_of_an_encoder_decoder_have_the_same_names_here_and_there(tmp_path):
    library = transformers()
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in SIDE.items()}
    torch.manual_seed(0)
    model = library.BartForConditionalGeneration(library.BartConfig(vocab_size=61, d_model=24, **sides)).double().eval()
    prune(model, "cross.0.1,cross.0.2,encoder.1.3,decoder.1.0")
    model.save_pretrained(tmp_path)
    removed = json.loads((tmp_path / "config.json").read_text())[PRUNED]
    assert removed == {"encoder.1": [3], "cross.0": [1, 2], "decoder.1": [0]}
    given = dict(input_ids=batch()["input_ids"], decoder_input_ids=batch()["input_ids"][:, :5])
    got = models.load(tmp_path)(**given).logits
    torch.testing.assert_close(got, model(**given).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama"])
def test_layers_are_numbered_as_watching_numbers_them(name):
    model, _, _ = made(name)
    with saccade.watch(model) as watched, torch.no_grad():
        model(**batch())
    assert {site.path: site.layer for site in watched.calls} == {
        layer.path: layer.number for layer in attention_layers(model)
    }


def test_layers_with_equally_many_heads_left_are_a_plain_llama(tmp_path):
    model, _, _ = made("Llama", "LlamaForCausalLM")
    assert prune(model, "0.0,0.1,0.2,0.3,1.0,1.1").note == UNREADABLE
    assert prune(model, "1.0,1.1").note == ""
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert [settings[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")] == [2, 1, 4]
    assert PRUNED not in settings
    again = type(model).from_pretrained(tmp_path)
    given = batch()
    assert torch.equal(again(**given).logits, model(**given).logits)


@pytest.mark.parametrize(
    ("kind", "sizes", "told"),
    [
        (
            "T5EncoderModel",
            dict(vocab_size=61, d_model=24, d_kv=4, num_layers=2, num_heads=6, d_ff=29),
            "unknown names",
        ),
        ("Olmo2Model", GROUPED, r"unknown parameter, q_norm\.weight"),  # one norm over all heads
        (
            "Qwen3NextModel",  # a gate beside each query
            dict(GROUPED, head_dim=4, layer_types=["full_attention"] * 2, mlp_only_layers=[0, 1]),
            r"its projections have \[48, 12, 12\] features, expected \[24, 12, 12\] for heads of width 4",
        ),
        ("BloomModel", dict(vocab_size=61, hidden_size=24, n_layer=2, n_head=6), "unknown names"),
        ("OpenAIGPTModel", dict(vocab_size=61, n_embd=24, n_layer=2, n_head=6), "not those of GPT-2"),
        ("GPTBigCodeModel", dict(vocab_size=61, n_embd=24, n_layer=2, n_head=6), "not those of GPT-2"),
    ],
)
def test_modules_that_hold_something_unknown_are_refused(kind, sizes, told):
    library = transformers()
    config = getattr(library, kind.removesuffix("Model").removesuffix("Encoder") + "Config")(**sizes)
    with pytest.raises(ValueError, match=told):
        prune(getattr(library, kind)(config), {0: [0]})
