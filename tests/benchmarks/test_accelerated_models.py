"""The benchmark of accelerated models checks what it times, and says what share attention has."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade.acceleration import _rules

transformers = pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accelerated_models.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("accelerated_models_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)

    def tiny(setting):
        config = transformers.BertConfig(
            vocab_size=1000,
            hidden_size=24,
            num_hidden_layers=setting.layers,
            num_attention_heads=4,
            intermediate_size=40,
            max_position_embeddings=setting.length,
            attn_implementation="sdpa",
        )
        return transformers.BertModel(config, add_pooling_layer=False)

    monkeypatch.setitem(module.MODELS, "BERT", tiny)
    monkeypatch.setattr(_rules, "small", lambda call: None)
    return module


@pytest.fixture
def arguments(tmp_path):
    threads = str(torch.get_num_threads())
    return [
        "--quick",
        "--rounds",
        "2",
        "--models",
        "BERT",
        "--lengths",
        "19",
        "--threads",
        threads,
        "--out",
        str(tmp_path / "page.md"),
    ]


@pytest.mark.slow
def test_a_row_for_each_setting(script, arguments, tmp_path, capsys):
    script.main(arguments)
    written = (tmp_path / "page.md").read_text()
    assert capsys.readouterr().out.strip() == written.strip()
    rows = [line.split(" | ") for line in written.splitlines() if line.startswith("| BERT")]
    assert [(row[1], row[5]) for row in rows] == [
        (dtype, stage) for dtype in ("float32", "bf16") for stage in ("forward", "forward, padded", "training")
    ]
    found = json.loads((tmp_path / "page.json").read_text())["settings"]
    assert len(found) == 6
    for one in found:
        assert (one["taken"], one["calls"], one["layers"]) == (1, 1, 1)
        assert 0 < one["share"] < 1
        ratios = sorted(a / b for a, b in zip(one["plain"], one["accelerated"], strict=True))
        assert len(ratios) == 2 and one["factor"] == pytest.approx(sum(ratios) / 2)


def test_a_wrong_answer_is_not_timed(script, arguments, monkeypatch, tmp_path):
    class Wrong(saccade.Acceleration):
        def __enter__(self):
            self.before = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = lambda q, k, v, **_: self.before(q, k, v) + 0.1
            return self

        def __exit__(self, *error):
            F.scaled_dot_product_attention = self.before

    monkeypatch.setattr(saccade, "accelerate", Wrong)
    with pytest.raises(AssertionError, match="rounding explains"):
        script.main(arguments)
    assert not (tmp_path / "page.md").exists()


def test_cpu_time_is_of_one_thread(script, arguments, capsys):
    with pytest.raises(SystemExit):
        script.main([*arguments, "--threads", "2", "--cpu-time"])
    assert "--threads 1" in capsys.readouterr().err
