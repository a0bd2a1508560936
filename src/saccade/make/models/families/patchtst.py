"""PatchTST: an encoder of time series. Nie et al., "A Time Series is Worth 64 Words" (2023).

Each channel of a series is normalised by itself, cut into patches, and read by the same encoder; patches are its
tokens and never see another channel. A forecast is brought back to the units of its channel (reversible instance
normalisation, Kim et al. 2022). The block has batch norm (Zerveas et al. 2021) or layer norm.

Shape legend: B batch, S steps of the past, C channels, P patches (and one token more with a cls token), E width,
F steps of the forecast.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....operator.nn import AttentionConfig, BlockConfig, Encoder
from ....operator.nn.feed_forward import FeedForward
from ....operator.nn.stacks import LayerObserver
from ..checkpoints.keys import Key, KeyMap
from ..checkpoints.settings import CheckpointSettings
from ..model import Family, Model, Request
from ..output import ModelOutput
from ..output_heads import refuse_labels
from ..signals.series import ForecastHead, Scaler, SeriesHead, check_series
from .bert import ACTIVATIONS

HEADS = {"prediction": "ForPrediction", "classification": "ForClassification", "regression": "ForRegression"}
NORMS = {"batchnorm": "batch", "layernorm": "layer"}
POOLINGS = {"mean": "mean", "max": "max"}
SCALINGS = {"std": "std", "mean": "mean", True: "mean", False: None}


class PatchTST(Model):
    """PatchTST with one of its heads, or none.

    Attributes:
        steps, channels: S and C of the series it reads.
        shared: whether all channels have one embedding.
        patch, stride: steps in a patch, and from one patch to the next. The patches end with the series.
        embeddings: of a patch: one, or one a channel.
        places: (P, E), added to the patches.
        cls: (1, 1, 1, E), a token before the patches, or None.
    """

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        settings.only("channel_attention", False)
        if settings.get("architectures") == ["PatchTSTModel"]:
            settings.only("do_mask_input", False)
        settings.values["do_mask_input"] = False  # of pre-training; a head turns it off, as published
        self.steps, self.channels = settings.count("context_length", 32), settings.count("num_input_channels", 1)
        self.patch, self.stride = settings.count("patch_length", 1), settings.count("patch_stride", 1)
        if self.steps <= self.patch:
            raise settings.error("context_length", f"more than the {self.patch} steps of a patch")
        self.scaler = _scaler(settings)
        block = _block(settings, request)
        self.shared = settings.flag("share_embedding", True)
        count = 1 if self.shared else self.channels
        self.embeddings = nn.ModuleList(nn.Linear(self.patch, block.width) for _ in range(count))
        with_cls = settings.flag("use_cls_token", False)
        self.cls = nn.Parameter(torch.zeros(1, 1, 1, block.width)) if with_cls else None
        patches = (self.steps - self.patch) // self.stride + 1
        learned = settings.choice("positional_encoding_type", {"random": True, "sincos": False}, "sincos")
        self.places = nn.Parameter(torch.zeros(patches + with_cls, block.width), requires_grad=learned)
        self.dropout = nn.Dropout(settings.share("positional_dropout", 0.0))
        self.encoder = Encoder(block, settings.layers("num_hidden_layers", 3), final_norm=False)
        if not settings.flag("bias", True):  # of the feed-forward layers alone
            for layer in self.encoder.modules():
                if isinstance(layer, FeedForward):
                    layer.up.register_parameter("bias", None)
                    layer.down.register_parameter("bias", None)
        self.head = None if request.head is None else _head(settings, request, patches)

    def forward(
        self,
        past_values: Tensor,
        past_observed_mask: Tensor | None = None,
        future_values: Tensor | None = None,
        target_values: Tensor | None = None,
        *,
        hidden_states: bool = False,
        observe: LayerObserver | None = None,
    ) -> ModelOutput:
        """The hidden states of a batch of series, and the output of the head.

        Args:
            past_values: (B, S, C), in the dtype of the weights.
            past_observed_mask: (B, S, C), 1 where a value was observed; None: everywhere. NaN elsewhere counts as 0.
            future_values: (B, F, C), what is to be forecast, for the loss of that head.
            target_values: (B,) classes, or (B, K) numbers of a regression, for the loss of those heads.
            hidden_states: whether to return what each layer reads and the last one gives.
            observe: `observe(layer, observation)` is called in each layer; its batch is B C, item by item.

        Returns:
            `last_hidden_state` (B, C, P, E); `prediction_outputs` (B, F, C) in the units of the past, or `logits`
            (B, K) of classes or of a regression; `loss` where there is something to compare with.

        Raises:
            TypeError, ValueError: other shapes or dtypes, values that are NaN or infinite and not masked; values to
                compare with that the head does not learn from.
        """
        if self.request.head != "prediction":
            refuse_labels(self.request.head, future_values=future_values)
        if self.request.head in (None, "prediction"):
            refuse_labels(self.request.head, target_values=target_values)
        values, observed = check_series(past_values, past_observed_mask, self.steps, self.channels, self.dtype)
        scaled, loc, scale = self.scaler(values, observed)
        start = (self.steps - self.patch) % self.stride
        x = self._embed(scaled[:, start:].transpose(1, 2).unfold(-1, self.patch, self.stride)).flatten(0, 1)
        states: list[Tensor] | None = [] if hidden_states else None
        x = self.encoder(x, observe=observe, hidden_states=states).unflatten(0, (-1, self.channels))
        return ModelOutput(
            last_hidden_state=x,
            hidden_states=None if states is None else tuple(s.unflatten(0, (-1, self.channels)) for s in states),
            **self._read(x, loc, scale, future_values, target_values),
        )

    def _embed(self, patches: Tensor) -> Tensor:
        """(B, C, P, patch) to (B, C, P, E)."""
        if self.shared:
            x = self.embeddings[0](patches)
        else:
            x = torch.stack([embed(patches[:, n]) for n, embed in enumerate(self.embeddings)], 1)
        if self.cls is None:
            return self.dropout(x + self.places)
        first = (self.cls[0] + self.places[:1]).expand(*x.shape[:2], -1, -1)
        return torch.cat((first, self.dropout(x + self.places[1:])), 2)

    def _read(
        self, x: Tensor, loc: Tensor, scale: Tensor, future: Tensor | None, target: Tensor | None
    ) -> dict[str, Any]:
        if self.head is None:
            return {}
        if self.request.head == "prediction":
            forecast = self.head(x) * scale + loc
            if future is not None and future.shape != forecast.shape:
                raise ValueError(f"future_values: expected shape {tuple(forecast.shape)}, got {tuple(future.shape)}")
            return {"prediction_outputs": forecast, "loss": None if future is None else F.mse_loss(forecast, future)}
        logits = self.head(x)
        if target is None:
            return {"logits": logits}
        if self.request.head == "classification":
            return {"logits": logits, "loss": F.cross_entropy(logits, target)}
        if target.shape != logits.shape:
            raise ValueError(f"target_values: expected shape {tuple(logits.shape)}, got {tuple(target.shape)}")
        return {"logits": logits, "loss": F.mse_loss(logits, target)}


def _block(settings: CheckpointSettings, request: Request) -> BlockConfig:
    attention = AttentionConfig(
        settings.count("d_model", 128),
        settings.count("num_attention_heads", 4),
        bias=True,
        dropout=request.weight_dropout(settings, "attention_dropout", 0.0),
        mechanism=request.mechanism,
    )
    return BlockConfig(
        attention,
        hidden=settings.count("ffn_dim", 512),
        activation=settings.choice("activation_function", ACTIVATIONS, "gelu"),
        norm=settings.choice("norm_type", NORMS, "batchnorm"),
        placement="pre" if settings.flag("pre_norm", True) else "post",
        dropout=settings.share("path_dropout", 0.0),
        feed_forward_dropout=settings.share("ff_dropout", 0.0),
        bias=True,
        eps=settings.eps("norm_eps", 1e-5),
    )


def _scaler(settings: CheckpointSettings) -> Scaler:
    settings.only("scaling_dim", 1)
    settings.only("keepdim", True)
    kind = settings.choice("scaling", SCALINGS, False if "scaling" in settings.values else "std")
    default = settings.number("default_scale") if "default_scale" in settings else None
    return Scaler(kind, settings.number("minimum_scale", 1e-5 if kind == "std" else 1e-10), default)


def _head(settings: CheckpointSettings, request: Request, patches: int) -> nn.Module:
    width, channels = settings.count("d_model", 128), settings.count("num_input_channels", 1)
    dropout, pooling = settings.share("head_dropout", 0.0), _pooling(settings)
    if request.head != "classification":
        settings.only("loss", "mse")
    if request.head == "prediction":
        own = None if settings.flag("share_projection", True) else channels
        steps = settings.count("prediction_length", 24)
        return ForecastHead(width * (1 if pooling else patches), steps, own, pooling, dropout)
    if pooling is None:
        raise settings.error("pooling_type", "'mean' or 'max' for this head")
    if request.relabelled:  # published models count targets, whatever labels they name
        settings.values["num_targets"] = request.labels
    bounds = settings.get("output_range") if request.head == "regression" else None
    if bounds is not None and not (isinstance(bounds, list) and len(bounds) == 2):
        raise settings.error("output_range", "two numbers")
    targets = settings.count("num_targets", 1)
    return SeriesHead(width * channels, targets, pooling, dropout, None if bounds is None else (bounds[0], bounds[1]))


def _pooling(settings: CheckpointSettings) -> str | None:
    if settings.flag("use_cls_token", False):
        return "cls"
    absent = settings.values.get("pooling_type", "mean") is None  # null is a value of its own
    return None if absent else settings.choice("pooling_type", POOLINGS, "mean")


def _keys(model: PatchTST) -> KeyMap:
    layer = "encoder.layers.{n}"
    head = _head_keys(model)
    norm = ".batchnorm" if model.encoder.config.norm == "batch" else ""
    places = "encoder.positional_encoder"
    return KeyMap(
        (
            _numbered("embeddings", "encoder.embedder.input_embedding", shared=model.shared),
            Key("cls", f"{places}.cls_token"),
            Key("places", f"{places}.position_enc"),
            Key(
                "encoder.blocks.{n}.attention.projection",
                (f"{layer}.self_attn.q_proj", f"{layer}.self_attn.k_proj", f"{layer}.self_attn.v_proj"),
            ),
            Key("encoder.blocks.{n}.attention.output", f"{layer}.self_attn.out_proj"),
            Key("encoder.blocks.{n}.attention_norm", f"{layer}.norm_sublayer1{norm}"),
            Key("encoder.blocks.{n}.feed_forward.up", f"{layer}.ff.0"),
            Key("encoder.blocks.{n}.feed_forward.down", f"{layer}.ff.3"),
            Key("encoder.blocks.{n}.feed_forward_norm", f"{layer}.norm_sublayer3{norm}"),
        ),
        head,
        prefix="model.",
        # Of other heads, and of pre-training.
        unused=tuple(sorted({"head.projection", "head.projections.{n}", "head.linear"} - {k.published for k in head})),
    )


def _head_keys(model: PatchTST) -> tuple[Key, ...]:
    if model.head is None:
        return ()
    if isinstance(model.head, ForecastHead):
        own = "head.projection" if model.head.shared else "head.projections"
        return (_numbered("head.projections", own, shared=model.head.shared),)
    return (Key("head.out", "head.linear" if model.request.head == "classification" else "head.projection"),)


def _numbered(ours: str, published: str, *, shared: bool) -> Key:
    """The key of a module for all channels, which is the first of our list, or of one module for each channel."""
    return Key(f"{ours}.0", published) if shared else Key(f"{ours}.{{n}}", f"{published}.{{n}}")


FAMILY = Family(
    "PatchTST", {"patchtst": "PatchTST"}, HEADS, PatchTST, _keys, tuple(HEADS), aliases={"hidden_size": "d_model"}
)
