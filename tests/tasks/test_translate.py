"""Translation: pairs from files, what is learned of them, how it is judged, and what is drawn."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import itertools
import json
import random
import warnings
from collections import defaultdict

import numpy as np
import pytest
import torch

from published import transformers, written, written_words
from saccade import cli, tasks
from saccade.models.tokenizers.byte_pairs import SPECIAL, train_byte_pairs
from saccade.models.tokenizers.sentencepiece import open_sentencepiece
from saccade.models.tokenizers.sentencepiece_files import MARIAN_SPECIAL, write_marian_pieces
from saccade.tasks import translate
from saccade.tasks._runs._prepared import PreparedTaskRun
from saccade.tasks._runs._training import request
from saccade.tasks._texts._alignment import alignment, cross_attention, information
from saccade.tasks._texts._lexicon import Lexicon, words_of
from saccade.tasks._texts._pairs import Pair, read_pairs
from saccade.training import Evaluation, Settings
from tasks.test_kills import server, survives_kills

__all__ = ["server"]  # a fixture

WORDS = {
    "det": {"le": "the", "un": "a", "ce": "this"},
    "noun": {"chat": "cat", "chien": "dog", "arbre": "tree", "fleuve": "river", "pain": "bread", "vin": "wine"},
    "adj": {"noir": "black", "petit": "small", "vieux": "old", "froid": "cold"},
    "verb": {"voit": "sees", "porte": "carries", "trouve": "finds", "aime": "loves"},
}
LANGUAGES = {"source": "xx", "target": "yy"}
SMALL = {
    **LANGUAGES, "width": 48, "layers": 1, "heads": 2, "vocabulary": 420, "steps": 400, "rate": 4e-3, "batch": 31,
    "dropout": 0.0, "precision": "no", "every": 100,
}  # fmt: skip


def phrases(count: int, seed: int) -> list[tuple[str, str]]:
    """Sentences of a made-up language and their translations: other words, and adjectives before nouns."""
    draw, made = random.Random(seed), []
    for _ in range(count):
        source, target = [], []
        for part in ("np", "verb", "np"):
            if part == "verb":
                one = draw.choice(list(WORDS["verb"]))
                source, target = [*source, one], [*target, WORDS["verb"][one]]
                continue
            det, noun, adj = (draw.choice(list(WORDS[kind])) for kind in ("det", "noun", "adj"))
            described = draw.random() < 0.5
            source += [det, noun, *([adj] if described else [])]
            target += [WORDS["det"][det], *([WORDS["adj"][adj]] if described else []), WORDS["noun"][noun]]
        made.append((" ".join(source) + ".", " ".join(target) + "."))
    return made


def write_pair(path, rows, languages=("xx", "yy")):
    """Two aligned files that begin with `path`."""
    for n, language in enumerate(languages):
        path.with_name(f"{path.name}.{language}").write_text("".join(f"{row[n]}\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """train.xx with train.yy, and unseen.xx with unseen.yy."""
    folder = tmp_path_factory.mktemp("corpus")
    known = phrases(997, 3)
    unseen = [pair for pair in phrases(150, 5) if pair not in known][:101]
    write_pair(folder / "train", known)
    write_pair(folder / "unseen", unseen)
    return folder


@pytest.fixture(scope="session")
def translator(corpus):
    """A run that has learned the language; trained once, and never written to."""
    return tasks.train("translate", corpus / "train", corpus / "learned", **SMALL)


@pytest.fixture(scope="session")
def apart(corpus):
    """As `translator`, with a vocabulary for each language."""
    options = {**SMALL, "separate": True, "vocabulary": 79}
    return tasks.train("translate", corpus / "train", corpus / "apart", **options)


@pytest.fixture(scope="session")
def untrained(corpus):
    """A task, a model with random weights, and the pairs that its tokens were learned from."""
    task = tasks.Translate(**LANGUAGES, width=24, layers=2, heads=2, vocabulary=293, dropout=0.0)
    pairs = task.read(corpus / "unseen")
    torch.manual_seed(5)
    return task, task.new_model(pairs), pairs


@pytest.mark.slow
def test_a_made_up_language_is_learned_exactly(translator, corpus):
    report = tasks.test(translator, corpus / "unseen")
    assert report.metrics == pytest.approx({"BLEU": 100.0, "chrF": 100.0})
    assert list(report.baselines) == ["word by word (IBM model 1)", "the source as it is"]
    assert 20 < report.baselines["word by word (IBM model 1)"]["BLEU"] < 90  # all words, in the other language's order
    assert report.baselines["the source as it is"]["BLEU"] < 10


@pytest.mark.slow
def test_shuffled_pairs_are_not_learned(corpus, tmp_path):
    """That what is said of unseen texts comes from their own words: nothing leaks from references."""
    rows = phrases(997, 3)
    targets = random.Random(1).sample([target for _, target in rows], len(rows))
    data = write_pair(tmp_path / "shuffled", [(source, t) for (source, _), t in zip(rows, targets, strict=True)])
    run = tasks.train("translate", data, tmp_path / "run", **SMALL)
    unseen = run.task.read(corpus / "unseen")
    found = run.task.predict(run.model, unseen)
    assert np.mean([one == pair.target for one, pair in zip(found, unseen, strict=True)]) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["translator", "apart"])
def test_transformers_opens_the_run_and_writes_the_same(name, request):
    """Catches a folder that only we can read: names, configuration, tokenizers, the search that its files ask for."""
    run = request.getfixturevalue(name)
    texts = [source for source, _ in phrases(7, 11)]
    theirs = transformers().AutoModelForSeq2SeqLM.from_pretrained(run.folder).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a package that transformers recommends for Marian
        tokenizer = transformers().AutoTokenizer.from_pretrained(run.folder)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert [ids[:n] for ids, n in zip(batch["input_ids"].tolist(), batch["attention_mask"].sum(1), strict=True)] == [
        run.model.tokenizer.whole(text) for text in texts
    ]
    assert theirs.generation_config.num_beams == run.task.beams == 4
    with torch.no_grad():
        written = tokenizer.batch_decode(theirs.generate(**batch), skip_special_tokens=True)
    assert written == [one["translation"] for one in tasks.predict(run, texts)]


@pytest.mark.slow
def test_vocabularies_of_two_languages_stay_apart(apart, corpus, tmp_path):
    """Catches targets that are read with the source's pieces, in the loss, in what is written, and in the picture."""
    source, target = apart.model.tokenizer, apart.model.tokenizer.targets
    assert source.written(40) != target.written(40) and source.pad == target.pad
    found = tasks.test(apart, corpus / "unseen", baseline=False)
    assert found.metrics["BLEU"] == pytest.approx(100)
    drawn = alignment(apart.model, "le chat noir voit un chien.", "the black cat sees a dog.")
    assert drawn.target == ("the", "black", "cat", "sees", "a", "dog", ".", "</s>")
    again = tasks.train(
        "translate", corpus / "unseen", tmp_path / "run", initial=apart.folder,
        **{**LANGUAGES, "steps": 1, "rate": 1e-9, "precision": "no"},
    )  # fmt: skip
    assert tasks.test(again, corpus / "unseen", baseline=False).metrics["BLEU"] == pytest.approx(100)


