"""The backend around the kernels: gradients of every kind, layouts, sets, threads, and what PyTorch puts in the way."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import pytest
import torch

import problems
import saccade
from looped import looped
from problems import CASES, assert_close
from saccade import ALiBi, Causal, Dropout, Padding, RelativeBias, Window
from saccade.operator._backends import native
from saccade.operator._backends.native import _kernels
from saccade.operator._checks import make_call

every_case = looped("name", CASES)


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    monkeypatch.setattr(problems, "DTYPE", torch.float32)


def gradients(out, lse, leaves, **options):
    draw = torch.Generator().manual_seed(5)
    cotangents = [torch.randn(x.shape, generator=draw).to(x.dtype) for x in (out, lse)]
    return problems.pull((out, lse), leaves, cotangents, **options)


@functools.cache
def truth(name, dtype=torch.float32):
    """The oracle's results and gradients of a case whose inputs are rounded to `dtype`."""
    problem = CASES[name]()
    leaves = problems.leaves({k: t.to(dtype).float() for k, t in problem.tensors.items()})
    want = problem.truth(leaves)
    return want.out.detach(), want.lse.detach(), gradients(want.out, want.lse, leaves)


@every_case
def test_every_set_gives_the_oracles_results_and_gradients(name, instructions):
    problem = CASES[name]()
    ours = problems.leaves(problem.tensors)
    out, lse = problem.ours(ours, "native")
    want_out, want_lse, expected = truth(name)
    assert_close(out, want_out)
    assert_close(lse, want_lse)
    found = gradients(out, lse, ours)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, terms=256)


@looped("dtype", [torch.bfloat16, torch.float16])
@looped("name", ["plain", "wide_causal", "everything", "relative_both_ways", "bias_with_hidden_pairs"])
def test_half_precision_on_every_set(name, dtype, instructions):
    problem = CASES[name]()
    halves = {k: t.to(dtype) for k, t in problem.tensors.items()}
    ours = problems.leaves(halves)
    out, lse = problem.ours(ours, "native")
    want, _, expected = truth(name, dtype)
    # Half a unit for the result, one for weights in that dtype, and both again for sums of 17 terms of size 1.
    unit = torch.finfo(dtype).eps
    sizes = [max(1.0, x.abs().max().item()) for x in (want, *expected)]
    assert (out.double() - want).abs().max() <= 4 * unit * sizes[0]
    for one, other, size in zip(gradients(out, lse, ours), expected, sizes[1:], strict=True):
        assert one.dtype == dtype
        assert (one.double() - other.double()).abs().max() <= 16 * unit * size


# --- derivatives of derivatives, batches of cotangents ------------------------------------------------------------

TWICE = ["grouped_heads", "wide_causal", "softcap", "sink_with_empty_rows", "alibi", "relative_backwards", "everything"]


@looped("name", TWICE)
def test_second_derivatives_are_those_of_chunked(name):
    problem, found = CASES[name](), {}
    for backend in ("native", "chunked"):
        leaves = problems.leaves(problem.tensors)
        out, lse = problem.ours(leaves, backend)
        finite = torch.where(lse == -math.inf, 0.0, lse)
        first = torch.autograd.grad(out.sin().sum() + finite.cos().sum(), list(leaves.values()), create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), list(leaves.values()))
        found[backend] = [*first, *second]
    for one, other in zip(found["native"], found["chunked"], strict=True):
        assert_close(one, other.double(), terms=256)


def test_second_derivatives_of_one_tensor_in_three_places():
    found = {}
    for backend in ("native", "chunked"):
        x = problems.tensors(heads=3)["query"].requires_grad_()
        (first,) = torch.autograd.grad(
            saccade.attention(x, x, x, Causal(), backend=backend).sin().sum(), x, create_graph=True
        )
        found[backend] = (first.detach(), *torch.autograd.grad(first.cos().sum(), x))
    for one, other in zip(found["native"], found["chunked"], strict=True):
        assert_close(one, other.double(), terms=256)


