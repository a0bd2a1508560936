"""One safetensors file: what comes back is what was written, masks and biases too; damaged and foreign ones not."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import saccade
from saccade import ALiBi, Causal, Documents, Edges, Global, Padding, PerHead, Predicate, RelativeBias, Score, Window
from saccade.monitoring import load

B, L, H, D = 3, 11, 2, 5

MASKS = {
    "none": None,
    "causal": Causal(),
    "placed": (Causal() & Window(3, 0)).at(0),
    "placed by item": Causal().at([0, 2, -1]),
    "padding": Causal() & Padding([7, 11, 2], queries=[7, 11, 2]),
    "padding by booleans": Padding(torch.rand(B, L) > 0.3) | Window(0, 0),
    "documents": ~Documents(torch.arange(L) // 4) & Window(None, 5),
    "documents of two": Documents(torch.arange(L) // 4, torch.arange(L) // 3),
    "remainders": saccade.Dilated(3) & saccade.Chunks(4, 1) | saccade.Columns(5, 2),
    "sparse": Global([1, 4]) | saccade.Strided(3) | saccade.Fixed(4, 2) | saccade.Prefix(2),
    "prefix by item": saccade.Prefix([1, 5, 0]),
    "blocks": saccade.Blocks([[True, False, True]] * 3, 4) | saccade.RandomBlocks(5, 3, 1),
    "edges": Edges([0, 3, 3, 10], [1, 0, 9, 10]) | Window(0, 0),
    "by head": PerHead([Causal(), Window(2, 2)]),
    "booleans": saccade.FromTensor(torch.rand(B, 1, L, L) > 0.4),
    "sliced": Causal().slice((5, 5 + L), (3, 3 + L), lengths=(20, 20)),
    "a function": Predicate(lambda b, h, q, k: (k <= q) & ((q - k) % 3 != 1)).at(0) & Padding([7, 11, 2]),
}
BIASES = {
    "none": None,
    "tensor": torch.randn(1, H, L, L),
    "slopes": ALiBi(torch.tensor([0.5, 0.1])).at(2),
    "slopes by item": ALiBi(torch.tensor([0.5, 0.1])).at([0, 1, 2]),
    "a score of distances": Score(lambda s, b, h, q, k: s - 0.3 * (h + 1) * (q - k).abs()).at([0, 1, 2]),
    "table": RelativeBias(torch.randn(8, H), bidirectional=False, max_distance=20),
}


class Calls(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return saccade.attention(q, k, v, **self.options)


def observed(**options):
    model, inputs = Calls(**options), [torch.randn(B, H, L, D) for _ in range(3)]
    with saccade.watch(model, keep=True) as seen:
        model(*inputs)
    assert not seen.unobserved
    return seen


def again(seen, tmp_path):
    path = tmp_path / "seen.safetensors"
    assert seen.save(path) == {}
    return load(path)


@pytest.mark.parametrize("mask", MASKS)
def test_masks_come_back(mask, tmp_path):
    seen = observed(mask=MASKS[mask])
    read = again(seen, tmp_path)
    assert torch.equal(read.weights(""), seen.weights(""))
    assert torch.equal(read.kept[""].lse, seen.kept[""].lse)
    if MASKS[mask] is not None and mask != "a function":
        assert read.kept[""].mask == MASKS[mask]


@pytest.mark.parametrize("bias", BIASES)
def test_biases_scale_softcap_and_sink_come_back(bias, tmp_path):
    seen = observed(mask=Causal(), bias=BIASES[bias], scale=0.7, softcap=2.0, sink=torch.tensor([0.5, -1.0]))
    read = again(seen, tmp_path)
    assert torch.equal(read.weights(""), seen.weights(""))
    assert (read.kept[""].scale, read.kept[""].softcap) == (0.7, 2.0)
    assert torch.equal(read.kept[""].sink, torch.tensor([0.5, -1.0]))


def test_weights_are_those_that_lse_and_logits_give():
    """From what is kept alone: exp(s - lse), the formula that any other reader of the file would use."""
    kept = observed(mask=Causal(), bias=BIASES["tensor"], softcap=2.0).kept[""]
    logits = 2.0 * torch.tanh(kept.query @ kept.key.mT * D**-0.5 / 2.0) + BIASES["tensor"]
    expected = torch.where(torch.ones(L, L).tril().bool(), logits - kept.lse[..., None], -math.inf).exp()
    torch.testing.assert_close(kept.weights(), expected)
    torch.testing.assert_close(kept.weights(1, slice(3, 5), [0, 4]), expected[:, 1, 3:5][..., [0, 4]])
    assert kept.weights([1]).shape == (B, 1, L, L)


def test_numbers_names_and_what_was_not_seen_come_back(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return torch.cdist(x, x).softmax(-1) @ x

    model = nn.Sequential(nn.TransformerEncoderLayer(10, H, 17, batch_first=True), Odd())
    with saccade.watch(model, gradients=True, every=2) as seen:
        for _ in range(3):
            model(torch.randn(B, L, 10) * 30).sum().backward()
    read = again(seen, tmp_path)
    assert read.table() == seen.table()
    assert (read.steps, read.observed, read.calls) == (3, 2, seen.calls)
    assert read.unobserved == seen.unobserved and read.unobserved
    assert str(read) == str(seen)
    assert read._repr_html_() == seen._repr_html_()
    assert [str(alarm) for alarm in read.alarms] == [str(alarm) for alarm in seen.alarms]


def test_numbers_that_are_not_finite_come_back(tmp_path):
    model = Calls()
    query = torch.randn(B, H, L, D)
    query[0, 0, 3, 2] = math.nan
    with saccade.watch(model) as seen:
        model(query, query, query)
    assert seen.alarms and "not finite" in str(seen)
    read = again(seen, tmp_path)
    assert str(read) == str(seen)


def test_a_score_without_a_form_is_named(tmp_path):
    seen = observed(bias=Score(lambda s, b, h, q, k: s * s))
    assert seen.save(tmp_path / "a.safetensors") == {"": "the bias is a Score, which has no form as plain values"}


def test_a_mask_without_a_form_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("saccade.monitoring._masks_stored.MOST_BITS", 100)
    seen = observed(mask=MASKS["a function"])
    left_out = seen.save(tmp_path / "a.safetensors")
    assert list(left_out) == [""] and "Predicate" in left_out[""] and "363 booleans" in left_out[""]
    read = load(tmp_path / "a.safetensors")
    assert not read.kept and read.aggregates == seen.aggregates


def test_half_precision_is_kept_as_it_is(tmp_path):
    model = nn.Identity()
    model.forward = lambda q: F.scaled_dot_product_attention(q, q, q)
    with saccade.watch(model, keep=True) as seen:
        model(torch.randn(B, H, L, D, dtype=torch.bfloat16))
    read = again(seen, tmp_path)
    assert read.kept[""].query.dtype == torch.bfloat16
    assert torch.equal(read.weights(""), seen.weights(""))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.safetensors: no such file"):
        load(tmp_path / "nothing.safetensors")
    with pytest.raises(FileNotFoundError, match="no such file"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04K\x01.", b"\xff" * 500])
def test_files_that_are_no_safetensors(tmp_path, content):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="a.safetensors: damaged, or no safetensors file"):
        load(path)


def test_a_file_cut_short(tmp_path):
    path = tmp_path / "a.safetensors"
    observed(mask=Causal()).save(path)
    whole = path.read_bytes()
    for length in (7, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged"):
            load(path)


def test_someone_elses_safetensors(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="but not one that saccade.watch"):
        load(tmp_path / "a.safetensors")


def rewritten(tmp_path, change):
    """A file with its header changed."""
    from safetensors import safe_open

    path = tmp_path / "a.safetensors"
    observed(mask=Causal() & Window(3, 0)).save(path)
    with safe_open(path, "pt") as file:
        contents = json.loads(file.metadata()["saccade-watched"])
    tensors = load_file(path)
    change(contents, tensors)
    save_file(tensors, path, metadata={"saccade-watched": json.dumps(contents)})
    return path


CHANGES = {
    "a place without a site": lambda contents, tensors: contents["places"][0].pop("site"),
    "heads that are too many": lambda contents, tensors: contents["places"][0].update(heads=[0, 1, 2]),
    "a tensor is gone": lambda contents, tensors: tensors.pop("0.rows"),
    "queries are gone": lambda contents, tensors: tensors.pop("0.kept.query"),
    "a mask nobody knows": lambda contents, tensors: contents["places"][0]["kept"]["mask"].update(mask="os.system"),
    "a mask of other fields": lambda contents, tensors: contents["places"][0]["kept"]["mask"].update(more=1),
    "a list instead": lambda contents, tensors: contents.update(places=3),
    "alarms of another kind": lambda contents, tensors: contents.update(alarms=[{"kind": "x"}]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_headers_that_do_not_fit(tmp_path, change):
    path = rewritten(tmp_path, CHANGES[change])
    with pytest.raises(ValueError, match="a.safetensors: damaged, its header does not fit"):
        load(path)


def test_a_later_version(tmp_path):
    path = rewritten(tmp_path, lambda contents, tensors: contents.update(version=2))
    with pytest.raises(ValueError, match="version 2 of the format, this Saccade reads 1"):
        load(path)


def test_saving_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    seen = observed()
    seen.save(path)
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space"):
        seen.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