def test_pieces_of_each_language_are_the_same_each_time(tmp_path):
    sources, targets = zip(*phrases(97, 1), strict=True)
    (tmp_path / "again").mkdir()
    counts = [write_marian_pieces(folder, sources, targets, 53, 17) for folder in (tmp_path, tmp_path / "again")]
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name
    known = [json.loads((tmp_path / name).read_text()) for name in ("vocab.json", "target_vocab.json")]
    assert counts == [(53, 53)] * 2 and [len(pieces) for pieces in known] == [53, 53]
    for pieces, texts in zip(known, (sources, targets), strict=True):
        assert {name: pieces[name] for name in MARIAN_SPECIAL} == {"</s>": 0, "<unk>": 1, "<pad>": 2}
        assert set("".join(texts)) - {" "} <= set(pieces)
    tokenizer = open_sentencepiece(tmp_path)
    assert tokenizer.targets.decode(tokenizer.targets.whole("the cat sees this tree.")) == "the cat sees this tree."
    assert write_marian_pieces(tmp_path, ["ab ab"], targets, 53, 17)[0] < 53  # where no more merges are left
    least = 1 + len(set("".join(targets)) - {" "}) + len(MARIAN_SPECIAL)  # with the sign of a space
    with pytest.raises(ValueError, match=f"vocabulary: .* target texts .* need at least {least}, got {least - 1}"):
        write_marian_pieces(tmp_path, ["ab ab"], targets, least - 1, 17)


