"""Generation with caches: the same tokens as eager's, and the same numbers as one pass over the whole."""

from __future__ import annotations

import pytest
import torch

from integrations.transformers.families import BY_NAME, FAMILIES, batch, make
from looped import looped
from slowly import alternate

pytestmark = pytest.mark.usefixtures("registered")
NAMES = [family.name for family in FAMILIES if family.generates]
DECODERS = [family.name for family in FAMILIES if family.generates and not family.encoder_decoder]
NEW = 9  # past the windows of 5 and of 5 + the padding


def prompt(family, side):
    """What generation starts from: of an encoder-decoder, what the encoder reads."""
    side = "right" if family.encoder_decoder and side == "left" else side
    return {name: x for name, x in batch(family, side=side).items() if not name.startswith("decoder")}


def generated(name, how, side, **more):
    family = BY_NAME[name]
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **more}
    return make(family, how).generate(**prompt(family, side), **options)


@pytest.mark.parametrize(("name", "side", "cache"), alternate(NAMES, ["none", "left"], [None, "static"]))
def test_greedy_tokens(name, side, cache):
    more = {} if cache is None else {"cache_implementation": cache}
    ours, eager = (generated(name, how, side, **more) for how in ("saccade", "eager"))
    assert ours.shape[1] >= NEW and torch.equal(ours, eager)


@pytest.mark.parametrize("name", NAMES)
def test_beam_search(name):
    ours, eager = (generated(name, how, "left", num_beams=3) for how in ("saccade", "eager"))
    assert torch.equal(ours, eager)


def test_attentions_while_generating():
    kinds = {
        how: generated("llama", how, "left", output_attentions=True, return_dict_in_generate=True)
        for how in ("saccade", "eager")
    }
    steps = list(zip(kinds["saccade"].attentions, kinds["eager"].attentions, strict=True))
    assert len(steps) == NEW
    for ours, eager in steps[1:]:
        for one, other in zip(ours, eager, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@looped("static", [False, True])
@looped("name", DECODERS)
def test_a_text_read_in_pieces_is_the_text_read_at_once(name, static):
    from transformers import DynamicCache, StaticCache

    family = BY_NAME[name]
    model = make(family, "saccade", dtype=torch.float64)
    tokens = torch.randint(3, 58, (2, 17))
    kept = torch.ones_like(tokens)
    kept[1, :3] = 0
    places = (kept.cumsum(1) - 1).clamp(min=0)
    cache = StaticCache(config=model.config, max_cache_len=23) if static else DynamicCache(config=model.config)
    pieces = []
    with torch.no_grad():
        # The same function for the whole: in pieces, windows have to reach back over a cache that forgets.
        whole = model(tokens, attention_mask=kept, position_ids=places, use_cache=False).logits
        for start, stop in [(0, 7), (7, 8), (8, 14), (14, 17)]:
            out = model(
                tokens[:, start:stop],
                attention_mask=kept[:, :stop],
                position_ids=places[:, start:stop],
                past_key_values=cache,
            )
            pieces.append(out.logits)
    together = torch.cat(pieces, 1)
    # Rotary angles and some norms are float32 in any dtype, and are rounded alike in both.
    torch.testing.assert_close(together[kept.bool()], whole[kept.bool()], rtol=1e-6, atol=1e-6)
