"""Images as models read them, against transformers' processors on Pillow."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from published import transformers
from saccade.models.signals.images import ImageInputs

OLD_DEIT = {"feature_extractor_type": "DeiTFeatureExtractor", "size": 31, "crop_size": 24, "resample": 3}


def drawn(mode: str, width: int, height: int) -> Image.Image:
    """A gradient under shapes and noise, as photographs have smooth parts, edges and grain."""
    rng = np.random.default_rng(width * height)
    across = np.linspace(0, 255, width)[None, :, None] * np.array([1, 0.5, 0.1])
    down = np.linspace(0, 120, height)[:, None, None] * np.array([0, 0.5, 0.9])
    image = Image.fromarray((across + down + rng.integers(0, 20, (height, width, 3))).clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    pen.ellipse((width // 4, height // 4, width // 2, height // 2), fill=(200, 30, 90))
    pen.line((0, 0, width, height), fill=(10, 250, 40), width=3)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.fromarray(rng.integers(0, 256, (height, width)).astype(np.uint8)))
    return image.convert(mode)


def inputs(folder, settings, channels=3):
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return ImageInputs.of_folder(folder, channels)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ViT", {}),
        ("ViT", {"size": {"height": 13, "width": 29}, "image_mean": [0.485, 0.456, 0.406], "resample": 0}),
        ("ViT", {"size": {"shortest_edge": 17}, "do_center_crop": True, "crop_size": 23, "image_std": [0.2, 0.3, 0.4]}),
        ("ViT", {"size": {"shortest_edge": 40, "longest_edge": 50}, "do_center_crop": True, "crop_size": [12, 60]}),
        ("ViT", {"do_resize": False, "do_center_crop": True, "crop_size": 41, "do_rescale": False}),
        ("ViT", {"do_normalize": False, "resample": 1, "size": 19}),
        ("DeiT", {}),
        ("DeiT", OLD_DEIT),
    ],
)
def test_pixel_values_are_those_of_transformers(tmp_path, name, settings):
    transformers()
    if name == "ViT":
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil as Processor
    else:
        from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil as Processor
    theirs = Processor(**{key: value for key, value in settings.items() if "type" not in key}, do_convert_rgb=True)
    ours = inputs(tmp_path, {"image_processor_type": f"{name}ImageProcessor", **settings})
    sizes = [(53, 37), (37, 61), (300, 211), (1, 1), (19, 19)]
    pictures = [drawn("RGB", *size) for size in sizes] + [drawn(mode, 43, 29) for mode in ("L", "RGBA", "P", "LA")]
    arrays = [np.asarray(drawn("RGB", 31, 23)), np.asarray(drawn("RGBA", 31, 23)).transpose(2, 0, 1)]
    for picture in [*pictures, *arrays]:
        expected = theirs(picture, return_tensors="np")["pixel_values"]
        assert np.array_equal(ours(picture).numpy(), expected)


def test_files_are_read_upright_and_as_the_image_itself(tmp_path):
    ours = inputs(tmp_path, {"size": 20})
    picture, exif = drawn("RGB", 33, 21), Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    picture.save(tmp_path / "a.png"), picture.save(tmp_path / "b.png", exif=exif)
    assert torch.equal(ours([tmp_path / "a.png", str(tmp_path / "a.png")]), ours([picture, picture]))
    assert torch.equal(ours(tmp_path / "b.png"), ours(picture.transpose(Image.Transpose.ROTATE_270)))
    assert torch.equal(ours(torch.from_numpy(np.array(picture))), ours(picture))


def test_what_is_wrong_with_an_image_is_told(tmp_path):
    ours = inputs(tmp_path, {"size": 20})
    drawn("RGB", 60, 60).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no image")
    wrong = [
        (tmp_path / "cut.png", ValueError, "cut.png: damaged, or not an image"),
        (tmp_path / "text.png", ValueError, "text.png: no image of a known format"),
        (tmp_path / "none.png", FileNotFoundError, "none.png: no such image file"),
        ([], ValueError, "images: empty"),
        (3, TypeError, r"images\[0\]: expected a path, a PIL image or an array, got int"),
        (np.zeros((4, 4, 3)), TypeError, "expected an array of uint8, 0 to 255, got float64"),
        (np.zeros((3, 9, 3), np.uint8), ValueError, "both ends may be channels"),
        (np.zeros((9, 9, 2), np.uint8), ValueError, "no end has 3 channels"),
        (np.zeros((0, 9, 3), np.uint8), ValueError, "expected shape"),
        (Image.new("I;16", (4, 4)), ValueError, "8 bits a channel, got mode 'I;16'"),
    ]
    for image, kind, told in wrong:
        with pytest.raises(kind, match=told):
            ours(image)
    with pytest.raises(ValueError, match=r"images\[0\]: expected 1 channels, got 3"):
        inputs(tmp_path, {"size": 20, "image_mean": [0.5], "image_std": [0.5]}, 1)(drawn("RGB", 5, 5))
    with pytest.raises(ValueError, match=r"images: different sizes \(5, 5\), \(5, 7\)"):
        inputs(tmp_path, {"do_resize": False})([drawn("RGB", 5, 5), drawn("RGB", 7, 5)])


def test_what_is_wrong_with_its_settings_is_told(tmp_path):
    wrong = [
        ({"image_processor_type": "ConvNextImageProcessor"}, "processor of ViT or DeiT, got ConvNextImageProcessor"),
        ({"size": -3}, "size: expected a side of pixels"),
        ({"size": 10**6}, "size: expected a side of pixels"),
        ({"size": {"shortest_edge": 3, "longest_edge": "5"}}, "size: expected longest_edge an int"),
        ({"size": {"width": 3}}, "size: expected a side of pixels"),
        ({"resample": 9}, "resample: expected one of 0, 1, 2, 3, 4, 5, got 9"),
        ({"image_mean": [1, 2]}, "image_mean: expected 3 numbers"),
        ({"image_std": [1, 2, 0]}, "image_std: expected 3 numbers"),
        ({"do_pad": True}, "do_pad: expected False"),
    ]
    for settings, told in wrong:
        with pytest.raises(ValueError, match=told):
            inputs(tmp_path, settings)
    with pytest.raises(FileNotFoundError, match=r"preprocessor_config.json: missing"):
        ImageInputs.of_folder(tmp_path / "nowhere", 3)