@pytest.mark.parametrize("name", ["sink", "alibi", "everything"])
@pytest.mark.parametrize("way", ["torch.func.vmap", "is_grads_batched"])
def test_batches_of_cotangents(way, name):
    problem = CASES[name]()
    leaves = problems.leaves(problem.tensors)
    out = problem.out(leaves, "native")

    def pull(cotangent, **options):
        return torch.autograd.grad(out, list(leaves.values()), cotangent, retain_graph=True, **options)

    cotangents = torch.randn(3, *out.shape)
    if way == "torch.func.vmap":
        got = torch.func.vmap(pull)(cotangents)
    elif name == "alibi":
        pytest.skip("PyTorch's old vmap, which is_grads_batched uses, lacks a rule for flatten")
    else:
        got = pull(cotangents, is_grads_batched=True)
    for n, cotangent in enumerate(cotangents):
        for one, want in zip(got, pull(cotangent), strict=True):
            assert_close(one[n], want, terms=256)


def test_a_named_native_refuses_transforms_and_says_so():
    query, key, value = problems.tensors(heads=3).values()
    for transform in (torch.func.grad, torch.func.vmap):
        given = query if transform is torch.func.grad else query[None]
        with pytest.raises(ValueError, match="native.*torch.func"):
            transform(lambda q: saccade.attention(q, key, value, backend="native").sum())(given)


# --- what is asked for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["query", "key", "value", "bias", "sink"])
@pytest.mark.parametrize("of", ["out", "lse"])
def test_one_gradient_of_one_result(wanted, of):
    problem = CASES["everything"]()
    ours, theirs = problems.leaves(problem.tensors), problems.leaves(problem.tensors)
    for name, leaf in ours.items():
        leaf.requires_grad_(name == wanted)
    out, lse = problem.ours(ours, "native")
    want = problem.truth(theirs)
    got, expected = (out, want.out) if of == "out" else (lse, want.lse)
    finite = ~torch.isinf(expected)
    pulled = torch.autograd.grad(got[finite].sin().sum(), [ours[wanted]], allow_unused=True)[0]
    (meant,) = torch.autograd.grad(expected[finite].sin().sum(), [theirs[wanted]], allow_unused=True)
    if meant is None:
        assert pulled is None or (pulled == 0).all()
    else:
        assert_close(pulled, meant, terms=256)


def test_inputs_changed_in_place_are_noticed():
    leaves = problems.leaves(problems.tensors(heads=3))
    key = leaves["key"] * 1.0
    out = saccade.attention(leaves["query"], key, leaves["value"], backend="native")
    key.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_graph_does_not_keep_the_biass_object_alive():
    problem = CASES["alibi"]()
    leaves = problems.leaves(problem.tensors)
    bias = problem.to_bias(leaves)
    out = saccade.attention(leaves["query"], leaves["key"], leaves["value"], bias=bias, backend="native")
    assert not hasattr(out.grad_fn.settings.bias, "parameter")
    assert hasattr(bias, "parameter")


# --- layouts ------------------------------------------------------------------------------------------------------


def test_results_stand_in_memory_as_the_query_does():
    query, key, value = (torch.randn(2, 11, 3, 16).transpose(1, 2).requires_grad_() for _ in range(3))
    out = saccade.attention(query, key, value, backend="native")
    assert out.transpose(1, 2).is_contiguous()
    found = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(gradient.stride() == query.stride() for gradient in found)
    narrow = saccade.attention(query, key, value[..., :5], backend="native")
    assert narrow.transpose(1, 2).is_contiguous()
    assert saccade.attention(query.contiguous(), key, value, backend="native").is_contiguous()


def test_lazily_negated_tensors_are_read_as_what_they_say():
    numbers = torch.randn(2, 3, 11, 8, dtype=torch.complex64).conj()
    query = numbers.imag
    assert query.is_neg()
    want = saccade.attention(query.clone().resolve_neg(), query.clone(), query.clone(), backend="chunked")
    assert_close(saccade.attention(query, query, query, backend="native"), want)
    assert_close(saccade.attention(query, query, query), want)


def test_rows_that_overlap_in_memory():
    window = torch.randn(2, 3, 40).as_strided((2, 3, 11, 8), (120, 40, 1, 1))
    want = saccade.attention(window, window, window, backend="chunked")
    assert_close(saccade.attention(window, window, window, backend="native"), want)
    assert_close(saccade.attention(window, window, window), want)


