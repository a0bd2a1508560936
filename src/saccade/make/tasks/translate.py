"""`translate`: texts into another language. An encoder-decoder, and a search with beams.

Shape legend: B pairs of a batch, Ls / Lt tokens of the longest source and target, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...operator.nn.stacks import LayerObserver
from ...see.inspection._targets import target_tokenizer
from .._task_registry import TranslateOptions
from ..models import Model, load
from ..models.decoding.beam import BeamSearch
from ..models.decoding.sampling import Sampling
from ..models.output_heads import IGNORED
from ..models.text.encoder_decoder import EncoderDecoder
from ..training import Evaluation, Objective, Settings
from ..training.processes import is_sharded
from ._example_task import JUDGED, Batch, ExampleObjective, widened
from ._examples import UnusableExamples, warn_left_out
from ._task import Baseline, Details, Tested
from ._texts._alignment import alignment, alignment_picture
from ._texts._lexicon import Lexicon
from ._texts._pairs import Pair, aligned_files, is_table, read_pairs, read_sources
from ._texts._reader import padded
from ._texts._text_task import TextTask
from ._texts._translators import TranslatorSizes, new_bart, new_marian

if TYPE_CHECKING:
    from accelerate import Accelerator
    from sacrebleu.metrics.base import Metric

HEAD = "conditional-generation"
LOOKED = 500  # validation pairs, evenly spread, that a look translates
SHOWN = 3  # translations of a report
DRAWN = 40  # tokens of the longest text that is drawn, if there is a shorter one
TOKENS = {"zh": "zh", "ja": "char", "th": "char"}  # of BLEU, for languages without spaces; "13a" for all others

Item = tuple[list[int], list[int] | None]
"""Tokens of a text and of its translation."""


@dataclasses.dataclass(frozen=True)
class Translate(TranslateOptions, TextTask):
    r"""Texts into another language.

    A look computes the loss of all validation pairs, and BLEU and chrF of up to 500, evenly spread and translated
    without beams. Batches hold pairs of similar length. The word-by-word baseline is IBM model 1.

    Args:
        source, target: of a table the columns, of two aligned files the endings, such as "de" and "en".
        prefix: what stands before each text, for checkpoints that need one: "translate German to English: ".
        skip_empty: leave out pairs with an empty side, with a warning that counts them, instead of raising an error.
        label_smoothing: share of the truth that is spread evenly over all tokens in training (Szegedy et al. 2016).
        beams: translations that are searched for at once; 1 takes the most probable token each time.
        lowercase: whether a report also has BLEU on lowercased texts.
        vocabulary, layers, heads, width, dropout: of a new model; a checkpoint has its own.
        separate: give each language of a new model a vocabulary and an embedding of its own, as in Marian;
            otherwise both share one, as in BART.

    Raises:
        ValueError: an option outside of its range.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "pairs.csv")
        ...     _ = path.write_text("de,en\neine Katze,a cat\nein Hund,a dog\n")
        ...     pairs = saccade.tasks.Translate(source="de", target="en").read(path)
        >>> pairs[0].source, pairs[0].target
        ('eine Katze', 'a cat')
    """

    head = HEAD
    requires = ("sacrebleu",)
    extra = "translate"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == self.target:
            raise ValueError(f"source, target: expected two languages, got {self.source!r} twice")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing: must be in [0, 1), got {self.label_smoothing}")
        if self.beams < 1:
            raise ValueError(f"beams: must be at least 1, got {self.beams}")

    # --- data ---------------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> list[Pair]:
        return self.without_empty(read_pairs(path, self.source, self.target))

    def files(self, path: Path) -> Sequence[Path]:
        return [path] if is_table(path) else aligned_files(path, (self.source, self.target))

    def without_empty(self, pairs: list[Pair]) -> list[Pair]:
        """The pairs with a word on both sides. ValueError if a side is empty, unless such pairs are to be left out."""
        left = [pair for pair in self._with_words(pairs) if _has_words(pair)]
        empty = [pair.place for pair in pairs if not _has_words(pair)]
        warn_left_out(empty, len(pairs), "pairs have an empty side and are")
        return left

    def _with_words(self, pairs: list[Pair]) -> list[Pair]:
        """All pairs. ValueError if a side is empty, unless such pairs are to be left out, or if every pair has an empty
        side."""
        empty = [pair for pair in pairs if not _has_words(pair)]
        if empty and not self.skip_empty:
            side = self.target if empty[0].source.strip() else self.source
            problem = f"the text in {side!r} is empty ({len(empty)} of {len(pairs)} lack one); remove such lines"
            raise UnusableExamples(f"{empty[0].place}: {problem}", "skip_empty")
        if len(empty) == len(pairs):
            raise ValueError(f"{pairs[0].place}: no text is left, all {len(pairs)} are empty")
        return pairs

    def is_empty(self, example: Pair) -> bool:
        return not example.source.strip()

    def inputs(self, texts: Sequence[str]) -> list[Pair]:
        return self._with_words([Pair(text, None, f"text {n}") for n, text in enumerate(texts, 1)])

    def read_inputs(self, path: Path) -> list[Pair]:
        return self._with_words(read_sources(path, self.source))

    def text_of(self, example: Pair) -> str:
        return self.prefix + example.source

    def encode(self, model: Model, examples: Sequence[Pair]) -> list[Item]:
        """Items with the targets of all examples, or of none."""
        places = [example.place for example in examples]
        sources = self.reader.token_ids(model.tokenizer, [self.text_of(example) for example in examples], places)
        texts = [example.target for example in examples if example.target is not None]
        if len(texts) < len(examples):
            return [(source, None) for source in sources]
        targets = self.reader.token_ids(target_tokenizer(_translator(model)), texts, places)
        return list(zip(sources, targets, strict=True))

    def length(self, item: Item) -> int:
        return len(item[0]) + len(item[1] or ())

    def collate(self, model: Model, items: Sequence[Item], random: np.random.Generator | None = None) -> Batch:
        """`input_ids` (B, Ls) and, where targets are known, `labels` (B, Lt) and the decoder's inputs."""
        batch = padded(model, [source for source, _ in items])
        targets = [target for _, target in items if target is not None]
        if len(targets) < len(items):
            return batch
        read = padded(model, [[_translator(model).start or 0, *target[:-1]] for target in targets])
        written = padded(model, targets)
        labels = written["input_ids"].masked_fill(written["attention_mask"] == 0, IGNORED)
        return {
            **batch,
            "decoder_input_ids": read["input_ids"],
            "decoder_attention_mask": read["attention_mask"],
            "labels": labels,
        }

    # --- model --------------------------------------------------------------------------------------------------------

    def new_model(self, training: Sequence[Pair]) -> Model:
        texts = [pair.source for pair in training], [pair.target or "" for pair in training]
        sizes = TranslatorSizes(self.layers, self.heads, self.width, self.dropout, self.vocabulary, self.longest)
        return (new_marian if self.separate else new_bart)(*texts, sizes, self.beams)

    def open_model(self, source: Path | str) -> Model:
        return _translator(load(source, head=HEAD, dtype=torch.float32))

    def objective(
        self, model: Model, training: Sequence[Pair], validation: Sequence[Pair], settings: Settings
    ) -> Objective:
        return TranslationObjective(self, model, training, validation, settings)

    # --- loss ---------------------------------------------------------------------------------------------------------

    def forward(self, model: nn.Module, batch: Batch, observe: LayerObserver | None = None) -> Tensor | None:
        """The logits (B, Lt, V) of each next token of known targets."""
        if "labels" not in batch:
            return None
        given = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = model(**given, **({} if observe is None else {"observe": observe})).logits
        return widened(logits)

    def loss(self, result: Tensor, batch: Batch, *, learning: bool) -> Tensor:
        smoothing = self.label_smoothing if learning else 0.0
        return F.cross_entropy(
            result.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, label_smoothing=smoothing
        )

    def weight(self, batch: Batch, *, learning: bool) -> float:
        return int((batch["labels"] != IGNORED).sum())

    def outputs(self, model: nn.Module, result: Tensor | None, batch: Batch) -> list[str]:
        """The translations; targets are ignored."""
        translator = _translator(model)
        search = BeamSearch(self.beams) if self.beams > 1 else Sampling(temperature=0.0)
        translations = translator.generate(batch["input_ids"], batch["attention_mask"], search=search)
        tokenizer = target_tokenizer(translator)
        return [tokenizer.decode(texts[0]).strip() for texts in translations.texts()]

    def scored(self, count: int) -> str:
        if count <= LOOKED:
            return f"{super().scored(count)}, translated without beams"
        return f"over {LOOKED} of {count:,} validation pairs, translated without beams, and the loss of all"

    def predict(self, model: Model, data: Sequence[Pair], rows: int = JUDGED) -> list[str]:
        return super().predict(model, [dataclasses.replace(pair, target=None) for pair in data], rows)

    # --- metric and picture -------------------------------------------------------------------------------------------

    def _metrics(self) -> dict[str, Metric]:
        """The metrics of sacrebleu, by their names in a report."""
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF

        def bleu(*, lowercase: bool) -> Metric:  # forced, since a text that looks tokenized may be one
            return BLEU(lowercase=lowercase, force=True, tokenize=TOKENS.get(self.target, "13a"))

        more = {"BLEU lowercased": bleu(lowercase=True)} if self.lowercase else {}
        return {"BLEU": bleu(lowercase=False), "chrF": CHRF(), **more}

    def scores(self, outputs: Sequence[str], data: Sequence[Pair]) -> dict[str, float]:
        references = [[pair.target or "" for pair in data]]
        return {name: float(metric.corpus_score(outputs, references).score) for name, metric in self._metrics().items()}

    @property
    def protocol(self) -> str:
        return f"sacrebleu on texts as they are; {self.beams} beams"

    def baselines(
        self, model: Model, training: Sequence[Pair], validation: Sequence[Pair], tested: Sequence[Pair]
    ) -> list[Baseline]:
        lexicon = Lexicon([pair.source for pair in training], [pair.target or "" for pair in training])
        return [
            Baseline("word by word (IBM model 1)", [lexicon.translated(pair.source) for pair in tested]),
            Baseline("the source as it is", [pair.source for pair in tested]),
        ]

    def looked(self, validation: Sequence[Pair]) -> list[Pair]:
        chosen = np.linspace(0, len(validation) - 1, min(LOOKED, len(validation))).astype(int)
        return [validation[n] for n in chosen]

    def constant(self, model: Model, training: Sequence[Pair], tested: Sequence[Pair]) -> Baseline:
        [(usual, _)] = Counter(pair.target or "" for pair in training).most_common(1)
        return Baseline("always the most frequent translation", [usual] * len(tested))

    def details(self, outputs: Sequence[str], data: Sequence[Pair]) -> Details:
        """sacrebleu's `signatures` of the metrics, and the first `translations`."""
        signatures = {}
        for name, metric in self._metrics().items():
            metric.corpus_score(outputs[:1], [[pair.target or "" for pair in data[:1]]])  # it knows its references then
            signatures[name] = str(metric.get_signature())
        first = zip(data[:SHOWN], outputs[:SHOWN], strict=True)
        shown = [
            {"source": pair.source, "translation": output, "reference": pair.target or ""} for pair, output in first
        ]
        lines = [f"{name}: {signature}" for name, signature in signatures.items()]
        for translation in shown:
            lines += ["", *(f"{name:<11}  {' '.join(text.split())}" for name, text in translation.items())]
        return Details({"signatures": signatures, "translations": shown}, "\n".join(lines))

    def picture(self, tested: Tested, kind: str) -> bytes:
        """The alignment by cross-attention, of the first example that is short enough to draw."""
        model = _translator(tested.model)
        both = zip(tested.data, tested.outputs, strict=True)
        texts = [(self.text_of(pair), output) for pair, output in both if output]
        if not texts:
            raise ValueError("picture: every translation is empty, so there is no alignment to draw")
        sizes = [max(len(model.tokenizer.whole(text)), len(model.tokenizer.whole(output))) for text, output in texts]
        chosen = next((n for n, size in enumerate(sizes) if size <= DRAWN), int(np.argmin(sizes)))
        return alignment_picture(alignment(model, *texts[chosen]), kind)

    def shown(self, example: Pair, output: str) -> dict[str, Any]:
        return {"text": example.source, "translation": output}

    def line(self, shown: Mapping[str, Any]) -> str:
        return " ".join(shown["translation"].split())


