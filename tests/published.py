"""Tiny random models of transformers as oracles: the same folder is opened by both, and everything is compared.

Tolerances: rounding of float32 and float64 in a few narrow layers, on values of size 1.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from saccade import models

# Hidden states and logits are of size 1; float64 has 1e-16 of that for every operation, float32 6e-8.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
FIELDS = (
    "last_hidden_state",
    "logits",
    "pooler_output",
    "start_logits",
    "end_logits",
    "cls_logits",
    "distillation_logits",
    "prediction_outputs",
    "encoder_last_hidden_state",
    "loss",
)
STATES = ("hidden_states", "decoder_hidden_states", "encoder_hidden_states")


def sources_and_targets(vocabulary: int = 101, seed: int = 1) -> dict[str, Tensor]:
    """Three sources of 5, 11 and 9 tokens, which end with 2, and targets of 7, 4 and 2, padded with 1 on the right."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([[5], [11], [9]])
    ids = torch.randint(3, vocabulary, (3, 11), generator=generator).scatter(1, lengths - 1, 2)
    mask = (torch.arange(11) < lengths).long()
    return {
        "input_ids": torch.where(mask != 0, ids, 1),
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(3, vocabulary, (3, 7), generator=generator),
        "decoder_attention_mask": (torch.arange(7) < torch.tensor([[7], [4], [2]])).long(),
    }


def padded_on_the_left(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch of `sources_and_targets` with each item's padding before it."""
    lengths = {name: inputs[name].sum(1).tolist() for name in inputs if name.endswith("mask")}
    side = {name: "decoder_attention_mask" if "decoder" in name else "attention_mask" for name in inputs}
    return {
        name: torch.stack([row.roll(-n) for row, n in zip(x, lengths[side[name]], strict=True)])
        for name, x in inputs.items()
    }


def transformers() -> Any:
    """The library, silent; never asking a network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as library

    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def written(folder: Path, class_name: str, config: Any, seed: int = 0, spread: float = 0.2) -> nn.Module:
    """A random model of transformers in evaluation mode, saved into `folder`.

    Weights get a normal part of standard deviation `spread`, biases and norms too: as transformers begins them, many
    are 0 or 1, and a bias that is left out would not show.
    """
    torch.manual_seed(seed)
    model = getattr(transformers(), class_name)(config).eval()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):  # fixed ones are a formula
            parameter.add_(spread * torch.randn_like(parameter) / max(1, parameter.shape[-1]) ** 0.5)
    model.save_pretrained(folder)
    return model


def written_words(folder: Path, texts: Sequence[str], **config: object) -> Path:
    """A tokenizer as BERT's in `folder`, of 97 tokens: vocab.txt and tokenizer_config.json."""
    import tokenizers

    trained = tokenizers.BertWordPieceTokenizer(lowercase=bool(config.get("do_lower_case", True)))
    trained.train_from_iterator([*texts] * 5, vocab_size=97, min_frequency=1, show_progress=False)
    trained.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **config}))
    return folder


def assert_agrees(
    theirs: nn.Module,
    folder: Path,
    inputs: Mapping[str, Any],
    *,
    real: Tensor | Iterable[Tensor] | None = None,
    ours: Mapping[str, Any] | None = None,
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.float64),
    fields: Iterable[str] = FIELDS,
    load: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    last_state: bool = True,
) -> models.Model:
    """Both models of the folder give the same hidden states and outputs; returns ours, float64.

    Args:
        inputs: of transformers' call; tensors of floats are cast.
        real: bool (B, L), the rows that are compared; None: all. Several where lengths differ, as of source and target.
        ours: what our call gets in the place of, or beside, `inputs`.
        load: further arguments of `saccade.models.load`.
        names: fields that transformers calls otherwise: ours -> theirs.
        last_state: whether their hidden states end with what the last layer gives, as ours do.
    """
    model: models.Model | None = None
    for dtype in dtypes:
        theirs = theirs.to(dtype)
        model = models.load(folder, dtype=dtype, **(load or {}))
        with torch.no_grad():
            expected = theirs(**_cast(inputs, dtype), output_hidden_states=True)
            got = model(**_cast({**inputs, **(ours or {})}, dtype), hidden_states=True)
        pairs = [(f, getattr(expected, (names or {}).get(f, f), None), getattr(got, f, None)) for f in fields]
        compared = [(name, a, b) for name, a, b in pairs if isinstance(a, Tensor)]
        assert got.hidden_states is not None
        for field in (name for name in STATES if getattr(expected, name, None)):
            mine = getattr(got, field) if last_state else getattr(got, field)[:-1]
            states = zip(getattr(expected, field), mine, strict=True)
            compared += [(f"{field}[{n}]", a, b) for n, (a, b) in enumerate(states)]
        for name, a, b in compared:
            assert b is not None, f"{name}: not given"
            assert a.shape == b.shape, f"{name}: {tuple(b.shape)}, expected {tuple(a.shape)}"
            choices = [] if real is None else [real] if isinstance(real, Tensor) else real
            rows = next((chosen for chosen in choices if chosen.shape == a.shape[:2]), ...)
            a, b = a[rows], b[rows]
            assert torch.allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]), (
                f"{name} in {dtype}: off by {(a - b).abs().max():.3g}"
            )
    assert model is not None
    return model


