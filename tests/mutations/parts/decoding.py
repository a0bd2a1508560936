"""Faults in beam search, constraints and encoder-decoders."""

from __future__ import annotations

from ..fault import Fault

BEAM, TARGETS = "src/saccade/make/models/decoding/beam.py", "src/saccade/make/models/decoding/step.py"
CONSTRAINTS, PAIR = "src/saccade/make/models/decoding/constraints.py", "src/saccade/make/models/text/encoder_decoder.py"
SEARCH, T5 = ("tests/models/test_beam_search.py",), ("tests/models/families/test_t5.py",)
BART = ("tests/models/families/test_bart.py",)

FAULTS = (
    Fault(
        "beam-worst",
        BEAM,
        "worst = torch.where(full, best[:, -1], -torch.inf)",
        "worst = torch.where(full, best[:, 0], -torch.inf)",
        SEARCH,
        "The search ends once the best finished text is not beaten, where others still could be.",
    ),
    Fault(
        "beam-never",
        BEAM,
        'length = most if beams.early_stopping == "never"',
        'length = count if beams.early_stopping == "never"',
        SEARCH,
        "What a longer text could gain is left out.",
    ),
    Fault(
        "beam-ends",
        BEAM,
        "max(2, 1 + len(constraints.ends)) * k",
        "2 * k",
        SEARCH,
        "Several end tokens leave no beam to go on with.",
    ),
    Fault(
        "beam-finished",
        BEAM,
        "best.masked_fill(ended, -torch.inf).topk(k)",
        "best.topk(k)",
        SEARCH,
        "Beams go on after their end token.",
    ),
    Fault(
        "beam-parents",
        BEAM,
        "step.reorder((going[:, None] * texts.shape[1] + parents[going]).flatten())",
        "step.reorder((going[:, None] * texts.shape[1] + 0 * parents[going]).flatten())",
        SEARCH,
        "Every beam goes on with the cache of the first.",
    ),
    Fault(
        "repeated-ngrams",
        CONSTRAINTS,
        "begun = tokens[:, None, tokens.shape[1] - n + 1 :]",
        "begun = tokens[:, None, tokens.shape[1] - n : -1]",
        SEARCH,
        "The tokens before the last ones are compared.",
    ),
    Fault(
        "renormalized",
        CONSTRAINTS,
        "if self.renormalized else kept",
        "if False else kept",
        SEARCH,
        "A banned token that is likely costs every text its probability.",
    ),
    Fault(
        "lengths-begun",
        "src/saccade/make/models/decoding/published.py",
        "DEFAULT_TOKENS + begun, least=2) - begun",
        "DEFAULT_TOKENS + begun, least=2) - 1",
        SEARCH,
        "A published length counts only one of the tokens that a target begins with.",
    ),
    Fault(
        "repeated-padding",
        CONSTRAINTS,
        "return ids.masked_fill(mask == 0, -1)",
        "return ids",
        ("tests/models/test_decoding.py",),
        "Padding counts as a token that must not be repeated.",
    ),
    Fault(
        "inferred-mask",
        "src/saccade/make/models/decoding/generating.py",
        "if len(pads) != 1 or pads[0] in self.end_tokens:",
        "if len(pads) != 1:",
        ("tests/models/test_decoding.py",),
        "An end token in a prompt is taken for padding.",
    ),
    Fault(
        "classified-padding",
        "src/saccade/make/models/text/decoder.py",
        'real = input_ids != self.settings.get("pad_token_id", -1)',
        "real = input_ids != -1",
        ("tests/models/families/test_gpt2.py",),
        "A classifier reads padding where no mask says so.",
    ),
    Fault(
        "forced-last",
        CONSTRAINTS,
        "if count + 1 == self.max_new_tokens and",
        "if count == self.max_new_tokens and",
        SEARCH,
        "A text that is cut off lacks its end token.",
    ),
    Fault(
        "chosen-sources",
        TARGETS,
        "self._real = None if self._real is None else self._real[",
        "self._real = None if self._real is None else self._real[0 * ",
        T5,
        "Targets read the padding of another source.",
    ),
    Fault(
        "padded-labels",
        PAIR,
        "labels = labels.masked_fill(~layout.real, IGNORED)",
        "pass",
        BART,
        "Labels of padding count in a batch that stays padded.",
    ),
    Fault(
        "masked-labels",
        PAIR,
        "begun = F.pad(_counted(labels, pad)[:, :-1], (1, 0), value=self.start)",
        "begun = F.pad(_counted(labels, 0)[:, :-1], (1, 0), value=self.start)",
        BART,
        "A label that is not learned is read as another token than in training elsewhere.",
    ),
)
