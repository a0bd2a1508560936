"""Checkpoints that Saccade opens itself, looked at: against the weights that transformers gives out."""

from __future__ import annotations

import json
import subprocess
import sys

import checkpoints
import numpy as np
import pytest
import safetensors.torch
import test_transformers
from test_transformers import TEXT, dense, on_words

from saccade.inspection import collect, look, open_model
from saccade.inspection._published import PublishedModel

FAMILIES = ("bert", "roberta", "gpt2", "llama", "t5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = getattr(checkpoints, name)(tmp_path_factory.mktemp("models") / name)
        return made[name]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_words_and_weights_are_those_of_transformers(folder, name):
    model = open_model(folder(name))
    assert isinstance(model, PublishedModel)
    seen = collect(model, TEXT)
    expected = on_words(*dense(folder(name), TEXT), seen.words)
    assert seen.weights.shape == expected.shape
    assert np.abs(seen.weights - expected).max() < 300 * 2**-22  # as in test_transformers
    assert seen.causal == (not np.triu(expected, 1).any()) == (name in ("gpt2", "llama"))


for shared in (
    "test_what_stands_around_a_text_and_how_long_it_may_be",
    "test_special_tokens_spelled_in_a_text_are_themselves",
    "test_an_unknown_word_is_a_word",
):
    globals()[shared] = getattr(test_transformers, shared)  # the same, with this file's models


@pytest.mark.slow
def test_a_look_needs_no_transformers(folder, tmp_path):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from saccade.inspection import collect, open_model\n"
        f"print(collect(open_model({str(folder('bert'))!r}), 'The cat sat on the mat.').weights.shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(2, 3,")


def test_weights_that_are_not_finite_are_told(folder, tmp_path):
    copy = checkpoints.gpt2(tmp_path / "gpt2")
    tensors = safetensors.torch.load_file(copy / "model.safetensors")
    name = next(name for name in tensors if name.endswith("wte.weight"))
    tensors[name][0, 0] = float("nan")
    safetensors.torch.save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="damaged, tokens.weight holds weights that are not finite"):
        open_model(copy)


def test_code_of_the_hub_is_refused(folder, tmp_path):
    copy = checkpoints.bert(tmp_path / "bert")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "_attn_implementation": "org/kernel"}))
    with pytest.raises(ValueError, match="'org/kernel' is code on the hub, never run"):
        look(open_model(copy), "The cat sat.")
