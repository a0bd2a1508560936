"""Every edit in models of transformers, whatever computes their attention, against dense weights that are rewritten.

Shape legend: B batch, L length, H heads, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import saccade
from edit_cases import CASES, HEADS, Case, Sizes, one_of_each_stage
from published import written
from rewritten_attention import Oracle
from saccade.intervention import Ablate, EditMask, Patch, Scale

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

B, L, H, D = 2, 7, 4, 5
REAL = torch.arange(L) < torch.tensor([5, 7])[:, None]
TARGETS = 9
SMALL: dict[str, Any] = {
    "hidden_size": H * D,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "intermediate_size": 17,
    "vocab_size": 23,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT: dict[str, Any] = {"vocab_size": 23, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART = {
    "d_model": H * D,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": H,
    "decoder_attention_heads": H,
    "encoder_ffn_dim": 17,
    "decoder_ffn_dim": 17,
    "vocab_size": 23,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "dropout": 0.0,
    "decoder_start_token_id": 2,
}
T5 = {
    "d_model": 17,
    "d_kv": D,
    "d_ff": 13,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": H,
    "vocab_size": 23,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}


class Family(NamedTuple):
    kind: str
    config: dict[str, Any]
    group: int = 1
    call: int = 1  # the one that is edited
    padded: bool = True  # and its rows are those of the tokens
    pair: bool = False  # an encoder and a decoder; the call is the decoder's to the encoder
    implementations: tuple[str, ...] = ("eager", "sdpa")
    by_hand: bool = False


FAMILIES = {
    "BERT": Family("Bert", SMALL),
    "RoBERTa": Family("Roberta", SMALL),
    "ESM": Family("Esm", {**SMALL, "hidden_size": 24, "position_embedding_type": "rotary", "mask_token_id": 3}),
    "DistilBERT": Family(
        "DistilBert",
        {
            **SMALL,
            "dim": H * D,
            "n_layers": 2,
            "n_heads": H,
            "hidden_dim": 17,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "GPT-2": Family(
        "GPT2",
        {
            **GPT,
            "n_embd": H * D,
            "n_layer": 2,
            "n_head": H,
            "n_positions": 32,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
    ),
    "GPT-Neo": Family(
        "GPTNeo",
        {
            **GPT,
            "hidden_size": H * D,
            "num_layers": 2,
            "num_heads": H,
            "window_size": 3,
            "intermediate_size": 17,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
        },
        implementations=("eager",),
        by_hand=True,
    ),
    "Llama": Family("Llama", {**SMALL, "num_key_value_heads": 2, "head_dim": 6}, group=2),
    "Gemma 2": Family(
        "Gemma2",
        {
            **SMALL,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "attn_logit_softcapping": 5.0,
            "sliding_window": 4,
            "query_pre_attn_scalar": 6,
        },
        group=2,
        implementations=("eager",),
    ),
    "BART": Family("Bart", BART, call=2, padded=False, pair=True),
    "T5": Family("T5", T5, call=2, padded=False, pair=True),
    "T5's decoder": Family("T5", T5, padded=False, pair=True),
    "ViT": Family("ViT", {**SMALL, "image_size": 6, "patch_size": 3, "num_channels": 1}, padded=False),
}


def model_of(family: Family, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family.kind}Config")(**family.config, attn_implementation=implementation)
    return getattr(transformers, f"{family.kind}Model")(config).eval().double()


def given(family: Family, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if family.kind == "ViT":
        return {"pixel_values": torch.randn(B, 1, 6, 6, dtype=torch.float64, generator=generator)}
    ids = {"input_ids": torch.randint(4, 23, (B, L), generator=generator), "attention_mask": REAL.long()}
    if family.pair:
        ids["decoder_input_ids"] = torch.randint(4, 23, (B, TARGETS), generator=generator)
    return ids


def run(model: nn.Module, family: Family, seed: int) -> Tensor:
    out: Tensor = model(**given(family, seed)).last_hidden_state
    return out[REAL] if family.padded else out


def by_hand(family: Family, seed: int, case: Case | None = None) -> tuple[Tensor, Oracle, nn.Module]:
    oracle = Oracle({} if case is None else {family.call: case.rewrite})
    transformers.AttentionInterface.register("oracle", oracle.transformers)
    transformers.AttentionMaskInterface.register("oracle", transformers.masking_utils.eager_mask)
    model = model_of(family, "eager" if family.by_hand else "oracle")
    if not family.by_hand:
        return run(model, family, seed), oracle, model

    def attn(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Any:
        """GPT-Neo computes its attention itself."""
        see = self.bias[:, :, : query.shape[2], : key.shape[2]]
        if attention_mask is not None:
            see = see & (attention_mask == 0)
        return oracle.attend(query, key, value, see, scale=1.0), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention, "_attn", attn)
        return run(model, family, seed), oracle, model


def sizes(family: Family, clean: dict[str, Tensor]) -> Sizes:
    rows, keys = clean["weights"].shape[2:]
    return Sizes(B, rows, keys, family.group, clean["value"].shape[-1], REAL if family.padded else None)


def gradients(out: Tensor, model: nn.Module, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    wanted = [*leaves, *model.parameters()]
    found = torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True)
    return [torch.zeros_like(one) if own is None else own for own, one in zip(found, wanted, strict=True)]


MODELS = [(name, one) for name in FAMILIES for one in FAMILIES[name].implementations]
# Every edit of attention that forms its weights, and of grouped heads in a kernel; elsewhere one of each stage.
EVERY_EDIT = (("BERT", "eager"), ("Llama", "sdpa"))
COMBINATIONS = [
    (*model, case)
    for number, model in enumerate(MODELS)
    for case in (CASES if model in EVERY_EDIT else one_of_each_stage(number))
]


@pytest.mark.parametrize(("name", "implementation", "case"), COMBINATIONS)
def test_edits_of_transformers(name, implementation, case):
    family = FAMILIES[name]
    model = model_of(family, implementation)
    with torch.no_grad(), saccade.watch(model, keep=True, alarms=False) as source:
        run(model, family, 2)
    clean = by_hand(family, 2)[1].calls[family.call]
    case = CASES[case](sizes(family, clean), source, clean)
    site = list(source.kept)[family.call]
    with torch.set_grad_enabled(not case.forward_only):
        expected, _, rewritten = by_hand(family, 1, case)
        with saccade.intervene(model, {site: case.edits}) as edited:
            found = run(model, family, 1)
    assert edited.changed == {site: 1} and not edited.unobserved
    # Eager functions normalise, and GPT-Neo multiplies, in float32 whatever the model is in.
    tolerance = {"atol": 2e-5, "rtol": 1e-4} if implementation == "eager" else {"atol": 1e-9, "rtol": 1e-7}
    torch.testing.assert_close(found, expected, **tolerance)
    if not case.forward_only:
        theirs = gradients(expected, rewritten, case.leaves)
        for own, wanted in zip(gradients(found, model, case.leaves), theirs, strict=True):
            torch.testing.assert_close(own, wanted, **tolerance)


GENERATED = 5
LEFT = torch.flip(REAL, [1]).long()
GENERATING = {
    "zero": lambda source: Ablate([1]),
    "zero of an item": lambda source: Ablate([1], items=1),
    "sharpened": lambda source: Scale([1], 2.0, what="logits"),
    "masked": lambda source: EditMask(HEADS, saccade.Window(2, 0)),
    "output": lambda source: Patch([1], source, "output", range(L)),
    "key": lambda source: Patch([1], source, "key", range(L)),
    "value at positions": lambda source: Patch([1], source, "value", [4, 6]),
}


def positions(mask: Tensor) -> Tensor:
    """As `generate` counts them: padding on the left is before the first."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)


