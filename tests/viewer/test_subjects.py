"""What `saccade.view` takes: texts, looks, watches and models; everything else is told in one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import saccade
from saccade.inspection import look, open_model
from saccade.support._numbers import size
from saccade.viewer.server import open_session
from saccade.viewer.server._subjects import is_watch_file

TEXT = "The hen met the fox."


@pytest.fixture(scope="module")
def model():
    return open_model(None)


def watch(keep=True, lengths=(7,)):
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with torch.no_grad(), saccade.watch(layer, keep=keep) as seen:
        for length in lengths:
            layer(torch.randn(3, length, 8))
    return seen


@pytest.mark.slow
def test_texts_and_models_give_a_run_each(model):
    runs = open_session([TEXT, "A dog."], model=[None, model]).runs
    assert [run.text for run in runs] == [TEXT, TEXT, "A dog.", "A dog."]
    assert [run.model for run in runs] == ["embedded model", model.name] * 2


@pytest.mark.slow
def test_a_look_is_read_again_and_begins_where_it_was(model):
    session = open_session(look(model, TEXT, (2, 5)))
    assert session.runs[0].text == TEXT and (session.shown.call, session.shown.head) == ("2", 5)
    other = look(model, TEXT, name="model runs/novel")
    with pytest.raises(ValueError, match=r"model: the look is of model runs/novel, .* pass view\(look, model=...\)"):
        open_session(other)
    assert open_session(other, model=model).runs[0].text == TEXT


def test_what_watch_kept_with_labels_of_its_tokens(tmp_path):
    seen = watch()
    words = "one two three four five six <7>".split()
    session = open_session(seen, words=words)
    [side] = session.reply("open", {}).header["runs"][0]["sides"]
    found = session.reply("words", {"run": "0", "side": side["id"], "start": 0, "stop": 7}).header["words"]
    assert [word[0] for word in found] == words
    place = {"run": "0", "call": "0", "head": 1, "item": 2}
    reply = session.reply("row", {**place, "tokens": [4], "start": 0, "stop": 7, "top": 1})
    expected = seen.weights("self_attn", head=1)[2, 4].numpy()
    np.testing.assert_allclose(np.frombuffer(reply.buffers[0], "<f4"), expected, atol=1e-6)
    seen.save(tmp_path / "run.watch")
    for path in (tmp_path / "run.watch", str(tmp_path / "run.watch")):
        session = open_session([path, seen])
        assert session.runs[0].calls[0].shape == (3, 2, 7, 7) and session.title == "1 kept call"
        assert [run.model for run in session.runs] == ["run.watch", "watched model 2"]


@pytest.mark.parametrize(
    ("subject", "options", "error", "told"),
    [
        (lambda: watch(keep=False), {}, ValueError, r"no call was kept.*saccade\.watch\(model, keep=True\)"),
        (lambda: [watch(), TEXT], {}, ValueError, "watches and texts cannot be shown together"),
        (watch, {"model": "x"}, ValueError, "^model: it is for reading a text"),
        (
            watch,
            {"budget": 10**9},
            ValueError,
            "^budget: it limits the memory for reading a text; a watch was",
        ),
        (watch, {"budget": 10**9, "folder": "."}, ValueError, "^budget: it limits"),
        (lambda: TEXT, {"folder": "."}, ValueError, "^folder: only for queries and keys beyond a budget"),
        (watch, {"words": ["a"]}, ValueError, r"^words: expected as many as a call has tokens \(7\), got 1"),
        (watch, {"words": "one two three four five six seven"}, TypeError, "^words: expected a list .* got str"),
        (watch, {"words": 7}, TypeError, "^words: expected a list .* got int"),
        (watch, {"words": [*"abcde", 3, "g"]}, TypeError, "^words: expected a string .* got int for token 5"),
        (lambda: TEXT, {"words": ["a"]}, ValueError, "^words: only for the tokens of a watch"),
        (list, {}, ValueError, "^subject: expected a text"),
        (lambda: 3, {}, TypeError, "^subject: expected a text, .* got int"),
        (lambda: [TEXT, None], {}, TypeError, "^subject: expected a text, .* got NoneType"),
        (
            lambda: TEXT,
            {"model": torch.nn.Linear(3, 3)},
            TypeError,
            r"^model: .* got Linear; for other models show watch\(model",
        ),
        (lambda: "", {}, ValueError, "^text: expected at least one word"),
        (lambda: "no.watch", {}, FileNotFoundError, "no.watch: no such file"),
        (lambda: TEXT, {"generate": -1}, ValueError, "^generate: expected a number of tokens"),
        (lambda: TEXT, {"generate": 3, "target": "x"}, ValueError, "^generate and target: "),
        (lambda: TEXT, {"target": "x"}, ValueError, "^target: embedded model is not an encoder-decoder"),
        (lambda: TEXT, {"budget": 0.5}, ValueError, "^budget: expected bytes"),
        (lambda: TEXT, {"budget": 1000}, ValueError, "^budget: "),
        (lambda: TEXT, {"folder": "nowhere"}, ValueError, "^folder: nowhere is not a folder"),
        (lambda: TEXT, {"folder": 3}, TypeError, "^folder: expected the path of a folder, got int"),
        (lambda: TEXT, {"target": 3}, TypeError, "^target: expected a text, got int"),
        (lambda: TEXT, {"head": (9, 0)}, ValueError, r"^head: 9\.0 does not exist; layers 0 to 3 have heads 0 to 7$"),
        (lambda: TEXT, {"head": 3}, ValueError, r"^head: expected \(layer, head\)"),
        (lambda: TEXT, {"head": (1, 0.5)}, ValueError, r"^head: 1\.0\.5 does not exist"),
    ],
)
def test_what_cannot_be_shown_is_told(subject, options, error, told):
    with pytest.raises(error, match=told):
        open_session(subject(), **options)


@pytest.mark.slow
def test_a_continued_text_begins_with_the_head_that_is_asked_for():
    session = open_session(TEXT, generate=5, head=(1, 3))
    [side] = session.runs[0].sides.values()
    assert (session.shown.call, session.shown.head) == ("1", 3) and 0 < side.prompt < side.tokens
    cell = {"run": "0", "call": "1", "head": 3, "item": 0, "row": side.tokens - 1, "key": side.prompt}
    assert session.reply("cell", cell).header["visible"]
    with pytest.raises(ValueError, match=r"^head: 1\.99 does not exist"):
        open_session(TEXT, generate=5, head=(1, 99))


def test_a_head_is_named_by_layer_or_by_call():
    for head in ((2, 3), ("layer 2", 3)):
        shown = open_session(TEXT, head=head).shown
        assert (shown.call, shown.head) == ("2", 3)


def test_layers_that_differ_are_told_apart():
    """Two heads in one, three in another, then a layer that was not kept."""
    parts = [torch.nn.TransformerEncoderLayer(12, heads, batch_first=True) for heads in (2, 2, 3, 3, 1)]
    with torch.no_grad(), saccade.watch(torch.nn.Sequential(*parts), keep=[0, 1, 2, 4]) as seen:
        torch.nn.Sequential(*parts)(torch.randn(1, 5, 12))
    told = "layers 0 to 1 have heads 0 to 1, layer 2 has heads 0 to 2, layer 4 has head 0$"
    with pytest.raises(ValueError, match=told):
        open_session(seen, head=(3, 0))


@pytest.mark.slow
def test_the_budget_is_of_all_texts_together(tmp_path):
    one = open_session(TEXT).runs[0].kept.used
    assert one > 0
    session = open_session([TEXT, TEXT], budget=2 * one, folder=tmp_path)
    assert [run.kept.on_disk for run in session.runs] == [0, 0]
    session.close()
    for budget in (one - 1, one // 7):  # whenever it ends, what the whole text needs is told
        with pytest.raises(
            ValueError, match=f"^budget: this text needs about {size(one)} .* {size(budget)} left; raise"
        ):
            open_session(TEXT, budget=budget)
    with pytest.raises(ValueError, match="^budget: "):
        open_session([TEXT, TEXT], budget=2 * one - 1)
    session = open_session([TEXT, TEXT], budget=2 * one - 1, folder=tmp_path)
    first, second = (run.kept for run in session.runs)
    assert first.on_disk == 0 < second.on_disk and first.used + second.used < 2 * one
    session.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that takes no files, of root either")
def test_a_folder_that_takes_no_files_is_told_before_anything_is_read():
    with pytest.raises(ValueError, match="^folder: /proc is not writable; pass another folder$"):
        open_session("no such file is read.watch", folder="/proc")


def test_a_folder_may_be_named_from_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    session = open_session(TEXT, budget=1, folder="~")
    assert session.runs[0].kept.on_disk
    session.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["first", "second", "shown"])
def test_what_fails_leaves_no_files(tmp_path, where):
    """`error` holds what failed. Files are mapped, and where the system allows it no name is left to delete."""
    seen = []

    def interrupted(done, total):
        seen.append(mapped_in(tmp_path) or sys.platform != "linux")
        if len(seen) == {"first": 2, "second": total + 2, "shown": 0}[where]:
            raise KeyboardInterrupt

    head = (0, Broken()) if where == "shown" else None
    with pytest.raises((KeyboardInterrupt, RuntimeError)) as error:
        open_session([TEXT, "A dog."], budget=1, folder=tmp_path, progress=interrupted, head=head)
    assert error.traceback and seen[-1] and list(tmp_path.iterdir()) == []


def mapped_in(folder):
    """Files there that are mapped, of any name."""
    maps = Path("/proc/self/maps")
    return [line for line in maps.read_text().splitlines() if f"{folder}/" in line] if maps.exists() else []


@pytest.mark.skipif(sys.platform != "linux", reason="what is mapped stands in /proc")
def test_files_have_no_name_and_closing_frees_their_space(tmp_path):
    """So neither a killed process nor a viewer that is closed, but kept in a variable, takes space on the disk."""
    session = open_session(TEXT, budget=1, folder=tmp_path)
    assert mapped_in(tmp_path) and list(tmp_path.iterdir()) == []
    where = {"run": "0", "call": "1", "head": 3, "item": 0, "row": 2, "key": 1}
    assert session.reply("cell", where).status == 200
    session.close()
    assert mapped_in(tmp_path) == []
    for op in ("open", "cell", "overview", "step"):
        assert session.reply(op, where).header == {"error": "the viewer has ended"}


@pytest.mark.slow
def test_a_continuation_that_the_context_ends_is_told(capsys):
    told = "generate: 100,000 tokens were requested; the context of embedded model is 256 tokens, the text included"
    [note] = open_session(TEXT, generate=100_000).notes
    assert note.startswith(told)
    assert open_session(TEXT, generate=3).notes == []
    with saccade.view(TEXT, generate=100_000, block=False, browser=False):
        assert capsys.readouterr().err.startswith(told)


class Broken:
    def __eq__(self, other):
        raise RuntimeError

    __hash__ = None


def test_which_arguments_are_files(tmp_path):
    (tmp_path / "story.txt").write_text('{"a": 1} is no safetensors file, whatever it begins with')
    (tmp_path / "twelve.txt").write_bytes(b"\x0c\0\0\0\0\0\0\0{" + b" " * 20)
    watch().save(tmp_path / "kept")
    assert is_watch_file(str(tmp_path / "kept")) and is_watch_file("gone.watch") and is_watch_file("x.safetensors")
    assert is_watch_file(str(tmp_path / "twelve.txt"))  # it begins as one, so it is told to be damaged
    assert not is_watch_file(str(tmp_path / "story.txt")) and not is_watch_file(str(tmp_path))
    for text in ("", "a.b", "We saved it as run.watch", "nul \0 character", "x" * 100_000, None, 3):
        assert not is_watch_file(text)
