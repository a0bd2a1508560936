"""Where data comes from, that it is what went into attention, and what is said where it cannot be used."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from saccade import Causal, Window, attention
from saccade.benchmark.variants import ProblemSizes, model_data, random_data, tensor_data
from saccade.benchmark.variants.data import TEXT
from saccade.inspection import open_model

SHAPES = {"query": (2, 6, 11, 5), "key": (2, 3, 11, 5), "value": (2, 3, 11, 7)}


@pytest.fixture
def tensors():
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def model():
    return open_model()


def test_random_numbers_are_normal_and_seeded():
    data = random_data("2,3,64")
    assert data.sizes == ProblemSizes(2, 3, 3, 64, 64, 0, True)
    query, key, value = data.at(129, seed=5)
    assert query.shape == key.shape == value.shape == (2, 3, 129, 64)
    for one in (query, key, value):  # 49,536 numbers: standard errors of 0.0045 and 0.0032
        assert abs(float(one.mean())) < 0.025
        assert abs(float(one.std()) - 1) < 0.02
    assert not torch.equal(query, key)
    assert all(torch.equal(*pair) for pair in zip(data.at(129, seed=5), (query, key, value), strict=True))
    assert not torch.equal(data.at(129, seed=6)[0], query)
    assert data.real(10**6)
    assert random_data("1,1,1", causal=False).sizes.causal is False


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("2,3", "random: expected batch, heads and width as 1,8,64; got '2,3'"),
        ("2,3,x", "random: expected batch, heads and width as 1,8,64; got '2,3,x'"),
        ("2,0,3", "random: batch, heads and width must be at least 1, got '2,0,3'"),
    ],
)
def test_random_numbers_of_no_shape(shape, words):
    with pytest.raises(ValueError, match=words):
        random_data(shape)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_file(tmp_path, tensors, suffix):
    path = tmp_path / f"it{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(tensors, path)
    data = tensor_data(path)
    assert data.source == str(path)
    assert data.sizes == ProblemSizes(2, 6, 3, 5, 7, 11, True)
    for name, held in zip(SHAPES, data.at(11, seed=0), strict=True):
        assert torch.equal(held, tensors[name])
    assert data.real(11)
    assert not data.real(12)


def test_shorter_is_the_beginning_and_longer_is_drawn_alike(tmp_path, tensors):
    path = tmp_path / "it.pt"
    torch.save(tensors, path)
    data = tensor_data(path, causal=False)
    assert torch.equal(data.at(4, seed=0)[1], tensors["key"][:, :, :4])
    drawn = data.at(97, seed=3)
    assert [one.shape[2] for one in drawn] == [97] * 3
    # each token comes as a whole: the same place of query, key and value
    places = (drawn[0][0, 0, :, None] == tensors["query"][0, 0]).all(-1).float().argmax(1)
    assert len(places.unique()) == 11  # one is missed with probability 11 (10 / 11)^97 = 0.001, and not by this seed
    for one, name in zip(drawn, SHAPES, strict=True):
        assert torch.equal(one, tensors[name][:, :, places])


def test_half_precision_is_read_as_float32(tmp_path, tensors):
    path = tmp_path / "it.pt"
    torch.save({name: one.bfloat16() for name, one in tensors.items()}, path)
    assert tensor_data(path).query.dtype == torch.float32


NO_VALUES = r"value: expected \(batch, heads, length, width\), got \(2, 3, 0, 7\)"
SHORT_KEY = r"key: expected batch 2 and length 11, as the query has, got \(2, 3, 10, 5\)"
FEW_VALUES = r"value: expected batch 2 and length 11, as the query has, got \(1, 3, 11, 7\)"
BAD = [
    (lambda t: t.pop("key"), "expected the tensors query, key and value; it holds query, value"),
    (lambda t: t.update(key=t["key"][0]), r"key: expected \(batch, heads, length, width\), got \(3, 11, 5\)"),
    (lambda t: t.update(value=t["value"][:, :, :0]), NO_VALUES),
    (lambda t: t.update(query=t["query"].long()), "query: expected floating point, got torch.int64"),
    (lambda t: t["key"].fill_(float("nan")), "key: contains NaN or infinity"),
    (lambda t: t.update(key=t["key"][:, :, :10]), SHORT_KEY),
    (lambda t: t.update(value=t["value"][:1]), FEW_VALUES),
    (lambda t: t.update(key=t["key"][..., :4]), r"key: expected width 5, as the query has, got \(2, 3, 11, 4\)"),
    (lambda t: t.update(value=t["value"][:, :2]), "value: expected as many heads as the key.*got 2 and 3"),
    (lambda t: t.update(query=t["query"][:, :4]), "a divisor of the query's 4, got 3 and 3"),
]


@pytest.mark.parametrize(("spoil", "words"), BAD)
def test_tensors_that_do_not_fit(tmp_path, tensors, spoil, words):
    spoil(tensors)
    path = tmp_path / "it.pt"
    torch.save(tensors, path)
    with pytest.raises(ValueError, match=words):
        tensor_data(path)


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.pt: no such file"):
        tensor_data(tmp_path / "nowhere.pt")
    with pytest.raises(ValueError, match="tensors: expected a file that ends in .safetensors or .pt, got it.npy"):
        tensor_data(tmp_path.__class__("it.npy"))
    for name in ("it.pt", "it.safetensors"):
        broken = tmp_path / name
        broken.write_bytes(b"beads")
        with pytest.raises(ValueError, match=f"{name}: cannot be read as"):
            tensor_data(broken)
    torch.save([torch.ones(3)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="expected a dict of the tensors query, key and value, got list"):
        tensor_data(tmp_path / "list.pt")


def test_the_embedded_model_s_own_attention(model):
    """The data, put into attention, gives what the model's layer got."""
    data = model_data(layer=1, most=10**6)
    assert data.sizes == ProblemSizes(1, 8, 8, 32, 32, 256, True)
    assert data.source.startswith("the embedded model, layer 1 of 4, reading 256 tokens of the start of The Hound")
    seen = {}
    ids = model.encode(TEXT.read_text(encoding="utf-8").strip()).ids[: model.room]
    model.run(model.whole(ids), lambda layer, call: seen.update({layer: call.out.clone()}))
    query, key, value = data.at(256, seed=0)
    torch.testing.assert_close(attention(query, key, value, Causal()), seen[1], atol=1e-5, rtol=1e-4)


