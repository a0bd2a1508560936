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
import torch
from test_transformers import TEXT, dense, on_words

from saccade.inspection import as_text_model, collect, look, open_model
from saccade.inspection._published import PublishedModel
from saccade.models import load

FAMILIES = ("bert", "roberta", "gpt2", "llama", "t5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = getattr(checkpoints, name)(tmp_path_factory.mktemp("models") / name)
        return made[name]

    return get


@pytest.mark.slow
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
    with pytest.raises(ValueError, match="damaged, tokens.weight holds weights that are not finite numbers"):
        open_model(copy)


def test_code_of_the_hub_is_refused(folder, tmp_path):
    copy = checkpoints.bert(tmp_path / "bert")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "_attn_implementation": "org/kernel"}))
    with pytest.raises(ValueError, match="'org/kernel' is code on the hub, never run"):
        look(open_model(copy), "The cat sat.")


def test_rotary_positions_go_on_beyond_the_context_and_learned_ones_end(folder, tmp_path):
    short = checkpoints.llama(tmp_path / "short", context=13)
    config = json.loads((short / "config.json").read_text())
    queries = []
    for context in (13, 200):
        (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
        model = open_model(short)
        assert model.context == context
        longer = model.with_context(200)
        assert longer.context == 200 and model.context == context
        longer.run_calls(longer.whole(range(5, 84)), lambda layer, call: queries.append(call.query))
    half = len(queries) // 2
    assert half == model.layers and all(map(torch.equal, queries[:half], queries[half:]))
    for name in ("bert", "gpt2"):
        model = open_model(folder(name))
        with pytest.raises(ValueError, match=f"learned {model.positions} positions, and 9,999 tokens need as many"):
            model.with_context(9999)


@pytest.mark.parametrize("context", [0, 1, 2, -1, True, 2.5, "9", None])
def test_a_context_holds_one_token_beside_the_special_ones(folder, context):
    model = open_model(folder("bert"))
    with pytest.raises(ValueError, match=r"^context: expected a whole number of tokens, at least 3: .* got "):
        model.with_context(context)
    with pytest.raises(ValueError, match=r"this model reads 1 tokens at once, which holds the first 1 of them"):
        collect(model.with_context(3), "the cat sat")


def test_files_that_leave_no_room_for_a_text_are_told(folder):
    model = open_model(folder("bert"))
    model.context = 1
    with pytest.raises(ValueError, match=r"this model reads 0 tokens at once, which holds the first 0 of them"):
        collect(model, "the cat sat")


def test_a_model_of_ones_own_reads_beyond_its_context_too():
    model = as_text_model(load())
    longer = model.with_context(500)
    seen = []
    longer.run_calls(longer.whole(range(5, 400)), lambda layer, call: seen.append((layer, call.query.shape[2])))
    assert seen == [(layer, 396) for layer in range(model.layers)]
    with pytest.raises(ValueError, match="396 are more than the model's context of 256"):
        model.run(model.whole(range(5, 400)), lambda layer, call: None)


def test_run_calls_ends_with_the_last_call(folder):
    model = open_model(folder("llama"))
    rows = []
    model.module.register_forward_hook(lambda *given: rows.append(given))
    model.run_calls(model.whole([5, 6, 7]), lambda layer, call: None)
    assert not rows
    model.run(model.whole([5, 6, 7]), lambda layer, call: None)
    assert rows
