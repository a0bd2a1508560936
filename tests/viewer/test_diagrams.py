"""What diagrams say is so: labels, numbers against the model's, parameters against the module's."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import SVG, fills, group, numbers, root, texts
from torch import nn

import saccade
from saccade.inspection import open_model
from saccade.models.checkpoints.settings import CheckpointSettings
from saccade.models.families import FAMILIES
from saccade.models.graphs.attention import GraphAttention
from saccade.models.model import Request
from saccade.nn import (
    AttentionConfig,
    BlockConfig,
    Decoder,
    DecoderBlock,
    EncoderBlock,
    MultiHeadAttention,
    SelfAttention,
)
from saccade.positions import AlibiConfig
from saccade.variants import LongformerConfig
from saccade.variants.patterns import longformer
from saccade.viewer.diagrams._architectures import ARCHITECTURES, ORIGINAL, architecture
from saccade.viewer.diagrams._modules import parameter_count, tree_of, walk

pytestmark = pytest.mark.usefixtures("no_poison")

TEXT = "She said it was cold"
STEP = 0.0051  # numbers have two decimals


@pytest.fixture(scope="module")
def model():
    return open_model(None)


@pytest.fixture(scope="module")
def observed(model):
    """The attention calls of the embedded model on the text, by layer, and what it reads."""
    ids = model.whole(model.encode(TEXT).ids)
    calls = {}
    model.run(ids, calls.__setitem__)
    return ids, calls


def one_head(call, head):
    """q, k, v, scores, weights and output of a head, in numpy from the formula."""
    q, k, v = (x[0, head].double().numpy() for x in (call.query, call.key, call.value))
    scores = q @ k.T
    logits = np.where(np.tri(len(q), dtype=bool), scores / np.sqrt(q.shape[1]), -np.inf)
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    weights = exp / exp.sum(-1, keepdims=True)
    return q, k, v, scores, weights, weights @ v


# --- attention --------------------------------------------------------------------------------------------------------


def test_attention_has_the_labels_of_its_description():
    picture = saccade.diagram("attention", text=TEXT)
    said = texts(root(picture))
    for label in ("Input words", "Query Q", "Key K", "Value V", "Scores QKT", "Attention weights", "Output"):
        assert label in said, label
    for label in ("dot product", "scale", "softmax", "weighted sum"):
        assert label in said, label
    for word in TEXT.split():
        assert said.count(word) >= 8  # a chip, three vectors, rows and columns of two matrices, the output
    grounds = [fills(group(picture, name))[0] for name in ("Query", "Key", "Value")]
    assert len(set(grounds)) == 3


def test_the_numbers_of_attention_are_the_models(observed):
    picture = saccade.diagram("attention", text=TEXT, head="2.5")
    q, k, v, scores, weights, out = one_head(observed[1][2], 5)
    for name, values in (("Query", q), ("Key", k), ("Value", v), ("Output", out)):
        shown = np.reshape(numbers(group(picture, name)), (len(values), 3))
        np.testing.assert_allclose(shown, values[:, :3], atol=STEP)
    shown = np.reshape(numbers(group(picture, "Scores")), scores.shape)
    np.testing.assert_allclose(shown, scores, atol=0.051)  # one decimal from 10 on
    lower = np.tril_indices(len(weights))
    np.testing.assert_allclose(numbers(group(picture, "Attention weights")), weights[lower], atol=STEP)
    np.testing.assert_allclose(picture.facts["weights"], weights, atol=1e-6)


def test_the_sum_under_attention_adds_up():
    picture = saccade.diagram("attention", text=TEXT, head=(1, 7))
    sentence = next(text for text in texts(root(picture)) if text.startswith("Output("))
    row = picture.facts["labels"].index(re.match("Output\\(“(.*?)”\\)", sentence)[1])
    terms = re.findall(r"([\d.]+) V\(“(.*?)”\)", sentence)
    assert len(terms) == 3 and not sentence.endswith("…")
    told = sum(float(w) * picture.facts["value"][picture.facts["labels"].index(word)] for w, word in terms)
    np.testing.assert_allclose(told, picture.facts["out"][row], atol=0.05)


def test_every_number_is_in_the_description_too():
    picture = saccade.diagram("attention", text=TEXT, head="1.7")
    for weight in picture.facts["weights"][np.tril_indices(6)]:
        assert weight < 0.005 or f"{weight:.2f}" in picture.description
    assert root(picture).find(f"{SVG}desc").text == picture.description
    assert root(picture).get("role") == "img"
    assert root(picture).get("aria-labelledby").split()[0] == root(picture).find(f"{SVG}title").get("id")


def test_a_module_alone_reads_random_embeddings():
    torch.manual_seed(3)
    module = SelfAttention(13, 11)
    picture = saccade.diagram(module)
    x = torch.randn(1, 5, 13, generator=torch.Generator().manual_seed(0))
    _, weights = module(x, return_weights=True)
    np.testing.assert_allclose(picture.facts["weights"], weights[0].detach(), atol=1e-6)
    assert "mask" not in texts(root(picture)) and "x5" in texts(root(picture))


def test_everything_between_scores_and_weights_is_told():
    torch.manual_seed(3)
    window = saccade.Window(left=2, right=0)
    config = AttentionConfig(
        24, 4, kv_heads=2, positions=AlibiConfig(), softcap=5.0, sink=True, window=window, scale=0.4
    )
    module = MultiHeadAttention(config).eval()
    picture = saccade.diagram(module, "attention", head=(0, 3))
    said = texts(root(picture))
    steps = ["scale", "softcap", "bias", "mask", "softmax"]
    assert [text for text in said if text in steps] == steps
    assert {"× 0.4", "hide pairs", "a sink takes a share"} <= set(said)
    x = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, weights = module(x, return_weights=True)
    np.testing.assert_allclose(picture.facts["weights"], weights[0, 3], atol=1e-6)
    query, key = (picture.facts[name] for name in ("query", "key"))
    np.testing.assert_allclose(picture.facts["scores"], query @ key.T, atol=1e-6)
    seen = weights[0, 3].numpy()[np.tri(5, dtype=bool) & ~np.tri(5, k=-3, dtype=bool)]
    np.testing.assert_allclose(numbers(group(picture, "Attention weights")), seen, atol=STEP)


# --- heads ------------------------------------------------------------------------------------------------------------


def test_multi_head_has_the_labels_of_its_description():
    picture = saccade.diagram("multi-head", text=TEXT)
    said = texts(root(picture))
    for label in ("Input Embeddings", "Split to Heads", "Concatenate", "Linear Projection", "Output"):
        assert label in said, label
    boxes = [group(picture, f"Self-Attention (Head {head})") for head in range(1, 9)]
    for head, box in enumerate(boxes, 1):
        assert f"Self-Attention (Head {head})" in texts(box)
    assert len({fills(box)[0] for box in boxes}) == 8


def test_the_numbers_of_heads_are_the_models(model, observed):
    picture = saccade.diagram("multi-head", text=TEXT, head="2.0")
    call = observed[1][2]
    outs = []
    for head in range(8):
        *_, weights, out = one_head(call, head)
        outs.append(out)
        np.testing.assert_allclose(picture.facts["weights"][head], weights, atol=1e-6)
        shown = texts(group(picture, f"Self-Attention (Head {head + 1})"))[-1].replace("−", "-").split()[:2]
        np.testing.assert_allclose([float(n) for n in shown], out[-1, :2], atol=STEP)
    matrix = dict(model.module.named_parameters())["decoder.blocks.2.attention.output.weight"].detach().double()
    expected = np.concatenate(outs, -1) @ matrix.numpy().T
    shown = np.reshape(numbers(group(picture, "Output:")), (6, 6))
    np.testing.assert_allclose(shown, expected[:, :6], atol=STEP)
    assert "8 heads, 262,144 parameters." in " ".join(texts(root(picture)))


def test_many_heads_are_folded_and_groups_share_keys():
    torch.manual_seed(3)
    picture = saccade.diagram(MultiHeadAttention(AttentionConfig(36, 12, kv_heads=3)))
    said = texts(root(picture))
    assert "Self-Attention (Head 12)" in said and "Self-Attention (Head 7)" not in said and "5 more" in said
    assert any(text.startswith("12 heads, 3 of keys and values") for text in said)


def test_heads_are_counted_as_the_labels_and_as_the_commands_do():
    module = MultiHeadAttention(AttentionConfig(12, 3))
    for plain in (False, True):
        assert "Head 1 is 2.0 in look and step" in texts(root(saccade.diagram("multi-head", head="2.0", plain=plain)))
        assert "Head 1 has index 0" in texts(root(saccade.diagram(module, plain=plain)))


# --- plain ------------------------------------------------------------------------------------------------------------


def test_a_plain_picture_of_attention_has_words_and_no_numbers():
    said = texts(root(saccade.diagram("attention", text=TEXT, plain=True)))
    for label in ("Input words", "Query", "Key", "Value", "dot product", "Attention weights", "weighted sum", "Output"):
        assert label in said, label
    assert "scale, mask, softmax" in said
    assert all(said.count(word) == 3 for word in ["start", *TEXT.split()])  # a chip, and both sides of the weights
    assert not re.search(r"[\d…<_^{]", "".join(said))


def test_a_plain_picture_of_heads_has_the_prescribed_labels():
    said = texts(root(saccade.diagram("multi-head", text=TEXT, plain=True)))
    labels = ["Input Embeddings", "Split to Heads", "Concatenate", "Linear Projection", "Output"]
    assert set(labels) < set(said)
    numbered = [text for text in said if re.search(r"\d", text)]
    assert numbered == [*(f"Self-Attention (Head {n})" for n in range(1, 9)), "Head 1 is 1.0 in look and step"]


def test_tokens_of_a_word_are_one_word_in_a_plain_picture(model):
    text = "Extraordinary cats"
    first = [i for i, (start, _) in enumerate(model.encode(text).spans, 1) if start < 13]
    rest = [i for i, (start, _) in enumerate(model.encode(text).spans, 1) if start >= 13]
    assert len(first) > 1
    fine, plain = (saccade.diagram("attention", text=text, head="1.7", plain=plain) for plain in (False, True))
    assert plain.facts["labels"] == ["start", *text.split()]
    w, groups = fine.facts["weights"], ([0], first, rest)
    expected = [[sum(w[i, j] for i in rows for j in keys) / len(rows) for keys in groups] for rows in groups]
    np.testing.assert_allclose(plain.facts["weights"], expected, atol=1e-9)
    widths = [9 * weight for row in expected for weight in row if weight >= 0.05]
    lines = group(plain, "Attention weights").iter(f"{SVG}path")
    np.testing.assert_allclose([float(line.get("stroke-width")) for line in lines], widths, atol=0.01)


# --- blocks and models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [ORIGINAL, *ARCHITECTURES])
def test_parameters_of_families_add_up(name):
    _, module = architecture(name)
    parts = tree_of(module)
    assert sum(part.total() for part in parts) == parameter_count(module)
    picture = saccade.diagram(module)
    said = " ".join(texts(root(picture)))
    for part in walk(parts):
        if part.kind not in ("side", "block"):
            assert f"{part.parameters:,}" in said and part.label in said, part.label
    assert f"{parameter_count(module):,} parameters" in said


def of_family(family, model_type):
    """A model of a family with its head, at the sizes that the family's own defaults or `ARCHITECTURES` give."""
    given = next((sizes for _, kind, _, _, sizes in ARCHITECTURES.values() if kind in family.types), {})
    settings = CheckpointSettings({**given, "model_type": model_type}, Path("settings"))
    settings.stored = frozenset(str(i) for i in range(999))
    request = Request(next(iter(family.heads), None), 2)
    with torch.device("meta"):
        model = family.build(settings, request)
    model.settings, model.request, model.family = settings, request, family
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("family", "model_type"), [(f, kind) for f in FAMILIES for kind in f.types])
def test_every_family_has_its_pictures(family, model_type):
    module = of_family(family, model_type)
    whole = saccade.diagram(module, "transformer")
    assert whole.facts["parameters"] == parameter_count(module) and len(texts(root(whole))) > 5
    picture = saccade.diagram(module, "block")
    parts = [part for part in walk(tree_of(module)) if part.kind == "block" or "graph" in part.facts][:2]
    said = texts(root(picture))
    assert parts and all(f"{part.parameters:,} parameters" in said for part in parts)
    assert picture.facts["parameters"] == [part.parameters for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("name", [ORIGINAL, *ARCHITECTURES])
def test_published_names_have_their_blocks(name):
    assert len(texts(root(saccade.diagram("block", model=name)))) > 5


@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_a_layer_of_graph_attention(kind):
    layer = GraphAttention(17, 3, 5, kind=kind)
    picture = saccade.diagram(nn.ModuleList([layer]), "block")
    said = texts(root(picture))
    assert {"W: 17 → 3 heads × 5", "x: N nodes × 17", "out: N × 15", "heads side by side, plus a bias"} <= set(said)
    assert picture.facts["parameters"] == [parameter_count(layer)]
    assert any("LeakyReLU(a · Wxi" in text for text in said) == (kind == "gat")
    assert "over the edges j → i" in " ".join(said) and "reads the nodes from which edges lead" in picture.description


@pytest.mark.slow
def test_published_sizes_are_the_published_ones():
    published = {"gpt2": 124_439_808, "llama": 6_738_415_616, "t5": 60_506_624, "bart": 139_420_416, "vit": 86_567_656}
    assert {name: parameter_count(architecture(name)[1]) for name in published} == published


def test_layers_that_are_alike_are_one_frame_with_their_sum(model):
    picture = saccade.diagram("transformer")
    stacks = [part for part in walk(tree_of(model.module)) if part.kind == "stack"]
    assert [(part.repeat, part.parameters) for part in stacks] == [(4, 4 * 803_328)]
    (block,) = stacks[0].parts
    boxes = [*block.parts, *(norm for part in block.parts for norm in part.parts)]
    assert sum(box.parameters for box in boxes) == 803_328
    assert {"4 ×", "3,213,312", "3,737,856 parameters"} <= {text.split(": ")[-1] for text in texts(root(picture))}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [False, True])
