"""What opening through transformers' class costs against a family of Saccade's own: `python benchmarks/door.py`.

BERT, Llama and ViT with random weights (110, 110 and 86 million numbers) are opened both ways, each in a process of its
own: seconds and peak memory of loading, seconds of a padded batch or of decoding. The two processes
take turns. Numbers are medians; the last column is the ratio of the door to the family.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WAYS = ("family", "door")
PROMPT, NEW, TEXTS = 64, 32, 16


def save(kind: str, folder: Path) -> None:
    import transformers

    torch.manual_seed(0)
    base = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
    model: Any
    if kind == "bert":
        model = transformers.BertModel(transformers.BertConfig(**base))
    elif kind == "llama":
        sizes = base | {"vocab_size": 16_000, "intermediate_size": 2048}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        model = transformers.ViTModel(transformers.ViTConfig(**base))
    model.save_pretrained(folder)


def works(kind: str, model: Any) -> dict[str, Callable[[], Any]]:
    """The timed functions by name."""
    generator = torch.Generator().manual_seed(1)
    if kind == "vit":
        images = torch.randn(4, 3, 224, 224, generator=generator)
        return {"encode 4 images": lambda: model(images).last_hidden_state}
    ids = torch.randint(3, 16_000, (TEXTS, 128), generator=generator)
    lengths = torch.randint(16, 129, (TEXTS, 1), generator=generator)
    mask = (torch.arange(128) < lengths).long()
    if kind == "bert":
        return {"encode a padded batch": lambda: model(ids, mask).last_hidden_state}
    return {
        "prompt of 16 texts": lambda: model(ids, mask).logits,
        "decode 32 tokens, 1 text": lambda: model.generate(ids[:1, :PROMPT], max_new_tokens=NEW),
        "decode 32 tokens, 16 texts": lambda: model.generate(ids[:, :PROMPT], max_new_tokens=NEW),
    }


def measure(kind: str, way: str, folder: Path) -> dict[str, float]:
    from saccade import models
    from saccade.models.transformers_loading import open_with_transformers

    if way == "door":  # importing it is not a model's cost
        import transformers.models.auto.modeling_auto

        for name in ("BertModel", "LlamaForCausalLM", "ViTModel"):
            getattr(transformers, name)

    before, began = _peak(), time.perf_counter()
    model: Any = models.load(folder) if way == "family" else open_with_transformers(folder)
    found = {"load, s": time.perf_counter() - began, "load, peak MB above before": _peak() - before}
    with torch.inference_mode():
        for name, work in works(kind, model).items():
            work()
            began = time.perf_counter()
            work()
            found[f"{name}, s"] = time.perf_counter() - began
    return found | {"all, peak MB": _peak()}


def _peak() -> float:
    """Peak memory of this process in MB. `getrusage` would count the memory of the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", default=["bert", "llama", "vit"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one[0], given.one[1], Path(given.one[2]))))
        return
    print("| model | what | family | door | ratio |\n|---|---|---|---|---|")
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as folder:
            save(kind, Path(folder))
            rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for number in range(given.rounds):
                for way in WAYS if number % 2 else WAYS[::-1]:
                    command = [sys.executable, __file__, "--one", kind, way, folder]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    rounds[way].append(json.loads(done.stdout.splitlines()[-1]))
            for what in rounds["family"][0]:
                mine, theirs = (statistics.median(found[what] for found in rounds[way]) for way in WAYS)
                print(f"| {kind} | {what} | {mine:.3g} | {theirs:.3g} | {theirs / max(mine, 1e-9):.2f} |", flush=True)


if __name__ == "__main__":
    main()
