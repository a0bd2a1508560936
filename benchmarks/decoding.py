"""Decoding beside llama.cpp, CTranslate2 and transformers: `python benchmarks/decoding.py`.

Llamas with random weights, or a checkpoint of your own: `--model FOLDER`, of transformers' Llama or Gemma 3, and
`--gguf FILE`, the same for llama.cpp. Each contender runs in a process of its own; the processes take turns, and
numbers are medians. A step ends with the logits, and the next token is always the same: choosing it is not what is
compared, and with random weights and in few bits tokens differ. `--prompts 8` decodes texts of unequal lengths at
once, in Saccade and CTranslate2.

    python -m pip install llama-cpp-python gguf ctranslate2    # llama.cpp builds for some minutes

`llama.cpp = 1`: beside bfloat16 stands BF16, beside int8 Q8_0, beside int4 Q4_K_M. "Saccade stored" holds the numbers
of llama.cpp's file of Q4_K_M.
`GB/s` is what reading the weights of a step once takes to the time of it; the machine's own reading stands above.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SHAPES = {
    "125M": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=2048),
    "1.1B": dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, intermediate_size=8192)
    | dict(num_key_value_heads=8, head_dim=64),
}
LLAMA_CPP = ("llama.cpp BF16", "llama.cpp Q8_0", "llama.cpp Q4_K_M")
BESIDE = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_K_M", "stored": "Q4_K_M"}  # of llama.cpp's types
OURS = "model.gguf"
SACCADE = ("Saccade float32", "Saccade bfloat16", "Saccade int8", "Saccade int4", "Saccade stored")
OTHERS = ("accelerate() bfloat16", "transformers bfloat16", "CTranslate2 int8")
Step = Callable[[Any], Any]


def save(shape: str, folder: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPES[shape], vocab_size=32_000, max_position_embeddings=32_768)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def save_gguf(folder: Path, file: Path) -> None:
    """A Llama of transformers as llama.cpp reads it, in bfloat16 and without a vocabulary."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    held = {name: tensor for part in folder.glob("*.safetensors") for name, tensor in load_file(part).items()}
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }

    def add(name: str, tensor: Tensor) -> None:
        kind = gguf.GGMLQuantizationType
        if tensor.dim() == 1:
            writer.add_tensor(f"{name}.weight", tensor.float().numpy(), raw_dtype=kind.F32)
        else:
            numbers = tensor.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint8)
            writer.add_tensor(f"{name}.weight", numbers, raw_dtype=kind.BF16)

    add("token_embd", held["model.embed_tokens.weight"])
    add("output_norm", held["model.norm.weight"])
    add("output", held["lm_head.weight"])
    for layer in range(layers):
        for theirs, ours in names.items():
            tensor = held[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):  # it turns neighbouring features, not halves
                count = heads if ours == "attn_q" else kv_heads
                tensor = tensor.view(count, 2, head // 2, -1).transpose(1, 2).reshape(count * head, -1)
            add(f"blk.{layer}.{ours}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantised(file: Path, kind: str) -> Path:
    """The file in another type of llama.cpp's, made by llama.cpp."""
    made = file.with_name(f"{file.stem}-{kind}.gguf")
    if not made.exists():
        import llama_cpp

        settings = llama_cpp.llama_model_quantize_default_params()
        settings.allow_requantize = True  # for the speed alone
        settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        failed = llama_cpp.llama_model_quantize(str(file).encode(), str(made).encode(), settings)
        assert not failed
    return made


def prompt(length: int) -> Tensor:
    return torch.randint(3, 30_000, (1, length), generator=torch.Generator().manual_seed(0))


def unequal(length: int, count: int) -> list[int]:
    """Lengths of texts up to the longest."""
    return [length * (n + 1) // count for n in range(count)]


def timed(begin: Callable[[], Any], step: Step, new: int) -> tuple[float, float]:
    """Seconds of the prompt, and of one step."""
    start = time.perf_counter()
    state = begin()
    seconds = time.perf_counter() - start
    for _ in range(2):
        state = step(state)
    start = time.perf_counter()
    for _ in range(new):
        state = step(state)
    return seconds, (time.perf_counter() - start) / new


def run_llama_cpp(file: Path, kind: str, length: int, new: int, threads: int) -> tuple[float, float, float]:
    import llama_cpp

    file = file if file.name == OURS and kind == "BF16" else quantised(file, kind)
    ids, found = prompt(length)[0].tolist(), []
    for flash in (True, False):  # of the two the faster step
        options = dict(n_threads=threads, n_threads_batch=threads, n_batch=512, flash_attn=flash, verbose=False)
        model = llama_cpp.Llama(str(file), n_ctx=length + new + 8, **options)

        def begin(model: Any = model) -> int:
            model.reset()
            model.eval(ids)
            return ids[0]

        def step(token: int, model: Any = model) -> int:
            model.eval([token])
            return token

        found.append(timed(begin, step, new))
    return min(found)[0], min(seconds for _, seconds in found), file.stat().st_size


def run_saccade(folder: Path, kind: str, length: int, new: int, count: int) -> tuple[float, float, float]:
    import saccade

    if kind in ("float32", "bfloat16"):
        model: Any = saccade.models.load(folder, dtype=getattr(torch, kind))
    else:
        model = saccade.models.load(folder, dtype=torch.bfloat16, weights=kind)
    held = getattr(model, "module", model)
    ids, caches = prompt(length).expand(count, -1), []
    lengths = torch.tensor(unequal(length, count))
    real = None if count == 1 else (torch.arange(length) >= length - lengths[:, None]).long()
    if held is not model:  # no family of its own: transformers' class
        return run_module(held, length, new, accelerate=True)

    def begin() -> Tensor:
        caches[:] = [model.cache()]
        model.next_logits(ids, real, caches[0])
        return ids[:, :1]

    with torch.inference_mode():
        begin()
        tables = {*model.modules()} - {model.tokens} if model.head is not None else {*model.modules()}
        read = {
            id(tensor): tensor.nbytes
            for module in tables
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        }

        def step(token: Tensor) -> Tensor:
            model.next_logits(token, None, caches[0])
            return token

        return *timed(begin, step, new), float(sum(read.values()))


def run_transformers(folder: Path, kind: str, length: int, new: int, accelerate: bool) -> tuple[float, float, float]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, kind)).eval()
    return run_module(model, length, new, accelerate)


def run_module(model: Any, length: int, new: int, accelerate: bool) -> tuple[float, float, float]:
    import transformers

    import saccade

    ids, caches = prompt(length), []

    def begin() -> Tensor:
        caches[:] = [transformers.DynamicCache(config=model.config)]
        step(ids)
        return ids[:, :1]

    def step(token: Tensor) -> Tensor:
        model(token, past_key_values=caches[0], logits_to_keep=1)
        return token

    read = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if "weight" not in model.lm_head._parameters or not model.config.tie_word_embeddings:
        read -= model.get_input_embeddings().weight.nbytes
    with torch.no_grad(), saccade.accelerate(model) if accelerate else contextlib.nullcontext():
        begin()
        return *timed(begin, step, new), float(read)


def run_ctranslate2(folder: Path, length: int, new: int, threads: int, count: int) -> tuple[float, float, float]:
    import ctranslate2

    target = folder / "ctranslate2"
    if not target.exists():
        words = {str(n): n for n in range(32_000)}
        import tokenizers

        tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0")).save(str(folder / "tokenizer.json"))
        settings = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="1", eos_token="2", unk_token="0")
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        ctranslate2.converters.TransformersConverter(str(folder)).convert(str(target), quantization="int8")
    generator = ctranslate2.Generator(str(target), intra_threads=threads)
    ids = [str(n) for n in prompt(length)[0].tolist()]
    words = [ids[:some] for some in unequal(length, count)]

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        generator.generate_batch(words, max_length=tokens, min_length=tokens, include_prompt_in_result=False)
        return time.perf_counter() - start

    seconds(2)
    short = seconds(2)
    return short, (seconds(2 + new) - short) / new, sum(file.stat().st_size for file in target.glob("model.bin"))


