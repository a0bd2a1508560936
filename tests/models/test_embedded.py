"""The model inside the package: whole, small, and able to do what the documentation shows it doing."""

from __future__ import annotations

import pytest
import safetensors
import torch
import torch.nn.functional as F

from saccade.models import Sampling, generate, load
from saccade.models.decoder_lm.checkpoint import EMBEDDED

# Written for this test, so no model has seen it.
PARAGRAPH = (
    'The old man put down his cup and looked at the fire for a long time. "I do not know," he said at last, "what '
    'became of her. She went down to the harbour in the morning, and nobody in the village saw her again."'
)


@pytest.fixture(scope="module")
def lm():
    return load()


def test_files():
    assert {path.name for path in EMBEDDED.iterdir()} == {
        "README.md",
        "config.json",
        "heads.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) < 12e6
    with safetensors.safe_open(EMBEDDED / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_size(lm):
    assert 3e6 <= lm.model.parameter_count() <= 6e6
    assert f"{lm.model.parameter_count():,}" in (EMBEDDED / "README.md").read_text()


def test_predicts_english(lm):
    """Far better than knowing how frequent each token is (about 6.5 nats)."""
    ids = torch.tensor([[lm.tokenizer.start, *lm.tokenizer.encode(PARAGRAPH).ids]])
    assert F.cross_entropy(lm.model(ids)[0, :-1], ids[0, 1:]).item() < 4.2


def test_copies_what_followed_last_time(lm):
    torch.manual_seed(1)
    once = torch.randint(1, lm.tokenizer.vocabulary, (5, 40))
    ids = torch.cat((torch.full((5, 1), lm.tokenizer.start), once, once), dim=1)
    losses = F.cross_entropy(lm.model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    assert losses[:, 41:].mean() < losses[:, 1:40].mean() - 2


def test_every_head_has_been_measured(lm):
    config = lm.model.config
    heads = lm.heads["heads"]
    assert [(head["layer"], head["head"]) for head in heads] == [
        (layer, head) for layer in range(config.layers) for head in range(config.heads)
    ]
    assert {"previous", "repeat"} <= {head["role"] for head in heads}


@pytest.mark.slow
def test_writes(lm):
    text = "".join(generate(lm, "It was a dark night and", 40, Sampling(temperature=0.0)))
    assert len(text.split()) > 15
    assert "\ufffd" not in text


def test_opening_it_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    load()
    assert torch.equal(torch.get_rng_state(), before)
