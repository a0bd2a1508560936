"""Linear layers that hold their weights in few bits: products against float64, what they hold, who may read and write.

Shape legend: R rows, E width, F features, N blocks of E.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import saccade
from saccade.operator._int4 import GROUP
from saccade.operator._int8 import BLOCK
from saccade.operator._products import unrounded
from saccade.operator.nn._rounded import FORMS, HeldWeight, RoundedLinear, Rounding, described

E, OUT = 389, 131
BITS = {"bfloat16": 16, "int8": 8 + 64 / BLOCK, "int4": 4 + 16 / GROUP + 16 / BLOCK}
STEPS = {"bfloat16": 2.0**-8, "int8": 1 / 254, "int4": 1.1 / 8}  # of the largest entry, which rounding may be off by


def layer(form, bias=True):
    torch.manual_seed(0)
    return RoundedLinear(torch.randn(OUT, E), nn.Parameter(torch.randn(OUT)) if bias else None, form)


def blocks_of(x):
    """(R, E) as (R, N, 128), zeros at the end."""
    return F.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@pytest.mark.parametrize("rows", [1, 7, 61])
@torch.no_grad()
def test_products_are_those_of_the_weight_that_is_read(form, rows):
    """Bytes of x are off by half a step and their zero by another half, and sums of E terms are rounded in float32."""
    module, x = layer(form), torch.randn(rows, E) * torch.logspace(-2, 2, rows)[:, None]
    weight = module.weight.double()
    exact = x.double() @ weight.T + module.bias.double()
    parts = blocks_of(x)
    steps = (parts.amax(2).clamp_min(0) - parts.amin(2).clamp_max(0)) / 255 * (form != "bfloat16")
    bound = steps.double() @ blocks_of(weight).abs().sum(2).T + E * 2.0**-24 * (
        x.abs().double() @ weight.abs().T + module.bias.abs()
    )
    assert ((module(x) - exact).abs() <= bound).all()
    with unrounded():
        assert torch.allclose(module(x).double(), exact, rtol=1e-5, atol=1e-5 * x.abs().max().item())


def test_a_weight_is_rounded_to_its_bits_and_nothing_else_is_held(form):
    torch.manual_seed(0)
    dense = torch.randn(OUT, E)
    module = RoundedLinear(dense, None, form)
    assert (
        blocks_of(module.weight - dense).abs().amax(2) <= 1.001 * STEPS[form] * blocks_of(dense).abs().amax(2)
    ).all()
    large = RoundedLinear(torch.randn(384, 1024), None, form)
    held = sum(tensor.nbytes for tensor in (*large.parameters(), *large.buffers()))
    assert held == 384 * 1024 * BITS[form] / 8
    assert f"hold their weights in {form}: 0.{round(held / 1e5)} MB, in float32 1.6 MB" in described(large)


@torch.no_grad()
def test_copies_and_files_compute_the_same_and_conversions_leave_the_bits(form):
    module, x = layer(form), torch.randn(7, E)
    file, out = io.BytesIO(), module(x)
    torch.save(module, file)
    file.seek(0)
    filled = RoundedLinear(torch.ones(OUT, E), nn.Parameter(torch.zeros(OUT)), form)
    filled.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False), filled):
        assert torch.equal(other(x), out)
    for dtype in (torch.bfloat16, torch.float64):
        other = copy.deepcopy(module).to(dtype)
        assert other(x.to(dtype)).dtype == other.weight.dtype == dtype
        assert torch.equal(other.float().weight + 0, module.weight + 0)


def test_gradients_reach_inputs_and_biases(form):
    module, x = layer(form), torch.randn(3, 5, E, requires_grad=True)
    d_out = torch.randn(3, 5, OUT)
    dx, db = torch.autograd.grad(module(x), (x, module.bias), d_out)
    assert torch.allclose(dx.double(), d_out.double() @ module.weight.double(), atol=1e-4)
    assert torch.allclose(db, d_out.sum((0, 1)), atol=1e-5)
    assert [name for name, _ in module.named_parameters()] == ["bias"]


def test_norms_after_products_learn():
    """A sum and its norm are the product's last step only where nothing learns."""
    torch.manual_seed(0)
    shape = dict(hidden=512, activation="gelu", placement="post", norm="layer")
    block = saccade.nn.EncoderBlock(saccade.nn.BlockConfig(saccade.nn.AttentionConfig(192, heads=3), **shape))
    Rounding(block.requires_grad_(False), "int8").round_all()
    norms, x = (block.attention_norm, block.feed_forward_norm), torch.randn(3, 64, 192)
    with torch.no_grad():
        fused = block(x)
    for norm in norms:
        norm.requires_grad_()
    out = block(x)
    assert torch.allclose(out, fused, atol=0.1)
    out[0, 0, 0].backward()
    assert all(norm.weight.grad.abs().sum() > 0 for norm in norms)


