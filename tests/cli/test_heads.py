"""`saccade heads`, from the command line to what it prints and writes: its numbers are those of runs made by hand."""

from __future__ import annotations

import io
import json
import shlex
import sys

import checkpoints
import pytest
import torch
import torch.nn.functional as F
import transformers

import saccade
from saccade import cli
from saccade.attribution import _two_texts
from saccade.inspection import as_predictor, open_model
from saccade.intervention import Ablate, Patch
from slowly import slow_but

TEXT = "The cat sat on the mat. The cat sat on the"
OTHER = "The cat sat on the hat. The cat sat on the"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("SACCADE_TRACEBACK", raising=False)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))


@pytest.fixture(scope="module")
def embedded():
    """The module, and the ids of TEXT and of OTHER."""
    opened = open_model()
    return opened.module, *(opened.whole(opened.encode(text).ids) for text in (TEXT, OTHER))


def run(capsys, *arguments):
    status = cli.main(["heads", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def numbers(capsys, *arguments):
    status, out, err = run(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def refused(capsys, *arguments):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("saccade: error: ") and err.count("\n") == 1
    return err


def text_loss(module, ids):
    return F.cross_entropy(module(ids)[0, :-1], ids[0, 1:])


def printed_map(out):
    """{(layer, head): number} of the first map that is printed."""
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("layer "))
    rows = {}
    for line in lines[first + 1 :]:
        if not line[:1].isdigit():
            return rows
        layer, *cells = line.split()
        rows |= {(int(layer), head): float(cell.replace("·", "0")) for head, cell in enumerate(cells)}


# The overview and --importance


@pytest.mark.slow
def test_the_overview_is_the_gradient_of_the_texts_own_loss_and_the_attribution(capsys, embedded):
    module, ids, _ = embedded
    expected = saccade.head_importance(module, [ids], text_loss)
    found = numbers(capsys, TEXT)
    assert found["importance"]["loss"] == pytest.approx(expected.loss, rel=1e-5)
    for one, other in zip(found["importance"]["heads"], expected.table(), strict=True):
        assert (one["call"], one["head"]) == (other["call"], other["head"])
        assert one["signed"] == pytest.approx(other["signed"], rel=1e-3, abs=1e-6)
    assert found["attribution"] == json.loads(json.dumps(saccade.attribute(open_model(), TEXT).as_json()))
    most = int(expected.signed.values.argmin())
    assert found["sentences"][0].startswith(f"Head {expected.heads[most]} matters most")

    status, out, err = run(capsys, TEXT)
    assert (status, err) == (0, "") and "\x1b" not in out
    shown = printed_map(out)  # what the loss rises by without the head: the derivative's opposite
    assert len(shown) == 32
    for head, signed in zip(expected.heads, expected.signed.values.tolist(), strict=True):
        assert shown[head.layer, head.head] == pytest.approx(-signed, abs=6e-4)


def test_a_pipe_loses_nothing_of_a_long_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["heads", "The cat sat on the mat. The cat sat on the"]) == 0
    assert "\N{HORIZONTAL ELLIPSIS}" not in capsys.readouterr().out


@pytest.mark.slow
def test_ablation_is_a_run_without_the_head(capsys, embedded):
    module, ids, _ = embedded
    found = numbers(capsys, TEXT, "--importance", "--by", "ablation")
    with torch.no_grad():
        whole = float(text_loss(module, ids))
        with saccade.intervene(module, {2: Ablate([7])}):
            without = float(text_loss(module, ids))
    rise = {(line["layer"], line["head"]): line["value"] for line in found["importance"]["heads"]}
    assert rise[2, 7] == pytest.approx(without - whole, abs=1e-5)
    assert "attribution" in found and found["attribution"] is None
    assert found["sentences"][0].startswith(f"Head {'.'.join(map(str, max(rise, key=rise.get)))} matters most")


@pytest.mark.slow
def test_greedy_removal_says_the_order(capsys, embedded):
    module, ids, _ = embedded
    expected = saccade.head_importance(module, [ids], text_loss, by="greedy")
    found = numbers(capsys, TEXT, "--by", "greedy", "--importance")
    assert [(one["layer"], one["head"]) for one in found["importance"]["removed"]] == [
        (step.head.layer, step.head.head) for step in expected.removed
    ]
    assert f"{expected.removed[0].head} ({expected.removed[0].loss:.3f})" in found["sentences"][0]


def test_a_target_of_ones_own_is_attributed(capsys):
    found = numbers(capsys, TEXT, "--target", "mat,hat")["attribution"]
    expected = saccade.attribute(open_model(), TEXT, " mat", against=" hat")
    assert found["logit"] == pytest.approx(expected.logit) and found["against"]["text"] == " hat"


# --patch


@pytest.mark.slow
def test_patching_is_a_run_with_the_heads_output_from_the_other(capsys, embedded):
    module, clean, corrupted = embedded
    encode = open_model().encode
    first, second = (encode(word).ids[0] for word in (" mat", " hat"))

    def metric(ids):
        with torch.no_grad():
            logits = module(ids)[0, -1].double()
        return float(logits[first] - logits[second])

    found = numbers(capsys, TEXT, "--patch", OTHER, "--target", "mat,hat", "--by", "exact")
    measured = found["patching"]
    assert found["metric"]["tokens"] == [" mat", " hat"] and measured["agreement"] is None
    ends = metric(clean), metric(corrupted)
    assert (measured["metric"]["clean"], measured["metric"]["corrupted"]) == pytest.approx(ends, abs=1e-4)
    with saccade.watch(module, keep=True, alarms=False) as seen, torch.no_grad():
        module(clean)
    with saccade.intervene(module, {1: Patch([6], seen)}):
        patched = metric(corrupted)
    (one,) = (line for line in measured["heads"] if (line["layer"], line["head"]) == (1, 6))
    assert one["exact"] == pytest.approx((patched - ends[1]) / (ends[0] - ends[1]), abs=1e-4)


@pytest.mark.slow
def test_both_ways_and_how_they_agree_are_printed(capsys):
    status, out, err = run(capsys, TEXT, "--patch", OTHER)
    assert (status, err) == (0, "")
    said = " ".join(out.split())
    assert "restores, exact 0 is the corrupted run (" in said and "restores, by gradient" in said
    assert "Gradient estimates compared with exact values: correlation " in out
    shown = printed_map(out)
    most = ".".join(map(str, max(shown, key=shown.get)))
    assert min(shown.values()) < -max(shown.values())  # the largest effect moves away
    assert f"Head {most} restores most" in out and f"Next    saccade step --head {most} " in out
    # without --target: what each text is continued by
    opened = open_model()
    with torch.no_grad():
        nexts = [opened.module(opened.whole(opened.encode(text).ids))[0, -1].argmax() for text in (TEXT, OTHER)]
    what = " less ".join(f"log p of {opened.written(int(token))!r}" for token in dict.fromkeys(map(int, nexts)))
    assert f"; metric: {what} " in said


@pytest.mark.slow
def test_texts_of_other_lengths_are_shown_side_by_side_or_patched_at_positions(capsys):
    longer = "The cat sat on the big mat."
    told = refused(capsys, "The cat sat on the mat.", "--patch", longer)
    assert "the texts have 9 and 10 tokens" in told and "' the' ' mat' '.' against ... ' the' ' big' ' mat' '.'" in told
    assert "--patch: heads are patched token by token" in told and "or --positions, such as 1,3-5" in told
    found = numbers(capsys, "The cat sat on the mat.", "--patch", longer, "--positions", "1,3-4", "--by", "gradient")
    assert found["patching"]["positions"] == [1, 3, 4]
    same = numbers(capsys, "The cat sat on the mat.", "--patch", longer, "--positions", "1-3", "--by", "exact")
    assert same["sentences"][0].startswith("No head changes the metric") and len(same["sentences"]) == 1


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("mat", "--patch: both texts predict ' mat' almost equally (log p of ' mat': "),
        (
            "mat,hat",
            "--patch: both texts prefer ' mat' to ' hat' almost equally (log p of ' mat' less log p of ' hat': ",
        ),
    ],
)
def test_texts_that_hardly_differ_in_the_metric(capsys, monkeypatch, target, said):
    """It came after every head was patched: minutes for nothing."""
    monkeypatch.setattr(_two_texts, "LEAST", 1e9)
    monkeypatch.setattr(_two_texts, "patching", None)
    told = refused(capsys, TEXT, "--patch", OTHER, "--target", target, "--by", "gradient")
    assert said in told and told.endswith("): name words in which they differ, --target A,B\n")


