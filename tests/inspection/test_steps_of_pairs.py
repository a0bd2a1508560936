"""Steps of an encoder-decoder: the decoder's own heads and those that read the source, against transformers."""

from __future__ import annotations

import json
import re

import checkpoints
import numpy as np
import pytest
import sentencepiece
import torch
import transformers

import saccade
from saccade import step
from saccade.inspection._targets import read_target
from saccade.models import load

SOURCE = "The cat sat on the shelves, untouched."
TARGET = "Nobody knows the old man."
FAMILIES = ("t5", "bart")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Our model, and transformers' on the same files."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("models") / name
            getattr(checkpoints, name)(folder)
            with checkpoints.quiet():
                theirs = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
            made[name] = load(folder, head="conditional-generation").eval(), theirs
        return made[name]

    return get


def tokens_of(model, target=TARGET):
    tokenizer = model.tokenizer
    source = [*tokenizer.before, *tokenizer.encode(SOURCE).ids, *tokenizer.after]
    target = [model.start, *tokenizer.before, *tokenizer.encode(target).ids, *tokenizer.after]
    return torch.tensor([source]), torch.tensor([target])


def vector(steps, id, name):
    return next(v.values for v in steps[id].vectors if v.name == name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("part", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_weights_are_those_of_transformers(pair, name, part, layer):
    ours, theirs = pair(name)
    source, target = tokens_of(ours)
    with torch.no_grad():
        out = theirs(input_ids=source, decoder_input_ids=target, output_attentions=True)
    field = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}[part]
    head = 1
    given = {} if part == "encoder" else {"target": TARGET}
    steps = step(SOURCE, (part, layer, head), "cat" if part == "encoder" else "knows", ours, **given)
    expected = out[field][layer][0, head, steps.row].double().numpy()
    np.testing.assert_allclose(steps.weights, expected, atol=300 * 2**-22)
    assert max(steps.differences.values()) < 1e-5
    assert (
        steps.part == part
        and steps.place == f"{part}.{layer}.{head}"
        and steps.title.startswith(f"Head {steps.place}, ")
    )
    assert len(steps.labels) == (target if part == "decoder" else source).shape[1]
    assert (steps.as_json()["own"] is None) == (part == "cross")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("part", ["decoder", "cross"])
def test_what_the_block_adds_is_the_models_own(pair, name, part):
    ours, _ = pair(name)
    source, target = tokens_of(ours)
    block = ours.decoder.blocks[1]
    seen = {}
    attention = block.attention if part == "decoder" else block.cross
    after = block.cross if part == "decoder" else block.feed_forward
    if block.config.placement == "pre":
        after = block.cross_norm if part == "decoder" else block.feed_forward_norm
    hooks = [
        attention.register_forward_hook(lambda module, given, out: seen.__setitem__("a", out)),
        after.register_forward_pre_hook(lambda module, given: seen.__setitem__("y", given[0])),
    ]
    with torch.no_grad():
        ours(source, None, target)
    for hook in hooks:
        hook.remove()
    steps = step(SOURCE, (part, 1, 2), "knows", ours, target=TARGET)
    for id, short in (("output", "a"), ("residual", "y")):
        expected = seen[short][0, steps.row].double().numpy()
        np.testing.assert_allclose(vector(steps, id, short), expected, atol=1e-5 * max(1, np.abs(expected).max()))
    assert ("mask" in steps.switches) == (part == "decoder")


def test_two_texts_of_one_length_are_still_two(pair):
    ours, _ = pair("t5")
    target = SOURCE.removesuffix(".")
    source, ids = tokens_of(ours, target)
    assert source.shape == ids.shape
    steps = step(SOURCE, ("cross", 0, 1), "cat", ours, target=target)
    assert steps.as_json()["own"] is None and "sees all" in steps["mask"].says and "after it" not in steps["mask"].says


def test_without_a_head_the_one_that_looks_most_at_a_word_of_the_source(pair):
    ours, _ = pair("bart")
    steps = step(SOURCE, None, "knows", ours, target=TARGET)
    source, target = tokens_of(ours)
    calls = []
    with torch.no_grad():
        ours(source, None, target, observe=lambda layer, call: calls.append((layer, call)) if call.cross else None)
    special = ours.tokenizer.special
    words = [j for j, token in enumerate(source[0].tolist()) if token not in special]
    found = {}
    for layer, call in calls:
        weights = saccade.attention_weights(call.query, call.key, **call.scoring())[0, :, steps.row][:, words]
        found |= {(layer - 2, head): float(w) for head, w in enumerate(weights.amax(-1))}
    assert len(found) == 9 and (steps.layer, steps.head) == max(found, key=found.get) and steps.part == "cross"
    assert f"of 9 heads, {steps.place} is shown" in steps.notes[-1] and "--head" in steps.notes[-1]


@pytest.mark.slow
def test_the_target_may_be_what_the_model_writes(pair):
    ours, _ = pair("bart")
    source, _ = tokens_of(ours)
    written = ours.generate(source).texts()[0][0]
    steps = step(SOURCE, ("decoder", 2, 0), 1, ours)
    read = [ours.start, *written][: ours.longest]  # 54 tokens, of which the last is not read to be written
    assert len(steps.labels) == len(read) == 53
    assert steps.notes[0].startswith("the target is ") and steps.notes[0].endswith(", as the model wrote it")
    found = read_target(ours, None, source)
    assert found.ids == read and found.written
    assert [word.first for word in found.words] + [len(found.ids)] == [0, *(word.last for word in found.words)]


def train(path, lines, size):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(path.with_suffix("")),
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path.with_suffix(".model").rename(path)


@pytest.mark.slow
def test_a_target_may_have_pieces_of_its_own(tmp_path):
    """Marian's source and target are cut by two models of SentencePiece."""
    train(tmp_path / "source.spm", checkpoints.LINES * 9, 90)
    train(tmp_path / "target.spm", ["Die Katze sitzt auf der Matte.", "Niemand kennt den alten Mann."] * 9, 40)
    pieces = {"</s>": 0, "<unk>": 1}
    for name in ("source.vocab", "target.vocab"):
        for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()[3:]:
            pieces.setdefault(line.split("\t")[0], len(pieces))
    last = pieces.setdefault("<pad>", len(pieces))
    (tmp_path / "vocab.json").write_text(json.dumps(pieces))
    config = transformers.MarianConfig(
        d_model=24, encoder_layers=1, decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=3,
        encoder_ffn_dim=31, decoder_ffn_dim=31, eos_token_id=0, forced_eos_token_id=0, max_position_embeddings=64,
        vocab_size=last + 1, pad_token_id=last, decoder_start_token_id=last, max_length=9,
    )  # fmt: skip
    with checkpoints.quiet():
        transformers.MarianMTModel(config).save_pretrained(tmp_path)
    ours = load(tmp_path)
    given = "Die Katze kennt den Mann"
    steps = step("The cat sat.", ("cross", 1, 2), "Katze", ours, target=given)
    tokens = sentencepiece.SentencePieceProcessor(str(tmp_path / "target.spm")).encode(given, out_type=str)
    found = read_target(ours, given, torch.zeros(1, 1, dtype=torch.int64))
    assert found.ids == [last, *(pieces[token] for token in tokens), 0]
    assert steps.word.text == "Katze" and steps.row == max(
        i for word in found.words if word.text == "Katze" for i in range(word.first, word.last)
    )
    assert step("The cat sat.", ("decoder", 0, 0), 1, ours).notes[0].endswith(", as the model wrote it")


def test_text_and_json_tell_the_two_sides(pair):
    ours, _ = pair("bart")
    steps = step(SOURCE, ("cross", 1, 0), "knows", ours, target=TARGET)
    text = " ".join(str(steps).split())
    assert text.startswith("Head cross.1.0, 'knows' asks: token ") and "of the target, counted from 0" in text
    assert f"the target is '{TARGET}', as given" in text
    for said in ("Two texts meet here.", "What cross-attention of layer 1 reads", "every key is seen"):
        assert said in text
    assert not re.search(r"k of 'knows'", text)  # keys are of the source
    data = json.loads(json.dumps(steps.as_json(), allow_nan=False))
    assert (data["part"], data["target"], data["text"]) == ("cross", TARGET, SOURCE)


@pytest.mark.parametrize(
    ("head", "more", "said"),
    [
        (("cross", 9, 0), {}, "head: cross.9.0 does not exist; the decoder has the layers 0 to 2, each with the heads"),
        (("decoder", 0, 3), {}, "head: decoder.0.3 does not exist"),
        (("encoder", 0, 2), {}, "head: 0.2 does not exist"),
        (("middle", 0, 0), {}, "head: expected a part of encoder, decoder, cross, got 'middle'"),
        (("cross", 0, 0), {"target": "  "}, "target: expected at least one word, got '  '"),
        (
            ("cross", 0, 0),
            {"target": "old " * 60},
            "target: expected at most 53 tokens with special ones, got ",
        ),
        ((1, 1), {"target": TARGET}, "target: not read by the encoder"),
        (("cross", 0, 0), {"target": TARGET, "word": "cat"}, "word: 'cat' is not in the target; "),
    ],
)
def test_what_is_not_there_is_said(pair, head, more, said):
    ours, _ = pair("bart")
    with pytest.raises(ValueError, match=said):
        step(SOURCE, head, more.pop("word", None), ours, **more)


@pytest.mark.slow
def test_a_model_with_one_stack_has_neither_part_nor_target(tmp_path):
    with pytest.raises(ValueError, match="head: cross.0.1 is of an encoder-decoder; .* has heads such as 1.4"):
        step("The cat sat.", ("cross", 0, 1))
    with pytest.raises(ValueError, match="target: .* reads none; only an encoder-decoder opened by"):
        step("The cat sat.", target="Le chat")
    checkpoints.t5(tmp_path / "t5")
    with pytest.raises(ValueError, match="target: needed, since this checkpoint has no head that writes one"):
        step("The cat sat.", ("cross", 0, 1), None, tmp_path / "t5")
