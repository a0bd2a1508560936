"""What of a checkpoint learns, and that changes of low rank are what is stored."""

from __future__ import annotations

import copy
import signal

import pytest
import torch

from saccade import tasks
from saccade.models import load
from saccade.tasks._runs._tuning import Tuning, merged
from saccade.training import Reporter, Stopped
from tasks.conftest import SMALL
from tasks.test_translate import LANGUAGES, phrases, write_pair

FAST = {"steps": 40, "rate": 1e-2, "batch": 19, "precision": "no", "every": 10}


@pytest.fixture(scope="module")
def begun(files, tmp_path_factory):
    """A checkpoint of three blocks that has learned nothing yet."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    return tasks.train("classify", files / "reviews.csv", folder, **{**SMALL, "layers": 3, "steps": 1, "rate": 1e-9})


def changed_tensors(before, after):
    return {name for name, tensor in before.state_dict().items() if not torch.equal(tensor, after.state_dict()[name])}


@pytest.mark.slow
def test_the_last_blocks_learn_alone(begun, files, tmp_path):
    options = {**FAST, "steps": 4, "last": 2}
    run = tasks.train("classify", files / "reviews.csv", tmp_path / "run", initial=begun.folder, **options)
    changed = changed_tensors(begun.model, run.model)
    blocks = {name.split(".")[2] for name in changed if name.startswith("encoder.blocks.")}
    assert blocks == {"1", "2"} and {name.split(".")[0] for name in changed} == {"encoder", "head", "pooler"}


def test_changes_have_their_rank_and_are_stored_with_the_weights(begun, files, tmp_path):
    """The stored model is a plain one: matrices of blocks differ by that rank, all else is as it was."""
    run = tasks.train("classify", files / "reviews.csv", tmp_path / "run", initial=begun.folder, lora=3, **FAST)
    before, after = begun.model.state_dict(), load(run.folder).state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        difference = (after[name] - tensor).double()
        if name.startswith("encoder.blocks.") and tensor.ndim == 2:
            sizes = torch.linalg.svdvals(difference)
            assert sizes[2] > 1e-5 > 10 * sizes[3], name  # rounding of float32 is left of the fourth
        elif not name.startswith(("head.", "pooler.")):
            assert torch.equal(after[name], tensor), name


def test_merged_is_unmerged(begun):
    model, plain = load(begun.folder, dtype=torch.float64), load(begun.folder, dtype=torch.float64)
    torch.manual_seed(0)
    Tuning(lora=5, last=2).apply(model)
    ids = torch.tensor([[2, 11, 7, 13, 3]])
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=0)  # U = 0: nothing is changed yet
    for name, parameter in model.named_parameters():
        if name.endswith(".up"):
            torch.nn.init.normal_(parameter)
    plain.load_state_dict(merged(model.state_dict()))
    assert (model(ids).logits - load(begun.folder, dtype=torch.float64)(ids).logits).abs().max() > 1e-3
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-12, atol=1e-12)
    learning = {name.split(".parametrizations")[0] for name, p in model.named_parameters() if p.requires_grad}
    linears = {"attention.projection", "attention.output", "feed_forward.up", "feed_forward.down"}
    blocks = {f"encoder.blocks.{n}.{part}" for n in (1, 2) for part in linears}
    assert {name for name in learning if name.startswith("encoder.")} == blocks


def translator(folder):
    task = tasks.Translate(**LANGUAGES, width=12, layers=2, heads=2, vocabulary=300)
    return task, task.read(write_pair(folder / "pairs", phrases(41, 3)))


def hearing(folder):
    pytest.importorskip("soundfile")
    from tasks.sounds import write_words

    task = tasks.Speech(text="text", width=12, layers=2, heads=2)
    examples = task.read(write_words(folder / "words", 7, 3))
    return task.fitted(examples), examples


@pytest.mark.parametrize(
    ("made", "learned"), [(translator, "decoder.blocks.1.cross.query"), (hearing, "attention.projection")]
)
def test_merged_is_unmerged_with_cross_attention_and_convolutions(tmp_path, made, learned):
    task, examples = made(tmp_path)
    torch.manual_seed(0)
    begun = task.new_model(examples).double().eval()
    batch = {name: x.double() if x.is_floating_point() else x for name, x in task.collate(
        begun, task.encode(begun, examples[:5])).items()}  # fmt: skip
    model, plain = copy.deepcopy(begun), copy.deepcopy(begun)
    Tuning(lora=5).apply(model)
    ups = [parameter for name, parameter in model.named_parameters() if name.endswith(".up")]
    for up in ups:
        torch.nn.init.normal_(up)
    plain.load_state_dict(merged(model.state_dict()))
    whole, unmerged, before = (task.forward(one, batch) for one in (plain, model, begun))
    torch.testing.assert_close(unmerged, whole, rtol=1e-10, atol=1e-10)
    assert (unmerged - before).abs().max() > 1e-3
    changed = changed_tensors(begun, plain)
    assert any(learned in name for name in changed) and all(".blocks." in name for name in changed)


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_bits(begun, files, tmp_path):
    """A checkpoint holds both the weights and their changes."""

    class StopsAt(Reporter):
        def step(self, step, loss, norm, rate, tokens_per_second):
            if step == 17:
                signal.raise_signal(signal.SIGTERM)

    def train(out, lora=3, **more):
        return tasks.train("classify", files / "reviews.csv", out, initial=begun.folder, lora=lora, **FAST, **more)

    whole = train(tmp_path / "whole")
    with pytest.raises(Stopped):
        train(tmp_path / "stopped", reporter=StopsAt())
    train(tmp_path / "stopped", resume=True)
    for name in ("model.safetensors", "last.safetensors"):
        assert (tmp_path / "stopped" / name).read_bytes() == (whole.folder / name).read_bytes()
    with pytest.raises(ValueError, match="is of another run: .*lora"):
        train(tmp_path / "stopped", lora=4, resume=True)


def test_what_learns_is_told():
    for tuning, told in (
        (Tuning(), "all weights"),
        (Tuning(last=1), "the head and the last block"),
        (Tuning(last=2), "the head and the last 2 blocks"),
        (Tuning(lora=3), "the head and changes of rank 3 in all blocks"),
    ):
        assert str(tuning) == told


def test_bad_input(begun, files, tmp_path):
    data, out = files / "reviews.csv", tmp_path / "out"
    with pytest.raises(ValueError, match="initial: missing; last and lora select weights of a checkpoint"):
        tasks.train("classify", data, out, lora=3)
    with pytest.raises(ValueError, match="lora: must be at least 1, got 0"):
        tasks.train("classify", data, out, initial=begun.folder, lora=0)
    with pytest.raises(ValueError, match="last: the model has 3 blocks, got 4"):
        tasks.train("classify", data, out, initial=begun.folder, last=4)
    assert not out.exists()
