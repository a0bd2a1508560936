"""Attention step by step: every number against the model's own calls, transformers, and numpy by hand."""

from __future__ import annotations

import json
import re

import checkpoints
import numpy as np
import pytest
import torch
import transformers
from test_transformers import dense

import saccade
from saccade import step
from saccade.inspection import SWITCHES, Word, example, open_model, step_of_call, step_of_tokens
from saccade.inspection._models import TextModel, Tokens
from saccade.inspection._steps._chosen_word import find_word
from saccade.inspection._steps._json import mathml
from saccade.inspection._words import split_words
from saccade.nn import AttentionConfig, BlockConfig, Decoder, Encoder
from saccade.operator._call import AttentionCall
from saccade.positions import AlibiConfig, RotaryConfig, T5Config
from slowly import slow_but

SENTENCE = "The cat sat on the mat because it was soft, and it was dark."
TEXT = "The cat sat on the shelves, untouched: when Nobody knows catalogues, the man was gone."
FAMILIES = ("bert", "roberta", "gpt2", "llama", "t5")


@pytest.fixture(scope="module")
def embedded():
    return open_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def get(name, **more):
        if name not in made:
            made[name] = getattr(checkpoints, name)(tmp_path_factory.mktemp("models") / name, **more)
        return made[name]

    return get


def observed(model, ids, layer, row):
    """What the model's own call of a layer had and gave, what its attention read and gave, by the model's own hooks."""
    seen = {}

    def keep(at, call):
        if at == layer:
            seen["call"] = call
            seen["weights"] = saccade.attention_weights(call.query, call.key, **call.scoring())

    block = model.stack.blocks[layer]
    hooks = [
        block.register_forward_pre_hook(lambda module, given: seen.__setitem__("x", given[0])),
        block.attention.register_forward_hook(lambda module, given, out: seen.__setitem__("a", out)),
        block.attention.register_forward_pre_hook(lambda module, given: seen.__setitem__("n", given[0])),
    ]
    if block.config.placement == "pre":
        hooks.append(
            block.feed_forward_norm.register_forward_pre_hook(lambda m, given: seen.__setitem__("y", given[0]))
        )
    else:
        hooks.append(block.feed_forward.register_forward_pre_hook(lambda m, given: seen.__setitem__("y", given[0])))
    try:
        model.run(ids, keep)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def close(ours, theirs, tolerance=1e-5):
    theirs = theirs.detach().double().numpy()
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= tolerance * max(1.0, np.abs(theirs).max())


def vector(steps, id, name):
    return next(v.values for v in steps[id].vectors if v.name == name)


def column(steps, id, name):
    return next(c.values for c in steps[id].columns if c.name == name)


