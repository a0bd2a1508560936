"""What is known of tensors ends with them, and is found by their views."""

from __future__ import annotations

import gc

import torch

from saccade.interception._tracing import FunctionCall, FunctionMode, TensorLabels


def test_a_label_ends_with_its_tensor():
    labels = TensorLabels[int]()
    one, other = torch.zeros(3), torch.zeros(3)
    labels.put(one, 5)
    assert labels.get(one) == 5 and one in labels and other not in labels
    del one
    gc.collect()
    assert not labels and list(labels.items()) == []


def test_a_tensor_that_only_another_one_keeps_is_still_known():
    labels, holder = TensorLabels[int](), torch.zeros(3)
    holder.grad = torch.ones(3)
    labels.put(holder.grad, 5)
    gc.collect()
    assert labels.get(holder.grad) == 5


def test_views_and_what_shares_memory():
    labels, whole, other = TensorLabels[str](), torch.zeros(3, 5), torch.zeros(3, 5)
    row = whole[1]
    labels.put_all([whole, other], "whole")
    assert labels.get(row) is None and labels.with_views(row[2:]) == "whole"
    labels.put(row, "row")
    assert {id(one): label for one, label in labels.sharing(whole[0])} == {id(whole): "whole", id(row): "row"}


def test_a_mode_sees_into_multi_head_attention_and_not_into_transforms():
    class Names(FunctionMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def sees(self, call: FunctionCall) -> None:
            self.seen.append(call.name)

    module, x = torch.nn.MultiheadAttention(6, 2, batch_first=True).eval(), torch.randn(3, 5, 6)
    with Names() as names:
        module(x, x, x, need_weights=False)
    assert "scaled_dot_product_attention" in names.seen
    with Names() as names:
        out = torch.vmap(lambda one: one.exp())(x)
    assert "exp" not in names.seen and torch.equal(out, x.exp())
