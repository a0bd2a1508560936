"""Other libraries with the same weights, for `benchmarks/models.py`. Each gives a function that runs one row.

Shape legend: B batch, L length.
"""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Run = Callable[[], Any]
Batch = dict[str, Tensor]


def version(package: str) -> str:
    return importlib.metadata.version(package)


def quiet_transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def transformers_model(
    folder: Path, kind: str = "AutoModel", attention: str = "sdpa", dtype: torch.dtype = torch.float32
) -> Any:
    cls = getattr(quiet_transformers(), kind)
    return cls.from_pretrained(folder, attn_implementation=attention, dtype=dtype).eval()


def encode_transformers(folder: Path, batches: list[Batch], attention: str, dtype: torch.dtype = torch.float32) -> Run:
    model = transformers_model(folder, attention=attention, dtype=dtype)
    batches = [{name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()} for batch in batches]

    @torch.inference_mode()
    def run() -> list[Tensor]:
        return [model(**batch).last_hidden_state for batch in batches]

    return run


def encode_ctranslate2(folder: Path, batches: list[Batch], work: Path, threads: int, dtype: torch.dtype | str) -> Run:
    """`dtype`: also "int8"."""
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    if "input_ids" not in batches[0]:
        raise ValueError("it has no encoders of images")

    config = quiet_transformers().BertConfig
    if not hasattr(config, "position_embedding_type"):
        config.position_embedding_type = "absolute"  # the converter asks for it, and transformers 5 has it no more
    out = work / "ctranslate2"
    if not out.exists():
        TransformersConverter(str(folder)).convert(str(out))
    compute = str(dtype).removeprefix("torch.")
    encoder = ctranslate2.Encoder(str(out), compute_type=compute, inter_threads=1, intra_threads=threads)
    texts = [
        [row[real.bool()].tolist() for row, real in zip(b["input_ids"], b["attention_mask"], strict=True)]
        for b in batches
    ]

    def run() -> list[Any]:
        return [encoder.forward_batch(ids).last_hidden_state for ids in texts]

    return run


def encode_dynamic_int8(folder: Path, batches: list[Batch]) -> Run:
    """PyTorch's dynamic quantisation of linear layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated in favour of torchao
        model = torch.ao.quantization.quantize_dynamic(transformers_model(folder), {torch.nn.Linear}, torch.qint8)

    @torch.inference_mode()
    def run() -> list[Tensor]:
        return [model(**batch).last_hidden_state for batch in batches]

    return run


def encode_onnxruntime_int8(folder: Path, batches: list[Batch], work: Path, threads: int) -> Run:
    """ONNX Runtime's dynamic quantisation of the exported model."""
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    path = work / "encoder-int8.onnx"
    if not path.exists():
        quantize_dynamic(str(onnx_file(folder, batches[0], work)), str(path))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = _arrays(batches)
    return lambda: [session.run(None, batch)[0] for batch in given]


def encode_openvino_int8(folder: Path, batches: list[Batch], work: Path, threads: int) -> Run:
    """Quantised by NNCF for transformers, calibrated on the batches themselves."""
    import nncf
    import openvino

    core, given = openvino.Core(), _arrays(batches)
    model = core.read_model(str(onnx_file(folder, batches[0], work)))
    model = nncf.quantize(model, nncf.Dataset(given), model_type=nncf.ModelType.TRANSFORMER)
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    compiled = core.compile_model(model, "CPU", settings)
    return lambda: [compiled(batch)[0] for batch in given]


def ctranslate2_float32() -> Any:
    import ctranslate2

    return ctranslate2.DataType.float32


def onnx_file(folder: Path, batch: Batch, work: Path) -> Path:
    """The encoder as transformers has it, exported."""
    path = work / "encoder.onnx"
    if path.exists():
        return path
    model, example = transformers_model(folder), {name: tensor[:2].clone() for name, tensor in batch.items()}
    if "input_ids" in batch:
        ids = torch.ones(2, 16, dtype=torch.long)
        example = {"input_ids": ids, "attention_mask": ids, "token_type_ids": torch.zeros_like(ids)}
    axes = {0: "batch", 1: "length"} if "input_ids" in batch else {0: "batch"}
    torch.onnx.export(
        _Hidden(model, list(example)),
        tuple(t.float() if t.is_floating_point() else t for t in example.values()),
        str(path),
        input_names=list(example),
        output_names=["hidden"],
        dynamic_axes={**dict.fromkeys(example, axes), "hidden": axes},
        dynamo=False,
    )
    return path