def check_against_the_model(steps, model, ids):
    layer, head, row = steps.layer, steps.head, steps.row
    seen = observed(model, ids, layer, row)
    call = seen["call"]
    query, key = steps.numbers.placed
    close(query, call.query[0, head, row])
    close(key, call.key[0, head // (call.query.shape[1] // call.key.shape[1])])
    # A weight is off by what its score is: float32 rounds a sum of size s by some 2^-23 s. Trained models' are small.
    close(steps.weights, seen["weights"][0, head, row], max(1e-6, 2**-22 * np.abs(steps.scores.products).max()))
    close(steps.output, call.out[0, head, row])
    close(vector(steps, "output", "a"), seen["a"][0, row])
    if "norm" in [s.id for s in steps]:
        close(vector(steps, "norm", "x"), seen["x"][0, row])
        close(vector(steps, "norm", "n"), seen["n"][0, row])
    if model.stack.blocks[layer].config.placement in ("pre", "post"):
        close(vector(steps, "residual", "y"), seen["y"][0, row])
    assert max(steps.differences.values()) < 1e-5
    return call


@pytest.mark.parametrize("head", [(0, 0), (1, 4), (3, 7)])
def test_the_embedded_models_numbers(embedded, head):
    steps = step(SENTENCE, head, "it")
    tokens = embedded.encode(SENTENCE)
    assert steps.labels[steps.row] == "it" and steps.weights[steps.row + 1 :].sum() == 0
    check_against_the_model(steps, embedded, embedded.whole(tokens.ids))
    table = embedded.lm.model.embedding.weight[tokens.ids[steps.row - 1]].detach().double().numpy()
    np.testing.assert_allclose(vector(steps, "token", "x_0"), 16 * table, rtol=1e-6)
    assert [s.id for s in steps if s.switch] == ["position", "scale", "mask", "softmax"]


def test_what_sentences_say_of_the_numbers_is_true(embedded):
    """The norm before its factors, the head's own part of c, and means over the keys that the row sees."""
    steps = step(SENTENCE, (1, 2), "it")
    x, g, n = (vector(steps, "norm", name) for name in "xgn")
    close(g, embedded.stack.blocks[1].attention_norm.weight)
    assert abs(np.linalg.norm(n / g) - 16) < 1e-4 and "the same norm, √256 = 16." in steps["norm"].says
    assert f"|x| is {np.linalg.norm(x):.3g}, and |n| is {np.linalg.norm(n):.3g}." in steps["norm"].without
    own = vector(steps, "concat", "o_2 = c[64:96]")
    assert (own == steps.output).all() and (own == vector(steps, "concat", "c")[64:96]).all()
    seen = steps.numbers.value[: steps.row + 1]  # the mask is causal
    moved = np.linalg.norm(steps.output - seen.mean(0))
    assert f"of all visible keys, whatever the query asks: |o − mean| is {moved:.3g}," in steps["sum"].without
    assert "every visible key would get the same weight, 1/10 = 0.1." in steps["dot"].without


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layer", [0, 1])
def test_published_families(folder, name, layer):
    model = open_model(folder(name))
    steps = step(TEXT, (layer, 2), "knows", model)
    ids = model.whole(model.encode(TEXT).ids)
    check_against_the_model(steps, model, ids)
    _, _, weights = dense(folder(name), TEXT)  # transformers' own
    assert np.abs(steps.weights - weights[layer, 2, steps.row]).max() < 300 * 2**-22
    assert ("position" in steps.switches) == (name in ("llama", "t5"))
    assert ("mask" in steps.switches) == (name in ("gpt2", "llama"))


@pytest.mark.slow
def test_grouped_heads_share_keys(folder):
    steps = [step(TEXT, (1, head), "knows", folder("llama")) for head in range(6)]
    assert [s.numbers.inputs.kv_head for s in steps] == [0, 0, 0, 1, 1, 1]
    keys = [vector(s, "project", "k of 'knows'") for s in steps]
    assert np.array_equal(keys[0], keys[2]) and not np.array_equal(keys[2], keys[3])
    assert "3 query heads share one key and value head, here number 1" in steps[3]["project"].says


def test_t5s_bias_is_its_table_and_can_be_left_out(folder):
    model = open_model(folder("t5"))
    steps = step(TEXT, (1, 1), "man", model, without=["position"])
    call = observed(model, model.whole(model.encode(TEXT).ids), 1, steps.row)["call"]
    distance = torch.arange(len(steps.labels)) - steps.row
    expected = call.bias.parameter[call.bias.buckets(distance), 1].detach().double().numpy()
    np.testing.assert_allclose(column(steps, "bias", "b"), expected, atol=1e-7)
    plain = (call.query[0, 1, steps.row].double() @ call.key[0, 1].double().T).softmax(-1).numpy()
    np.testing.assert_allclose(steps.weights_without, plain, atol=1e-6)
    assert steps["bias"].switch == "position" and "scale" not in [s.id for s in steps]  # T5 does not scale
    with pytest.raises(ValueError, match="scale cannot be left out: this head does not scale its dot products"):
        step(TEXT, (1, 1), "man", model, without=["scale"])


def test_a_sliding_window_hides_what_is_behind_it(tmp_path):
    config = transformers.MistralConfig(
        hidden_size=30, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, intermediate_size=29,
        max_position_embeddings=47, sliding_window=4,
    )  # fmt: skip
    made = checkpoints._saved(tmp_path / "m", transformers.MistralModel, config, checkpoints._sentence_pieces())
    model = open_model(made)
    steps = step(TEXT, (1, 2), "gone", model, without="mask")
    check_against_the_model(steps, model, model.whole(model.encode(TEXT).ids))
    assert (steps.weights > 0).sum() == 4 and (steps.weights_without > 0).sum() == len(steps.labels)
    hidden = len(steps.labels) - 4
    assert f"{hidden} tokens of {hidden + 4} are not to be seen from here" in steps["mask"].says


DECIMAL = re.compile(r"-?\d+\.\d+")


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_transformers_class_has_the_steps_of_the_family_here(folder, monkeypatch, name):
    """Two implementations: of the second nothing is known, and its modules are found by what they read and give."""
    known = step(TEXT, (1, 2), "knows", open_model(folder(name)))
    monkeypatch.setattr("saccade.inspection._open.is_known", lambda model_type: False)
    found = step(TEXT, (1, 2), "knows", open_model(folder(name)))
    assert [(each.id, each.formula) for each in found] == [(each.id, each.formula) for each in known]
    assert found.notes == known.notes
    for ours, theirs in zip(found, known, strict=True):
        for one, two in zip(ours.vectors, theirs.vectors, strict=True):
            assert DECIMAL.sub("", one.name) == DECIMAL.sub("", two.name)  # a sum of the values, shown in decimals
            np.testing.assert_allclose(one.values, two.values, atol=1e-5 * max(1.0, np.abs(two.values).max()))


SMALL = dict(
    hidden_size=24, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, intermediate_size=29,
    max_position_embeddings=47, head_dim=10, pad_token_id=0,
)  # fmt: skip
LINEAR = dict(
    linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2,
    num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
)  # fmt: skip
FOREIGN = {
    "Gemma2": (dict(query_pre_attn_scalar=7), "y = x + norm(a)", "pre_feedforward_layernorm", ()),
    "Olmo2": ({}, "y = x + norm(a)", "mlp", ("norm",)),
    "Granite": (dict(residual_multiplier=0.3), "y = x + 0.3 · a", "post_attention_layernorm", ()),
    "Qwen3Next": (
        {**LINEAR, "layer_types": ["full_attention"] * 2}, "y = x + a", "post_attention_layernorm", ()
    ),
    "Gemma4Text": (
        dict(layer_types=["full_attention"] * 2, global_head_dim=10), "y = x + norm(a)", "pre_feedforward_layernorm", ()
    ),
    "Phi3": ({}, "y = x + a", "post_attention_layernorm", ()),
    "StableLm": (dict(head_dim=8, partial_rotary_factor=0.5), "y = x + a", "post_attention_layernorm", ()),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(FOREIGN, "Gemma2", "Olmo2", "Granite", "Phi3", "StableLm"))
def test_the_modules_of_a_foreign_model_are_found(tmp_path, name):
    """Norms behind a layer and over all heads, factors, gates, fused projections, rotations of a part."""
    more, formula, reads_y, missing = FOREIGN[name]
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **more})
    kind = getattr(transformers, f"{name}Model")
    made = checkpoints._saved(tmp_path / "m", kind, config, checkpoints._sentence_pieces())
    model = open_model(made)
    assert model.stack is None
    layer, seen = model.module.layers[1], {}
    hooks = [
        layer.register_forward_pre_hook(lambda module, given: seen.__setitem__("x", given[0])),
        layer.self_attn.register_forward_hook(lambda module, given, out: seen.__setitem__("a", out[0])),
        getattr(layer, reads_y).register_forward_pre_hook(lambda module, given: seen.__setitem__("y", given[0])),
    ]
    model.run(model.whole(model.encode(TEXT).ids), lambda at, call: seen.__setitem__(at, call))
    for hook in hooks:
        hook.remove()
    steps = step(TEXT, (1, 2), "knows", model)
    call = seen[1]
    close(steps.numbers.placed[0], call.query[0, 2, steps.row])
    close(steps.numbers.placed[1], call.key[0, 0])
    close(steps.output, call.out[0, 2, steps.row])
    close(vector(steps, "stream", "x"), seen["x"][0, steps.row])
    close(vector(steps, "output", "a"), seen["a"][0, steps.row])
    close(vector(steps, "residual", "y"), seen["y"][0, steps.row])
    added = vector(steps, "residual", formula.removeprefix("y = x + "))
    close(added, seen["y"][0, steps.row] - seen["x"][0, steps.row])
    assert steps["residual"].formula == formula and "seen" not in " ".join(steps.notes)
    assert [id for id in ("norm", "position") if id not in [each.id for each in steps]] == list(missing)
    if name == "Qwen3Next":
        assert "gate" in steps["concat"].says
    if name == "Gemma4Text":
        assert "Values are rescaled" in steps["head norm"].says
    if name == "Olmo2":
        assert "all heads together" in steps["head norm"].says