@pytest.mark.slow
def test_the_alignment_is_the_cross_attention_that_transformers_computes(untrained, tmp_path):
    """Catches another layer, encoder and decoder confused, rows that belong to the token before."""
    _, model, pairs = untrained
    model.save(tmp_path)
    theirs = transformers().AutoModelForSeq2SeqLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    text, translation = pairs[0].source, "the small cat quacks."
    source, target = model.tokenizer.whole(text), model.tokenizer.whole(translation)
    read = torch.tensor([[model.start, *target[:-1]]])
    with torch.no_grad():
        found = theirs(torch.tensor([source]), decoder_input_ids=read, output_attentions=True)
    ours = cross_attention(model, source, target)
    assert len(ours) == 2
    for weights, expected in zip(ours, found.cross_attentions, strict=True):
        torch.testing.assert_close(weights, expected[0], atol=1e-5, rtol=0)


def test_the_alignment_is_of_words(untrained):
    """Tokens of a source word add up, those of a target word are averaged, and the layer is the one that is named."""
    _, model, pairs = untrained
    text, translation = pairs[0].source, "the small cat quacks."
    merged = alignment(model, text, translation)
    assert merged.source == (*words_of(text), "</s>") and merged.target == (*words_of(translation), "</s>")
    whole = [model.tokenizer.whole(one) for one in (text, translation)]
    weights = cross_attention(model, *whole)[merged.layer].mean(0).double().numpy()

    def ends(sentence):
        words = [word if n == 0 or word == "." else f" {word}" for n, word in enumerate(words_of(sentence))]
        pieces = [len(model.tokenizer.encode("a" + word).ids) - 1 for word in words[-1:]]  # the sign has no space
        return np.cumsum([0, *(len(model.tokenizer.encode(word).ids) for word in words[:-1]), *pieces, 1])

    columns, rows = ends(text), ends(translation)
    assert weights.shape == (rows[-1], columns[-1]) and max(np.diff(rows)) > 1 and max(np.diff(columns)) > 1
    expected = [
        [weights[a:b, c:d].sum() / (b - a) for c, d in itertools.pairwise(columns)] for a, b in itertools.pairwise(rows)
    ]
    np.testing.assert_allclose(merged.weights, expected, atol=1e-7)
    np.testing.assert_allclose(merged.weights.sum(1), 1, atol=1e-6)
    assert merged.title == f"cross-attention, decoder layer {merged.layer + 1} of 2, mean of 2 heads"


def test_a_layer_tells_nothing_where_all_rows_look_at_the_same_word():
    """Sharpness alone would choose a layer that always looks at the end token."""
    end = np.array([[0.0, 0.0, 1.0]] * 3)
    assert information(end) == pytest.approx(0.0) and information(np.eye(3)) == pytest.approx(np.log(3))
    joint = np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]) / 2
    parts = [
        [joint[i, j] * np.log(joint[i, j] / (joint[i].sum() * joint[:, j].sum())) for j in range(3)] for i in (0, 1)
    ]
    assert information(2 * joint) == pytest.approx(np.sum(parts))


def test_the_loss_is_the_mean_over_the_targets_tokens(untrained):
    """Catches targets that see the token they are to predict, padding that counts, smoothing where it has no place."""
    task, model, pairs = untrained
    batch = task.collate(model, task.encode(model, pairs[:5]))
    assert batch["labels"].shape == batch["decoder_input_ids"].shape and bool((batch["labels"] == -100).any())
    logits = task.forward(model, batch)
    changed = {**batch, "decoder_input_ids": batch["decoder_input_ids"].clone()}
    changed["decoder_input_ids"][:, 3] = 7
    assert torch.allclose(task.forward(model, changed)[:, :3], logits[:, :3], atol=1e-6)
    losses, smoothed, lengths = [], [], []
    for pair, row in zip(pairs, logits.log_softmax(-1), strict=False):
        ids = model.tokenizer.whole(pair.target)
        assert model.tokenizer.named["eos"] == ids[-1] and model.start not in ids
        assert batch["decoder_input_ids"][len(lengths), : len(ids)].tolist() == [model.start, *ids[:-1]]
        lengths.append(len(ids))
        losses += [-row[n, token] for n, token in enumerate(ids)]
        smoothed += [-0.9 * row[n, token] - 0.1 * row[n].mean() for n, token in enumerate(ids)]
    torch.testing.assert_close(task.loss(logits, batch, learning=False), torch.stack(losses).mean())
    torch.testing.assert_close(task.loss(logits, batch, learning=True), torch.stack(smoothed).mean())
    assert task.weight(batch, learning=True) == len(losses)