def test_the_middle_layer_unless_one_is_named(model):
    assert ", layer 2 of 4, " in model_data(most=9).source


def test_text_and_length(tmp_path):
    text = tmp_path / "it.txt"
    text.write_text("The dog barked at the moon, and the moon said nothing.")
    data = model_data(text=text, most=7, causal=False)
    assert data.sizes.length == 7  # the start token is one of them
    assert data.sizes.causal is False
    assert data.source.endswith(f"reading 7 tokens of {text}")


def test_a_model_that_cannot_be_read(tmp_path):
    empty = tmp_path / "it.txt"
    empty.write_text(" \n")
    with pytest.raises(ValueError, match="it.txt: expected texts, got only blanks"):
        model_data(text=empty, most=5)
    with pytest.raises(ValueError, match="layer: the model has layers 0 to 3, got 4"):
        model_data(layer=4, most=5)
    with pytest.raises(FileNotFoundError, match="no such model folder"):
        model_data(str(tmp_path / "nowhere"), most=5)


@pytest.mark.slow
def test_scale_goes_into_the_query_and_the_rest_is_named(monkeypatch):
    """Logits with the standard scale are those of the call; what mechanisms do not know is told."""
    from saccade.benchmark.variants import data as module
    from saccade.operator._call import ObservedCall

    query, key, value = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    call = ObservedCall(query, key, value, None, None, 0.7, 30.0, torch.zeros(2), out=value, source="")
    monkeypatch.setattr(module, "_call", lambda model, ids, layer: call)
    data = model_data(most=5)
    assert data.sizes.causal is False
    assert data.note == "without the softcap and sink that this layer has"
    for mask, told in ((Causal() & Window(2, 0), True), (Causal() & Window(4, 0), False), (Window(2, 2), True)):
        call = ObservedCall(query, key, value, mask, None, None, None, None, out=value, source="")
        assert model_data(most=5).note == ("without the window that this layer has" if told else "")
    torch.testing.assert_close(data.query * 16**-0.5, query * 0.7)