WRITES = {
    "in place": lambda module: module.weight.mul_(2),
    "operator": lambda module: module.weight.__imul__(2),
    "entry": lambda module: module.weight.__setitem__(0, 1.0),
    "data": lambda module: module.weight.data.mul_(2),
    "new data": lambda module: setattr(module.weight, "data", torch.ones(OUT, E)),
    "detached": lambda module: module.weight.detach().zero_(),
    "initialised": lambda module: nn.init.normal_(module.weight),
    "again": lambda module: module.reset_parameters(),
    "out": lambda module: torch.ones(OUT, E, out=module.weight),
    "out of sum": lambda module: torch.add(module.weight, 1, out=module.weight),
    "optimizer": lambda module: torch._foreach_add_([module.weight], 1),
    "trained": lambda module: module.weight.requires_grad_(),
    "trainable": lambda module: setattr(module.weight, "requires_grad", True),
    "parameter": lambda module: nn.Parameter(module.weight),
    "replaced": lambda module: setattr(module, "weight", nn.Parameter(torch.ones(OUT, E))),
    "replaced by a tensor": lambda module: setattr(module, "weight", torch.ones(OUT, E)),
    "address": lambda module: module.weight.data_ptr(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_raise_and_change_nothing(form, write):
    module = layer(form)
    before = module.weight + 0
    with pytest.raises(RuntimeError, match="weight: "):
        write(module)
    assert torch.equal(module.weight + 0, before)


def test_what_reads_a_weight(form):
    module, x = layer(form), torch.randn(7, E)
    held, dense = module.weight, module.dense()
    assert isinstance(held, HeldWeight)
    assert (held.shape, held.dtype, held.device.type, len(held)) == ((OUT, E), torch.float32, "cpu", OUT)
    assert not held.requires_grad
    assert held.requires_grad_(False) is held
    assert torch.equal(held[3:5, 1:7], dense[3:5, 1:7])
    assert (held.numpy() == dense.numpy()).all()
    assert torch.equal(x.addmm(x[:, :OUT], held), torch.addmm(x, x[:, :OUT], dense))
    assert torch.equal(x.add_(held[:7]), x)
    assert torch.equal(F.linear(x, held, module.bias), module(x))
    assert torch.equal(torch.stack([held, held])[1], dense)


def test_modes_that_follow_functions_see_a_plain_product(form):
    seen = []

    class Follows(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append((func, type(args[1]) if len(args) > 1 else None))
            return func(*args, **(kwargs or {}))

    module, x = layer(form), torch.randn(7, E)
    with Follows():
        out = module(x)
    assert (F.linear, torch.Tensor) in seen
    assert torch.allclose(out, F.linear(x, module.dense(), module.bias))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_layers_that_are_replaced_and_those_that_stay(form, wrong):
    class Own(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.ModuleDict({"large": nn.Linear(256, 131), "small": nn.Linear(7, 11), "own": Own(256, 131)})
    model.update({"tied": nn.Linear(256, 137), "table": nn.Embedding(137, 256), "kept": nn.Linear(256, 131)})
    model["output"] = nn.Linear(256, 137)
    model["again"], model["tied"].weight = model["large"], model["table"].weight
    model.eval()
    Rounding(model, form, keep=["kept.weight"]).round_all()
    rounded = [name for name, part in model.items() if isinstance(part, RoundedLinear)]
    assert rounded == ["large", "tied", "output", "again"]
    assert model["again"] is model["large"]
    assert not model["large"].training
    assert model["large"].form == form
    assert model["tied"].form == model["output"].form == ("int8" if form == "int4" else form)
    assert type(model["table"]) is nn.Embedding and model["table"].weight.is_floating_point()
    unfit = nn.Sequential(nn.Linear(256, 131))
    unfit[0].weight.data[3, 5] = wrong
    with pytest.raises(ValueError, match="^0.weight: holds NaN or infinities, which"):
        Rounding(unfit, form).round_all()


def test_compiled_it_is_the_product_in_float(form):
    module, x = layer(form), torch.randn(7, E)
    with torch.no_grad():
        out = torch.compile(module, backend="eager", fullgraph=True)(x)
    assert torch.allclose(out, F.linear(x, module.dense(), module.bias), atol=1e-4)