def test_a_model_in_half_precision_is_stepped_through_in_single(tmp_path):
    """Would catch: a norm or a factor that fits bfloat16's numbers, and is not the model's."""
    config = transformers.Gemma2Config(**SMALL, query_pre_attn_scalar=7)
    model = open_model(
        checkpoints._saved(tmp_path / "m", transformers.Gemma2Model, config, checkpoints._sentence_pieces())
    )
    model.module.bfloat16()
    rough = step(TEXT, (1, 2), "knows", model)
    assert {each.dtype for each in model.module.parameters()} == {torch.bfloat16}
    assert "computed in float32" in rough.notes[-1]
    model.module.float()
    whole = step(TEXT, (1, 2), "knows", model)
    assert [each.formula for each in rough] == [each.formula for each in whole]
    np.testing.assert_array_equal(vector(rough, "residual", "y"), vector(whole, "residual", "y"))


def test_the_embedding_is_what_the_first_layer_reads_with_attention_or_without(tmp_path):
    config = transformers.Qwen3NextConfig(**SMALL, **LINEAR, layer_types=["linear_attention", "full_attention"])
    made = checkpoints._saved(tmp_path / "m", transformers.Qwen3NextModel, config, checkpoints._sentence_pieces())
    model = open_model(made)
    steps = step(TEXT, (0, 2), "knows", model)
    table = model.embedding.weight[model.whole(model.encode(TEXT).ids)[0, steps.row]]
    close(vector(steps, "token", "x_0"), table)
    assert steps["token"].formula.startswith("x_0 = W[") and "Layers without attention" in steps["stream"].says


