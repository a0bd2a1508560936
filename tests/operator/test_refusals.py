"""Every bad input: ValueError or TypeError before any work, naming the argument, what came and what was expected."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import problems
import saccade
from looped import looped


@pytest.fixture(params=("auto", "chunked"))
def backend(request) -> str:
    """What is wrong is found before a backend is chosen. `auto` goes the short way to the compiled kernels, too."""
    return request.param


def shaped(**shapes):
    """query (2, 6, 11, 5), key (2, 3, 13, 5), value (2, 3, 13, 7), but for what is given."""
    usual = {"query": (2, 6, 11, 5), "key": (2, 3, 13, 5), "value": (2, 3, 13, 7)}
    return [torch.zeros(shape) for shape in (usual | shapes).values()]


def words(error, *expected):
    """Each in the message; a tuple means any of them."""
    message = str(error.value)
    for word in expected:
        choices = word if isinstance(word, tuple) else (word,)
        assert any(c.lower() in message.lower() for c in choices), f"{word!r} is not in: {message}"


RANKS = [("query", (6, 11, 5)), ("key", (3, 13, 5)), ("value", (13, 7)), ("query", (1, 2, 6, 11, 5)), ("key", ())]


@looped(("name", "shape"), RANKS)
def test_wrong_rank(name, shape, backend):
    with pytest.raises(ValueError) as error:
        saccade.attention(*shaped(**{name: shape}), backend=backend)
    words(error, name, str(shape), ("(B, H", "4-D", "4 dim", "rank"))


def masked(mask):
    return saccade.attention(*shaped(), mask)


# What may be a tensor: its shape and dtype, and the call that is given it.
PLACES = {
    "query": ((2, 6, 11, 5), torch.float32, lambda t: saccade.attention(t, *shaped()[1:])),
    "key": ((2, 3, 13, 5), torch.float32, lambda t: saccade.statistics(shaped()[0], t)),
    "value": ((2, 3, 13, 7), torch.float32, lambda t: saccade.attention(*shaped()[:2], t, backend="chunked")),
    "bias": ((11, 13), torch.float32, lambda t: saccade.attention(*shaped(), bias=t)),
    "ALiBi: slopes": ((6,), torch.float32, lambda t: saccade.ALiBi(t)),
    "sink": ((6,), torch.float32, lambda t: saccade.attention(*shaped(), sink=t)),
    "mask": ((11, 13), torch.bool, masked),
    "Padding: keys": ((2, 13), torch.bool, lambda t: masked(saccade.Padding(t))),
    "groups['some']": ((13,), torch.bool, lambda t: saccade.statistics(*shaped()[:2], groups={"some": t})),
    "merge: part 0": ((2, 6, 11, 7), torch.float32, lambda t: saccade.merge([(t, torch.zeros(2, 6, 11))])),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@looped("name", PLACES)
def test_tensors_that_are_not_dense(name):
    shape, dtype, call = PLACES[name]
    for other in ("to_sparse", "to_sparse_csr", "to_mkldnn"):
        if (other == "to_mkldnn" and dtype == torch.bool) or (other == "to_sparse_csr" and len(shape) < 2):
            continue
        with pytest.raises(TypeError) as error:
            call(getattr(torch.ones(shape, dtype=dtype), other)())
        words(error, name, "dense", "torch._mkldnn" if other == "to_mkldnn" else "torch.sparse", "to_dense()")


def test_nested_tensors():
    nested = torch.nested.nested_tensor([torch.zeros(n, 5) for n in (11, 7)], layout=torch.jagged)
    with pytest.raises(TypeError) as error:
        saccade.attention(nested, *shaped()[1:])
    words(error, "query", "nested", "to_padded_tensor", "Padding")


SHAPES = [
    ("query", (2, 5, 11, 5), ("head", "5", "3")),
    ("query", (2, 2, 11, 5), ("head", "2", "3")),
    ("query", (3, 6, 11, 5), ("batch", "3", "2")),
    ("key", (5, 3, 13, 5), ("batch", "5", "2")),
    ("value", (1, 3, 13, 7), ("batch", "1", "2")),
    ("query", (2, 6, 11, 7), ("width", "7", "5")),
    ("key", (2, 3, 13, 11), ("width", "11", "5")),
    ("value", (2, 3, 17, 7), ("length", "17", "13")),
    ("value", (2, 1, 13, 7), ("head", "1", "3")),
    ("key", (2, 2, 13, 5), ("head", "2", "3")),
]


@looped(("name", "shape", "expected"), SHAPES)
def test_shapes_that_do_not_fit_each_other(name, shape, expected, backend):
    with pytest.raises(ValueError) as error:
        saccade.attention(*shaped(**{name: shape}), backend=backend)
    axis, came, want = expected
    words(error, name, (axis, {"batch": "B", "head": "Hkv", "width": "D", "length": "Lk"}[axis]), came, want)


def test_no_kv_heads(backend):
    with pytest.raises(ValueError) as error:
        saccade.attention(*shaped(query=(2, 0, 11, 5), key=(2, 0, 13, 5), value=(2, 0, 13, 7)), backend=backend)
    words(error, ("Hkv", "head"), "0")


@looped("name", ["query", "key", "value"])
@looped("came", [np.zeros((2, 3, 11, 5)), [[1.0]], None])
def test_not_a_tensor(name, came, backend):
    given = dict(zip(("query", "key", "value"), shaped(), strict=True)) | {name: came}
    with pytest.raises(TypeError) as error:
        saccade.attention(*given.values(), backend=backend)
    words(error, name, "tensor", type(came).__name__)


@looped("name", ["query", "key", "value"])
def test_devices_that_differ(name, backend):
    given = dict(zip(("query", "key", "value"), shaped(), strict=True))
    given[name] = given[name].to("meta")
    with pytest.raises(ValueError) as error:
        saccade.attention(*given.values(), backend=backend)
    words(error, "device", "meta", "cpu")


@looped("option", ["mask", "bias", "sink"])
def test_devices_of_the_rest(option, backend):
    tensor = {
        "mask": torch.ones(11, 13, dtype=torch.bool, device="meta"),
        "bias": torch.zeros(11, 13, device="meta"),
        "sink": torch.zeros(6, device="meta"),
    }[option]
    with pytest.raises(ValueError) as error:
        saccade.attention(*shaped(), **{option: tensor}, backend=backend)
    words(error, option, "device", "meta")


@looped("scale", [math.nan, math.inf, -math.inf])
def test_scale_that_is_not_finite(scale, backend):
    with pytest.raises(ValueError) as error:
        saccade.attention(*shaped(), scale=scale, backend=backend)
    words(error, "scale", "finite", str(scale))


@looped("scale", [torch.tensor(0.5), torch.ones(6), "0.5", True, 1j])
def test_scale_of_another_type(scale, backend):
    with pytest.raises(TypeError) as error:
        saccade.attention(*shaped(), scale=scale, backend=backend)
    words(error, "scale", "float")


def test_a_learned_scale_is_told_where_to_go():
    with pytest.raises(TypeError, match="(?s)scale.*query"):
        saccade.attention(*shaped(), scale=torch.nn.Parameter(torch.tensor(0.5)))


@looped("softcap", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_softcap_that_is_not_positive_and_finite(softcap, backend):
    with pytest.raises(ValueError) as error:
        saccade.attention(*shaped(), softcap=softcap, backend=backend)
    words(error, "softcap", str(softcap), ("positive", "> 0", "above 0", "greater", "finite"))


@looped("softcap", [torch.tensor(3.0), "3", True])
def test_softcap_of_another_type(softcap, backend):
    with pytest.raises(TypeError) as error:
        saccade.attention(*shaped(), softcap=softcap, backend=backend)
    words(error, "softcap")


@looped("shape", [(3,), (5,), (1,), (), (6, 1), (2, 6)])
def test_sink_of_another_shape(shape, backend):
    with pytest.raises(ValueError) as error:
        saccade.attention(*shaped(), sink=torch.zeros(shape), backend=backend)
    words(error, "sink", str(tuple(shape)), ("(6,)", "Hq"))


@looped("sink", [0.5, [0.0] * 6, torch.zeros(6, dtype=torch.int64)])
def test_sink_of_another_type(sink, backend):
    with pytest.raises(TypeError) as error:
        saccade.attention(*shaped(), sink=sink, backend=backend)
    words(error, "sink")


@looped("shape", [(13, 11), (11, 12), (3, 1, 11, 13), (2, 3, 11, 13)])
def test_bias_that_does_not_fit(shape, backend):
    with pytest.raises(ValueError) as error:
        saccade.attention(*shaped(), bias=torch.zeros(shape), backend=backend)
    words(error, "bias", str(shape), ("11", "13"))


@looped(
    ("bias", "expected"),
    [
        (torch.ones(11, 13, dtype=torch.bool), "mask"),
        (torch.ones(11, 13, dtype=torch.int64), "int64"),
        (0.5, "float"),
        ("alibi", "str"),
    ],
)
def test_bias_of_another_type(bias, expected, backend):
    with pytest.raises(TypeError) as error:
        saccade.attention(*shaped(), bias=bias, backend=backend)
    words(error, "bias", expected)


@looped("heads", [3, 5, 1])
def test_bias_values_for_other_heads(heads, backend):
    for bias in (saccade.ALiBi(torch.ones(heads)), saccade.RelativeBias(torch.zeros(8, heads))):
        with pytest.raises(ValueError) as error:
            saccade.attention(*shaped(), bias=bias, backend=backend)
        words(error, "bias", str(heads), "6", "head")


def test_bad_bias_values():
    with pytest.raises(ValueError, match="(?s)slopes.*"):
        saccade.ALiBi(torch.ones(2, 3))
    with pytest.raises(TypeError, match="slopes"):
        saccade.ALiBi([0.5, 0.25])
    with pytest.raises(TypeError, match="slopes"):
        saccade.ALiBi(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="table"):
        saccade.RelativeBias(torch.zeros(8))
    with pytest.raises(TypeError, match="table"):
        saccade.RelativeBias("table")
    with pytest.raises(ValueError, match="max_distance"):
        saccade.RelativeBias(torch.zeros(32, 3), max_distance=0)
    for buckets in (0, 1):
        with pytest.raises(ValueError, match="bucket"):
            saccade.RelativeBias(torch.zeros(buckets, 3))


@looped("mask", ["causal", 3, [[True]], np.ones((11, 13), dtype=bool), saccade.Causal])
def test_mask_of_another_type(mask, backend):
    with pytest.raises(TypeError) as error:
        saccade.attention(*shaped(), mask, backend=backend)
    words(error, "mask")


def test_masks_that_do_not_fit_the_call(backend):
    misfits = {
        "batch": saccade.Padding(torch.tensor([5, 7, 11])),
        "13": saccade.Padding(torch.tensor([5, 17])),
        "keys": saccade.Padding(torch.ones(2, 11, dtype=torch.bool)),
        "11": saccade.Padding(torch.tensor([5, 13]), queries=torch.tensor([3, 12])),
    }
    for word, mask in misfits.items():
        with pytest.raises(ValueError) as error:
            saccade.attention(*shaped(), mask, backend=backend)
        words(error, (word, "Lk", "Lq", "length"))


@pytest.mark.parametrize(("left", "right"), [(-1, 0), (0, -3), (-2, None)])
def test_negative_windows(left, right):
    with pytest.raises(ValueError, match="(?s)-[123]"):
        saccade.Window(left, right)


def test_negative_lengths():
    with pytest.raises(ValueError, match="(?s)length.*-2|-2.*length"):
        saccade.Padding(torch.tensor([3, -2]))


@looped("name", ["nativ", "", "flash", "SDPA"])
def test_unknown_backend(name):
    with pytest.raises(ValueError) as error:
        saccade.attention(*shaped(), backend=name)
    words(error, "backend", repr(name), "reference", "chunked", "sdpa", "auto")


def test_backend_of_another_type():
    with pytest.raises((TypeError, ValueError), match="backend"):
        saccade.attention(*shaped(), backend=None)


def test_refusals_come_from_every_function():
    query, key, value = shaped(query=(2, 5, 11, 5))
    for call in (saccade.attention, saccade.attention_with_lse, saccade.explain):
        with pytest.raises(ValueError, match="(?i)head|Hq"):
            call(query, key, value)
    with pytest.raises(ValueError, match="(?i)head|Hq"):
        saccade.attention_weights(query, key)
    with pytest.raises(TypeError, match="bias="):
        saccade.attention_weights(torch.zeros(2, 6, 11, 5), key, torch.zeros(11, 13))


def test_options_are_by_name_only():
    with pytest.raises(TypeError):
        saccade.attention(*shaped(), None, torch.zeros(11, 13))


def test_nothing_is_drawn_before_a_refusal():
    before = torch.get_rng_state()
    with pytest.raises(ValueError):
        saccade.attention(*shaped(value=(2, 3, 17, 7)), dropout=0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_problem_sizes_are_what_these_tests_assume():
    assert [tuple(t.shape) for t in problems.tensors().values()] == [tuple(t.shape) for t in shaped()]
