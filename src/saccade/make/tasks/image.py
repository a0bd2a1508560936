"""`image`: pictures of classes. A vision transformer (ViT) of the user's own images, or a published one.

Shape legend: B images of a batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...operator.nn.stacks import LayerObserver
from .._task_registry import ImageOptions
from ..models import Model, load
from ..models.checkpoints.settings import PROCESSOR
from ..models.families.vit import CLASSIFIER, Vit
from ..models.loading import new_model
from ..models.signals.images import ImageInputs
from ._classes._class_task import label_of
from ._classes._results import worst
from ._example_task import Batch, widened
from ._media._augmenting import Augmentation
from ._media._files import MediaTask
from ._media._image_picture import ImagePanel, class_token_attention, image_picture
from ._media._images import (
    IMAGES,
    ImageExample,
    PixelStore,
    pixel_statistics,
    read_image,
    usual_size,
)
from ._media._neighbours import nearest_neighbours
from ._task import Baseline, Tested
from ._temporary import kept_while_used, temporary_folder

PATCHES = 8  # along the longer side of an image, where no size of a patch is asked for


class ImageItem(NamedTuple):
    """An image by its number in a store, and its class if that is known."""

    store: PixelStore
    number: int
    label: int | None


@dataclasses.dataclass(frozen=True)
class ClassifyImages(ImageOptions, MediaTask):
    """Images of classes.

    A new model has one channel if no training image has colours. Mean and deviation of the pixels are stored in
    `preprocessor_config.json`; a checkpoint uses its own, and its own size. Palettes and 16 bits become 8-bit channels,
    and transparent pixels white. Decoded images stay in memory up to 2 GiB. Validation and test images are not changed.
    A picture shows the six images that the model is most wrong about; if fewer are wrong, right ones it is least sure
    of.

    Args:
        file, skip_broken: as in every task of files.
        label, label_smoothing, class_weights, metric: as in every task of classes.
        shift, rotate, zoom, flip: how images are changed at random in training, see `Augmentation`.
        longest: pixels of the longer side that a new model reads at most; smaller images keep their size.
        patch: pixels of a side of its patches; None: about eight patches along the longer side.
        layers, heads, width, dropout: of a new model; a checkpoint has its own.

    Raises:
        ValueError: an option outside of its range.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as folder:  # a folder for each class
        ...     for label in ("cat", "dog"):
        ...         pathlib.Path(folder, label).mkdir()
        ...         Image.new("L", (8, 8)).save(pathlib.Path(folder, label, "1.png"))
        ...     images = saccade.tasks.ClassifyImages().read(pathlib.Path(folder))
        >>> [image.label for image in images]
        ['cat', 'dog']
    """

    unit = "images"
    thing = "image"
    media = IMAGES
    requires = ("PIL.Image", "sklearn.metrics")
    compared = 1_000
    extra = "image"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("longest", "patch", "layers", "heads", "width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be at least 1, got {value}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout: must be in [0, 1), got {self.dropout}")
        if self.width % self.heads:
            raise ValueError(f"heads: must divide the width, got heads={self.heads} and width={self.width}")
        if self.patch is not None and self.patch > self.longest:
            raise ValueError(f"patch: must be at most longest={self.longest}, got {self.patch}")
        assert self.augmentation  # which checks its own

    @property
    def augmentation(self) -> Augmentation:
        return Augmentation(self.shift, self.rotate, self.zoom, self.flip)

    # --- data ---------------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> list[ImageExample]:
        if path.is_dir():
            files = self.media.in_class_folders(path)
        else:
            rows = self.media.in_table(path, (self.file, self.label))
            files = [(file, label_of(label, place), place) for file, (label,), place in rows]
        self.check_known((label, place) for _, label, place in files)
        return self.media.checked(files, self.example, self.skip_broken)

    def example(self, path: Path, said: str | None, place: str) -> ImageExample:
        return read_image(path, said, place)

    # --- model --------------------------------------------------------------------------------------------------------

    def new_model(self, training: Sequence[ImageExample]) -> Model:
        longer = max(usual_size(training, self.longest))
        if self.patch is not None and self.patch > longer:
            raise ValueError(f"patch: must be at most the {longer} pixels of the images' longer side, got {self.patch}")
        patch = self.patch or max(round(longer / PATCHES), 1)
        height, width = usual_size(training, self.longest, patch)
        channels = 1 if all(example.grey for example in training) else 3
        folder = temporary_folder()
        mean, deviation = pixel_statistics(training, (height, width), channels)
        write_processor(folder, (height, width), mean, deviation)
        model = new_model(
            folder,
            head=CLASSIFIER,
            labels=self.labels,
            model_type="vit",
            image_size=height if height == width else [height, width],
            patch_size=patch,
            num_channels=channels,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            # The published models' 0.02 at a width of 768, by which a sum over the width has the same size.
            initializer_range=round(0.02 * (768 / self.width) ** 0.5, 4),
        )
        return kept_while_used(model, folder)

    def open_model(self, source: Path | str) -> Model:
        return load(source, head=CLASSIFIER, labels=list(self.labels), dtype=torch.float32)

    def encode(self, model: Model, examples: Sequence[ImageExample]) -> list[ImageItem]:
        assert isinstance(model, Vit)
        store = PixelStore(ImageInputs.of_folder(model.folder, model.channels), examples)
        return [ImageItem(store, n, label) for n, label in enumerate(self.class_numbers(examples))]

    def reads_alike(self, student: Model, teacher: Model, examples: Sequence[ImageExample]) -> bool:
        read = [
            ImageInputs.of_folder(model.folder, model.channels)
            for model in (student, teacher)
            if isinstance(model, Vit)
        ]
        return read[0] == read[1]

    def collate(self, model: Model, items: Sequence[ImageItem], random: np.random.Generator | None = None) -> Batch:
        store = items[0].store
        values = torch.from_numpy(store.inputs.values(store.pixels([item.number for item in items])))
        if random is not None:
            values = self.augmentation(values, random)
        classes = [item.label for item in items if item.label is not None]
        known = {"labels": torch.tensor(classes)} if len(classes) == len(items) else {}
        return {"pixel_values": values, **known}

    def token_names(self, model: Model, batch: Batch) -> list[str]:
        """The special tokens, and of each patch its row and column, counted from 1."""
        assert isinstance(model, Vit)
        places = (range(1, count + 1) for count in model.grid)
        patches = [f"{row},{column}" for row, column in itertools.product(*places)]
        return [*["[class]", "[distillation]"][: model.special], *patches]

    def forward(self, model: nn.Module, batch: Batch, observe: LayerObserver | None = None) -> Tensor:
        """The logits (B, K)."""
        return widened(model(batch["pixel_values"], **({} if observe is None else {"observe": observe})).logits)

    # --- results ------------------------------------------------------------------------------------------------------

    def baselines(
        self,
        model: Model,
        training: Sequence[ImageExample],
        validation: Sequence[ImageExample],
        tested: Sequence[ImageExample],
    ) -> list[Baseline]:
        outputs, what = nearest_neighbours(training, validation, tested, self.labels)
        return [Baseline(what, list(outputs))]

    def picture(self, tested: Tested, kind: str) -> bytes:
        model = tested.model
        assert isinstance(model, Vit)
        truth, predicted = self.truth(tested.data), np.argmax(tested.outputs, axis=1)
        numbers = worst(tested.outputs, truth)
        items = self.encode(model, [tested.data[n] for n in numbers])
        values = self.collate(model, items)["pixel_values"].to(model.device)
        pixels = items[0].store.pixels(range(len(items)))
        panels = [
            ImagePanel(
                image,
                weights,
                model.grid,
                self.labels[truth[n]],
                self.labels[predicted[n]],
                float(max(tested.outputs[n])),
            )
            for n, image, weights in zip(numbers, pixels, class_token_attention(model, values), strict=True)
        ]
        return image_picture(tested.details["labels"], tested.details["confusion"], panels, kind)


def write_processor(folder: Path, size: tuple[int, int], mean: Sequence[float], deviation: Sequence[float]) -> None:
    """Write the preprocessing settings as published models store them."""
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size[0], "width": size[1]},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(deviation),
    }
    (folder / PROCESSOR).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
