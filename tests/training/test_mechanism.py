"""Training models that read by a mechanism: the command, going on where it stopped, and the report of an anomaly."""

from __future__ import annotations

import math

import pytest
import torch

import saccade
from saccade import cli
from saccade.inspection import look
from saccade.models import DecoderLM, LanguageModel, ModelConfig, load
from saccade.training import Stopped, find_anomaly, train_language_model
from saccade.variants import LinearConfig, PerformerConfig

SMALL = "--layers 1 --heads 2 --width 16 --hidden 16 --context 23 --batch 3 --warmup 2 --precision no".split()


@pytest.fixture
def train(story, tmp_path):
    def call(*options):
        out = ["--out", str(tmp_path / "out"), "--vocabulary", "283"]
        return cli.main(["train", "lm", str(story), *out, *SMALL, *map(str, options)])

    return call


@pytest.mark.slow
def test_the_command_trains_saves_and_generates(train, tmp_path, capsys):
    assert train("--steps", 3, "--mechanism", "linear:feature_map=relu", "--watch", 1) == 0
    said = capsys.readouterr()
    assert "LinearConfig(feature_map='relu', normalise=True)" in said.out
    assert "saccade generate --model" in said.out and "saccade look" not in said.out
    lm = load(tmp_path / "out")
    assert lm.model.config.mechanism == LinearConfig("relu")
    assert lm.heads is None  # nobody can say what its heads attend to
    assert "feature_map='relu'" in (tmp_path / "out" / "README.md").read_text()
    assert cli.main(["generate", "--model", str(tmp_path / "out"), "--tokens", "5", "the cat"]) == 0
    capsys.readouterr()
    assert cli.main(["look", "--model", str(tmp_path / "out"), "the cat"]) == 2
    assert "model: it uses 'linear' instead of softmax attention" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_usual_for_the_context(train, tmp_path):
    assert train("--steps", 1, "--mechanism", "block-topk:k=2") == 0
    assert load(tmp_path / "out").model.config.mechanism.block == 2  # 16 blocks, and not one of 512


@pytest.mark.parametrize(
    ("mechanism", "words"),
    [
        ("liner", "mechanism: expected one of linear, "),
        ("linear:x=1", "mechanism: linear takes feature_map=..., normalise=...; got 'x=1'"),
        ("linformer", "mechanism: 'linformer' cannot be causal, since"),
    ],
)
def test_mechanisms_that_cannot_be_trained_are_named(train, tmp_path, capsys, mechanism, words):
    assert train("--steps", 1, "--mechanism", mechanism) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def interrupted(after):
    class Interrupts(saccade.training.Reporter):
        def step(self, step, loss, norm, rate, tokens_per_second):
            if step == after:
                raise KeyboardInterrupt

    return Interrupts()


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [LinearConfig(), PerformerConfig(8, redraw_every=2)], ids=lambda m: m.name)
def test_a_run_goes_on_as_if_it_had_not_stopped(make_run, tmp_path, mechanism):
    shape = {"mechanism": mechanism, "width": 16}
    whole = train_language_model(make_run(steps=6, shape=shape, out=tmp_path / "whole"))
    options = dict(steps=6, shape=shape, out=tmp_path / "parts", looks={"checkpoint_every": 1})
    with pytest.raises((Stopped, KeyboardInterrupt)):
        train_language_model(make_run(**options), interrupted(3))
    parts = train_language_model(make_run(**options, resume=True))
    expected = whole.model.state_dict()
    for name, tensor in parts.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
def test_a_run_with_another_mechanism_is_not_resumed(make_run):
    train_language_model(make_run(shape={"mechanism": LinearConfig()}))
    with pytest.raises(ValueError, match="mechanism .*relu.*asked for.*elu.*in the checkpoint"):
        train_language_model(make_run(shape={"mechanism": LinearConfig("relu")}, resume=True))


def test_a_run_does_not_start_from_a_model_with_another_mechanism(make_run, tmp_path):
    train_language_model(make_run(out=tmp_path / "plain"))
    run = make_run(shape={"mechanism": LinearConfig()}, initial=tmp_path / "plain", out=tmp_path / "linear")
    with pytest.raises(ValueError, match="has another shape: mechanism None .asked for .*linear"):
        train_language_model(run)


def model():
    return DecoderLM(ModelConfig(31, width=16, layers=2, heads=2, hidden=16, context=23, mechanism=LinearConfig()))


def test_an_anomaly_is_found_beside_a_mechanism():
    sound, tokens = model(), torch.randint(0, 31, (2, 14))
    report = find_anomaly(sound, tokens)
    places = [entry.place for entry in report.clean]
    assert report.found is None
    assert {"layer 0: query", "layer 1: value", "layer 1: out"} <= set(places)
    assert not any("weights" in place or "logits" in place.replace("logits of the model", "") for place in places)
    with torch.no_grad():
        sound.decoder.blocks[1].attention.projection.weight[40] = math.nan
    assert find_anomaly(sound, tokens).found.place == "layer 1: value"


def test_there_are_no_weights_to_look_at():
    with pytest.raises(ValueError, match="model: it uses 'linear' instead of softmax attention, so there are"):
        look(LanguageModel(model(), load().tokenizer), "the cat")
