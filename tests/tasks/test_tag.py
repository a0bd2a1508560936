"""Entities in texts: which words are read how, what is learned, and how good it is."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from seqeval.metrics.sequence_labeling import get_entities

import published
from looped import looped
from saccade import cli, tasks
from saccade.models import load
from saccade.models.output_heads import IGNORED
from saccade.tasks import _task
from saccade.tasks._example_task import ExampleObjective
from saccade.tasks._texts._entities import BIO, IOBES, completed, entities_of, tags_of
from saccade.tasks._texts._reader import innermost, windows
from saccade.tasks._texts._tagged import TaggedText
from saccade.tasks.tag import TaggedWords, WordPieces
from saccade.training import Settings

NAMES = {
    "person": [("ada",), ("ada", "lovelace"), ("bob",)],
    "place": [("paris",), ("new", "york"), ("rio", "la", "paz")],
}
FILLING = ["we", "saw", "the", "new film", "at", "old", "and", "then", "near"]  # "new" stands in a name, too
SMALL = {
    "width": 32, "layers": 1, "heads": 2, "vocabulary": 300, "steps": 200, "rate": 6e-3, "batch": 19, "dropout": 0.1,
    "precision": "no", "tensorboard": False, "cased": False,
}  # fmt: skip
Sentence = list[tuple[str, str]]


def sentences(count: int, seed: int, scheme=BIO) -> list[Sentence]:
    """Words and their tags: a name or two between others. No york is in the same sentence as a film."""
    draw = random.Random(seed)
    made: list[Sentence] = []
    while len(made) < count:
        words: Sentence = []
        for _ in range(draw.randrange(1, 3)):
            filling = " ".join(draw.choices(FILLING, k=draw.randrange(1, 4)))
            words += [(word, "O") for word in filling.split()]
            kind = draw.choice(list(NAMES))
            name = draw.choice(NAMES[kind])
            (entity,) = entities_of([f"B-{kind}", *[f"I-{kind}"] * (len(name) - 1)])
            words += zip(name, tags_of([entity], len(name), scheme), strict=True)
        if not {"york", "film"} <= {word for word, _ in words}:
            made.append([*words, (".", "O")])
    return made


def write_columns(path, data: list[Sentence], between="\t", more=()):
    lines = ["\n".join(between.join([word, *more, tag]) for word, tag in sentence) for sentence in data]
    path.write_text("\n\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    write_columns(folder / "names.conll", sentences(409, 3))
    write_columns(folder / "unseen.conll", sentences(101, 5))
    return folder


@pytest.fixture(scope="module")
def learned(files):
    return tasks.train("tag", files / "names.conll", files / "learned", **SMALL)


@pytest.fixture(scope="module")
def untrained(files):
    """The task and a model with new weights, where it does not matter what they are."""
    options = {name: SMALL[name] for name in ("width", "layers", "heads", "vocabulary", "cased")}
    task = tasks.Tag(**options).fitted(tasks.Tag().read(files / "names.conll"))
    return task, task.new_model(task.read(files / "names.conll")).eval()


@pytest.mark.slow
def test_learns_what_can_be_learned(learned, files):
    """ "new" is a name's where there is a york: a tag for each word is not enough."""
    report = tasks.test(learned, files / "unseen.conll")
    assert report.metrics == {"entity F1": 1.0, "precision": 1.0, "recall": 1.0, "word accuracy": 1.0}
    assert report.baselines["the most frequent tag of each word"]["entity F1"] < 0.9 and not report.better
    (found,) = tasks.predict(learned, "we saw old paris, near  New York.")
    assert [(one["text"], one["label"], one["start"], one["end"]) for one in found["entities"]] == [
        ("paris", "place", 11, 16),
        ("New York", "place", 24, 32),
    ]
    assert found["words"][3:8] == ["paris", ",", "near", "New", "York"]
    assert found["tags"][3:8] == ["B-place", "O", "O", "B-place", "I-place"]
    assert learned.task.line(found) == "we saw old [paris](place), near [New York](place)."


@pytest.mark.slow
def test_does_not_learn_what_cannot_be_learned(files, tmp_path):
    """That truth reaches the model only through the training tags."""
    data = sentences(211, 3)
    tags = np.random.default_rng(7).permutation([tag for sentence in data for _, tag in sentence]).tolist()
    shuffled = [[(word, tags.pop()) for word, _ in sentence] for sentence in data]
    run = tasks.train("tag", write_columns(tmp_path / "shuffled.conll", shuffled), tmp_path / "run", **SMALL)
    assert tasks.test(run, files / "unseen.conll", baseline=False).metrics["entity F1"] < 0.1


