"""The rows of `models.py`: what each measures, its contenders, its check and the arithmetic it must cost.

Shape legend: B batch, L length, T real tokens.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import model_peers as peers
import numpy
import tokenizers
import torch
from torch import Tensor

import saccade
from saccade import models
from saccade.acceleration._model import AcceleratedModel
from saccade.nn import packed_weights

BEGUN = 16  # tokens of generation that are taken off, with the prompt
BERT = dict(vocab_size=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@dataclasses.dataclass
class Row:
    """One line of the table."""

    name: str
    unit: str  # of `amount`
    amount: float  # texts, tokens or steps of a run
    contenders: dict[str, peers.Run]
    products: float = 0.0  # FLOP of Saccade's matrix products in a run
    attention: float = 0.0
    check: Callable[[dict[str, peers.Run]], None] | None = None
    held: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)  # until it is measured
    begun: dict[str, peers.Run] | None = None  # the first part of each run, which is taken off: prompts of generation
    read: float = 0.0  # bytes of weights that a step of decoding reads, times steps
    dtype: str = "float32"  # whose peak is the limit of `products` and `attention`
    notes: list[str] = dataclasses.field(default_factory=list)  # which the check adds


# --- inputs -------------------------------------------------------------------------------------------------------


def batch_of(lengths: list[int], vocabulary: int = 1000, side: str = "right") -> peers.Batch:
    """Random ids of these lengths, padded."""
    longest = max(lengths)
    real = torch.arange(longest) < torch.tensor(lengths)[:, None]
    real = real.flip(1) if side == "left" else real
    ids = torch.randint(5, vocabulary, real.shape).masked_fill(~real, 0)
    return {"input_ids": ids, "attention_mask": real.long()}


def real_tokens(batch: peers.Batch) -> Tensor:
    """(B,) how many tokens of each item count; of an image all patches of 16 x 16, and the class token."""
    if "attention_mask" in batch:
        return batch["attention_mask"].sum(1)
    images, _, height, width = batch["pixel_values"].shape
    return torch.full((images,), height // 16 * (width // 16) + 1)


def spread(count: int, low: int = 16, high: int = 128) -> list[int]:
    """Lengths, evenly from low to high, shuffled."""
    lengths = torch.linspace(low, high, count).round().long()
    return lengths[torch.randperm(count)].tolist()


def sentences(folder: Path, count: int) -> list[str]:
    """Sentences of a novel, in its order."""
    text = sorted(folder.glob("*.txt"))[0].read_text(encoding="utf-8")
    found = (s.strip() for s in re.split(r"(?<=[.!?])\s+", " ".join(text.split())))
    return [s for s in found if len(s) > 20][:count]


# --- what it costs ------------------------------------------------------------------------------------------------


def encoder_work(model: models.Model, batches: list[peers.Batch]) -> tuple[float, float]:
    """FLOP of the products and of attention, for real tokens alone."""
    weights = sum(
        p.numel() for n, p in model.named_parameters() if p.ndim == 2 and n.startswith(("encoder", "decoder"))
    )
    width = next(p.shape[1] for n, p in model.named_parameters() if n.endswith("projection.weight"))
    stack: Any = getattr(model, "encoder", None) or model.get_submodule("decoder")
    lengths = torch.cat([real_tokens(b) for b in batches]).double()
    return 2.0 * weights * float(lengths.sum()), 4.0 * width * len(stack.blocks) * float((lengths**2).sum())


@contextlib.contextmanager
def accelerated(model: torch.nn.Module, run: peers.Run, weights: str | None = None) -> Iterator[peers.Run]:
    """`run` inside `saccade.accelerate(model)`, whose packed weights stay while other contenders have their turns."""
    taken = AcceleratedModel(model, weights, keep_weights=True)
    taken.install()

    def inside() -> Any:
        with saccade.accelerate():  # answers calls of attention, which the others' must not be
            return run()

    try:
        yield inside
    finally:
        taken.uninstall()


# --- rows ---------------------------------------------------------------------------------------------------------


def same_hidden(batches: list[peers.Batch], exact: peers.Run | None) -> Callable[[dict[str, peers.Run]], None]:
    """Every contender gives transformers' hidden states of the real tokens.

    In float32 they agree to 1e-3. In bfloat16 each is at most twice as far from `exact`, transformers in float32, as
    transformers in bfloat16 is.
    """

    def off(expected: list[Tensor], came: list[Any]) -> float:
        far = 0.0
        for batch, a, b in zip(batches, expected, came, strict=True):
            real = torch.arange(a.shape[1]) < real_tokens(batch)[:, None]
            far = max(far, float((_tensor(b).float()[real] - a.float()[real]).abs().max()))
        return far

    def check(contenders: dict[str, peers.Run]) -> None:
        outs = {name: run() for name, run in contenders.items()}
        theirs = outs["transformers sdpa"]
        expected, most = (theirs, 1e-3) if exact is None else (exact(), 0.0)
        most = most or 2 * off(expected, theirs)
        for name, came in outs.items():
            far = off(expected, came)
            assert far <= most, f"{name}: off by {far:.1e}, at most {most:.1e} expected"

    return check


def _tensor(out: Any) -> Tensor:
    if isinstance(out, Tensor):
        return out
    if str(getattr(out, "dtype", "")).endswith("bfloat16"):  # CTranslate2's own storage
        out = out.to(peers.ctranslate2_float32())
    return torch.as_tensor(numpy.array(out))


def encoding(
    name: str, folder: Path, batches: list[peers.Batch], work: Path, threads: int, dtype: torch.dtype = torch.float32
) -> Row:
    """Batches through an encoder. Weights are packed before, as those of the other libraries are converted before."""
    model, plain = (models.load(folder, head="none", dtype=dtype) for _ in range(2))
    batches = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()} for batch in batches]
    held = contextlib.ExitStack()
    held.enter_context(packed_weights(model))

    def running(model: models.Model) -> peers.Run:
        @torch.inference_mode()
        def run() -> list[Tensor]:
            return [model(**batch).last_hidden_state for batch in batches]

        return run

    contenders: dict[str, peers.Run] = {
        "Saccade": running(model),
        "Saccade, plain weights": running(plain),
        "transformers sdpa": peers.encode_transformers(folder, batches, "sdpa", dtype),
        "transformers eager": peers.encode_transformers(folder, batches, "eager", dtype),
    }
    taken = peers.transformers_model(folder, dtype=dtype)

    @torch.inference_mode()
    def accelerate() -> list[Tensor]:
        return [taken(**batch).last_hidden_state for batch in batches]

    contenders["accelerate(model)"] = held.enter_context(accelerated(taken, accelerate))
    work.mkdir(exist_ok=True)
    for label, package, make in (
        ("CTranslate2", "ctranslate2", peers.encode_ctranslate2),
        ("ONNX Runtime", "onnxruntime", peers.encode_onnxruntime),
        ("OpenVINO", "openvino", peers.encode_openvino),
    ):
        with told(label):
            peers.version(package)
            contenders[label] = make(folder, batches, work, threads, dtype)
    exact = None if dtype == torch.float32 else peers.encode_transformers(folder, batches, "sdpa")
    items = sum(len(real_tokens(b)) for b in batches)
    return Row(
        name,
        "images" if "pixel_values" in batches[0] else "texts",
        items,
        contenders,
        *encoder_work(model, batches),
        check=same_hidden(batches, exact),
        held=held,
        dtype=str(dtype).removeprefix("torch."),
    )


def encoding_int8(name: str, folder: Path, batches: list[peers.Batch], work: Path, threads: int) -> Row:
    """The same with weights of 8 bits; notes say how far the mean vector of each text is from float32."""
    model, taken = models.load(folder, head="none"), peers.transformers_model(folder)
    held = contextlib.ExitStack()

    def running(model: Any) -> peers.Run:
        @torch.inference_mode()
        def run() -> list[Tensor]:
            return [model(**batch).last_hidden_state for batch in batches]

        return run

    contenders: dict[str, peers.Run] = {
        "Saccade int8": held.enter_context(accelerated(model, running(model), "int8")),
        "accelerate(model, weights='int8')": held.enter_context(accelerated(taken, running(taken), "int8")),
        "load(weights='int8')": running(models.load(folder, head="none", weights="int8")),
        "transformers sdpa": peers.encode_transformers(folder, batches, "sdpa"),
    }
    work.mkdir(exist_ok=True)
    others: list[tuple[str, Callable[[], peers.Run]]] = [
        ("OpenVINO int8 (NNCF)", lambda: peers.encode_openvino_int8(folder, batches, work, threads)),
        ("CTranslate2 int8", lambda: peers.encode_ctranslate2(folder, batches, work, threads, "int8")),
        ("ONNX Runtime int8", lambda: peers.encode_onnxruntime_int8(folder, batches, work, threads)),
        ("PyTorch dynamic int8", lambda: peers.encode_dynamic_int8(folder, batches)),
    ]
    for label, make in others:
        with told(label):
            contenders[label] = make()
    row = Row(name, "texts", sum(len(real_tokens(b)) for b in batches), contenders, held=held)

    def vectors(outs: list[Any]) -> Tensor:
        means = []
        for batch, out in zip(batches, outs, strict=True):
            real = (torch.arange(out.shape[1]) < real_tokens(batch)[:, None])[..., None].float()
            means.append((_tensor(out).float() * real).sum(1) / real.sum(1))
        return torch.cat(means)

    def check(contenders: dict[str, peers.Run]) -> None:
        exact = vectors(contenders["transformers sdpa"]())
        for label, run in contenders.items():
            near = torch.cosine_similarity(vectors(run()), exact)
            row.notes.append(f"{label}: {float(near.mean()):.4f}, {float(near.min()):.4f}")
            if ("Saccade" in label or "weights=" in label) and float(near.min()) < 0.98:
                raise ValueError(f"{label}: a text's vector has a cosine of {float(near.min()):.3f} to float32")

    row.check = check
    return row


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """A contender that is not there, or cannot, is named and left out."""
    try:
        yield
    except Exception as error:
        print(f"{what} left out: {type(error).__name__}: {str(error).splitlines()[0][:200]}")


def random_folder(work: Path, name: str, class_name: str, config: Any) -> Path:
    """A folder with random weights of transformers."""
    folder = work / name
    if not folder.exists():
        torch.manual_seed(0)
        getattr(peers.quiet_transformers(), class_name)(config).save_pretrained(folder)
    return folder


def bert(work: Path, layers: int, longest: int) -> Path:
    config = peers.quiet_transformers().BertConfig(**BERT, num_hidden_layers=layers, max_position_embeddings=longest)
    return random_folder(work, f"bert-{layers}-{longest}", "BertModel", config)


def vit(work: Path, layers: int) -> Path:
    """ViT-base: 224 x 224 pixels, patches of 16."""
    return random_folder(
        work, f"vit-{layers}", "ViTModel", peers.quiet_transformers().ViTConfig(num_hidden_layers=layers)
    )


def training(work: Path, layers: int) -> Row:
    """A step of a classifier: forward, backward, and AdamW."""
    folder = bert(work, layers, 512)
    batch = batch_of(spread(16))
    labels = torch.randint(0, 3, (16,))
    ours = models.load(folder, head="sequence-classification", labels=3).train()
    theirs = peers.quiet_transformers().AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, attn_implementation="sdpa"
    )

    def stepping(model: Any) -> peers.Run:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-5)

        def run() -> None:
            optimizer.zero_grad()
            model(**batch, labels=labels).loss.backward()
            optimizer.step()

        return run

    name = f"training step, BERT-base, {layers} layers, 16 texts of 16 to 128"
    taken = copy.deepcopy(theirs).train()
    held = contextlib.ExitStack()
    contenders = {
        "Saccade": stepping(ours),
        "transformers sdpa": stepping(theirs.train()),
        "accelerate(model)": held.enter_context(accelerated(taken, stepping(taken))),
    }
    return Row(name, "steps", 1, contenders, held=held)


def corpus(folder: Path, texts: list[str]) -> Row:
    """Sentences to vectors: tokens, model, pooling."""
    from sentence_transformers import SentenceTransformer

    from saccade.models import embed

    theirs, ours = SentenceTransformer(str(folder), device="cpu"), models.load(folder)

    def check(contenders: dict[str, peers.Run]) -> None:
        a, b = (_tensor(contenders[name]()) for name in ("transformers sdpa", "Saccade"))
        off = float((a - b).abs().max())
        assert off < 1e-5, f"embeddings: off by {off:.1e}"

    contenders: dict[str, peers.Run] = {
        "Saccade": lambda: embed(texts, ours),
        "transformers sdpa": lambda: theirs.encode(texts, batch_size=32, show_progress_bar=False),
    }
    return Row(
        f"embedding {len(texts)} sentences of a novel (sentence-transformers)",
        "texts",
        len(texts),
        contenders,
        check=check,
    )


def generating(name: str, folder: Path, lengths: list[int], new: int, work: Path, threads: int) -> Row:
    """Greedy decoding of prompts of these lengths, padded on the left: `new` tokens after the first `BEGUN`."""
    prompts = batch_of(lengths, side="left")
    ours = models.load(folder)
    ours.settings.values["eos_token_id"] = None  # all write as many tokens
    work.mkdir(exist_ok=True)
    theirs = peers.generate_transformers(folder, prompts)
    held = contextlib.ExitStack()
    taken: dict[str, Callable[[int], peers.Run]] = {}
    for label, weights in (("accelerate(model)", None), ("accelerate(model, weights='bfloat16')", "bfloat16")):
        model = peers.transformers_model(folder, "AutoModelForCausalLM")
        writing = peers.writing(model, prompts)
        count: dict[str, int] = {}
        go = held.enter_context(accelerated(model, lambda w=writing, c=count: w(c["new"])(), weights=weights))

        def asked(new: int, count: dict[str, int] = count, go: peers.Run = go) -> peers.Run:
            def run() -> Any:
                count["new"] = new
                return go()

            return run

        taken[label] = asked
    ctranslate2: Callable[[int], peers.Run] | None = None
    with told("CTranslate2"):
        peers.version("ctranslate2")
        ctranslate2 = peers.generate_ctranslate2(folder, prompts, work, threads)

    def runs(count: int) -> dict[str, peers.Run]:
        made: dict[str, peers.Run] = {
            "Saccade": lambda: ours.generate(**prompts, max_new_tokens=count),  # type: ignore[operator]
            "transformers sdpa": theirs(count),
            **{label: of(count) for label, of in taken.items()},
        }
        return made if ctranslate2 is None else {**made, "CTranslate2": ctranslate2(count)}

    def check(contenders: dict[str, peers.Run]) -> None:
        length = prompts["input_ids"].shape[1]
        expected = contenders["transformers sdpa"]()[:, length:]
        for one, run in contenders.items():
            got = torch.as_tensor(run())
            same = float((got[:, -expected.shape[1] :] == expected).float().mean())
            print(f"{one}: {same:.0%} of the tokens as transformers has them")
            assert "bfloat16" in one or same > 0.9, (
                f"{one}: only {same:.0%} of the tokens are the same"
            )  # near ties fall either way

    matrices = [
        part.weight for part in model.modules() if not isinstance(part, torch.nn.Embedding) and hasattr(part, "weight")
    ]
    weights = sum(weight.numel() for weight in matrices if weight.ndim == 2)
    read = 4.0 * weights * new if len(lengths) == 1 else 0.0
    return Row(
        name, "tokens", len(lengths) * new, runs(BEGUN + new), read=read, check=check, begun=runs(BEGUN), held=held
    )


def named_tokens(folder: Path, count: int) -> Path:
    """A tokenizer whose tokens are their numbers: a converter asks for one."""
    words = tokenizers.models.WordLevel({str(n): n for n in range(count)}, unk_token="0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "1", "eos_token": "2", "unk_token": "0"}
    settings["pad_token"] = "0"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def gpt2(work: Path, longest: int, layers: int) -> Path:
    ids = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config = peers.quiet_transformers().GPT2Config(vocab_size=50257, n_positions=longest, n_layer=layers, **ids)
    return named_tokens(random_folder(work, f"gpt2-{longest}-{layers}", "GPT2LMHeadModel", config), 50257)


def llama(work: Path, layers: int) -> Path:
    """The shape of Llama 3.2 1B."""
    config = peers.quiet_transformers().LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return named_tokens(random_folder(work, f"llama-{layers}", "LlamaForCausalLM", config), 32000)


def searching(work: Path, new: int, threads: int) -> Row:
    """Beam search of a T5 of the small size, random weights, sources of unequal lengths."""
    library = peers.quiet_transformers()
    config = library.T5Config(decoder_start_token_id=0, d_kv=64, vocab_size=32128)
    folder = named_tokens(random_folder(work, "t5", "T5ForConditionalGeneration", config), 32100)
    sources = batch_of(spread(8, 16, 64))
    ours = models.load(folder)
    theirs = library.AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    rules = models.Constraints(max_new_tokens=new, min_new_tokens=new)

    @torch.inference_mode()
    def reference() -> Tensor:
        return theirs.generate(**sources, num_beams=4, max_new_tokens=new, min_new_tokens=new, do_sample=False)

    def run() -> Any:
        return ours.generate(**sources, search=models.BeamSearch(beams=4), constraints=rules)  # type: ignore[operator]

    contenders: dict[str, peers.Run] = {"Saccade": run, "transformers sdpa": reference}
    work.mkdir(exist_ok=True)
    with told("CTranslate2"):
        peers.version("ctranslate2")
        contenders["CTranslate2"] = peers.search_ctranslate2(folder, sources, new, work, threads)

    def check(contenders: dict[str, peers.Run]) -> None:
        expected = contenders["transformers sdpa"]()[:, 1:]
        for one, run in contenders.items():
            got = run()
            got = got.ids[:, 0] if one == "Saccade" else torch.as_tensor(got)[:, -expected.shape[1] :]
            same = float((got == expected).float().mean())
            print(f"{one}: {same:.0%} of the tokens as transformers has them")
            assert one == "CTranslate2" or same > 0.9, f"{one}: only {same:.0%} of the tokens are the same"

    name = f"beam search, T5 small, 8 sources, 4 beams, {new} tokens"
    return Row(name, "tokens", 8 * new, contenders, check=check)
