"""What cannot be done is said, once and clearly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saccade
from edited_models import MODELS, B, E, H, L
from saccade.intervention import Ablate, EditBias, EditMask, Freeze, Patch, Scale, Weights
from saccade.nn import AttentionConfig, BlockConfig, Decoder

LINEAR = nn.Linear(E, E)


def decoder(width: int = E, heads: int = H) -> Decoder:
    return Decoder(BlockConfig(AttentionConfig(width, heads)), 2)


def seen(model: nn.Module, *shape: int) -> saccade.monitoring.ModelWatch:
    with torch.no_grad(), saccade.watch(model, keep=True, alarms=False) as source:
        model(torch.randn(*shape))
    return source


MADE = [
    (lambda: Ablate([-1]), ValueError, "heads count from 0, got -1"),
    (lambda: Ablate("1"), TypeError, "heads must be an int, a list of ints or None"),
    (lambda: Ablate([True]), TypeError, "heads must be an int, got True"),
    (lambda: Ablate([0.5]), TypeError, "heads must be an int, got 0.5"),
    (lambda: Ablate(torch.ones(2)), TypeError, "heads must be an int, got a float32 tensor"),
    (lambda: Ablate([0], items=[-2]), ValueError, "items count from 0, got -2"),
    (lambda: Ablate([0], "none"), ValueError, "to must be 'zero', 'mean', 'resample' or a tensor, got 'none'"),
    (lambda: Ablate([0], "resample", seed="a"), TypeError, "seed must be an int, got 'a'"),
    (lambda: Scale([0], "a"), TypeError, r"factor must be a number or a tensor \(heads,\), got 'a'"),
    (lambda: Scale([0], float("nan")), ValueError, "factor must be finite, got nan"),
    (lambda: Scale([0], 2.0, what="weights"), ValueError, "what must be 'output' or 'logits', got 'weights'"),
    (lambda: EditMask([0]), TypeError, "mask: expected a mask value or a boolean tensor, got none"),
    (lambda: EditMask([0], torch.ones(3, 3)), TypeError, "mask must be a bool tensor"),
    (lambda: EditBias([0]), TypeError, "bias must be a tensor, ALiBi or RelativeBias"),
    (lambda: EditBias([0], torch.ones(3, 3, dtype=torch.bool)), TypeError, "bias must be of floating point"),
    (lambda: Weights([0]), TypeError, "function must be callable"),
    (lambda: Patch([0], LINEAR), TypeError, "source must be the result of `with saccade.watch.*, got Linear"),
    (lambda: Patch([0], saccade.watch(LINEAR)), ValueError, "source has kept no call: watch .* keep=True"),
    (lambda: Freeze([0], None), TypeError, "source must be the result of"),
    (lambda: Patch([0], seen(decoder(), B, L, E), "weight"), ValueError, "what must be one of output, weights, query"),
    (lambda: Patch([0], seen(decoder(), B, L, E), positions=[-1]), ValueError, "positions count from 0, got -1"),
    (lambda: saccade.intervene(3, {0: Ablate(0)}), TypeError, "model must be a torch.nn.Module, got 3"),
    (lambda: saccade.intervene(LINEAR, [Ablate(0)]), TypeError, "edits must be a dict of layers and edits, got a list"),
    (lambda: saccade.intervene(LINEAR, {}), ValueError, "edits must hold at least one edit"),
    (lambda: saccade.intervene(LINEAR, {0: []}), TypeError, "0 must have edits, such as .*, got none"),
    (lambda: saccade.intervene(LINEAR, {0: "zero"}), TypeError, "0 must have edits, such as .*, got 'zero'"),
    (lambda: saccade.intervene(LINEAR, {0: Ablate}), TypeError, "0 must have edits, such as .*, got"),
    (lambda: saccade.intervene(LINEAR, {0.5: Ablate(0)}), TypeError, "layers must be a number, name or path, got 0.5"),
]


@pytest.mark.parametrize("number", range(len(MADE)))
def test_when_it_is_made(number):
    make, kind, words = MADE[number]
    with pytest.raises(kind, match=words):
        make()


USED = [
    (Ablate([4, 7]), "heads: blocks.1.attention has query heads 0 to 3, got 4, 7"),
    (Ablate([0], items=[1, 2]), "items: blocks.1.attention has items 0 to 1, got 2"),
    (Ablate([0], torch.ones(1, 1, 6)), r"to: \(1, 1, 6\) does not broadcast to .* \(2, 1, 7, 5\) of blocks.1"),
    (Scale([0, 1], torch.ones(3)), r"factor: \(3,\) for 2 heads of blocks.1.attention; expected \(2,\)"),
    (EditMask([0], torch.ones(3, 5, dtype=torch.bool)), r"a mask of shape \(3, 5\) for 7 queries and 7 keys"),
    (EditBias([0], torch.ones(3, 5)), r"bias: shape \(3, 5\) does not broadcast"),
    (EditBias([0], saccade.ALiBi(torch.ones(3))), r"ALiBi has 3 slopes, expected one per query head \(4\)"),
    (Weights([0], lambda weights, rows: weights), "Weights is forward only, but a gradient is needed"),
]


@pytest.mark.parametrize("number", range(len(USED)))
def test_when_it_meets_a_call(number):
    edit, words = USED[number]
    with pytest.raises(ValueError, match=words), saccade.intervene(decoder(), {1: edit}) as run:
        run._model(torch.randn(B, L, E))


def test_one_item_has_no_other():
    block = saccade.intervene(model := decoder(), {1: Ablate([0], "resample")})
    with pytest.raises(ValueError, match="needs batches of several items"), block:
        model(torch.randn(1, L, E))


@pytest.mark.parametrize("given", [None, 3.0, torch.ones(1)])
def test_a_function_that_gives_something_else(given):
    block = saccade.intervene(model := decoder(), {1: Weights([0], lambda weights, rows: given)})
    words = r"function: expected weights of shape \(2, 1, 7, 7\) from it, got"
    with pytest.raises(ValueError, match=words), torch.no_grad(), block:
        model(torch.randn(B, L, E))


@pytest.mark.parametrize("key", [7, "blocks.7", "attn*"])
def test_layers_that_there_are_not(key):
    listed = "no attention call matches .*there are blocks.0.attention, blocks.1.attention"
    with pytest.raises(ValueError, match=listed), saccade.intervene(model := decoder(), {key: Ablate([0])}):
        model(torch.randn(B, L, E))


def test_a_head_in_the_place_of_a_layer():
    told = r"matches '1\.3'; a key names a layer, and heads go into the edit, as \{1: Ablate\(\[3\]\)\}; there"
    with pytest.raises(ValueError, match=told), saccade.intervene(model := decoder(), {"1.3": Ablate([3])}):
        model(torch.randn(B, L, E))


SOURCES = [
    ((3, L, E), {}, "output", "2 items and 4 heads there and 3 items and 4 heads here"),
    ((B, 5, E), {}, "output", r"7 queries and 7 keys there, 5 and 5 here; .* positions=\[...\]"),
    ((B, 5, E), {}, "key", "7 queries and 7 keys there, 5 and 5 here"),
    ((B, 5, E), {}, "weights", "7 queries and 7 keys there, 5 and 5 here"),
    ((B, L, 24), {"width": 24}, "query", r"query of blocks.0.attention is \(2, 4, 7, 5\), here \(2, 4, 7, 6\)"),
    ((B, L, E), {"heads": 2}, "output", "2 items and 4 heads there and 2 items and 2 heads here"),
]


@pytest.mark.parametrize("number", range(len(SOURCES)))
def test_a_source_of_something_else(number):
    shape, options, what, words = SOURCES[number]
    source, model = seen(decoder(), B, L, E), decoder(**options)
    with pytest.raises(ValueError, match=words), saccade.intervene(model, {0: Patch([0], source, what)}):
        model(torch.randn(*shape))


def test_a_source_without_the_call():
    source, model = seen(decoder(), B, L, E), MODELS["F.sdpa"].make()
    words = "it has no call .*; it is of another model, or kept only: blocks.0.attention, blocks.1.attention"
    with pytest.raises(ValueError, match=words), saccade.intervene(model, {0: Patch([0], source)}):
        model(torch.randn(B, L, E))


@pytest.mark.parametrize(
    ("positions", "length", "words"),
    [([9], L, "the source has 7 rows in blocks.0.attention, got 9"), ([2, 6], 5, "has 5 rows, got 6")],
)
def test_positions_that_there_are_not(positions, length, words):
    source, model = seen(decoder(), B, L, E), decoder()
    edit = Patch([0], source, "output", positions)
    with pytest.raises(ValueError, match=words), saccade.intervene(model, {0: edit}):
        model(torch.randn(B, length, E))


class Function(nn.Module):
    """A module whose forward is a function of one tensor (B, H, L, D)."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