def test_a_factor_within_a_projection_is_said(tmp_path):
    """OPT scales its queries, and not their products."""
    config = transformers.OPTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, ffn_dim=29, word_embed_proj_dim=24,
        max_position_embeddings=47, pad_token_id=0,
    )  # fmt: skip
    made = checkpoints._saved(tmp_path / "m", transformers.OPTModel, config, checkpoints._sentence_pieces())
    steps = step(TEXT, (1, 2), "knows", open_model(made))
    assert "The model multiplies each query by 0.3536, which W_q holds here." in steps["project"].says


def test_what_is_not_found_is_said_and_the_call_alone_is_shown(tmp_path):
    """BitNet has a norm between the heads and the output projection."""
    config = transformers.BitNetConfig(**{**SMALL, "head_dim": 8})
    made = checkpoints._saved(tmp_path / "m", transformers.BitNetModel, config, checkpoints._sentence_pieces())
    model, seen = open_model(made), []
    steps = step(TEXT, (1, 1), "knows", model)
    model.run(model.whole(model.encode(TEXT).ids), lambda layer, call: seen.append(call))
    weights = saccade.attention_weights(seen[1].query, seen[1].key, **seen[1].scoring())
    close(steps.weights, weights[0, 1, steps.row], 1e-6)
    close(steps.output, seen[1].out[0, 1, steps.row])
    ids_of_steps = [s.id for s in steps]
    assert ids_of_steps[:2] == ["token", "given"] and "output" not in ids_of_steps
    assert "since no matrix reads the outputs of its heads, as they are or times a sigmoid" in steps.notes[-1]


def test_the_sink_of_a_foreign_model(folder):
    steps = step(TEXT, (1, 1), "knows", open_model(folder("gpt_oss")))
    assert steps.scores.sink is not None and steps.weights.sum() < 1 - 1e-8
    assert "sink" in steps["softmax"].formula and "output" in [s.id for s in steps]


class Toy(TextModel):
    """A stack over an embedding, with characters as tokens; nothing stands around a text."""

    name, context, before, after, special = "toy", None, (), (), frozenset()

    def __init__(self, stack):
        torch.manual_seed(3)
        self._stack, self._table = stack, torch.nn.Embedding(128, stack.config.width)
        for parameter in stack.parameters():
            torch.nn.init.normal_(parameter, 0.1, 0.4)
        self._module = torch.nn.ModuleList([stack, self._table]).eval()
        self.heads = tuple(block.attention.config.heads for block in stack.blocks)
        self.causal = isinstance(stack, Decoder)

    stack = property(lambda self: self._stack)
    embedding = property(lambda self: self._table)
    module = property(lambda self: self._module)

    def encode(self, text):
        return Tokens([ord(c) for c in text], [(i, i + 1) for i in range(len(text))])

    def written(self, token):
        return chr(token)

    def _forward(self, tokens, observe):
        self._stack(self._table(tokens), observe=observe)