def test_pytorchs_own_transformer(norm_first):
    module = nn.Transformer(20, 4, 2, 3, 31, norm_first=norm_first)
    picture = saccade.diagram(module)
    said = texts(root(picture))
    placement = "pre" if norm_first else "post"
    assert {"2 ×", "3 ×", f"Encoder block, {placement}-norm", f"Decoder block, {placement}-norm"} <= set(said)
    assert picture.facts["parameters"] == parameter_count(module)
    assert said.count("Cross-attention") == 1


@pytest.mark.parametrize("placement", ["pre", "post", "parallel"])
def test_blocks_tell_their_norms_apart(placement):
    block = EncoderBlock(BlockConfig(AttentionConfig(24, 4, kv_heads=2), hidden=37, placement=placement))
    picture = saccade.diagram(block)
    said = texts(root(picture))
    assert f"Encoder block, {placement}" + "-norm" * (placement != "parallel") in said
    assert picture.facts["parameters"] == [parameter_count(block)]
    for label in ("gate: 24 → 37, SiLU", "up: 24 → 37", "down: 37 → 24", "WQ: 24 → 24", "WK: 24 → 12"):
        assert label in said, label
    norm, attention = said.index("RMS norm"), said.index("Self-attention")
    assert (norm < attention) == (placement != "post")