def test_parts_of_a_batch_weigh_what_they_are_a_mean_over(untrained):
    task, model, pairs = untrained
    made = task.objective(model, pairs, pairs[:9], Settings(steps=5, batch=13, seed=3))
    batch = made.batch(1)
    whole = made.loss(model, batch)
    shares = [(made.weight(part) / made.weight(batch), made.loss(model, part)) for part in made.split(batch, 3)]
    torch.testing.assert_close(sum(share * loss for share, loss in shares), whole)
    assert made.tokens(batch) == made.weight(batch) == int(batch["decoder_attention_mask"].sum())


def test_a_look_translates_a_few_pairs_without_beams(untrained, monkeypatch):
    """Catches looks that take as long as training: the loss is of all validation pairs, BLEU of some."""
    task, model, pairs = untrained
    monkeypatch.setattr(translate, "LOOKED", 3)
    seen = []

    def scores(self, outputs, data):
        seen.append((self.beams, list(data)))
        return {"BLEU": 1.0}

    monkeypatch.setattr(translate.Translate, "scores", scores)
    looked = task.objective(model, pairs, pairs[:9], Settings(steps=5, batch=13)).evaluate(model)
    assert seen == [(1, [pairs[0], pairs[4], pairs[8]])] and looked.cost == -1.0
    batch = task.collate(model, task.encode(model, pairs[:9]))
    assert looked.loss == pytest.approx(task.loss(task.forward(model, batch), batch, learning=False).item(), rel=1e-5)


def test_a_run_says_how_many_pairs_it_translated(corpus, tmp_path, monkeypatch):
    wanted = request("translate", corpus / "unseen", tmp_path / "out", {**SMALL, "steps": 1})
    run, found = PreparedTaskRun.of(wanted, None), Evaluation(2.0, {"BLEU": 1.0})
    count = len(wanted.validation)
    scored = "over all validation data, translated without beams"
    assert run.conclusion(found) == f"best weights, {scored}: BLEU 1.0000, loss 2.0000"
    monkeypatch.setattr(translate, "LOOKED", 3)
    scored = f"over 3 of {count} validation pairs, translated without beams, and the loss of all"
    assert run.conclusion(found).startswith(f"best weights, {scored}: BLEU")
    assert f"| best weights, {scored} | BLEU 1.0000 |" in run.card([], 1, found)


def test_predictions_do_not_hang_on_the_references(untrained):
    task, model, pairs = untrained
    known = task.predict(model, pairs[:3])
    assert known == task.predict(model, task.inputs([pair.source for pair in pairs[:3]]))
    assert any(known)


def test_bleu_and_chrf_are_sacrebleus():
    """Catches translations and references swapped, BLEU by sentences, and lower case where nobody asked for it."""
    import sacrebleu

    found = ["The old dog sleeps on the sofa.", "A man rides", "two women talk in front of a Shop ."]
    truth = ["The old dog sleeps on a sofa.", "A man is riding a bike.", "Two women talk in front of a shop."]
    data = [Pair("", text, "") for text in truth]
    task = tasks.Translate(**LANGUAGES, lowercase=True)
    scores = task.scores(found, data)
    assert scores == pytest.approx(
        {
            "BLEU": sacrebleu.corpus_bleu(found, [truth]).score,
            "chrF": sacrebleu.corpus_chrf(found, [truth]).score,
            "BLEU lowercased": sacrebleu.corpus_bleu(found, [truth], lowercase=True).score,
        },
        abs=1e-9,
    )
    assert scores["BLEU"] < scores["BLEU lowercased"] and task.cost(scores) == -scores["BLEU"]
    signatures = task.details(found, data).values["signatures"]
    assert "case:mixed|eff:no|tok:13a|smooth:exp" in signatures["BLEU"] and "case:lc" in signatures["BLEU lowercased"]
    assert list(dataclasses.replace(task, lowercase=False).scores(found, data)) == ["BLEU", "chrF"]


