"""`saccade view`, from the command line to a running viewer, and everything that a user may do wrong."""

from __future__ import annotations

import io
import json
import re
import socket
import struct
import sys
import urllib.request

import numpy as np
import pytest
import torch

import saccade
from saccade import cli
from saccade.inspection import look, open_model
from saccade.models import DecoderLM, LanguageModel, ModelConfig, save
from saccade.models.tokenizers.own import train_bpe
from saccade.support._numbers import size
from saccade.viewer.server import _serve

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TEXT = "Once the hen met the fox, and the fox met the owl."
STORY = " ".join(["Once the hen met the fox, and the fox met the owl, who sat on a bee."] * 9)


def make_model(folder, seed):
    torch.manual_seed(seed)
    tokenizer = train_bpe([STORY], 300)
    config = ModelConfig(vocabulary=tokenizer.vocabulary, width=24, layers=2, heads=3, kv_heads=1, context=61)
    save(LanguageModel(DecoderLM(config), tokenizer), folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "one", 5)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "other", 6)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with torch.no_grad(), saccade.watch(layer, keep=True) as seen:
        layer(torch.randn(2, 7, 8))
    path = tmp_path_factory.mktemp("watched") / "run.watch"
    seen.save(path)
    return path


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SACCADE_TRACEBACK", raising=False)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command; where it waits for the page, ask the server what it shows, and close the page."""
    shown = []

    def ask(viewer):
        base, _, token = viewer.url.partition("/?token=")
        headers = {"X-Saccade-Token": token}
        with urllib.request.urlopen(urllib.request.Request(f"{base}/api/open", b"{}", headers), timeout=20) as response:
            content = response.read()
        [size] = struct.unpack_from("<I", content)
        shown.append((viewer, json.loads(content[4 : 4 + size])))
        viewer.close()
        return viewer._most_idle is not None

    monkeypatch.setattr(_serve.Viewer, "wait", ask)

    def command(*arguments):
        shown.clear()
        status = cli.main(["view", *map(str, arguments)])
        out, err = capsys.readouterr()
        return status, out, err, shown[0] if shown else None

    return command


@pytest.mark.slow
def test_the_address_is_printed_and_the_text_is_shown(run, folder, monkeypatch, tmp_path):
    opened = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(_serve, "open_browser", lambda url: opened.append(url) or True)
    status, out, err, (viewer, seen) = run(TEXT, "--model", folder, "--head", "1.2")
    assert status == 0 and out == f"Viewer  {viewer.url}\n        Ctrl-C ends it\n"
    assert len(opened) == 1 and "token=" not in opened[0]
    assert err == "saccade: no page is open any more, so the viewer has ended (--keep keeps it running)\n"
    assert seen["title"] == TEXT and [each["text"] for each in seen["runs"]] == [TEXT]
    assert (seen["shown"]["call"], seen["shown"]["head"]) == ("1", 2)
    assert seen["runs"][0]["model"] == str(folder)


@pytest.mark.parametrize("host", ["0", "0.0.0.0"])
def test_that_other_machines_come_in_is_said(run, folder, host):
    _, out, err, (viewer, _) = run(TEXT, "--model", folder, "--host", host, "--no-browser", "--keep")
    assert err == "saccade: other machines can open it under this computer's name or address, with the token\n"
    assert f"Viewer  {viewer.url}" in out and viewer.url.startswith("http://127.0.0.1:")


@pytest.mark.slow
def test_without_a_browser_that_is_said(run, folder, monkeypatch):
    monkeypatch.setattr(_serve, "open_browser", lambda url: False)
    status, out, err, (viewer, _) = run(TEXT, "--model", folder, "--keep")
    assert (status, err) == (0, "saccade: no browser could be opened here; open this address in one\n")
    assert viewer.url in out and viewer._most_idle is None
    monkeypatch.setattr(_serve, "open_browser", lambda url: pytest.fail("opened"))
    assert run(TEXT, "--model", folder, "--no-browser", "--keep")[2] == ""


@pytest.mark.slow
def test_a_file_standard_input_and_a_part_of_a_text(run, folder, tmp_path, monkeypatch):
    (tmp_path / "story.txt").write_text(STORY)
    _, _, _, (_, seen) = run("story.txt", "--from", 3, "--to", 5, "--model", folder, "--no-browser")
    assert seen["runs"][0]["text"] == "hen met the"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert run("--model", folder, "--no-browser")[3][1]["runs"][0]["text"] == TEXT


