"""`saccade.diagram`; the code that draws is imported at the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .diagrams import Diagram


def diagram(
    source: Any = None,
    kind: str | None = None,
    *,
    text: str | None = None,
    model: Any = None,
    head: tuple[int, int] | tuple[str, int, int] | str | None = None,
    theme: str = "auto",
    target: str | None = None,
    plain: bool = False,
) -> Diagram:
    """A picture of attention, drawn from a real module with its real shapes, parameter counts and numbers.

    Args:
        source: a module (`saccade.nn.MultiHeadAttention`, a block, a whole model, also of torch.nn), a model opened by
            `saccade.models.load`, a mask or a configuration of `saccade.variants`; or a kind, or a `model` by name.
            None is the embedded model.
        kind: "attention" (one head), "multi-head" (a layer), "block", "transformer" (the whole model), "decoder-step"
            (one token with the cache) or "variants" (the pairs of each). None chooses by the source.
        text: the input of "attention", "multi-head" and "decoder-step", at most 12 tokens; None is a short sentence. A
            module of attention alone gets five random embeddings.
        model: instead of `source`: a folder, a name on the Hugging Face hub, or, for "block" and "transformer", a
            published architecture without weights: "vaswani", "bert", "gpt2", "llama", "t5", "bart", "marian", "vit",
            "wav2vec2", "esm", "patchtst", "gat", "graphormer".
        head: (layer, head) or "layer.head", from 0, of a decoder also "decoder.layer.head" or ("decoder", layer, head),
            as in `saccade.step`; None is the head that weighs several words most evenly.
        theme: "auto" follows the reader's setting, "light" or "dark" do not.
        target: for "decoder-step" and an encoder-decoder, the text written so far, the new token last; None is the text
            that the model writes first.
        plain: for "attention" and "multi-head", whole words without numbers, narrow enough for a phone. A word of
            several tokens has the sum of the weights on them and the mean of the weights from them.

    Returns:
        A `Diagram`, shown by notebooks, with `svg`, `html`, `png()`, `description` and `save(path)`.

    Raises:
        ValueError: an unknown kind, theme or head, a text that is too long for a picture, a model without attention.
        TypeError: a source of another type. FileNotFoundError: no such folder.

    Example:
        >>> import saccade
        >>> layer = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> diagram = saccade.diagram(saccade.nn.EncoderBlock(saccade.nn.BlockConfig(layer.config)))
        >>> diagram  # notebooks show it; diagram.save("block.svg") writes a file
        <Diagram block: Encoder block of EncoderBlock>
    """
    from .diagrams import diagram as draw

    return draw(source, kind, text=text, model=model, head=head, theme=theme, target=target, plain=plain)
