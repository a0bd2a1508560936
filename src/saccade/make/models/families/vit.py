"""ViT: an encoder of images. Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021).

An image is cut into patches, each a token by one matrix; a learned token of the class stands before them, learned
positions are added, and the block has its norms first. DeiT (Touvron et al. 2021) has a second learned token, which a
teacher's labels trained.

Shape legend: B batch, C channels, H height, W width, P patches, S special tokens, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....operator.nn import BlockConfig, Encoder
from ....operator.nn.stacks import LayerObserver
from ..checkpoints.keys import Key, KeyMap
from ..checkpoints.settings import CheckpointSettings
from ..model import Family, Model, Request
from ..output import ModelOutput
from ..output_heads import Classifier, ItemHead
from ..signals.images import ImageInputs
from .bert import bert_block

CLASSIFIER, TEACHER = "image-classification", "image-classification-with-teacher"


class Vit(Model):
    """ViT or DeiT with one of its heads, or none. `hidden_states` end with the output of the last layer; the last norm
    applies only to `last_hidden_state`, as published."""

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        block = _block(settings, request)
        width = block.width
        self.channels = settings.count("num_channels", 3)
        self.size, patch = _pair(settings, "image_size", 224), _pair(settings, "patch_size", 16)
        self.grid = self.size[0] // patch[0], self.size[1] // patch[1]
        if 0 in self.grid:
            raise settings.error("patch_size", f"at most the image's size {self.size}")
        self.patches = nn.Conv2d(self.channels, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        distilled = settings.get("model_type") == "deit"
        self.distillation_token = nn.Parameter(torch.empty(1, 1, width)) if distilled else None
        self.special = 1 + distilled
        self.positions = nn.Parameter(torch.empty(1, self.special + self.grid[0] * self.grid[1], width))
        self.dropout = nn.Dropout(block.dropout)
        self.encoder = Encoder(block, settings.layers("num_hidden_layers", 12), final_norm=False)
        self.norm = nn.LayerNorm(width, settings.eps("layer_norm_eps", 1e-12))
        settings.only("pooler_act", "tanh")
        stored = {"pooler.dense.weight", f"{settings.get('model_type')}.pooler.dense.weight"} & settings.stored
        pooled = nn.Linear(width, settings.count("pooler_output_size", width)) if stored else None
        self.pooler = pooled if request.head is None else None
        self.head: ItemHead | TeacherHead | None = None
        if request.head == CLASSIFIER:
            self.head = ItemHead(Classifier(width, request.labels, 0.0), settings.get("problem_type"))
        elif request.head == TEACHER:
            self.head = TeacherHead(width, request.labels)

    def prepare(self, images: Any) -> dict[str, Tensor]:
        """`pixel_values` of images, as preprocessor_config.json says: `model(**model.prepare(images))`.

        Args:
            images: a file, a PIL image, an array (H, W), (H, W, C) or (C, H, W), or a list of such.

        Raises:
            FileNotFoundError, TypeError, ValueError: as in `saccade.models.signals.images.ImageInputs`.
        """
        values = ImageInputs.of_folder(self.folder, self.channels)(images)
        return {"pixel_values": values.to(self.class_token.device)}

    def embed(self, pixel_values: Tensor, interpolated: bool = False) -> Tensor:
        """Patches and special tokens with their positions: (B, C, H, W) to (B, S + P, E).

        Args:
            interpolated: whether the image may have another size than the model's; positions are then stretched.
        """
        patches = self.patches(pixel_values.to(self.patches.weight.dtype))
        tokens = [token for token in (self.class_token, self.distillation_token) if token is not None]
        first = [token.expand(len(patches), -1, -1) for token in tokens]
        x = torch.cat((*first, patches.flatten(2).transpose(1, 2)), 1)
        positions = self._stretched(patches.shape[2], patches.shape[3]) if interpolated else self.positions
        return self.dropout(x + positions)

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        *,
        hidden_states: bool = False,
        observe: LayerObserver | None = None,
    ) -> ModelOutput:
        """The hidden states of a batch of images, and the output of the head.

        Args:
            pixel_values: (B, C, H, W) floats, as `prepare` makes them.
            labels: (B,) ints, or (B, K) floats of labels that exclude no other; for the classifier.
            interpolate_pos_encoding: whether images of another size are read, by positions interpolated to their grid
                of patches; pixels on the right and below that fill no patch are not read. Without it such images are
                an error.
            hidden_states: whether to return what each layer reads and the last one gives.
            observe: `observe(layer, observation)` is called in each layer.

        Raises:
            TypeError, ValueError: other shapes, channels or sizes; labels where the head has no loss.
        """
        self._check(pixel_values, bool(interpolate_pos_encoding))
        if labels is not None and not isinstance(self.head, ItemHead):
            raise ValueError(f"labels: the head {self.request.head!r} has no loss; load with head={CLASSIFIER!r}")
        x = self.embed(pixel_values, bool(interpolate_pos_encoding))
        states: list[Tensor] | None = [] if hidden_states else None
        x = self.norm(self.encoder(x, observe=observe, hidden_states=states))
        read: dict[str, Any] = {}
        if isinstance(self.head, ItemHead):
            read = self.head(x[:, 0], labels)
        elif self.head is not None:
            read = self.head(x)
        return ModelOutput(
            last_hidden_state=x,
            hidden_states=None if states is None else tuple(states),
            pooler_output=None if self.pooler is None else torch.tanh(self.pooler(x[:, 0])),
            **read,
        )

    def _stretched(self, rows: int, columns: int) -> Tensor:
        """Positions (1, S + rows * columns, E) of another grid, bicubic."""
        if (rows, columns) == self.grid:
            return self.positions
        special, patches = self.positions[:, : self.special], self.positions[:, self.special :]
        table = patches.unflatten(1, self.grid).permute(0, 3, 1, 2)
        table = F.interpolate(table, (rows, columns), mode="bicubic", align_corners=False)
        return torch.cat((special, table.flatten(2).transpose(1, 2)), 1)

    def _check(self, pixel_values: object, any_size: bool) -> None:
        if not isinstance(pixel_values, Tensor) or not pixel_values.is_floating_point():
            found = pixel_values.dtype if isinstance(pixel_values, Tensor) else type(pixel_values).__name__
            raise TypeError(f"pixel_values: expected a tensor of floats, as model.prepare(images) makes, got {found}")
        shape = tuple(pixel_values.shape)
        if len(shape) != 4 or 0 in shape:
            raise ValueError(f"pixel_values: expected shape (batch, channels, height, width), got {shape}")
        if shape[1] != self.channels:
            raise ValueError(f"pixel_values: expected images of {self.channels} channels, got {shape[1]}")
        patch = self.patches.kernel_size
        if shape[2] < patch[0] or shape[3] < patch[1]:
            raise ValueError(f"pixel_values: expected at least one patch of {patch}, got images of {shape[2:]}")
        if not any_size and shape[2:] != self.size:
            raise ValueError(
                f"pixel_values: expected images of {self.size}, height and width, got {shape[2:]}; resize them, as "
                "model.prepare does, or give interpolate_pos_encoding=True"
            )


class TeacherHead(nn.Module):
    """DeiT's two classifiers, of the class token and of the distillation token. Published without a loss."""

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.of_class, self.of_teacher = nn.Linear(width, labels), nn.Linear(width, labels)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """(B, S + P, E) to `cls_logits` and `distillation_logits` (B, K), and `logits`, their mean."""
        first, second = self.of_class(x[:, 0]), self.of_teacher(x[:, 1])
        return {"logits": (first + second) / 2, "cls_logits": first, "distillation_logits": second}


