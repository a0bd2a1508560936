"""Every family of `saccade.models`: pruned and masked are equal, and what is saved opens again, here and elsewhere."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from pruning.masked import EXACT, assert_equals_masked, masked
from published import sources_and_targets, transformers, without_rounding, written
from saccade import models, prune
from saccade.models.pruned_heads import PRUNED, UNREADABLE

BERT = dict(
    vocab_size=101,
    hidden_size=42,
    num_hidden_layers=2,
    num_attention_heads=6,
    intermediate_size=53,
    max_position_embeddings=67,
    pad_token_id=1,
)
GPT2 = dict(vocab_size=101, n_embd=42, n_layer=2, n_head=6, n_positions=67)
NEO = dict(
    vocab_size=101,
    hidden_size=42,
    num_layers=2,
    num_heads=6,
    attention_types=[[["global", "local"], 1]],
    window_size=5,
    max_position_embeddings=67,
)
LLAMA = dict(**{**BERT, "hidden_size": 36}, head_dim=8, num_key_value_heads=3, tie_word_embeddings=False)
SIDES = dict(
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=6,
    decoder_attention_heads=6,
    encoder_ffn_dim=53,
    decoder_ffn_dim=53,
)
BART = dict(vocab_size=101, d_model=42, max_position_embeddings=67, pad_token_id=1, decoder_start_token_id=2, **SIDES)
T5 = dict(vocab_size=101, d_model=37, d_kv=7, num_layers=2, num_heads=6, d_ff=53, decoder_start_token_id=1)
VIT = dict(
    hidden_size=42, num_hidden_layers=2, num_attention_heads=6, intermediate_size=53, image_size=14, patch_size=7
)
SOUND = dict(
    **{name: BERT[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
    conv_dim=(19, 19),
    conv_kernel=(5, 3),
    conv_stride=(3, 2),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=5,
    num_conv_pos_embedding_groups=3,
    vocab_size=31,
)
SERIES = dict(
    num_input_channels=2,
    context_length=24,
    patch_length=4,
    patch_stride=4,
    d_model=42,
    num_attention_heads=6,
    num_hidden_layers=2,
    ffn_dim=53,
    norm_type="layernorm",
)
ONE = {"{stack}.blocks.0.attention": [1, 4, 5], "{stack}.blocks.1.attention": [0]}
PAIRS = {"{stack}.blocks.0.attention": [0, 1, 2, 4], "{stack}.blocks.1.attention": [2, 3]}  # of two to a key head
BOTH = {
    "encoder.blocks.1.attention": [2],
    "decoder.blocks.0.attention": [1, 3, 4],
    "decoder.blocks.1.cross": [0, 5],
}
CASES = {
    "BERT": ("BertForMaskedLM", "BertConfig", BERT, "encoder", ONE),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", BERT, "encoder", ONE),
    "DistilBERT": (
        "DistilBertModel",
        "DistilBertConfig",
        dict(vocab_size=101, dim=42, n_layers=2, n_heads=6, hidden_dim=53, max_position_embeddings=67),
        "encoder",
        ONE,
    ),
    "ELECTRA": ("ElectraModel", "ElectraConfig", dict(BERT, embedding_size=23), "encoder", ONE),
    "ESM-2": (
        "EsmForMaskedLM",
        "EsmConfig",
        dict(BERT, hidden_size=48, position_embedding_type="rotary"),
        "encoder",
        ONE,
    ),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2, "decoder", ONE),
    "GPT-Neo": ("GPTNeoForCausalLM", "GPTNeoConfig", NEO, "decoder", ONE),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA, "decoder", PAIRS),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", LLAMA, "decoder", PAIRS),
    "BART": ("BartForConditionalGeneration", "BartConfig", BART, "", BOTH),
    "Marian": ("MarianMTModel", "MarianConfig", BART, "", BOTH),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5, "", BOTH),
    "ViT": ("ViTModel", "ViTConfig", VIT, "encoder", ONE),
    "wav2vec 2.0": ("Wav2Vec2Model", "Wav2Vec2Config", SOUND, "encoder", ONE),
    "PatchTST": ("PatchTSTForPrediction", "PatchTSTConfig", dict(SERIES, prediction_length=5), "encoder", ONE),
}


def inputs(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    if name == "ViT":
        return {"pixel_values": torch.randn(2, 3, 14, 14, dtype=torch.float64)}
    if name == "wav2vec 2.0":
        return {"input_values": torch.randn(2, 151, dtype=torch.float64)}
    if name == "PatchTST":
        return {"past_values": torch.randn(2, 24, 2, dtype=torch.float64)}
    both = sources_and_targets()
    return both if name in ("BART", "Marian", "T5") else {key: both[key] for key in ("input_ids", "attention_mask")}


def read(name: str):
    given = inputs(name)

    def run(model):
        out = model(**given)
        return [x for x in (out.last_hidden_state, out.logits, out.prediction_outputs) if x is not None]

    return run


def opened(folder, name: str) -> tuple[models.Model, dict[str, list[int]], dict[str, tuple[str, int]]]:
    class_name, config, sizes, stack, removed = CASES[name]
    theirs = getattr(transformers(), config)(**sizes)
    theirs.layerdrop = 0.0
    written(folder, class_name, theirs)
    model = models.load(folder, dtype=torch.float64)
    model.contact_head = None  # of ESM-2, which reads the maps of all heads
    removed = {path.format(stack=stack): heads for path, heads in removed.items()}
    width = model.get_submodule(next(iter(removed))).shape.value_head
    return model, removed, {path: (f"{path}.output", width) for path in removed}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_pruned_family_is_the_masked_one_and_opens_again(name, tmp_path):
    model, removed, outputs = opened(tmp_path / "whole", name)
    pruned = assert_equals_masked(model, removed, outputs, read(name))
    with pytest.warns(UserWarning, match=UNREADABLE):
        pruned.save(tmp_path / "pruned")
    again = models.load(tmp_path / "pruned")
    for x, y in zip(read(name)(pruned), read(name)(again), strict=True):
        assert torch.equal(x, y)
    layer = next(iter(removed))
    prune(again, {layer: [0]})  # goes on in the numbers of what is left, and is saved in those of the first model
    with pytest.warns(UserWarning, match=UNREADABLE):
        again.save(tmp_path / "twice")
    twice = models.load(tmp_path / "twice")
    assert torch.equal(read(name)(again)[0], read(name)(twice)[0])


def test_what_the_published_format_can_say_opens_in_transformers(tmp_path):
    model, _, _ = opened(tmp_path / "whole", "Llama")
    whole = copy.deepcopy(model)
    for layer in range(2):
        masked(whole.get_submodule(f"decoder.blocks.{layer}.attention.output"), [2 * layer, 2 * layer + 1], 8)
    report = prune(model, "0.0,0.1,1.2,1.3")
    assert report.note == ""
    model.save(tmp_path / "pruned")
    settings = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert (settings["num_attention_heads"], settings["num_key_value_heads"], settings["head_dim"]) == (4, 2, 8)
    assert PRUNED not in settings
    theirs = transformers().LlamaForCausalLM.from_pretrained(tmp_path / "pruned", dtype=torch.float64)
    theirs = without_rounding(theirs)
    given = inputs("Llama")
    real = given["attention_mask"].bool()
    expected = whole(**given).logits[real]
    torch.testing.assert_close(theirs(**given).logits[real], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(models.load(tmp_path / "pruned")(**given).logits[real], expected, **EXACT)


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ({"2": [0]}, r"expected an object with lists of heads by layer, of 0, 1, got"),
        ([0], r"expected an object with lists of heads by layer"),
        ({"1": [6]}, r"some of the heads 0 to 5, not all of them, got \[6\]"),
        ({"0": list(range(6))}, "not all of them"),
        ({"1": [0]}, r"does not fit:(.|\n)*of another shape"),
    ],
)
def test_a_damaged_extension_is_one_message(saved, told, tmp_path):
    opened(tmp_path, "BERT")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), PRUNED: saved}))
    with pytest.raises(ValueError, match=told):
        models.load(tmp_path)


def test_generation_from_a_cache_and_padded_prompts(tmp_path):
    model, removed, outputs = opened(tmp_path, "Llama")
    whole = copy.deepcopy(model)
    for path, heads in removed.items():
        masked(whole.get_submodule(outputs[path][0]), heads, outputs[path][1])
    prune(model, removed)
    torch.manual_seed(0)
    ids = torch.randint(2, 101, (2, 7))
    mask = (torch.arange(7) >= torch.tensor([[3], [0]])).long()
    caches = model.cache(), whole.cache()
    for part in (slice(0, 5), slice(5, 6), slice(6, 7)):
        got, expected = (
            one.next_logits(ids[:, part], mask[:, part], cache)
            for one, cache in zip((model, whole), caches, strict=True)
        )
        torch.testing.assert_close(got, expected, **EXACT)


def test_graphs_with_biases_of_pairs_and_graphs_without_a_projection():
    torch.manual_seed(0)
    settings = dict(node_types=17, hidden_size=24, num_attention_heads=6, num_hidden_layers=2, intermediate_size=23)
    model = models.new_graph_model("saccade-graphormer", **settings, max_degree=3, max_hops=4).double().eval()
    given = dict(x=torch.randint(0, 17, (11,)), edge_index=torch.randint(0, 11, (2, 14)))
    with torch.no_grad():
        model.hops.normal_()
    layer = "encoder.blocks.1.attention"
    assert_equals_masked(
        model, {layer: [0, 3]}, {layer: (f"{layer}.output", 4)}, lambda one: one(**given).last_hidden_state
    )
    graph = models.new_graph_model("saccade-gat", num_features=7, num_attention_heads=2, hidden_size=6)
    with pytest.raises(ValueError, match="concatenated without a projection"):
        prune(graph, {0: [0]})


def test_contacts_are_read_from_the_maps_of_all_heads(tmp_path):
    sizes = dict(BERT, hidden_size=48, position_embedding_type="rotary")
    written(tmp_path, "EsmModel", transformers().EsmConfig(**sizes))
    model = models.load(tmp_path)
    assert model.contact_head is not None
    with pytest.raises(ValueError, match="contact_head predicts contacts from the maps of all heads"):
        prune(model, {0: [0]})
    model.contact_head = None
    prune(model, {0: [0]})


@pytest.mark.slow
def test_the_language_model_of_saccades_own(tmp_path):
    lm = models.load().double()
    layer = "model.decoder.blocks.2.attention"
    roles = {(one["layer"], one["head"]): one for one in lm.heads["heads"]}
    ids = torch.randint(0, 2048, (2, 13))
    real = torch.ones(2, 13, dtype=torch.long)
    real[1, :4] = 0
    pruned = assert_equals_masked(
        lm,
        {layer: [1, 6]},
        {layer: (f"{layer}.output", 32)},
        lambda model: model(ids, real).logits[real.bool()],
    )
    pruned.save(tmp_path)
    again = models.load(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["pruned_heads"] == [[], [], [1, 6], []]
    assert torch.equal(again(ids).logits, pruned.bfloat16().float()(ids).logits)  # stored in bfloat16
    left = {(one["layer"], one["head"]): one["role"] for one in again.heads["heads"]}
    assert len(left) == len(roles) - 2
    assert left[2, 1] == roles[2, 2]["role"] and left[2, 5] == roles[2, 7]["role"]
    from saccade.inspection import open_model

    assert open_model(tmp_path).heads == (8, 8, 6, 8)


@pytest.mark.parametrize("removed", [[[0]], [[0], [], [], [9]], [list(range(8)), [], [], []], "0.1"])
def test_a_configuration_with_impossible_heads_is_refused(removed):
    values = {**models.load().model.config.to_dict(), "pruned_heads": removed}
    with pytest.raises(ValueError, match="pruned_heads"):
        models.ModelConfig.from_dict(values)
