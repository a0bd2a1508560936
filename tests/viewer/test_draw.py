"""`saccade.draw`: what stands on the axes, read back from matplotlib."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

import saccade
from saccade import Causal, draw

plt = pytest.importorskip("matplotlib.pyplot")
LABELS = ["The", "cat", "sat", "$a_b$", "<b>"]


@pytest.fixture(autouse=True)
def without_a_screen():
    plt.switch_backend("agg")
    yield
    plt.close("all")


def rows(count, keys, seed=0):
    weights = np.random.default_rng(seed).random((count, keys))
    return weights / weights.sum(-1, keepdims=True)


def texts(ticks):
    return [tick.get_text() for tick in ticks]


def svg(axes):
    out = io.BytesIO()
    axes.figure.savefig(out, format="svg")
    return out.getvalue().decode()


def test_a_map_with_labels_is_what_came():
    weights = rows(5, 5)
    axes = draw(weights, queries=LABELS, keys=LABELS, title="$head$ 1")
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), weights)
    assert texts(axes.get_xticklabels()) == texts(axes.get_yticklabels()) == LABELS
    assert axes.get_title("left") == "$head$ 1" and image.get_clim() == (0, weights.max())
    assert "<svg" in svg(axes)  # a dollar begins no formula: "$a_b$ would be one, "$head" an error
    assert {t.get_text() for t in axes.texts} <= {f".{round(100 * w):02d}" for w in weights.ravel()}
    assert len(axes.texts) == (weights >= 0.05 * weights.max()).sum()


@pytest.mark.slow
@pytest.mark.parametrize("given", ["weights", "tensor", "list"])
def test_slices_of_attention_weights(given):
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    weights = saccade.attention_weights(query, key)
    made = {
        "weights": weights,
        "tensor": weights.bfloat16().requires_grad_(),
        "list": weights.tolist(),
    }[given]
    axes = draw(made, item=1)
    assert len(axes) == 3
    for head, one in enumerate(axes):
        tolerance = 2**-7 if given == "tensor" else 1e-7
        np.testing.assert_allclose(one.images[0].get_array(), weights[1, head], atol=tolerance)
        assert one.get_title("left") == f"head {head}" and one.images[0].get_clim() == axes[0].images[0].get_clim()
    single = draw(weights[:1, 1:2, 2], title="one row")  # (1, 1, K): one map of one row
    assert single.images[0].get_array().shape == (1, 7)
    assert draw(weights[0, 0, 0]).images[0].get_array().shape == (1, 7)


def test_what_is_hidden_or_unknown_is_grey():
    weights = rows(5, 5)
    for mask in (Causal(), np.tril(np.ones((5, 5), bool)), torch.ones(5, 5, dtype=torch.bool).tril()):
        shown = draw(weights, mask=mask, numbers=False).images[0]
        assert (np.ma.getmaskarray(shown.get_array()) == np.triu(np.ones((5, 5), bool), 1)).all()
        assert np.allclose(shown.cmap(np.ma.masked)[:3], [0xE3 / 255, 0xE5 / 255, 0xE9 / 255])
    weights[2, 3] = np.nan
    assert np.ma.getmaskarray(draw(weights).images[0].get_array()).sum() == 1
    assert draw(np.full((2, 2), np.nan)) is not None


def test_differences_have_two_sides():
    shown = draw(rows(3, 4) - rows(3, 4, seed=1), limit=0.5).images[0]
    assert shown.get_clim() == (-0.5, 0.5)
    low, middle, high = (shown.cmap(x)[:3] for x in (0.0, 0.5, 1.0))
    assert np.allclose(middle, 1, atol=0.01) and low[0] > low[2] and high[2] > high[0]  # orange, white, blue


@pytest.mark.slow
def test_long_labels_are_cut_and_many_are_thinned():
    many = [f"a very long label, number {i}" for i in range(400)]
    axes = draw(rows(400, 400), queries=many, keys=many)
    shown = texts(axes.get_xticklabels())
    assert 40 < len(shown) < 200 and len(set(np.diff(axes.get_xticks()))) == 1
    assert all(label.endswith("…") and len(label) == 24 for label in shown)
    assert texts(draw(rows(1, 2), keys=["a\nb", "c\x1b"]).get_xticklabels()) == ["a⏎b", "c\ufffd"]


@pytest.mark.slow
def test_labels_that_are_read_do_not_overlap():
    axes = draw(rows(60, 60), queries=["word"] * 60, keys=["word"] * 60)
    axes.figure.draw_without_rendering()
    boxes = [tick.get_window_extent() for tick in axes.get_yticklabels()]
    assert all(not one.overlaps(other) for one, other in itertools.pairwise(boxes))


def test_axes_that_are_given_are_drawn_in():
    figure, grid = plt.subplots(2, 2)
    assert draw(rows(3, 3), ax=grid[0, 0], colorbar=False) is grid[0, 0]
    found = draw(np.stack([rows(3, 3)] * 4), ax=grid)
    assert list(found) == list(grid.ravel()) and len(figure.axes) == 5  # and one bar for all
    with pytest.raises(ValueError, match="ax: expected 4 axes, one a map, got 1"):
        draw(np.stack([rows(3, 3)] * 4), ax=grid[0, 0])


@pytest.mark.parametrize("skip", [1, [0], [-1]])
def test_patches_over_an_image(skip):
    weights, image = rows(2, 13), np.linspace(0, 255, 24 * 40 * 3).reshape(24, 40, 3).astype(np.uint8)
    axes = draw(weights, queries=["[CLS]", "patch 7"], image=image, patches=(3, 4), skip=skip)
    assert [one.get_title("left") for one in axes] == ["[CLS]", "patch 7"]
    for one, row in zip(axes, weights, strict=True):
        picture, cover = one.images
        kept = np.delete(row, skip if isinstance(skip, list) else 0)
        np.testing.assert_allclose(cover.get_array()[..., 3], 0.8 * kept.reshape(3, 4) / kept.max(), atol=1e-6)
        assert list(cover.get_extent()) == list(picture.get_extent()) == [-0.5, 39.5, 23.5, -0.5]
    assert draw(rows(1, 9), image=torch.rand(3, 6, 6)).images[0].get_array().shape == (
        6,
        6,
    )  # a square, as torch has it


@pytest.mark.parametrize(
    ("image", "shown"),
    [
        (np.array([[0, 51], [102, 255]]), [[0, 0.2], [0.4, 1]]),  # bytes
        (np.array([[0.0, 0.2], [0.4, 0.9]]), [[0, 0.2], [0.4, 0.9]]),
        (np.array([[-2.0, -1.0], [0.0, 3.0]]), [[0, 0.2], [0.4, 1]]),  # as a model's normalisation leaves it
        (np.full((2, 2), -3.0), [[0, 0], [0, 0]]),
    ],
)
def test_an_image_in_any_numbers_is_seen(image, shown):
    np.testing.assert_allclose(draw(rows(1, 4), image=image).images[0].get_array(), shown, atol=1e-12)


def test_weights_over_a_sound():
    weights = rows(1, 50)
    axes = draw(weights, sound=np.sin(np.arange(8000)), seconds=2.5, title="frame 3")
    assert axes.get_xlim() == (0, 2.5) and axes.get_xlabel() == "seconds" and axes.get_title("left") == "frame 3"
    (steps,) = axes.patches
    values, edges, _ = steps.get_data()
    np.testing.assert_array_equal(values, weights[0])
    np.testing.assert_allclose(edges, np.linspace(0, 2.5, 51))
    several = draw(rows(3, 50), queries=LABELS[:3], sound=np.random.default_rng(0).random((20, 90)), seconds=2.5)
    assert list(several.images[0].get_extent()) == [0, 2.5, 2.5, -0.5] and several.child_axes[0].images[
        0
    ].get_array().shape == (20, 90)
    assert texts(several.get_yticklabels()) == LABELS[:3]
    assert "<svg" in svg(axes) and "<svg" in svg(several)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(weights=np.ones((2, 3)), keys=["a"]), "keys: expected 3 labels, got 1"),
        (dict(weights=np.ones((2, 3)), queries="ab"), "queries: expected one label for each of 2, got a single str"),
        (dict(weights=np.ones((2, 1, 3, 4))), "item: expected one of the 2 items, 0 to 1"),
        (dict(weights=np.ones((2, 1, 3, 4)), item=2), "item: 2 does not exist; there are 0 to 1"),
        (dict(weights=np.ones((3, 4)), item=0), r"item: only for weights \(B, H, R, K\), got the shape \(3, 4\)"),
        (dict(weights=np.ones((1,) * 5)), "expected .R, K., .H, R, K. or .B, H, R, K., got shape"),
        (dict(weights=np.ones((0, 4))), "got shape"),
        (dict(weights="abc"), "weights: expected a tensor or an array of numbers, got str"),
        (dict(weights=np.ones((2, 3)), mask=np.ones((3, 3))), r"mask: expected shape \(2, 3\), one for each pair, got"),
        (dict(weights=np.ones(10), image=np.ones((4, 4))), "patches: 10 keys are not a square"),
        (
            dict(weights=np.ones(10), image=np.ones((4, 4)), patches=(3, 3)),
            r"patches: expected 10, one for each key that is not skipped \(skip=\), got 3 x 3 = 9",
        ),
        (dict(weights=np.ones(9), image=np.ones(4)), "image: expected .height, width."),
        (dict(weights=np.ones(9), image=np.ones((4, 4)), sound=np.ones(4)), "image: cannot be combined with"),
        (dict(weights=np.ones(9), skip=[9], image=np.ones((4, 4))), "skip: there is no key 9; there are 0 to 8"),
        (dict(weights=np.ones(9), sound=np.ones(4)), "seconds: the length of the sound"),
        (dict(weights=np.ones(9), sound=np.ones(4), seconds=0), "seconds: must be greater than 0"),
        (dict(weights=np.ones(9), seconds=2.0), "seconds: only for a sound"),
        (dict(weights=np.ones((2, 3, 3)), title=["a"]), "title: expected 2 titles, got 1"),
        (dict(weights=np.broadcast_to(np.float32(0), (2**14, 2**13))), "more than a picture holds"),
    ],
)
def test_what_does_not_fit_is_said(given, said):
    with pytest.raises((TypeError, ValueError), match=said):
        draw(**given)
    assert plt.get_fignums() == []


@pytest.mark.slow
def test_without_matplotlib_the_extra_is_named():
    code = """if True:
        import sys
        sys.modules["matplotlib"] = None
        import saccade
        try:
            saccade.draw([[1.0]])
        except ImportError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = 'drawing needs matplotlib: pip install "matplotlib>=3.9" "resvg-py>=0.5"'
    assert done.stdout == f"{told}\n"