def test_the_lexicon_is_ibms_model_1():
    """Against the algorithm as the paper has it, in loops."""
    # Of "oui" the likeliest word is "yes", though "aye" comes from nothing else.
    rows = [*phrases(61, 2), ("oui", "yes"), ("oui", "yes"), ("oui", "aye"), *[("si", "yes")] * 5]
    sources, targets = zip(*rows, strict=True)
    t: dict[tuple[str, str], float] = defaultdict(lambda: 1.0)
    for _ in range(5):
        counts, totals = defaultdict(float), defaultdict(float)
        for source, target in zip(sources, targets, strict=True):
            for e in words_of(target):
                norm = sum(t[e, f] for f in words_of(source))
                for f in words_of(source):
                    counts[e, f] += t[e, f] / norm
                    totals[f] += t[e, f] / norm
        t = defaultdict(float, {(e, f): count / totals[f] for (e, f), count in counts.items()})
    lexicon = Lexicon(sources, targets)
    for f in {word for source in sources for word in words_of(source)}:
        best = max(probability for (_, known), probability in t.items() if known == f)
        assert t[lexicon.translated(f), f] == pytest.approx(best)
    assert lexicon.translated("oui") == "yes"
    assert lexicon.translated("Le chat (noir) quux, voit.") == f"Le cat (black) quux, {lexicon.translated('voit')}."


def test_byte_pairs_are_the_same_each_time():
    texts = [text for pair in phrases(97, 1) for text in pair] + ["Ünïcode wörds", "x" * 30]
    first, second = (train_byte_pairs(texts, 350) for _ in range(2))
    assert first.to_str() == second.to_str() and first.get_vocab_size() == 350
    assert [first.id_to_token(n) for n in range(4)] == list(SPECIAL)
    for text in ("Ünïcode 漢字 cat.", "cat the cat"):
        assert first.decode(first.encode(text).ids) == text
    assert first.encode("cat the cat").ids[0] == first.encode("cat the cat").ids[-2]  # one token, wherever it stands
    with pytest.raises(ValueError, match="256 bytes and the special tokens need at least 260, got 259"):
        train_byte_pairs(texts, 259)


def test_pairs_from_every_kind_of_file(tmp_path):
    rows = [("ein Hund", "a dog"), ("zwei\u2028Katzen\x0b", "two cats"), ('"so"\r', "so")]
    expected = [(source.removesuffix("\r"), target) for source, target in rows]
    write_pair(tmp_path / "plain", rows, ("de", "en"))
    for n, language in enumerate(("de", "en")):
        text = "\n".join(row[n] for row in rows)
        (tmp_path / f"packed.{language}.gz").write_bytes(gzip.compress(text.encode()))
    with (tmp_path / "table.tsv").open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([("en", "n", "de"), *((b, "1", a) for a, b in expected)])
    lines = "".join(json.dumps({"de": source, "en": target}) + "\n" for source, target in expected)
    (tmp_path / "lines.jsonl").write_text(lines)
    task = tasks.Translate(source="de", target="en")
    for name in ("plain", "packed", "table.tsv", "lines.jsonl"):
        assert [(pair.source, pair.target) for pair in task.read(tmp_path / name)] == expected, name
    for name in ("plain.de", "packed.de.gz", "table.tsv"):
        found = task.read_inputs(tmp_path / name)
        assert [(pair.source, pair.target) for pair in found] == [(source, None) for source, _ in expected]
    assert task.files(tmp_path / "packed") == [tmp_path / "packed.de.gz", tmp_path / "packed.en.gz"]
    assert task.files(tmp_path / "lines.jsonl") == [tmp_path / "lines.jsonl"]