# --why


@pytest.mark.slow
def test_why_is_what_python_says(capsys):
    expected = saccade.why_attends(open_model(), TEXT, "sat:2", "on", head=(1, 3))
    found = numbers(capsys, TEXT, "--why", "sat:2", "on", "--head", "1.3")
    assert found["why"] == json.loads(json.dumps(expected.as_json()))
    status, out, err = run(capsys, TEXT, "--why", "sat:2", "on", "--head", "1.3")
    assert (status, err) == (0, "")
    one, other, share = expected.top(1)[0]
    (line,) = (line for line in out.splitlines() if line.startswith(f"  {one} x {other} "))
    assert f"{share:+.3f}" in line and line.count("█") == 16  # the longest bar
    sums = [float(line.split()[-2 if "█" in line or "▒" in line else -1]) for line in _table(out)]
    assert sum(sums) == pytest.approx(expected.logit, abs=0.01)  # eleven numbers of three decimals
    # the head that wrote most, in a command that runs
    following = shlex.split(out.splitlines()[-1].removeprefix("Next"))
    assert following[:3] == ["saccade", "step", "--head"] and cli.main(following[1:]) == 0


def _table(out):
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("Contribution to the query x"))
    last = next(i for i, line in enumerate(lines) if line.startswith("  sum "))
    return lines[first + 1 : last]


