"""The models that can be attributed: every text family, Saccade's own, the embedded one; and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

import saccade
from linearised import built, ids, randomised
from published import written_words
from saccade.inspection import open_model, weights_of
from saccade.models.families import bart, bert, distilbert, electra, esm, gpt2, gpt_neo, llama, marian, roberta, t5

TEXT = "The cat sat on the mat. Later the cat sat on the"
SMALL = dict(vocab_size=31, hidden_size=23, num_hidden_layers=2, num_attention_heads=1, intermediate_size=29)
BERT = dict(**SMALL, max_position_embeddings=17)
LLAMA = {**SMALL, "model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
BART = dict(
    **dict(vocab_size=31, d_model=22, encoder_layers=2, decoder_layers=1, encoder_ffn_dim=29, decoder_ffn_dim=29),
    **dict(encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=17, scale_embedding=True),
)
FAMILIES = {
    "gpt2": (gpt2.FAMILY, "causal-lm", dict(vocab_size=31, n_embd=23, n_layer=2, n_head=1, n_positions=17)),
    "gpt_neo": (
        gpt_neo.FAMILY,
        "causal-lm",
        dict(vocab_size=31, hidden_size=22, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]),
    ),
    "qwen3": (llama.FAMILY, "causal-lm", {**LLAMA, "tie_word_embeddings": False}),
    "bert": (bert.FAMILY, "masked-lm", BERT),
    "roberta": (roberta.FAMILY, "masked-lm", BERT),
    "distilbert": (
        distilbert.FAMILY,
        "masked-lm",
        dict(
            vocab_size=31, dim=22, n_layers=2, n_heads=2, hidden_dim=29, max_position_embeddings=17, activation="relu"
        ),
    ),
    "electra": (electra.FAMILY, "masked-lm", {**BERT, "embedding_size": 19}),
    "esm": (
        esm.FAMILY,
        "masked-lm",
        {**BERT, "token_dropout": True, "mask_token_id": 3, "emb_layer_norm_before": True},
    ),
    "esm rotary": (esm.FAMILY, "masked-lm", {**BERT, "hidden_size": 22, "position_embedding_type": "rotary"}),
    "bert body": (bert.FAMILY, None, BERT),
    "t5 encoder": (
        t5.FAMILY,
        "encoder",
        dict(model_type="t5", vocab_size=31, d_model=23, d_kv=7, num_heads=3, num_layers=2, d_ff=29),
    ),
    "bart": (bart.FAMILY, "conditional-generation", BART),
    "marian": (marian.FAMILY, "conditional-generation", {**BART, "pad_token_id": 1, "decoder_start_token_id": 1}),
}


@pytest.fixture(params=FAMILIES)
def model(request):
    family, head, values = FAMILIES[request.param]
    return randomised(built(family, head, **values))


def hidden_states(model):
    out = model.encode(ids(), hidden_states=True) if hasattr(model, "encode") else model(ids(), hidden_states=True)
    return out.hidden_states, getattr(out, "logits", None)


def test_every_family_sums_to_its_own_logits(model):
    """In the masked language models through their heads' activation, too."""
    _, logits = hidden_states(model)
    given = ids()
    if logits is None:
        with pytest.raises(ValueError, match="model: .*no logits|model: it has no head"):
            saccade.attribute(model, ids(), 5, position=4)
        if not hasattr(model, "decoder"):
            return
        given = {"input_ids": ids(), "decoder_input_ids": ids().flip(1)[:, :7]}
        logits = model(**given).logits
    found = saccade.attribute(model, given, 5, against=17, position=4)
    assert found.logit == pytest.approx(float(logits[0, 4, 5] - logits[0, 4, 17]), rel=1e-12, abs=1e-12)
    assert abs(found.remainder) < 1e-12


def test_the_embedding_is_taken_apart(model):
    """Would catch: positions or token types that are counted as the token's, or as biases."""
    found = saccade.why_attends(model, ids(), 4, 2, head=(0, 0))
    placed = any(getattr(model, name, None) is not None for name in ("places", "source_places"))
    expected = {"token embedding", "biases", *(["position embedding"] if placed else [])}
    assert set(map(str, found.components)) == expected | (
        {"token type embedding"} if hasattr(model, "types") else set()
    )


def test_every_family_says_why_its_heads_attend(model):
    calls = []
    run = getattr(model, "encode", model)
    run(ids(), observe=lambda layer, call: calls.append(call))
    head = (1, calls[1].query.shape[1] - 1)
    found = saccade.why_attends(model, ids(), 6, 2, head=head)
    row = torch.log(weights_of(calls[1])[0, head[1], 6])
    other = saccade.why_attends(model, ids(), 6, 5, head=head)
    assert abs(found.remainder) < 1e-11
    assert found.total - other.total == pytest.approx(float(row[2] - row[5]), rel=1e-8, abs=1e-8)


# The embedded model


@pytest.fixture(scope="module")
def embedded():
    return open_model()


