"""Mask values are worked out once for all layers, and never for a tensor that has changed.

B batch, H heads, Lq / Lk lengths.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from saccade import FromTensor, Padding
from saccade.interception._hooks import _masks
from saccade.interception._hooks._masks import hiding, mask_of
from saccade.operator._backends.native import _kernels

B, H, LQ, LK = 2, 3, 5, 7
WHOLE = B, H, LQ, LK


@pytest.fixture(autouse=True)
def nothing_remembered():
    _masks._THREAD.held.clear()


@pytest.fixture
def dense():
    return torch.rand(B, 1, LQ, LK) < 0.5


@pytest.fixture
def keep():
    return torch.rand(B, 1, 1, LK) < 0.5


def says(mask, tensor):
    return torch.equal(mask.dense(LQ, LK).expand(B, 1, LQ, LK), tensor.expand(B, 1, LQ, LK))


def test_one_tensor_is_worked_out_once(dense, keep):
    first = mask_of(dense, WHOLE)
    assert isinstance(first, FromTensor)
    assert mask_of(dense, WHOLE) is first
    assert mask_of(dense[:, :, :, :LK], WHOLE) is first  # as transformers cuts it, anew for each layer
    padding = mask_of(keep.expand(B, 1, LQ, LK), WHOLE)
    assert isinstance(padding, Padding)
    assert mask_of(keep.expand(B, 1, LQ, LK), WHOLE) is padding
    assert says(first, dense) and says(padding, keep)


def test_an_edit_in_place_is_seen(dense, keep):
    for tensor, given in ((dense, dense), (keep, keep.expand(B, 1, LQ, LK))):
        before = mask_of(given, WHOLE)
        tensor.logical_not_()
        after = mask_of(given, WHOLE)
        assert says(after, given)
        assert not says(before, given)  # and the old value still says what it said


def test_an_edit_through_a_view_is_seen(dense):
    mask_of(dense, WHOLE)
    dense[0, 0, 0].logical_not_()
    assert says(mask_of(dense, WHOLE), dense)


@pytest.mark.parametrize("kernels", ["native", "without a compiler"])
@pytest.mark.parametrize("inference", [False, True])
def test_an_edit_that_is_not_counted_is_seen(inference, kernels, monkeypatch):
    """Through `.data`, through NumPy's memory, and of tensors made in inference mode."""
    if kernels != "native":
        monkeypatch.setattr(_kernels, "module", None)
    with torch.inference_mode(inference):
        dense, keep = torch.rand(B, 1, LQ, LK) < 0.5, torch.rand(B, 1, 1, LK) < 0.5
        for tensor in (dense, keep, keep.expand(B, 1, LQ, LK), dense[..., :5, :]):
            before = mask_of(tensor, WHOLE)
            assert mask_of(tensor, WHOLE) is before
            tensor.numpy()[-1, 0, -1, 5] ^= True
            assert says(mask_of(tensor, WHOLE), tensor)
            tensor.data[0, 0, 0, 1] ^= True
            assert says(mask_of(tensor, WHOLE), tensor)
            hides = torch.zeros(tensor.shape).masked_fill(~tensor, -torch.inf)
            hiding(hides, WHOLE)
            hides.numpy()[0, 0, 0, 1] = 0.0 if hides[0, 0, 0, 1] else -torch.inf
            assert says(hiding(hides, WHOLE), hides == 0)


def test_other_views_of_one_tensor_are_other_masks():
    held = torch.rand(B, 1, LQ, LK + 2) < 0.5
    for start in (0, 1, 2, 0):
        part = held[..., start : start + LK]
        assert says(mask_of(part, WHOLE), part)


@pytest.mark.slow
def test_nothing_is_kept_of_what_is_gone(dense):
    entries = _masks._THREAD.held
    mask_of(dense.clone(), WHOLE)
    gc.collect()
    assert not entries
    mask_of(dense, WHOLE)
    assert len(entries) == 1


def test_only_so_many_are_kept():
    held = [torch.rand(B, 1, LQ, LK) < 0.5 for _ in range(3 * _masks._MOST)]
    for tensor in held:
        assert says(mask_of(tensor, WHOLE), tensor)
    assert len(_masks._THREAD.held) == _masks._MOST


def test_each_thread_remembers_for_itself(dense):
    here, there = mask_of(dense, WHOLE), []
    thread = threading.Thread(target=lambda: there.append(mask_of(dense, WHOLE)))
    thread.start()
    thread.join()
    assert there[0] is not here
    assert there[0] == here


def test_a_float_mask_that_only_hides_is_a_mask(dense, keep):
    for see, kind in ((keep.expand(B, H, 1, LK), Padding), (dense, FromTensor), (dense[0, 0], FromTensor)):
        scores = torch.zeros(see.shape).masked_fill(~see, -torch.inf)
        mask = hiding(scores, WHOLE)
        assert isinstance(mask, kind)
        assert says(mask, see[:, :1] if see.dim() == 4 else see)
        assert hiding(scores, WHOLE) is mask
        scores.view(-1)[3] = -1.0
        assert hiding(scores, WHOLE) is None


def test_a_float_mask_that_adds_or_learns_or_differs_by_head_is_a_bias(dense):
    hidden = torch.zeros(dense.shape).masked_fill(~dense, -torch.inf)
    lowest = hidden.clamp(min=torch.finfo(torch.float32).min)
    by_head = torch.zeros(B, H, 1, LK)
    by_head[1, 2, 0, 3] = -torch.inf
    for scores in (hidden + 1, hidden * torch.nan, lowest, by_head, hidden.clone().requires_grad_()):
        assert hiding(scores, WHOLE) is None


def test_the_same_memory_read_as_another_dtype_is_another_mask(dense):
    hidden = torch.zeros(dense.shape, dtype=torch.float16).masked_fill(~dense, -torch.inf)
    assert isinstance(hiding(hidden, WHOLE), FromTensor)
    assert hiding(hidden.view(torch.bfloat16), WHOLE) is None  # the bits of -inf are a number there
