"""Encoders of text do their own task from a folder alone, in a process without transformers."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from published import transformers, written, written_words

TEXTS = ["The cat sat on the mat.", "dogs", "the mat, and the dog on it"]
TASK = """
import sys
sys.modules["transformers"] = None
import numpy, torch
from saccade import models
model = models.load(sys.argv[1])
texts = ["The cat sat on the mat.", "dogs", "the mat, and the dog on it"]
batch = model.tokenizer(texts)
with torch.no_grad():
    out = model(**batch)
found = {"logits": out.logits} if out.logits is not None else {"start_logits": out.start_logits}
model.save(sys.argv[2])
vectors = models.embed(texts, sys.argv[2])
numpy.savez(sys.argv[3], ids=batch["input_ids"], vectors=vectors, **found)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("BertForTokenClassification", {"num_labels": 5}),
        ("RobertaForSequenceClassification", {"type_vocab_size": 1, "pad_token_id": 0}),
        ("DistilBertForQuestionAnswering", {}),
        ("ElectraForPreTraining", {"embedding_size": 11}),
    ],
)
def test_a_task_without_transformers(tmp_path, name, sizes):
    kind = name.partition("For")[0]
    common = dict(vocab_size=97, hidden_size=14, num_hidden_layers=1, num_attention_heads=7, intermediate_size=13)
    if kind == "DistilBert":
        common = dict(vocab_size=97, dim=14, n_layers=1, n_heads=7, hidden_dim=13)
    written_words(tmp_path, TEXTS)
    written(tmp_path, name, getattr(transformers(), f"{kind}Config")(**common, **sizes))
    command = [sys.executable, "-c", TASK, str(tmp_path), str(tmp_path / "saved"), str(tmp_path / "found.npz")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    found = np.load(tmp_path / "found.npz")
    theirs = getattr(transformers(), name).from_pretrained(tmp_path / "saved").eval()
    ids = torch.from_numpy(found["ids"])
    real = ids != 0
    with torch.no_grad():
        expected = theirs(ids, attention_mask=real.long(), output_hidden_states=True)
    states = expected.hidden_states[-1] * real[..., None]
    np.testing.assert_allclose(found["vectors"], states.sum(1) / real.sum(1, keepdim=True), atol=1e-5)
    field = "start_logits" if kind == "DistilBert" else "logits"
    logits, got = getattr(expected, field), torch.from_numpy(found[field])
    if logits.shape[:2] == real.shape:
        logits, got = logits[real], got[real]
    assert torch.allclose(logits, got, atol=1e-5)
