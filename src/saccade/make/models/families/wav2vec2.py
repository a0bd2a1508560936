"""wav2vec 2.0: an encoder of sound. Baevski et al., "wav2vec 2.0: A Framework for Self-Supervised Learning" (2020).

Convolutions turn 16,000 samples a second into 50 frames; each is normalised and projected, a grouped convolution over
the frames adds where they stand, and a stack of blocks follows. The base form normalises the first convolution over
time and the blocks last; the large form normalises every convolution over channels and the blocks first.

Shape legend: B batch, S samples, L frames, C channels of features, E width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ....operator._products import FUNCTIONS
from ....operator.nn import BlockConfig, Encoder
from ..checkpoints.keys import Key, KeyMap
from ..checkpoints.settings import CheckpointSettings
from ..model import Family, Request
from ..signals.sound_encoder import SoundEncoder
from ..signals.sound_layers import ConvolutionalPositions, CtcHead, MeanHead, SoundFeatures, SpecAugment
from .bert import ACTIVATIONS, bert_block


class Wav2Vec2(SoundEncoder):
    """wav2vec 2.0 with one of its heads, or none."""

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        settings.only("add_adapter", False)
        settings.only("adapter_attn_dim", None)
        settings.only("use_weighted_layer_sum", False)
        block = _block(settings, request)
        width, self.stable = block.width, block.placement == "pre"
        activation = FUNCTIONS[settings.choice("feat_extract_activation", ACTIVATIONS, "gelu")]
        over_time = settings.choice("feat_extract_norm", {"group": True, "layer": False}, "group")
        channels, kernels, strides = _convolutions(settings)
        bias = settings.flag("conv_bias", False)
        self.features = SoundFeatures(channels, kernels, strides, activation, bias=bias, over_time=over_time)
        eps = settings.eps("layer_norm_eps", 1e-5)
        self.features_norm = nn.LayerNorm(channels[-1], eps)
        self.projection = nn.Linear(channels[-1], width)
        self.projection_dropout = nn.Dropout(settings.share("feat_proj_dropout", 0.0))
        groups = settings.count("num_conv_pos_embedding_groups", 16)
        if width % groups:
            raise settings.error("num_conv_pos_embedding_groups", f"a divisor of {width}, the hidden_size")
        kernel = settings.count("num_conv_pos_embeddings", 128)
        self.positions = ConvolutionalPositions(width, kernel, groups, activation)
        self.norm, self.dropout = nn.LayerNorm(width, eps), nn.Dropout(block.dropout)
        drop = settings.share("layerdrop", 0.1)
        layers = settings.layers("num_hidden_layers", 12)
        self.encoder = Encoder(block, layers, final_norm=False, layer_drop=drop)
        time, features = _spans(settings, "time", 0.05, 2), _spans(settings, "feature", 0.0, 0)
        self.augmented = settings.flag("apply_spec_augment", True)
        self.augment = SpecAugment(width, time, features) if time[0] or features[0] else None
        if self.augment is not None and not (self.augmented and time[0]):
            self.augment.vector.requires_grad_(False)  # no frame gets it, and several processes wait for all gradients
        self.head = _head(settings, request, block)


def _block(settings: CheckpointSettings, request: Request) -> BlockConfig:
    placement = "pre" if settings.flag("do_stable_layer_norm", False) else "post"
    dropouts = "attention_dropout", "hidden_dropout"
    block = bert_block(settings, request, placement=placement, dropouts=dropouts, eps=1e-5)
    return replace(block, feed_forward_dropout=settings.share("activation_dropout", 0.1))


def _convolutions(settings: CheckpointSettings) -> list[list[int]]:
    """Channels, kernels and strides of the convolutions: three lists of the same length."""
    defaults = {"conv_dim": [512] * 7, "conv_kernel": [10, 3, 3, 3, 3, 2, 2], "conv_stride": [5, 2, 2, 2, 2, 2, 2]}
    found = []
    for name, default in defaults.items():
        value = settings.get(name, default)
        if not isinstance(value, list) or not all(type(size) is int and 0 < size < 2**16 for size in value):
            raise settings.error(name, "a list of positive ints")
        if not value or len(value) != len(settings.get("conv_dim", default)):
            raise settings.error(name, "one of each convolution, as many as conv_dim has")
        found.append(value)
    settings.only("num_feat_extract_layers", len(found[0]))
    return found


def _spans(settings: CheckpointSettings, axis: str, share: float, least: int) -> tuple[float, int, int]:
    return (
        settings.share(f"mask_{axis}_prob", share),
        settings.count(f"mask_{axis}_length", 10),
        settings.count(f"mask_{axis}_min_masks", least, least=0),
    )


def _head(settings: CheckpointSettings, request: Request, block: BlockConfig) -> CtcHead | MeanHead | None:
    width = block.width
    if request.head == CTC:
        vocabulary = settings.count("vocab_size", 32)
        blank = settings.count("pad_token_id", 0, least=0)
        if blank >= vocabulary:
            raise settings.error("pad_token_id", f"a token from 0 to {vocabulary - 1}, which is the blank")
        return CtcHead(
            width,
            vocabulary,
            settings.share("final_dropout", 0.1),
            blank,
            settings.choice("ctc_loss_reduction", {"sum": "sum", "mean": "mean"}, "sum"),
            zero_infinity=settings.flag("ctc_zero_infinity", False),
        )
    if request.head == CLASSIFIER:
        return MeanHead(width, settings.count("classifier_proj_size", 256), request.labels)
    return None


CTC, CLASSIFIER = "ctc", "sequence-classification"
LAYER, CONV, PLACES = "encoder.layers.{n}", "feature_extractor.conv_layers.{n}", "encoder.pos_conv_embed.conv"
SELF = f"{LAYER}.attention"
BODY = (
    Key("augment.vector", "masked_spec_embed"),
    Key("features.layers.{n}.conv", f"{CONV}.conv"),
    Key("features.layers.{n}.norm", f"{CONV}.layer_norm"),
    Key("features_norm", "feature_projection.layer_norm"),
    Key("projection", "feature_projection.projection"),
    Key("positions.scale", f"{PLACES}.parametrizations.weight.original0", also=(f"{PLACES}.weight_g",)),
    Key("positions.direction", f"{PLACES}.parametrizations.weight.original1", also=(f"{PLACES}.weight_v",)),
    Key("positions.bias", f"{PLACES}.bias"),
    Key("norm", "encoder.layer_norm"),
    Key("encoder.blocks.{n}.attention.projection", (f"{SELF}.q_proj", f"{SELF}.k_proj", f"{SELF}.v_proj")),
    Key("encoder.blocks.{n}.attention.output", f"{SELF}.out_proj"),
    Key("encoder.blocks.{n}.attention_norm", f"{LAYER}.layer_norm"),
    Key("encoder.blocks.{n}.feed_forward.up", f"{LAYER}.feed_forward.intermediate_dense"),
    Key("encoder.blocks.{n}.feed_forward.down", f"{LAYER}.feed_forward.output_dense"),
    Key("encoder.blocks.{n}.feed_forward_norm", f"{LAYER}.final_layer_norm"),
)
HEAD_KEYS = {
    CTC: (Key("head.out", "lm_head"),),
    CLASSIFIER: (Key("head.dense", "projector"), Key("head.items.inner", "classifier")),
}
OTHERS = {"lm_head", "projector", "classifier", "quantizer", "project_hid", "project_q"}


def _keys(model: Wav2Vec2) -> KeyMap:
    head = HEAD_KEYS.get(model.request.head or "", ())
    # Pre-training left them behind; a body may be opened without the head it was published with.
    unused = OTHERS - {key.parts[0] for key in head} | (set() if model.augment is not None else {"masked_spec_embed"})
    return KeyMap(BODY, head, prefix="wav2vec2.", unused=tuple(unused))


FAMILY = Family(
    "wav2vec 2.0",
    {"wav2vec2": "Wav2Vec2"},
    {CTC: "ForCTC", CLASSIFIER: "ForSequenceClassification"},
    Wav2Vec2,
    _keys,
    (CTC, CLASSIFIER),
    of_tokens=(CTC,),
)