@pytest.mark.slow
def test_transformers_opens_the_run_and_says_the_same(learned):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(learned.folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(learned.folder)
    words = "we saw Ada Lovelace-Bob near unseenplace .".split()
    encoded = tokenizer(words, is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        probabilities, numbers = theirs(**encoded).logits[0].softmax(-1).max(-1)
    firsts = [encoded.word_ids().index(n) for n in range(len(words))]
    (output,) = learned.task.predict(learned.model, learned.task.changed({"words": "spaces"}).inputs([" ".join(words)]))
    assert output.tags == [theirs.config.id2label[int(numbers[n])] for n in firsts]
    np.testing.assert_allclose(output.probabilities, probabilities[firsts], atol=1e-6)


@pytest.mark.slow
def test_from_a_checkpoint(files, tmp_path):
    """It learns with the checkpoint's own pieces, a head that begins anew, and the checkpoint's limit of tokens."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = published.transformers().BertConfig(**sizes, vocab_size=97, max_position_embeddings=24)
    published.written(tmp_path / "published", "BertModel", config)
    published.written_words(tmp_path / "published", [" ".join(word for word, _ in one) for one in sentences(60, 3)])
    options = {name: SMALL[name] for name in ("steps", "rate", "batch", "precision", "tensorboard")}
    run = tasks.train("tag", files / "names.conll", tmp_path / "run", initial=tmp_path / "published", **options)
    assert tasks.test(run, files / "unseen.conll", baseline=False).metrics["entity F1"] > 0.95
    assert (run.folder / "vocab.txt").read_bytes() == (tmp_path / "published" / "vocab.txt").read_bytes()
    assert load(run.folder).label_names == list(run.task.tags)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["word pieces", "bytes"])
def test_pieces_belong_to_the_words_that_transformers_says(learned, tmp_path, kind):
    """Catches a word that takes its neighbour's piece, or its own second one."""
    transformers = pytest.importorskip("transformers")
    words = "Zoë's U.S. e-mail @ada #new_york naïve , -- 3.14 unknowableness ( x ) ...".split()
    if kind == "word pieces":
        theirs = transformers.AutoTokenizer.from_pretrained(learned.folder)
        model = learned.model
    else:
        model, theirs = _with_bytes(transformers, tmp_path)
    encoded = theirs(words, is_split_into_words=True)
    ids, firsts = WordPieces(model).of(_of_words(words))
    before, after = len(model.tokenizer.before), len(model.tokenizer.after)
    assert encoded["input_ids"][before:-after] == ids
    assert [encoded.word_ids().index(n) - before for n in range(len(words))] == firsts
    assert max(np.diff(firsts)) > 1  # or this would show nothing


def _with_bytes(transformers, folder):
    """A RoBERTa whose tokenizer splits words into bytes and pairs of them."""
    import tokenizers

    trained = tokenizers.ByteLevelBPETokenizer(add_prefix_space=True)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(["new york and the e-mail of zoë"] * 9, vocab_size=290, special_tokens=special)
    trained.save_model(str(folder))
    sizes = {"vocab_size": 290, "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.RobertaConfig(**sizes, num_hidden_layers=1, max_position_embeddings=90)
    transformers.RobertaModel(config).save_pretrained(folder)
    settings = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load(folder), transformers.RobertaTokenizerFast.from_pretrained(folder, add_prefix_space=True)


def _of_words(words, tags=None):
    starts = np.cumsum([0, *(len(word) + 1 for word in words)]).tolist()
    spans = tuple((start, start + len(word)) for start, word in zip(starts, words, strict=False))
    return TaggedText(" ".join(words), spans, tags, "text 1")


def test_every_word_has_a_first_piece(untrained):
    """Of several pieces the first; an unknown token where the tokenizer has none.

    A variation selector after an emoji, for one; without a token it would have no tag, and its sentence none.
    """
    model = untrained[1]
    tokenizer = model.tokenizer
    assert tokenizer.encode("\ufe0f").ids == []
    ids, firsts = WordPieces(model).of(_of_words(["ada", "\ufe0f", "lovelaces", "bob"]))
    assert ids[firsts[1]] == tokenizer.named["unk"] and len(set(firsts)) == 4
    pieces = tokenizer.encode("lovelaces").ids
    assert len(pieces) > 1 and ids[firsts[2] : firsts[3]] == pieces


# --- entities and metrics ---------------------------------------------------------------------------------------------


def _random_tags(draw, prefixes):
    tags = ["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in ("a", "b-c"))]
    return [draw.choice(tags) for _ in range(draw.randrange(1, 14))]


@looped("prefixes", ["BI", "BIES", "I"])
def test_entities_of_any_sequence_are_those_of_seqeval(prefixes):
    draw = random.Random(2)
    for _ in range(500):
        tags = _random_tags(draw, prefixes)
        found = [(one.kind, one.start, one.stop - 1) for one in entities_of(tags)]
        assert found == get_entities(tags), tags
        scheme = IOBES if prefixes == "BIES" else BIO
        repaired = tags_of(entities_of(tags), len(tags), scheme)
        assert get_entities(repaired) == found
        assert {tag[0] for tag in repaired} <= {"O", *scheme}


def test_repaired_tags_are_valid_in_their_scheme():
    """Strict evaluation, which takes nothing for an entity that the scheme does not allow, finds all of them."""
    from seqeval.scheme import IOB2, IOBES as STRICT, Entities

    draw = random.Random(3)
    for scheme, strict, prefixes in ((BIO, IOB2, "BI"), (IOBES, STRICT, "BIES")):
        for _ in range(200):
            tags = _random_tags(draw, prefixes)
            repaired = tags_of(entities_of(tags), len(tags), scheme)
            strictly = [(one.tag, one.start, one.end) for one in Entities([repaired], scheme=strict).entities[0]]
            assert strictly == [(one.kind, one.start, one.stop) for one in entities_of(tags)]


def test_scores_are_those_of_sets_of_entities():
    """Counted by hand: an entity is right if kind and both ends are."""
    draw = random.Random(5)
    truth = [_random_tags(draw, "BI") for _ in range(97)]
    found = [[tag if draw.random() < 0.7 else draw.choice(["O", "B-a", "I-b-c"]) for tag in tags] for tags in truth]
    task = tasks.Tag(tags=completed(tag for tags in truth for tag in tags))
    data = [TaggedText("", (), tuple(tags), "") for tags in truth]
    outputs = [TaggedWords(tags, []) for tags in found]
    sets = [{(n, *one) for n, tags in enumerate(part) for one in get_entities(tags)} for part in (truth, found)]
    right = len(sets[0] & sets[1])
    scores = task.scores(outputs, data)
    assert scores["precision"] == pytest.approx(right / len(sets[1]))
    assert scores["recall"] == pytest.approx(right / len(sets[0]))
    assert scores["entity F1"] == pytest.approx(2 * right / (len(sets[0]) + len(sets[1])))
    words = [(a, b) for one, other in zip(truth, found, strict=True) for a, b in zip(one, other, strict=True)]
    assert scores["word accuracy"] == pytest.approx(np.mean([a == b for a, b in words]))
    kinds = task.details(outputs, data).values["types"]
    assert {kind: row["count"] for kind, row in kinds.items()} == {
        kind: len([1 for one in sets[0] if one[1] == kind]) for kind in ("a", "b-c")
    }
    mine = [{one for one in part if one[1] == "b-c"} for part in sets]
    assert kinds["b-c"]["precision"] == pytest.approx(len(mine[0] & mine[1]) / len(mine[1]))


def test_the_baseline_is_the_most_frequent_tag():
    task = tasks.Tag(tags=completed(["B-a"]))
    training = [_of_words(["x", "x", "x", "y"], ("B-a", "O", "B-a", "I-a"))]
    (baseline,) = task.baselines(None, training, [], [_of_words(["y", "z", "x"])])
    assert baseline.outputs == [TaggedWords(["I-a", "O", "B-a"], [1.0, None, 2 / 3])]


# --- windows ----------------------------------------------------------------------------------------------------------


def test_windows_cover_a_text_and_give_each_word_its_best_place():
    for count in range(1, 41):
        for room in range(1, 13):
            parts = windows(count, room)
            assert all(len(part) <= room for part in parts) and (len(parts) == 1) == (count <= room)
            for place in range(count):
                chosen = parts[innermost(place, parts, count)]
                assert place in chosen
                # Whatever is cut away is at least a quarter of a window off, wherever a window may stand.
                left = place - chosen.start if chosen.start else room
                right = chosen.stop - 1 - place if chosen.stop < count else room
                assert min(left, right) >= (room - 1) // 4 - 1, (count, room, place)


def test_a_long_text_is_slid_over(untrained):
    """Each word has what the model says of it in its window alone."""
    task, model = untrained
    words = [word for sentence in sentences(9, 8) for word, _ in sentence]
    text = " ".join(words)
    task = task.changed({"longest": 13})
    (output,) = task.predict(model, task.inputs([text]))
    tokenizer = model.tokenizer
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(words) > 40  # a piece a word
    parts = windows(len(ids), 11)
    for number in (0, 5, 6, 17, len(words) - 1):
        part = parts[innermost(number, parts, len(ids))]
        row = torch.tensor([[*tokenizer.before, *ids[part.start : part.stop], *tokenizer.after]])
        with torch.no_grad():
            expected = model(input_ids=row).logits[0, 1 + number - part.start].softmax(-1)
        assert output.probabilities[number] == pytest.approx(expected.max().item(), abs=1e-5)
        assert output.tags[number] == task.tags[int(expected.argmax())]
    (cut,) = task.changed({"long": "cut"}).predict(model, task.inputs([text]))
    assert cut.probabilities[11:] == [None] * (len(words) - 11) and set(cut.tags[11:]) == {"O"}
    assert None not in cut.probabilities[:11]
    refusing = task.changed({"long": "refuse"})
    message = rf"text 1: {len(words) + 2} tokens are more than the 13 that are read; .* give --long slide"
    with pytest.raises(ValueError, match=message):
        refusing.predict(model, refusing.inputs([text]))


def test_parts_of_a_batch_weigh_their_words(untrained, files):
    """Texts of three windows and of one share a batch; the mean is over words, whatever row they are in."""
    task, model = untrained[0].changed({"longest": 7}), untrained[1]
    made = ExampleObjective(task, model, task.read(files / "unseen.conll"), [], Settings(steps=9, batch=13))
    batch = made.batch(1)
    assert len(batch["input_ids"]) > 13
    whole = made.loss(made.model, batch)
    parts = made.split(batch, 3)
    shares = [made.weight(part) / made.weight(batch) for part in parts]
    assert sum(shares) == pytest.approx(1) and len(set(shares)) > 1
    joined = sum(share * made.loss(made.model, part) for share, part in zip(shares, parts, strict=True))
    torch.testing.assert_close(joined, whole)
    words = sum(len(task.read(files / "unseen.conll")[n].words) for n in made._sampler.batches(0)[1])
    assert made.weight(batch) == words == (batch["labels"] != IGNORED).sum()


# --- data -------------------------------------------------------------------------------------------------------------


@looped(
    ("content", "expected"),
    [
        ("# id 17\tdomain=en\nAda _ _ B-x\nran _ _ O\n\n# id 18\tdomain=en\nBob _ _ B-x\n", ["Ada ran", "Bob"]),
        ("# sent_id = 1\n# text =\nAda\tB-x\nran\tO\n", ["Ada ran"]),
        ("# sent_id = 1\nAda N B B-x\nran V B O\n", ["Ada ran"]),
        ("# id 7\nAda N B-x\n\n# id 8\n# N O\nBob N B-x\n", ["Ada", "# Bob"]),
        ("#begin document (a); part 000\nAda\tB-x\n\n#end document\n", ["Ada"]),
        ("#\tO\n1\tO\n\n#\tO\n", ["# 1", "#"]),
        ("# O\n1 O\n", ["# 1"]),
        ("#ada\tB-x\n# O\tO\nran\tO\n", ["#ada # O ran"]),
    ],
)
def test_comments_before_a_sentence_are_no_words(tmp_path_factory, content, expected):
    """Those of MultiCoNER, CoNLL-U and CoNLL 2012; a # and a hashtag in columns are words."""
    path = tmp_path_factory.mktemp("comments") / "a.conll"
    path.write_text(content)
    assert [one.text for one in tasks.Tag().read(path)] == expected
    assert [one.text for one in tasks.Tag().read_inputs(path)][-1] == expected[-1]


def test_columns_and_spans_hold_the_same(tmp_path):
    data = sentences(17, 4)
    expected = [([word for word, _ in one], [tag for _, tag in one]) for one in data]
    write_columns(tmp_path / "tabs.conll", data)
    write_columns(tmp_path / "four.txt", data, between=" ", more=("NN", "B-NP"))
    write_columns(tmp_path / "inner.conll", [[(word, f"{tag} _") for word, tag in one] for one in data], " ")
    start = "-DOCSTART- O\n\n"
    (tmp_path / "tabs.conll").write_text(start + (tmp_path / "tabs.conll").read_text().replace("\n\n", "\n\t\r\n"))
    lines = []
    for words, tags in expected:
        example = _of_words(words)
        spans = [(example.words[one.start][0], example.words[one.stop - 1][1], one.kind) for one in entities_of(tags)]
        named = [dict(zip(("start", "end", "label"), span, strict=True)) for span in reversed(spans)]
        lines.append(json.dumps({"text": example.text, "spans": named}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    kinds = {"tabs.conll": {}, "four.txt": {"column": 4}, "inner.conll": {"column": 2}, "a.jsonl": {}}
    for name, options in kinds.items():
        found = tasks.Tag(**options).read(tmp_path / name)
        assert [([one.word(n) for n in range(len(one.words))], one.truth) for one in found] == expected, name
    plain = tasks.Tag().read_inputs(tmp_path / "tabs.conll")
    assert [one.text for one in plain] == [" ".join(words) for words, _ in expected]
    assert {one.tags for one in plain} == {None}
    (tmp_path / "spaces.conll").write_text("10\xa0000 O\nAda\u2009  B-x \n")
    (found,) = tasks.Tag().read(tmp_path / "spaces.conll")
    assert ([found.word(n) for n in range(2)], found.truth) == (["10\xa0000", "Ada\u2009"], ["O", "B-x"])


SPAN = '{"text": "ada met bob", "spans": [%s]}\n'


@looped(
    ("name", "content", "message"),
    [
        ("a.conll", "", r"a.conll: holds no words$"),
        ("a.conll", "\n\t\n", r"a.conll: holds no words$"),
        ("a.conll", "ada\n", r"line 1 has 1 columns, expected a word and, in the last, its tag$"),
        ("a.conll", "ada\tB-x\n\nbob\n", r"line 3 has 1 columns, expected 2 as in the first$"),
        ("a.conll", "ada\tB-x\n\tO\n", r"line 2: the first column is empty, expected a word$"),
        (
            "a.conll",
            "ada\tB-x\nmet\tVB\n",
            r"line 2: the tag 'VB' is not of BIO or IOBES; expected O, or B-, I-, E- or",
        ),
        ("a.conll", "ada\tU-x\n", r"line 1: the tag 'U-x' is not of BIO or IOBES"),
        ("a.conll", "ada\tB-\n", r"line 1: the tag 'B-' is not of BIO or IOBES"),
        ("a.conll", "ada\tO\n\nbob\tO\n\nx\tO\n", r"tags: expected entities to learn, every word is tagged 'O'$"),
        ("a.conll", "ada\tB-x\nmet\tO\n", r"a.conll: 1 examples are too few to split; give --validation$"),
        ("a.conll", b"ada\tO\n\xff\tO\n", r"a.conll: not a text in UTF-8 \(at byte 6\)$"),
        ("a.jsonl", '{"text": "ada"}\n', r"line 1: no column 'spans'; it has 'text'$"),
        ("a.jsonl", '{"text": "ada", "spans": 3}\n', r"line 1: spans: expected a list, got 3$"),
        ("a.jsonl", '{"text": " ", "spans": []}\n', r"line 1: the text has no word$"),
        (
            "a.jsonl",
            SPAN % '{"start": 0, "end": 3}',
            r"line 1: expected a span with start, end and label, got {'start'",
        ),
        (
            "a.jsonl",
            SPAN % '{"start": 8, "end": 12, "label": "x"}',
            r"span 8 to 12 is not in the text, which has 11 char",
        ),
        ("a.jsonl", SPAN % '{"start": 3, "end": 3, "label": "x"}', r"span 3 to 3 is not in the text"),
        ("a.jsonl", SPAN % '{"start": 0, "end": 5, "label": "x"}', r"span 0 to 5 cuts the word 'met' \(4 to 7\)$"),
        ("a.jsonl", SPAN % '{"start": 3, "end": 4, "label": "x"}', r"span 3 to 4 holds no word$"),
        (
            "a.jsonl",
            "\n" + SPAN % '{"start": 4, "end": 11, "label": "x"}, {"start": 0, "end": 7, "label": "x"}',
            r"line 2: the span 4 to 11 overlaps the one before, which ends at 7$",
        ),
    ],
)
def test_bad_data_is_told_in_one_line_and_nothing_is_written(tmp_path_factory, name, content, message):
    folder = tmp_path_factory.mktemp("bad")
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as raised:
        tasks.train("tag", folder / name, folder / "out", **SMALL)
    assert "\n" not in str(raised.value)
    assert not (folder / "out").exists()


def test_other_bad_input(files, tmp_path):
    cases = [
        ({"column": 1}, "column: must be at least 2, the first holds the words, got 1"),
        ({"column": 3}, r"line 1 has 2 columns, expected a word and, in column 3, its tag"),
        ({"words": "letters"}, "words: expected one of 'signs', 'spaces', got 'letters'"),
        ({"long": "fold"}, "long: expected one of 'slide', 'cut', 'refuse', got 'fold'"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            tasks.train("tag", files / "names.conll", tmp_path / "out", **{**SMALL, **options})
    with pytest.raises(FileNotFoundError, match=r"no\.conll: no such file or folder"):
        tasks.train("tag", tmp_path / "no.conll", tmp_path / "out", **SMALL)


def test_tags_that_training_has_not(tmp_path):
    task = tasks.Tag(tags=completed(["B-person", "O"]))
    write_columns(tmp_path / "new.conll", [[("ada", "I-person"), ("in", "O"), ("paris", "B-place")]])
    with pytest.raises(ValueError, match=r"line 3: the tag 'B-place' is not in the training data, which has O, B-p"):
        task.read(tmp_path / "new.conll")
    (tmp_path / "new.jsonl").write_text(SPAN % '{"start": 0, "end": 3, "label": "place"}')
    with pytest.raises(ValueError, match=r"line 1: the tag 'B-place' is not in the training data"):
        task.read(tmp_path / "new.jsonl")


def test_the_split_keeps_every_kind_to_learn_from():
    """A kind that only the validation data had could be neither learned nor judged."""
    task = tasks.Tag()
    rare = [_of_words(["x"], ("S-rare",)), _of_words(["x", "y"], ("B-odd", "I-odd"))]
    data = [*rare, *(_of_words([f"w{n}"], ("B-usual",)) for n in range(40))]
    for seed in range(7):
        training, judged = task.split(data, 0.5, seed)
        assert all(one in training for one in rare) and len(judged) == 21
        assert task.fitted(training).tags == completed(["S-rare", "B-odd", "B-usual"])
    assert judged == task.split(data, 0.5, 6)[1] != task.split(data, 0.5, 5)[1]


# --- pictures, commands, kills ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("always:1 of 3 inputs are empty")
def test_train_test_predict(files, tmp_path, capsys):
    out, unseen, picture = tmp_path / "run", str(files / "unseen.conll"), tmp_path / "names.svg"
    given = {name: value for name, value in SMALL.items() if value is not False}
    options = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
    assert cli.main(["train", "tag", str(files / "names.conll"), "--out", str(out), *options, "--no-tensorboard"]) == 0
    assert "entity F1 1.0000" in capsys.readouterr().out
    assert cli.main(["test", str(out), unseen, "--picture", str(picture)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[2].split() == ["this", "model", *["1.0000"] * 4]
    assert [line.split()[0] for line in told[-4:-1]] == ["entity", "person", "place"]
    assert picture.read_bytes().count(b"<path") > 30  # entities, and those that were found
    (tmp_path / "texts.txt").write_text("we saw ada lovelace\n\nnear rio la paz .\n")
    assert cli.main(["predict", str(out), str(tmp_path / "texts.txt")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines.pop(1) == dict.fromkeys(lines[0]) | {"text": ""}  # the empty line keeps its place
    assert [[one["text"] for one in line["entities"]] for line in lines] == [["ada lovelace"], ["rio la paz"]]
    assert cli.main(["predict", str(out), unseen]) == 0
    found = [json.loads(line)["tags"] for line in capsys.readouterr().out.splitlines()]
    assert found == [[tag for _, tag in sentence] for sentence in sentences(101, 5)]


def test_a_picture_of_any_words(untrained):
    """Signs that would be mathematics, letters that the font has not, words longer than a line."""
    words = ["$x_1$", "a$b", "\U0001f600", "漢字", "w" * 120, *["more"] * 40]
    data = [_of_words(words, ("B-person", *["O"] * 43, "B-place")), _of_words(["none"], ("O",))]
    outputs = [TaggedWords(["O", *["I-place"] * 44], []), TaggedWords(["O"], [])]
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        tested = _task.Tested(untrained[1], data, outputs, {})
        assert untrained[0].picture(tested, kind).startswith(start)
