"""Labels are read or refused; probes find what was planted in a layer, and nothing in noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints import bert, gpt2, llama
from pretend import PretendModel, evenly
from test_treebank import DONT, line, write
from transformers import AutoModel

from saccade.analysis import LabelledSentence, _probe as probe, read_labels, study_probe
from saccade.analysis._probe import hidden_states
from saccade.inspection import open_model, split_words
from saccade.models import load

WIDTH, LABELS = 7, ("A", "B", "C")


def test_two_columns(tmp_path):
    path = tmp_path / "labels.tsv"
    path.write_text("\nThe\tDET\ncat\tNOUN\n\n\nruns \tVERB\n.\tPUNCT\n")
    found = read_labels(path)
    assert [(s.name, s.text, s.labels) for s in found] == [
        (f"{path}:1", "The cat", ("DET", "NOUN")),
        (f"{path}:5", "runs .", ("VERB", "PUNCT")),
    ]
    assert found[1].forms == ["runs", "."]


def test_a_column_of_a_treebank(tmp_path):
    path = write(tmp_path, *DONT, line(1, "No", 0, "root"), "")
    tags, relations = read_labels(path), read_labels(path, "deprel")
    assert tags[0].labels == ("AUX", "PART", "VERB", "PRON", "PUNCT", "ADV", "PUNCT", "PUNCT")
    assert relations[0].labels[:3] == ("aux", "advmod", "root")
    assert tags[1].labels == (None,)
    with pytest.raises(ValueError, match="column: expected upos or deprel, got 'lemma'"):
        read_labels(path, "lemma")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("The\tDET\ncat NOUN\n\na\tb\n", r"labels.tsv:2: expected a word, a tab and a label, got 'cat NOUN'"),
        ("The\tDET\tx\n", r"labels.tsv:1: expected a word, a tab and a label"),
        ("The\t \ncat\tN\n", r"labels.tsv:1: expected a word, a tab and a label"),
        ("The\tN\n\ncat\tN\n", r"labels.tsv: expected two or more different labels, got 1"),
        ("The\tD\ncat\tN\n", r"labels.tsv: expected two or more sentences, to learn from and to test on, got 1"),
    ],
)
def test_damaged_labels_are_refused_with_the_place(tmp_path, content, words):
    path = tmp_path / "labels.tsv"
    path.write_text(content)
    with pytest.raises(ValueError, match=words):
        read_labels(path)


def sentences(count, seed=0, length=9, types=400):
    """Random words with random labels: whatever a layer knows of them has been planted."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(count):
        words = [f"w{k}" for k in draw.integers(types, size=length)]
        text = " ".join(words)
        labels = tuple(LABELS[k] for k in draw.choice(3, length, p=(0.5, 0.3, 0.2)))
        found.append(LabelledSentence(f"s{number}", text, tuple(split_words(text)), labels))
    return found


@pytest.fixture
def planted(monkeypatch):
    """Layer 0 is noise, layer 1 holds the label in a direction among noise, layer 2 is noise again."""
    known = {}

    def states(model, tokens):
        ids = tuple(tokens[0].tolist())
        draw = torch.Generator().manual_seed(sum(ids))
        noise = [torch.randn(1, len(ids), WIDTH, generator=draw) for _ in range(3)]
        inside = slice(len(model.before), len(ids) - len(model.after))
        directions = torch.linspace(-2, 2, 3 * WIDTH).view(3, WIDTH)
        noise[1][0, inside] = 0.1 * noise[1][0, inside] + directions[known[ids]]
        return noise

    model = PretendModel([[evenly], [evenly]])
    given = sentences(60)
    for sentence in given:
        ids = (*model.before, *model.encode(sentence.text).ids, *model.after)
        known[ids] = torch.tensor([LABELS.index(label) for label in sentence.labels])
    monkeypatch.setattr(probe, "hidden_states", states)
    return model, given


@pytest.mark.slow
def test_a_probe_finds_what_is_there_and_nothing_in_noise(planted):
    model, given = planted
    found = study_probe(model, given, seed=3)
    noise, known, again = found.layers
    assert known.accuracy == 1 and known.interval == (1, 1)
    assert known.control < 0.6  # what is planted is the label, not the word
    assert known.selectivity > 0.4
    low, high = found.majority_interval
    assert low <= found.majority_accuracy <= high
    assert found.majority == "A"
    for layer in (noise, again):
        # 135 held-out words: three standard deviations of the majority's share.
        assert layer.accuracy < found.majority_accuracy + 3 * (0.25 / found.words[1]) ** 0.5
    assert known.gain == pytest.approx(1 - noise.accuracy)
    assert known.gain_interval[0] > 0 > again.gain_interval[0]
    assert noise.gain == 0 and noise.gain_interval == (0, 0)
    assert all(layer.converged for layer in found.layers)
    assert found.sentences == (45, 15) and found.words == (405, 135)
    assert found.labels == LABELS


@pytest.mark.slow
def test_the_same_seed_gives_the_same_probe(planted):
    model, given = planted
    first, same, other = (study_probe(model, given, seed=seed).layers for seed in (1, 1, 2))
    assert first == same != other


