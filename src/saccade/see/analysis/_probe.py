"""A linear probe of the hidden states of each layer shows what the layer encodes.

A multinomial logistic regression learns to predict the labels of words from one layer's vectors and is tested on other
sentences. Its accuracy is shown beside three baselines: the most frequent label, layer 0 (the embeddings, which encode
the word alone), and a control task (Hewitt and Liang 2019, "Designing and Interpreting Probes with Control Tasks"):
every word type gets a random label, which can only be memorised. Selectivity is the accuracy less that on the control
task.

Shape legend: N words, B texts, L tokens with the special ones, E width.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...interception._hooks import hooked
from ...make.models import DecoderLM, Model
from ...make.models.text.encoder_decoder import EncoderDecoder
from ...support._uncertainty import over_groups
from ..inspection import TextModel
from ._alignment import AlignedText, align_all
from ._labels import LabelledSentence

HELD_OUT = 0.25  # of the sentences
STEPS = 1000  # of the optimizer, at most
STRENGTH = 1.0  # inverse of the L2 penalty on standardised vectors, as scikit-learn's C
Interval = tuple[float, float]
Progress = Callable[[int, int], None]


class ProbeAccuracy(NamedTuple):
    """The accuracy of a probe of one layer on held-out sentences. Intervals are 95 %, over sentences.

    Example:
        >>> from saccade.analysis import ProbeAccuracy
        >>> layer = ProbeAccuracy(1, 0.9, (0.8, 1.0), gain=0.1, gain_interval=(0.05, 0.15), control=0.7, converged=True)
        >>> round(layer.selectivity, 2)  # accuracy minus control
        0.2
    """

    layer: int  # 0: the embeddings; n: after layer n, counted from 1
    accuracy: float
    interval: Interval
    gain: float  # over layer 0
    gain_interval: Interval
    control: float
    converged: bool

    @property
    def selectivity(self) -> float:
        return self.accuracy - self.control


@dataclass(frozen=True, eq=False)
class Probe:
    """The accuracy of linear probes of each layer. `study_probe` returns it.

    Example:
        >>> from saccade.analysis import LabelledSentence, study_probe
        >>> from saccade.inspection import open_model
        >>> names, verbs = ("owls", "mice", "cats", "dogs"), ("fly", "run", "sit", "eat")
        >>> texts = [f"{name} {verb}" for name in names for verb in verbs]
        >>> sentences = [LabelledSentence(text, text, ((0, 4), (5, 8)), ("NOUN", "VERB")) for text in texts]
        >>> probe = study_probe(open_model(), sentences)
        >>> probe.labels, probe.words, probe.majority_accuracy
        (('NOUN', 'VERB'), (24, 8), 0.5)
        >>> [layer.accuracy for layer in probe.layers]  # the embeddings, and layers 1 to 4
        [1.0, 1.0, 1.0, 1.0, 1.0]
    """

    model: str
    labels: tuple[str, ...]
    majority: str
    majority_accuracy: float
    majority_interval: Interval
    layers: tuple[ProbeAccuracy, ...]
    words: tuple[int, int]  # training, test
    sentences: tuple[int, int]
    too_long: int
    missing: int  # words without a token, or without a label
    left: int  # unused sentences, since `most` words were reached


class _ProbeExamples(NamedTuple):
    vectors: list[np.ndarray]  # (N, E) by layer
    labels: np.ndarray  # (N,)
    forms: np.ndarray  # (N,)
    groups: np.ndarray  # (N,) number of the sentence


def study_probe(
    model: TextModel,
    sentences: Sequence[LabelledSentence],
    *,
    seed: int = 0,
    most: int = 10_000,
    source: str = "labels",
    progress: Progress | None = None,
) -> Probe:
    """Train a linear probe of every layer of `model` for the labels of words, and test it on other sentences.

    A probe is a multinomial logistic regression (L2, C = 1) on the standardised mean of the hidden states over a word's
    tokens. It learns from three quarters of the sentences. Intervals are a bootstrap over the others.

    Source of the control task: Hewitt and Liang 2019, "Designing and Interpreting Probes with Control Tasks". Needs
    scikit-learn.

    Args:
        seed: of the order of sentences, the split, the control task and the intervals.
        most: the largest number of words; sentences are drawn at random until it is reached.
        source: what error messages call the sentences.
        progress: called as ``progress(done, total)``.

    Raises:
        ValueError: words that do not match the model's tokens, or too few sentences within its context.

    Example:
        >>> from saccade.analysis import LabelledSentence, study_probe
        >>> from saccade.inspection import open_model
        >>> names, verbs = ("owls", "mice", "cats", "dogs"), ("fly", "run", "sit", "eat")
        >>> texts = [f"{name} {verb}" for name in names for verb in verbs]
        >>> sentences = [LabelledSentence(text, text, ((0, 4), (5, 8)), ("NOUN", "VERB")) for text in texts]
        >>> probe = study_probe(open_model(), sentences)
        >>> probe.sentences  # to learn from, to test on
        (12, 4)
        >>> probe.layers[-1].accuracy
        1.0
    """
    aligned, _ = align_all(model, ((each.name, each.text, each.words, each.forms) for each in sentences), source)
    order = np.random.default_rng(seed).permutation(len(sentences)).tolist()
    fits = [i for i in order if model.context is None or len(aligned[i].ids) <= model.context]
    taken = _first_words(fits, sentences, most)
    if len(taken) < 2:
        raise ValueError(f"{source}: expected two or more sentences that {model.name} can read, got {len(taken)}")
    steps = len(taken) + 2 * (model.layers + 1)

    def report(done: int) -> None:
        if progress is not None:
            progress(done, steps)

    examples = _collect(model, [(sentences[i], aligned[i]) for i in taken], report)
    held_out = examples.groups < max(1, round(HELD_OUT * len(taken)))
    if held_out.all() or not held_out.any():
        raise ValueError(f"{source}: the words with labels are all in training sentences, or all in test sentences")
    layers = _learn(examples, held_out, seed, lambda done: report(len(taken) + done))
    majority = Counter(examples.labels[~held_out].tolist()).most_common(1)[0][0]
    right = _by_group(examples.labels[held_out] == majority, examples.groups[held_out])
    words = sum(len(sentences[i].words) for i in taken)
    tested = len(np.unique(examples.groups[held_out]))
    return Probe(
        model.name,
        tuple(sorted(set(examples.labels.tolist()))),
        str(majority),
        float(right[0].sum() / right[1].sum()),
        over_groups(*right, seed),
        layers,
        (int((~held_out).sum()), int(held_out.sum())),
        (len(np.unique(examples.groups)) - tested, tested),
        len(order) - len(fits),
        words - len(examples.labels),
        len(fits) - len(taken),
    )


def _first_words(order: Sequence[int], sentences: Sequence[LabelledSentence], most: int) -> list[int]:
    taken: list[int] = []
    words = 0
    for i in order:
        if words >= most and len(taken) > 1:
            break
        taken.append(i)
        words += len(sentences[i].words)
    return taken


def _collect(
    model: TextModel, texts: Sequence[tuple[LabelledSentence, AlignedText]], progress: Callable[[int], None]
) -> _ProbeExamples:
    """The vector of each labelled word in each layer: the mean over the word's tokens."""
    vectors: list[list[np.ndarray]] = []
    labels, forms, groups = [], [], []
    for number, (sentence, its) in enumerate(texts):
        known = [
            (unit, label, form.casefold())
            for unit, label, form in zip(its.unit_of, sentence.labels, sentence.forms, strict=True)
            if unit is not None and label is not None
        ]
        for layer, states in enumerate(hidden_states(model, torch.tensor([its.ids]))):
            if layer == len(vectors):
                vectors.append([])
            tokens = states[0].float().cpu().numpy()
            vectors[layer] += [tokens[its.starts[unit] : its.starts[unit + 1]].mean(0) for unit, _, _ in known]
        labels += [label for _, label, _ in known]
        forms += [form for _, _, form in known]
        groups += [number] * len(known)
        progress(number + 1)
    if not labels:
        raise ValueError(f"none of the {len(texts)} sentences in use has a labelled word")
    return _ProbeExamples([np.stack(held) for held in vectors], np.array(labels), np.array(forms), np.array(groups))