@pytest.mark.slow
def test_tokens_are_those_of_the_text_and_special_ones(capsys, models):
    """`saccade look` counts the text's own tokens alone."""
    assert "15 tokens with the start token, " in run(capsys, TEXT, "--importance")[1].splitlines()[0]
    bert = run(capsys, "The cat sat.", "--model", models / "bert", "--importance")[1]
    assert " tokens with 2 special ones, " in bert.splitlines()[0]


def test_why_this_key_rather_than_another(capsys):
    found = numbers(capsys, TEXT, "--why", "sat:2", "on", "--head", "1.3", "--against", "mat")["why"]
    expected = saccade.why_attends(open_model(), TEXT, "sat:2", "on", head=(1, 3), against="mat")
    assert found["logit"] == pytest.approx(expected.logit)


# Pictures, and what is wrong


BEGINS = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but([*BEGINS], "pdf"))
def test_a_figure_is_written_and_not_over_others(capsys, tmp_path, kind):
    pytest.importorskip("matplotlib")
    for asked in (["--why", "sat:2", "on"], ["--importance"]):  # the second one replaces one of ours
        status, out, _ = run(capsys, TEXT, *asked, "--out", f"map.{kind}")
        assert status == 0 and f"Figure  map.{kind}\n" in out
        assert (tmp_path / f"map.{kind}").read_bytes().startswith(BEGINS[kind])
    (tmp_path / f"mine.{kind}").write_bytes(BEGINS[kind] + b" mine")
    assert "--force replaces it" in refused(capsys, TEXT, "--why", "sat:2", "on", "--out", f"mine.{kind}")


@pytest.mark.slow
def test_maps_of_both_ways_are_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    for asked in ([], ["--patch", OTHER]):
        assert run(capsys, TEXT, *asked, "--out", "maps.png")[0] == 0
        assert (tmp_path / "maps.png").stat().st_size > 30_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--importance", "--why", "cat", "sat"], "--importance and --why cannot be combined; give one of them"),
        (["--head", "1.4"], "--head goes with --why, not with the overview"),
        (["--why", "cat", "sat", "--by", "gradient"], "--by goes with the overview or --importance or --patch"),
        (["--patch", OTHER, "--by", "ablation"], "--by ablation: expected gradient or exact with --patch"),
        (["--by", "exact"], "--by exact: expected gradient, ablation or greedy (exact is of --patch)"),
        (["--why", "cat", "dog"], "word: 'dog' is not in the text"),
        (["--why", "cat", "mat"], "--why cat mat: the mask hides ' mat' (token 7) from 'at' of 'cat' (token 3)"),
        (["--why", "cat", "cat", "--against", "mat"], "--against: the mask hides ' mat' (token 7) from 'at' of 'cat'"),
        (
            ["--why", "cat", "mat", "--against", "cat"],
            "--why: the mask hides ' mat' (token 7) from 'at' of 'cat' (token",
        ),
        (["--why", "cat", "sat", "--head", "1.9"], "head: 1.9 does not exist; there are the layers 0 (heads 0 to 7)"),
        (["--why", "cat", "sat", "--head", "one"], "--head one: expected layer.head"),
        (["--target", "a,b,c"], "--target a,b,c: expected a word, or two words separated by a comma"),
        (["--target", "rug"], "expected one token, and 'rug' is 2: ' r', 'ug'"),
        (["--target", "mat,mat"], "both are the same token"),
        (["--patch", OTHER, "--positions", "3-1"], "--positions 3-1: expected token numbers from 0"),
        (["--patch", OTHER, "--positions", "15"], "both texts have the tokens 0 to 14, got 15"),
        (["--patch", TEXT], "--patch: it has the same tokens as the text; expected a text that differs"),
        (["--patch", "no-such.txt"], "--patch no-such.txt: no such file"),
        (["--patch", " "], "--patch: the text is empty"),
        (["--out", "a.html"], "--out a.html: a figure is written to an .svg, .png or .pdf"),
        (["--model", "nowhere"], "nowhere: no such model folder"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, arguments, said):
    assert said in refused(capsys, TEXT, *arguments)


