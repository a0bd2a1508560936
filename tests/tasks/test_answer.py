"""Answers to questions: what is read, which span is chosen, what is learned, and how good it is."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from looped import looped
from published import transformers, written, written_words
from saccade import cli, tasks
from saccade.models import load
from saccade.tasks import _task
from saccade.tasks._example_task import ExampleObjective
from saccade.tasks._texts._answer_baseline import exact_match, word_f1
from saccade.tasks._texts._questions import Question
from saccade.tasks.answer import FoundAnswer
from saccade.training import Settings

# What a word is has to meet what is asked for, which a model comes to late: fewer questions are learned by heart.
KINDS = {
    "what colour": ["red", "dark blue", "green", "light green"],
    "which thing": ["car", "house", "old boat", "hat"],
    "where": ["paris", "new york", "oslo"],
}
FILLING = "and then we saw it again with some friends".split()
SMALL = {
    "width": 32, "layers": 2, "heads": 2, "vocabulary": 300, "steps": 400, "rate": 4e-3, "batch": 19, "dropout": 0.1,
    "precision": "no", "tensorboard": False, "every": 40, "patience": 99,
}  # fmt: skip


def questions(count: int, seed: int, impossible: float = 0.0) -> list[Question]:
    """A colour, a thing and a place between other words; one of them is asked for, or what there is not."""
    draw = random.Random(seed)
    made = []
    for n in range(count):
        asked = draw.choice(list(KINDS))
        missing = asked if draw.random() < impossible else None
        context, answers = "", ()
        for kind in draw.sample(list(KINDS), len(KINDS)):
            context += " ".join(draw.choices(FILLING, k=draw.randrange(1, 4))) + " "
            word = draw.choice(KINDS[kind])
            if kind == asked and missing is None:
                answers = ((word, len(context)),)
            if kind != missing:
                context += f"{word} "
        made.append(Question(f"{asked} was it ?", f"{context}.", answers, f"q{n}"))
    return made


def write_lines(path, data):
    named = [
        {
            "question": one.question,
            "context": one.context,
            "answers": [{"text": text, "start": start} for text, start in one.answers],
        }
        for one in data
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in named))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    write_lines(folder / "questions.jsonl", questions(809, 3))
    write_lines(folder / "unseen.jsonl", questions(101, 5))
    return folder


@pytest.fixture(scope="module")
def learned(files):
    return tasks.train("answer", files / "questions.jsonl", files / "learned", **SMALL)


@pytest.fixture(scope="module")
def untrained(files):
    """The task and a model with new weights, where it does not matter what they are."""
    options = {name: SMALL[name] for name in ("width", "layers", "heads", "vocabulary")}
    training = tasks.Answer().read(files / "questions.jsonl")
    torch.manual_seed(3)
    task = tasks.Answer(**options).fitted(training)
    model = task.new_model(training).eval()
    with torch.no_grad():
        model.head.inner.weight.normal_(std=1.0)  # or all spans would be alike
    return task, model


@pytest.mark.slow
def test_learns_what_can_be_learned(learned, files):
    report = tasks.test(learned, files / "unseen.jsonl")
    assert report.metrics == {"exact match": 1.0, "F1": 1.0}
    assert [name.partition(" (")[0] for name in report.baselines] == ["logistic regression on words"]
    (found,) = tasks.predict(learned, "What colour was it ? ||| then we saw  Light Green and old boat with oslo .")
    assert (found["answer"], found["start"], found["end"]) == ("Light Green", 13, 24)
    assert 0.5 < found["probability"] <= 1.0
    assert learned.task.line(found).startswith("Light Green ")


@pytest.mark.slow
def test_does_not_learn_what_cannot_be_learned(files, tmp_path):
    """That truth reaches the model only through the training answers: one of three kinds is as good as another."""
    draw, data = random.Random(9), questions(809, 3)
    asked = [f"{draw.choice(list(KINDS))} was it ?" for _ in data]
    shuffled = [Question(question, one.context, one.answers, "") for question, one in zip(asked, data, strict=True)]
    run = tasks.train("answer", write_lines(tmp_path / "a.jsonl", shuffled), tmp_path / "run", **SMALL)
    found = tasks.test(run, files / "unseen.jsonl", baseline=False).metrics["exact match"]
    assert found < 1 / 3 + 4 * (2 / 9 / 101) ** 0.5


@pytest.mark.slow
def test_where_there_is_no_answer_none_is_given(tmp_path):
    data = write_lines(tmp_path / "some.jsonl", questions(809, 3, impossible=0.4))
    unseen = write_lines(tmp_path / "unseen.jsonl", questions(101, 5, impossible=0.4))
    run = tasks.train("answer", data, tmp_path / "run", **{**SMALL, "steps": 600})
    assert run.task.impossible
    report = tasks.test(run, unseen)
    assert report.metrics["exact match"] == 1.0
    assert report.as_dict()["kinds"] == {
        kind: {"exact match": 1.0, "F1": 1.0} for kind in ("with an answer", "without an answer")
    }
    (found,) = tasks.predict(run, "where was it ? ||| then we saw red and some old boat again .")
    assert (found["answer"], found["start"], found["end"]) == ("", None, None)
    assert run.task.line(found).startswith("(no answer) ")


@pytest.mark.slow
def test_transformers_opens_the_run_and_says_the_same(learned):
    library = transformers()
    theirs = library.AutoModelForQuestionAnswering.from_pretrained(learned.folder).eval()
    tokenizer = library.AutoTokenizer.from_pretrained(learned.folder)
    one = questions(1, 8)[0]
    encoded = tokenizer(one.question, one.context, return_tensors="pt")
    ((row,),) = learned.task.encode(learned.model, [one])
    assert encoded["input_ids"][0].tolist() == row.ids and encoded["token_type_ids"][0].tolist() == row.types
    with torch.no_grad():
        output = theirs(**encoded)
        ours = learned.task.forward(learned.model, learned.task.collate(learned.model, [[row]]))
    torch.testing.assert_close(ours[0], output.start_logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours[1], output.end_logits, atol=1e-5, rtol=0)


FAMILIES = {
    "BertModel": ("BertConfig", {"type_vocab_size": 2}),
    "DistilBertModel": ("DistilBertConfig", {"dim": 24, "n_layers": 1, "n_heads": 2, "hidden_dim": 48}),
    "ElectraModel": ("ElectraConfig", {"embedding_size": 24}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_kind_of_checkpoint_reads_pairs(files, tmp_path, kind):
    """Catches models without types that are given some, and rows that a published tokenizer would make otherwise."""
    config, own = FAMILIES[kind]
    sizes = {"vocab_size": 97, "max_position_embeddings": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"hidden_size": 24, "intermediate_size": 48} if "dim" not in own else {}
    if "dim" in own:
        sizes = {name: sizes[name] for name in ("vocab_size", "max_position_embeddings")}
    written(tmp_path / "published", kind, getattr(transformers(), config)(**sizes, **own))
    texts = [f"{one.question} {one.context}" for one in questions(20, 1)]
    written_words(tmp_path / "published", texts, tokenizer_class=config.replace("Config", "Tokenizer"))
    options = {"steps": 2, "batch": 7, "precision": "no", "tensorboard": False}
    run = tasks.train("answer", files / "questions.jsonl", tmp_path / "run", initial=tmp_path / "published", **options)
    one = questions(1, 8)[0]
    theirs = transformers().AutoTokenizer.from_pretrained(run.folder)(one.question, one.context)
    ((row,),) = run.task.encode(run.model, [one])
    assert row.ids == theirs["input_ids"] and row.types == theirs.get("token_type_ids")
    assert load(run.folder).request.head == "question-answering"


# --- spans ------------------------------------------------------------------------------------------------------------


def _looked_through(starts, stops, allowed):
    """Every span by itself: the best, and the share of it."""
    scores = {(i, j): starts[i] + stops[j] for i, j in allowed}
    best = max(scores, key=scores.__getitem__)
    return best, np.exp(scores[best]) / sum(np.exp(score) for score in scores.values())


@pytest.mark.parametrize("longest", [2, 30])
def test_the_answer_is_the_best_span_of_the_context(untrained, longest):
    """Not one of the question, nor backwards, nor too long; by every pair of tokens."""
    task, model = untrained[0].changed({"longest_answer": longest}), untrained[1]
    for one in questions(5, 6):
        (found,) = task.predict(model, [one])
        tokenizer = model.tokenizer
        question, context = tokenizer.encode(one.question).ids, tokenizer.encode(one.context)
        ids = torch.tensor([[*tokenizer.before, *question, tokenizer.named["sep"], *context.ids, *tokenizer.after]])
        types = (torch.arange(ids.shape[1]) >= len(question) + 2).long()[None]
        with torch.no_grad():
            output = model(input_ids=ids, token_type_ids=types)
        inside = slice(len(question) + 2, len(question) + 2 + len(context.ids))
        starts, stops = (logits[0, inside].double() for logits in (output.start_logits, output.end_logits))
        count = len(context.ids)
        allowed = [(i, j) for i in range(count) for j in range(i, min(i + longest, count))]
        (first, last), share = _looked_through(starts.numpy(), stops.numpy(), allowed)
        assert (found.start, found.stop) == (context.spans[first][0], context.spans[last][1])
        assert found.probability == pytest.approx(share, rel=1e-4)


def test_long_contexts_are_slid_over(untrained):
    """The answer is the best span of all windows, in characters of the whole context."""
    task, model = untrained[0].changed({"longest": 23}), untrained[1]
    one = questions(1, 4)[0]
    context = " ".join([one.context] * 3)
    late = Question(one.question, context, ((one.answers[0][0], one.answers[0][1] + 2 * len(one.context) + 2),), "q")
    (rows,) = task.encode(model, [late])
    assert len(rows) > 2 and all(len(row.ids) <= 23 for row in rows)
    held = [row for row in rows if row.ends != (0, 0)]
    assert 0 < len(held) < len(rows)
    for row in held:
        first, last = row.ends
        assert context[row.characters[first][0] : row.characters[last][1]] == late.answers[0][0]
        assert row.characters[first][0] == late.answers[0][1]
    (found,) = task.predict(model, [late])
    each = [
        task.outputs(model, task.forward(model, batch), batch) for batch in (task.collate(model, [[r]]) for r in rows)
    ]
    assert (found.start, found.stop) in [(alone.start, alone.stop) for (alone,) in each]
    counts = []
    hook = model.register_forward_pre_hook(lambda *given: counts.append(len(given[-1]["input_ids"])), with_kwargs=True)
    (apart,) = task.predict(model, [late], rows=2)  # where memory is too little for all windows of one text
    hook.remove()
    assert max(counts) == 2 and (apart.start, apart.stop) == (found.start, found.stop)
    assert apart.probability == pytest.approx(found.probability, rel=1e-5)
    (cut,) = task.changed({"long": "cut"}).encode(model, [late])
    assert [row.ids for row in cut] == [rows[0].ids] and cut[0].ends == (0, 0)
    with pytest.raises(ValueError, match=r"q: \d+ tokens are more than the 23 that are read; .* give --long slide"):
        task.changed({"long": "refuse"}).encode(model, [late])
    with pytest.raises(
        ValueError, match=r"q: the question has \d tokens, which leaves no room for its context in the 7"
    ):
        task.changed({"longest": 7}).encode(model, [late])


def test_parts_of_a_batch_weigh_their_rows(untrained):
    task, model = untrained[0].changed({"longest": 17}), untrained[1]
    made = ExampleObjective(task, model, questions(53, 2), [], Settings(steps=9, batch=11))
    batch = made.batch(0)
    assert len(batch["input_ids"]) > 11
    parts = made.split(batch, 3)
    shares = [made.weight(part) / made.weight(batch) for part in parts]
    joined = sum(share * made.loss(model, part) for share, part in zip(shares, parts, strict=True))
    torch.testing.assert_close(joined, made.loss(model, batch))


def test_none_is_chosen_only_where_it_is_better_in_every_window():
    from saccade.tasks.answer import _Best, _joined

    rows = [_Best(3, 5, 2.0, 2.5, 1.0), _Best(7, 9, 1.5, 1.6, 3.0)]
    total = np.exp([2.5, 1.6, 1.0]).sum()
    assert _joined(rows, impossible=True) == FoundAnswer(3, 5, pytest.approx(np.exp(2.0) / total))
    assert _joined(rows, impossible=False) == FoundAnswer(3, 5, pytest.approx(np.exp(2.0) / np.exp([2.5, 1.6]).sum()))
    rows = [_Best(3, 5, 2.0, 2.5, 2.2), _Best(7, 9, 1.5, 1.6, 3.0)]
    total = np.exp([2.5, 1.6, 2.2]).sum()
    assert _joined(rows, impossible=True) == FoundAnswer(0, 0, pytest.approx(np.exp(2.2) / total))


# --- metric -----------------------------------------------------------------------------------------------------------


def _published(text):
    """SQuAD's normalisation, from its description: lower case, no punctuation, no articles, single spaces."""
    kept = "".join(letter for letter in text.lower() if letter not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    return " ".join(word for word in kept.split() if word not in ("a", "an", "the"))


def test_scores_are_those_of_squad():
    draw = random.Random(4)
    words = ["The", "the", "a", "an", "cat", "Cat's", "1,000", "--", "dog", "an-", "theory", "co-op"]
    for _ in range(400):
        found, *expected = (" ".join(draw.choices(words, k=draw.randrange(0, 5))) for _ in range(3))
        assert exact_match(found, expected) == max(_published(found) == _published(one) for one in expected)
        best = 0.0
        for one in expected:
            mine, other = _published(found).split(), _published(one).split()
            common = sum(min(mine.count(word), other.count(word)) for word in set(mine))
            precision, recall = common / max(len(mine), 1), common / max(len(other), 1)
            f1 = 2 * precision * recall / (precision + recall) if common else float(not mine and not other)
            best = max(best, f1)
        assert word_f1(found, expected) == pytest.approx(best)


def test_scores_take_the_best_of_several_answers(untrained):
    data = [Question("q", "in the old town hall", (("town", 11), ("old town hall", 7)), ""), Question("q", "x", (), "")]
    scores = untrained[0].scores([FoundAnswer(3, 20), FoundAnswer(0, 1)], data)
    assert scores == {"exact match": 0.5, "F1": 0.5}
    assert untrained[0].scores([FoundAnswer(7, 15), FoundAnswer(0, 0)], data) == {
        "exact match": 0.5,
        "F1": pytest.approx(0.9),
    }


# --- data -------------------------------------------------------------------------------------------------------------


def test_squad_and_lines_hold_the_same(tmp_path):
    data = questions(13, 4, impossible=0.3)
    write_lines(tmp_path / "a.jsonl", data)
    asked = [
        {
            "id": f"id{n}",
            "question": one.question,
            "answers": [{"text": text, "answer_start": start} for text, start in one.answers],
            "is_impossible": not one.answers,
        }
        for n, one in enumerate(data)
    ]
    paragraphs = [{"context": one.context, "qas": [qa]} for one, qa in zip(data, asked, strict=True)]
    articles = [{"title": "one", "paragraphs": paragraphs[:5]}, {"title": "two", "paragraphs": paragraphs[5:]}]
    (tmp_path / "a.json").write_text(json.dumps({"version": "v2.0", "data": articles}))
    for name in ("a.jsonl", "a.json"):
        found = tasks.Answer().read(tmp_path / name)
        assert [(one.question, one.context, one.answers) for one in found] == [
            (one.question, one.context, one.answers) for one in data
        ]
        assert {one.answers for one in tasks.Answer().read_inputs(tmp_path / name)} == {None}
    (tmp_path / "b.jsonl").write_text(LINE % '["met", {"text": "Bob", "start": 8}]' + LINE % '"Ada"')
    assert [one.answers for one in tasks.Answer().read(tmp_path / "b.jsonl")] == [
        (("met", 4), ("Bob", 8)),
        (("Ada", 0),),
    ]
    assert tasks.Answer().read(tmp_path / "a.json")[3].place.endswith("a.json: question id3")
    for qa in asked:
        del qa["answers"], qa["is_impossible"]
    (tmp_path / "a.json").write_text(json.dumps({"data": articles}))
    assert len(tasks.Answer().read_inputs(tmp_path / "a.json")) == len(data)
    (tmp_path / "a.txt").write_text("who? ||| Ada.\n\nwhere? ||| There.\n")
    task = tasks.Answer()
    assert [task.is_empty(one) for one in task.read_inputs(tmp_path / "a.txt")] == [False, True, False]
    (tmp_path / "a.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="a.txt: holds no question"):
        task.read_inputs(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="a.json: not the form of SQuAD, .*; 'answers' is missing"):
        tasks.Answer().read(tmp_path / "a.json")


@looped(
    ("answers", "expected"),
    [
        ('{"text": ["met", "Bob"], "answer_start": [4, 8]}', (("met", 4), ("Bob", 8))),
        ('{"text": [], "answer_start": []}', ()),
        ('[{"text": "Bob", "answer_start": 8}]', (("Bob", 8),)),
    ],
)
def test_answers_as_the_library_datasets_writes_them(tmp_path_factory, answers, expected):
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    path.write_text(LINE % answers)
    (found,) = tasks.Answer().read(path)
    assert found.answers == expected


@looped(
    ("sizes", "share", "least", "most"),
    [
        ([1] * 40, 0.1, 4, 4),
        ([5] * 20 + [1] * 10, 0.1, 9, 13),
        ([3, 90], 0.1, 3, 3),
        ([40, 50], 0.1, 40, 40),
        ([3, 1], 0.9, 1, 3),
    ],
)
def test_a_context_is_in_one_part(sizes, share, least, most):
    data = [Question(f"q{k}", f"context {n}", (), "") for n, size in enumerate(sizes) for k in range(size)]
    for seed in range(7):
        training, judged = tasks.Answer().split(random.Random(seed).sample(data, len(data)), share, seed)
        assert not {one.context for one in training} & {one.context for one in judged}
        assert least <= len(judged) <= most and len(training) + len(judged) == len(data)


LINE = '{"question": "who?", "context": "Ada met Bob", "answers": %s}\n'


@looped(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", r"a.jsonl: holds no examples$"),
        (
            "a.jsonl",
            '{"question": "who?", "context": "Ada"}',
            r"line 1: no column 'answers'; it has 'question', 'context'",
        ),
        (
            "a.jsonl",
            LINE % '[{"text": "Bob", "start": 7}]',
            r"line 1: the answer 'Bob' is not at 7 of the .* is ' Bo'$",
        ),
        ("a.jsonl", LINE % '[{"text": "Bob", "start": 9}]', r"line 1: the answer 'Bob' is not at 9 of the context"),
        ("a.jsonl", LINE % '[{"text": "Bob"}]', r"line 1: answers: expected a text and its start, got {'text'"),
        ("a.jsonl", LINE % '["Eve"]', r"line 1: answers: 'Eve' is not in the context; expected a text of it$"),
        (
            "a.jsonl",
            LINE.replace("met", "Bob") % '["Bob"]',
            r"line 1: answers: 'Bob' is in the context 2 times; expected {\"text\": ..., \"start\": ...}$",
        ),
        ("a.jsonl", LINE % "7", r"line 1: answers: expected a list, got 7$"),
        ("a.jsonl", LINE.replace('"Ada met Bob"', "null") % '["Bob"]', r"line 1: context: expected a text, got None$"),
        ("a.jsonl", LINE.replace("who?", " ") % "[]", r"line 1: question: expected a text, got ' '$"),
        (
            "a.jsonl",
            "".join(LINE.replace("Bob", name) % "[]" for name in "abcde"),
            r"answers: expected some to learn, none of the 4 questions has one$",
        ),
        ("a.jsonl", LINE % "[]" * 5, r"context: the only one of 5 questions cannot be split; give --validation$"),
        ("a.json", "{", r"a.json: not JSON"),
        ("a.json", "[]", r"a.json: not the form of SQuAD, .*data.*paragraphs.*\}$"),
        ("a.json", '{"data": [{"title": "x"}]}', r"a.json: not the form of SQuAD, .*; 'paragraphs' is missing$"),
        ("a.json", '{"data": []}', r"a.json: holds no questions$"),
        ("a.txt", "who?\n", r"a.txt: expected a file that ends in .csv, .tsv, .jsonl$"),
    ],
)
def test_bad_data_is_told_in_one_line_and_nothing_is_written(tmp_path_factory, name, content, message):
    folder = tmp_path_factory.mktemp("bad")
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        tasks.train("answer", folder / name, folder / "out", **SMALL)
    assert "\n" not in str(raised.value)
    assert not (folder / "out").exists()


def test_a_question_in_quotes_needs_its_context():
    with pytest.raises(
        ValueError, match=r"text 2: expected a question and its context with \|\|\| between them, got 'wh"
    ):
        tasks.Answer().inputs(["who? ||| Ada", "who?"])
    with pytest.raises(ValueError, match="text 1: context: expected a text, got ''"):
        tasks.Answer().inputs(["who? |||"])
    with pytest.raises(ValueError, match="longest_answer: must be at least 1, got 0"):
        tasks.Answer(longest_answer=0)


# --- baseline, commands, kills ----------------------------------------------------------------------------------------


def test_the_baseline_learns_words_and_where_they_stand(untrained):
    """Words of the kind that is asked for; and no answer where nothing is likely."""
    data = questions(211, 3, impossible=0.3)
    (baseline,) = untrained[0].baselines(untrained[1], data[:160], data[160:], questions(31, 5, impossible=0.3))
    scores = untrained[0].scores(baseline.outputs, questions(31, 5, impossible=0.3))
    assert scores["exact match"] > 0.8
    assert any(found.stop == 0 for found in baseline.outputs)


@pytest.mark.slow
def test_train_test_predict(files, tmp_path, capsys):
    out, unseen, picture = tmp_path / "run", str(files / "unseen.jsonl"), tmp_path / "answers.png"
    options = [f"--{name}={value}" for name, value in {**SMALL, "steps": 5}.items() if name != "tensorboard"]
    command = ["train", "answer", str(files / "questions.jsonl"), "--out", str(out), *options, "--no-tensorboard"]
    assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main(["test", str(out), unseen, "--picture", str(picture)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("The baseline is better than this model: logistic regression on words (C = ")
    assert " was it ?" in told and ", got " in told
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["predict", str(out), "what is red ? ||| the hat is red"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["answer"] == "the hat is red"[line["start"] : line["end"]] != ""
    assert cli.main(["predict", str(out), unseen]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 101


def test_a_picture_of_answers(untrained):
    one = Question("why $x$?", "because of\n" + "many words " * 20, (("of", 8),), "q")
    tested = _task.Tested(
        untrained[1], [one] * 3, [FoundAnswer(0, 7), FoundAnswer(11, 30), FoundAnswer(0, 0)], {"wrong": []}
    )
    assert untrained[0].picture(tested, "svg").startswith(b"<?xml")