def _learn(
    examples: _ProbeExamples, held_out: np.ndarray, seed: int, progress: Callable[[int], None]
) -> tuple[ProbeAccuracy, ...]:
    groups = examples.groups[held_out]
    control = _control(examples, held_out, seed)
    accuracies: list[ProbeAccuracy] = []
    first: np.ndarray | None = None
    for layer, vectors in enumerate(examples.vectors):
        right, converged = _right(vectors, examples.labels, held_out)
        progress(2 * layer + 1)
        remembered, _ = _right(vectors, control, held_out)
        progress(2 * layer + 2)
        first = right if first is None else first
        right_by, count = _by_group(right, groups)
        gain_by, _ = _by_group(right.astype(int) - first.astype(int), groups)
        accuracies.append(
            ProbeAccuracy(
                layer,
                float(right.mean()),
                over_groups(right_by, count, seed),
                float(right.mean() - first.mean()),
                over_groups(gain_by, count, seed),
                float(remembered.mean()),
                converged,
            )
        )
    return tuple(accuracies)


def _control(examples: _ProbeExamples, held_out: np.ndarray, seed: int) -> np.ndarray:
    """(N,): a random label for every word type, with the frequencies of the labels."""
    types, place = np.unique(examples.forms, return_inverse=True)
    drawn: np.ndarray = np.random.default_rng([seed, 1]).choice(examples.labels[~held_out], len(types))
    return drawn[place]


