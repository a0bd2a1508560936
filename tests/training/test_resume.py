"""Stopping and going on: the same bits as without a stop, and clear words where it cannot go on."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal

import pytest
import torch

from saccade import cli
from saccade.training import EvaluationSettings, Reporter, Stopped, train_language_model
from saccade.training.run_folder.checkpoint_files import read_checkpoint
from slowly import slow_after, slow_but
from training.test_files import files_no_larger_than


class Notes(Reporter):
    """Keeps what it is told, and can do something at a step."""

    def __init__(self, step=None, action=None):
        self.steps, self.warnings, self._at, self._action = [], [], step, action

    def step(self, step, loss, norm, rate, tokens_per_second):
        self.steps.append(step)
        if step == self._at:
            self._action()

    def warned(self, message):
        self.warnings.append(message)


def at(step, number=signal.SIGINT):
    return Notes(step, lambda: signal.raise_signal(number))


def weights(out, name="loop"):
    state = read_checkpoint(max((out / "checkpoints").iterdir()))
    return state["loop"]["model"]


def curve(out):
    lines = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    return [(line["step"], line["training_loss"], line["validation_loss"], line["norm"]) for line in lines]


def same(one, other):
    assert curve(one) == curve(other)
    for name in ("model.safetensors", "last.safetensors", "tokenizer.json", "config.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, weights(other)[name])


@pytest.fixture
def run(make_run, tmp_path):
    """A run of 7 steps with looks at 3, 6 and 7 and checkpoints at 2, 4 and 6."""

    def make(out="out", **options):
        looks = {"every": 3, "checkpoint_every": 2, **options.pop("looks", {})}
        return make_run(7, shape={"dropout": 0.2}, looks=looks, out=tmp_path / out, **options)

    return make


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "whole"


@pytest.fixture
def whole(run, tmp_path, kept):
    """A run without a stop; trained once, and each test has a copy."""
    if not kept.exists():
        train_language_model(run("whole"))
        shutil.copytree(tmp_path / "whole", kept)
    else:
        shutil.copytree(kept, tmp_path / "whole")
    return tmp_path / "whole"


@pytest.mark.parametrize(
    ("step", "number"),
    slow_but([(1, signal.SIGTERM), (3, signal.SIGINT), (4, signal.SIGINT), (5, signal.SIGTERM)], (4, signal.SIGINT)),
)
def test_a_signal_ends_the_run_after_the_step_and_it_goes_on_from_there(run, whole, step, number):
    notes = at(step, number)
    with pytest.raises(Stopped) as raised:
        train_language_model(run(), notes)
    assert raised.value.signal == number
    assert notes.steps == list(range(1, step + 1))
    assert max((run().out / "checkpoints").iterdir()).stem == f"{step:09d}"
    notes = Notes()
    train_language_model(run(resume=True), notes)
    assert notes.steps == list(range(step + 1, 8))
    assert notes.warnings == [f"resuming {run().out} from {step:09d}.checkpoint"]
    same(run().out, whole)


def test_signals_are_handled_as_before_afterwards(run):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Stopped):
        train_language_model(run(), at(2))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_ctrl_c_is_not_waited_for(run):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as raised:
        train_language_model(run(), Notes(3, twice))
    assert not isinstance(raised.value, Stopped)
    assert max((run().out / "checkpoints").iterdir()).stem == "000000002"


def test_a_run_that_is_over_is_finished_again(run, whole):
    (whole / "README.md").unlink()
    notes = Notes()
    train_language_model(run("whole", resume=True), notes)
    assert notes.steps == []
    assert "validation loss as stored" in (whole / "README.md").read_text()


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins(run, whole):
    (run().out / "checkpoints").mkdir(parents=True)
    notes = Notes()
    train_language_model(run(resume=True), notes)
    assert notes.warnings == [f"resuming {run().out} from the beginning"]
    same(run().out, whole)


def test_nothing_to_resume(run, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"out: nothing to resume \(no checkpoints in it\); start the run without"
    ):
        train_language_model(run(resume=True))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="resume: continues what is in the folder, overwrite replaces it; give one"):
        run(resume=True, overwrite=True)


@pytest.mark.parametrize(
    "spoil", slow_after(1, [lambda content: content[:-100], lambda content: content[:50] + b"?" + content[51:]])
)
def test_a_damaged_checkpoint_is_passed_over(run, whole, spoil):
    with pytest.raises(Stopped):
        train_language_model(run(), at(5))
    newest = max((run().out / "checkpoints").iterdir())
    newest.write_bytes(spoil(newest.read_bytes()))
    notes = Notes()
    train_language_model(run(resume=True), notes)
    assert notes.steps == [5, 6, 7]
    assert len(notes.warnings) == 2
    assert "000000005.checkpoint: damaged, its checksum does not fit" in notes.warnings[0]
    assert notes.warnings[0].endswith("; an older one is used")
    same(run().out, whole)


def test_no_checkpoint_that_can_be_read(run):
    with pytest.raises(Stopped):
        train_language_model(run(), at(5))
    for path in (run().out / "checkpoints").iterdir():
        path.write_bytes(b"")
    before = sorted(path.name for path in run().out.rglob("*"))
    with pytest.raises(ValueError, match="none of its checkpoints can be read: .*000000005.*damaged.*000000004"):
        train_language_model(run(resume=True))
    assert sorted(path.name for path in run().out.rglob("*")) == before


def test_another_configuration_is_named_field_by_field(run, story, tmp_path, whole):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    asked = run("whole", resume=True)
    cases = [
        (
            {"settings": dataclasses.replace(asked.settings, batch=5, rate=0.5)},
            "000000007.checkpoint is of another run: batch 5 .asked for. / 3 .in the checkpoint.; "
            "rate 0.5 .asked for. / 0.001 .in the checkpoint.$",
        ),
        ({"shape": {**asked.shape, "width": 16}}, "width 16 .asked for. / 12 .in the checkpoint.$"),
        ({"shape": {**asked.shape, "kv_heads": 1}}, "kv_heads 1 .asked for. / None .in the checkpoint.$"),
        ({"vocabulary": None}, "vocabulary characters .asked for. / 283 .in the checkpoint.$"),
        ({"initial": whole}, "from [0-9a-f]{12} .asked for. / random weights .in the checkpoint.$"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            train_language_model(dataclasses.replace(asked, **change))
    story.write_text(story.read_text() + "one more line\n")
    with pytest.raises(
        ValueError, match="the validation text is not the one it was trained with .SHA-256 [0-9a-f]{12}, was"
    ):
        train_language_model(asked)
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


@pytest.fixture
def another_machine(monkeypatch):
    """As on a machine where "auto" is another precision; Accelerate forgets the one before."""

    def move(precision):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setattr("saccade.training.settings.fitting_precision", lambda: precision)

    return move


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        ({"precision": "bf16"}, "precision bf16 .asked for. / no .in the checkpoint.$"),
        ({"accumulate": 3}, "accumulate 3 .asked for. / 1 .in the checkpoint.$"),
        ({"checkpointing": True}, "checkpointing True .asked for. / False .in the checkpoint.$"),
        ({"compile": True}, "compile True .asked for. / False .in the checkpoint.$"),
    ],
)
def test_another_execution_is_named(run, whole, another_machine, monkeypatch, execution, message):
    monkeypatch.setenv("CXX", "a compiler")  # it is refused before it would be used
    another_machine("no")
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=message):
        train_language_model(run("whole", resume=True, execution=execution))
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize(("began", "here"), [("no", "bf16"), ("bf16", "no")])
def test_auto_goes_on_in_the_precision_it_began_with(run, another_machine, began, here):
    another_machine(began)
    train_language_model(run("whole", execution={"precision": "auto"}))
    with pytest.raises(Stopped):
        train_language_model(run(execution={"precision": "auto"}), at(5))
    another_machine(here)
    train_language_model(run(resume=True, execution={"precision": "auto"}))
    same(run().out, run("whole").out)
    assert f"precision {began}," in (run().out / "README.md").read_text()
    another_machine(here)
    with pytest.raises(ValueError, match=f"precision {here} .asked for. / {began} .in the checkpoint.$"):
        train_language_model(run(resume=True, execution={"precision": here}))
    another_machine(here)
    train_language_model(run("new", execution={"precision": "auto"}))
    assert f"precision {here}," in (run("new").out / "README.md").read_text()


@pytest.mark.slow
def test_how_a_run_is_looked_at_may_change(run, whole):
    with pytest.raises(Stopped):
        train_language_model(run(), at(5))
    train_language_model(run(resume=True, looks={"every": 7, "checkpoint_every": 1, "patience": 5}))
    assert [step for step, *_ in curve(run().out)] == [3, 7]
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(run().out)[name])


@pytest.mark.slow
def test_a_resumed_run_may_have_moved(run, whole, tmp_path):
    with pytest.raises(Stopped):
        train_language_model(run(), at(4))
    shutil.move(tmp_path / "out", tmp_path / "elsewhere")
    train_language_model(run("elsewhere", resume=True))
    same(tmp_path / "elsewhere", whole)


def test_an_overwritten_run_leaves_nothing_to_resume_by_mistake(run, whole):
    with pytest.raises(Stopped):
        train_language_model(dataclasses.replace(run("whole", overwrite=True), vocabulary=None), at(1))
    assert [path.stem for path in sorted((whole / "checkpoints").iterdir())] == ["000000000", "000000001"]


@pytest.mark.slow
def test_a_full_disk_costs_no_more_than_what_cannot_be_written(run, whole):
    limit = files_no_larger_than(1000)
    notes = Notes(3, limit.__enter__)  # the checkpoint of step 2 is written, the look at 3 is not
    with pytest.raises(OSError, match=r"out: could not be written \(.*\); make room and go on with --resume") as raised:
        try:
            train_language_model(run(), notes)
        finally:
            limit.__exit__(None, None, None)
    assert "\n" not in str(raised.value)
    assert notes.steps == [1, 2, 3, 4, 5, 6, 7]
    assert notes.warnings[0].startswith("step 3: the model could not be written (")
    assert any(line.startswith("step 4: a checkpoint could not be written (File too large)") for line in notes.warnings)
    assert max((run().out / "checkpoints").iterdir()).stem == "000000002"
    assert not [path for path in run().out.rglob(".*")]
    train_language_model(run(resume=True))
    same(run().out, whole)


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_changes_nothing(run, whole):
    limit = files_no_larger_than(1000)

    class Full(Notes):
        def step(self, step, *numbers):
            super().step(step, *numbers)
            if step == 2:
                limit.__enter__()
            if step == 5:
                limit.__exit__(None, None, None)

    notes = Full()
    train_language_model(run(), notes)
    assert [line.split(":")[0] for line in notes.warnings] == ["step 2", "step 3", "step 4"]
    same(run().out, whole)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_exit_status_and_words_of_the_command(story, tmp_path, capsys, monkeypatch, number, status):
    def stop(self, step, *_):
        if step == 3:
            signal.raise_signal(number)

    options = "--layers 1 --heads 2 --width 12 --context 23 --batch 3 --steps 5 --every 9 --vocabulary 283".split()
    command = ["train", "lm", str(story), "--out", str(tmp_path / "out"), *options]
    with monkeypatch.context() as patched:
        patched.setattr("saccade.training.progress.ConsoleReporter.step", stop)
        assert cli.main(command) == status
    captured = capsys.readouterr()
    assert captured.err == f"saccade: stopped; {tmp_path}/out keeps the best weights and the last; --resume goes on\n"
    assert cli.main([*command, "--resume"]) == 0
    assert "resuming" in capsys.readouterr().out
    assert cli.main([*command, "--resume", "--batch", "4"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.endswith("is of another run: batch 4 (asked for) / 3 (in the checkpoint)\n")
    assert cli.main(["train", "lm", str(story), "--out", str(tmp_path / "none"), "--resume"]) == 2
    assert "nothing to resume" in capsys.readouterr().err


def test_patience(make_run, tmp_path):
    class Worse(Notes):
        """Spoils the weights after the second look."""

        def started(self, prepared):
            self.lm, self.looks = prepared.lm, 0

        def looked(self, entry, sample, best):
            self.looks += 1
            if self.looks == 2:
                torch.nn.init.normal_(self.lm.model.embedding.weight, std=5.0)

    notes = Worse()
    run = make_run(99, looks={"every": 2, "patience": 3})
    train_language_model(run, notes)
    assert notes.steps[-1] == 10  # looks at 2 and 4 improve, those at 6, 8 and 10 do not
    assert "10 of 99" in (run.out / "README.md").read_text()
    again = Notes()
    train_language_model(dataclasses.replace(run, resume=True), again)
    assert again.steps == []


def test_patience_counts_after_copying_and_by_what_is_an_improvement():
    from saccade.training import LanguageSettings
    from saccade.training.loop import Progress

    looks = EvaluationSettings(patience=2, improvement=0.1)
    settings = LanguageSettings(steps=50, copying=10, looks=looks)
    progress = Progress()
    for loss in (3.0, 4.0, 5.0):
        progress.looked(loss, looks, counts=False)
        assert not progress.over(settings)
    for loss, over in ((6.0, False), (5.0, False), (4.95, False), (4.8, False), (4.79, False), (4.71, True)):
        progress.looked(loss, looks, counts=True)
        assert progress.over(settings) == over


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_steps(make_run, tmp_path):
    def asked(steps, **more):
        return make_run(steps, looks={"every": 9, "checkpoint_every": 2}, **more)

    train_language_model(asked(4))
    with pytest.raises(ValueError, match=r"steps 3 \(asked for\) / 4 \(in the checkpoint\)"):
        train_language_model(asked(3, resume=True))
    shutil.copytree(tmp_path / "out", tmp_path / "stopped")
    notes = Notes()
    train_language_model(asked(7, resume=True), notes)
    assert notes.steps == [5, 6, 7]
    with pytest.raises(Stopped):
        train_language_model(asked(7, resume=True, out=tmp_path / "stopped"), at(6))
    with pytest.raises(ValueError, match=r"steps 9 \(asked for\) / 7 \(in the checkpoint\)"):  # it is not over
        train_language_model(asked(9, resume=True, out=tmp_path / "stopped"))
    train_language_model(asked(7, resume=True, out=tmp_path / "stopped"))
    names = ("model.safetensors", "last.safetensors")
    assert all((tmp_path / "stopped" / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in names)