CANNOT = {
    "lse": (lambda x: saccade.attention_with_lse(x, x, x)[0], "attention_with_lse is not supported"),
    "vmap": (lambda x: torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, x, x))(x), "a torch.func transform"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_calls_that_cannot_be_changed(name):
    function, words = CANNOT[name]
    with pytest.raises(ValueError, match=words), saccade.intervene(model := Function(function), {0: Ablate([0])}):
        model(torch.randn(B, H, L, 5))


def test_weights_by_hand_that_are_multiplied_twice_are_counted():
    """The edits of outputs reach the first product alone."""
    model = Function(lambda x: (w := (x @ x.mT).softmax(-1)) @ x + w @ (2 * x))
    with saccade.intervene(model, {0: Ablate([0])}) as run:
        model(torch.randn(B, H, L, 5))
    assert "multiplied a second time" in run.unobserved["attention by hand"].reason


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(E, E)))
    with pytest.raises(ValueError, match="model is TorchScript"):
        saccade.intervene(scripted, {0: Ablate([0])})
    model = nn.Sequential(scripted)
    with pytest.raises(ValueError, match="no attention call matches 0.*Not reached: 0: TorchScript"):  # noqa: SIM117
        with saccade.intervene(model, {0: Ablate([0])}):
            model(torch.randn(B, L, E))
