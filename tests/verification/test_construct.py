"""Classes are made from the user's arguments, their own defaults, and names that say what they are."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from saccade.verification import Promise, Undecided
from saccade.verification.subject._construct import construct
from saccade.verification.subject._reading import Hints
from saccade.verification.subject.discovery._discover import discover


class Keeps(nn.Module):
    """Keeps what it was made of."""

    def __init__(self, **given):
        super().__init__()
        self.given = given


class Usual(Keeps):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, num_kv_heads, head_dim, qkv_bias=False):
        super().__init__(
            d_in=d_in,
            d_out=d_out,
            context_length=context_length,
            dropout=dropout,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            qkv_bias=qkv_bias,
        )


class Defaulted(Keeps):
    def __init__(self, dim=40, heads=5, attn_dropout=0.0, causal=False):
        super().__init__(dim=dim, heads=heads, attn_dropout=attn_dropout, causal=causal)


class Odd(Keeps):
    def __init__(self, dim, frobnication):
        super().__init__(dim=dim, frobnication=frobnication)


@dataclass
class Inner:
    n_embd: int
    n_head: int = 3


@dataclass
class Outer:
    attention: Inner
    block_size: int


class Nested(Keeps):
    def __init__(self, config: Outer):
        super().__init__(config=config)


class Read(Keeps):
    def __init__(self, config):
        super().__init__(read=(config.hidden_size, config.num_attention_heads))


class Keyed(Keeps):
    def __init__(self, cfg):
        super().__init__(read=(cfg["emb_dim"], cfg["n_heads"], cfg["drop_rate"]))


class Refuses(nn.Module):
    def __init__(self, dim, heads):
        raise ValueError(f"dim {dim} is no prime")


def given(target, arguments=None, hints=None, promise=None):
    return construct(target, arguments or {}, hints, promise)[0].given


def test_names_that_say_what_they_are():
    made = given(Usual)
    assert made["d_in"] == made["d_out"] == made["num_heads"] * made["head_dim"]
    assert made["num_heads"] % made["num_kv_heads"] == 0
    assert made["num_heads"] > made["num_kv_heads"]
    assert 0 < made["dropout"] < 1  # a dropout of nothing could not be seen to work
    assert made["context_length"] >= 32
    assert made["qkv_bias"] is False


def test_the_users_arguments_and_hints_win():
    made = given(Usual, {"d_in": 30, "dropout": 0.0}, Hints(num_heads=5))
    assert (made["d_in"], made["d_out"], made["num_heads"], made["head_dim"]) == (30, 30, 5, 6)
    assert made["dropout"] == 0.0
    assert given(Usual, None, Hints(embed_dim=20))["d_in"] == 20


def test_defaults_stay_but_for_a_dropout_of_nothing():
    assert given(Defaulted) == {"dim": 40, "heads": 5, "attn_dropout": 0.1, "causal": False}
    assert given(Defaulted, promise=Promise(causal=True))["causal"] is True


def test_configurations():
    config = given(Nested)["config"]
    assert isinstance(config.attention, Inner)
    assert config.attention.n_head == 3
    assert config.block_size >= 32
    width, heads = given(Read)["read"]
    assert width % heads == 0
    width, heads, dropout = given(Keyed)["read"]
    assert width % heads == 0
    assert dropout == 0.1


def test_what_says_nothing_is_named_with_its_option():
    with pytest.raises(
        Undecided, match="Odd must be given 'frobnication', and its name does not show what it is"
    ) as raised:
        construct(Odd, {})
    assert raised.value.candidates == (("give frobnication to the constructor", "--arg frobnication=VALUE"),)
    assert given(Odd, {"frobnication": 3})["frobnication"] == 3


def test_a_constructor_that_raises_is_told_with_its_line():
    with pytest.raises(
        Undecided, match=r"Refuses\(dim=24, heads=4\) raised ValueError: dim 24 is no prime at .*test_construct"
    ):
        construct(Refuses, {})


def test_arguments_of_the_call_are_left_over():
    class Called(Keeps):
        def __init__(self, dim=8):
            super().__init__(dim=dim)

        def forward(self, x, temperature):
            return x

    module, left = construct(Called, {"dim": 12, "temperature": 2.0})
    assert (module.given, left) == ({"dim": 12}, {"temperature": 2.0})


def test_parameters_are_the_same_every_time_and_the_state_is_kept():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second = (construct(nn.Linear, {"in_features": 3, "out_features": 2})[0] for _ in range(2))
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_class_can_be_made_again_with_other_weights():
    class Random(nn.Module):
        def __init__(self, embed_dim: int, bias: bool = True):
            super().__init__()
            self.proj = nn.Linear(embed_dim, embed_dim, bias=bias)

        def forward(self, x):
            return self.proj(x)

    subject = discover(Random, Hints(embed_dim=7), arguments={"bias": False})
    other = subject.remade()
    assert other.module.proj.weight.shape == (7, 7) and other.module.proj.bias is None and not other.module.training
    assert not torch.equal(other.module.proj.weight, subject.module.proj.weight)
    assert discover(Random(7)).remade() is None


@dataclass
class Widths:
    n_embd: int = 32
    n_head: int = 4


class OfSizes(nn.Module):
    def __init__(self, config: Widths):
        super().__init__()
        self.config = config


class OfAttributes(nn.Module):
    def __init__(self, config):  # type: ignore[no-untyped-def]
        super().__init__()
        self.config = config
        self.width = (config.n_embd, config.n_head)


@pytest.mark.parametrize("kind", [OfSizes, OfAttributes])
def test_what_is_given_reaches_the_configuration(kind: type) -> None:
    made, left = construct(kind, {"n_embd": 64, "elsewhere": 3})
    assert (made.config.n_embd, made.config.n_head) == (64, 4)
    assert left == {"elsewhere": 3}


def test_an_argument_that_nothing_takes_is_no_guess() -> None:
    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value

    with pytest.raises(Undecided, match="nothing takes the argument 'embd_dim': a call takes query, key, value"):
        discover(attention, arguments={"embd_dim": 64})
    with pytest.raises(Undecided, match="its constructor takes embed_dim, num_heads, .*and a call takes query, key"):
        discover(torch.nn.MultiheadAttention(24, 4), arguments={"embd_dim": 64})
