"""The encoder-decoder: who reaches whom, padding on both sides, cached decoding."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from looped import looped
from saccade import FromTensor, Padding, Window
from saccade.nn import AttentionConfig, BlockConfig, Transformer
from saccade.positions import RotaryConfig, T5Config

B, LS, LT, WIDTH = 3, 11, 7, 20
CONFIG = BlockConfig(AttentionConfig(WIDTH, 5, kv_heads=1, positions=RotaryConfig()), hidden=17)
SOURCE, TARGET = (5, 11, 2), (7, 3, 6)  # real tokens of each item


def make(config=CONFIG, layers=(3, 2), **options) -> Transformer:
    return Transformer(config, layers, **options).double().eval()


def tokens(length) -> torch.Tensor:
    return torch.randn(B, length, WIDTH, dtype=torch.float64, requires_grad=True)


def real(lengths, longest, side):
    kept = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return kept.flip(1) if side == "left" else kept


def test_the_three_patterns():
    """Gradients tell who reaches whom: all of the source, and the target up to each token."""
    model, source, target = make(), tokens(LS), tokens(LT)
    out = model(source, target)
    assert out.shape == (B, LT, WIDTH)
    for t in range(LT):
        of_source, of_target = torch.autograd.grad(out[1, t].sum(), (source, target), retain_graph=True)
        assert (of_source[1].abs().amax(-1) > 0).all()
        reached = of_target[1].abs().amax(-1) > 0
        assert reached.tolist() == [other <= t for other in range(LT)]
        assert (of_source[[0, 2]] == 0).all()


def test_the_source_is_bidirectional():
    model, source = make(), tokens(LS)
    memory = model.encode(source)
    (grad,) = torch.autograd.grad(memory[0, 0].sum(), source)
    assert (grad[0].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_both_sides_changes_nothing_at_real_tokens(side):
    model, source, target = make(), tokens(LS), tokens(LT)
    real_source, real_target = real(SOURCE, LS, side), real(TARGET, LT, side)
    out = model(
        torch.where(real_source[..., None], source, torch.nan),
        torch.where(real_target[..., None], target, torch.nan),
        source_padding=Padding(real_source),
        target_padding=Padding(real_target),
    )
    for item in range(B):
        alone = model(source[item, real_source[item]][None], target[item, real_target[item]][None])
        torch.testing.assert_close(out[item, real_target[item]], alone[0])
    grads = torch.autograd.grad(out[real_target].sum(), (source, target))
    for grad, kept in zip(grads, (real_source, real_target), strict=True):
        assert grad.isfinite().all()
        assert (grad[~kept] == 0).all()
        assert (grad[kept].abs().amax(-1) > 0).any()


@pytest.mark.parametrize("given", ["source", "target"])
def test_padding_on_one_side_alone(given):
    model, source, target = make(), tokens(LS), tokens(LT)
    kept = real(SOURCE, LS, "right") if given == "source" else real(TARGET, LT, "right")
    out = model(source, target, **{f"{given}_padding": Padding(kept)})
    for item in range(B):
        s = source[item, kept[item]] if given == "source" else source[item]
        t = target[item, kept[item]] if given == "target" else target[item]
        torch.testing.assert_close(out[item, : len(t)], model(s[None], t[None])[0])


@pytest.mark.parametrize("chunks", [[1] * LT, [3, 1, 1, 2], [LT]])
def test_cached_decoding_is_the_parallel_forward(chunks):
    model, source, target = make(), tokens(LS), tokens(LT)
    padding = Padding(SOURCE)
    memory, cache = model.encode(source, padding=padding), model.cache()
    parts = [model.decode(part, memory, source_padding=padding, cache=cache) for part in target.split(chunks, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(source, target, source_padding=padding))


@pytest.mark.parametrize("grad", [False, True])
def test_items_that_read_one_source_share_its_keys(grad):
    """With a cache: two targets of each source, then only of sources 2 and 0, then three of each of those."""
    model, source, target = make(), tokens(LS), torch.randn(6, LT, WIDTH, dtype=torch.float64)
    padding, cache = Padding(SOURCE), model.cache()
    memory = model.encode(source, padding=padding)
    with torch.set_grad_enabled(grad):
        first = model.decode(target[:, :3], memory, source_padding=padding, cache=cache)
    held = cache.contexts[0].nbytes
    rows, sources = torch.tensor([4, 5, 5, 1, 0, 1]), torch.tensor([2, 0])
    cache.reorder(rows, sources)
    assert cache.contexts[0].nbytes == held * 2 // 3
    chosen, lengths = memory[sources], Padding([SOURCE[2], SOURCE[0]])
    with torch.set_grad_enabled(grad):
        second = model.decode(target[rows, 3:], chosen, source_padding=lengths, cache=cache)
    twice = [0, 0, 1, 1, 2, 2]
    whole = model(source[twice], target, source_padding=Padding([SOURCE[n] for n in twice]))
    torch.testing.assert_close(first, whole[:, :3])
    torch.testing.assert_close(second, whole[rows, 3:])


def test_items_that_read_one_source_divide_evenly():
    model, cache = make(), make().cache()
    memory = model.encode(tokens(LS))
    with pytest.raises(ValueError, match="context: has batch 3, expected x's 4, or a part of it that divides it"):
        model.decode(torch.zeros(4, LT, WIDTH, dtype=torch.float64), memory, cache=cache)
    with pytest.raises(ValueError, match="context: has batch 3, expected x's 6$"):
        model.decode(torch.zeros(6, LT, WIDTH, dtype=torch.float64), memory)


def test_masks_reach_their_attention():
    model, source, target = make(), tokens(LS), tokens(LT)
    out = model(source, target, source_mask=Window(0, 0), target_mask=Window(0, 0), context_mask=Padding([1] * B))
    of_source, of_target = torch.autograd.grad(out[0, 3].sum(), (source, target))
    assert (of_source[0].abs().amax(-1) > 0).tolist() == [key == 0 for key in range(LS)]
    assert (of_target[0].abs().amax(-1) > 0).tolist() == [key == 3 for key in range(LT)]


def test_encoder_and_decoder_may_differ():
    attention = AttentionConfig(WIDTH, 4, positions=T5Config(bidirectional=False))
    decoder = BlockConfig(attention, hidden=13, placement="post", norm="layer", activation="gelu")
    model = make(decoder=decoder)
    assert len(model.encoder.blocks) == 3
    assert len(model.decoder.blocks) == 2
    assert model.decoder.blocks[0].cross.config.heads == 4
    assert model.decoder.blocks[0].cross.config.positions is None
    assert model(tokens(LS), tokens(LT)).isfinite().all()


def test_checkpointing_is_one_flag():
    model = make(checkpointing=True)
    plain = make()
    plain.load_state_dict(model.state_dict())
    source, target = tokens(LS), tokens(LT)
    grads = [torch.autograd.grad(m(source, target).sum(), (source, target)) for m in (model, plain)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@looped(
    ("call", "message"),
    [
        (lambda: make(decoder=dataclasses.replace(CONFIG, placement="parallel")), "cross: parallel blocks"),
        (
            lambda: make()(tokens(LS)[..., :19], tokens(LT)),
            r"x: expected shape \(batch, length, 20\), got \(3, 11, 19\)",
        ),
        (lambda: make()(tokens(LS)[:2], tokens(LT)), "context: has batch 2, expected x's 3"),
        (lambda: make(layers=(0, 2)), "layers: must be at least 1, got 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("side", ["source", "target"])
def test_padding_is_a_padding(side):
    length = LS if side == "source" else LT
    with pytest.raises(TypeError, match=f"{side}_padding: expected saccade.Padding, got Tensor"):
        make()(tokens(LS), tokens(LT), **{f"{side}_padding": torch.ones(B, length, dtype=torch.bool)})


def test_a_tensor_as_context_mask_goes_with_padding():
    model, source, target = make(), tokens(LS), tokens(LT)
    shown = torch.rand(LT, LS) < 0.7
    shown[:, 0] = True
    out = model(source, target, context_mask=shown, source_padding=Padding(SOURCE))
    memory = model.encode(source, padding=Padding(SOURCE))
    expected = model.decoder(target, context=memory, context_mask=Padding(SOURCE) & FromTensor(shown))
    torch.testing.assert_close(out, expected)


def test_relative_buckets_look_back_only_in_the_decoder():
    model = make(BlockConfig(AttentionConfig(WIDTH, 4, positions=T5Config()), hidden=17))
    assert model.encoder.positions.bidirectional
    assert not model.decoder.positions.bidirectional


def test_layers_are_two_numbers():
    with pytest.raises(ValueError, match="layers: expected an int or .* got .1, 2, 3."):
        make(layers=(1, 2, 3))
