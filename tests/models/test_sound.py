"""Sound as models read it, against transformers' feature extractor."""

from __future__ import annotations

import json

import numpy as np
import pytest
import soundfile
import torch

from published import transformers
from saccade.models.signals import sound as reading
from saccade.models.signals.sound import FORMATS, SoundInputs, read_sound


def sounds() -> list[np.ndarray]:
    """A chirp, noise around another mean, silence, one sample, and clicks."""
    rng = np.random.default_rng(0)
    time = np.arange(1607) / 16000
    chirp = 0.3 * np.sin(2 * np.pi * (200 + 15000 * time) * time)
    clicks = np.zeros(311)
    clicks[::50] = 1
    return [
        x.astype(np.float32)
        for x in (chirp, 0.1 + 0.02 * rng.standard_normal(997), np.zeros(400), np.array([0.5]), clicks)
    ]


def inputs(folder, settings):
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return SoundInputs.of_folder(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"return_attention_mask": True},
        {"do_normalize": False, "padding_value": -0.5, "return_attention_mask": True},
        {"return_attention_mask": True, "padding_value": 0.25, "sampling_rate": 8000},
        {"padding_value": 0.25},
    ],
)
def test_input_values_are_those_of_transformers(tmp_path, settings):
    theirs = transformers().Wav2Vec2FeatureExtractor(**settings)
    ours = inputs(tmp_path, settings)
    waves = sounds()
    for batch in (waves, waves[::-1], *([wave] for wave in waves)):
        expected = theirs(batch, padding=True, return_tensors="pt", sampling_rate=theirs.sampling_rate)
        got = ours(batch, theirs.sampling_rate)
        assert got.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(got[name], values.to(got[name].dtype)), name
            assert got[name].isfinite().all()


def test_files_are_averaged_over_channels(tmp_path):
    ours = inputs(tmp_path, {"feature_extractor_type": "Wav2Vec2FeatureExtractor"})
    left, right = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 700)).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", np.stack((left, right), 1), 16000, subtype="FLOAT")
    assert torch.equal(ours(tmp_path / "a.wav")["input_values"], ours((left + right) / 2)["input_values"])
    soundfile.write(tmp_path / "a.flac", left, 16000)
    exact = ours(left)["input_values"]
    assert torch.allclose(ours([str(tmp_path / "a.flac")])["input_values"], exact, atol=2e-4)  # 16 bits
    assert torch.equal(
        ours(torch.from_numpy(np.stack((left, right))))["input_values"], torch.cat((exact, ours(right)["input_values"]))
    )


def test_what_is_wrong_with_a_sound_is_told(tmp_path):
    ours = inputs(tmp_path, {})
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 9000)
    soundfile.write(tmp_path / "a.wav", noise, 44100)
    for name in ("cut.wav", "cut.flac", "cut.ogg"):
        soundfile.write(tmp_path / name, noise, 16000)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.wav").write_text("no sound")
    wrong = [
        (
            tmp_path / "a.wav",
            ValueError,
            r"a.wav: 44100 samples a second.*16000; resample.*poly\(samples, 16000, 44100",
        ),
        (tmp_path / "cut.wav", ValueError, "cut.wav: damaged"),
        (tmp_path / "cut.flac", ValueError, "cut.flac: damaged"),
        (tmp_path / "cut.ogg", ValueError, "cut.ogg: damaged"),
        (tmp_path / "text.wav", ValueError, "text.wav: no sound of a known format"),
        (tmp_path / "none.wav", FileNotFoundError, "none.wav: no such sound file"),
        ([], ValueError, "sounds: empty"),
        (3.0, TypeError, r"sounds\[0\]: expected a path or an array of samples, got float"),
        (np.zeros(5, np.int16), TypeError, "expected floats from -1 to 1, got int16"),
        ([np.zeros((2, 5))], ValueError, r"expected one channel of samples, shape \(S,\), got \(2, 5\)"),
        (np.zeros(0), ValueError, "expected at least one sample"),
        (np.array([0, np.nan]), ValueError, "contains NaN"),
    ]
    for sound, kind, told in wrong:
        with pytest.raises(kind, match=told):
            ours(sound)
    with pytest.raises(ValueError, match="sounds: 8000 samples a second, expected the model's rate of 16000"):
        ours(noise, 8000)
    for settings, told in [
        ({"feature_size": 80}, "feature_size: expected 1"),
        ({"padding_side": "left"}, "padding_side: expected 'right'"),
        ({"feature_extractor_type": "WhisperFeatureExtractor"}, "a processor of Wav2Vec2, got WhisperFeatureExtractor"),
    ]:
        with pytest.raises(ValueError, match=told):
            inputs(tmp_path, settings)


def test_the_file_of_several_processors(tmp_path):
    (tmp_path / "processor_config.json").write_text('{"feature_extractor": {"sampling_rate": 8000}}')
    assert SoundInputs.of_folder(tmp_path).rate == 8000


def test_a_name_opens_no_other_format(tmp_path, monkeypatch):
    """libsndfile goes by what a file holds, and has a parser for two dozen kinds."""
    path, wave = tmp_path / "x.wav", 0.3 * np.sin(np.arange(997) / 7)
    for kind in soundfile.available_formats():
        if kind == "SD2":  # leaves a second file
            continue
        soundfile.write(path, wave, 8000, format=kind, subtype=None if kind != "RAW" else "PCM_16")
        if kind in {*FORMATS.split(", "), "WAVEX", "RF64"}:
            assert read_sound(path).rate == 8000, kind
        else:
            with pytest.raises(ValueError, match=r"x.wav: no sound of a known format; expected one of WAV, W64, FLAC"):
                read_sound(path)
    soundfile.write(tmp_path / "x.flac", np.zeros(5003), 8000)
    monkeypatch.setattr(reading, "MOST", 4 * 5002)
    with pytest.raises(
        ValueError, match=r"x.flac: damaged, .*its header gives 5,003 samples of 1 channels, more than 2 GiB"
    ):
        read_sound(tmp_path / "x.flac")