@pytest.mark.slow
def test_a_text_beyond_the_context_is_read_when_that_is_asked_for(run, folder):
    status, _, err, _ = run(STORY, "--model", folder, "--no-browser")
    assert status == 2
    needed = int(re.search(r"beyond what this one was trained on with --context (\d+)", err)[1])
    taken = needed * 2 * (3 + 1) * 8 * 4  # layers, query and key heads, their width, bytes of float32
    assert err.strip().endswith(f"(its queries and keys take {size(taken)} of memory)")
    _, _, err, (viewer, seen) = run(STORY, "--model", folder, "--no-browser", "--context", needed)
    assert viewer.session.runs[0].kept.used == taken
    assert seen["runs"][0]["sides"][0]["tokens"] == needed > 61 and seen["runs"][0]["model"] == str(folder)
    assert seen["runs"][0]["beyond"] == 61 and f"reads {needed} tokens here and was trained on 61 at most" in err
    _, _, err, (_, seen) = run(TEXT, "--model", folder, "--no-browser", "--context", needed)
    assert seen["runs"][0]["beyond"] is None and "trained" not in err
    status, _, err, _ = run(STORY, "--model", folder, "--no-browser", "--context", needed - 1)
    assert status == 2 and f"this model reads {needed - 2:,} tokens" in err


@pytest.mark.slow
def test_two_texts_and_two_models_are_runs_side_by_side(run, folder, other):
    arguments = ["--model", folder, "--model", other, "--against", "The owl sat on a bee.", "--no-browser"]
    _, _, _, (_, seen) = run(TEXT, *arguments)
    found = [(each["text"], each["model"]) for each in seen["runs"]]
    assert found == [(t, str(m)) for t in (TEXT, "The owl sat on a bee.") for m in (folder, other)]
    assert [each["id"] for each in seen["runs"]] == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_a_model_beside_itself_in_few_bits(run):
    """Two runs of the embedded model: the second attends nearly as the first, and not quite."""
    _, _, _, (_, seen) = run(TEXT, "--weights", "int4", "--no-browser")
    assert [each["model"] for each in seen["runs"]] == ["embedded", "embedded, int4"]
    whole, few = (look(open_model(weights=form), TEXT).seen.weights for form in (None, "int4"))
    assert 1e-4 < np.abs(whole - few).mean() < 0.02


@pytest.mark.slow
def test_generated_text_is_told_from_the_prompt(run, folder):
    _, _, _, (_, seen) = run("Once the hen", "--generate", 9, "--model", folder, "--no-browser")
    [side] = seen["runs"][0]["sides"]
    prompt = seen["runs"][0]["text"].removeprefix("Once the hen")
    assert 0 < side["prompt"] < side["tokens"] and prompt
    again = run("Once the hen", "--generate", 9, "--head", "1.2", "--model", folder, "--no-browser")[3][1]
    assert (again["shown"]["call"], again["shown"]["head"]) == ("1", 2)
    assert again["runs"] == seen["runs"]  # the likeliest tokens are always the same


@pytest.mark.slow
def test_a_continuation_that_the_context_ends_is_told(run, folder):
    _, _, err, _ = run(TEXT, "--generate", 100_000, "--model", folder, "--no-browser", "--keep")
    assert err == (
        f"saccade: generate: 100,000 tokens were requested; the context of {folder} is 61 tokens, the text included\n"
    )


@pytest.mark.parametrize("name", ["run.watch", "run", "run.bin"])
def test_what_watch_kept_is_known_by_its_content(run, watched, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(watched.read_bytes())
    status, _, err, (_, seen) = run(path, "--no-browser", "--keep")
    assert (status, err) == (0, "")
    [call] = seen["runs"][0]["calls"]
    assert (call["heads"], call["items"], call["rows"]["length"]) == (2, 2, 7)
    assert not seen["runs"][0]["sides"][0]["named"]


def test_two_watches_are_compared(run, watched):
    assert len(run(watched, "--against", watched, "--no-browser")[3][1]["runs"]) == 2


def damaged(watched, path):
    path.write_bytes(watched.read_bytes()[:200])
    return path


def of_another_version(watched, path):
    path.write_bytes(watched.read_bytes().replace(b'\\"version\\": 1', b'\\"version\\": 7', 1))
    assert path.read_bytes() != watched.read_bytes()
    return path


def without_kept_calls(watched, path):
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with torch.no_grad(), saccade.watch(layer) as seen:
        layer(torch.randn(2, 7, 8))
    seen.save(path)
    return path


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (damaged, r"x\.watch: damaged, or no safetensors file"),
        (of_another_version, r"x\.watch: written in version 7 of the format, this Saccade reads 1"),
        (without_kept_calls, r"no call was kept.*saccade\.watch\(model, keep=True\)"),
        (lambda _, path: path, r"x\.watch: no such file"),
    ],
)
def test_a_watch_file_that_cannot_be_shown(run, watched, tmp_path, spoil, told):
    refused(run, spoil(watched, tmp_path / "x.watch"), told=told)


