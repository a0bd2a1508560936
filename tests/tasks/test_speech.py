"""Sounds of classes and with texts: how they are read and changed, what is learned from them, and what a test draws."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import shutil

import numpy as np
import pytest
import soundfile
import torch

from looped import looped
from published import transformers, written
from saccade import cli, tasks
from saccade.tasks._example_task import ExampleObjective
from saccade.tasks._media._augmenting import SoundChanges
from saccade.tasks._media._characters import Characters, ctc_loss, needed_frames, padded
from saccade.tasks._media._mfcc import BANDS, log_mel, mel_filters, mfcc_regression, mfcc_statistics
from saccade.tasks._media._sound_model import mel_bank
from saccade.tasks._media._sound_picture import SoundPanel, heard, picture_of_panels, rows_of_characters
from saccade.tasks._media._sounds import SoundStore
from saccade.tasks._media._transcript_task import error_rates
from saccade.training import Settings
from tasks.conftest import SMALL as SMALL_TEXT
from tasks.sounds import RATE, SMALL, tone, write_classes, write_words
from tasks.test_kills import survives_kills
from training.test_killing import server

__all__ = ["server"]  # a fixture


@pytest.fixture(scope="session")
def sounds(tmp_path_factory):
    """`tones` and `words` to train on, `unseen-tones` and `unseen-words` to test with."""
    folder = tmp_path_factory.mktemp("sounds")
    write_classes(folder / "tones", 181, 3)
    write_classes(folder / "unseen-tones", 61, 5)
    write_words(folder / "words", 307, 7)
    write_words(folder / "unseen-words", 53, 11)
    return folder


@pytest.fixture(scope="session")
def learned_tones(sounds):
    return tasks.train("speech", sounds / "tones", sounds / "learned-tones", **SMALL, steps=90)


@pytest.fixture(scope="session")
def learned_words(sounds):
    out = sounds / "learned-words"
    return tasks.train("speech", sounds / "words" / "words.csv", out, text="text", **SMALL, steps=150)


@pytest.fixture(scope="session")
def begun(sounds):
    """By head: a task, its examples and a model that has learned nothing."""
    made = {}
    for head, data, options in (
        ("classes", sounds / "unseen-tones", {}),
        ("words", sounds / "unseen-words" / "words.csv", {"text": "text"}),
    ):
        task = tasks.Speech(width=24, layers=2, heads=2, dropout=0.0, mask_time=0.0, mask_channels=0.0, **options)
        examples = task.read(data)
        task = task.fitted(examples)
        torch.manual_seed(5)
        made[head] = task, examples, task.new_model(examples).eval()
    return made


# --- what is learned --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_learns_classes(learned_tones, sounds):
    report = tasks.test(learned_tones, sounds / "unseen-tones")
    assert report.metrics["accuracy"] == report.metrics["macro F1"] == 1.0
    assert not report.better and "MFCC with logistic regression (C = " in str(report)
    files = [sounds / "unseen-tones" / "rising" / "002.wav", sounds / "unseen-tones" / "low" / "001.wav"]
    found = tasks.predict(learned_tones.folder, [str(file) for file in files])
    assert [(one["sound"], one["label"]) for one in found] == [(str(files[0]), "rising"), (str(files[1]), "low")]
    (alone,) = tasks.predict(learned_tones, files[0])
    assert alone["probabilities"] == pytest.approx(found[0]["probabilities"], abs=1e-6)


@pytest.mark.slow
def test_learns_to_write(learned_words, sounds):
    """Texts that were not in the training data, with letters twice in a row and spaces."""
    unseen = sounds / "unseen-words"
    report = tasks.test(learned_words, unseen / "words.csv")
    assert report.metrics == {"character error": 0.0, "word error": 0.0, "exact": 1.0}
    assert [*report.baselines] == ["always the most frequent text"] and not report.better
    lines = (unseen / "words.csv").read_text().splitlines()[1:]
    found = tasks.predict(learned_words.folder, unseen, beams=4)
    assert [f"{one['sound'][-7:]},{one['text']}" for one in found] == lines
    with pytest.raises(TypeError, match="width: cannot differ"):
        tasks.predict(learned_words, unseen, width=3)


@pytest.mark.slow
def test_does_not_learn_what_cannot_be_learned(sounds, tmp_path):
    """That truth reaches the model only through the training labels: nothing leaks from sounds to be judged."""
    examples = tasks.Speech().read(sounds / "tones")
    labels = np.random.default_rng(7).permutation([example.label for example in examples])
    rows = [f"{example.path},{label}" for example, label in zip(examples, labels, strict=True)]
    (tmp_path / "shuffled.csv").write_text("\n".join(["file,label", *rows]) + "\n")
    run = tasks.train("speech", tmp_path / "shuffled.csv", tmp_path / "run", **SMALL, steps=90)
    accuracy = tasks.test(run, sounds / "unseen-tones", baseline=False).metrics["accuracy"]
    assert abs(accuracy - 1 / 3) < 4 * (2 / 9 / 61) ** 0.5


def theirs_of(folder, kind, files):
    """What transformers makes of files in one padded batch: its model, processor and logits."""
    library = transformers()
    model = getattr(library, kind).from_pretrained(folder).eval()
    reader = library.Wav2Vec2FeatureExtractor.from_pretrained(folder)
    waves = [soundfile.read(file, dtype="float32")[0] for file in files]
    inputs = reader(waves, sampling_rate=RATE, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model, model(**inputs).logits, inputs["attention_mask"].sum(1)


@pytest.mark.slow
def test_transformers_opens_the_classes_and_says_the_same(learned_tones, sounds):
    files = sorted((sounds / "unseen-tones").glob("*/*.wav"))[::9]
    model, logits, _ = theirs_of(learned_tones.folder, "AutoModelForAudioClassification", files)
    ours = [[*one["probabilities"].values()] for one in tasks.predict(learned_tones, [str(file) for file in files])]
    np.testing.assert_allclose(ours, logits.softmax(-1), atol=1e-6)
    assert [model.config.id2label[n] for n in range(3)] == [*learned_tones.task.labels]


@pytest.mark.slow
def test_transformers_opens_the_texts_and_says_the_same(learned_words, sounds):
    """Catches a vocabulary that only we can read, and frames that are counted otherwise."""
    files = sorted((sounds / "unseen-words").glob("*.wav"))[:7]
    model, logits, lengths = theirs_of(learned_words.folder, "AutoModelForCTC", files)
    tokenizer = transformers().AutoTokenizer.from_pretrained(learned_words.folder)
    task, ours = learned_words.task, learned_words.model
    batch = task.collate(ours, task.encode(ours, task.inputs([str(file) for file in files])))
    frames = model._get_feat_extract_output_lengths(lengths)
    assert batch["frames"].tolist() == frames.tolist()
    with torch.no_grad():
        mine = task.forward(ours, batch)
    for one, other, count in zip(mine, logits, frames, strict=True):
        torch.testing.assert_close(one[:count], other[:count], atol=2e-5, rtol=1e-5)
    texts = [tokenizer.decode(row[:n].argmax(-1)) for row, n in zip(logits, frames, strict=True)]
    assert texts == [one["text"] for one in tasks.predict(ours and learned_words, [str(file) for file in files])]
    assert len(tokenizer) == model.config.vocab_size == 6
    assert tokenizer("ab c").input_ids == [*task.alphabet.numbers("ab c")]


def published_base(folder, **changes):
    """A tiny wav2vec 2.0 of the base form, which reads no mask, with a CTC head for five tokens."""
    config = transformers().Wav2Vec2Config(
        **{
            "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
            "conv_dim": [8] * 2, "conv_kernel": [40, 3], "conv_stride": [20, 2], "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 9, "num_conv_pos_embedding_groups": 4, "vocab_size": 5, "layerdrop": 0.0,
            "mask_time_prob": 0.0, **changes,
        }
    )  # fmt: skip
    written(folder, "Wav2Vec2ForCTC", config)
    processor = {"sampling_rate": RATE, "return_attention_mask": False, "do_normalize": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(["<pad>", *"xyz|"])}))
    return folder


@pytest.mark.slow
def test_from_a_published_model(sounds, tmp_path):
    """Catches padding that is heard: this form has no mask, so each sound must run alone. And a head that is kept."""
    begin = published_base(tmp_path / "published")
    data, options = sounds / "words" / "words.csv", {"text": "text", "steps": 7, "batch": 5, "precision": "no"}
    run = tasks.train("speech", data, tmp_path / "run", initial=begin, **options)
    assert run.model.head.out.weight.shape == (6, 24) and run.model.settings.values["vocab_size"] == 6
    assert json.loads((run.folder / "vocab.json").read_text())["c"] == 5
    again = tasks.train("speech", data, tmp_path / "again", initial=run.folder, **{**options, "rate": 1e-9})
    torch.testing.assert_close(again.model.head.out.weight, run.model.head.out.weight, atol=1e-6, rtol=0)
    task, examples = run.task, run.task.read(sounds / "unseen-words" / "words.csv")[:4]
    items = task.encode(run.model, examples)
    with torch.no_grad():
        together = task.forward(run.model, task.collate(run.model, items))
        library = transformers().AutoModelForCTC.from_pretrained(run.folder).eval()
        for row, example in zip(together, examples, strict=True):
            expected = library(**run.model.prepare(example.path)).logits[0]
            torch.testing.assert_close(row[: len(expected)], expected, atol=1e-5, rtol=1e-5)
    classes = tasks.train("speech", sounds / "tones", tmp_path / "tones", initial=begin, steps=3, precision="no")
    assert classes.model.label_names == ["high", "low", "rising"]
    taught = functools.partial(tasks.distill, classes, out=tmp_path / "taught", data=sounds / "tones", precision="no")
    with pytest.raises(ValueError, match="hidden, relations: a wav2vec 2.0 of this kind reads each item of a batch"):
        taught("layers=1", hidden=1.0, steps=1)
    other = tasks.train("speech", sounds / "tones", tmp_path / "other", **{**SMALL, "steps": 1, "precision": "no"})
    with pytest.raises(ValueError, match="student: it does not read the tokens, pixels or samples that"):
        taught(other.folder, steps=1)
    assert taught("layers=1", steps=1).model.label_names == classes.model.label_names


@pytest.mark.slow
def test_ten_kills(server, sounds, tmp_path):
    options = """--text text --layers 1 --heads 2 --width 12 --batch 13 --accumulate 2 --precision bf16 --steps 17
    --every 5 --checkpoint-every 3 --speed 0.2 --shift 0.1 --noise 0.2 --mask-time 0.2 --mask-channels 0.1
    --dropout 0.2 --hertz 3000""".split()
    data = str(sounds / "unseen-words" / "words.csv")
    files = survives_kills(server, tmp_path, ["train", "speech", data, *options])
    assert {"task.json", "preprocessor_config.json", "vocab.json", "config.json", "model.safetensors"} <= files


@pytest.mark.parametrize("head", ["classes", "words"])
def test_parts_of_a_batch_weigh_what_they_are_a_mean_over(begun, head):
    task, examples, model = begun[head]
    if head == "classes":
        task = dataclasses.replace(task, class_weights=True, label_smoothing=0.2).fitted(examples[:29] + examples[50:])
    made = ExampleObjective(task, model, examples, examples[:3], Settings(steps=9, batch=13, seed=2))
    batch = made.batch(1)
    parts = made.split(batch, 3)
    assert [len(part["input_values"]) for part in parts] == [5, 4, 4]
    shares = [made.weight(part) / made.weight(batch) for part in parts]
    joined = sum(share * made.loss(model, part) for share, part in zip(shares, parts, strict=True))
    torch.testing.assert_close(joined, made.loss(model, batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", ["classes", "words"])
def test_nothing_hangs_on_what_shares_a_batch(begun, head):
    task, examples, model = begun[head]
    items = task.encode(model, examples[:7])
    with torch.no_grad():
        together = task.collate(model, items)
        assert task.counted(together) == sum(map(task.length, items))  # padding is no work
        joint = task.forward(model, together)
        for n, item in enumerate(items):
            alone = task.collate(model, [item])
            expected = task.forward(model, alone)[0]
            assert alone["frames"].item() == together["frames"][n]
            found = joint[n] if head == "classes" else joint[n, : len(expected)]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# --- texts as tokens --------------------------------------------------------------------------------------------------


def collapsed(path):
    """By the definition: repeats joined, blanks dropped."""
    return tuple(n for n, before in zip(path, (None, *path), strict=False) if n != before and n)


def read_aloud(tokens):
    return "".join(("", "<unk>", " ", "a", "b")[n] for n in tokens).strip()


def sums_of_alignments(probabilities):
    """Of (L, V) the probability of each sequence of tokens."""
    sums: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(probabilities.shape[1]), repeat=len(probabilities)):
        share = math.prod(probabilities[t, n].item() for t, n in enumerate(path))
        sums[collapsed(path)] = sums.get(collapsed(path), 0.0) + share
    return sums


def test_the_loss_is_the_sum_over_all_alignments():
    """Catches frames of padding that count, another blank, and letters twice in a row without a blank between them."""
    alphabet = Characters("ab")
    texts, frames = ["aa", "b"], [4, 3]
    logits = torch.randn(2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rows = zip(logits.softmax(-1), texts, frames, strict=True)
    expected = -sum(math.log(sums_of_alignments(row[:n])[alphabet.numbers(text)]) for row, text, n in rows)
    labels = padded([alphabet.numbers(text) for text in texts])
    assert ctc_loss(logits, torch.tensor(frames), labels).item() == pytest.approx(expected / 3, rel=1e-9)


def test_texts_are_those_of_all_alignments():
    alphabet = Characters("ab")
    logits = 2 * torch.randn(23, 4, 5, generator=torch.Generator().manual_seed(4))
    frames = torch.tensor([4, 3] * 11 + [1])
    greedy, searched = (alphabet.texts(logits, frames, beams) for beams in (1, 4096))
    for row, count, first, best in zip(logits, frames.tolist(), greedy, searched, strict=True):
        sums = sums_of_alignments(row[:count].double().softmax(-1))
        assert first == read_aloud(collapsed(row[:count].argmax(-1).tolist()))
        assert best == read_aloud(max(sums, key=sums.__getitem__))
    assert greedy != searched  # else a search that is never made would pass


def test_frames_that_a_text_needs_are_those_of_its_shortest_alignment():
    alphabet = Characters("ab")
    for text in ("a", "ab", "aa", "aab", "a a"):
        numbers = alphabet.numbers(text)
        paths = (path for count in range(9) for path in itertools.product(range(5), repeat=count))
        assert needed_frames(numbers) == len(next(path for path in paths if collapsed(path) == numbers)), text


def edits(one, other):
    """Levenshtein (1966), by its recursion."""
    row = [*range(len(other) + 1)]
    for i, a in enumerate(one, 1):
        row, above = [i], row
        for j, b in enumerate(other, 1):
            row.append(min(row[-1] + 1, above[j] + 1, above[j - 1] + (a != b)))
    return row[-1]


def test_error_rates_are_edits_over_all_examples():
    import jiwer

    truth, texts = ["one two", "three", "aa b", "x"], ["one too", "", "a ab", "x y z"]
    found = error_rates(truth, texts)
    characters = sum(edits(a, b) for a, b in zip(truth, texts, strict=True)) / sum(map(len, truth))
    words = sum(edits(a.split(), b.split()) for a, b in zip(truth, texts, strict=True)) / 6
    assert found == {"character error": pytest.approx(characters), "word error": pytest.approx(words), "exact": 0.0}
    assert found["word error"] == pytest.approx(jiwer.process_words(truth, texts).wer)
    assert error_rates(["a", "b"], ["a", "c"])["exact"] == 0.5


def test_the_loss_decides_while_texts_are_chance(begun, monkeypatch):
    task, examples, model = begun["words"]
    objective = task.objective(model, examples[:7], examples[:7], Settings(steps=1, batch=7))
    found = objective.evaluate(model)
    assert found.metrics["character error"] > found.cost == 0.6
    monkeypatch.setattr("saccade.tasks._media._transcript_task.CHANCE", 9.0)
    found = objective.evaluate(model)
    assert found.cost == found.metrics["character error"]


def test_unseen_characters_are_errors_and_too_long_texts_are_refused(begun, tmp_path):
    task, examples, model = begun["words"]
    name = examples[0].path
    (tmp_path / "odd.csv").write_text(f"file,text\n{name},{examples[0].text}é\n")
    (odd,) = task.read(tmp_path / "odd.csv")
    assert task.alphabet.numbers(odd.text)[-1] == 1
    (found,) = task.predict(model, [odd])
    assert task.scores([found], [odd])["character error"] > 0
    (tmp_path / "long.csv").write_text(f"file,text\n{name},{'ab' * 99}\n")
    (long,) = task.read(tmp_path / "long.csv")
    frames = model.frames(long.samples)
    message = rf"long.csv: line 2: .*wav: the text 'abab.* needs 198 frames, and its sound of {long.seconds:.2f} s has"
    with pytest.raises(ValueError, match=f"{message} {frames}; remove it, or correct the text$"):
        task.objective(model, [long], [long], Settings(steps=1))
    assert task.scores(task.predict(model, [long]), [long])["exact"] == 0.0  # in a test it is an error, no more


# --- sounds as they are read and changed ------------------------------------------------------------------------------


def test_other_rates_and_channels_become_what_the_model_reads(begun, tmp_path):
    """Catches samples that are left out instead of filtered, and one channel in the place of the mean."""
    task, _, model = begun["classes"]
    wave = tone(500, 0.5, 11025)
    above = tone(3000, 0.5, 11025)  # more than half of the model's rate: it must go, not come back as 1,000 Hz
    soundfile.write(tmp_path / "other.wav", np.stack([2 * wave, 2 * above], 1), 11025, subtype="FLOAT")
    (example,) = task.inputs([str(tmp_path / "other.wav")])
    assert (example.channels, example.rate) == (2, 11025)
    told = r"sounds changed, of 1: 1 resampled to 4,000 samples a second \(from 11,025\), 1 averaged over its channels$"
    with pytest.warns(UserWarning, match=told):
        (item,) = task.encode(model, [example])
    samples, expected = item.store.samples(0), tone(500, 0.5)
    assert len(samples) == len(expected) == item.store.lengths[0] == 2000
    np.testing.assert_allclose(samples[200:-200], expected[200:-200], atol=0.01)


def test_sounds_are_the_same_where_they_do_not_fit_into_memory(begun):
    _, examples, _ = begun["classes"]
    kept, read = SoundStore(examples[:5], 3000, 997), SoundStore(examples[:5], 3000, 997, memory=100)
    for one, other, length in zip(kept, read, kept.lengths, strict=True):
        np.testing.assert_array_equal(one, other)
        assert len(one) == length >= 997


class Fixed:
    """Draws of a generator that are known."""

    def __init__(self, *uniform):
        self._uniform = [*uniform]

    def uniform(self, low, high):
        return self._uniform.pop(0)

    def standard_normal(self, count):
        return np.full(count, 1.0)


def loudest(samples, rate=RATE):
    """Hertz, to a tenth."""
    size = 10 * rate
    return np.abs(np.fft.rfft(samples * np.hanning(len(samples)), size)).argmax() * rate / size


def test_sounds_are_changed_as_acoustics_has_it():
    wave = tone(500, 0.5).astype(np.float32)
    faster = SoundChanges(speed=0.25)(wave, RATE, Fixed(1.0, 0, 0, 0))
    assert len(faster) == 1600 and loudest(faster) == pytest.approx(625, abs=1)
    slower = SoundChanges(speed=0.25)(wave, RATE, Fixed(-1.0, 0, 0, 0))
    assert len(slower) == 2500 and loudest(slower) == pytest.approx(400, abs=1)
    moved = SoundChanges(shift=0.1)(wave, RATE, Fixed(0.0, 0.5, 0.25, 0))
    assert len(moved) == 2000 + 200 + 100 and not moved[:200].any() and not moved[-100:].any()
    np.testing.assert_array_equal(moved[200:-100], wave)
    noisy = SoundChanges(noise=0.5)(wave, RATE, Fixed(0.0, 0, 0, 0.4))
    np.testing.assert_allclose(noisy - wave, 0.2 * wave.std(), rtol=1e-4)


def test_sounds_are_changed_anew_in_each_step_and_never_while_judging(begun):
    task, examples, model = begun["words"]
    items = task.encode(model, [examples[0]] * 11)
    plain = task.collate(model, items)["input_values"]
    assert (plain == plain[:1]).all()
    first, second, again = (
        task.collate(model, items, np.random.default_rng(seed))["input_values"] for seed in (1, 2, 1)
    )
    assert torch.equal(first, again) and (first.shape != second.shape or not torch.equal(first, second))
    assert len(torch.unique(first, dim=0)) > 8  # each sound its own draws


def test_no_change_makes_a_sound_too_short_for_its_text(begun):
    task, examples, model = begun["words"]
    fast = dataclasses.replace(task, speed=0.99, shift=0.0)
    items = [item for item in fast.encode(model, examples) if item.said]
    tight = [item._replace(said=(3, 4) * (model.frames(item.store.lengths[item.number]) // 2)) for item in items]
    batch = fast.collate(model, tight, np.random.default_rng(1))
    assert (batch["frames"] >= (batch["labels"] >= 0).sum(1)).all()
    torch.testing.assert_close(
        fast.loss(task.forward(model, batch), batch, learning=True).isfinite(), torch.tensor(True)
    )


def test_the_filter_bank_hears_its_frequencies():
    for rate, kernel in ((RATE, 64), (16000, 256)):
        bank = mel_bank(64, kernel, rate)
        peaks = np.array([loudest_of_filter(row, rate) for row in bank])
        marks = 1127 * np.log1p(peaks / 700)
        assert abs(peaks[0] - 60) < 40 and 0.4 * rate < peaks[-1] < 0.5 * rate
        assert (np.diff(marks) > 0).mean() > 0.95  # in order, but for the lowest, whose peaks are broad


def loudest_of_filter(row, rate):
    return np.abs(np.fft.rfft(row, 16 * rate)).argmax() / 16


# --- a test's baselines and its picture -------------------------------------------------------------------------------


@pytest.mark.slow
def test_mel_bands_are_those_of_transformers():
    transformers()
    from transformers.audio_utils import mel_filter_bank, spectrogram

    for rate, size in ((8000, 256), (16000, 512)):
        expected = mel_filter_bank(size // 2 + 1, BANDS, 0, rate / 2, rate, mel_scale="htk")
        np.testing.assert_allclose(mel_filters(rate, size), expected.T, atol=1e-9)
    wave = np.random.default_rng(3).standard_normal(16000).astype(np.float32)
    filters = mel_filter_bank(257, BANDS, 0, 8000, 16000, mel_scale="htk")
    expected = spectrogram(
        wave, np.hanning(400), 400, 160, fft_length=512, power=2.0, center=False, mel_filters=filters, log_mel="log"
    )
    np.testing.assert_allclose(log_mel(wave, 16000), expected, atol=1e-4)


def test_the_baseline_of_classes_is_scikit_learns(sounds):
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    task = tasks.Speech()
    examples = task.read(sounds / "unseen-tones")
    training, validation, tested = examples[::2], examples[1::4], examples[3::4]
    names = ["high", "low", "rising"]
    classes = [np.array([names.index(one.label) for one in part]) for part in (training, validation)]
    outputs, what = mfcc_regression(training, validation, tested, (classes[0], classes[1]))
    known, judged, asked = (mfcc_statistics(SoundStore(part, RATE)) for part in (training, validation, tested))
    assert known.shape == (len(training), 40)
    models = [
        make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000)).fit(known, classes[0])
        for strength in (0.1, 1.0, 10.0, 100.0)
    ]
    best = models[int(np.argmax([model.score(judged, classes[1]) for model in models]))]
    assert what == f"MFCC with logistic regression (C = {best[-1].C:g})"
    np.testing.assert_allclose(outputs, best.predict_proba(asked), atol=1e-6)


def test_the_baselines_of_texts(sounds, begun, tmp_path):
    """Few texts are classes, and the most frequent one is the other try."""
    _, _, model = begun["words"]
    rows = [f"{file},{file.parent.name}" for file in sorted((sounds / "unseen-tones").glob("*/*.wav"))]
    (tmp_path / "named.csv").write_text("\n".join(["file,text", *rows]) + "\n")
    task = tasks.Speech(text="text")
    examples = task.read(tmp_path / "named.csv")
    usual, classes = task.baselines(model, examples[:-1:2], examples[1:-1:4], examples[3::4])
    assert usual.name == "always the most frequent text" and {*usual.outputs} == {"high"}
    assert classes.name.startswith("one of 3 texts: MFCC with logistic regression")
    assert task.scores(classes.outputs, examples[3::4])["exact"] > 0.9


@pytest.mark.slow
def test_the_picture(learned_tones, learned_words, sounds, tmp_path):
    for run, data in ((learned_tones, "unseen-tones"), (learned_words, "unseen-words/words.csv")):
        report = tasks.test(run, sounds / data, baseline=False)
        for kind, start in (("svg", b"<?xml"), ("png", b"\x89PNG")):
            report.save_picture(tmp_path / f"sounds.{kind}")
            assert (tmp_path / f"sounds.{kind}").read_bytes().startswith(start)
        mistaken = data == "unseen-tones" and report.metrics["accuracy"] < 1
        assert ("taken for" in (tmp_path / "sounds.svg").read_text()) == mistaken


@pytest.mark.slow
def test_drawn_attention_is_that_of_transformers(begun, tmp_path):
    task, examples, model = begun["words"]
    model.save(tmp_path)
    theirs = transformers().Wav2Vec2ForCTC.from_pretrained(tmp_path, attn_implementation="eager").eval()
    batch = task.collate(model, task.encode(model, examples[:1]))
    logits, weights = heard(model, lambda observe: task.forward(model, batch, observe))
    with torch.no_grad():
        out = theirs(batch["input_values"], batch["attention_mask"], output_attentions=True)
    torch.testing.assert_close(logits, out.logits[0], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(weights, out.attentions[-1][0], atol=1e-6)


def test_rows_are_the_frames_that_write_characters():
    weights = np.arange(2 * 6 * 6.0).reshape(2, 6, 6)
    rows, names, marks = rows_of_characters(weights, ["", "a", "a", "", "a", " "])
    assert (names, marks) == (("a", "a", "space"), [1, 4, 5])
    np.testing.assert_array_equal(rows, weights.mean(0)[[1, 4, 5]])
    silent = rows_of_characters(weights, [""] * 6)
    assert silent[1:] == (("all frames",), [])
    for found, told in (((rows, names, marks), 1), (silent, 0)):  # where nothing is written, there are no dots
        panel = SoundPanel("a", np.ones((5, 7)), 0.3, *found)  # type: ignore[arg-type]
        assert picture_of_panels([panel], "Some", "svg", None).count(b"dots: the frames") == told


# --- bad input --------------------------------------------------------------------------------------------------------


def tabled(folder, content, name="a.csv"):
    (folder / name).write_text(content)
    return folder / name


@pytest.fixture(scope="session")
def odd_sounds(tmp_path_factory):
    """Files that hold no sound that can be learned from, and a good one."""
    folder = tmp_path_factory.mktemp("odd")
    soundfile.write(folder / "good.wav", tone(500, 0.3), RATE)
    soundfile.write(folder / "long.wav", tone(500, 31), RATE)
    soundfile.write(folder / "silent.wav", np.zeros(997), RATE)
    soundfile.write(folder / "empty.wav", np.zeros(0), RATE)
    soundfile.write(folder / "nan.wav", np.full(97, np.nan), RATE, subtype="FLOAT")
    (folder / "text.wav").write_text("no sound")
    good = (folder / "good.wav").read_bytes()
    (folder / "cut.wav").write_bytes(good[: len(good) // 2])
    return folder


@looped(
    ("content", "options", "error", "message"),
    [
        (
            "path,label\na.wav,x\n",
            {},
            ValueError,
            r"a.csv: no column 'file' in the first line, which must name them; it has 'path', 'label'$",
        ),
        (
            "file,text\na.wav,x\n",
            {},
            ValueError,
            r"a.csv: no column 'label' in the first line, which must name them; it has 'file', 'text'$",
        ),
        (
            "file,label\na.wav,x\n",
            {"text": "said"},
            ValueError,
            r"a.csv: no column 'said' in the first line, which must name them; it has 'file', 'label'$",
        ),
        ("file,label\nno.wav,x\n", {}, FileNotFoundError, r"a.csv: line 2: .*no.wav: no such sound file$"),
        ("file,label\n,x\n", {}, ValueError, r"a.csv: line 2: expected the path of a sound, got ''$"),
        ("file,label\ngood.wav,\n", {}, ValueError, r"a.csv: line 2: expected a label, a word or an integer, got ''$"),
        ("file,text\ngood.wav, \n", {"text": "text"}, ValueError, r"a.csv: line 2: the text is empty$"),
        ("file,text\ngood.wav,a|b\n", {"text": "text"}, ValueError, r"a.csv: line 2: the text has '\|', which stands"),
        (
            "file,label\ntext.wav,y\n",
            {},
            ValueError,
            r"a.csv: line 2: .*text.wav: no sound of a known format; .*; remove",
        ),
        ("file,label\ncut.wav,y\n", {}, ValueError, r"a.csv: line 2: .*cut.wav: damaged, the file is shorter than .*"),
        (
            "file,label\nempty.wav,y\n",
            {},
            ValueError,
            r"a.csv: line 2: .*empty.wav: holds no samples .*; remove the broken",
        ),
        ("file,label\nsilent.wav,y\n", {}, ValueError, r"a.csv: line 2: .*silent.wav: is silent, all its samples are"),
        (
            "file,label\nnan.wav,y\n",
            {},
            ValueError,
            r"a.csv: line 2: .*nan.wav: holds NaN or infinity .*; remove the broken",
        ),
        ("file,label\nlong.wav,y\n", {}, ValueError, r"line 2: .*long.wav: lasts 31.0 s, more than longest=30 "),
        (
            "file,label\ngood.wav,x\ngood.wav,x\n",
            {},
            ValueError,
            r"label: expected two classes or more, every sound is 'x' \(one of them: .*a.csv: line",
        ),
        (
            "file,label\ngood.wav,x\ngood.wav,x\ngood.wav,y\n",
            {},
            ValueError,
            r"a.csv: line 4: is the only sound of 'y', too few to split; add sounds of it, leave it out, or give --val",
        ),
        (
            "file,text\ngood.wav,a\n",
            {"text": "text", "class_weights": True},
            ValueError,
            r"class_weights: an option of classes, and text='text' has none; leave it out$",
        ),
    ],
)
def test_bad_tables_are_told_in_one_line_and_nothing_is_written(odd_sounds, content, options, error, message):
    with pytest.raises(error, match=message) as raised:
        tasks.train("speech", tabled(odd_sounds, content), odd_sounds / "out", **SMALL, steps=3, **options)
    assert "\n" not in str(raised.value)
    assert not (odd_sounds / "out").exists()


def test_bad_folders_and_options(sounds, files, tmp_path):
    def train(data, **options):
        return tasks.train("speech", data, tmp_path / "out", **{**SMALL, "steps": 3, **options})

    (tmp_path / "empty").mkdir()
    shutil.copytree(sounds / "unseen-tones" / "low", tmp_path / "some" / "low")
    (tmp_path / "some" / "dog").mkdir()
    tones = sounds / "unseen-tones"
    cases = [
        (tmp_path / "no", {}, FileNotFoundError, "no: no such file or folder"),
        (tmp_path / "empty", {}, ValueError, "empty: holds no sounds; expected a folder for each class with sounds"),
        (tmp_path / "some", {}, ValueError, "dog: holds no sounds; remove the folder, or put sounds of the class in"),
        (tones, {"text": "said"}, ValueError, "tones: a folder has no texts; give a .csv, .tsv or .jsonl with the col"),
        (tones, {"speed": 1.0}, ValueError, r"speed: must be in \[0, 1\), got 1.0"),
        (tones, {"mask_time": -0.1}, ValueError, r"mask_time: must be in \[0, 1\), got -0.1"),
        (tones, {"heads": 5}, ValueError, "heads: must divide the width, got heads=5 and width=24"),
        (tones, {"hertz": 8}, ValueError, "hertz: must be from 1,000 to 192,000 samples a second, got 8"),
        (tones, {"longest": 0.0}, ValueError, "longest: must be positive, got 0.0"),
        (tones, {"beams": 0}, ValueError, "beams: must be at least 1, got 0"),
    ]
    for data, options, error, message in cases:
        with pytest.raises(error, match=message):
            train(data, **options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(TypeError, match="text: the run was trained on classes, got text='said'"):
        tasks.Speech().changed({"text": "said"})
    assert tasks.Speech(text="text").changed({"text": "said"}).text == "said"
    task = tasks.Speech(labels=("high", "low"))
    with pytest.raises(ValueError, match="the label 'rising' is not in the training data, which has 'high', 'low'$"):
        task.read(tones)
    with pytest.raises(FileNotFoundError, match="nowhere.wav: no such sound file"):
        task.inputs(["nowhere.wav"])
    with pytest.raises(ValueError, match="empty: holds no sounds"):
        task.read_inputs(tmp_path / "empty")


@pytest.mark.slow
def test_models_of_other_tasks(sounds, files, tmp_path):
    texts = tasks.train("classify", files / "reviews.csv", tmp_path / "texts", **{**SMALL_TEXT, "steps": 2})
    with pytest.raises(
        ValueError,
        match=r"initial: .* cannot be the start of speech \(expected a model of sounds, such as wav2vec 2.0, got Bert",
    ):
        tasks.train("speech", sounds / "tones", tmp_path / "out", initial=texts.folder, **SMALL, steps=3)
    with pytest.raises(ValueError, match="is a run of the task classify"):
        tasks.train("speech", sounds / "tones", texts.folder, resume=True, **SMALL, steps=3)


@pytest.mark.slow
@pytest.mark.filterwarnings("default::UserWarning")
def test_broken_sounds_may_be_left_out(learned_tones, sounds, tmp_path, capsys):
    shutil.copytree(sounds / "unseen-tones" / "low", tmp_path / "some")
    (tmp_path / "some" / "cut.wav").write_bytes(b"no sound")
    run = str(learned_tones.folder)
    assert cli.main(["predict", run, str(tmp_path / "some"), "--set", "skip_broken=true"]) == 0
    captured = capsys.readouterr()
    assert [json.loads(line)["label"] for line in captured.out.splitlines()] == ["low"] * 20
    expected = f"1 of 21 sounds are broken and left out: {tmp_path / 'some' / 'cut.wav'}"
    assert captured.err == f"saccade: warning: {expected}\n"
