"""Whole models against other libraries: `python benchmarks/models.py --minilm FOLDER`.

All contenders of a row run in one process and take turns, with a pause between them so that no library's threads still
wait for work when the next one begins; times are medians, factors medians of the rounds' ratios to transformers. Every
row checks the outputs first. A contender that is not installed is left out and named.

A row also says where Saccade's time goes: in matrix products, in attention, in the rest. Shares are of what the machine
can do, measured in every round beside the contenders: multiply-adds for encoders (the arithmetic of real tokens over
time), reading of memory for steps of decoding at batch 1 (the bytes of the weights over time).

The rows stand in `model_rows.py`, the other libraries in `model_peers.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import model_peers as peers
import torch
from model_rows import (
    Row,
    batch_of,
    bert,
    corpus,
    encoding,
    encoding_int8,
    generating,
    gpt2,
    llama,
    searching,
    sentences,
    spread,
    told,
    training,
    vit,
)
from rich.progress import Progress

import saccade
from saccade.benchmark.attention import machine, sets

OUT = Path(__file__).parent / "results" / "models.md"
PAUSE = 0.1  # seconds, in which waiting threads fall asleep


class Parts:
    """Seconds inside products by weights and inside attention calls of one run."""

    def __init__(self) -> None:
        self.products = self.attention = 0.0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        from saccade.nn import attention as module
        from saccade.operator._products import Product

        multiply, attend = Product.__call__, module.attention

        def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*given: Any, **named: Any) -> Any:
                began = time.perf_counter()
                out = function(*given, **named)
                setattr(self, name, getattr(self, name) + time.perf_counter() - began)
                return out

            return run

        Product.__call__ = timed("products", multiply)  # type: ignore[method-assign]
        module.attention = timed("attention", attend)  # type: ignore[assignment]
        try:
            yield
        finally:
            Product.__call__, module.attention = multiply, attend  # type: ignore[method-assign, assignment]


# --- measuring ----------------------------------------------------------------------------------------------------


def measure(row: Row, rounds: int, threads: int) -> dict[str, Any]:
    if row.check is not None:
        row.check(row.contenders)
    whole: dict[str, list[float]] = {name: [] for name in row.contenders}
    seconds: dict[str, list[float]] = {name: [] for name in row.contenders}
    names = list(row.contenders)
    peak, bandwidth = sets.peak(row.dtype, threads, 20.0), sets.reading((torch.ones(2**26),), threads)
    limit: list[float] = []
    for number in range(-1, rounds):  # the first one warms up
        for name in names if number % 2 else reversed(names):
            begun = 0.0 if row.begun is None else _timed(row.begun[name])
            took = _timed(row.contenders[name])
            if number >= 0:
                whole[name].append(took)
                seconds[name].append(took - begun)
        if number >= 0 and peak is not None and bandwidth is not None:
            limit.append(bandwidth() if row.read else peak())
    parts = Parts()  # of the forward pass; of a training step the rest is "elsewhere"
    before = Parts()
    own = next(iter(row.contenders))
    with before.counted():
        begun = 0.0 if row.begun is None else _timed(row.begun[own])
    with parts.counted():
        took = _timed(row.contenders[own]) - begun
    parts.products -= before.products
    parts.attention -= before.attention
    return {
        "row": row.name,
        "unit": row.unit,
        "amount": row.amount,
        "seconds": seconds,
        "whole": None if row.begun is None else whole,
        "shares": [parts.products / took, parts.attention / took],
        "work": row.read or row.products + row.attention,
        "limit": limit,
        "notes": row.notes,
    }


def _timed(run: peers.Run) -> float:
    time.sleep(PAUSE)
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def lines(row: dict[str, Any]) -> list[str]:
    whole, shared = row["whole"], row["work"] and row["limit"]
    of = "bandwidth" if whole is not None else "peak"
    made = [f"## {row['row']}", "", f"| | {row['unit']}/s | ms | against transformers |", "|---|---|---|---|"]
    if shared:
        made[2:] = [made[2] + f" of {of} |", made[3] + "---|"]
    if whole is not None:
        made[2:] = [made[2] + " prompt and all, s | against transformers |", made[3] + "---|---|"]
    for name, seconds in row["seconds"].items():
        median = statistics.median(seconds)
        line = f"| {name} | {row['amount'] / median:,.1f} | {1e3 * median:,.1f} | {_factor(row['seconds'], name)} |"
        if shared:
            half = 0.5 if "bfloat16" in name else 1.0
            shares = [half * row["work"] / s / limit for s, limit in zip(seconds, row["limit"], strict=True)]
            line += f" {statistics.median(shares):.0%} |"
        if whole is not None:
            line += f" {statistics.median(whole[name]):,.2f} | {_factor(whole, name)} |"
        made.append(line)
    products, attention = row["shares"]
    if row["notes"]:
        made += ["", f"Cosine of the texts' mean vectors to float32, mean and worst. {'; '.join(row['notes'])}.", ""]
        return made
    made += [
        "",
        f"Saccade's time: {products:.0%} in matrix products, {attention:.0%} in attention, "
        f"{1 - products - attention:.0%} elsewhere.",
        "",
    ]
    return made


def _factor(seconds: dict[str, list[float]], name: str) -> str:
    """How many times as fast as transformers, the median of rounds."""
    pairs = zip(seconds["transformers sdpa"], seconds[name], strict=True)
    return f"{statistics.median(base / own for base, own in pairs):.2f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path, help="folder of all-MiniLM-L6-v2; without it those rows are left out")
    parser.add_argument("--novels", type=Path, help="folder of texts, for sentences")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12, help="of BERT-base")
    parser.add_argument("--llama-layers", type=int, default=16, help="of the Llama, 1 GiB for 4 in each contender")
    parser.add_argument("--rows", nargs="+", help="only rows whose names hold one of these words")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    seen, found = machine.describe(saccade.__version__, options.threads), []
    with tempfile.TemporaryDirectory() as folder, Progress(transient=True) as progress:
        makers = rows(options, Path(folder))
        chosen = {n: m for n, m in makers.items() if not options.rows or any(word in n for word in options.rows)}
        for name, make in progress.track(list(chosen.items()), description="rows"):
            with told(name):
                row = make()
                with row.held:
                    found.append(measure(row, options.rounds, options.threads))
                print("\n".join(lines(found[-1])), flush=True)
    versions = {}
    for package in ("transformers", "sentence-transformers", "ctranslate2", "onnxruntime", "openvino"):
        with contextlib.suppress(Exception):
            versions[package] = peers.version(package)
    options.out.with_suffix(".json").write_text(
        json.dumps({"machine": seen, "versions": versions, "rows": found}, indent=1)
    )
    options.out.write_text(page(seen, versions, found, options.rounds))


def page(run: dict[str, Any], versions: dict[str, str], rows: list[Any], rounds: int) -> str:
    head = [
        "# Whole models",
        "",
        "    python benchmarks/models.py",
        "",
        f"{run['processor']}, {run['threads']} thread(s), PyTorch {run['torch']}, Saccade {run['saccade']}, "
        f"{', '.join(f'{name} {number}' for name, number in versions.items())}; {run['date']}. float32. Medians of "
        f"{rounds} rounds in turns; factors are medians of the ratios. Shares of peak count the multiply-adds of real "
        "tokens, shares of bandwidth the bytes of the weights; both limits are measured in every round.",
        "",
    ]
    return "\n".join(head + [line for one in rows for line in lines(one)])


def rows(options: argparse.Namespace, work: Path) -> dict[str, Callable[[], Row]]:
    """All rows by name, each made when its turn comes."""
    made: dict[str, Callable[[], Row]] = {}

    def of_bert(name: str, lengths: list[int], longest: int, dtype: torch.dtype = torch.float32) -> None:
        made[name] = lambda: encoding(
            name,
            bert(work, options.layers, longest),
            [batch_of(lengths)],
            work / f"peers-{longest}",
            options.threads,
            dtype,
        )

    def of_vit(name: str, dtype: torch.dtype = torch.float32) -> None:
        images = {"pixel_values": torch.randn(8, 3, 224, 224)}
        made[name] = lambda: encoding(
            name, vit(work, options.layers), [images], work / "peers-vit", options.threads, dtype
        )

    if options.minilm:
        mixed = [batch_of(spread(32), 20000) for _ in range(4)]
        made["MiniLM, 128 texts of 16 to 128 tokens"] = lambda: encoding(
            "MiniLM, 128 texts of 16 to 128 tokens", options.minilm, mixed, work / "peers-minilm", options.threads
        )
    if options.minilm and options.novels:
        made["MiniLM, sentences of a novel"] = lambda: encoding(
            "MiniLM, 256 sentences of a novel in batches of 32",
            options.minilm,
            tokenized(options.minilm, sentences(options.novels, 256)),
            work / "peers-minilm",
            options.threads,
        )
        made["MiniLM in int8, sentences of a novel"] = lambda: encoding_int8(
            "MiniLM in int8, 256 sentences of a novel, sorted by length, in batches of 32",
            options.minilm,
            tokenized(options.minilm, sorted(sentences(options.novels, 256), key=len)),
            work / "peers-minilm-int8",
            options.threads,
        )
        made["embedding"] = lambda: corpus(options.minilm, sentences(options.novels, 1000))
    of_bert("BERT-base, 16 texts of 16 to 128 tokens", spread(16), 512)
    of_bert("BERT-base, 8 x 128", [128] * 8, 512)
    of_bert("BERT-base, 4 x 512", [512] * 4, 512)
    of_bert("BERT-base, 1 x 2048", [2048], 2048)
    of_bert("BERT-base in bfloat16, 16 texts of 16 to 128 tokens", spread(16), 512, torch.bfloat16)
    of_bert("BERT-base in bfloat16, 8 x 128", [128] * 8, 512, torch.bfloat16)
    for name, lengths in (("16 texts of 16 to 128 tokens", spread(16)), ("8 x 128", [128] * 8)):
        made[f"BERT-base in int8, {name}"] = lambda name=name, lengths=lengths: encoding_int8(
            f"BERT-base in int8, {name}",
            bert(work, options.layers, 512),
            [batch_of(lengths)],
            work / "peers-int8-512",
            options.threads,
        )
    of_vit("ViT-base, 8 images of 224 x 224")
    of_vit("ViT-base in bfloat16, 8 images of 224 x 224", torch.bfloat16)
    made["training"] = lambda: training(work, options.layers)

    def of_gpt2(name: str, lengths: list[int], longest: int, new: int, layers: int = 12) -> None:
        folder = work / "generation"
        made[name] = lambda: generating(name, gpt2(work, longest, layers), lengths, new, folder, options.threads)

    of_gpt2("generation, GPT-2, 1 prompt of 128", [128], 1024, 64)
    of_gpt2("generation, GPT-2, 8 prompts of 16 to 128", spread(8), 1024, 64)
    of_gpt2("generation, GPT-2, 1 prompt of 4096", [4096], 4224, 48)
    name = f"generation, GPT-2, {options.layers} layers, 8 prompts of 512 to 4096"
    of_gpt2(name, spread(8, 512, 4096), 4224, 32, options.layers)
    for lengths in ([128], spread(8)):
        name = f"generation, Llama 1B's shape, {options.llama_layers} layers, {len(lengths)} of at most 128"
        made[name] = lambda name=name, lengths=lengths: generating(
            name, llama(work, options.llama_layers), lengths, 16, work / "generation-llama", options.threads
        )
    made["beam search"] = lambda: searching(work, 48, options.threads)
    return made


def tokenized(folder: Path, texts: list[str]) -> list[peers.Batch]:
    tokenizer = peers.quiet_transformers().AutoTokenizer.from_pretrained(folder)
    return [
        {**tokenizer(texts[n : n + 32], padding=True, truncation=True, max_length=256, return_tensors="pt")}
        for n in range(0, len(texts), 32)
    ]


if __name__ == "__main__":
    main()
