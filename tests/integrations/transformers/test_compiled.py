"""A registered model under torch.compile: one graph, eager's numbers, and the flag heard again after it changes."""

from __future__ import annotations

import pytest
import torch

from integrations.transformers.families import BY_NAME, FAMILIES, assert_as_good, batch, make, real

pytestmark = pytest.mark.usefixtures("registered", "judged")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
@pytest.mark.filterwarnings("ignore")  # of the compiler about the models' own code
def test_one_graph_with_padding(name):
    family = BY_NAME[name]
    given = batch(family, side="left" if family.causal and not family.encoder_decoder else "right")
    model = make(family, "saccade")
    # Of GPT-OSS the loop over experts chosen by the data is its own break.
    compiled = torch.compile(model, backend="aot_eager", fullgraph=name != "gpt-oss")
    with torch.no_grad():
        ours = compiled(**given).logits
        eager = make(family, "eager")(**given).logits
        exact = make(family, "judge", dtype=torch.float64)(
            **{key: x.double() if x.is_floating_point() else x for key, x in given.items()}
        ).logits
    assert_as_good(ours, eager, exact, real(family, given))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_gradients_of_a_compiled_model(name):
    family = BY_NAME[name]
    given = batch(family)
    plain, model = make(family, "saccade"), make(family, "saccade")
    kept = real(family, given)
    plain(**given).logits[kept].square().mean().backward()
    torch.compile(model, backend="aot_eager", fullgraph=True)(**given).logits[kept].square().mean().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5 * one.grad.abs().max().item())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generation_with_a_compiled_forward_and_a_static_cache(name):
    """The masks then come from outside of the graph, compact, and are read inside of it."""
    family = BY_NAME[name]
    given = batch(family, side="left")
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}
    eager = make(family, "eager").generate(**given, **options)
    model = make(family, "saccade")
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert torch.equal(model.generate(**given, **options), eager)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_attentions_asked_of_a_compiled_model():
    family = BY_NAME["llama"]
    given, model = batch(family), make(family, "saccade")
    plain = model(**given, output_attentions=True).attentions  # and transformers has installed its hooks
    compiled = torch.compile(model, backend="aot_eager")
    assert not compiled(**given).get("attentions")
    asked = compiled(**given, output_attentions=True).attentions
    assert len(asked) == 2
    for one, other in zip(asked, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