@pytest.mark.parametrize("name", ["x.watch", "x.safetensors", "x"])
def test_a_text_is_not_compared_with_a_watch_file(run, folder, watched, tmp_path, name):
    """Nor is the file read as a text, whole or damaged."""
    if name == "x":
        (tmp_path / name).write_bytes(watched.read_bytes())
    else:
        damaged(watched, tmp_path / name)
    refused(
        run, TEXT, "--model", folder, "--against", name, told=f"--against {name}: .* cannot be compared with a text$"
    )


def test_a_watch_is_not_compared_with_a_damaged_one(run, watched, tmp_path):
    refused(run, watched, "--against", damaged(watched, tmp_path / "x.watch"), told=r"x\.watch: damaged, or no")


@pytest.mark.slow
def test_a_word_of_ten_megabytes_is_refused(run, folder, tmp_path):
    (tmp_path / "word.txt").write_text("a" * 10_000_000)
    refused(run, "word.txt", "--model", folder, told="its first word alone has more; give a model that reads more")


def refused(run, *arguments, told):
    status, out, err, shown = run(*arguments, "--no-browser")
    assert (status, out, shown) == (2, "", None)
    assert err.startswith("saccade: error: ") and err.count("\n") == 1
    assert re.search(told, err), err


@pytest.mark.slow
def test_what_does_not_fit_what_watch_kept(run, watched):
    for option, told in {
        ("--model", "."): "model: it is for reading a text",
        ("--generate", "3"): "generate: it is for reading a text",
        ("--target", "x"): "target: it is for reading a text",
        ("--to", "3"): "--from and --to need a text",
        ("--context", "300"): "--context needs a text; a file of watch contains a finished call",
        ("--weights", "int8"): "--weights needs a text; a file of watch contains a finished call",
        ("--budget", "1GiB"): "budget: it limits the memory for reading a text",
        ("--against", "The owl."): "--against The owl.: expected another file of watch",
        ("--head", "0.9"): r"head: 0\.9 does not exist; layer 0 has heads 0 to 1$",
    }.items():
        refused(run, watched, *option, told=told)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            [STORY],
            r"long: it has 180 words and marks, .* reads 60 tokens \(.*\) at once, .*; read these with --to \d+, or ",
        ),
        ([STORY, "--from", 5], r"read these with --from 5 --to \d+, or "),
        ([TEXT, "--against", STORY], r"too long.* with --to"),
        ([TEXT, "--head", "2.0"], r"head: 2\.0 does not exist; layers 0 to 1 have heads 0 to 2$"),
        ([TEXT, "--head", "1.3"], r"head: 1\.3 does not exist"),
        ([TEXT, "--head", "last"], "--head last: expected layer.head"),
        ([TEXT, "--budget", "much"], "--budget much: expected a size such as 500MiB"),
        ([TEXT, "--budget", "0"], "--budget 0: expected a size"),
        ([TEXT, "--budget", "2KiB"], r"budget: this text needs about .* 2.00 KiB left; .*folder"),
        ([TEXT, "--folder", "nowhere"], "folder: nowhere is not a folder"),
        ([TEXT, "--folder", "."], "folder: only for queries and keys beyond a budget"),
        ([TEXT, "--weights", "int3"], "weights: expected None or one of 'bfloat16', .*, got 'int3'"),
        ([TEXT, "--context", "1"], "--context: expected a whole number of tokens, at least 2: "),
        ([TEXT, "--generate", "-1"], "--generate"),
        ([TEXT, "--port", "70000"], "--port"),
        ([TEXT, "--host", "no such host"], "host: no such host is not an address of this machine"),
        ([TEXT, "--host", "a" * 64], "host: 'aaaa.* is not the name of a machine"),
        ([TEXT, "--folder", "/proc"], "folder: /proc is not writable"),
        ([TEXT, "--generate", "3", "--target", "The owl."], "generate and target: "),
        ([TEXT, "--generate", "3", "--head", "1.9"], r"head: 1\.9 does not exist"),
        (["The", "hen"], 'put the text in quotes: saccade view "The hen"'),
        (["no-such.txt"], "no-such.txt: no such file"),
        ([""], "the text is empty"),
        ([], "no text is given|standard input is empty"),
        (["..."], None),  # a text of three words
    ],
)
def test_whatever_is_wrong_is_one_line(run, folder, arguments, told):
    if told is None:
        assert run(*arguments, "--model", folder, "--no-browser")[0] == 0
    else:
        refused(run, *arguments, "--model", folder, told=told)


