"""Gradients of every parameter, with and without gradient checkpointing, and dropout."""

from __future__ import annotations

import pytest
import torch

from integrations.transformers.families import BY_NAME, FAMILIES, batch, make, real
from slowly import alternate

pytestmark = pytest.mark.usefixtures("registered", "judged")
NAMES = [family.name for family in FAMILIES]


def loss(model, family, given):
    """A fixed linear function of the logits of real tokens."""
    logits = model(**given).logits
    kept = real(family, given)
    logits = logits if kept is None else logits[kept]
    return (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).mean()


def gradients(model, family, given):
    given = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in given.items()}
    loss(model, family, given).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def without_dropout(model):
    """In training, and nothing dropped: what gradient checkpointing needs."""
    for module in model.train().modules():
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side"), alternate(NAMES, ["right", "left"]))
def test_gradients_of_all_parameters(name, side):
    family = BY_NAME[name]
    given = batch(family, side=side)
    ours_off, eager_off, all_exact = [], [], []
    for seed in range(7, 11):
        ours, eager = (gradients(make(family, how, seed=seed), family, given) for how in ("saccade", "eager"))
        exact = gradients(make(family, "judge", dtype=torch.float64, seed=seed), family, given)
        assert ours.keys() == eager.keys() == exact.keys() and len(ours) > 10
        ours_off += [(ours[name].double() - exact[name]).norm() for name in exact]
        eager_off += [(eager[name].double() - exact[name]).norm() for name in exact]
        all_exact += [one.norm() for one in exact.values()]
    # Eager's error may be small by luck, of one parameter (a key's bias, say, has no gradient at all) and of one draw
    # of weights, where the two are sums of a few roundings: all together.
    of_ours, of_eager, size = (torch.stack(each).norm() for each in (ours_off, eager_off, all_exact))
    assert of_ours <= 2 * of_eager
    assert of_eager < 1e-4 * size


@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing_changes_nothing(name):
    family = BY_NAME[name]
    given = batch(family)
    plain = gradients(without_dropout(make(family, "saccade")), family, given)
    model = without_dropout(make(family, "saccade"))
    model.activation_checkpointing_enable()
    checkpointed = gradients(model, family, given)
    assert plain.keys() == checkpointed.keys()
    for parameter, gradient in plain.items():
        torch.testing.assert_close(checkpointed[parameter], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_dropout_drops_in_training_and_only_there(name):
    family = BY_NAME[name]
    model, given = without_dropout(make(family, "saccade")), batch(family)
    config = model.config
    attentions = [m for m in model.modules() if hasattr(m, "scaling") and hasattr(m, "is_causal")]
    assert len(attentions) == config.num_hidden_layers
    for module in attentions:
        if isinstance(getattr(module, "dropout", None), torch.nn.Dropout):
            module.dropout.p = 0.5
        else:
            module.attention_dropout = 0.5

    def run(seed):
        torch.manual_seed(seed)
        return model(**given).logits

    assert torch.equal(run(1), run(1)) and not torch.allclose(run(1), run(2))
    model.eval()
    assert torch.equal(run(1), run(2))
    torch.testing.assert_close(run(1), make(family, "saccade")(**given).logits)