def test_the_embedded_models_next_word(embedded):
    found = saccade.attribute(embedded, TEXT)
    lm = embedded.lm
    with torch.no_grad():
        logits = lm(embedded.whole(embedded.encode(TEXT).ids)).logits[0, -1]
    assert found.target == int(logits.argmax()) and found.position == len(found.pieces) - 1
    assert found.logit == pytest.approx(float(logits.max()), rel=1e-5)
    # float32 of some thousand products, of which the largest are about as large as the logit
    assert abs(found.remainder) < 1e-5 * float(found.contributions.abs().sum())
    assert saccade.attribute(lm, TEXT, found.target_text).as_json() == found.as_json()
    assert json.loads(json.dumps(found.as_json()))["sum"] == pytest.approx(found.total)
    assert f"logit of '{found.target_text}'" in str(found) and "scales of norms" in str(found)
    assert found.head_map().shape == (embedded.layers, embedded.heads[0])
    assert found.of("head", 2, 3) == pytest.approx(float(found.head_map()[2, 3]))
    with pytest.raises(KeyError, match=r"head 9\.0; there are token embedding, head 0\.0"):
        found.of("head", 9, 0)


def test_the_embedded_models_own_queries_and_keys(embedded):
    """Against what `saccade.watch` keeps of the run."""
    found = saccade.why_attends(embedded, TEXT, "cat:2", "<s>", head=(2, 3))
    tokens = embedded.whole(embedded.encode(TEXT).ids)
    with saccade.watch(embedded.module, keep=True) as watched, torch.no_grad():
        embedded.module(tokens)
    call = list(watched.kept.values())[2]
    assert found.labels[found.query] == "'at' of 'cat'" and found.key == 0
    logit = (call.query[0, 3, found.query].double() @ call.key[0, 3, 0].double()) * call.query.shape[-1] ** -0.5
    assert found.logit == pytest.approx(float(logit), rel=1e-6)
    assert abs(found.remainder) < 1e-5 * float(found.matrix.abs().sum())
    assert "(the query) meets" in found.sentences(1)[0]
    assert "'at' of 'cat'" in str(found) and "remainder" in str(found)
    assert json.loads(json.dumps(found.as_json()))["logit"] == pytest.approx(found.logit)


# What is refused


@pytest.mark.parametrize(
    ("arguments", "named", "words"),
    [
        ((TEXT, "two words"), {}, r"target: expected the text of one token, got 'two words', which has \d: "),
        ((TEXT, 10**6), {}, r"target: tokens are 0 to \d+, got 1000000"),
        ((TEXT,), {"position": 99}, r"position: the model reads \d+ tokens, 0 to \d+; got 99"),
        ((TEXT,), {"position": "dog"}, "word: 'dog' is not in the text"),
        (("",), {}, "text: expected at least one word"),
        ((torch.tensor([3, 10**6]),), {}, r"text: ids must be from 0 to \d+, got 1000000"),
        (
            (torch.zeros(2, 3, dtype=torch.int64),),
            {},
            r"text: expected the ids of one text, .* torch.int64 \(2, 3\)",
        ),
    ],
)
def test_what_cannot_be_attributed_is_said(embedded, arguments, named, words):
    with pytest.raises(ValueError, match=words):
        saccade.attribute(embedded, *arguments, **named)


def test_heads_that_are_not_there_are_listed(embedded):
    with pytest.raises(ValueError, match=r"head: 9\.0 does not exist; there are the layers 0 \(heads 0 to \d\)"):
        saccade.why_attends(embedded, TEXT, 1, 0, head=(9, 0))
    with pytest.raises(TypeError, match=r"head: expected \(layer, head\), two ints, got 3"):
        saccade.why_attends(embedded, TEXT, 1, 0, head=3)
    with pytest.raises(TypeError, match="query: expected a position or a word of the text, got 1.5"):
        saccade.why_attends(embedded, TEXT, 1.5, 0)


def test_a_module_of_another_library_is_refused():
    class Theirs(torch.nn.Linear):
        __module__ = "transformers.models.gpt2"

    with pytest.raises(TypeError, match=r"a text needs a tokenizer, which Theirs does not have; .* or pass token ids"):
        saccade.attribute(Theirs(2, 3), TEXT)
    with pytest.raises(TypeError, match=r"model: expected a module or a text model, got str"):
        saccade.why_attends("model", ids(), 0, 0)


def test_a_masked_model_is_asked_for_its_mask(tmp_path):
    """From a folder, by a text with its mask token."""
    family, head, values = FAMILIES["bert"]
    written_words(tmp_path, [TEXT])
    made = built(family, head, **{**values, "model_type": "bert", "vocab_size": 97})
    randomised(made).float().save(tmp_path)
    model = saccade.models.load(tmp_path, dtype=torch.float64)
    found = saccade.attribute(model, "the cat [MASK] on the mat", "sat")
    assert found.pieces[found.position] == "[MASK]" and found.target_text == "sat"
    assert abs(found.remainder) < 1e-11
    assert "activations after the last layer" in found.fixed[-1]


def test_a_masked_model_needs_a_place():
    family, head, values = FAMILIES["bert"]
    with pytest.raises(ValueError, match="position: needed, since the text has 0 masks and not one"):
        saccade.attribute(randomised(built(family, head, **values)), ids())
