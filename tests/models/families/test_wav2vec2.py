"""wav2vec 2.0 against transformers' own, on tiny random checkpoints."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.torch
import soundfile
import torch
from torch import Tensor

from published import assert_agrees, assert_round_trip, assert_same_gradients, run_alone, transformers, written
from saccade import models
from saccade.models.signals.sound_layers import _spans
from saccade.models.token_layout import token_layout
from saccade.variants import LongformerConfig
from slowly import slow_but

SIZES = dict(
    vocab_size=17,
    hidden_size=42,
    num_hidden_layers=3,
    num_attention_heads=7,
    intermediate_size=53,
    conv_dim=[11, 13, 19],
    conv_kernel=[5, 3, 2],
    conv_stride=[3, 2, 1],
    num_feat_extract_layers=3,
    num_conv_pos_embeddings=6,
    num_conv_pos_embedding_groups=3,
    classifier_proj_size=23,
)
LARGE = dict(feat_extract_norm="layer", do_stable_layer_norm=True, conv_bias=True)
LENGTHS = [61, 106, 83]


def config(**changes: object):
    return transformers().Wav2Vec2Config(**{**SIZES, **changes})


def batch(*, masked: bool = True) -> dict[str, Tensor]:
    """Three sounds of 61, 106 and 83 samples: 8, 15 and 12 frames."""
    generator = torch.Generator().manual_seed(1)
    real = torch.arange(106) < torch.tensor(LENGTHS)[:, None]
    values = torch.randn(3, 106, generator=generator) * real
    return {"input_values": values, **({"attention_mask": real.long()} if masked else {})}


def frames() -> Tensor:
    counts = torch.tensor([8, 15, 12])
    return torch.arange(15) < counts[:, None]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Wav2Vec2Model", {}),
        ("Wav2Vec2Model", {**LARGE, "feat_extract_activation": "relu", "num_hidden_layers": 1}),
        ("Wav2Vec2Model", {"num_conv_pos_embeddings": 5, "mask_time_prob": 0.0, "conv_bias": True}),
        ("Wav2Vec2ForCTC", {"hidden_act": "gelu_new", "do_stable_layer_norm": True}),
        ("Wav2Vec2ForCTC", {**LARGE, "layer_norm_eps": 1e-3, "feat_extract_activation": "gelu_new"}),
        ("Wav2Vec2ForSequenceClassification", {"num_labels": 5}),
        ("Wav2Vec2ForSequenceClassification", LARGE),
    ],
)
@pytest.mark.parametrize("masked", slow_but([True, False], True))
def test_outputs_and_files_are_those_of_transformers(tmp_path, name, changes, masked):
    theirs = written(tmp_path / "a", name, config(**changes))
    inputs = batch(masked=masked)
    assert_agrees(theirs, tmp_path / "a", inputs, real=frames() if masked else None)
    if masked:
        assert_round_trip(theirs.float(), tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_ctc_loss_is_that_of_transformers(tmp_path, reduction):
    theirs = written(tmp_path, "Wav2Vec2ForCTC", config(**LARGE, pad_token_id=4, ctc_loss_reduction=reduction))
    labels = torch.tensor([[3, 3, 5, -100], [1, 2, 16, 0], [7, 4, -100, -100]])
    inputs = {**batch(), "labels": labels}
    ours = assert_agrees(theirs, tmp_path, inputs, real=frames(), dtypes=(torch.float32,))
    with pytest.raises(ValueError, match="labels: expected tokens from 0 to 16"):
        ours(**{**inputs, "labels": labels + 10})


@pytest.mark.parametrize("changes", [{}, LARGE])
def test_gradients_of_all_weights(tmp_path, changes):
    theirs = written(tmp_path, "Wav2Vec2ForCTC", config(**changes))
    ours = models.load(tmp_path, dtype=torch.float64)
    assert_same_gradients(theirs, ours, batch(), lambda out: (out.logits[frames()] ** 2).sum())


def test_padding_equals_alone_in_the_large_form(tmp_path):
    written(tmp_path, "Wav2Vec2ForSequenceClassification", config(**LARGE))
    model = models.load(tmp_path, dtype=torch.float64)
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in batch().items()}
    out = model(**inputs)
    for item, (samples, row) in enumerate(zip(LENGTHS, frames(), strict=True)):
        alone = model(inputs["input_values"][item : item + 1, :samples])
        assert torch.allclose(out.last_hidden_state[item, row], alone.last_hidden_state[0], atol=1e-12)
        assert torch.allclose(out.logits[item], alone.logits[0], atol=1e-12)
    assert not out.last_hidden_state[~frames()].any()


def test_padding_is_not_computed_in_the_large_form(tmp_path):
    written(tmp_path, "Wav2Vec2Model", config(**LARGE))
    model, rows = models.load(tmp_path), dict.fromkeys(("features.layers.0.conv", "positions", "encoder.blocks.0"), 0)
    for name in rows:
        axis = 2 if "conv" in name else 1

        def count(module, given, out, name=name, axis=axis):
            rows[name] += given[0].shape[0] * given[0].shape[axis]

        model.get_submodule(name).register_forward_hook(count)
    model(**batch())
    assert rows == {"features.layers.0.conv": sum(LENGTHS), "positions": 35, "encoder.blocks.0": 35}


def test_files_with_the_old_names_of_weight_norm(tmp_path):
    theirs = written(tmp_path, "Wav2Vec2ForCTC", config())
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for new, old in (("original0", "weight_g"), ("original1", "weight_v")):
        place = "wav2vec2.encoder.pos_conv_embed.conv"
        weights[f"{place}.{old}"] = weights.pop(f"{place}.parametrizations.weight.{new}")
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_agrees(theirs, tmp_path, batch(), real=frames(), dtypes=(torch.float64,))


def test_a_window_over_everything_is_exact_attention(tmp_path):
    written(tmp_path, "Wav2Vec2Model", config(attention_dropout=0.0))
    exact = models.load(tmp_path)
    windowed = models.load(tmp_path, mechanism=LongformerConfig(window=64, global_tokens=()))
    assert torch.allclose(exact(**batch()).last_hidden_state, windowed(**batch()).last_hidden_state, atol=1e-5)


def test_training_leaves_layers_out(tmp_path):
    written(tmp_path, "Wav2Vec2ForCTC", config(layerdrop=0.5))
    model, seen = models.load(tmp_path).train(), []
    torch.manual_seed(0)
    for _ in range(20):
        model(**batch(), observe=lambda layer, call: seen.append(layer))
    assert 15 < len(seen) < 45  # of 20 calls of 3 layers
    model.eval()(**batch(), observe=lambda layer, call: seen.append(layer))
    assert seen[-3:] == [0, 1, 2]


def test_training_masks_frames_and_channels(tmp_path):
    spans = dict(mask_time_prob=0.5, mask_time_length=3, mask_feature_prob=0.4, mask_feature_length=5)
    written(tmp_path, "Wav2Vec2ForCTC", config(**spans))
    augment = models.load(tmp_path).augment
    torch.manual_seed(0)
    x, layout = torch.randn(1, 35, 42), token_layout(3, 15, frames())
    masked = augment(x, layout)
    zero, learned = masked == 0, masked == augment.vector
    assert torch.equal(masked[~zero & ~learned], x[~zero & ~learned])
    for item, row in enumerate(frames()):
        hidden = layout.put(zero.float())[item, row]  # (frames, channels)
        assert (hidden == hidden[0]).all()
        assert 7 <= hidden[0].sum() < 42  # three spans of five
        replaced = layout.put((zero | learned).all(-1).float()[..., None])[item, row]
        assert 4 <= replaced.sum() < len(replaced)  # two spans of three


@pytest.mark.parametrize(
    ("masks", "learns"),
    [({}, True), ({"mask_time_prob": 0.0}, False), ({"apply_spec_augment": False}, False)],
)
def test_the_vector_of_masked_frames_learns_where_there_are_any(tmp_path, masks, learns):
    """Several processes wait for the gradients of all that learns."""
    usual = {"mask_time_prob": 0.1, "mask_feature_prob": 0.4, "mask_feature_length": 5, "layerdrop": 0.0}
    written(tmp_path, "Wav2Vec2ForCTC", config(**{**usual, **masks}))
    model = models.load(tmp_path).train()
    model(**batch()).logits.sum().backward()
    assert (model.augment.vector.grad is not None) == learns
    assert all(one.grad is not None for one in model.parameters() if one.requires_grad)


def test_as_many_frames_are_masked_as_in_transformers():
    transformers()
    from transformers.models.wav2vec2.modeling_wav2vec2 import _compute_mask_indices

    torch.manual_seed(0), np.random.seed(0)
    for lengths, *spans in [([40, 29, 11], 0.3, 4, 0), ([40, 5, 3], 0.05, 4, 2), ([40, 40, 40], 0.9, 7, 1)]:
        real = torch.arange(40) < torch.tensor(lengths)[:, None]
        ours = torch.stack([_spans(lengths, 40, *spans) for _ in range(400)]).float().mean((0, 2))
        drawn = [_compute_mask_indices((3, 40), *spans[:2], real.long(), spans[2]) for _ in range(400)]
        theirs = torch.from_numpy(np.stack(drawn)).logical_and(real).float().mean((0, 2))
        assert torch.allclose(ours, theirs, atol=0.015)


def test_pre_training_heads_are_left_out_and_new_ones_begin(tmp_path):
    written(tmp_path, "Wav2Vec2ForPreTraining", config(codevector_dim=8, proj_codevector_dim=8))
    with pytest.raises(ValueError, match="'Wav2Vec2ForPreTraining' is not a supported head of wav2vec 2.0"):
        models.load(tmp_path)
    assert any("quantizer" in name for name in models.load(tmp_path, head="none").report.unused)
    model = models.load(tmp_path, head="ctc")
    assert model(**batch()).logits.shape == (3, 15, 17)
    assert set(model.report.initialised) == {"head.out.weight", "head.out.bias"}
    model.save(tmp_path / "b")
    theirs = transformers().Wav2Vec2ForCTC.from_pretrained(tmp_path / "b")
    assert torch.allclose(theirs(**batch()).logits[frames()], model(**batch()).logits[frames()], atol=1e-5)
    assert models.load(tmp_path, head="sequence-classification", labels=4)(**batch()).logits.shape == (3, 4)
    other = models.load(tmp_path, head="ctc", labels=["<pad>", "a", "b"])
    assert other(**batch()).logits.shape == (3, 15, 3) and other.head.blank == 0
    other.save(tmp_path / "c")
    assert set(models.load(tmp_path / "b", head="ctc", labels=3).report.unused) == {"lm_head.weight", "lm_head.bias"}
    assert not models.load(tmp_path / "c", head="ctc", labels=["<pad>", "x", "y"]).report.initialised


def test_what_is_wrong_with_a_call_or_its_settings_is_told(tmp_path):
    written(tmp_path, "Wav2Vec2Model", config())
    model = models.load(tmp_path)
    left = batch()["attention_mask"].flip(1)
    wrong = [
        (dict(input_values=torch.zeros(2, 15)), ValueError, "item 0 has 15 samples, expected at least 17"),
        (dict(input_values=torch.zeros(0, 50)), ValueError, r"expected shape \(batch, samples\), got \(0, 50\)"),
        (dict(input_values=torch.zeros(50)), ValueError, r"expected shape \(batch, samples\), got \(50,\)"),
        (dict(input_values=torch.zeros(1, 50, dtype=torch.int16)), TypeError, "tensor of floats.*got torch.int16"),
        ({**batch(), "attention_mask": left}, ValueError, "attention_mask: expected padding on the right"),
        ({**batch(), "attention_mask": left[:, :5]}, ValueError, "attention_mask: expected shape"),
        ({**batch(), "labels": torch.zeros(3)}, ValueError, "labels: the model has no head"),
    ]
    for given, kind, told in wrong:
        with pytest.raises(kind, match=told):
            model(**given)
    settings = json.loads((tmp_path / "config.json").read_text())
    for change, told in [
        ({"add_adapter": True}, "add_adapter: expected False"),
        ({"adapter_attn_dim": 3}, "adapter_attn_dim: expected None"),
        ({"use_weighted_layer_sum": True}, "use_weighted_layer_sum: expected False"),
        ({"feat_extract_norm": "batch"}, "feat_extract_norm: expected one of 'group', 'layer'"),
        ({"conv_kernel": [3, 3]}, "conv_kernel: expected one of each convolution"),
        ({"conv_stride": 3}, "conv_stride: expected a list of positive ints"),
        ({"num_conv_pos_embedding_groups": 4}, "num_conv_pos_embedding_groups: expected a divisor of 42"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(ValueError, match=told):
            models.load(tmp_path)


@pytest.mark.parametrize("changes", [{}, LARGE])
def test_sounds_are_written_down_together_as_alone(tmp_path, changes):
    written(tmp_path, "Wav2Vec2ForCTC", config(**changes), spread=3)
    rng = np.random.default_rng(0)
    sounds = [rng.standard_normal(n).astype(np.float32) for n in (300, 531)]
    model = models.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"preprocessor_config.json: missing"):
        model.transcribe(sounds)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"return_attention_mask": bool(changes)}))
    with pytest.raises(FileNotFoundError, match=r"vocab.json: missing"):
        model.transcribe(sounds)
    (tmp_path / "vocab.json").write_text(json.dumps({"<pad>": 0, **{chr(64 + n): n for n in range(1, 17)}}))
    for beams in (None, 4):
        together = model.transcribe(sounds, beams=beams)
        assert together == [model.transcribe(sound, beams=beams)[0] for sound in sounds]
        assert all(together)
    with pytest.raises(ValueError, match="needs the head 'ctc', this model has None"):
        models.load(tmp_path, head="none").transcribe(sounds)


@pytest.mark.slow
def test_its_task_without_transformers(tmp_path):
    """Files of sound in, text out, in a process that cannot import transformers."""
    theirs = written(tmp_path, "Wav2Vec2ForCTC", config(**LARGE), spread=3)
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKL"]
    (tmp_path / "vocab.json").write_text(json.dumps({letter: n for n, letter in enumerate(letters)}))
    (tmp_path / "preprocessor_config.json").write_text('{"return_attention_mask": true, "sampling_rate": 8000}')
    rng, expected = np.random.default_rng(0), []
    tokenizer = transformers().Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"))
    extractor = transformers().Wav2Vec2FeatureExtractor(sampling_rate=8000)
    for n, length in enumerate((700, 1100)):
        samples = (rng.standard_normal(length) * 0.1).astype(np.float32)
        soundfile.write(tmp_path / f"{n}.wav", samples, 8000, subtype="FLOAT")
        with torch.no_grad():
            logits = theirs(extractor(samples, sampling_rate=8000, return_tensors="pt").input_values).logits
        expected += tokenizer.batch_decode(logits.argmax(-1))
    program = """
        model = models.load(folder)
        files = [folder / "0.wav", folder / "1.wav"]
        result = [model.transcribe(files), model.transcribe(files, beams=4)]
    """
    greedy, searched = run_alone(program, tmp_path)
    assert greedy == expected
    assert all(expected)
    assert len(searched) == 2
