"""`register` and `unregister`: what they switch on and off, and what they say where they cannot."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from integrations.transformers.families import BY_NAME, batch, make
from saccade.integrations.transformers import register, unregister
from saccade.interception._hooks.transformers import UnknownAttention


@pytest.fixture(autouse=True)
def as_it_was():
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    yield
    unregister()
    assert (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping) == before


def test_both_the_attention_and_the_mask_are_registered_and_taken_out_again():
    for interface in (AttentionInterface, AttentionMaskInterface):
        assert "saccade" not in interface()
    register()
    register()
    for interface in (AttentionInterface, AttentionMaskInterface):
        assert "saccade" in interface()
    unregister()
    unregister()
    for interface in (AttentionInterface, AttentionMaskInterface):
        assert "saccade" not in interface()


def test_the_last_registration_holds():
    family = BY_NAME["bert"]
    register(attentions="statistics")
    model = make(family, "saccade")
    assert not isinstance(model(**batch(family), output_attentions=True).attentions[0], torch.Tensor)
    register()
    assert isinstance(model(**batch(family), output_attentions=True).attentions[0], torch.Tensor)


def test_a_model_left_behind_raises_transformers_own_error():
    family = BY_NAME["llama"]
    register()
    model = make(family, "saccade")
    unregister()
    with pytest.raises(KeyError, match="`saccade` is not a valid attention implementation"):
        model(**batch(family))


def test_without_registration_the_name_is_refused_by_transformers():
    with pytest.raises(ValueError, match='attn_implementation="saccade"` is not supported'):
        make(BY_NAME["llama"], "saccade")


def test_from_pretrained_and_set_attn_implementation(tmp_path):
    register()
    family = BY_NAME["llama"]
    eager = make(family, "eager")
    eager.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="saccade").eval()
    assert loaded.config._attn_implementation == "saccade"
    given = batch(family)
    set_later = make(family, "eager")
    set_later.set_attn_implementation("saccade")
    assert torch.equal(loaded(**given).logits, set_later(**given).logits)
    torch.testing.assert_close(loaded(**given).logits[0], eager(**given).logits[0], rtol=1e-4, atol=1e-4)


BY_CLASS = {
    "GPTJModel": lambda: transformers.GPTJConfig(vocab_size=11, n_embd=8, n_layer=1, n_head=2, rotary_dim=2),
    "GPTNeoModel": lambda: transformers.GPTNeoConfig(
        vocab_size=11, hidden_size=8, num_layers=1, num_heads=2, attention_types=[[["global"], 1]]
    ),
    "FalconModel": lambda: transformers.FalconConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2
    ),
}


@pytest.mark.parametrize("name", BY_CLASS)
def test_a_model_that_chooses_a_class_by_the_name_says_so(name):
    original = transformers.PreTrainedModel.get_correct_attn_implementation
    register()
    register()
    with pytest.raises(ValueError, match=f"{name} computes attention in its own classes.*it has 'eager'"):
        transformers.AutoModel.from_config(BY_CLASS[name](), attn_implementation="saccade")
    assert transformers.AutoModel.from_config(BY_CLASS[name](), attn_implementation="eager") is not None
    unregister()
    assert transformers.PreTrainedModel.get_correct_attn_implementation is original
    from transformers.models.gptj.modeling_gptj import GPTJ_ATTENTION_CLASSES

    assert "saccade" not in GPTJ_ATTENTION_CLASSES


def test_a_part_of_a_model_can_be_set_alone():
    register()
    family = BY_NAME["llama"]
    model = make(family, "eager")
    model.set_attn_implementation({"": "saccade"})
    assert model.config._attn_implementation == "saccade"


@pytest.mark.parametrize("wrong", ["matrices", None, True])
def test_a_wrong_word_for_attentions(wrong):
    with pytest.raises(ValueError, match='attentions must be "weights" or "statistics", got'):
        register(attentions=wrong)


def test_a_string_of_ignored_names_is_refused():
    with pytest.raises(TypeError, match="ignore must be names.*got 'abc'"):
        register(ignore="abc")


@pytest.mark.parametrize("version", ["4.57.1", "4.0.0.dev0"])
def test_an_old_transformers_is_refused(version, monkeypatch):
    words = rf'this is transformers {version}; transformers >= 5.0 is needed: pip install "transformers>=5.0"'
    with monkeypatch.context() as patch:
        # The package replaces itself in sys.modules as it loads its parts.
        patch.setattr(sys.modules["transformers"], "__version__", version)
        with pytest.raises(ImportError, match=words):
            register()


def test_without_transformers_the_extra_is_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ImportError, match=r'not installed.*pip install "transformers>=5.0"'):
            register()


def one_layer():
    register()
    family = BY_NAME["llama"]
    model = make(family, "saccade")
    layer = model.model.layers[0].self_attn
    return layer, AttentionInterface()["saccade"]


def test_what_is_not_honoured_is_refused_by_name():
    layer, function = one_layer()
    query, key = torch.randn(2, 6, 5, 14), torch.randn(2, 2, 5, 14)
    out, second = function(layer, query, key, key, None, scaling=0.3, use_cache=True, position_ids=torch.arange(5))
    assert out.shape == (2, 5, 6, 14) and out.is_contiguous() and second is None
    for name, value, words in [
        ("cache", object(), "continuous batching"),
        ("head_mask", torch.ones(6), "factor on the weights"),
        ("block_indices", torch.zeros(2, 1, 5, 1), "chosen blocks of keys"),
        ("sinks", torch.zeros(2, 6, 5, 1), "a sink for each query"),
    ]:
        with pytest.raises(UnknownAttention, match=f"{name} of LlamaAttention .*{words}"):
            function(layer, query, key, key, None, scaling=0.3, **{name: value})
        function(layer, query, key, key, None, scaling=0.3, **{name: None})


def test_what_the_models_own_eager_function_would_pass_over_is_passed_over():
    layer, function = one_layer()
    query, key = torch.randn(2, 6, 5, 14), torch.randn(2, 2, 5, 14)
    plain = function(layer, query, key, key, None, scaling=0.3)[0]
    assert torch.equal(function(layer, query, key, key, None, scaling=0.3, visual_pos_masks=torch.ones(3))[0], plain)


class Stranger(torch.nn.Module):
    """An attention module of a file with no eager function to compare with."""

    is_causal = True


def test_an_unknown_argument_of_an_unknown_model_is_refused_until_it_is_ignored():
    register()
    query = torch.randn(2, 3, 5, 7)
    with pytest.raises(UnknownAttention, match=r"temperature of Stranger \(0.5\): not known here; register\(ignore="):
        AttentionInterface()["saccade"](Stranger(), query, query, query, None, temperature=0.5)
    register(ignore=["temperature"])
    out, _ = AttentionInterface()["saccade"](Stranger(), query, query, query, None, temperature=0.5)
    assert out.shape == (2, 5, 3, 7)
