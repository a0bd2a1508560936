"""What is read, and what is wrong with it: one line that says where, before anything is written."""

from __future__ import annotations

import gzip
import json

import pytest

from looped import looped
from saccade import tasks
from saccade.cli import main
from saccade.tasks import _examples
from tasks.conftest import SMALL, reviews, write_csv


def test_every_kind_of_file_has_the_same_examples(tmp_path):
    """Catches separators, quotes and line ends that are read as text."""
    rows = [('said "no", twice', "bad"), ("tab\tand\nnewline", "good"), ("Ünïcode", "7")]
    write_csv(tmp_path / "a.csv", [(label, text, 0) for text, label in rows], ("y", "x", "other"))
    lines = [json.dumps({"x": text, "y": int(label) if label == "7" else label}) for text, label in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    kind = tasks.Classify(text="x", label="y")
    expected = [(example.text, example.label) for example in kind.read(tmp_path / "a.csv")]
    assert expected == rows
    assert [(example.text, example.label) for example in kind.read(tmp_path / "a.jsonl")] == rows
    for number, (text, label) in enumerate(rows):
        (tmp_path / "classes" / label).mkdir(parents=True)
        (tmp_path / "classes" / label / f"{number}.txt").write_text(text)
    found = [(example.text, example.label) for example in kind.read(tmp_path / "classes")]
    assert sorted(found) == sorted(rows)
    for folder in (".cache", "bad/.old"):
        (tmp_path / "classes" / folder).mkdir()
        (tmp_path / "classes" / folder / "hidden.txt").write_text("hidden")
    assert len(kind.read(tmp_path / "classes")) == len(rows)
    (tmp_path / "classes" / "none").mkdir()
    with pytest.raises(
        ValueError, match="none: holds no .txt files; remove the folder, or put .txt files of the class"
    ):
        kind.read(tmp_path / "classes")
    (tmp_path / "a.tsv").write_text("\ufeffx\ty\na, b\tgood\n", encoding="utf-8")
    (example,) = kind.read(tmp_path / "a.tsv")
    assert (example.text, example.label) == ("a, b", "good")
    assert example.place.endswith("a.tsv: line 2")


@looped(
    ("content", "texts"),
    [
        ('bad\t"It was\ngood\tfine\nbad\t"\n', ['"It was', "fine", '"']),
        ('bad\t"It was\ngood\tfine"\n', ['"It was', 'fine"']),
        ('bad\t"No" and "no"\ngood\t""" said"\n', ['"No" and "no"', '" said']),
        ('bad\t"two\nlines"\ngood\t"a\ttab"\n', ["two\nlines", "a\ttab"]),
    ],
)
def test_quotes_of_tsv_files(tmp_path_factory, content, texts):
    """Those that are text, and those that pandas writes."""
    path = tmp_path_factory.mktemp("quotes") / "a.tsv"
    path.write_text("label\ttext\n" + content)
    examples = tasks.Classify().read(path)
    assert [(example.text, example.label) for example in examples] == [
        *zip(texts, ("bad", "good", "bad"), strict=False)
    ]


@looped(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "review,stars\nx,1\n",
            r"a.csv: no columns 'text' and 'label' in the first line, which must name them; it has 'review', 'stars'$",
        ),
        (
            "a.csv",
            "text,stars\nx,1\n",
            r"a.csv: no column 'label' in the first line, which must name them; it has 'text', 'stars'$",
        ),
        (
            "a.csv",
            "text;label\nx;a\n",
            r"it has 'text;label'; it has semicolons, expected commas between cells: pandas",
        ),
        (
            "a.csv",
            '"text";"label"\n"x; y";a\n',
            r"a.csv: no .*; it has semicolons, expected commas between cells",
        ),
        ("a.csv", 'text;label\n"x, y";a\n', r"a.csv: no .*; it has semicolons, expected commas between cells"),
        ("a.csv", 'text\tlabel\n"x, y"\ta\n', r"it has tabs, expected commas between cells: name it a.tsv$"),
        ("a.tsv", 'text;label\n"x";a\n', r"it has semicolons, expected tabs between cells: pandas"),
        ("a.tsv", "text,label\nx,a\n", r"it has 'text,label'; it has commas, expected tabs .* name it a.csv$"),
        ("a.csv", "text,label\nx, y,a\n", r"line 2 has 3 cells, expected 2 .*; put a cell with a comma in quotes$"),
        (
            "a.csv",
            "",
            r"a.csv: no columns 'text' and 'label' in the first line, which must name them; there are no columns$",
        ),
        ("a.csv", "text,label\n", r"a.csv: holds no examples$"),
        ("a.csv", 'text,label\nx,a\n"y,b\nz,a\n', r"a.csv: line 3: unbalanced quote; a cell that begins with one ends"),
        ("a.csv", 'text,label\nx,a\n"y,b\n"z",a\n', r"a.csv: line 3: unbalanced quote"),
        ("a.tsv", 'text\tlabel\nx\ta\n"y\tb\nz\n', r"a.tsv: line 4 has 1 cells, expected 2 as in the first line$"),
        ("a.csv", "text,label\nx,a\ny\n", r"a.csv: line 3 has 1 cells, expected 2 as in the first line$"),
        (
            "a.csv",
            "text,label\nx,a\ny,\n",
            r"a.csv: line 3: 'label' is empty, expected a label \(1 of 2 rows are so\); remove",
        ),
        (
            "a.csv",
            "text,label\nx,a\ny,\n,b\n,\n",
            r"line 3: 'label' is empty.* \(2 of 4 rows are so\); \S*: line 4: the text is empty \(2 of 4 are\); remove",
        ),
        (
            "a.csv",
            "review,label\nx,a\ny,\n,\n",
            r"no column 'text' .*; it has 'review' \(empty in 1 of 3 rows\), 'label' \(empty in 2 of 3 rows\)$",
        ),
        ("a.csv", "text,label\nx,a\n ,b\n ,b\n", r"a.csv: line 3: the text is empty \(2 of 3 are\); remove such texts"),
        ("a.csv", "text,label\nx,a\ny, \n", r"a.csv: line 3: 'label' is empty, expected a label"),
        ("a.csv", "text,label,text\nx,a,y\n", r"a.csv: the column 'text' is there twice$"),
        (
            "a.csv",
            "text,label\nx,a\ny,a\n",
            r"label: expected two classes or more, every text is 'a' \(one of them: .*a",
        ),
        ("a.csv", "text,label\nx,a\ny, a\n", r"label: expected two classes or more, every text is 'a' "),
        ("a.csv", "text,label\nx,a\ny,b\n", r"a.csv: 2 examples are too few to split; give --validation$"),
        ("a.jsonl", '{"text": "x", "label": "a"}\n{"text": "y"}\n', r"line 2: no column 'label'; it has 'text'$"),
        (
            "a.jsonl",
            '{"text": "x", "label": ["a", "b"]}\n',
            r"line 1: expected a label, a word or an integer, got \['a'",
        ),
        ("a.jsonl", '{"text": 3, "label": "a"}\n', r"line 1: expected a text, got 3$"),
        ("a.jsonl", "text\n", r"line 1: not JSON"),
        ("a.jsonl", "[" * 100_000 + "\n", r"line 1: not JSON \(its values are nested too deeply\)$"),
        ("a.jsonl", '{"text": "a \\ud83d b", "label": "x"}\n', r"line 1: not JSON \(half of a surrogate pair"),
        ("a.jsonl", "[1]\n", r"line 1: expected an object with 'text' and 'label', got \[1\]$"),
        ("a.txt", "text\n", r"a.txt: expected a file that ends in .csv, .tsv, .jsonl$"),
        ("a.csv", b"text,label\n\xff,a\n", r"a.csv: not a text in UTF-8 \(at byte 11\)$"),
    ],
)
def test_bad_data_is_told_in_one_line_and_nothing_is_written(tmp_path_factory, name, content, message):
    folder = tmp_path_factory.mktemp("bad")
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as raised:
        tasks.train("classify", folder / name, folder / "out", **SMALL)
    assert "\n" not in str(raised.value)
    assert not (folder / "out").exists()


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00 \\\\ud83d", "label": "x"}\n')
    (example,) = tasks.Classify().read(tmp_path / "a.jsonl")
    assert example.text == "\U0001f600 \\ud83d"


