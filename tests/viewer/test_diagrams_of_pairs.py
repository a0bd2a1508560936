"""A step of decoding of an encoder-decoder: numbers against the parallel form of transformers, and what it says."""

from __future__ import annotations

import checkpoints
import numpy as np
import pytest
import torch
import transformers
from drawn import group, numbers, root, texts

import saccade
from saccade.models import load

pytestmark = pytest.mark.usefixtures("no_poison")

SOURCE, TARGET = "The cat sat on the mat.", "Nobody knows"
STEP = 0.0051  # numbers have two decimals


@pytest.fixture(scope="module", params=["bart", "t5"])
def pair(request, tmp_path_factory):
    """Our model, and transformers' on the same files."""
    folder = tmp_path_factory.mktemp("models") / request.param
    getattr(checkpoints, request.param)(folder)
    with checkpoints.quiet():
        theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").eval()
    return load(folder, head="conditional-generation").eval(), theirs


def test_a_step_is_the_last_row_of_the_parallel_form(pair):
    ours, theirs = pair
    tokenizer = ours.tokenizer
    source = torch.tensor([[*tokenizer.before, *tokenizer.encode(SOURCE).ids, *tokenizer.after]])
    target = torch.tensor([[ours.start, *tokenizer.before, *tokenizer.encode(TARGET).ids]])
    with torch.no_grad():
        out = theirs(input_ids=source, decoder_input_ids=target, output_attentions=True)
    picture = saccade.diagram("decoder-step", model=ours, text=SOURCE, target=TARGET, head="1.2")
    own, cross = (getattr(out, f"{name}_attentions")[1][0, 2, -1].numpy() for name in ("decoder", "cross"))
    np.testing.assert_allclose(picture.facts["weights"], own, atol=2e-4)
    np.testing.assert_allclose(picture.facts["source_weights"], cross, atol=2e-4)
    bands = [part for part in root(picture) if "Attention weights" in str(part.findtext("{*}title"))]
    assert len(bands) == 2
    for band, weights in zip(bands, (own, cross), strict=True):
        np.testing.assert_allclose(numbers(band), weights, atol=STEP)
    assert picture.facts["after"][2] == target.shape[1] == picture.facts["before"][2] + 1
    assert len(picture.facts["source"]) == source.shape[1]
    shares = out.logits[0, -1].softmax(-1).topk(3).values.tolist()
    assert [share for _, share in picture.facts["following"]] == pytest.approx(shares, abs=2e-4)


@pytest.mark.parametrize("head", ["decoder.1.2", ("decoder", 1, 2)])
def test_heads_are_called_as_the_steps_call_them(pair, head):
    ours, _ = pair
    named = saccade.diagram("decoder-step", model=ours, text=SOURCE, target=TARGET, head=head)
    plain = saccade.diagram("decoder-step", model=ours, text=SOURCE, target=TARGET, head=(1, 2))
    assert named.svg == plain.svg and named.facts["head"] == 2


def test_what_grows_and_what_stays_is_told(pair):
    ours, _ = pair
    picture = saccade.diagram("decoder-step", model=ours, text=SOURCE, target=TARGET)
    said = texts(root(picture))
    assert {"K cache", "V cache", "K of the source", "V of the source", "a second query", "Encoder"} <= set(said)
    assert sum(text.startswith("Cross-attention: the cache of the source stays") for text in said) == 1
    count, sources = len(picture.facts["labels"]), len(picture.facts["source"])
    assert f"{count} rows" in group(picture, "K cache").findtext("{*}title")
    assert group(picture, "K of the source").findtext("{*}title").startswith(f"K of the source, {sources} rows")
    assert "made once" in picture.description and "A token adds" in picture.description


@pytest.mark.slow
def test_without_a_target_it_is_what_the_model_writes_first(pair):
    ours, _ = pair
    tokenizer = ours.tokenizer
    source = torch.tensor([[*tokenizer.before, *tokenizer.encode(SOURCE).ids, *tokenizer.after]])
    written = ours.generate(source).texts()[0][0]
    picture = saccade.diagram("decoder-step", model=ours, text=SOURCE)
    assert picture.facts["after"][2] == min(5, 1 + len(written))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(target="Nobody knows " * 9), "target: expected at most 12 tokens"),
        (dict(head="cross.1.2"), "head: expected .*got 'cross.1.2'"),
        (dict(head="decoder.7.0"), "head: decoder.7.0 does not exist"),
        (dict(head="7.0"), "head: decoder.7.0 does not exist; the decoder has the layers 0 to"),
        (dict(text="the cat sat on the mat " * 3), "for this model a picture holds"),
        (dict(kind="attention", target="a"), "target: not for attention"),
    ],
)
def test_what_does_not_fit_is_said(pair, given, said):
    ours, _ = pair
    with pytest.raises(ValueError, match=said):
        saccade.diagram(**{"kind": "decoder-step", "model": ours, "text": SOURCE, **given})
    with pytest.raises(ValueError, match="head: decoder.0.1 is of an encoder-decoder; "):
        saccade.diagram("decoder-step", head="decoder.0.1")
    with pytest.raises(ValueError, match="target: .* has no target; only an encoder-decoder has one"):
        saccade.diagram("decoder-step", target="a b")


def test_a_model_without_a_head_decodes_nothing(tmp_path):
    checkpoints.t5(tmp_path / "t5")
    with pytest.raises(ValueError, match="has no head that gives next tokens"):
        saccade.diagram("decoder-step", model=load(tmp_path / "t5", head=None), text=SOURCE)
