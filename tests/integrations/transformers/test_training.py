"""Gradients of every parameter, with and without gradient checkpointing, and dropout."""

from __future__ import annotations

import pytest
import torch

from integrations.transformers.families import BY_NAME, FAMILIES, batch, make, real

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


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_all_parameters(name, side):
    family = BY_NAME[name]
    given = batch(family, side=side)
    ours, eager = (gradients(make(family, how), family, given) for how in ("saccade", "eager"))
    exact = gradients(make(family, "judge", dtype=torch.float64), family, given)
    assert ours.keys() == eager.keys() == exact.keys() and len(ours) > 10
    ours_off, eager_off = (torch.stack([(g[n].double() - exact[n]).norm() for n in exact]) for g in (ours, eager))
    # Of one parameter eager's error may be small by luck (a key's bias, say, has no gradient at all): all together.
    assert ours_off.norm() <= 2 * eager_off.norm()
    assert eager_off.norm() < 1e-4 * torch.stack([g.norm() for g in exact.values()]).norm()


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