class _Hidden(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, names: list[str]):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *given: Tensor) -> Tensor:
        return self.model(**dict(zip(self.names, given, strict=True)))[0]


def _arrays(batches: list[Batch]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for batch in batches:
        segments = {"token_type_ids": torch.zeros_like(batch["input_ids"])} if "input_ids" in batch else {}
        whole = {**segments, **batch}
        made.append({name: (t.float() if t.is_floating_point() else t).numpy() for name, t in whole.items()})
    return made


def encode_onnxruntime(folder: Path, batches: list[Batch], work: Path, threads: int, dtype: torch.dtype) -> Run:
    """The exported model, optimised by ONNX Runtime's own tool."""
    import onnxruntime
    from onnxruntime.transformers import optimizer

    if dtype != torch.float32:
        raise ValueError("it has no bfloat16 on CPUs")
    best = work / "encoder-optimised.onnx"
    if not best.exists():
        config, path = transformers_model(folder).config, str(onnx_file(folder, batches[0], work))
        kind = "bert" if "input_ids" in batches[0] else "vit"
        optimizer.optimize_model(
            path, kind, num_heads=config.num_attention_heads, hidden_size=config.hidden_size, opt_level=1
        ).save_model_to_file(str(best))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(best), options, providers=["CPUExecutionProvider"])
    given = _arrays(batches)

    def run() -> list[Any]:
        return [session.run(None, batch)[0] for batch in given]

    return run


def encode_openvino(folder: Path, batches: list[Batch], work: Path, threads: int, dtype: torch.dtype) -> Run:
    import openvino

    core = openvino.Core()
    precision = "f32" if dtype == torch.float32 else "bf16"
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    compiled = core.compile_model(core.read_model(str(onnx_file(folder, batches[0], work))), "CPU", settings)
    given = _arrays(batches)

    def run() -> list[Any]:
        return [compiled(batch)[0] for batch in given]

    return run


def generate_transformers(folder: Path, prompts: Batch) -> Callable[[int], Run]:
    """Runs that write as many tokens as they are asked for."""
    return writing(transformers_model(folder, "AutoModelForCausalLM"), prompts)


def writing(model: Any, prompts: Batch) -> Callable[[int], Run]:
    """The same by a model."""

    @torch.inference_mode()
    def write(new: int) -> Tensor:
        return model.generate(**prompts, max_new_tokens=new, min_new_tokens=new, do_sample=False)

    return lambda new: lambda: write(new)


def generate_ctranslate2(folder: Path, prompts: Batch, work: Path, threads: int) -> Callable[[int], Run]:
    """Tokens are strings there: every id is written as its number."""
    import ctranslate2

    generator = ctranslate2.Generator(
        str(_converted(folder, work)), compute_type="float32", inter_threads=1, intra_threads=threads
    )
    texts = _texts(prompts)

    def write(new: int) -> list[list[int]]:
        found = generator.generate_batch(
            texts, max_length=new, min_length=new, include_prompt_in_result=False, beam_size=1, sampling_topk=1
        )
        return [one.sequences_ids[0] for one in found]

    return lambda new: lambda: write(new)


def search_ctranslate2(folder: Path, sources: Batch, new: int, work: Path, threads: int) -> Run:
    """Beam search with four beams."""
    import ctranslate2

    translator = ctranslate2.Translator(
        str(_converted(folder, work)), compute_type="float32", inter_threads=1, intra_threads=threads
    )
    texts = _texts(sources)

    def run() -> list[list[int]]:
        found = translator.translate_batch(
            texts, beam_size=4, max_decoding_length=new, min_decoding_length=new, max_batch_size=0
        )
        return [[int(token) for token in one.hypotheses[0]] for one in found]

    return run


def _converted(folder: Path, work: Path) -> Path:
    from ctranslate2.converters import TransformersConverter

    out = work / f"ctranslate2-{folder.name}"
    if not out.exists():
        TransformersConverter(str(folder)).convert(str(out))
    return out


def _texts(batch: Batch) -> list[list[str]]:
    """The real tokens of each item, by the names of `named_tokens` in the benchmark."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [[str(token) for token in row[real.bool()].tolist()] for row, real in pairs]
