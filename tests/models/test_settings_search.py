"""Every field of transformers' configurations, changed one at a time: obeyed as transformers obeys it, or refused by
name. A setting that is ignored gives wrong numbers without a word."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from published import FIELDS, sources_and_targets, transformers, written
from saccade import models
from saccade.models.families import FAMILIES, GRAPHS

ABSENT = object()
TEXT = dict(
    vocab_size=101,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=29,
    max_position_embeddings=31,
    pad_token_id=1,
)
SIDES = dict(
    vocab_size=101,
    d_model=24,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=3,
    decoder_attention_heads=3,
    encoder_ffn_dim=29,
    decoder_ffn_dim=29,
    max_position_embeddings=31,
)
LLAMA = dict(TEXT, num_key_value_heads=1, bos_token_id=0, eos_token_id=2)
T5 = dict(vocab_size=101, d_model=24, d_kv=7, d_ff=29, num_layers=2, num_heads=3, pad_token_id=1)
IMAGE = dict(
    hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=29, image_size=12, patch_size=4
)
SERIES = dict(
    num_input_channels=3,
    context_length=23,
    patch_length=5,
    patch_stride=3,
    d_model=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    ffn_dim=29,
    prediction_length=7,
    num_targets=3,
)
SOUND = dict(
    vocab_size=31,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=29,
    conv_dim=[12, 13],
    conv_kernel=[5, 3],
    conv_stride=[3, 2],
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=3,
)
CONFIGS = {
    "bert": TEXT,
    "roberta": TEXT,
    "xlm-roberta": TEXT,
    "distilbert": dict(vocab_size=101, dim=24, n_layers=2, n_heads=3, hidden_dim=29, pad_token_id=1),
    "electra": dict(TEXT, embedding_size=17),
    "esm": dict(TEXT, mask_token_id=32, position_embedding_type="rotary", token_dropout=True),
    "gpt2": dict(vocab_size=101, n_embd=24, n_layer=2, n_head=3, n_positions=31, pad_token_id=1),
    "gpt_neo": dict(
        vocab_size=101,
        hidden_size=24,
        num_layers=2,
        num_heads=3,
        attention_types=[[["global", "local"], 1]],
        window_size=3,
        max_position_embeddings=31,
        pad_token_id=1,
    ),
    "llama": LLAMA,
    "mistral": dict(LLAMA, sliding_window=3),
    "qwen2": LLAMA,
    "qwen3": dict(LLAMA, head_dim=6),
    "smollm3": LLAMA,
    "t5": T5,
    "mt5": T5,
    "bart": SIDES,
    "marian": dict(SIDES, pad_token_id=1, decoder_start_token_id=1, eos_token_id=2),
    "vit": IMAGE,
    "deit": IMAGE,
    "wav2vec2": SOUND,
    "patchtst": SERIES,
}
ARCHITECTURES = {
    family.architecture(kind, head): kind
    for family in FAMILIES
    if family not in GRAPHS
    for kind in family.types
    for head in (None, *family.heads)
}
BODIES = {kind: name for name, kind in reversed(ARCHITECTURES.items())}
# One head of each kind gets every edit, the others those of what heads read, and every seventh.
THOROUGH = {kind: name for name, kind in reversed(ARCHITECTURES.items()) if name not in BODIES.values()}.values()
SEVENTH = 7
OF_HEADS = ("architectures", "classif", "label", "output", "pool", "tie", "token_id")
WORDS = (
    "relu",
    "silu",
    "gelu",
    "gelu_new",
    "tanh",
    "swish",
    "none",
    "mean",
    "max",
    "absolute",
    "relative_key",
    "group",
    "float64",
)


def inputs(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    if name.startswith(("ViT", "DeiT")):
        return {"pixel_values": torch.randn(2, 3, 12, 12, generator=generator)}
    if name.startswith("Wav2Vec2"):
        return {"input_values": torch.randn(2, 211, generator=generator)}
    if name.startswith("PatchTST"):
        return {"past_values": torch.randn(2, 23, 3, generator=generator)}
    both = sources_and_targets()
    targets = name.startswith(("T5", "MT5", "Bart", "Marian")) and not name.endswith(("EncoderModel", "Classification"))
    return {name: x for name, x in both.items() if targets or not name.startswith("decoder")}


def changes(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of every field the name and the edits of config.json: absent, null, flipped; by alias, the same and flipped."""
    stored = config.to_dict()
    # Named by hand: what `vars` has that no field declares, such as T5's dense_act_fn.
    names = {field.name for field in dataclasses.fields(config)} | stored.keys() | vars(config).keys()
    for name in sorted(n for n in names if not n.startswith("_")):
        value = stored.get(name, getattr(config, name, None))
        flipped = list(flips(value))
        for new in (ABSENT, None, *flipped):
            yield name, {name: new}
        for alias in [alias for alias, own in config.attribute_map.items() if own == name and alias != name]:
            for new in (value, *flipped):
                yield alias, {name: ABSENT, alias: new}
                yield alias, {alias: new}
    yield "architectures", {"architectures": stored["architectures"][0] if stored.get("architectures") else None}


