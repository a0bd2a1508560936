"""Images of classes: how they are read and changed, what is learned from them, and what a test draws."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import shutil
import subprocess

import numpy as np
import pytest
import torch
from PIL import Image

from looped import looped
from published import transformers, written
from saccade import cli, tasks
from saccade.models.signals.images import FORMATS
from saccade.tasks._classes._confusion import side_of
from saccade.tasks._classes._results import worst
from saccade.tasks._example_task import ExampleObjective
from saccade.tasks._media._augmenting import Augmentation
from saccade.tasks._media._image_picture import WORDS, ImagePanel, class_token_attention, image_picture
from saccade.tasks._media._images import IMAGES, PixelStore, decoded, read_image, usual_size
from saccade.tasks._media._neighbours import nearest_neighbours
from saccade.training import Settings
from tasks.pictures import HEIGHT, SMALL, WIDTH, write_classes
from tasks.test_kills import survives_kills
from training.test_killing import server

__all__ = ["server"]  # a fixture


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """`shapes` to train on, `unseen` to test with: folders of classes."""
    folder = tmp_path_factory.mktemp("images")
    write_classes(folder / "shapes", 181, 3)
    write_classes(folder / "unseen", 61, 5)
    return folder


@pytest.fixture(scope="session")
def learned_images(images):
    """A run that has learned them; trained once, and never written to."""
    return tasks.train("image", images / "shapes", images / "learned", **SMALL)


@pytest.fixture(scope="session")
def begun(images):
    """A task, its examples and a model that has learned nothing."""
    task = tasks.ClassifyImages(width=24, layers=2, heads=2, patch=3)
    examples = task.read(images / "unseen")
    task = task.fitted(examples)
    torch.manual_seed(5)
    return task, examples, task.new_model(examples)


# --- what is learned --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_learns_what_can_be_learned(learned_images, images):
    report = tasks.test(learned_images, images / "unseen")
    assert report.metrics["accuracy"] == report.metrics["macro F1"] == 1.0
    assert not report.better
    files = [images / "unseen" / "steep" / "002.png", images / "unseen" / "flat" / "000.png"]
    found = tasks.predict(learned_images.folder, [str(file) for file in files])
    assert [(one["image"], one["label"]) for one in found] == [(str(files[0]), "steep"), (str(files[1]), "flat")]
    assert len(tasks.predict(learned_images, images / "unseen")) == 61
    (alone,) = tasks.predict(learned_images, files[0])
    assert alone["probabilities"] == pytest.approx(found[0]["probabilities"], abs=1e-6)


@pytest.mark.slow
def test_does_not_learn_what_cannot_be_learned(images, tmp_path):
    """That truth reaches the model only through the training labels: nothing leaks from images to be judged."""
    task = tasks.ClassifyImages()
    examples = task.read(images / "shapes")
    labels = np.random.default_rng(7).permutation([example.label for example in examples])
    rows = [f"{example.path},{label}" for example, label in zip(examples, labels, strict=True)]
    (tmp_path / "shuffled.csv").write_text("\n".join(["file,label", *rows]) + "\n")
    run = tasks.train("image", tmp_path / "shuffled.csv", tmp_path / "run", **SMALL)
    accuracy = tasks.test(run, images / "unseen", baseline=False).metrics["accuracy"]
    assert abs(accuracy - 1 / 3) < 4 * (2 / 9 / 61) ** 0.5


@pytest.mark.slow
def test_transformers_opens_the_run_and_says_the_same(learned_images, images):
    """Catches a folder that only we can read: names, configuration, mean and deviation of the pixels."""
    library = transformers()
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    theirs = library.AutoModelForImageClassification.from_pretrained(learned_images.folder).eval()
    assert type(theirs).__name__ == "ViTForImageClassification"
    processor = ViTImageProcessorPil.from_pretrained(learned_images.folder)
    files = sorted((images / "unseen" / "flat").iterdir())[:5]
    pixels = processor([np.asarray(Image.open(file))[..., None] for file in files], return_tensors="pt")
    with torch.no_grad():
        probabilities = theirs(**pixels).logits.softmax(-1)
    ours = [list(one["probabilities"].values()) for one in tasks.predict(learned_images, [str(file) for file in files])]
    np.testing.assert_allclose(ours, probabilities, atol=1e-6)
    assert [theirs.config.id2label[n] for n in range(3)] == list(learned_images.task.labels)


@pytest.mark.slow
def test_from_a_published_model(images, tmp_path):
    """Catches size, mean and deviation of our own in the place of the checkpoint's, and a head that is kept."""
    config = transformers().ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, image_size=15, patch_size=5
    )
    written(tmp_path / "published", "ViTForImageClassification", config)
    processor = {"image_processor_type": "ViTImageProcessor", "size": 15, "image_mean": [0.1, 0.2, 0.3]}
    (tmp_path / "published" / "preprocessor_config.json").write_text(json.dumps(processor))
    options = {"steps": 150, "rate": 6e-3, "batch": 19, "precision": "no", "shift": 0.0, "patience": 99}
    run = tasks.train("image", images / "shapes", tmp_path / "run", initial=tmp_path / "published", **options)
    assert json.loads((run.folder / "preprocessor_config.json").read_text()) == processor
    assert tasks.test(run, images / "unseen", baseline=False).metrics["accuracy"] > 0.9
    (example, *_) = run.task.read(images / "unseen")
    batch = run.task.collate(run.model, run.task.encode(run.model, [example]))
    torch.testing.assert_close(batch["pixel_values"], run.model.prepare(example.path)["pixel_values"], rtol=0, atol=0)