BLOCKS = {
    "gate, softcap, norm of heads, biases": dict(
        gate=True, softcap=3.0, qk_norm="rms", bias=True, positions=RotaryConfig(layout="interleaved", turned=4)
    ),
    "sink and ALiBi": dict(sink=True, positions=AlibiConfig(), kv_heads=1),
    "T5's bias and layer norms of heads": dict(positions=T5Config(buckets=8), qk_norm="layer", scale=0.3),
    "wide values": dict(value_head_width=7, head_width=10, fused=False),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("placement", ["pre", "post", "parallel"])
@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_every_part_that_a_block_may_have(name, placement, kind):
    attention = AttentionConfig(24, 3, **BLOCKS[name])
    model = Toy(kind(BlockConfig(attention, hidden=31, placement=placement, norm="layer"), 2))
    ids = torch.tensor([[ord(c) for c in "abracadabra"]])
    steps = step_of_tokens(model, ids, list("abracadabra"), (1, 2), 6)
    seen = {}
    block = model.stack.blocks[1]
    handle = block.attention.register_forward_hook(lambda module, given, out: seen.__setitem__("a", out))
    model.run(ids, lambda layer, call: seen.__setitem__(layer, call))
    handle.remove()
    call = seen[1]
    weights = saccade.attention_weights(call.query, call.key, **call.scoring())
    close(steps.weights, weights[0, 2, 6], 1e-5)
    close(steps.output, call.out[0, 2, 6])
    close(vector(steps, "output", "a"), seen["a"][0, 6])
    assert max(steps.differences.values()) < 1e-5
    ids_of_steps = [s.id for s in steps]
    assert ("softcap" in ids_of_steps) == ("softcap" in BLOCKS[name]) and ("norm" in ids_of_steps) == (
        placement != "post"
    )
    for switch in steps.switches:  # what is left out changes what it should, and nothing is NaN
        other = steps.scores.softmax((switch,)).weights
        assert np.isfinite(other).all()
    assert steps.switches == tuple(s for s in SWITCHES if s != "mask" or kind is Decoder) or "wide" in name


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


@pytest.mark.slow
def test_switches_by_hand(embedded):
    """From the projections of the step before, with nothing but numpy."""
    text, head = SENTENCE, (1, 4)
    every = step(text, head, "it:1")
    row, count = every.row, len(every.labels)
    q, k, v = every.numbers.projected
    angle = np.arange(count)[:, None] * 10000.0 ** (-2 * np.arange(16) / 32)
    pairs = np.exp(1j * angle)

    def turned(x, pairs):
        z = (x[..., :16] + 1j * x[..., 16:]) * pairs
        return np.concatenate([z.real, z.imag], -1)

    placed = turned(k, pairs) @ turned(q, pairs[row])
    hidden = np.arange(count) > row

    def weights(without):
        logits = (k @ q if "position" in without else placed) * (1 if "scale" in without else 32**-0.5)
        return softmax(logits if "mask" in without else np.where(hidden, -np.inf, logits))

    for chosen in ((), ("scale",), ("mask",), ("position",), ("scale", "mask", "position"), ("mask", "scale")):
        steps = step(text, head, "it", without=chosen)
        np.testing.assert_allclose(steps.weights_without, weights(chosen), atol=1e-9)
        np.testing.assert_allclose(steps.output_without, weights(chosen) @ v, atol=1e-7)
        np.testing.assert_allclose(steps.weights, weights(()), atol=1e-9)
        assert steps.without == tuple(s for s in SWITCHES if s in chosen)


@pytest.mark.parametrize(
    ("dtype", "largest", "broken"),
    [
        (torch.float16, 11.0, False),
        (torch.float16, 12.0, True),
        (torch.float32, 88.0, False),
        (torch.float32, 89.0, True),
    ],
)
def test_without_the_shift_exp_overflows_where_the_dtype_does(dtype, largest, broken):
    query, key = torch.tensor([[[[1.0]]]], dtype=dtype), torch.tensor([[[[largest], [-3.0], [0.5]]]], dtype=dtype)
    call = AttentionCall(query, key, key, scale=1.0).observed(saccade.attention(query, key, key, scale=1.0), "by hand")
    steps = step_of_call(call, 0, 0, without=("shift",))
    assert np.isfinite(steps.weights).all()
    assert np.isnan(steps.weights_without).any() == broken
    name = str(dtype).removeprefix("torch.")
    assert (f"too large for {name}" in steps["softmax"].without) == broken
    if not broken:
        np.testing.assert_allclose(steps.weights_without, steps.weights, atol=2e-3)
    json.dumps(steps.as_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("where", "bad", "why"),
    [
        ("query", 2, "its query is not finite"),
        ("key", 1, "the key of 'b' is not finite"),
        ("key", 3, None),  # a key that is hidden
    ],
)
def test_weights_that_are_nan_are_told_with_their_reason(where, bad, why):
    torch.manual_seed(3)
    query, key, value = torch.randn(3, 1, 1, 4, 8).unbind()
    call = AttentionCall(query, key, value, mask=saccade.Causal())
    call = call.observed(saccade.attention(query, key, value, mask=saccade.Causal()), "by hand")
    (query if where == "query" else key)[0, 0, bad, 1] = float("nan")
    steps = step_of_call(call, 0, 2, labels=list("abcd"))
    data = json.loads(json.dumps(steps.as_json(), allow_nan=False))
    assert np.isnan(steps.weights).any() == (why is not None)
    if why is None:
        assert "looks most at" in steps.summary and data["scores"]["visible"] == [1, 1, 1, 0]
        return
    assert steps.summary == f"In this head the weights of 'c' are NaN: {why}."
    everything = " ".join(step.says + step.without for step in steps)
    assert "less than .01" not in everything and "too large for" not in everything
    seen = [d for d, visible in zip(data["scores"]["products"], data["scores"]["visible"], strict=True) if visible]
    assert None in seen


def test_the_example_has_the_numbers_of_the_page():
    steps = example()
    assert column(steps, "dot", "d").tolist() == [1.0, 0.0]
    assert [round(x, 6) for x in column(steps, "scale", "s")] == [0.707107, 0.0]
    assert [round(x, 6) for x in steps.weights] == [0.669762, 0.330238]
    assert [round(x, 6) for x in steps.output] == [16.604769, 26.604769]
    assert [round(x, 6) for x in column(steps, "softmax", "exp")] == [1.0, 0.493069]
    says = steps["softmax"].without
    assert "exp(0.707107) = 2.028115 and exp(0) = 1, with the sum 3.028115" in says
    text = str(steps)
    for number in ("0.707107", "0.669762", "0.330238", "16.604769", "26.604769", "6.697615", "13.209538"):
        assert number in text
    np.testing.assert_allclose(example(without="scale").weights_without, softmax(np.array([1.0, 0.0])))


def test_a_call_between_two_sequences_has_a_query_of_its_own():
    query, key, value = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 5)
    call = AttentionCall(query, key, value).observed(saccade.attention(query, key, value), "by hand")
    steps = step_of_call(call, 2, 3, item=1, labels=list("abcdefghi"), query="Katze")
    expected = (query[1, 2, 3].double() @ key[1, 2].double().T / 8**0.5).softmax(-1)
    np.testing.assert_allclose(steps.weights, expected.numpy(), atol=1e-7)
    close(steps.output, call.out[1, 2, 3])
    assert steps.as_json()["own"] is None and "sees all 9 keys." in steps["mask"].says
    assert "This is what 'Katze' takes" in steps["sum"].says and "'d'" not in steps["sum"].says
    with pytest.raises(ValueError, match="row: 4 does not exist; there are 0 to 3"):
        step_of_call(call, 2, 4)