def _right(vectors: np.ndarray, labels: np.ndarray, held_out: np.ndarray) -> tuple[np.ndarray, bool]:
    """(whether each held-out word is predicted correctly, whether the optimizer converged)."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    learn = vectors[~held_out].astype(np.float64)
    middle, spread = learn.mean(0), learn.std(0)
    spread[spread == 0] = 1
    if len(set(labels[~held_out].tolist())) < 2:  # a classifier needs two classes
        return labels[held_out] == labels[~held_out][0], True
    model: Any = LogisticRegression(C=STRENGTH, max_iter=STEPS)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit((learn - middle) / spread, labels[~held_out])
    converged = not any(issubclass(w.category, ConvergenceWarning) for w in warned)
    return np.asarray(model.predict((vectors[held_out] - middle) / spread) == labels[held_out]), converged


def _by_group(right: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sum of right, number of words) by sentence."""
    _, place = np.unique(groups, return_inverse=True)
    return np.bincount(place, weights=right), np.bincount(place)


def hidden_states(model: TextModel, tokens: Tensor) -> list[Tensor]:
    """(B, L, E) before the first layer (the embeddings) and after each; in evaluation mode, without gradients.

    The last entry for a published model is its output, after the final norm if it has one.
    """
    module = model.module
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            tokens = tokens.to(next(module.parameters()).device)
            if isinstance(module, DecoderLM):
                return _of_own(module, tokens)
            if isinstance(module, Model):
                return _of_published(module, tokens)
            return list(module(input_ids=tokens, output_hidden_states=True).hidden_states)
    finally:
        module.train(training)


def _of_published(module: Model, tokens: Tensor) -> list[Tensor]:
    read = module.encode if isinstance(module, EncoderDecoder) else module
    return list(read(tokens, hidden_states=True).hidden_states or ())


def _of_own(module: DecoderLM, tokens: Tensor) -> list[Tensor]:
    states: list[Tensor] = []
    blocks = list(module.decoder.blocks)
    with (
        hooked(blocks[:1], before=lambda block, given, named: states.append(given[0])),
        hooked(blocks, after=lambda block, out: states.append(out)),
    ):
        module(tokens)
    return states
