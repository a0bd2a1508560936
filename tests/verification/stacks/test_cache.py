"""Decoding by functions of the user: what they return, and in which pieces they read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stacks.dense import HEADS, VOCABULARY, WIDTH, Dense
from stacks.reports.model import Cache, Model, decoding

import saccade


def cache(report):
    [outcome] = [outcome for outcome in report.outcomes if outcome.name == "cache"]
    return outcome.status


@pytest.mark.parametrize("shape", ["(V,)", "(1, V)", "(1, L, V)"])
def test_logits_may_have_more_axes(shape):
    model = Dense()

    def decode(tokens, state):
        logits = model(torch.tensor([tokens]))
        return {"(V,)": logits[0, -1], "(1, V)": logits[:, -1], "(1, L, V)": logits}[shape], True

    report = saccade.verify_stack(model, decode=decode)
    assert report.ok, report
    assert cache(report) == "passed"


class Outside:
    """`Dense` in numpy and float32, with weights as they were when it was made."""

    def __init__(self, model):
        self.weights = {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}

    def __call__(self, tokens, state):
        w = self.weights
        x = w["embed.weight"][tokens] + w["places.weight"][: len(tokens)]
        q, k, v = np.split(x @ w["qkv.weight"].T + w["qkv.bias"], 3, -1)
        q, k, v = (part.reshape(len(tokens), HEADS, -1).transpose(1, 0, 2) for part in (q, k, v))
        scores = q[:, -1:] @ k.transpose(0, 2, 1) / np.float32((WIDTH // HEADS) ** 0.5)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (weights / weights.sum(-1, keepdims=True) @ v)[:, 0].reshape(-1)
        out = x[-1] + mixed @ w["out.weight"].T + w["out.bias"]
        return out @ w["head.weight"].T + w["head.bias"], None


def test_decoding_outside_pytorch_has_its_own_dtype():
    """Fails where float32 is held to the bound of float64: one logit is off by a few units of float32."""
    model = Dense()
    outside = Outside(model)

    def decode(tokens, state):
        logits, state = outside(tokens, state)
        assert logits.dtype == np.float32
        assert logits.shape == (VOCABULARY,)
        return logits * np.float32(1 + 2e-5), state

    report = saccade.verify_stack(model, decode=decode)
    assert report.ok, report
    assert cache(report) == "passed"


class WholeChunks(Model):
    """With a cache, the tokens of one call see each other whole: seen only where several follow a prompt."""

    def reach(self, call, count):
        pairs = super().reach(call, count)
        return torch.ones_like(pairs) if call.past else pairs


@pytest.mark.slow
def test_a_prompt_in_pieces():
    """Fails where after the prompt tokens come one by one only."""
    report = saccade.verify_stack(WholeChunks(layers=2), causal=True, decode=decoding(WholeChunks(layers=2)))
    [finding] = report.findings
    assert finding.probe == "cache"
    assert "a prompt of 3, then 1 token, then all others in one call" in finding.message
    assert saccade.verify_stack(Model(), causal=True, decode=decoding(Model())).ok


def test_a_function_that_reads_one_token_at_a_time_is_not_given_more():
    model = Model()

    def decode(tokens, state):
        new = tokens[-1:] if state is not None else tokens
        state = Cache() if state is None else state
        logits = model(torch.tensor([new]), cache=state)[0, -1]
        state.length += len(new)
        return logits, state

    report = saccade.verify_stack(model, causal=True, decode=decode)
    assert report.ok, report


class Newest(Cache):
    def kept(self, states):
        return states[:, :, -32:]


def test_a_cache_that_forgets_what_no_window_says():
    """Fails where only short documents are decoded: the cache holds 32 keys."""
    model = Model()
    [finding] = saccade.verify_stack(model, causal=True, decode=decoding(model, Newest)).findings
    assert finding.probe == "cache"
    assert len(finding.example[0]) <= 35