def run(name: str, options: argparse.Namespace) -> tuple[float, float, float]:
    folder, length, new, threads = options.model, options.context, options.new, options.threads
    torch.set_num_threads(threads)
    kind = name.split()[-1]
    if name in LLAMA_CPP:
        return run_llama_cpp(options.gguf, kind, length, new, threads)
    if name in SACCADE:
        folder = quantised(options.gguf, BESIDE[kind]) if kind == "stored" else folder
        return run_saccade(folder, kind, length, new, options.prompts)
    if name.startswith("CTranslate2"):
        return run_ctranslate2(folder, length, new, threads, options.prompts)
    return run_transformers(folder, kind, length, new, accelerate=name.startswith("accelerate"))


def table(title: str, folder: Path, file: Path | None, names: list[str], options: argparse.Namespace) -> None:
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for _ in range(options.runs):
        for name in list(found):
            call = [sys.executable, __file__, "--one", name, "--model", str(folder), "--gguf", str(file)]
            for option in ("context", "new", "threads", "prompts"):
                call += [f"--{option}", str(getattr(options, option))]
            done = subprocess.run(call, capture_output=True, text=True)
            if done.returncode:
                print(f"{name}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
                del found[name]
            else:
                found[name].append(tuple(json.loads(done.stdout.splitlines()[-1])))
    theirs = {name.split()[-1]: statistics.median(s for _, s, _ in runs) for name, runs in found.items()}
    texts, count = ("", 1) if options.prompts == 1 else (f", {options.prompts} texts", options.prompts)
    print(f"\n### {title}, behind {options.context} tokens{texts}\n")
    print("| | tokens/s | GB/s | prompt, tokens/s | llama.cpp = 1 |\n|---|---|---|---|---|")
    for name, runs in found.items():
        begin, step = (statistics.median(run[n] for run in runs) for n in (0, 1))
        beside = theirs.get(BESIDE.get(name.split()[-1], ""))
        share = f"{beside / step:.2f}" if beside else "-"
        tokens = sum(unequal(options.context, count))
        print(f"| {name} | {count / step:.1f} | {runs[0][2] / step / 1e9:.1f} | {tokens / begin:.0f} | {share} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--model", type=Path, help="a folder in place of the shapes")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("--contenders", nargs="*", default=[*LLAMA_CPP, *SACCADE, *OTHERS])
    parser.add_argument("--context", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--prompts", type=int, default=1, help="texts at once, of unequal lengths")
    parser.add_argument("--new", type=int, default=40, help="steps")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "saccade-decoding")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one, options)))
        return
    names = [
        name
        for name in options.contenders
        if name not in LLAMA_CPP or (importlib.util.find_spec("llama_cpp") and options.prompts == 1)
        if options.prompts == 1 or name.startswith(("Saccade", "CTranslate2"))
        if importlib.util.find_spec("ctranslate2") or not name.startswith("CTranslate2")
    ]
    if options.model is not None:
        table(options.model.name, options.model, options.gguf, names, options)
        return
    for shape in options.shapes:
        folder = options.work / shape
        if not (folder / OURS).exists():
            folder.mkdir(parents=True, exist_ok=True)
            save(shape, folder)
            save_gguf(folder, folder / OURS)
        table(f"Llama, {shape}", folder, folder / OURS, names, options)


if __name__ == "__main__":
    main()