def chosen(name: str, config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The changes that are tried with an architecture."""
    start = list(ARCHITECTURES).index(name)
    for n, (field, edit) in enumerate(changes(config), start):
        if name in THOROUGH or n % SEVENTH == 0 or any(word in field for word in OF_HEADS):
            yield field, edit


def flips(value: Any) -> Iterator[Any]:
    if value is None:
        yield from (True, 1, 2, "relu")
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value * 2, max(1, value - 1), 0)
    elif isinstance(value, float):
        yield from (value / 2 + 0.01, 0.0, 1.0)
    elif isinstance(value, str):
        yield from (word for word in WORDS if word != value)
    elif isinstance(value, list) and value:
        yield from (value[::-1], [value[0]] * len(value), [value[-1]] * len(value), value[:-1])
    elif isinstance(value, dict):
        for key, inner in value.items():
            named = isinstance(inner, str) and not isinstance(key, str)  # a label
            yield from ({**value, key: new} for new in list(flips(inner))[: 1 if named else None])


def outputs(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        out = model(**given)
    return {name: x for name in FIELDS if isinstance(x := getattr(out, name, None), torch.Tensor)}


def differs(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], real: list[torch.Tensor]) -> str | None:
    for name in theirs.keys() & ours.keys() - {"loss"}:
        if theirs[name].dtype != ours[name].dtype:
            return f"{name} is {ours[name].dtype}, expected {theirs[name].dtype}"
        a, b = theirs[name].float(), ours[name].float()
        if a.shape != b.shape:
            return f"{name} has shape {tuple(b.shape)}, expected {tuple(a.shape)}"
        for rows in real:
            if a.shape[:2] == rows.shape:
                a, b = a[rows], b[rows]
        gap = float((a - b).abs().max())
        if not gap <= 2e-4 * max(1.0, float(a.abs().max())):
            return f"{name} is off by {gap:.2g} where values reach {float(a.abs().max()):.2g}"
    return None


def fault(folder: Path, name: str, field: str, written_values: dict[str, Any]) -> str | None:
    """What is wrong with how the folder opens; None where it is right, or transformers has no answer itself.

    Without a name in it, transformers opens the body, and so does `models.load`.
    """
    name = name if written_values.get("architectures") else BODIES[ARCHITECTURES[name]]
    given = inputs(name)
    try:
        kind = getattr(transformers(), name)
        model, info = kind.from_pretrained(folder, output_loading_info=True)
        if info["missing_keys"] or info["mismatched_keys"] or info["unexpected_keys"]:
            return None  # some of its weights are drawn at random, or left out
        theirs = outputs(model.eval(), given)
    except Exception:
        return None
    try:
        ours = outputs(models.load(folder), given)
    except (ValueError, FileNotFoundError) as error:
        value = written_values.get(field)
        names = (field, *value) if isinstance(value, dict) else (field,)  # of rope_parameters the parameter
        return None if any(str(name) in str(error) for name in names) else f"an error that does not name it: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return differs(theirs, ours, [mask.bool() for name, mask in given.items() if name.endswith("mask")])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_setting_is_obeyed_or_refused(tmp_path, name):
    kind = getattr(transformers(), name).config_class
    config = kind(**CONFIGS[ARCHITECTURES[name]])
    written(tmp_path, name, config)
    values = json.loads((tmp_path / "config.json").read_text())
    assert fault(tmp_path, name, "", values) is None and outputs(models.load(tmp_path), inputs(name))
    wrong = []
    for field, edit in chosen(name, config):
        edited = {key: value for key, value in {**values, **edit}.items() if value is not ABSENT}
        try:
            (tmp_path / "config.json").write_text(json.dumps(edited))
        except TypeError:  # a value that config.json cannot have
            continue
        if (what := fault(tmp_path, name, field, edited)) is not None:
            wrong.append(f"{name}: { ({k: 'ABSENT' if v is ABSENT else v for k, v in edit.items()}) }: {what}"[:300])
    assert not wrong, f"{len(wrong)} settings:\n" + "\n".join(wrong)