@pytest.mark.slow
def test_kills(server, images, tmp_path):
    options = """--layers 1 --heads 2 --width 12 --patch 5 --batch 17 --accumulate 2 --precision bf16 --steps 17
    --every 5 --checkpoint-every 3 --class-weights --label-smoothing 0.1 --shift 0.2 --rotate 9 --zoom 0.1 --flip
    --dropout 0.2""".split()
    files = survives_kills(server, tmp_path, ["train", "image", str(images / "unseen"), *options], 3)
    assert {"task.json", "preprocessor_config.json", "config.json", "model.safetensors"} <= files


def test_parts_of_a_batch_weigh_what_they_are_a_mean_over(begun):
    task, examples, model = begun
    task = dataclasses.replace(task, class_weights=True, label_smoothing=0.2).fitted(examples[:29] + examples[41:46])
    made = ExampleObjective(task, model.eval(), examples, examples[:3], Settings(steps=9, batch=13, seed=2))
    batch = made.batch(1)
    parts = made.split(batch, 3)
    assert [len(part["pixel_values"]) for part in parts] == [5, 4, 4]
    shares = [made.weight(part) / made.weight(batch) for part in parts]
    joined = sum(share * made.loss(model, part) for share, part in zip(shares, parts, strict=True))
    torch.testing.assert_close(joined, made.loss(model, batch))


# --- images as they are read ------------------------------------------------------------------------------------------


