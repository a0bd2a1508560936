"""Heads that are switched off in the viewer, and what each is worth, against the model with its weights rewritten."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
import torch

import saccade
from saccade.inspection._models import SaccadeModel
from saccade.intervention import Patch
from saccade.models import DecoderLM, LanguageModel, ModelConfig, load
from saccade.models.tokenizers.own import train_bpe
from saccade.viewer.server._view import open_session

TEXT = "The <b>hen</b> met the fox, and the fox met the owl; the owl sat on the hen."
LAYERS, HEADS, WIDTH = 3, 5, 40
OFF = [["0", 3], ["2", 0], ["2", 4]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(7)
    tokenizer = train_bpe([TEXT] * 3, 290)
    sizes = dict(width=WIDTH, layers=LAYERS, heads=HEADS, kv_heads=1, context=211)
    lm = DecoderLM(ModelConfig(vocabulary=tokenizer.vocabulary, **sizes)).double()
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return SaccadeModel(LanguageModel(lm, tokenizer))


@pytest.fixture(scope="module")
def session(model):
    return open_session(TEXT, model=model)


@pytest.fixture
def checkpoints():
    pytest.importorskip("transformers")
    import checkpoints

    return checkpoints


def asked(session, op, **params):
    """Header and the one buffer."""
    reply = session.reply(op, {"run": "0", **params})
    assert reply.status == 200, reply.header
    [buffer] = reply.buffers
    return reply.header, np.frombuffer(buffer, "<f4")


@contextlib.contextmanager
def scaled(weight, head, width, factor, dim=1):
    """The part of an output projection that reads one head, times a factor."""
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.narrow(dim, head * width, width).mul_(factor)
    yield
    with torch.no_grad():
        weight.copy_(kept)


def log_probabilities(model):
    """(L, V) in float64."""
    with torch.no_grad():
        return model.module.eval()(model.whole(model.encode(TEXT).ids))[0].log_softmax(-1).numpy()


def of_tokens(found, ids):
    return found[np.arange(len(ids) - 1), ids[1:]]


def output_of(model, layer):
    return model.module.decoder.blocks[layer].attention.output.weight


def test_probabilities_without_heads_are_those_of_a_model_without_their_output(session, model):
    ids, row = model.whole(model.encode(TEXT).ids)[0].numpy(), 11
    before = log_probabilities(model)
    with contextlib.ExitStack() as stack:
        for layer, head in OFF:
            stack.enter_context(scaled(output_of(model, int(layer)), head, WIDTH // HEADS, 0.0))
        after = log_probabilities(model)
    header, found = asked(session, "heads", off=OFF, row=row)
    found = found.reshape(2, len(ids))
    assert np.isnan(found[:, 0]).all()
    for ours, exact, loss in zip(found, (before, after), header["loss"], strict=True):
        np.testing.assert_allclose(ours[1:], of_tokens(exact, ids), atol=1e-5)
        assert loss == pytest.approx(-of_tokens(exact, ids).mean(), abs=1e-6)
    assert abs(header["loss"][0] - header["loss"][1]) > 0.01
    likely = {*np.argsort(-before[row])[:10], *np.argsort(-after[row])[:10]}
    exact = sorted(((np.exp(before[row, i]), np.exp(after[row, i])) for i in likely), key=lambda pair: -max(pair))
    np.testing.assert_allclose([pair for _, *pair in header["next"]], exact, atol=1e-6)
    assert header["next"][0][0] == model.written(max(likely, key=lambda i: max(before[row, i], after[row, i])))


def test_a_change_takes_one_forward_and_another_row_none(model):
    session, forwards = open_session(TEXT, model=model), []
    handle = model.module.register_forward_hook(lambda *_: forwards.append(1))
    try:
        asked(session, "heads", off=OFF, row=None)
        assert len(forwards) == 2  # with all heads, and without some
        assert asked(session, "heads", off=[*reversed(OFF), OFF[0]], row=3)[0]["next"]
        header, found = asked(session, "heads", off=[], row=None)
        assert len(forwards) == 2
        asked(session, "heads", off=OFF[1:], row=None)
        assert len(forwards) == 3
    finally:
        handle.remove()
    assert header["loss"][0] == header["loss"][1] and header["next"] is None
    np.testing.assert_array_equal(*found.reshape(2, -1))


def test_importance_is_the_slope_of_the_loss(session, model):
    """By central differences: the projection of one head times 1 +- h changes what a gate changes."""
    ids, h = model.whole(model.encode(TEXT).ids)[0].numpy(), 1e-4
    header, found = asked(session, "importance")
    assert found.shape == (LAYERS * HEADS,)
    for place, ours in enumerate(found):
        layer, head = divmod(place, HEADS)
        losses = []
        for factor in (1 + h, 1 - h):
            with scaled(output_of(model, layer), head, WIDTH // HEADS, factor):
                losses.append(-of_tokens(log_probabilities(model), ids).mean())
        assert ours == pytest.approx((losses[0] - losses[1]) / (2 * h), abs=2e-5)  # h^2 and the float32 of gates
    assert header["loss"] == pytest.approx(-of_tokens(log_probabilities(model), ids).mean(), abs=1e-6)
    assert all(parameter.grad is None for parameter in model.module.parameters())


def test_a_patching_map_has_each_head_at_its_place(session, model):
    """By hand: the run of the other text, with the output of one head of this one. A map in another order of heads, a
    metric the wrong way round, or tokens that were left out would show."""
    other, words, places = TEXT.replace("owl", "fox"), (" owl", " fox"), [1, 16, 19]
    clean, corrupted = (model.whole(model.encode(text).ids) for text in (TEXT, other))
    first, second = (model.encode(word).ids[0] for word in words)
    assert [len(model.encode(word).ids) for word in words] == [1, 1] and clean.shape == corrupted.shape

    def metric(ids):
        with torch.no_grad():
            found = model.module.eval()(ids)[0, -1].float().log_softmax(-1)
        return float(found[first] - found[second])

    with saccade.watch(model.module, keep=True, alarms=False) as seen:
        ends = (metric(clean),)
    ends += (metric(corrupted),)
    asking = {"other": other, "target": " owl, fox ", "by": "exact"}
    for chosen, positions in ((None, ""), (places, "1,16,19")):
        header, found = asked(session, "patching", positions=positions, **asking)
        assert (header["clean"], header["corrupted"]) == pytest.approx(ends, abs=1e-5)
        assert header["of"] == "log p of ' owl' less log p of ' fox'" and found.shape == (LAYERS * HEADS,)
        for layer, head in ((0, 3), (1, 4), (2, 0)):
            with saccade.intervene(model.module, {layer: Patch([head], seen, positions=chosen)}):
                effect = (metric(corrupted) - ends[1]) / (ends[0] - ends[1])
            assert found[layer * HEADS + head] == pytest.approx(effect, abs=1e-4)
        layer, head = divmod(int(found.argmax()), HEADS)
        assert header["sentences"][0].startswith(f"Head {layer}.{head} restores most")
    refused = session.reply("patching", {"run": "0", **asking, "other": "The hen.", "positions": ""})
    assert refused.status == 400 and refused.header["error"].startswith("other: heads are patched token by token")


def test_patching_ends_with_the_viewer(model):
    """After the head that is being patched: a command that is ended waits for no more."""
    session, forwards = open_session(TEXT, model=model), []

    def count(*_):
        forwards.append(1)
        session.closed = len(forwards) > 4

    handle = model.module.register_forward_hook(count)
    try:
        told = {"run": "0", "other": TEXT.replace("owl", "fox"), "target": "owl,fox", "positions": "", "by": "exact"}
        reply = session.reply("patching", told)
    finally:
        handle.remove()
    assert reply.header["error"] == "the viewer has ended" and len(forwards) == 5


def test_runs_without_a_model_say_so_in_one_sentence(session):
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with torch.no_grad(), saccade.watch(layer, keep=True) as watched:
        layer(torch.randn(1, 5, 8))
    for op, params in (("heads", {"off": [], "row": None}), ("importance", {})):
        reply = open_session(watched).reply(op, {"run": "0", **params})
        assert reply.status == 400
        assert reply.header["error"] == (
            "heads: Steps and heads switched off need the model that reads the text, and kept calls of a watch have "
            "none."
        )
    reply = session.reply("heads", {"run": "0", "off": [["3", 0]], "row": None})
    assert reply.status == 400 and reply.header["error"].startswith("off: expected a call of this run and a head")


def test_a_published_decoder_against_transformers(checkpoints, tmp_path):
    import transformers

    checkpoints.gpt2(tmp_path)  # its tokenizer
    torch.manual_seed(3)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained(tmp_path)).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.float().save_pretrained(tmp_path)
    theirs.double()
    session = open_session("The cat sat on the dark mat.", model=load(tmp_path))
    ids = torch.tensor([session.runs[0].source.encode("The cat sat on the dark mat.").ids])
    width = theirs.config.n_embd // theirs.config.n_head
    with torch.no_grad(), scaled(theirs.transformer.h[1].attn.c_proj.weight, 3, width, 0.0, dim=0):
        exact = theirs(ids).logits[0].log_softmax(-1).numpy()
    _, found = asked(session, "heads", off=[["1", 3]], row=None)
    np.testing.assert_allclose(found.reshape(2, -1)[1, 1:], of_tokens(exact, ids[0].numpy()), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        ("bert", "BertForMaskedLM", ("bert.encoder.layer", "attention.output.dense")),
        ("falcon", "FalconForCausalLM", ("transformer.h", "self_attention.dense")),
    ],
)
def test_a_head_for_tokens_gives_probabilities_whoever_reads_it(checkpoints, tmp_path, name, kind, parts):
    """BERT predicts a token where it alone is masked; Falcon runs with code of transformers, opened with its head."""
    import transformers

    getattr(checkpoints, name)(tmp_path)  # its tokenizer and its configuration
    torch.manual_seed(11)
    theirs = getattr(transformers, kind)(transformers.AutoConfig.from_pretrained(tmp_path)).eval()
    theirs.save_pretrained(tmp_path)
    session = open_session("The cat sat on the mat.", model=str(tmp_path))
    reader = session.runs[0].source
    ids = reader.whole(reader.encode("The cat sat on the mat.").ids)
    mask = reader.tokenizer.named["mask"] if name == "bert" else None
    weight = theirs.get_submodule(f"{parts[0]}.1.{parts[1]}").weight

    def exact():
        """(L, V): row i predicts token i, NaN where it is not predicted."""
        with torch.no_grad():
            if mask is None:
                known = theirs(ids).logits[0].log_softmax(-1)
                return torch.cat([torch.full_like(known[:1], torch.nan), known]).numpy()
            found = torch.full((ids.shape[1], theirs.config.vocab_size), torch.nan)
            for place in range(1, ids.shape[1] - 1):
                masked = ids.clone()
                masked[0, place] = mask
                found[place] = theirs(masked).logits[0, place].log_softmax(-1)
            return found.numpy()

    before = exact()
    with scaled(weight, 2, weight.shape[1] // reader.heads[1], 0.0):
        after = exact()
    row = 3
    header, found = asked(session, "heads", off=[["1", 2]], row=row)
    rows = [every[range(ids.shape[1]), ids[0]] for every in (before, after)]
    np.testing.assert_allclose(found.reshape(2, -1), rows, atol=1e-4)
    assert header["loss"] == pytest.approx([-np.nanmean(every) for every in rows], abs=1e-5)
    about = row if mask is not None else row + 1
    assert header["next"][0][1:] == pytest.approx(
        max(np.exp([before[about], after[about]]).T.tolist(), key=max), abs=1e-5
    )
    assert (header["masked"], header["reason"]) == (mask is not None, None)
    importance, slopes = asked(session, "importance")
    assert importance["loss"] == pytest.approx(header["loss"][0], abs=1e-5) and slopes.any()


def test_what_may_stand_at_a_mask_of_the_text_itself(checkpoints, tmp_path):
    """The text with its mask as it is, which no token of the loss is predicted from."""
    import transformers

    checkpoints.bert(tmp_path)
    torch.manual_seed(12)
    theirs = transformers.BertForMaskedLM(transformers.BertConfig.from_pretrained(tmp_path)).eval()
    theirs.save_pretrained(tmp_path)
    session = open_session("The [MASK] sat on the mat.", model=str(tmp_path))
    reader = session.runs[0].source
    ids = reader.whole(reader.encode("The [MASK] sat on the mat.").ids)
    place, weight = 2, theirs.bert.encoder.layer[0].attention.output.dense.weight
    assert int(ids[0, place]) == reader.tokenizer.named["mask"]
    with torch.no_grad(), scaled(weight, 1, weight.shape[1] // reader.heads[0], 0.0):
        exact = theirs(ids).logits[0, place].softmax(-1)
    header, found = asked(session, "heads", off=[["0", 1]], row=place)
    assert max(after for *_, after in header["next"]) == pytest.approx(float(exact.max()), abs=1e-6)
    assert np.isnan(found.reshape(2, -1)[:, place]).all()
    assert asked(session, "importance")[0]["loss"] == pytest.approx(header["loss"][0], abs=1e-5)


BODIES = {  # a class of transformers, and the output projection of its first layer
    "bert": ("BertModel", lambda model: model.encoder.layer[0].attention.output.dense, 10),
    "t5": ("T5EncoderModel", lambda model: model.encoder.block[0].layer[0].SelfAttention.o, 7),
    "falcon": ("FalconModel", lambda model: model.h[0].self_attention.dense, None),  # transformers itself reads it
}


@pytest.mark.parametrize("family", BODIES)
def test_a_model_without_a_language_head_shows_how_its_states_change(checkpoints, tmp_path, family):
    import transformers

    kind, projection, width = BODIES[family]
    getattr(checkpoints, family)(tmp_path)
    session = open_session("The cat sat on the mat.", model=str(tmp_path))
    theirs = getattr(transformers, kind).from_pretrained(tmp_path).eval()
    reader, weight = session.runs[0].source, projection(theirs).weight
    ids = reader.whole(reader.encode("The cat sat on the mat.").ids)
    with torch.no_grad():
        before = theirs(ids).last_hidden_state[0]
        with scaled(weight, 1, width or weight.shape[1] // reader.heads[0], 0.0):
            after = theirs(ids).last_hidden_state[0]
    header, found = asked(session, "heads", off=[["0", 1]], row=4)
    assert (header["loss"], header["next"]) == (None, None)
    assert "reads a text without predicting its tokens" in header["reason"]
    np.testing.assert_allclose(found, (after - before).norm(dim=1) / before.norm(dim=1), rtol=1e-3)
    reply = session.reply("importance", {"run": "0"})
    assert reply.status == 400 and reply.header["error"].startswith("importance: ")


@pytest.mark.slow
def test_layers_that_share_their_weights_are_refused(checkpoints, tmp_path):
    """Their module has one name, so all of its layers would lose the head."""
    import transformers

    sizes = dict(hidden_size=30, intermediate_size=37, num_attention_heads=3, num_hidden_layers=2, embedding_size=16)
    checkpoints._saved(
        tmp_path, transformers.AlbertModel, transformers.AlbertConfig(**sizes), checkpoints._word_pieces()
    )
    reply = open_session("The cat sat on the mat.", model=str(tmp_path)).reply(
        "heads", {"run": "0", "off": [["1", 2]], "row": None}
    )
    assert reply.status == 400
    assert re.fullmatch("heads: expected one call for each .*, but .* calls .* several times", reply.header["error"])


@pytest.mark.parametrize("part", ["encoder", "decoder", "cross"])
def test_every_part_of_an_encoder_decoder(checkpoints, tmp_path, part):
    """A call that was taken for another one, as where cross-attention is counted with the decoder's, shows."""
    checkpoints.t5(tmp_path)
    model = load(tmp_path, head="conditional-generation")
    session = open_session("The cat sat on the mat.", target="The dog sat.", model=model)
    source = session.runs[0].source
    stack = model.encoder if part == "encoder" else model.decoder
    attention = stack.blocks[1].cross if part == "cross" else stack.blocks[1].attention
    ids = np.array(source.target.ids)
    with torch.no_grad(), scaled(attention.output.weight, 2, 7, 0.0):
        exact = model.eval()(source.ids, None, torch.tensor([source.target.ids])).logits[0].log_softmax(-1).numpy()
    header, found = asked(session, "heads", off=[[f"{part}.1", 2]], row=1)
    assert header["side"] == "target"
    np.testing.assert_allclose(found.reshape(2, -1)[1, 1:], of_tokens(exact, ids), atol=1e-5)
    assert not np.allclose(*found.reshape(2, -1)[:, 1:], atol=1e-5)
