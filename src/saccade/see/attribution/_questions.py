"""`attribute` and `why_attends` without their implementation: `from saccade import *` needs no tokenizers.

Shape legend: L tokens with the special ones, C components, E model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from ._logits import Attribution
    from ._why import WhyAttends


def attribute(
    model: object,
    text: str | Tensor | Sequence[int] | Mapping[str, Any],
    target: int | str | None = None,
    *,
    against: int | str | None = None,
    position: int | str | None = None,
) -> Attribution:
    """The contribution of each head, feed-forward layer and embedding to one token's logit: direct logit attribution.

    The logit is a sum over everything written into the residual stream, each part read by the last norm and the output
    matrix: `logit_t = sum_c u_t . J x_c`, with J the norms on the way. A norm divides by the scale of the whole stream;
    that scale is held at its value in this run, which makes the norm linear and the sum exact. So contributions are
    direct: they do not say how the logit changes when a head is removed, since then scales, later heads and later
    layers change as well; `saccade.intervene` measures that. Where norms stand after each sum (BERT), every component
    passes through all later norms, each with its scale fixed. In the head of a masked language model the factor
    `f(z) / z` of its activation is also held fixed. The output of a head is split over the tokens it reads, with its
    weights and its gate held fixed. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Of an encoder-decoder the decoder's stream is split. Heads of cross-attention are components of their own, and are
    split over the tokens of the source. What the encoder made is held fixed.

    The bias of the attention output and the constants of norms and embeddings belong to no head: they are one
    component, "biases". The bias of a feed-forward layer is part of that layer.

    What is added up is found in a run of the model, whoever wrote it: the graph of the run says which operations are
    linear, where norms and gates are, and what each layer adds. The sum is compared with the logit of a plain run, to a
    rounding for each operation; if it differs, the error names the first operation from which on it does.

    Probabilities depend only on differences of logits, so `against` another token often says more.

    Cost: three forwards, and two backward passes through what is added up; the memory of training on the text, without
    the graph of attention. A model in half precision is copied to float32. Meanwhile no other thread may run the model:
    its parameters require no gradient.

    Args:
        model: a language model of Saccade, a text model of `saccade.models.load`, the result of
            `inspection.open_model`; with ids also a module of transformers, or any module that makes logits (1, L, V)
            of them.
        text: a text, or the ids of all tokens that the model reads, (L,) or (1, L). For an encoder-decoder, keyword
            arguments of the module, as in `patching`: {"input_ids": ..., "decoder_input_ids": ...}; in those of
            Saccade's families a text is the source, and the model writes the target.
        target: a token's id, or its text, blanks included; None is the most probable one.
        against: another token, whose logit is subtracted.
        position: the token after which the target comes: a column (negative ones count from the end) or a word of the
            text (`word`, or `word:2` for its second occurrence; its last token counts); of an encoder-decoder, of what
            its decoder reads. None: the last one, or in a masked language model the only mask.

    Raises:
        TypeError: a text for a module without a tokenizer; text, token or position of another type.
        ValueError: a model without a language-modelling head or without calls of softmax attention, what it adds up
            cannot be found or does not sum to the logit (the message says where); no such token, word or position.

    Example:
        >>> import saccade
        >>> model = saccade.inspection.open_model()  # the embedded one
        >>> found = saccade.attribute(model, "The cat sat on the", " mat", against=" hat")
        >>> abs(found.total - found.logit) < 1e-4, len(found.heads)  # print(found) lists the largest contributions
        (True, 32)
    """
    from ._input import read_input
    from ._logits import attributed

    return attributed(read_input(model, text, logits=True), target, against, position)


def why_attends(
    model: object,
    text: str | Tensor | Sequence[int],
    query: int | str,
    key: int | str,
    *,
    head: tuple[int, int] | None = None,
    against: int | str | None = None,
) -> WhyAttends:
    """Why a head attends: which earlier components wrote the parts of the query and of the key that make the logit.

    A query is a linear map of the normed residual stream, and so is a key. With the scales of norms fixed at their
    values in this run, `scale q_i . k_j` is a sum over pairs of components, one that wrote into token i and one that
    wrote into token j: the query-key circuit and its composition with earlier heads (Elhage et al., "A Mathematical
    Framework for Transformer Circuits", 2021). The scales of query and key norms are fixed as well; rotary positions
    are linear and rotate every component. A position bias and a softcap are separate terms.

    A weight depends on differences between the logits of one row: a part that all keys share changes no weight. So
    `against` another key often says more; the difference is log(weight / weight there).

    Cost: three to five forwards, all but the one or two that look for the head up to its layer, and one backward pass
    for each number of the query and the key.

    Args:
        model: as in `attribute`, also one without a head, and the encoder of an encoder-decoder.
        text: as in `attribute`.
        query: the token that attends, a column (negative ones count from the end) or a word of the text (`word`, or
            `word:2` for its second occurrence; its last token counts).
        key: the token it attends to, given in the same way; of a word the token with the largest weight counts.
        head: (layer, head); None is the head that gives this pair the largest weight.
        against: another key, given as `key`, whose logit is subtracted.

    Raises:
        TypeError: a text for a module without a tokenizer.
        ValueError: no such word, position or head; with `against`, a key that the mask hides from the query; what the
            model adds up cannot be found, as in `attribute`.

    Example:
        >>> import saccade
        >>> model = saccade.inspection.open_model()  # the embedded one
        >>> found = saccade.why_attends(model, "The cat sat on the mat", "sat", "cat", head=(0, 4))
        >>> of_query, of_key, share = found.top(1)[0]  # print(found) lists more
        >>> str(of_query), str(of_key), abs(found.remainder) < 1e-4
        ('token embedding', 'token embedding', True)
    """
    from ._input import read_input
    from ._why import explained

    return explained(read_input(model, text, logits=False), query, key, head, against)