def test_one_file_of_two_is_known_as_such(tmp_path):
    for name in ("a.xx", "a.yy.gz"):
        (tmp_path / name).write_bytes(b"eins\n")
    told = f"is one file of two; give what both begin with: {tmp_path}/a, with source='xx' target='yy'$"
    for name in ("a.xx", "a.yy.gz"):
        with pytest.raises(FileNotFoundError, match=told):
            read_pairs(tmp_path / name, "source", "target")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a.xx": "eins\nzwei\n", "a.yy": "one\n"},
            r"a.xx: line 2 of 2 has no partner, .*a.yy ends at line 1; expected as many lines in both$",
        ),
        (
            {"a.xx": "eins\n", "a.zz": "un\n"},
            r"a.yy: no such file, nor a.yy.gz; .* begin with a.: a.xx, a.zz, with source='xx' target='zz'$",
        ),
        ({"a.xx": "eins\n", "a.png": b"\x89PNG\0", "a.tsv": "x"}, r"a.yy: no such file, .* begin with a.: a.xx$"),
        ({}, r"a.xx: no such file, nor a.xx.gz; .* begin with a.: none$"),
        ({"a.xx": "eins\n\nx\n", "a.yy": "one\n\ny\n"}, r"a: line 2: the text in 'xx' is empty \(1 of 3 lack one\)"),
        (
            {"a.xx": "eins\nx\n", "a.yy": "one\n \n"},
            r"a: line 2: the text in 'yy' is empty \(1 of 2 lack one\)",
        ),
        ({"a.xx": "", "a.yy": ""}, r"a.xx: holds no lines$"),
        ({"a.xx": b"\xff\n", "a.yy": "x\n"}, r"a.xx: not a text in UTF-8 \(at byte 0\)$"),
        ({"a.xx.gz": b"no", "a.yy": "x\n"}, r"a.xx.gz: damaged, not a gzip file"),
        (
            {"a.csv": "xx,zz\nx,y\n"},
            r"a.csv: no column 'yy' in the first line, which must name them; it has 'xx', 'zz'$",
        ),
        ({"a.jsonl": '{"xx": "x", "yy": 3}\n'}, r"a.jsonl: line 1: expected a text in 'yy', got 3$"),
    ],
)
def test_bad_data_is_told_in_one_line_and_nothing_is_written(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    data = next((tmp_path / name for name in files if name.endswith((".csv", ".jsonl"))), tmp_path / "a")
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        tasks.train("translate", data, tmp_path / "out", **SMALL)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_other_bad_input(corpus, untrained, tmp_path):
    for options, message in (
        ({"target": "xx"}, "source, target: expected two languages, got 'xx' twice"),
        ({"beams": 0}, "beams: must be at least 1, got 0"),
        ({"label_smoothing": 1.0}, r"label_smoothing: must be in \[0, 1\), got 1.0"),
        ({"vocabulary": 100}, "vocabulary: 256 bytes and the special tokens need at least 260, got 100"),
    ):
        with pytest.raises(ValueError, match=message):
            tasks.train("translate", corpus / "train", tmp_path / "out", **{**SMALL, **options})
    assert not (tmp_path / "out").exists()
    task, model, pairs = untrained
    short = dataclasses.replace(task, longest=5, long="refuse")
    with pytest.raises(
        ValueError, match=r"unseen: line 1: \d+ tokens are more than the 5 that are read; cut the text, or"
    ):
        short.encode(model, pairs)
    cut = dataclasses.replace(short, long="cut").encode(model, pairs)
    end = model.tokenizer.named["eos"]
    assert all(len(source) == len(target) == 5 and source[-1] == target[-1] == end for source, target in cut)
    with pytest.raises(ValueError, match="text 2: the text in 'xx' is empty"):
        task.inputs(["le chat.", " "])
    skipping = dataclasses.replace(task, skip_empty=True)
    assert [skipping.is_empty(pair) for pair in skipping.inputs(["le chat.", " "])] == [False, True]


def test_a_run_of_another_task_is_refused(learned, corpus, tmp_path):
    with pytest.raises(ValueError, match="head: BERT has .*; got 'conditional-generation'"):
        tasks.train("translate", corpus / "train", tmp_path / "out", initial=learned.folder, **SMALL)
    with pytest.raises(ValueError, match="is a run of the task classify, not of translate; give a folder of translate"):
        tasks.train("translate", corpus / "train", learned.folder, resume=True, **SMALL)


BART = {
    "vocab_size": 199, "d_model": 24, "max_position_embeddings": 64,
    **{f"{side}_{name}": size for side in ("encoder", "decoder")
       for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 48))},
}  # fmt: skip
T5 = {"vocab_size": 199, "d_model": 24, "d_kv": 12, "d_ff": 48, "num_layers": 1, "num_heads": 2}
KINDS = {
    "BartForConditionalGeneration": ("BartConfig", BART),
    "MarianMTModel": ("MarianConfig", {**BART, "pad_token_id": 0, "decoder_start_token_id": 0}),
    "T5ForConditionalGeneration": ("T5Config", {**T5, "decoder_start_token_id": 0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_from_a_checkpoint_with_its_own_tokenizer(corpus, tmp_path, kind):
    """Catches what only BART's layout has: start tokens, lengths, embeddings. The loss must fall far."""
    config, sizes = KINDS[kind]
    written(tmp_path / "published", kind, getattr(transformers(), config)(**sizes))
    written_words(tmp_path / "published", [text for pair in phrases(200, 3) for text in pair])
    options = {"steps": 120, "rate": 5e-3, "batch": 31, "precision": "no", "every": 40, "longest": 30, **LANGUAGES}
    data, out = corpus / "train", tmp_path / "run"
    run = tasks.train("translate", data, out, initial=tmp_path / "published", prefix="say: ", **options)
    curve = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    assert curve[-1]["validation_loss"] < 0.5 * np.log(199)
    batch = run.task.collate(run.model, run.task.encode(run.model, run.task.read(corpus / "unseen")[:3]))
    assert set(batch["decoder_input_ids"][:, 0].tolist()) == {run.model.start}
    assert (out / "vocab.txt").read_bytes() == (tmp_path / "published" / "vocab.txt").read_bytes()


@pytest.mark.slow
def test_from_another_run_with_its_tokens(translator, corpus, tmp_path):
    run = tasks.train(
        "translate", corpus / "unseen", tmp_path / "run", initial=translator.folder,
        **{**LANGUAGES, "steps": 1, "rate": 1e-9, "precision": "no"},
    )  # fmt: skip
    assert tasks.test(run, corpus / "unseen", baseline=False).metrics["BLEU"] == pytest.approx(100)
    assert (run.folder / "tokenizer.json").read_bytes() == (translator.folder / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(server, corpus, tmp_path):
    """Tokens that are learned anew in each process, looks that write translations, and the generator's state."""
    options = """--source xx --target yy --layers 1 --heads 2 --width 12 --vocabulary 300 --batch 17 --accumulate 2
    --precision bf16 --steps 13 --every 5 --checkpoint-every 3 --dropout 0.2""".split()
    survives_kills(server, tmp_path, ["train", "translate", str(corpus / "unseen"), *options], 3)


@pytest.mark.slow
def test_the_three_commands(translator, corpus, tmp_path, capsys, monkeypatch):
    run, picture = str(translator.folder), tmp_path / "alignment.png"
    assert cli.main(["test", run, str(corpus / "unseen"), "--picture", str(picture), "--set", "lowercase=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run} on {corpus / 'unseen'}: 101 examples"
    assert lines[1].split() == ["BLEU", "chrF", "BLEU", "lowercased"] and lines[2].split()[2:] == ["100.0000"] * 3
    assert any(line.startswith("BLEU: nrefs:1|case:mixed|eff:no|tok:13a") for line in lines)
    assert lines[-1] == f"picture: {picture}" and picture.stat().st_size > 1000
    assert cli.main(["predict", run, "le chat noir voit un chien."]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert found == {"text": "le chat noir voit un chien.", "translation": "the black cat sees a dog."}
    monkeypatch.setattr("sys.stdin", io.StringIO("un pain aime ce vin froid.\n"))
    assert cli.main(["predict", run, "--set", "beams=1"]) == 0
    assert json.loads(capsys.readouterr().out)["translation"] == "a bread loves this cold wine."
    assert cli.main(["predict", run, str(corpus / "unseen.xx")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 101
    assert cli.main(["predict", run, "le chat", "--set", "width=3"]) == 2
    assert "width: cannot differ from what translate was trained with" in capsys.readouterr().err