def test_a_port_that_is_taken(run, folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(run, TEXT, "--model", folder, "--port", port, told=f"port: {port} is taken by another program")


@pytest.mark.slow
def test_a_model_that_reads_no_text_and_one_that_is_not_there(run, tmp_path):
    refused(run, TEXT, "--model", "nowhere", told="nowhere: no such model folder")
    checkpoints = pytest.importorskip("checkpoints")  # they are made by transformers
    refused(run, TEXT, "--model", checkpoints.vit(tmp_path / "vit"), told="vit: .*reads no tokens of a text")


@pytest.mark.slow
def test_a_run_of_images_shows_an_image_of_its_own(run, tmp_path):
    """Catches a file of an image that is read as a text, and patches without names."""
    tasks, pictures = saccade.tasks, pytest.importorskip("tasks.pictures")
    folder = pictures.write_classes(tmp_path / "images", 12, 1)
    tasks.train("image", folder, tmp_path / "run", **{**pictures.SMALL, "steps": 1, "batch": 3})
    image = folder / "flat" / "000.png"
    _, _, _, (viewer, seen) = run(image, "--model", tmp_path / "run", "--head", "0.1", "--no-browser")
    [shown] = seen["runs"]
    (side,) = viewer.session.runs[0].sides.values()
    assert shown["calls"][0]["rows"]["length"] == side.tokens == 13 and side.words[1].label == "1,1"
    assert (seen["shown"]["call"], seen["shown"]["head"]) == ("0", 1)
    for arguments, told in (
        ((image, "--model", tmp_path / "run", "--to", 3), "--to needs a text, but .*run reads other inputs"),
        ((image, "--model", tmp_path / "run", "--model", tmp_path / "run"), "does not read text: --against"),
        (("--model", tmp_path / "run"), "expected one input for .*run: a file, or a node's name"),
        (("nowhere.png", "--model", tmp_path / "run"), "nowhere.png"),
    ):
        refused(run, *arguments, told=told)


@pytest.mark.slow
def test_a_source_and_its_target(run, tmp_path):
    checkpoints = pytest.importorskip("checkpoints")
    model = checkpoints.t5(tmp_path / "t5")
    _, _, _, (_, seen) = run("Once the hen met the fox.", "--target", "the owl", "--model", model, "--no-browser")
    sides = {side["id"]: side["tokens"] for side in seen["runs"][0]["sides"]}
    assert sides.keys() == {"source", "target"} and sides["source"] > sides["target"] > 2
    cross = [call for call in seen["runs"][0]["calls"] if call["kind"] == "cross"]
    assert cross and all((c["rows"]["side"], c["keys"]["side"]) == ("target", "source") for c in cross)
    assert all((c["rows"]["length"], c["keys"]["length"]) == (sides["target"], sides["source"]) for c in cross)
    refused(run, TEXT, "--generate", 3, "--model", model, told="target: needed, since this checkpoint has no head")
    refused(run, TEXT, "--target", "the owl", told="target: embedded model is not an encoder-decoder")


@pytest.mark.parametrize("module", ["starlette", "uvicorn"])
def test_a_missing_extra_is_one_line(run, module, monkeypatch):
    find = cli._app.view.require.__globals__["importlib"].util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == module else find(name))
    refused(run, TEXT, told=rf'{module}, which is not installed: pip install "anywidget>=0.9.13"')