def test_a_decoder_block_reads_the_encoder():
    config = AttentionConfig(24, 4)
    cross = AttentionConfig(24, 4, context_width=17)
    block = DecoderBlock(BlockConfig(config, cross=cross, activation="relu"))
    said = texts(root(saccade.diagram(block)))
    assert "Cross-attention" in said and "encoder" in said and "WK: 17 → 24" in said


def test_layers_of_others_are_drawn_without_an_order():
    """Modules tell which parts they have, not how their code joins them."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.first, self.last = nn.MultiheadAttention(8, 2), nn.Linear(8, 9), nn.Linear(9, 8)

    module = nn.Sequential(nn.Embedding(7, 8), nn.ModuleList(Layer() for _ in range(3)), nn.Linear(8, 7))
    picture = saccade.diagram(module)
    heads = [path for path in root(picture).iter(f"{SVG}path") if path.get("fill") != "none"]
    assert len(heads) == 4  # into the embedding, the layers, the last map, and out: none within the layers
    assert {"3 ×", "Layer, its parts"} <= set(texts(root(picture)))
    assert picture.facts["parameters"] == parameter_count(module)


def test_shared_parameters_count_once():
    module = nn.ModuleDict({"tokens": nn.Embedding(29, 24), "decoder": Decoder(BlockConfig(AttentionConfig(24, 4)), 2)})
    module["head"] = module["tokens"]
    picture = saccade.diagram(module)
    assert picture.facts["parameters"] == parameter_count(module)
    assert "+ 0" in texts(root(picture))


# --- a step, and variants ---------------------------------------------------------------------------------------------


def test_a_step_with_the_cache_is_the_last_row_of_the_parallel_form(model, observed):
    ids, calls = observed
    picture = saccade.diagram("decoder-step", text=TEXT, head="1.7")
    *_, weights, _ = one_head(calls[1], 7)
    np.testing.assert_allclose(picture.facts["weights"], weights[-1], atol=1e-5)
    np.testing.assert_allclose(numbers(group(picture, "Attention weights")), weights[-1], atol=STEP)
    assert picture.facts["before"] == (1, 8, 5, 32) and picture.facts["after"] == (1, 8, 6, 32)
    assert picture.facts["token_bytes"] == 4 * 2 * 8 * 32 * 4
    with torch.no_grad():
        shares = model.module(ids)[0, -1].softmax(-1)
    assert [share for _, share in picture.facts["following"]] == pytest.approx(shares.topk(3).values.tolist(), abs=1e-5)
    assert {"New token", "K cache", "V cache", "append", "Next token"} <= set(texts(root(picture)))


def test_variants_show_the_pairs_of_masks():
    picture = saccade.diagram("variants")
    pairs = picture.facts["pairs"]
    assert (pairs["Causal"] == np.tri(16, dtype=bool)).all()
    expected = longformer(4, global_tokens=[0]).dense(16, 16)[0, 0].numpy()
    assert (pairs["Longformer"] == expected).all()
    assert pairs["Full"].all() and [name for name, found in pairs.items() if found is None] == [
        "Linear",
        "Gated delta rule",
        "Performer",
        "Linformer",
        "Nyström",
    ]
    for name, found in pairs.items():
        if found is not None:
            drawn = group(picture, name + ":").findall(f"{SVG}path")[0].get("d")
            assert sum(float(w) * float(h) for w, h in re.findall(r"h([\d.]+)v([\d.]+)", drawn)) == found.sum() * 100


def test_pairs_of_a_mechanism_are_probed():
    picture = saccade.diagram(LongformerConfig(4, global_tokens=(2,)))
    (pairs,) = picture.facts["pairs"].values()
    assert (pairs == longformer(4, global_tokens=[2]).dense(16, 16)[0, 0].numpy()).all()
    reformer = saccade.diagram("variants").facts["pairs"]["Reformer"]
    assert reformer.any(1).all() and reformer.sum() < 128
