"""Two layers learn to copy and to reverse, exactly, with each way of telling positions; and why some cannot."""

from __future__ import annotations

import pytest
import torch

from looped import looped
from nn.tasks import LENGTH, MODELS, SCHEMES, SYMBOLS, TASKS, DecoderOnly, EncoderDecoder, train, words
from saccade.nn import AttentionConfig, BlockConfig, Encoder
from saccade.positions import AlibiConfig, RotaryConfig, T5Config

B, WIDTH = 3, 20
SIZES = {"width": WIDTH, "heads": 5, "layers": 2}


# What takes longest (ALiBi, no positions) is here once; benchmarks/tasks.py trains every combination.
CASES = [
    ("decoder", "none", "copy"),
    *(("decoder", scheme, task) for scheme in ("sinusoidal", "learned", "rotary, half", "T5") for task in TASKS),
    ("decoder", "rotary, interleaved", "reverse"),
    ("decoder", "ALiBi", "copy"),
    ("decoder", "ALiBi, learned", "reverse"),
    ("encoder-decoder", "learned", "copy"),
    ("encoder-decoder", "learned", "reverse"),
]


def other_order(given: torch.Tensor) -> torch.Tensor:
    """The same symbols, each somewhere else."""
    return given.roll(2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "scheme", "task"), CASES)
def test_every_symbol_of_every_fresh_word_is_right(kind, scheme, task, threads):
    threads(1)
    run = train(kind, SCHEMES[scheme], TASKS[task], seed=0)
    assert run.solved, f"not after {run.steps} steps"
    fresh = words(1021, LENGTH, torch.Generator().manual_seed(2_000_003))
    assert torch.equal(run.model.solve(fresh), TASKS[task](fresh))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_solving_symbol_by_symbol_is_the_parallel_forward(kind, scheme):
    """What `solve` decodes through caches is what the forward of training would have chosen."""
    model = MODELS[kind](SCHEMES[scheme], **SIZES).double()
    given = words(B, LENGTH, torch.Generator().manual_seed(0))
    answer = model.solve(given)
    assert answer.shape == (B, LENGTH)
    assert torch.equal(model(given, answer).argmax(-1), answer)


def test_an_encoder_decoder_without_positions_cannot():
    """Its encoder sees a set: the source in another order gives the same logits, though the answer is another."""
    model = EncoderDecoder(None, **SIZES).double()
    given = words(B, LENGTH, torch.Generator().manual_seed(0))
    answer = TASKS["copy"](given)
    assert not torch.equal(other_order(given), given)
    torch.testing.assert_close(model(other_order(given), answer), model(given, answer))


@looped("scheme", [name for name in SCHEMES if SCHEMES[name] is not None])
def test_with_positions_an_encoder_decoder_tells_orders_apart(scheme):
    model = EncoderDecoder(SCHEMES[scheme], **SIZES).double()
    given = words(B, LENGTH, torch.Generator().manual_seed(0))
    answer = TASKS["copy"](given)
    difference = model(other_order(given), answer) - model(given, answer)
    assert (difference.abs().amax((1, 2)) > 1e-3).all()


@pytest.mark.parametrize(("layers", "told"), [(1, False), (2, True)])
def test_a_decoder_without_positions_needs_two_layers(layers, told):
    """One layer reads a set of tokens. A second reads what the causal mask has made of each: how many are before it."""
    model = DecoderOnly(None, **{**SIZES, "layers": layers}).double()
    given = words(B, LENGTH, torch.Generator().manual_seed(0))
    answer = words(B, LENGTH, torch.Generator().manual_seed(1))
    difference = (model(other_order(given), answer) - model(given, answer)).abs().amax((1, 2))
    assert ((difference > 1e-3) == told).all()
    assert told or (difference < 1e-12).all()


@pytest.mark.parametrize(
    ("scheme", "mirrored"), [(AlibiConfig(), True), (RotaryConfig(), False), (T5Config(), False)], ids=str
)
def test_alibi_in_an_encoder_does_not_know_left_from_right(scheme, mirrored):
    """Its penalty is the same on both sides, so a word backwards gives the memory backwards; a marker fixes that."""
    encoder = Encoder(BlockConfig(AttentionConfig(WIDTH, 5, positions=scheme)), 2).double()
    x = torch.randn(B, LENGTH, WIDTH, dtype=torch.float64)
    difference = (encoder(x.flip(1)) - encoder(x).flip(1)).abs().amax((1, 2))
    assert ((difference < 1e-12) == mirrored).all()
    assert mirrored or (difference > 1e-3).all()


def test_words_are_of_all_symbols():
    drawn = words(997, 7, torch.Generator().manual_seed(0))
    assert drawn.shape == (997, 7)
    assert sorted(set(drawn.flatten().tolist())) == list(range(SYMBOLS))