class TranslationObjective(ExampleObjective):
    """Pairs of similar lengths. Evaluations compute the loss of all validation pairs and translate some greedily."""

    _task: Translate

    def tokens(self, batch: Batch) -> int:
        return int(self.weight(batch))

    def evaluate(self, model: nn.Module, accelerator: Accelerator | None = None) -> Evaluation:
        rows = self.judged_rows(accelerator)
        loss = self.mean_loss(model, rows)
        if accelerator is not None and is_sharded(accelerator):  # no process has a model that could write
            return Evaluation(loss)
        looked, greedy = self._task.looked(self._validation), dataclasses.replace(self._task, beams=1)
        scores = greedy.scores(greedy.predict(_translator(model), looked, rows), looked)
        return Evaluation(loss, scores, greedy.cost(scores))


def _translator(model: nn.Module) -> EncoderDecoder:
    """The model, if it is an `EncoderDecoder` with a start token; otherwise ValueError."""
    if not isinstance(model, EncoderDecoder):
        raise ValueError(f"expected an encoder-decoder, such as BART, Marian or T5, got {type(model).__name__}")
    if model.start is None:
        raise ValueError("config.json names no decoder_start_token_id, with which translations begin")
    return model


def _has_words(pair: Pair) -> bool:
    return bool(pair.source.strip()) and (pair.target is None or bool(pair.target.strip()))