def words_of(text):
    found = [Word("<s>", 0, 0, 0, 1, True)]
    return found + [Word(text[a:b], a, b, i, i + 1) for i, (a, b) in enumerate(split_words(text), 1)]


def test_which_word_is_meant():
    words = words_of("It is 7, and it is 12: it rains")

    def chosen(wanted, nth=None):
        return find_word(words, wanted, nth)[0]

    assert (chosen("it"), chosen("it:2"), chosen("It"), chosen("it", 2)) == (6, 10, 1, 10)
    assert (chosen("IT"), chosen("IT:3")) == (1, 10)  # written so nowhere: any case
    assert (chosen("7"), chosen(7), chosen("3"), chosen("<s>")) == (3, 7, 3, 0)  # a word before a number
    assert (chosen(":"), chosen(None)) == (9, 11)
    assert "'it' occurs 2 times: the first is used (it:2 is the next)" in find_word(words, "it")[1]
    assert find_word(words, "rains") == (11, "")
    for wanted, nth, said in [
        ("rain", None, "'rain' is not in the text; like it there is 'rains'"),
        ("xyz", None, "'xyz' is not in the text; the text begins with 'It', 'is', '7'"),
        ("it:3", None, "'it' occurs 2 times, so there is no occurrence 3"),
        ("rains", 2, "^nth: expected 1, the only occurrence of 'rains' in the text, got 2$"),
        ("it", 3, "^nth: expected 1 to 2, the occurrences of 'it' in the text, got 3$"),
        (12, None, "12 is not a word of this text, which has 1 to 11"),
        (0, None, "0 is not a word of this text"),
        (None, 2, "^nth: it is the occurrence of a word; pass the word, too$"),
        (None, 0, "^nth: it is the occurrence"),
        (3, 1, "^nth: it is the occurrence"),
    ]:
        with pytest.raises(ValueError, match=said.replace("(", "\\(")):
            find_word(words, wanted, nth)
    for nth in (True, "2", 1.0):
        with pytest.raises(TypeError, match="^nth: expected the number of an occurrence, counted from 1, got "):
            find_word(words, "it", nth)


