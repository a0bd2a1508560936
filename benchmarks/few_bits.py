"""What weights in few bits cost in quality.

    python benchmarks/few_bits.py --novels FOLDER --minilm FOLDER --sst2 FOLDER

- Language: the embedded model, as a Llama of transformers and as a file of llama.cpp's, on windows of novels that it
  has not read. KL divergence of the next token's distribution from that in float32, agreement of the first token,
  perplexity.
- Sentences: MiniLM's vectors beside those in float32, and how often a sentence is found by a copy of itself that kept
  a third of its words, among all sentences.
- Labels: MiniLM, tuned here on SST-2's training sentences, on its test sentences; with the 95 % interval of the
  difference from float32, sentence by sentence.

    python -m pip install llama-cpp-python gguf    # llama.cpp builds for some minutes; left out, its rows are, too
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import decoding
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import saccade

HELD_OUT = "the-hound-of-the-baskervilles.txt", "the-secret-garden.txt"
FORMS = (None, "bfloat16", "int8", "int4")
WINDOW = 256
Logits = Callable[[list[int]], Tensor]  # of one window


def embedded_as_llama(folder: Path) -> None:
    """The embedded model as transformers' Llama, in bfloat16 as it is stored."""
    model: Any = saccade.models.load(dtype=torch.bfloat16).model
    sizes = model.config
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.hidden,
        max_position_embeddings=sizes.context,
        rms_norm_eps=torch.finfo(torch.float32).eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rotary_base},
    )
    made = transformers.LlamaForCausalLM(config).bfloat16()
    held = model.state_dict()
    state = {
        "model.embed_tokens.weight": held["embedding.weight"] * sizes.width**0.5,  # a power of 2
        "lm_head.weight": held["embedding.weight"],
        "model.norm.weight": held["decoder.norm.weight"],
    }
    for layer in range(sizes.layers):
        ours, theirs = f"decoder.blocks.{layer}.", f"model.layers.{layer}."
        for name, part in zip("qkv", held[f"{ours}attention.projection.weight"].chunk(3), strict=True):
            state[f"{theirs}self_attn.{name}_proj.weight"] = part
        for name, part in zip(("gate", "up"), held[f"{ours}feed_forward.gate_up.weight"].chunk(2), strict=True):
            state[f"{theirs}mlp.{name}_proj.weight"] = part
        state[f"{theirs}self_attn.o_proj.weight"] = held[f"{ours}attention.output.weight"]
        state[f"{theirs}mlp.down_proj.weight"] = held[f"{ours}feed_forward.down.weight"]
        state[f"{theirs}input_layernorm.weight"] = held[f"{ours}attention_norm.weight"]
        state[f"{theirs}post_attention_layernorm.weight"] = held[f"{ours}feed_forward_norm.weight"]
    made.load_state_dict(state)
    made.save_pretrained(folder)