def test_defaults_of_the_process_do_not_matter():
    problem = CASES["alibi"]()
    want = problem.ours(problems.leaves(problem.tensors), "native")
    try:
        torch.set_default_dtype(torch.float64)
        leaves = problems.leaves(problem.tensors)
        out, lse = problem.ours(leaves, "native")
        found = torch.autograd.grad(out.sum(), list(leaves.values()))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    assert all(gradient.dtype == torch.float32 for gradient in found)


# --- the same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sink", "alibi", "relative", "shared tensor", "keys", "rows"])
def test_gradients_of_parameters_do_not_depend_on_threads(kind, threads):
    draw = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(3, 2, 701, 16, generator=draw) for _ in range(3))
    shape = {"sink": (2,), "alibi": (2,), "relative": (32, 2), "shared tensor": (1, 1, 701, 701)}
    parameter = torch.rand(shape.get(kind, (1, 2, 1, 701) if kind == "keys" else (1, 1, 701, 1)), generator=draw)
    found = []
    for n in (1, 2):
        threads(n)
        leaf = parameter.clone().requires_grad_()
        bias = {"alibi": ALiBi, "relative": RelativeBias, "sink": lambda x: None}.get(kind, lambda x: x)(leaf)
        out = saccade.attention(query, key, value, bias=bias, sink=leaf if kind == "sink" else None, backend="native")
        found.append(torch.autograd.grad(out.square().sum(), leaf)[0])
    assert found[0].abs().max() > 0 and torch.equal(*found)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_sums_by_halves(axis, threads):
    tensor = torch.randn(5, 257, 67, generator=torch.Generator().manual_seed(1))
    found = []
    for n in (1, 2):
        threads(n)
        found.append(_kernels.total(tensor, axis))
    assert torch.equal(*found)
    assert_close(found[0], tensor.double().sum(axis, keepdim=True), terms=257)


def test_dropout_is_that_of_its_definition_to_the_bit():
    dropout = Dropout(0.37, 2**63 + 12345)
    query = torch.zeros(2, 3, 67, 4)
    value = torch.eye(71).expand(2, 3, 71, 71)
    mask = Window(None, None).slice((5, 72), (9, 80), lengths=(100, 100))
    key = torch.zeros(2, 3, 71, 4)
    got = saccade.attention(query, key, value, mask, dropout=dropout, backend="native") > 0
    index = [torch.arange(n) for n in (2, 3)]
    want = dropout.factor(*index, torch.arange(67) + 5, torch.arange(71) + 9, torch.float32) > 0
    assert torch.equal(got, want)


# --- the lean way -------------------------------------------------------------------------------------------------


def full(query, key, value, mask=None, scale=None):
    return native.run(make_call(query, key, value, mask, scale=scale))[0]


@looped("gradients", [False, True])
@looped("mask", [None, Causal(), Window(3, 1), Padding([5, 13])])
@looped("scale", [None, 0.3])
def test_the_lean_way_gives_the_same_bits(mask, scale, gradients):
    query, key, value = (t.requires_grad_(gradients) for t in problems.tensors().values())
    lean, whole = native.fast_forward(query, key, value, mask, scale), full(query, key, value, mask, scale)
    assert torch.equal(lean, whole) and lean.stride() == whole.stride()
    if gradients:
        found = [torch.autograd.grad(out.sin().sum(), (query, key, value)) for out in (lean, whole)]
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def strange():
    """Calls that are none of the lean way's business, right or wrong."""
    query, key, value = problems.tensors(heads=3).values()
    yield "a list", (query.tolist(), key, value, None, None)
    yield "three axes", (query[0], key[0], value[0], None, None)
    yield "float64", (query.double(), key.double(), value.double(), None, None)
    yield "mixed", (query, key.bfloat16(), value, None, None)
    yield "no keys", (query, key[:, :, :0], value[:, :, :0], None, None)
    yield "other batch", (query, key[:1], value[:1], None, None)
    yield "other width", (query, key[..., :2], value, None, None)
    yield "other lengths", (query, key, value[:, :, :2], None, None)
    yield "other heads", (query, key[:, :2], value, None, None)
    yield "heads that do not divide", (query, key[:, :2], value[:, :2], None, None)
    yield "last stride", (query.mT.contiguous().mT, key, value, None, None)
    yield "an int as scale", (query, key, value, None, 1)
    yield "infinite scale", (query, key, value, None, math.inf)
    yield "a boolean tensor", (query, key, value, torch.ones(11, 13, dtype=torch.bool), None)
    yield "a class as mask", (query, key, value, Causal, None)
    yield "meta", (*(t.to("meta") for t in (query, key, value)), None, None)
    yield "sparse", (query.to_sparse(), key, value, None, None)