def _block(settings: CheckpointSettings, request: Request) -> BlockConfig:
    block = bert_block(settings, request, placement="pre", dropout=0.0)
    settings.only("head_dim", block.attention.shape.head)
    biased = settings.flag("qkv_bias", True)
    return replace(block, attention=replace(block.attention, bias=biased, output_bias=True))


def _pair(settings: CheckpointSettings, name: str, default: int) -> tuple[int, int]:
    """Height and width, of a setting that is one number or two."""
    value = settings.get(name, default)
    sides = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value, value]
    if len(sides) != 2 or not all(type(side) is int and 0 < side < 2**20 for side in sides):
        raise settings.error(name, "a side of pixels, or [height, width]")
    return sides[0], sides[1]


LAYER = "encoder.layer.{n}"
SELF = f"{LAYER}.attention.attention"
BODY = (
    Key("class_token", "embeddings.cls_token"),
    Key("distillation_token", "embeddings.distillation_token"),
    Key("positions", "embeddings.position_embeddings"),
    Key("patches", "embeddings.patch_embeddings.projection"),
    Key("encoder.blocks.{n}.attention.projection", (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value")),
    Key("encoder.blocks.{n}.attention.output", f"{LAYER}.attention.output.dense"),
    Key("encoder.blocks.{n}.attention_norm", f"{LAYER}.layernorm_before"),
    Key("encoder.blocks.{n}.feed_forward.up", f"{LAYER}.intermediate.dense"),
    Key("encoder.blocks.{n}.feed_forward.down", f"{LAYER}.output.dense"),
    Key("encoder.blocks.{n}.feed_forward_norm", f"{LAYER}.layernorm_after"),
    Key("norm", "layernorm"),
    Key("pooler", "pooler.dense"),
)
HEAD_KEYS = {
    CLASSIFIER: (Key("head.inner.out", "classifier"),),
    TEACHER: (Key("head.of_class", "cls_classifier"), Key("head.of_teacher", "distillation_classifier")),
}
OTHERS = {"classifier", "cls_classifier", "distillation_classifier", "decoder", "embeddings.mask_token", "pooler"}


def _keys(model: Vit) -> KeyMap:
    head = HEAD_KEYS.get(model.request.head or "", ())
    mine = {key.parts[0] for key in head} | ({"pooler"} if model.pooler is not None else set())
    # Pre-training left them behind; a body may be opened without the head it was published with.
    return KeyMap(BODY, head, prefix=f"{model.settings.get('model_type')}.", unused=tuple(OTHERS - mine))


FAMILY = Family("ViT", {"vit": "ViT"}, {CLASSIFIER: "ForImageClassification"}, Vit, _keys, (CLASSIFIER,))
DEIT = Family(
    "DeiT",
    {"deit": "DeiT"},
    {CLASSIFIER: "ForImageClassification", TEACHER: "ForImageClassificationWithTeacher"},
    Vit,
    _keys,
    (CLASSIFIER,),
)