def windows(novels: Path, count: int) -> list[list[int]]:
    """Windows side by side, each behind the token that begins a text, evenly from all held-out text."""
    tokenizer: Any = saccade.models.load().tokenizer
    found: list[list[int]] = []
    for name in HELD_OUT:
        ids = tokenizer.encode((novels / name).read_text()).ids
        found += [[tokenizer.start, *ids[at : at + WINDOW - 1]] for at in range(0, len(ids) - WINDOW, WINDOW - 1)]
    return found[:: max(1, len(found) // count)][:count]


def of_saccade(folder: Path, form: str | None) -> Logits:
    model: Any = saccade.models.load(folder, dtype=torch.float32, weights=form)

    def logits(ids: list[int]) -> Tensor:
        with torch.inference_mode():
            out: Tensor = model(torch.tensor([ids])).logits[0]
            return out

    return logits


def of_llama_cpp(file: Path, kind: str) -> Logits:
    import llama_cpp

    file = file if kind == "BF16" else decoding.quantised(file, kind)
    model = llama_cpp.Llama(str(file), n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, verbose=False)

    def logits(ids: list[int]) -> Tensor:
        model.reset()
        model.eval(ids)
        return torch.tensor(model.scores[: len(ids)])

    return logits


def language(novels: Path, work: Path, count: int) -> None:
    folder = work / "embedded"
    folder.mkdir(parents=True, exist_ok=True)
    embedded_as_llama(folder)
    texts = windows(novels, count)
    exact = of_saccade(folder, None)
    rows = {f"Saccade {form or 'float32'}": functools.partial(of_saccade, folder, form) for form in FORMS}
    if importlib.util.find_spec("llama_cpp"):
        file = folder / decoding.OURS
        decoding.save_gguf(folder, file)
        rows |= {name: functools.partial(of_llama_cpp, file, name.split()[1]) for name in decoding.LLAMA_CPP}
    print(f"### Embedded model, {len(texts)} windows of {WINDOW} tokens of novels that it has not read\n")
    print("| | KL divergence from float32 | same first token | perplexity |\n|---|---|---|---|")
    for name, make in rows.items():
        logits, kl, same, loss = make(), 0.0, 0.0, 0.0
        for ids in texts:
            full, few = (each(ids)[:-1].double().log_softmax(-1) for each in (exact, logits))
            kl += float((full.exp() * (full - few)).sum(-1).mean())
            same += float((full.argmax(-1) == few.argmax(-1)).double().mean())
            loss += float(F.nll_loss(few, torch.tensor(ids[1:])))
        n = len(texts)
        print(f"| {name} | {kl / n:.2g} | {same / n:.4f} | {torch.tensor(loss / n).exp():.3f} |")


def sentences(novels: Path, count: int) -> list[str]:
    text = " ".join((novels / name).read_text() for name in HELD_OUT)
    found = [" ".join(each.split()) for each in re.split(r"(?<=[.!?])\s+", text)]
    chosen = sorted({each for each in found if 6 <= len(each.split()) <= 60})
    random.Random(0).shuffle(chosen)
    return chosen[:count]


def damaged(sentence: str, generator: random.Random) -> str:
    words = sentence.split()
    kept = sorted(generator.sample(range(len(words)), len(words) // 3))
    return " ".join(words[at] for at in kept)


def vectors(folder: Path, form: str | None, texts: list[str]) -> Tensor:
    return torch.as_tensor(saccade.models.embed(texts, folder, weights=form))


def retrieval(minilm: Path, novels: Path, count: int) -> None:
    texts, generator = sentences(novels, count), random.Random(1)
    copies = [damaged(each, generator) for each in texts]
    print(f"\n### MiniLM, {len(texts)} sentences of novels\n")
    print("| | cosine to float32, mean and worst | found by a damaged copy |\n|---|---|---|")
    exact = None
    for form in FORMS:
        whole, parts = (F.normalize(vectors(minilm, form, each).double(), dim=-1) for each in (texts, copies))
        exact = whole if exact is None else exact
        cosine = (whole * exact).sum(-1)
        found = (parts @ whole.t()).argmax(-1) == torch.arange(len(texts))
        print(f"| {form or 'float32'} | {cosine.mean():.5f}, {cosine.min():.4f} | {found.double().mean():.4f} |")


def labelled(file: Path) -> tuple[list[str], Tensor]:
    lines = [line.split(" ", 1) for line in file.read_text().splitlines() if line]
    return [text for _, text in lines], torch.tensor([int(label) for label, _ in lines])


def batches(texts: list[str], tokenizer: Any, size: int) -> Iterator[tuple[list[int], Any]]:
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    for at in range(0, len(order), size):
        chosen = order[at : at + size]
        yield chosen, tokenizer([texts[n] for n in chosen], padding=True, return_tensors="pt")


def tuned(minilm: Path, sst2: Path, folder: Path, epochs: int) -> None:
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(minilm, num_labels=2).train()
    texts, labels = labelled(sst2 / "stsa.binary.train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    steps = epochs * -(-len(texts) // 32)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-5, total_steps=steps, pct_start=0.1)
    for _ in range(epochs):
        parts = list(batches(texts, tokenizer, 32))
        random.Random(0).shuffle(parts)
        with saccade.accelerate(model):
            for chosen, inputs in parts:
                model(**inputs, labels=labels[chosen]).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def classification(minilm: Path, sst2: Path, work: Path, epochs: int) -> None:
    folder = work / "sst2"
    if not folder.exists():
        tuned(minilm, sst2, folder, epochs)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts, labels = labelled(sst2 / "stsa.binary.test")
    print(f"\n### MiniLM tuned on SST-2, {len(texts)} test sentences\n")
    print("| | accuracy | difference, 95 % interval | changed labels |\n|---|---|---|---|")
    exact = None
    for form in FORMS:
        model: Any = saccade.models.load(folder, head="sequence-classification", weights=form)
        chosen = torch.empty(len(texts), dtype=torch.long)
        with torch.inference_mode():
            for some, inputs in batches(texts, tokenizer, 32):
                chosen[some] = model(inputs["input_ids"], inputs["attention_mask"]).logits.argmax(-1)
        right = (chosen == labels).double()
        exact = chosen if exact is None else exact
        moved = right - (exact == labels).double()
        half = 1.96 * moved.std() / len(texts) ** 0.5
        interval = f"{moved.mean():+.4f} +- {half:.4f}"
        print(f"| {form or 'float32'} | {right.mean():.4f} | {interval} | {int((chosen != exact).sum())} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--novels", type=Path, required=True, help="a folder with the held-out novels as text")
    parser.add_argument("--minilm", type=Path, help="a folder of all-MiniLM-L6-v2")
    parser.add_argument("--sst2", type=Path, help="a folder with stsa.binary.train and stsa.binary.test")
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--sentences", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "saccade-few-bits")
    options = parser.parse_args()
    language(options.novels, options.work, options.windows)
    if options.minilm is not None:
        retrieval(options.minilm, options.novels, options.sentences)
        if options.sst2 is not None:
            classification(options.minilm, options.sst2, options.work, options.epochs)


if __name__ == "__main__":
    main()
