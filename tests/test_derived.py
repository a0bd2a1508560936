"""Whether a tensor is still what something was derived from: writes of every kind, counted by PyTorch or not."""

from __future__ import annotations

import pytest
import torch

from saccade.operator import _derived
from saccade.operator._backends.native import _kernels
from saccade.operator._derived import Derived, Snapshot

SHAPES = {
    "rows": lambda: torch.randn(83, 53),
    "a transpose": lambda: torch.randn(53, 83).t(),
    "a slice": lambda: torch.randn(83, 101)[:, 7:60],
    "one row": lambda: torch.randn(1, 401),
    "half precision": lambda: torch.randn(83, 53).bfloat16(),
    "four axes": lambda: torch.randn(3, 1, 11, 13),
    "tall": lambda: torch.randn(1031, 29),
    "booleans": lambda: torch.rand(3, 1, 11, 13) < 0.5,
}


@pytest.fixture(params=["native", "without a compiler"])
def kernels(request, monkeypatch):
    if request.param != "native":
        monkeypatch.setattr(_kernels, "module", None)
        monkeypatch.setattr(_derived, "_STRIDE", 1)  # a sample of a large weight is the whole of a small one
    elif _kernels.module is None:
        pytest.skip("no native kernels")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", SHAPES)
def test_every_entry_is_read_within_as_many_checks_as_there_are_parts(name):
    """Writes through NumPy's memory or `.data`, which PyTorch does not count."""
    torch.manual_seed(0)
    tensor = SHAPES[name]()
    snapshot = Snapshot(tensor)
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        place = tuple(int(torch.randint(size, (), generator=generator)) for size in tensor.shape)
        before = tensor[place].item()
        assert all(snapshot.holds(tensor, 1) for _ in range(3))
        tensor.data[place] = (not before) if tensor.dtype == torch.bool else -before
        assert not all(snapshot.holds(tensor, 1) for _ in range(snapshot._parts))
        tensor.data[place] = before


@pytest.mark.skipif(_kernels.module is None, reason="no native kernels")
@pytest.mark.parametrize("change", [torch.Tensor.neg_, lambda x: x[701].mul_(2), lambda x: x[:, 192:256].mul_(2)])
@pytest.mark.parametrize("shape", [(768, 768), (3072, 768), (768, 3072)])
def test_a_change_of_many_rows_or_columns_is_seen_by_the_next_check(shape, change):
    """A whole matrix whose signs change, rows or columns of a head: at any of the parts, for a single row of input."""
    torch.manual_seed(0)
    tensor = torch.randn(shape)
    snapshot = Snapshot(tensor)
    for _ in range(9):
        assert snapshot.holds(tensor, 1)
        before = tensor.clone()
        change(tensor.data)
        assert not snapshot.holds(tensor, 1)
        tensor.data.copy_(before)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(1031, 83), (83, 1031)], ids=["tall", "transposed"])
def test_beside_a_few_rows_a_band_of_a_tall_weight_is_read_at_each_check(shape):
    tensor = torch.randn(1031, 83) if shape[0] == 1031 else torch.randn(83, 1031).t()
    snapshot = Snapshot(tensor)
    for _ in range(11):
        for change, within in (
            (torch.Tensor.neg_, 1),
            (lambda x: x[:, 16:80].neg_(), 1),
            (lambda x: x[701].neg_(), 8),
            (lambda x: x[1030, 82:].neg_(), 8 * snapshot._parts),
        ):
            before = tensor.clone()
            change(tensor.data)
            assert not all(snapshot.holds(tensor, 1, one_band=True) for _ in range(within))
            tensor.data.copy_(before)
            assert snapshot.holds(tensor, 1, one_band=True)


def test_a_large_product_reads_the_whole_weight():
    tensor = torch.randn(211, 307)
    snapshot = Snapshot(tensor)
    tensor.data[101, 53] += 1
    assert not snapshot.holds(tensor, _derived.WHOLE)


def test_a_step_of_an_optimizer_has_the_whole_weight_read():
    """A fused step that changes one entry: neither counted nor, by chance, among the lines of a check."""
    weight, other = torch.nn.Parameter(torch.randn(211, 307)), torch.nn.Parameter(torch.ones(3))
    snapshot = Snapshot(weight)
    optimizer = torch.optim.SGD([weight, other], 0.5, fused=True)
    weight.grad = torch.zeros_like(weight)
    weight.grad[101, 53] = 1
    version = weight._version
    optimizer.step()
    assert weight._version == version, "PyTorch counts fused steps now"
    assert not snapshot.holds(weight, 1)


def test_memory_is_held_so_that_its_address_is_not_used_again():
    """A new weight at the address of a freed one, with the same count of writes."""
    derived = Derived()
    for n in range(20):
        weight = torch.full((311, 307), float(n))
        value = derived.of((weight,), 1, lambda weight=weight: weight.clone())
        assert value is None or bool((value == n).all())
        weight = None


def test_tensors_that_are_new_at_every_call_have_nothing_derived():
    derived, made = Derived(), []

    def use(weight):
        return derived.of((weight,), 1, lambda: made.append(0) or weight.clone())

    kept = torch.randn(83, 53)
    assert use(kept) is not None and use(kept) is not None and len(made) == 1
    for _ in range(5):
        assert use(torch.randn(83, 53)) is None
    assert use(kept) is None and use(kept) is not None and len(made) == 2
    kept.data = torch.randn(83, 53)
    assert torch.equal(use(kept), kept) and len(made) == 3
