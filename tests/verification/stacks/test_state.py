"""What a verification leaves behind: nothing. Fails for anything that a call in float64 makes, replaces or counts."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
import torch
from stacks.dense import VOCABULARY, Dense, packed
from torch import nn

import saccade
from saccade.verification.stacks import _bounds, _state


class Caches(Dense):
    """Keeps what models keep: a table and a mask made on demand, keys, counters, a buffer that is registered late."""

    def __init__(self):
        super().__init__()
        self.table, self.masks, self.calls = torch.ones(211), {}, {"forward": 0}
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))
        self.config = type("Config", (), {})()
        self.config.longest = 3

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        length = input_ids.shape[1]
        self.calls["forward"] += 1
        self.count += 1
        self.table = torch.ones(211, dtype=self.head.weight.dtype)
        self.masks[length] = torch.ones(length, dtype=self.head.weight.dtype)
        self.config.longest = max(self.config.longest, length)
        self.register_buffer("late", torch.ones(1, dtype=self.head.weight.dtype))
        self.scale = torch.ones(1, dtype=self.head.weight.dtype)
        self.keys = self.embed(input_ids)
        return super().forward(input_ids, attention_mask, position_ids) * self.table[0]


def state_of(model, step_cache, optimizer):
    """All that is to stay, by identity where it is an object and by value where numbers may be written into it."""
    return {
        "attributes": {name: (id(value), str(value)) for name, value in vars(model).items()},
        "tensors": [(tensor.dtype, tensor.tolist()) for tensor in (*model.state_dict().values(), model.table)],
        "addresses": [parameter.data_ptr() for parameter in model.parameters()],
        "gradients": [(id(own.grad), own.grad.tolist()) for own in model.parameters() if own.grad is not None],
        "trained": [parameter.requires_grad for parameter in model.parameters()],
        "modes": [part.training for part in model.modules()],
        "hooks": [len(part._forward_hooks) for part in model.modules()],
        "config": vars(model.config).copy(),
        "step": (dict(step_cache), str(optimizer.state_dict())),
        "random": (torch.get_rng_state().tolist(), random.getstate()),
    }


def parts(model):
    """(a step with an optimizer, the cache of that step, the optimizer), after one step in float32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cache = {}

    def step(batches):
        optimizer.zero_grad()
        for documents in batches:
            made = packed(documents)
            cache[len(documents)] = made["input_ids"]
            logits = model(**{name: value for name, value in made.items() if name != "labels"})
            loss = nn.functional.cross_entropy(logits[0, :-1], made["labels"][0, 1:], reduction="sum")
            (loss + random.random() * 0).backward()
        optimizer.step()
        return loss

    step([[[5, 6, 7]]])
    return step, cache, optimizer


def test_everything_is_as_before():
    model = Caches().train()
    model.out.bias.requires_grad_(False)
    step, cache, optimizer = parts(model)
    before = state_of(model, cache, optimizer)
    report = saccade.verify_stack(model, pack=packed, step=step)
    assert report.ok, report
    assert state_of(model, cache, optimizer) == before
    step([[[5, 6, 7]]])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_everything_is_as_before_when_it_is_broken_off(error, monkeypatch):
    model = Caches().train()
    step, cache, optimizer = parts(model)
    before = state_of(model, cache, optimizer)
    monkeypatch.setattr(_bounds.Measure, "compare", lambda *_: (_ for _ in ()).throw(error()))
    with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else pytest.MonkeyPatch.context():
        saccade.verify_stack(model, pack=packed, step=step)
    assert state_of(model, cache, optimizer) == before


class OneTable(Caches):
    """Keeps its first table for good, and works in the dtype of that table alone."""

    worked_in: ClassVar[set[torch.dtype]] = set()

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        if not hasattr(self, "first"):
            self.first = torch.eye(VOCABULARY, dtype=self.head.weight.dtype)
        out = super().forward(input_ids, attention_mask, position_ids) @ self.first
        self.worked_in.add(out.dtype)
        return out


def test_a_table_of_one_dtype_does_not_stay_for_the_other():
    """Fails where a table outlives the cast that it was made in: the model is then verified in float32 alone."""
    model = OneTable()
    assert saccade.verify_stack(model, pack=packed).ok
    assert torch.float64 in model.worked_in
    assert model(torch.tensor([[5, 6]])).dtype == torch.float32


class Lazy(dict):
    """A table as transformers keeps its classes in: it cannot be copied, and loads what is read."""

    def __init__(self, mapping):
        super().__init__()

    def values(self):
        raise AssertionError("it was read")


def test_tables_of_other_kinds_are_neither_copied_nor_read():
    model = Dense()
    model.classes = Lazy({})
    assert saccade.verify_stack(model).ok


def test_weights_are_given_back_however_much_data_a_function_holds(monkeypatch):
    """Fails where the walk ends, at its limit, among the data before it reaches the weights."""
    monkeypatch.setattr(_state, "_MOST", 9)
    model, data = Dense(), [[word] for word in range(50)]

    def batch(documents):
        assert data
        return packed(documents)

    before = [parameter.detach().clone() for parameter in model.parameters()]
    saccade.verify_stack(model, pack=batch)
    after = [*model.parameters()]
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_attributes_are_given_back_when_one_cannot_be_set():
    plain, fixed = type("Plain", (), {"rate": 0.5})(), 7
    with pytest.raises(AttributeError), _state.attributes([(plain, "rate", 0.0), (fixed, "real", 3)]):
        pass
    assert plain.rate == 0.5
