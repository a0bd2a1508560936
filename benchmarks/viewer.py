"""How long the viewer takes to show a long text: first picture, every further tile, memory, exactness, frames.

    python benchmarks/viewer.py --novels FOLDER [--lengths 512 2048 5450 60000 100000] [--out FILE]

A causal model of 4 layers x 8 heads (the embedded one, its context raised: its rotary positions go on) reads the first
tokens of a novel. Then a client asks over HTTP, as the page does: for the overview and the head that is shown first
("first picture"), for its exact tile, and for tiles along a walk through every zoom. Each length has a process of its
own; memory is what it holds more than before reading, without queries and keys. Numbers are compared with
`attention_weights` in float64. With Chromium and playwright the page itself is panned, every address but its own
blocked, and the frames are counted.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch

import saccade
from saccade.inspection import as_text_model
from saccade.models import load
from saccade.viewer import maps

OUT = Path(__file__).parent / "results" / "viewer.md"
LENGTHS = (512, 2048, 5450, 60_000, 100_000)
WALK = 300  # tiles of a walk
CHECKED = 24  # tiles and rows that are compared
COUNT_FRAMES = """() => {
    window.frames_at = [];
    const next = (time) => { window.frames_at.push(time); requestAnimationFrame(next); };
    requestAnimationFrame(next);
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--novels", type=Path, required=True, help="a folder of plain texts")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        print(json.dumps(measured(asked.novels, asked.one)))
        return
    results = []
    for length in asked.lengths:
        command = [sys.executable, __file__, "--novels", str(asked.novels), "--one", str(length)]
        results.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]))
        print(results[-1], file=sys.stderr, flush=True)
    asked.out.write_text(report(results), encoding="utf-8")
    print(f"wrote {asked.out}")


def measured(novels: Path, length: int) -> dict[str, Any]:
    model = as_text_model(load()).with_context(max(256, length))
    text = beginning(novels, length)
    warm = maps.read_text("A short text first.", model)
    warm.overview(0)
    before = resident()
    begun = time.perf_counter()
    read: list[float] = []
    viewer = saccade.view(
        text, model=model, browser=False, block=False, progress=lambda done, total: read.append(time.perf_counter())
    )
    reading = time.perf_counter() - begun
    run = viewer.session.runs[0]
    kept = sum(2 * call.call.query.numel() * 4 for call in run.calls)
    gc.collect()
    reset_peak()
    with viewer:
        client = Client(viewer.url)
        result = {"length": run.sides["text"].tokens, "reading": reading, "kept": kept}
        result |= pictures(client, run)
        result["memory"] = peak() - before - kept
        result |= exactness(run)
        result |= frames(viewer.url)
    return result