@looped(("name", "given"), list(strange()))
def test_the_lean_way_leaves_the_rest_to_the_full_checks(name, given):
    assert native.fast_forward(*given) is None


@looped(("name", "given"), list(strange()))
def test_what_it_leaves_is_answered_as_before(name, given):
    query, key, value, mask, scale = given
    answers = []
    for dropout in (0.0, Dropout(0.0, 1)):  # the second is no float, which alone leads past the lean way
        try:
            answers.append(saccade.attention(query, key, value, mask, scale=scale, dropout=dropout))
        except (TypeError, ValueError, NotImplementedError) as error:
            answers.append((type(error), str(error)))
    one, other = answers
    if isinstance(one, torch.Tensor) and not one.is_meta:
        assert torch.equal(one, other)
    elif isinstance(one, torch.Tensor):
        assert one.shape == other.shape
    else:
        assert one == other


def test_a_mask_that_does_not_fit_is_told_in_the_lean_way_too():
    query, key, value = problems.tensors(heads=3).values()
    with pytest.raises(ValueError, match="mask: made for a batch of 3"):
        saccade.attention(query, key, value, Padding([1, 2, 3]))
    with pytest.raises(ValueError, match="a length of 14 keys is beyond the 13"):
        saccade.attention(query, key, value, Padding([1, 14]))


def test_modes_and_autocast_lead_past_the_lean_way():
    query, key, value = problems.tensors(heads=3).values()
    with torch.autocast("cpu", torch.bfloat16):
        assert native.fast_forward(query, key, value, None, None) is None
        assert saccade.attention(query, key, value).dtype == torch.bfloat16
    with torch.inference_mode():
        inside = native.fast_forward(*(t.clone() for t in (query, key, value)), None, None)
    assert torch.equal(inside, full(query, key, value))


# --- the module ---------------------------------------------------------------------------------------------------


def test_the_module_checks_sizes_again():
    query = torch.randn(1, 2, 3, 4)
    shape, at = query.shape, (query.data_ptr(), query.stride())
    good = [shape, shape, shape, 0, 1.0, 0.0, None, None, None, 0, 1]

    def call(*changes, tensors=(at, at, at, at)):
        problem = list(good)
        for place, value in changes:
            problem[place] = value
        _kernels.module.forward(tuple(problem), *tensors, 0)

    wrong = {
        "do not belong together": (1, (1, 2, 3, 5)),
        "multiple of key heads": (0, (1, 3, 3, 4)),
        "negative": (0, (1, 2, -3, 4)),
        "no such type": (3, 7),
        "at least one thread": (10, 0),
        "4 integers": (0, (1, 2, 3)),
        "no such form": (7, (5, 1)),
        "does not hold every distance": (7, (2, at[0], 2, -2, 0, 0, 0)),
        "one placement for each item": (7, (2, at[0], 5, -2, 0, at[0], 2)),
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            call(change)
    with pytest.raises(ValueError, match="query has no memory"):
        call(tensors=((0, at[1]), at, at, at))
    with pytest.raises(ValueError, match="last stride of 1"):
        call(tensors=((at[0], (24, 12, 4, 2)), at, at, at))
    mask = _kernels_mask(5, 3)
    with pytest.raises(ValueError, match="other lengths"):
        call((6, mask))


def _kernels_mask(rows, keys):
    from saccade.operator._backends.native._lowering import native_mask

    return native_mask(Window(1, 1), rows, keys)


def test_masks_pickle_and_copy_after_the_kernels_have_seen_them():
    mask = Window(3, 1) & Padding([5, 13])
    query, key, value = problems.tensors(heads=3).values()
    want = saccade.attention(query, key, value, mask, backend="native")
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert other == mask
        assert torch.equal(saccade.attention(query, key, value, other, backend="native"), want)
