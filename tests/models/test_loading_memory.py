"""Opening a checkpoint takes little more memory than its weights."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from saccade.models.checkpoints.reading import SAFE

WIDTH, HIDDEN, LAYERS, VOCABULARY = 1536, 6144, 4, 23_000
SIZES = dict(hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, vocab_size=VOCABULARY)
PEAK = """
import re, sys, pathlib
from saccade import models

def memory(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])

models.load(sys.argv[1])
before = memory("VmRSS")
model = models.load(sys.argv[2])
print(memory("VmHWM") - before, sum(t.numel() * t.element_size() for t in model.state_dict().values()))
"""


def bert(folder, pickled, **changes):
    """A BERT of zeros, as large as its settings say."""
    values = dict(model_type="bert", architectures=["BertModel"], num_attention_heads=12, **{**SIZES, **changes})
    width, hidden, vocabulary = values["hidden_size"], values["intermediate_size"], values["vocab_size"]
    vectors = {"word": vocabulary, "position": 512, "token_type": 2}
    tensors = {f"embeddings.{name}_embeddings.weight": torch.zeros(rows, width) for name, rows in vectors.items()}
    shapes = {"embeddings.LayerNorm": (width,)}
    for n in range(values["num_hidden_layers"]):
        layer = f"encoder.layer.{n}"
        shapes |= {f"{layer}.attention.self.{name}": (width, width) for name in ("query", "key", "value")}
        shapes |= {f"{layer}.attention.output.dense": (width, width), f"{layer}.intermediate.dense": (hidden, width)}
        shapes |= {f"{layer}.output.dense": (width, hidden)}
        shapes |= {f"{layer}.{part}.LayerNorm": (width,) for part in ("attention.output", "output")}
    for name, shape in shapes.items():
        tensors |= {f"{name}.weight": torch.zeros(shape), f"{name}.bias": torch.zeros(shape[0])}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        safetensors.torch.save_file(tensors, folder / SAFE)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' account of the peak")
@pytest.mark.parametrize("changes", [{}, {"vocab_size": 80_000, "num_hidden_layers": 1}], ids=["many", "one large"])
@pytest.mark.parametrize("pickled", [False, True])
def test_the_peak_is_at_most_a_tenth_above_the_weights(tmp_path, pickled, changes):
    bert(tmp_path / "small", pickled, hidden_size=24, intermediate_size=24, vocab_size=24)
    bert(tmp_path / "large", pickled, **changes)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, weights = map(int, done.stdout.split())
    assert weights > 5.5e8
    assert peak < 1.1 * weights, f"{peak / weights:.2f} times the weights"