def test_sentences_are_held_out_whole(planted, monkeypatch):
    model, given = planted
    seen = {}

    def learn(examples, held_out, seed, told):
        seen["in"], seen["out"] = set(examples.groups[~held_out]), set(examples.groups[held_out])
        return ()

    monkeypatch.setattr(probe, "_learn", learn)
    study_probe(model, given)
    assert not seen["in"] & seen["out"]
    assert len(seen["in"]) == 45 and len(seen["out"]) == 15


def test_only_as_many_words_as_asked_for(planted):
    model, given = planted
    found = study_probe(model, given, most=100)
    assert sum(found.words) == 108  # whole sentences of 9
    assert found.left == 48


def test_a_word_has_one_random_label_in_the_control_task():
    forms = np.array(["a", "b", "a", "c", "b"] * 20)
    labels = np.array(["A", "B", "B", "C", "B"] * 20)
    held_out = np.zeros(100, dtype=bool)
    drawn = probe._control(probe._ProbeExamples([], labels, forms, np.arange(100)), held_out, seed=0)
    for form in "abc":
        assert len(set(drawn[forms == form])) == 1
    assert set(drawn) <= {"A", "B", "C"}


def test_words_of_several_tokens_are_averaged(monkeypatch):
    model = PretendModel([[evenly]], pieces=2)
    kept = {}

    def states(model, tokens):
        return [torch.arange(tokens.shape[1], dtype=torch.float32)[None, :, None] * torch.ones(WIDTH)] * 2

    def learn(examples, held_out, seed, told):
        kept["vectors"] = examples.vectors
        return ()

    monkeypatch.setattr(probe, "hidden_states", states)
    monkeypatch.setattr(probe, "_learn", learn)
    given = [LabelledSentence(f"s{k}", "abcde fg h", ((0, 5), (6, 8), (9, 10)), ("A", "B", None)) for k in range(2)]
    found = study_probe(model, given)
    assert [v.shape for v in kept["vectors"]] == [(4, WIDTH)] * 2
    assert kept["vectors"][0][:2, 0].tolist() == [2.0, 4.0]  # tokens 1, 2, 3 and token 4
    assert found.missing == 2  # without a label


def test_too_long_sentences_are_left_out_and_counted():
    model = PretendModel([[evenly]], context=11)
    with pytest.raises(ValueError, match="x.tsv: expected two or more sentences that pretend can read, got 0"):
        study_probe(model, sentences(3, length=12), source="x.tsv")


def test_labels_on_one_side_alone_are_refused(monkeypatch):
    monkeypatch.setattr(probe, "hidden_states", lambda model, tokens: [torch.zeros(1, tokens.shape[1], WIDTH)] * 2)
    bare = [sentence._replace(labels=(None,) * 9) for sentence in sentences(7)]
    with pytest.raises(ValueError, match="none of the 7 sentences in use has a labelled word"):
        study_probe(PretendModel([[evenly]]), bare)
    order = np.random.default_rng(0).permutation(7).tolist()  # the first two are tested on
    learned = [sentence if i in order[2:] else bare[i] for i, sentence in enumerate(sentences(7))]
    with pytest.raises(ValueError, match="x.tsv: the words with labels are all in training sentences, or all in"):
        study_probe(PretendModel([[evenly]]), learned, source="x.tsv")


def test_labels_that_do_not_match_the_tokens_are_refused():
    class Deaf(PretendModel):
        def encode(self, text):
            ids, spans = super().encode(text)
            return type(super().encode(text))(ids[:3], spans[:3])

    with pytest.raises(
        ValueError,
        match=r"x.tsv: does not match the tokens of pretend: 12 of 18 words have no token, "
        r"the first is sentence s0, token 4 'w",
    ):
        study_probe(Deaf([[evenly]]), sentences(2), source="x.tsv")


@pytest.mark.parametrize("kind", [bert, gpt2, llama])
def test_hidden_states_of_checkpoints(kind, tmp_path):
    model = open_model(kind(tmp_path))
    tokens = model.whole(model.encode("The cat sat on the mat.").ids)
    module = model.module.train()
    found = hidden_states(model, tokens)
    assert module.training
    module.eval()
    with torch.no_grad():
        expected = AutoModel.from_pretrained(tmp_path).eval()(input_ids=tokens, output_hidden_states=True)
    assert len(found) == model.layers + 1
    # float32 in another order of sums; logits of up to a few hundred carry 300 roundings of 2^-24 into the weights.
    assert all(
        torch.allclose(a, b, atol=300 * 2**-22, rtol=300 * 2**-22)
        for a, b in zip(found, expected.hidden_states, strict=True)
    )
    assert torch.allclose(found[-1], expected.last_hidden_state, atol=300 * 2**-22)
    assert not any(states.requires_grad for states in found)


def test_hidden_states_of_our_own_model():
    lm = load()
    model = open_model()
    tokens = model.whole(model.encode("The cat sat on the mat.").ids)
    found = hidden_states(model, tokens)
    with torch.no_grad():
        x = lm.model.embedding(tokens) * lm.model.config.width**0.5
        assert torch.equal(found[0], x)
        logits = torch.nn.functional.linear(lm.model.decoder.norm(found[-1]), lm.model.embedding.weight)
        torch.testing.assert_close(logits, lm.model(tokens))
    assert len(found) == 5
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.module.decoder.blocks)