def test_a_word_of_several_tokens_asks_with_its_last(embedded):
    steps = step("The bewildered cat", (0, 1), "bewildered")
    assert "tokens: the query is the last of them" in " ".join(steps.notes) and steps.word.last - 1 == steps.row
    assert (
        steps.word.last - steps.word.first > 1
        and len(steps.labels) == embedded.whole(embedded.encode("The bewildered cat").ids).shape[1]
    )


@pytest.mark.slow
def test_a_piece_of_a_word_is_named_with_its_word():
    """'owl' is o, w, l and 'bee' is be, e: no sentence or vector calls one of them a word."""
    text = "The owl met a bee, and the bee thanked the owl because it was kind."
    steps = step(text, (2, 5), "owl", nth=2)
    assert steps.labels[steps.row] == "l" and steps.labels[7:9] == ("be", "e")
    assert steps.names[5] == "'met'" and steps.names[7:9] == ("'be' in 'bee'", "'e' in 'bee'")
    assert steps.summary.startswith(f"In this head 'l' in 'owl' looks most at {steps.names[steps.weights.argmax()]} (")
    assert "then 'be' in 'bee' (" in steps.summary
    told = [step(text, word="owl", nth=2).notes[-1], steps.summary]
    for one in steps:
        told += [one.says, one.without, *(vector.name for vector in one.vectors)]
    pieces = r"'(o|w|l|be|e|than|ked)'"
    assert len(re.findall(pieces, " ".join(told))) > 9
    assert not re.findall(f"{pieces}(?! in '(owl|bee|thanked)')", " ".join(told))


@pytest.mark.slow
def test_the_head_that_is_taken_where_none_is_asked_for(embedded):
    steps = step(SENTENCE, word="it")
    away = range(1, steps.row - 1)  # not <s>, 'because' or itself
    rows = {}

    def compare(layer, call):
        weights = saccade.attention_weights(call.query, call.key, **call.scoring())[0, :, steps.row]
        rows.update({(layer, head): row.numpy() for head, row in enumerate(weights)})

    embedded.run(embedded.whole(embedded.encode(SENTENCE).ids), compare)
    best = max(rows, key=lambda place: rows[place][away].max())
    assert (steps.layer, steps.head) == best
    key = max(away, key=lambda j: rows[best][j])
    looks = [steps.labels[row.argmax()] for place, row in rows.items() if place != best]
    most = max(looks, key=looks.count)
    (note,) = (note for note in steps.notes if note.startswith("no head was given"))
    assert f"of 32 heads, {steps.place} is shown, in which 'it' looks most at one word that is not adjacent" in note
    assert f"('{steps.labels[key]}', {rows[best][key]:.2f})".replace("0.", ".") in note
    assert f"{looks.count(most)} of them most at '{most}'; --head (in Python head=) shows another" in note


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(head=(4, 0)), "head: 4.0 does not exist"),
        (dict(head=(0, 8)), "the heads 0 to 7"),
        (dict(word="dog"), "word: 'dog' is not in the text"),
        (dict(without=["bias"]), "without: expected scale, mask, position, shift, got 'bias'"),
    ],
)
def test_what_is_not_there_is_said(options, said):
    with pytest.raises(ValueError, match=said):
        step("The cat sat.", **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(head=3), "head: expected .layer, head., two ints, or .part, layer, head., got 3"),
        (dict(head=(1.5, 0)), "head: expected"),
        (dict(word=2.5), "word: expected a word or its number, got 2.5"),
        (dict(model=7), "model: expected a folder, a name on the hub or an open model, got int"),
        (dict(word=True), "word: expected a word or its number, got True"),
    ],
)
def test_what_is_of_another_type_is_said(options, said):
    with pytest.raises(TypeError, match=said):
        step("The cat sat.", **options)


