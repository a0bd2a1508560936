"""Gradients by distance, of layers whose gradients are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from looped import looped
from saccade.benchmark.variants import ProblemSizes
from saccade.benchmark.variants.catalogue import contender_named
from saccade.benchmark.variants.distance import gradients, paths

SIZES = ProblemSizes(1, 2, 2, 8, 8, 64, True)


class Decaying(nn.Module):
    """y_i = sum_j r^(i - j) x_j: the gradient at distance d is r^d."""

    def forward(self, x):
        ages = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        return torch.where(ages >= 0, 0.8**ages, 0.0) @ x


def test_a_known_decay_is_measured():
    """The same random vector meets every distance, so that the ratio is exact."""
    found = gradients([Decaying()], SIZES, seed=3)
    torch.testing.assert_close(found / found[0], 0.8 ** torch.arange(64, dtype=torch.float64), rtol=1e-4, atol=1e-9)


def test_the_norm_is_that_of_a_random_vector_through_the_jacobian():
    """At d = 0 it is the vector itself: a norm of 3.94 in 16 dimensions; the mean of 4 has a standard error of 0.35."""
    found = gradients([Decaying()], SIZES, seed=3)
    assert abs(float(found[0]) - 3.94) < 5 * 0.35


def path_of(name, sizes=SIZES, **more):
    told = []
    found = paths([contender_named(name)], sizes, seed=1, progress=told.append, **more)
    assert told == [name]
    return found


@looped("name", ["exact", "attention", "linear", "dilated-convolutions"])
def test_some_paths_do_not_depend_on_distance(name):
    (path,) = path_of(name)
    assert path.distances == (1, 2, 4, 8, 16, 32)
    assert path.gradients[0] == 1
    assert all(1 / 3 < gradient < 3 for gradient in path.gradients)
    assert path.reach() == 32


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_recurrent_paths_fade(name):
    (path,) = path_of(name)
    assert path.gradients[3] < 0.2
    assert path.gradients[5] < 1e-4
    assert path.reach() < 32


def test_a_window_ends_where_it_says_and_a_stack_reaches_on():
    one, four = path_of("window:size=9")
    assert (one.layers, four.layers) == (1, 4)
    assert one.gradients[3] > 0.1  # d = 8, the first key of nine
    assert one.gradients[4] == 0
    assert four.gradients[5] > 0  # d = 32 = 4 * 8
    (short,) = [path for path in path_of("window:size=8") if path.layers == 4]
    assert short.gradients[5] == 0  # 4 * 7 = 28


def test_convolutions_end_at_their_reach():
    (path,) = path_of("convolutions")
    assert path.gradients[4] > 0  # d = 16 of 4 * 6
    assert path.gradients[5] == 0


def test_what_cannot_take_part_has_no_path():
    assert path_of("linformer") == []
    (path,) = path_of("linformer", SIZES._replace(causal=False))
    assert path.reach() == 32


def test_it_repeats_and_leaves_the_generator():
    before = torch.get_rng_state()
    assert path_of("performer") == path_of("performer")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_layer_that_fails_says_why(monkeypatch):
    from saccade.benchmark.variants import distance

    def fail(*given):
        raise ValueError("no beads\nare left")

    monkeypatch.setattr(distance, "as_layer", fail)
    (path,) = path_of("GRU")
    assert path.note == "no beads are left"
    assert path.distances == ()


def test_nothing_from_the_token_before_is_told(monkeypatch):
    from saccade.benchmark.variants import distance

    monkeypatch.setattr(distance, "as_layer", lambda *given: nn.Identity())
    (path,) = path_of("GRU")
    assert path.note == "nothing arrives from the token before"