@torch.no_grad()
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static", "disable_compile": True}])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", GENERATING)
def test_generating(name, implementation, cache):
    """With transformers' own caches, a static one among them, whose keys at the end hold nothing yet."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{**SMALL, "num_key_value_heads": 2, "head_dim": 6, "eos_token_id": None}, attn_implementation=implementation
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.mul_(4)  # so that edits are seen in the logits
    ids, other = torch.randint(4, 23, (2, B, L))
    with saccade.watch(model, keep=True, alarms=False) as source:
        model(other, attention_mask=LEFT, position_ids=positions(LEFT))
    edit = GENERATING[name](source)
    with saccade.intervene(model, {1: edit}) as run:
        found = model.generate(
            ids,
            attention_mask=LEFT,
            max_new_tokens=GENERATED,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **cache,
        )
    assert run.changed == {"model.layers.1.self_attn": GENERATED}
    mask = torch.cat([LEFT, torch.ones(B, GENERATED - 1, dtype=torch.long)], 1)
    whole = {"input_ids": found.sequences[:, :-1], "attention_mask": mask, "position_ids": positions(mask)}
    with saccade.intervene(model, {1: edit}):
        expected = model(**whole).logits[:, L - 1 :]
    assert not torch.allclose(expected, model(**whole).logits[:, L - 1 :], atol=1e-2)
    torch.testing.assert_close(torch.stack(found.logits, 1), expected, atol=1e-3, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["masked", "frozen", "of_weights", "zero"])
def test_the_attentions_that_a_model_returns_are_the_edited_ones(name):
    family = FAMILIES["BERT"]
    model = model_of(family, "eager")
    with saccade.watch(model, keep=True, alarms=False) as source:
        run(model, family, 2)
    clean = by_hand(family, 2)[1].calls[family.call]
    case = CASES[name](sizes(family, clean), source, clean)
    oracle = by_hand(family, 1, case)[1]
    with saccade.intervene(model, {list(source.kept)[family.call]: case.edits}):
        found = model(**given(family, 1), output_attentions=True).attentions[family.call]
    rows = REAL[:, None, :, None]
    expected = oracle.calls[family.call]["weights"]
    torch.testing.assert_close(found.masked_fill(~rows, 0.0), expected.masked_fill(~rows, 0.0), atol=2e-6, rtol=1e-5)


LOADED = {
    "BERT": ("BertModel", {}),
    "RoBERTa": ("RobertaModel", {"pad_token_id": 0}),
    "DistilBERT": ("DistilBertModel", {}),
    "GPT-2": ("GPT2LMHeadModel", {}),
    "Llama": ("LlamaForCausalLM", {"hidden_act": "silu"}),
    "BART": ("BartModel", {}),
    "T5": ("T5Model", {}),
    "ViT": ("ViTModel", {}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LOADED)
def test_the_same_edits_of_the_same_model_in_saccade(name, tmp_path):
    """Both open one folder; each call is edited under its own name. Saccade packs no batch with padding meanwhile."""
    family, (kind, changes) = FAMILIES[name], LOADED[name]
    config = getattr(transformers, f"{family.kind}Config")(**{**family.config, **changes})
    theirs = written(tmp_path, kind, config).double()
    ours = saccade.models.load(tmp_path, dtype=torch.float64).eval()
    assert isinstance(ours, nn.Module)

    def names(model: nn.Module) -> list[str]:
        with saccade.watch(model, alarms=False) as seen:
            model(**given(family, 1))
        return [call.name for call in seen.calls]

    def patches(model: nn.Module) -> list[Any]:
        with saccade.watch(model, keep=True, alarms=False) as source:
            model(**given(family, 2))
        return [Patch(HEADS, source, what, [4, 2]) for what in ("query", "key", "output")]

    window = saccade.Window(2, 2)
    for edits in (
        [Ablate(HEADS)],
        [Ablate([2], items=[1])],
        [Ablate([0, 3], "mean")],
        [EditMask(HEADS, window), Scale([0, 1], 3.0, what="logits")],
        patches,
    ):
        found = []
        for model in (theirs, ours):
            site = names(model)[family.call]
            own = edits(model) if callable(edits) else edits
            with saccade.intervene(model, {site: own}) as edited:
                out = model(**given(family, 1))
            assert edited.changed == {site: 1}
            state = out.logits if kind.endswith("LM") or "LMHead" in kind else out.last_hidden_state
            found.append(state[REAL] if family.padded else state)
        torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)


def test_a_model_may_take_a_view_of_the_output():
    """JetMoe's does: the output of an edited call is as contiguous as that of transformers' own function."""
    sizes = dict(vocab_size=23, hidden_size=20, num_hidden_layers=1, num_key_value_heads=2, kv_channels=6)
    config = transformers.JetMoeConfig(**sizes, intermediate_size=17, num_local_experts=3, num_experts_per_tok=2)
    model, ids = transformers.JetMoeForCausalLM(config).double().eval(), torch.arange(3, 10)[None]
    with torch.no_grad():
        expected = model(ids).logits
        with saccade.intervene(model, {"*": Scale([0], 1.0)}):
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=0)
