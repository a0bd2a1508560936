"""Every family computes with Saccade what it computes with eager: as near to float64 as eager is itself."""

from __future__ import annotations

import pytest
import torch

from integrations.transformers.families import BY_NAME, FAMILIES, assert_as_good, batch, make, real, streams

pytestmark = pytest.mark.usefixtures("registered", "judged")
NAMES = [family.name for family in FAMILIES]
SIDES = {"pixels": ["none"]}  # images have no padding
PADDED = [(family.name, side) for family in FAMILIES for side in SIDES.get(family.reads, ["none", "right", "left"])]


def run(family, implementation, given, dtype=torch.float32, **more):
    model = make(family, implementation, dtype=dtype)
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
    with torch.no_grad():
        return model(**given, output_hidden_states=True, **more)


@pytest.mark.parametrize(("name", "side"), PADDED)
def test_logits_and_hidden_states(name, side):
    family = BY_NAME[name]
    given = batch(family, side=side)
    ours, eager = run(family, "saccade", given), run(family, "eager", given)
    exact = run(family, "judge", given, torch.float64)
    assert_as_good(ours.logits, eager.logits, exact.logits, real(family, given))
    compared = 0
    for stream, kept in streams(family, given):
        for states in zip(ours[stream], eager[stream], exact[stream], strict=True):
            assert_as_good(*states, kept)
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name):
    family = BY_NAME[name]
    given = batch(family)
    ours, eager = (run(family, how, given, torch.bfloat16).logits for how in ("saccade", "eager"))
    # The same rounded weights and inputs, in float64.
    rounded = {key: x.to(torch.bfloat16).double() if x.is_floating_point() else x for key, x in given.items()}
    model = make(family, "judge", dtype=torch.bfloat16).double()
    with torch.no_grad():
        exact = model(**rounded).logits
    assert ours.dtype == torch.bfloat16
    assert_as_good(ours, eager, exact, real(family, given))


def test_a_padded_batch_gives_what_its_samples_give_alone():
    family = BY_NAME["mistral"]
    model = make(family, "saccade", dtype=torch.float64)
    given = batch(family, side="left")
    alone = given["input_ids"][1:, 3:]
    with torch.no_grad():
        together = model(**given).logits[1, 3:]
        single = model(input_ids=alone).logits[0]
    torch.testing.assert_close(together, single, rtol=1e-5, atol=1e-5)  # its rotary angles are float32 in any dtype


def test_sequences_packed_into_one_row_do_not_see_each_other():
    family = BY_NAME["mistral"]
    tokens = torch.randint(3, 58, (1, 18))
    positions = torch.tensor([[*range(7), *range(11)]])
    model = make(family, "saccade", dtype=torch.float64)
    with torch.no_grad():
        packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        first = model(input_ids=tokens[:, :7]).logits
        second = model(input_ids=tokens[:, 7:]).logits
    torch.testing.assert_close(packed, torch.cat([first, second], 1), rtol=1e-9, atol=1e-9)


def test_a_four_dimensional_mask_of_the_users_own_is_taken_as_it_is():
    family = BY_NAME["llama"]
    tokens = torch.randint(3, 58, (2, 11))
    seen = torch.rand(2, 1, 11, 11) < 0.6
    seen |= torch.eye(11, dtype=torch.bool)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        eager = make(family, "eager")(input_ids=tokens, attention_mask=added).logits
        exact = make(family, "judge", dtype=torch.float64)(input_ids=tokens, attention_mask=seen).logits
        for mask in (seen, added):
            ours = make(family, "saccade")(input_ids=tokens, attention_mask=mask).logits
            assert_as_good(ours, eager, exact)