@pytest.mark.slow
def test_a_text_of_one_word(embedded):
    steps = step("Nobody")
    assert steps.notes[-1].startswith(
        "no head was given: 0.0 is shown; --head"
    ) and steps.weights.sum() == pytest.approx(1)
    alone = step("The cat sat", (1, 2), "<s>", without="mask")
    assert alone.weights[0] == 1 and [v.name for v in alone["sum"].vectors] == ["1.000 · v of '<s>'", "o"]
    assert alone.weights_without[0] < 1


def test_what_this_head_lacks_cannot_be_left_out(folder):
    model = open_model(folder("bert"))
    for switch, why in (("mask", "no mask: every token sees every other"), ("position", "added to the embeddings")):
        with pytest.raises(ValueError, match=f"{switch} cannot be left out: .*{why}"):
            step(TEXT, (0, 0), "knows", model, without=[switch])


def test_json_holds_what_a_page_computes_weights_from(embedded):
    steps = step("A <b>cat</b> sat & 'it' was soft", (1, 4), "it", without=["mask"])
    data = json.loads(json.dumps(steps.as_json(), allow_nan=False))
    scores = data["scores"]
    logits = np.array(scores["products"]) * scores["scale"]
    everything = softmax(logits)
    seen = softmax(np.where(np.array(scores["visible"]) == 1, logits, -np.inf))
    np.testing.assert_allclose(data["weights"], seen, atol=1e-6)
    np.testing.assert_allclose(data["weights_without"], everything, atol=1e-6)
    np.testing.assert_allclose(np.array(data["values"]).T @ everything, data["output_without"], atol=1e-4)
    (shown,) = [s for s in data["steps"] if s["id"] == "softmax"]
    assert {len(column["values"]) for column in shown["columns"]} == {len(data["labels"])} == {len(data["values"])}
    assert [s["id"] for s in data["steps"]] == [s.id for s in steps]


def tags(tree):
    name, *children = tree
    yield name
    for child in children:
        if isinstance(child, list):
            yield from tags(child)


def test_formulas_are_mathml(embedded):
    assert mathml("x_0 = √256 · W[313]") == [
        "math",
        ["mrow", ["msub", ["mi", "x"], ["mn", "0"]], ["mo", "="], ["msqrt", ["mn", "256"]], ["mo", "·"], ["mi", "W"],
         ["mo", "["], ["mn", "313"], ["mo", "]"]],
    ]  # fmt: skip
    formulas = [s.formula for s in step("The cat sat", (1, 4))] + ["n = x / √(mean(x²) + ε) · g", "a) + b"]
    known = {"math", "mrow", "mi", "mn", "mo", "mtext", "msub", "msup", "msqrt"}
    for formula in formulas:
        assert set(tags(mathml(formula))) <= known


@pytest.mark.slow
def test_of_a_long_text_some_keys_have_their_numbers_in_every_step():
    model = Toy(Decoder(BlockConfig(AttentionConfig(24, 3, positions=RotaryConfig()), hidden=31), 2))
    text = "".join(chr(97 + i * i % 23) for i in range(5003))
    ids = torch.tensor([[ord(c) for c in text]])
    steps = step_of_tokens(model, ids, list(text), (1, 2), 4001)
    assert max(steps.differences.values()) < 1e-5  # keys are projected block by block
    data = steps.as_json()
    shown = data["shown"]
    best = set(np.argsort(-steps.weights)[:8])
    later = set(np.argsort(-steps.scores.softmax(("mask",)).weights)[:8])
    assert best | later | {4001} <= set(shown) and len(shown) < 150 and shown == sorted(shown)
    assert len(data["weights"]) == len(data["scores"]["products"]) == len(data["labels"]) == 5003
    (softmaxed,) = [s for s in data["steps"] if s["id"] == "softmax"]
    np.testing.assert_allclose(softmaxed["columns"][-1]["values"], steps.weights[shown], rtol=1e-6)
    np.testing.assert_allclose(data["values"], steps.numbers.value[shown][:, :8], rtol=1e-5, atol=1e-7)
    assert len(json.dumps(data)) < 400_000
