"""Layers of equal width: what they compute, how many parameters they have, and that a step is the last row."""

from __future__ import annotations

import torch

from looped import looped
from saccade.benchmark.variants import ProblemSizes
from saccade.benchmark.variants.catalogue import all_contenders, contender_named
from saccade.benchmark.variants.data import normal
from saccade.benchmark.variants.layers import dilations_for
from saccade.benchmark.variants.measuring import distance

SIZES = ProblemSizes(2, 3, 3, 4, 4, 29, True)
E, L = 12, 29
LAYERS = [one for one in all_contenders() if one.kind == "layer"]


def runner(one, sizes=SIZES):
    return one.build(sizes, normal(sizes, seed=3), seed=5)


@looped("one", LAYERS)
@looped("causal", [True, False])
def test_a_layer_is_as_causal_as_it_says(one, causal):
    """A causal output sees all tokens up to its own and none after it; another one sees later ones, too."""
    sizes = SIZES._replace(causal=causal)
    if one.refusal(sizes):
        return
    made = runner(one, sizes)
    x, out = made.leaves[0], made.forward()
    assert out.shape == (2, L, E)
    (gradient,) = torch.autograd.grad(out[:, 7].sum(), x)
    reached = gradient.abs().sum((0, 2)) > 0
    assert bool(reached[8:].any()) != causal
    # Without a direction zeros are padded on both sides of each convolution: near an end some paths lead through them.
    assert bool(reached[:8].all() if causal else reached[7])


@looped("one", LAYERS)
def test_a_step_is_the_last_row(one):
    if one.refusal(SIZES):
        return
    made = runner(one)
    with torch.no_grad():
        last = made.forward()[:, -1:]
        if isinstance(made.decoding, str):
            assert len(made.decoding.split()) > 4
            return
        decoding = made.decoding()
        for _ in range(3):
            assert distance(decoding.step(), last).worst < 1e-4


PARAMETERS = {
    "attention": 4 * E**2,
    "LSTM": 4 * (2 * E**2 + 2 * E),
    "GRU": 3 * (2 * E**2 + 2 * E),
    "convolutions": 4 * (7 * E**2 + E),
    "dilated-convolutions": 4 * (3 * E**2 + E),  # 1 + 2 (1 + 3 + 9 + 27) = 81 >= 29, and 27 without the last
    "connected": L**2,
}


@looped("name", PARAMETERS)
def test_parameters(name):
    assert runner(contender_named(name)).parameters == PARAMETERS[name]


KEPT = {
    "attention": 2 * 2 * (L - 1) * E,  # keys and values of two sequences
    "LSTM": 2 * 2 * E,  # hidden and cell
    "GRU": 2 * E,
    "convolutions": 2 * 4 * 6 * E,
    "dilated-convolutions": 2 * 2 * (1 + 3 + 9 + 27) * E,
    "connected": 2 * L * E,
}


@looped("name", KEPT)
def test_what_decoding_keeps(name):
    with torch.no_grad():
        assert runner(contender_named(name)).decoding().kept == 4 * KEPT[name]


def test_dilated_convolutions_reach_the_whole_length():
    for length in (2, 3, 9, 10, 27, 28, 1000, 8192):
        dilations = dilations_for(length)
        assert 1 + 2 * sum(dilations) >= length
        assert len(dilations) == 1 or 1 + 2 * sum(dilations[:-1]) < length
    made = runner(contender_named("dilated-convolutions"))
    (gradient,) = torch.autograd.grad(made.forward()[:, -1].sum(), made.leaves[0])
    assert bool((gradient.abs().sum((0, 2)) > 0).all())


def test_convolutions_are_those_of_torch_with_gelu_between():
    made = runner(contender_named("convolutions"))
    x, *parameters = made.leaves
    features = x.transpose(1, 2)
    for number, (weight, bias) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
        features = torch.nn.functional.gelu(features) if number else features
        columns = torch.nn.functional.pad(features, (6, 0)).unfold(2, 7, 1)
        features = torch.einsum("bilk,oik->bol", columns, weight) + bias[:, None]
    assert distance(made.forward(), features.transpose(1, 2)).worst < 1e-5


def test_connected_is_a_triangle_of_weights():
    made = runner(contender_named("connected"))
    x, weight = made.leaves
    right = torch.einsum("ij,bje->bie", weight * torch.ones(L, L).tril(), x)
    assert distance(made.forward(), right).worst < 1e-5
    assert contender_named("connected").needs(SIZES) == 4 * 4 * L**2


def test_recurrent_layers_each_way_need_an_even_width():
    odd = ProblemSizes(1, 3, 3, 5, 5, 8, False)
    assert contender_named("LSTM").refusal(odd) == "one each way takes half of the width each, but the width is 15"
    assert contender_named("LSTM").refusal(odd._replace(causal=True)) == ""
    assert runner(contender_named("GRU"), SIZES._replace(causal=False)).parameters == 2 * 3 * (E * 6 + 6 * 6 + 12)


def test_tokens_are_the_queries_side_by_side():
    made = runner(contender_named("GRU"))
    query, _, _ = normal(SIZES, seed=3)
    assert torch.equal(made.leaves[0][1, 11], torch.cat([query[1, head, 11] for head in range(3)]))