def test_every_mode_becomes_what_it_shows(tmp_path):
    """Catches 16 bits cut to their lower half, palettes read as grey values, and transparency that shows its colour."""
    draw = np.random.default_rng(1)
    grey = draw.integers(0, 256, (7, 5)).astype(np.uint8)
    colours = draw.integers(0, 256, (7, 5, 3)).astype(np.uint8)
    seen = np.where(draw.random((7, 5)) < 0.5, 255, 0).astype(np.uint8)  # opaque or not
    on_white = np.where(seen[..., None] > 0, colours, 255)
    palette = Image.fromarray(grey // 64).convert("P")
    palette.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200, 90, 90, 90])
    cases = {
        "1.png": (Image.fromarray(grey > 99), np.where(grey > 99, 255, 0)[..., None].repeat(3, -1)),
        "L.png": (Image.fromarray(grey), grey[..., None].repeat(3, -1)),
        "I;16.png": (Image.fromarray(grey.astype(np.uint16) * 256 + 255 - grey), grey[..., None].repeat(3, -1)),
        "RGBA.png": (Image.fromarray(np.dstack([colours, seen])), on_white),
        "P.png": (palette, np.array([[200, 0, 0], [0, 200, 0], [0, 0, 200], [90, 90, 90]])[grey // 64]),
    }
    for name, (image, expected) in cases.items():
        image.save(tmp_path / name)
        np.testing.assert_array_equal(np.asarray(decoded(tmp_path / name, 3)), expected, err_msg=name)
        luma = np.asarray(Image.fromarray(expected.astype(np.uint8)).convert("L"))
        np.testing.assert_array_equal(np.asarray(decoded(tmp_path / name, 1)), luma, err_msg=name)
    Image.fromarray(draw.random((3, 3)).astype(np.float32)).save(tmp_path / "F.tiff")
    with pytest.raises(ValueError, match="F.tiff: the mode 'F' has no fixed range; save it with 8 or 16 bits"):
        decoded(tmp_path / "F.tiff")


def test_a_name_opens_no_other_format(tmp_path, monkeypatch):
    """PostScript in a .png ran Ghostscript, with the file as its program."""
    monkeypatch.setattr(subprocess, "Popen", lambda *asked, **how: pytest.fail(f"started {asked}"))
    path = tmp_path / "x.png"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(any) pop\n%%EOF\n")
    for kind in ("", *sorted({"EPS", "PSD", "ICNS", "TGA", "PCX", "SGI", "DDS", "PDF"} - {*FORMATS})):
        if kind in Image.SAVE:
            drawing = io.BytesIO()
            Image.new("RGB", (16, 16), "red").save(drawing, kind)
            path.write_bytes(drawing.getvalue())
        with pytest.raises(ValueError, match=r"x.png: no image of a known format; expected one of PNG, JPEG, GIF"):
            decoded(path)
    for kind in FORMATS:
        Image.new("RGB", (7, 5), "red").save(path, kind)
        assert decoded(path).size == (7, 5)


def test_a_new_model_reads_images_as_large_as_they_are(begun, tmp_path):
    task, examples, model = begun
    assert (model.channels, model.size, model.grid) == (1, (12, 9), (4, 3))  # 13 and 11 down to whole patches
    settings = json.loads((model.folder / "preprocessor_config.json").read_text())
    reduced = [np.asarray(Image.open(example.path).resize((9, 12), Image.Resampling.BILINEAR)) for example in examples]
    assert settings["image_mean"] == [pytest.approx(np.mean(reduced) / 255, abs=6e-5)]
    assert settings["image_std"] == [pytest.approx(np.std(reduced) / 255, abs=6e-5)]
    batch = task.collate(model, task.encode(model, examples))
    assert batch["pixel_values"].mean().abs() < 1e-3 and abs(batch["pixel_values"].std() - 1) < 1e-3
    Image.new("RGB", (300, 200), (9, 99, 200)).save(tmp_path / "photo.png")
    mixed = [*examples[:2], read_image(tmp_path / "photo.png", "flat", "")]
    colourful = task.new_model(mixed)
    assert colourful.channels == 3
    assert task.collate(colourful, task.encode(colourful, mixed))["pixel_values"].shape == (3, 3, 12, 9)
    assert usual_size(mixed[2:], 64, 8) == (40, 64)  # 42.7 down to whole patches


def test_pixels_are_the_same_where_they_do_not_fit_into_memory(begun):
    task, examples, model = begun
    kept = task.encode(model, examples)[0].store
    read = PixelStore(kept.inputs, examples, memory=100)
    numbers = [7, 3, 50, 3]
    np.testing.assert_array_equal(read.pixels(numbers), kept.pixels(numbers))


# --- images as they are changed ---------------------------------------------------------------------------------------


class Fixed:
    """Draws of a generator that are known."""

    def __init__(self, *uniform, below=0.9):
        self._uniform, self._below = list(uniform), below

    def uniform(self, low, high, size):
        return np.full(size, self._uniform.pop(0))

    def random(self, count):
        return np.full(count, self._below)


def by_hand(image, turn, larger, moved, mirror):
    """Bilinear, pixel by pixel: each is looked up where the inverse map sends its centre."""
    height, width = image.shape
    found = np.empty_like(image)
    for row in range(height):
        for column in range(width):
            x, y = (column + 0.5 - width / 2) * mirror, row + 0.5 - height / 2
            across = (math.cos(turn) * x - math.sin(turn) * y) / larger + moved[0] + width / 2 - 0.5
            down = (math.sin(turn) * x + math.cos(turn) * y) / larger + moved[1] + height / 2 - 0.5
            across, down = min(max(across, 0), width - 1), min(max(down, 0), height - 1)
            left, top = min(int(across), width - 2), min(int(down), height - 2)
            b, a = across - left, down - top
            square = image[top : top + 2, left : left + 2]
            found[row, column] = np.array([1 - a, a]) @ square @ np.array([1 - b, b])
    return found


@pytest.mark.parametrize("mirror", [1, -1])
def test_images_are_changed_as_geometry_has_it(mirror):
    """Catches sides taken for each other: turned in units of a side, an image that is not square is sheared."""
    image = np.random.default_rng(4).random((7, 11))
    change = Augmentation(shift=0.3, rotate=30.0, zoom=0.25, flip=True)
    draws = Fixed(0.7, -0.5, -0.6, below=0.1 if mirror < 0 else 0.9)
    values = torch.from_numpy(image)[None, None]
    expected = by_hand(image, math.radians(21), 1.25**-0.5, (-2, -1), mirror)  # -0.18 of 11 and of 7 pixels
    np.testing.assert_allclose(change(values, draws)[0, 0], expected, atol=1e-12)


def test_shifts_move_whole_pixels_and_repeat_the_border():
    image = torch.rand(1, 2, 7, 11)
    moved = Augmentation(shift=0.2)(image, Fixed(0.0, 0.0, 1.0))
    expected = torch.nn.functional.pad(image, (0, 2, 0, 1), mode="replicate")[..., 1:, 2:]
    torch.testing.assert_close(moved, expected, atol=1e-5, rtol=0)


def test_images_are_changed_anew_in_each_step_and_never_while_judging(begun):
    task, examples, model = begun
    task = dataclasses.replace(task, shift=0.3, flip=True)
    items = task.encode(model, [examples[0]] * 23)
    plain = task.collate(model, items)["pixel_values"]
    assert (plain == plain[:1]).all()
    first, second, again = (
        task.collate(model, items, np.random.default_rng(seed))["pixel_values"] for seed in (1, 2, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert len(torch.unique(first, dim=0)) > 15  # each image its own draws
    unchanged = dataclasses.replace(task, shift=0.0, flip=False)
    assert torch.equal(unchanged.collate(model, items, np.random.default_rng(1))["pixel_values"], plain)


# --- a test's baseline and its picture --------------------------------------------------------------------------------


def test_the_baseline_is_nearest_neighbours(images, monkeypatch):
    """Against scikit-learn's classifier on the same pixels; k is chosen by the validation images alone."""
    from sklearn.neighbors import KNeighborsClassifier

    examples = IMAGES.checked(IMAGES.in_class_folders(images / "shapes"), read_image, False)
    training, validation, tested = examples[::2], examples[1::4], examples[3::4]
    outputs, what = nearest_neighbours(training, validation, tested, ("flat", "square", "steep"))
    known, judged, asked = (
        [np.asarray(Image.open(one.path)).ravel() / 255 for one in part] for part in (training, validation, tested)
    )
    models = {k: KNeighborsClassifier(k).fit(known, [one.label for one in training]) for k in (1, 3, 5, 9, 15)}
    right = {k: model.score(judged, [one.label for one in validation]) for k, model in models.items()}
    best = max(right, key=right.__getitem__)
    assert what == f"nearest neighbours on pixels (k = {best})"
    np.testing.assert_allclose(outputs, models[best].predict_proba(asked), atol=1e-12)
    monkeypatch.setattr("saccade.tasks._media._neighbours.KNOWN", 4 * HEIGHT * WIDTH * 17)
    assert ", 17 of 91 images)" in nearest_neighbours(training, validation, tested, ("flat", "square", "steep"))[1]


@pytest.mark.slow
def test_attention_of_the_class_token_is_that_of_transformers(begun, tmp_path):
    task, examples, model = begun
    model.save(tmp_path)
    theirs = transformers().ViTModel.from_pretrained(tmp_path, attn_implementation="eager", add_pooling_layer=False)
    values = task.collate(model, task.encode(model, examples[:3]))["pixel_values"]
    with torch.no_grad():
        expected = theirs.eval()(values, output_attentions=True).attentions[-1][:, :, 0].mean(1)
    np.testing.assert_allclose(class_token_attention(model, values), expected, atol=1e-6)


def test_the_picture_shows_the_surest_mistakes():
    outputs = [np.array(row) for row in ([0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.05, 0.95], [0.55, 0.45])]
    assert worst(outputs, np.array([1, 1, 1, 0, 0])) == [3, 0, 2, 4, 1]
    assert worst(outputs, np.array([0, 1, 0, 1, 0])) == [4, 2, 1, 0, 3]  # none is wrong: the least sure first


@pytest.mark.slow
def test_a_picture_says_taken_for_of_wrong_ones_only():
    """And two rows of images are as high as the images, with no empty band between them."""
    weights = np.array([0.3, 0.1, 0.2, 0.05, 0.25, 0.03, 0.07])
    pixels = np.full((13, 26, 3), 90, np.uint8)
    right, wrong = (ImagePanel(pixels, weights, (2, 3), "flat", found, 0.7) for found in ("flat", "steep"))
    counts = [[1, 1], [0, 0]]
    for panels, heading in (([right], "Right, and"), ([wrong], "Wrong, and"), ([wrong, right], "The wrong ones, and")):
        drawn = image_picture(["flat", "steep"], counts, panels, "svg").decode()
        assert drawn.count("taken for") == panels.count(wrong) and drawn.count("rightly named") == panels.count(right)
        assert f"<!-- {heading}" in drawn and "weight of a patch" in drawn
    height = float(drawn.split('height="')[1].split("pt")[0]) / 72
    assert height == pytest.approx(side_of(["flat", "steep"]) + WORDS + 2 * 1.5 * 13 / 26)
    np.testing.assert_array_equal(right.of_patches, [[0.1, 0.2, 0.05], [0.25, 0.03, 0.07]])  # without the class token


@pytest.mark.slow
def test_the_picture(learned_images, images, tmp_path):
    report = tasks.test(learned_images, images / "unseen", baseline=False)
    for kind, start in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        report.save_picture(tmp_path / f"shapes.{kind}")
        assert (tmp_path / f"shapes.{kind}").read_bytes().startswith(start)


# --- bad input --------------------------------------------------------------------------------------------------------


def tabled(folder, content, name="a.csv"):
    (folder / name).write_text(content)
    return folder / name


@pytest.mark.slow
@pytest.mark.filterwarnings("default::UserWarning")
def test_a_warning_is_a_line(learned_images, images, tmp_path, capsys):
    shutil.copytree(images / "unseen" / "flat", tmp_path / "some")
    (tmp_path / "some" / "cut.png").write_bytes(b"no image")
    run = str(learned_images.folder)
    assert cli.main(["predict", run, str(tmp_path / "some"), "--set", "skip_broken=true"]) == 0
    captured = capsys.readouterr()
    assert [json.loads(line)["label"] for line in captured.out.splitlines()] == ["flat"] * 21
    expected = f"1 of 22 images are broken and left out: {tmp_path / 'some' / 'cut.png'}"
    assert captured.err == f"saccade: warning: {expected}\n"


@looped(
    ("content", "error", "message"),
    [
        (
            "path,label\na.png,x\n",
            ValueError,
            r"a.csv: no column 'file' in the first line, which must name them; it has 'path', 'label'$",
        ),
        ("file,label\nno.png,x\n", FileNotFoundError, r"a.csv: line 2: .*no.png: no such image file$"),
        ("file,label\n,x\n", ValueError, r"a.csv: line 2: expected the path of an image, got ''$"),
        ("file,label\ngood.png,\n", ValueError, r"a.csv: line 2: expected a label, a word or an integer, got ''$"),
        (
            "file,label\ngood.png,x\ncut.png,y\n",
            ValueError,
            r"a.csv: line 3: .*cut.png: damaged, or not an image .*; remove",
        ),
        (
            "file,label\ngood.png,x\ngood.png,x\n",
            ValueError,
            r"label: expected two classes or more, every image is 'x' \(one of them: .*a.csv: line",
        ),
        (
            "file,label\ngood.png,x\ngood.png,x\ngood.png,y\n",
            ValueError,
            r"a.csv: line 4: is the only image of 'y', too few to split; add images of it, leave it out, or give --val",
        ),
    ],
)
def test_bad_tables_are_told_in_one_line_and_nothing_is_written(tmp_path_factory, images, content, error, message):
    folder = tmp_path_factory.mktemp("bad")
    good = (images / "shapes" / "flat" / "000.png").read_bytes()
    (folder / "good.png").write_bytes(good)
    (folder / "cut.png").write_bytes(good[: len(good) // 2])
    with pytest.raises(error, match=message) as raised:
        tasks.train("image", tabled(folder, content), folder / "out", **SMALL)
    assert "\n" not in str(raised.value)
    assert not (folder / "out").exists()


def test_bad_folders_and_options(images, tmp_path):
    def train(data, **options):
        return tasks.train("image", data, tmp_path / "out", **{**SMALL, **options})

    (tmp_path / "empty").mkdir()
    shutil.copytree(images / "unseen" / "flat", tmp_path / "some" / "flat")
    (tmp_path / "some" / "dog").mkdir()
    (tmp_path / "other" / "dog").mkdir(parents=True)  # files of another kind in each class
    (tmp_path / "other" / "dog" / "a.wav").touch()
    cases = [
        (tmp_path / "no", {}, FileNotFoundError, "no: no such file or folder"),
        (tmp_path / "empty", {}, ValueError, "empty: holds no images; expected a folder for each class with images"),
        (images / "unseen" / "flat", {}, ValueError, "flat: holds no images; expected a folder for each class"),
        (tmp_path / "other", {}, ValueError, "other: holds no images; expected a folder for each class"),
        (tmp_path / "some", {}, ValueError, "dog: holds no images; remove the folder, or put images of the class in"),
        (images / "unseen", {"shift": 1.0}, ValueError, r"shift: must be in \[0, 1\), got 1.0"),
        (images / "unseen", {"patch": 14}, ValueError, "patch: must be at most the 13 pixels of the images' long"),
        (images / "unseen", {"patch": 99}, ValueError, "patch: must be at most longest=64, got 99"),
        (images / "unseen", {"heads": 5}, ValueError, "heads: must divide the width, got heads=5 and width=24"),
        (images / "unseen", {"longest": 0}, ValueError, "longest: must be at least 1, got 0"),
    ]
    for data, options, error, message in cases:
        with pytest.raises(error, match=message):
            train(data, **options)
    assert not (tmp_path / "out").exists()
    task = tasks.ClassifyImages(labels=("flat", "steep"))
    with pytest.raises(ValueError, match="the label 'square' is not in the training data, which has 'flat', 'steep'$"):
        task.read(images / "unseen")
    with pytest.raises(FileNotFoundError, match="nowhere.png: no such image file"):
        task.inputs(["nowhere.png"])
    with pytest.raises(ValueError, match="empty: holds no images"):
        task.read_inputs(tmp_path / "empty")


def test_broken_images_may_be_left_out(images, tmp_path):
    shutil.copytree(images / "unseen", tmp_path / "some")
    for name in ("000.png", "006.png"):
        (tmp_path / "some" / "flat" / name).write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"000.png: no image of .* \(broken: 2 of 61 images\); .*let skip_broken"):
        tasks.ClassifyImages().read(tmp_path / "some")
    task = tasks.ClassifyImages(skip_broken=True)
    with pytest.warns(UserWarning, match=r"^2 of 61 images are broken and left out: \S*000.png, \S*006.png$"):
        assert len(task.read(tmp_path / "some")) == 59
    with pytest.raises(ValueError, match="no image is left, all 1 are broken"):
        task.read_inputs(tmp_path / "some" / "flat" / "000.png")


def test_tables_know_the_images_they_name(images, tmp_path):
    """A run knows its data by their content: an image that changes is other data."""
    task = tasks.ClassifyImages(file="where")
    shutil.copytree(images / "unseen" / "flat", tmp_path / "pictures")
    table = tabled(tmp_path, '{"where": "pictures/000.png", "label": 7}\n', "a.jsonl")
    assert task.files(table) == [table, tmp_path / "pictures" / "000.png"]
    (example,) = task.read(table)
    assert (example.label, example.shape, example.grey) == ("7", (HEIGHT, WIDTH), True)
    assert [one.path for one in task.read_inputs(table)] == [tmp_path / "pictures" / "000.png"]
    (tmp_path / "list.txt").write_text("pictures/003.png\npictures/000.png\n")
    assert [one.path.name for one in task.read_inputs(tmp_path / "list.txt")] == ["003.png", "000.png"]
    (tmp_path / "list.txt").write_text("pictures/003.png\npictures/no.png\n")
    with pytest.raises(FileNotFoundError, match="list.txt: line 2: .*no.png: no such image file$"):
        task.read_inputs(tmp_path / "list.txt")