def test_a_text_too_long_or_of_nothing(capsys):
    assert "this model reads 255 tokens at once" in refused(capsys, "word " * 300)
    assert "no text is given" not in refused(capsys, "")


# Checkpoints of transformers


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    small = dict(hidden_size=30, num_hidden_layers=2, num_attention_heads=3)
    end = dict.fromkeys(["bos_token", "eos_token", "unk_token"], "<|endoftext|>")
    made = {
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig(**small, intermediate_size=37), "_word_pieces"),
        "falcon": (transformers.FalconForCausalLM, transformers.FalconConfig(**small), None),
        "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(n_embd=30, n_layer=2, n_head=5), None),
        "body": (transformers.BertModel, transformers.BertConfig(**small, intermediate_size=37), "_word_pieces"),
    }
    for name, (kind, config, pieces) in made.items():
        tokenizer = (checkpoints._bytes(["<|endoftext|>"]), end) if pieces is None else getattr(checkpoints, pieces)()
        checkpoints._saved(folder / name, kind, config, tokenizer)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["gpt2", "falcon"], "falcon"))
def test_the_loss_is_that_of_transformers(capsys, models, name):
    """gpt2 runs with Saccade's blocks, falcon with transformers' own, whose head is opened for it: logits of either are
    split, and pairs explained."""
    text = "The cat sat on the mat."
    found = numbers(capsys, text, "--model", models / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / name)
    with checkpoints.quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(models / name).eval()
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert found["importance"]["loss"] == pytest.approx(float(model(ids, labels=ids).loss), rel=1e-4)
    attribution = found["attribution"]
    with torch.no_grad():
        row = model(ids).logits[0, -1]
    assert attribution["logit"] == pytest.approx(float(row[attribution["target"]["id"]]), rel=1e-4)
    assert abs(attribution["remainder"]) < 1e-4
    assert run(capsys, text, "--model", models / name, "--why", "sat", "cat")[0] == 0


@pytest.mark.slow
def test_a_head_is_read_once(models):
    model = open_model(models / "falcon")
    assert as_predictor(model).module is as_predictor(model).module


@pytest.mark.slow
def test_a_masked_model_has_a_pseudo_loss(capsys, models):
    """One token masked at a time, in runs of transformers' own model."""
    text = "The cat sat on the mat."
    found = numbers(capsys, text, "--model", models / "bert")
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "bert")
    with checkpoints.quiet():
        model = transformers.AutoModelForMaskedLM.from_pretrained(models / "bert").eval()
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    losses = []
    for place in range(1, ids.shape[1] - 1):
        masked = ids.clone()
        masked[0, place] = tokenizer.mask_token_id
        with torch.no_grad():
            losses.append(float(F.cross_entropy(model(masked).logits[0, place], ids[0, place])))
    assert found["importance"]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert found["loss"].startswith("pseudo-loss: ") and f"mean of {len(losses)} of" in found["loss"]
    with_mask = numbers(capsys, "The cat sat on the [MASK].", "--model", models / "bert")
    assert with_mask["attribution"]["labels"][with_mask["attribution"]["position"]] == "'[MASK]'"
    told = refused(capsys, text, "--model", models / "bert", "--patch", "The dog sat on the mat.")
    assert "expected one [MASK] in the text, got 0" in told


@pytest.mark.slow
def test_an_encoder_without_a_head_says_what_is_needed(capsys, models):
    told = refused(capsys, TEXT, "--model", models / "body")
    assert "expected a language model" in told and "ForMaskedLM" in told
    assert told.endswith("--why WORD WORD needs no such head\n")
    assert run(capsys, TEXT, "--model", models / "body", "--why", "sat", "cat")[0] == 0