def assert_same_gradients(theirs: nn.Module, ours: models.Model, inputs: Mapping[str, Any], loss: Any) -> None:
    """In float64, both models' gradients of `loss(output)` are the same for every published weight."""
    theirs = theirs.double().eval()
    theirs.zero_grad(), ours.zero_grad()
    loss(theirs(**_cast(inputs, torch.float64))).backward()
    loss(ours(**_cast(inputs, torch.float64))).backward()
    expected = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    got = published_gradients(ours)
    if not expected.keys() <= got.keys():  # some models have other names in memory than in their files
        expected = _as_stored(theirs)
    assert expected.keys() <= got.keys(), sorted(expected.keys() - got.keys())
    for name, gradient in expected.items():
        assert torch.allclose(gradient, got[name], rtol=1e-8, atol=1e-10), (
            f"{name}: off by {(gradient - got[name]).abs().max():.3g}"
        )


def published_gradients(model: models.Model) -> dict[str, Tensor]:
    """The gradients of our parameters under their published names."""
    from saccade.models.model import published

    twin = {name: parameter.grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        kept = {name: parameter.clone() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            gradient = twin[name]
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
        named = published(model)
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name])
    return named


def _as_stored(theirs: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model of transformers under the names that its files have."""
    twin = copy.deepcopy(theirs)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for parameter, source in zip(twin.parameters(), theirs.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
        twin.save_pretrained(folder)
        return safetensors.torch.load_file(Path(folder) / "model.safetensors")


def assert_round_trip(theirs: nn.Module, folder: Path, out: Path) -> None:
    """Loaded and saved by us, opened by transformers: equal bits in every tensor, and nothing to complain of."""
    model = models.load(folder)
    model.save(out)
    opened, told = type(theirs).from_pretrained(out, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    stored = type(theirs).from_pretrained(folder).state_dict()
    for name, tensor in opened.state_dict().items():
        assert torch.equal(tensor, stored[name]), name


def run_alone(program: str, folder: Path) -> Any:
    """What `program` leaves in `result`, as JSON has it, in a process that cannot import transformers.

    It finds `folder`, `models` and `torch`.
    """
    before = "import json, sys; sys.modules['transformers'] = None; from pathlib import Path; import torch\n"
    before += f"from saccade import models; folder = Path({str(folder)!r})\n"
    code = before + textwrap.dedent(program) + "\nprint(json.dumps(result))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_padded_equals_alone(model: models.Model, inputs: Mapping[str, Tensor], filler: int = 0) -> None:
    """Each item of a batch padded on the right, or on the left, has the states it has alone; so has a packed row.

    Args:
        inputs: tensors (B, L), padded on the right, with `attention_mask`.
        filler: the id that stands in padding.
    """
    lengths = inputs["attention_mask"].sum(1).tolist()
    right = {**inputs, "input_ids": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, filler)}
    columns = inputs["input_ids"].shape[1]
    left = {
        name: torch.stack([row.roll(columns - n) for row, n in zip(x, lengths, strict=True)])
        for name, x in right.items()
    }
    beside = {name: x for name, x in right.items() if name not in ("input_ids", "attention_mask")}
    states, layout = model.packed_states(**right)
    means, firsts = layout.mean(states), layout.first(states)
    both = model(**right), model(**left)
    right_out, left_out = (out.last_hidden_state for out in both)
    for item, (length, state) in enumerate(zip(lengths, states[0].split(lengths), strict=True)):
        alone = model(
            right["input_ids"][item : item + 1, :length], **{n: x[item : item + 1, :length] for n, x in beside.items()}
        )
        expected = alone.last_hidden_state[0]
        if alone.pooler_output is not None:
            assert all(torch.allclose(out.pooler_output[item], alone.pooler_output[0], atol=1e-12) for out in both)
        for got in (right_out[item, :length], left_out[item, columns - length :], state):
            assert torch.allclose(got, expected, atol=1e-12)
        assert torch.allclose(means[item], expected.mean(0), atol=1e-12)
        assert torch.allclose(firsts[item], expected[0], atol=1e-12)
        assert not right_out[item, length:].any()


def _cast(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def without_rounding(theirs: nn.Module) -> nn.Module:
    """The same model with RMS norms, rotary angles and GPT-Neo's attention in float64 where its weights are.

    transformers computes these in float32 whatever the weights' dtype, which alone is an error of 1e-7 in float64.
    """
    for name, module in theirs.named_modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = functools.partial(_plain_norm, module)
        elif name.endswith("rotary_emb"):
            module.forward = functools.partial(_plain_waves, module)
        elif hasattr(module, "attention_type") and hasattr(module, "_attn"):
            module._attn = functools.partial(_plain_attention, module)
    return theirs


def _plain_attention(neo: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, keys = query.shape[-2], key.shape[-2]
    logits = query @ key.mT + (0.0 if mask is None else mask)
    weights = logits.masked_fill(~neo.bias[..., keys - rows : keys, :keys], torch.finfo(query.dtype).min).softmax(-1)
    return weights @ value, weights


def _plain_norm(norm: Any, x: Tensor) -> Tensor:
    return norm.weight * x * (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()


def _plain_waves(rotary: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    values = rotary.config.rope_parameters
    steps = rotary.inv_freq.double()
    if values["rope_type"] in ("default", "dynamic", "linear"):  # of the others, those of the buffer
        width, factor = 2 * steps.numel(), values["factor"] if values["rope_type"] == "linear" else 1.0
        steps = values["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float64) / width) / factor
    angles = (position_ids[..., None].double() * steps).repeat(1, 1, 2)
    return tuple((wave * rotary.attention_scaling).to(x.dtype) for wave in (angles.cos(), angles.sin()))  # type: ignore[return-value]


def run_without_transformers(code: str, *arguments: object) -> str:
    """What a child process prints that cannot import transformers; `code` reads `sys.argv[1:]`."""
    blocked = "import sys; sys.modules['transformers'] = None\n"
    command = [sys.executable, "-c", blocked + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