def beginning(novels: Path, length: int) -> str:
    """The first words of the novels that make up at most so many tokens."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(novels.glob("*.txt"))[:2])
    spans = load().tokenizer.encode(text[: 8 * length]).spans
    return text[: text.rindex(" ", 0, spans[min(length - 2, len(spans) - 1)][1])]


class Client:
    """The requests of the page, over one connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.headers = {"X-Saccade-Token": parse_qs(parts.query)["token"][0], "Content-Type": "application/json"}
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)

    def ask(self, op: str, **params: Any) -> tuple[dict[str, Any], np.ndarray, float]:
        """(header, first buffer, seconds)."""
        begun = time.perf_counter()
        self.connection.request("POST", f"/api/{op}", json.dumps(params), self.headers)
        body = self.connection.getresponse().read()
        took = time.perf_counter() - begun
        size = int.from_bytes(body[:4], "little")
        header = json.loads(body[4 : 4 + size])
        if "error" in header:
            raise RuntimeError(header["error"])
        at = (4 + size + 7) // 8 * 8
        lengths = header.get("buffers", [])
        return header, np.frombuffer(body, np.float32, lengths[0] // 4 if lengths else 0, at), took


def pictures(client: Client, run: maps.Run) -> dict[str, Any]:
    """Seconds to the first picture and to exact ones, and of every further tile."""
    length = run.sides["text"].tokens
    coarsest = max(0, int(np.ceil(np.log2(length / maps.SIDE))))
    place = {"run": "0", "call": "1", "head": 3, "item": 0, "what": "weights"}
    whole = {**place, "pool": "max", "level": coarsest, "row": 0, "key": 0}
    begun = time.perf_counter()
    client.ask("open")
    client.ask("overview", run="0", item=0)
    client.ask("tile", **whole, exact=False)
    first = time.perf_counter() - begun
    _, _, _ = client.ask("tile", **whole, exact=True)
    exact = time.perf_counter() - begun
    chance, times = random.Random(0), []
    for _ in range(WALK):
        level = chance.randint(0, coarsest)
        most = (length - 1) // (maps.SIDE << level)
        row = chance.randint(0, most)
        key = chance.randint(0, row)
        asked = {**place, "pool": chance.choice(["max", "mean"]), "level": level, "row": row, "key": key}
        times.append(client.ask("tile", **asked, exact=True)[2])
    others = [{**whole, "call": "2", "head": head} for head in range(8)]  # their pyramids fill what may be held
    preview = statistics.median(client.ask("tile", **other, exact=False)[2] for other in others)
    another = statistics.median(client.ask("tile", **other, exact=True)[2] for other in others)
    word = {"run": "0", "call": "1", "head": 3, "item": 0, "tokens": [length // 2]}
    links = [client.ask(op, **word, start=0, stop=min(1000, length), top=20)[2] for op in ("row", "column")]
    return {
        "first": first,
        "exact": exact,
        "median": statistics.median(times),
        "p99": float(np.quantile(times, 0.99)),
        "preview": preview,
        "another": another,
        "row": links[0],
        "column": links[1],
    }


def exactness(run: maps.Run) -> dict[str, Any]:
    """The largest difference of tiles from `attention_weights` in float64: finest ones, and pooled ones row by row."""
    chance, worst = random.Random(1), [0.0, 0.0]
    length = run.sides["text"].tokens
    for _ in range(CHECKED):
        layer, head = chance.choice(["0", "1", "2", "3"]), chance.randrange(8)
        call = run.call(layer).call
        query, key = (x[:, head : head + 1].double() for x in (call.query, call.key))
        start = chance.randrange(0, (length - 1) // 256 + 1) * 256
        rows = range(start, min(length, start + 16))
        weights = saccade.attention_weights(query, key, call.mask, scale=call.scale, rows=rows)[0, 0].numpy()
        at = chance.randrange(0, start // 256 + 1)
        found = run.tile(layer, head, 0, "weights", "max", 0, start // 256, at).values[: len(rows)]
        want = weights[:, at * 256 : at * 256 + found.shape[1]]
        worst[0] = max(worst[0], float(np.abs(np.nan_to_num(found) - want).max()))
        if length > 8:
            level, top = 3, start // 2048
            pooled = run.tile(layer, head, 0, "weights", "mean", level, top, 0).values[(start - top * 2048) // 8][:16]
            seen = np.arange(weights.shape[1])[None] <= np.arange(rows.start, min(rows.start + 8, length))[:, None]
            for n in range(len(pooled)):
                part = np.s_[: len(seen), n * 8 : n * 8 + 8]
                if seen[:, part[1]].any():
                    mean = weights[part][seen[:, part[1]]].mean()
                    worst[1] = max(worst[1], abs(float(pooled[n]) - mean))
    return {"error": worst[0], "pooled error": worst[1]}


def frames(url: str) -> dict[str, Any]:
    """Frames a second while the map is panned, in headless Chromium that reaches nothing but the viewer."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        return {"frames": None}
    own = urlsplit(url).netloc
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.route(lambda address: urlsplit(address).netloc != own, lambda route: route.abort())
        page.goto(url)
        canvas = page.locator(".map canvas").first
        canvas.wait_for(timeout=60_000)
        page.wait_for_timeout(3000)
        box = canvas.bounding_box()
        assert box is not None
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        for _ in range(6):
            page.mouse.wheel(0, -240)
            page.wait_for_timeout(150)
        page.wait_for_timeout(2000)
        page.evaluate(COUNT_FRAMES)
        page.mouse.down()
        for n in range(120):
            page.mouse.move(x - 200 * np.sin(n / 19), y - 150 * np.sin(n / 13))
        page.mouse.up()
        stamps = page.evaluate("() => window.frames_at")
        browser.close()
    gaps = np.diff(stamps)
    return {"frames": 1000 / float(np.median(gaps)), "slowest": float(np.quantile(gaps, 0.99))}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def report(results: list[dict[str, Any]]) -> str:
    head = HEAD.format(torch=torch.__version__, threads=torch.get_num_threads(), processor=processor(), walk=WALK)
    first = [
        "tokens",
        "reading",
        "q and k",
        "first picture",
        "exact",
        "tile, median",
        "p99",
        "another head: first, exact",
    ]
    second = [
        "tokens",
        "largest difference, finest tiles",
        "pooled tiles",
        "frames/s while panning",
        "1 % of frames above",
    ]
    lines = [head, *table([*first, "row", "column", "memory"], results, first_row), ""]
    return "\n".join([*lines, *table(second, results, second_row)]) + "\n"


HEAD = """# The viewer on long texts

A causal model of 4 layers x 8 heads, width 256 (the embedded model, its context raised) on the beginning of a novel.
Times are seen by a client over HTTP, as the page sees them. First picture: overview of all heads, and the shown head
from one row of each bin; exact: the same head from all of its pairs, counted from the same moment. Then tiles along a
walk of {walk} through every zoom of that head, then the maps of eight other heads. Memory is the peak beyond what the
process held before, without queries and keys. Differences are from `attention_weights` in float64.

PyTorch {torch}, {threads} threads, {processor}.

    python benchmarks/viewer.py --novels FOLDER
"""


def table(names: list[str], results: list[dict[str, Any]], row: Any) -> list[str]:
    lines = [names, ["---"] * len(names), *map(row, results)]
    return [f"| {' | '.join(line)} |" for line in lines]


def first_row(r: dict[str, Any]) -> list[str]:
    ms = {name: f"{1e3 * r[name]:.0f} ms" for name in ("median", "p99", "preview", "row", "column")}
    return [
        f"{r['length']:,}",
        f"{r['reading']:.1f} s",
        f"{r['kept'] / 1e6:.0f} MB",
        f"{r['first']:.2f} s",
        f"{r['exact']:.2f} s",
        ms["median"],
        ms["p99"],
        f"{ms['preview']}, {r['another']:.2f} s",
        ms["row"],
        ms["column"],
        f"{r['memory'] / 1e6:.0f} MB",
    ]


def second_row(r: dict[str, Any]) -> list[str]:
    frames = "not measured" if r["frames"] is None else f"{r['frames']:.0f}"
    slowest = "" if r["frames"] is None else f"{r['slowest']:.0f} ms"
    return [f"{r['length']:,}", f"{r['error']:.1e}", f"{r['pooled error']:.1e}", frames, slowest]


def processor() -> str:
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0].partition(":")[2].strip() if names else platform.processor() or os.name


if __name__ == "__main__":
    main()
