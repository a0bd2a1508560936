"""`saccade look --model` with checkpoints of transformers, from the command line to the files it writes."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "inspection"))

import checkpoints

from saccade import cli
from slowly import slow_but

SENTENCE = checkpoints.LINES[0]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: getattr(checkpoints, name)(folder / name, context=100) for name in ("bert", "gpt2", "llama")}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("SACCADE_TRACEBACK", raising=False)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))


def run(capsys, *arguments):
    status = cli.main(["look", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys, *arguments):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "") and err.startswith("saccade: error: ") and err.count("\n") == 1
    return err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_sentences_map_table_report_and_commands_that_work(models, capsys, tmp_path, name):
    status, out, err = run(capsys, SENTENCE, "--model", models[name])
    assert (status, err) == (0, "")
    assert out.startswith("15 words and marks, ") and ", model " in out
    order = [out.index(part) for part in ("• ", "each row: what that word looks at", "Role of each head", "Report")]
    assert order == sorted(order) and "roles were not measured for this model" in out
    assert "not measured" in (tmp_path / "saccade-report.html").read_text(encoding="utf-8")
    commands = [shlex.split(line[8:]) for line in out.splitlines()[-3:]]
    assert [c[1] for c in commands] == ["look"] * 3 and commands[2][-2:] == ["--json", SENTENCE]
    for command in commands:
        if "--out" not in command:
            assert cli.main(command[1:]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_words_of_models_that_look_ahead(models, capsys):
    _, out, _ = run(capsys, SENTENCE, "--model", models["bert"], "--json", "--head", "1.2")
    numbers = json.loads(out)
    assert not numbers["causal"] and numbers["whole"] is None and numbers["shown"] == {"layer": 1, "head": 2}
    words = numbers["words"]
    assert [w["text"] for w in words] == ["[CLS]", *re.findall(r"\w+|[.,]", SENTENCE), "[SEP]"]
    assert [w["special"] for w in words] == [True, *[False] * 15, True]
    for head in numbers["heads"]:
        assert head["role"] is None and head["here"]["next"] > 0 and 0 < head["here"]["special"] < 1
        assert len(head["weights"]) == 17
        assert all(len(row) == 17 and abs(sum(row) - 1) < 2e-5 for row in head["weights"])


def test_words_of_models_without_a_start_token(models, capsys):
    _, out, _ = run(capsys, SENTENCE, "--model", models["gpt2"], "--json")
    numbers = json.loads(out)
    assert numbers["causal"] and [w["text"] for w in numbers["words"]] == re.findall(r"\w+|[.,]", SENTENCE)
    assert all(head["here"]["next"] is None and head["here"]["special"] is None for head in numbers["heads"])
    assert [len(row) for row in numbers["heads"][0]["weights"]] == list(range(1, 16))


def test_a_narrow_terminal_numbers_the_words_of_a_square(models, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(capsys, SENTENCE, "--model", models["bert"])
    lines = out.splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("   1 2 3 4 5"))
    assert lines[top - 1].rstrip() == "  " + "".join(f"{i // 10 or '':>2}" for i in range(1, 16))
    assert lines[top].rstrip() == "  " + "".join(f"{i % 10:>2}" for i in range(1, 16))
    assert lines[top + 1].endswith("[CLS]") and lines[top + 2].endswith("  1 The") and lines[top + 17].endswith("[SEP]")
    assert max(len(line) for line in lines[top : top + 18]) <= 60


@pytest.mark.slow
def test_a_figure(models, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("bert", "gpt2"):
        assert run(capsys, SENTENCE, "--model", models[name], "--out", f"{name}.svg", "--force")[0] == 0
        assert (tmp_path / f"{name}.svg").stat().st_size > 1000


@pytest.mark.parametrize("name", ["map.pdf", "map.GIF", "numbers.csv", "notes.docx", "html"])
def test_what_is_no_report_and_no_figure_is_not_written(capsys, tmp_path, name):
    told = refused(capsys, SENTENCE, "--out", name)
    assert f"--out {name}: a report is written to an .html, a figure to a .png or .svg; --json prints numbers" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["bert", "gpt2", "llama"], "bert"))
def test_a_long_text_and_the_words_asked_for(name, models, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("saccade.inspection._look.MOST_WORDS", 20)
    monkeypatch.setattr("saccade.inspection._look.PART", 8)
    text = " ".join(checkpoints.LINES[:2])
    status, out, err = run(capsys, text, "--model", models[name])
    assert (status, err) == (0, "") and "the rest of a row falls on other words" in out
    (following,) = [line[8:] for line in out.splitlines() if "--rows" in line]
    assert cli.main(shlex.split(following)[1:]) == 0
    capsys.readouterr()
    _, out, _ = run(capsys, text, "--model", models[name], "--rows", "9-12", "--json")
    numbers = json.loads(out)
    assert numbers["whole"]["words"] == 37 and numbers["whole"]["part"][-1] == [9, 12]
    assert [w["text"] for w in numbers["words"] if not w["special"]][-4:] == ["the", "dog", "sat", "on"]
    assert len(numbers["whole"]["received"]) == 20
    assert all(sum(row) <= 1 + 1e-4 for head in numbers["heads"] for row in head["weights"])
    html = (tmp_path / "saccade-report.html").read_text(encoding="utf-8")
    assert "9 to 12 of 37, read in the context of the whole text" in html


def test_rows_that_are_none(models, capsys):
    assert "--rows x: expected the first and the last word, such as 201-240" in refused(capsys, SENTENCE, "--rows", "x")
    told = refused(capsys, SENTENCE, "--model", models["bert"], "--rows", "14-16")
    assert "rows: 14 to 16 are not words of this text, which has 1 to 15" in told
    assert "for a look at one TEXT" in refused(capsys, "--corpus", ".", "--rows", "1-2")


def test_a_text_longer_than_the_models(models, capsys):
    text = " ".join([SENTENCE] * 9)
    told = refused(capsys, text, "--model", models["bert"])
    assert "this model reads 98 tokens (words or pieces of words) at once" in told
    part = re.search(r"read these with (--to \d+)", told)[1].split()
    assert run(capsys, text, "--model", models["bert"], *part)[0] == 0


def test_models_that_are_none(models, capsys, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    assert "config.json, model.safetensors and tokenizer.json" in refused(capsys, SENTENCE, "--model", "empty")
    checkpoints.falcon(tmp_path / "falcon")  # of no family of Saccade's
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = refused(capsys, SENTENCE, "--model", "falcon")
    assert 'this needs transformers, which is not installed: pip install "transformers>=5.0"' in told
    assert not (tmp_path / "saccade-report.html").exists()