def test_a_compressed_file_does_not_fill_the_memory(tmp_path, monkeypatch):
    """A megabyte of zeros is a thousand bytes; texts that shrink to a fifth are read."""
    monkeypatch.setattr(_examples, "_PART", 2**16)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"0" * 2**20))
    with pytest.raises(ValueError, match="a.txt.gz: unpacks to more than 200 times its size; unpack it yourself"):
        _examples.read_lines(tmp_path / "a.txt.gz")
    lines = [f"{n} {text}" for n, (text, _) in enumerate(reviews(5003, 3))]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    assert _examples.read_lines(tmp_path / "b.txt.gz") == lines


def test_other_bad_input(files, tmp_path):
    def train(data=files / "reviews.csv", **options):
        return tasks.train("classify", data, tmp_path / "out", **{**SMALL, **options})

    cases = [
        ({"data": tmp_path / "no.csv"}, FileNotFoundError, "no.csv: no such file or folder"),
        ({"data": tmp_path}, ValueError, "holds no .txt files; expected a folder for each class with .txt files in it"),
        ({"share": 1.0}, ValueError, "share: of the data to validate on, must be above 0 and below 1, got 1.0"),
        ({"share": 0}, ValueError, "share: of the data to validate on, must be above 0 and below 1, got 0"),
        ({"batch": 0}, ValueError, "batch: must be at least 1, got 0"),
        ({"epochs": 0, "steps": None}, ValueError, "epochs: must be at least 1, got 0"),
        ({"epochs": 2}, ValueError, "epochs, steps: give one of them, got 2 and 80"),
        ({"heads": 5}, ValueError, "heads: must divide the width, got heads=5 and width=24"),
        ({"layers": 0}, ValueError, "layers: must be at least 1, got 0"),
        ({"longest": 2}, ValueError, "longest: must be at least 3, got 2"),
        ({"dropout": 1.0}, ValueError, r"dropout: must be in \[0, 1\), got 1.0"),
        ({"vocabulary": 20}, ValueError, r"vocabulary: the characters of the texts need at least \d+ pieces, got 20"),
        ({"long": "skip"}, ValueError, "long: expected one of 'cut', 'slide', 'refuse', got 'skip'"),
        ({"label_smoothing": 1}, ValueError, r"label_smoothing: must be in \[0, 1\), got 1"),
        ({"metric": "recall"}, ValueError, "metric: expected one of 'accuracy', 'f1', got 'recall'"),
        ({"colour": 3}, TypeError, "colour: no option of classify; it has accumulate, batch, .*, class_weights, "),
        ({"labels": ("a", "b")}, TypeError, "labels: no option of classify"),
        (
            {"resume": True, "overwrite": True},
            ValueError,
            "resume: continues what is in the folder, overwrite",
        ),
        ({"initial": tmp_path / "nowhere"}, FileNotFoundError, "nowhere"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            train(**options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="task: expected one of 'classify', .*, got 'juggle'"):
        tasks.train("juggle", files / "reviews.csv", tmp_path / "out")


def test_labels_that_training_has_not(learned, files, tmp_path):
    data = write_csv(tmp_path / "new.csv", [("a good film", "positive"), ("a film", "so-so")])
    message = r"new.csv: line 3: the label 'so-so' is not in the training data, which has 'negative', 'positive'$"
    with pytest.raises(ValueError, match=message):
        tasks.test(learned, data)
    with pytest.raises(ValueError, match=message):
        tasks.train("classify", files / "reviews.csv", tmp_path / "out", validation=data, **SMALL)


def test_empty_texts_may_be_left_out(learned, tmp_path):
    data = write_csv(tmp_path / "some.csv", [("a good film", "positive"), (" ", "negative"), ("poor", "negative")])
    with pytest.raises(ValueError, match=r"some.csv: line 3: the text is empty \(1 of 3 are\)"):
        tasks.test(learned, data)
    with pytest.warns(UserWarning, match=r"^1 of 3 texts are empty and left out: \S*some.csv: line 3$"):
        report = tasks.test(learned, data, skip_empty=True, baseline=False)
    assert len(report.tested.data) == 2
    with pytest.raises(ValueError, match="text 2: the text is empty"):
        tasks.predict(learned, ["fine", ""])
    data = write_csv(tmp_path / "unlabelled.csv", [("a good film", "positive"), ("fine", " "), ("poor", "negative")])
    with pytest.raises(ValueError, match=r"line 3: 'label' is empty.* \(1 of 3 rows are so\).*let skip_empty leave"):
        tasks.test(learned, data)
    with pytest.warns(UserWarning, match=r"^1 of 3 rows have no label and are left out: \S*unlabelled.csv: line 3$"):
        assert len(tasks.test(learned, data, skip_empty=True, baseline=False).tested.data) == 2
    data = write_csv(tmp_path / "five.csv", [("fine", "positive"), *[("", "positive")] * 5])
    with pytest.warns(UserWarning, match=r"^5 of 6 texts .* out: \S*: line 3, \S*: line 4, \S*: line 5 and 2 more$"):
        tasks.test(learned, data, skip_empty=True, baseline=False)
    data = write_csv(tmp_path / "none.csv", [(" ", "negative")])
    with pytest.raises(ValueError, match="none.csv: line 2: no text is left, all 1 are empty"):
        tasks.test(learned, data, skip_empty=True)


@pytest.mark.filterwarnings("always")
def test_an_empty_input_keeps_its_row_in_a_prediction(learned, tmp_path, capsys, monkeypatch):
    data = tmp_path / "new.csv"
    data.write_text('text,number\na good film,2\n"",3\nsuch a dull plot,5\n')
    message = "1 of 3 inputs are empty and get no prediction, the first at .*new.csv: line 3"
    with pytest.warns(UserWarning, match=message):
        found = tasks.predict(learned, data, skip_empty=True)
    assert [one["label"] for one in found] == ["positive", None, "negative"]
    assert found[1] == {"text": "", "label": None, "probabilities": None}
    (tmp_path / "new.txt").write_text("\na good film\n \n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["predict", str(learned.folder), str(tmp_path / "new.txt"), "--set", "skip_empty=true"]) == 0
    printed = capsys.readouterr()
    first, second, third = printed.out.splitlines()
    assert (first, third) == ("(empty)", "(empty)") and second.startswith("positive ")
    assert "saccade: warning: 2 of 3 inputs are empty" in printed.err


def test_columns_of_a_test_may_have_other_names(learned, tmp_path):
    data = write_csv(tmp_path / "other.csv", reviews(13, 4), ("review", "mood"))
    assert tasks.test(learned, data, text="review", label="mood", baseline=False).metrics["accuracy"] == 1.0
    assert len(tasks.predict(learned, data, text="review")) == 13
    with pytest.raises(TypeError, match="width: cannot differ from what classify was trained with; expected one of"):
        tasks.test(learned, data, width=7)
    with pytest.raises(TypeError, match="txt: no option of classify; expected one of text, label"):
        tasks.test(learned, data, txt="review")


def test_inputs_of_a_prediction(learned, tmp_path):
    (tmp_path / "texts.txt").write_text("a good film\nsuch a dull plot\n")
    found = tasks.predict(learned.folder, tmp_path / "texts.txt")
    assert [(one["text"], one["label"]) for one in found] == [
        ("a good film", "positive"),
        ("such a dull plot", "negative"),
    ]
    assert all(sum(one["probabilities"].values()) == pytest.approx(1) for one in found)
    assert found == tasks.predict(learned, ["a good film", "such a dull plot"])
    folder = tmp_path / "folder.csv"  # whatever its name ends in
    with pytest.raises(ValueError, match="folder.csv: holds no .txt files"):
        folder.mkdir()
        tasks.predict(learned, folder)
    for name, text in (("a.txt", "such a dull plot"), ("in/b.txt", "a good\nfilm")):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    assert [one["label"] for one in tasks.predict(learned, folder)] == ["negative", "positive"]
    (alone,) = tasks.predict(learned, "a good film")
    assert alone["probabilities"] == pytest.approx(found[0]["probabilities"], abs=1e-6)
    (tmp_path / "texts.txt").write_bytes("a\x85good\x0c \u2028 film\r\nsuch a dull\rplot".encode())
    assert [one["text"] for one in tasks.predict(learned, tmp_path / "texts.txt")] == [
        "a\x85good\x0c \u2028 film",
        "such a dull\rplot",
    ]
    (tmp_path / "texts.txt").write_text("")
    with pytest.raises(ValueError, match="texts.txt: holds no lines"):
        tasks.predict(learned, tmp_path / "texts.txt")
    with pytest.raises(TypeError, match="inputs: expected texts, got int"):
        tasks.predict(learned, [3])
    with pytest.raises(ValueError, match="inputs: empty, expected at least one"):
        tasks.predict(learned, [])
