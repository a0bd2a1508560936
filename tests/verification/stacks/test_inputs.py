"""What collators return, and what models need: forms of inputs that are not faults."""

from __future__ import annotations

import collections
import types
from dataclasses import dataclass

import pytest
import torch
import transformers
from stacks.dense import Dense, packed
from torch import Tensor, nn

import saccade
from saccade.verification.stacks._documents import located
from slowly import slow_after, slow_but


def padded(documents):
    width = max(map(len, documents))
    rows = [[*document, *[0] * (width - len(document))] for document in documents]
    real = [[1] * len(document) + [0] * (width - len(document)) for document in documents]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(real)}


class Encoder(Dense):
    """Bidirectional, and of no use without its mask."""

    def forward(self, input_ids, attention_mask, position_ids=None):
        return super().forward(input_ids, attention_mask, position_ids)

    def pairs(self, length, attention_mask):
        return attention_mask[:, None, None].bool().expand(-1, -1, length, -1)


@pytest.mark.parametrize("batch", [None, padded])
def test_an_encoder_that_needs_its_mask(batch):
    """Fails where a call without the mask, which only the probe makes, turns a bidirectional model into a leak."""
    assert saccade.verify_stack(Encoder(), batch=batch).ok


class TrianglesByDefault(Encoder):
    """Without a mask it is a decoder."""

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            return Dense.forward(self, input_ids, torch.ones(1, 1, *2 * input_ids.shape[1:], dtype=torch.bool).tril())
        return super().forward(input_ids, attention_mask)

    def pairs(self, length, attention_mask):
        return attention_mask if attention_mask.dim() == 4 else super().pairs(length, attention_mask)


class MaskedOutside(Dense):
    """It leaves all pairs to the collator, whose mask is causal."""

    def pairs(self, length, attention_mask):
        return torch.ones(length, length, dtype=torch.bool) if attention_mask is None else attention_mask


def masked(documents):
    made = padded(documents)
    width = made["input_ids"].shape[1]
    return {**made, "attention_mask": torch.ones(len(documents), 1, width, width, dtype=torch.bool).tril()}


def test_a_causal_mask_that_the_collator_makes():
    """Fails where it is left out as one of padding may be."""
    assert saccade.verify_stack(MaskedOutside(), batch=masked).ok


def padded_to_eight(documents):
    """Rows of 8, 16, ... tokens: one document is padded, too."""
    width = -(-max(map(len, documents)) // 8) * 8
    made = padded([*documents, [5] * width])
    return {name: rows[:-1] for name, rows in made.items()}


def test_an_encoder_whose_mask_means_another_model_where_it_is_left_out():
    """Fails where a document alone is read without the mask that its batch has."""
    batch = [finding.probe for finding in saccade.verify_stack(TrianglesByDefault(), batch=padded_to_eight).findings]
    assert "batch" not in batch


class NeedsTypes(Dense):
    def forward(self, input_ids, token_type_ids):
        return super().forward(input_ids)


def test_a_model_that_needs_more_than_tokens():
    """Fails where a missing argument is called a fault of the stack."""
    report = saccade.verify_stack(NeedsTypes())
    assert not report.findings
    assert "function that makes inputs of NeedsTypes, which also needs token_type_ids" in report.outcomes[0].reason


def padded_left(documents):
    return padded([document[::-1] for document in documents])["input_ids"].flip(-1)


@dataclass(frozen=True)
class Rows:
    input_ids: Tensor
    attention_mask: Tensor


class ReadsRows(Dense):
    def forward(self, rows):
        return super().forward(rows.input_ids, rows.attention_mask)


FORMS = {
    "a UserDict": collections.UserDict,
    "lists": lambda made: {name: value.tolist() for name, value in made.items()},
    "arrays": lambda made: {name: value.numpy() for name, value in made.items()},
    "a dataclass": lambda made: Rows(**made),
    "an object": lambda made: types.SimpleNamespace(**made),
    "a named tuple": lambda made: collections.namedtuple("Made", made)(**made),
    "a tuple": lambda made: tuple(made.values()),
    "with labels": lambda made: (made, made["input_ids"]),
}


@pytest.mark.parametrize("form", slow_but(FORMS, "a UserDict", "lists", "a tuple"))
def test_forms_that_collators_return(form):
    """Fails where token ids are not found in this form, or lose their mask."""
    report = saccade.verify_stack(Dense(), batch=lambda documents: FORMS[form](padded(documents)))
    assert report.ok, report


def test_objects_that_the_model_reads_itself():
    report = saccade.verify_stack(ReadsRows(), batch=lambda documents: Rows(**padded(documents)))
    assert report.ok, report
    wrong = saccade.verify_stack(
        ReadsRows(),
        batch=lambda documents: Rows(padded(documents)["input_ids"].flip(-1), padded(documents)["attention_mask"]),
    )
    assert not wrong.ok


class OneByOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Dense()

    def forward(self, rows):
        return [self.model(row[None])[0] for row in rows]


def test_rows_of_unequal_length_are_named():
    report = saccade.verify_stack(OneByOne(), batch=lambda rows: list(map(torch.tensor, rows)))
    assert not report.findings
    assert "got a list of rows of 7, 7, 7 tokens" in report.outcomes[0].reason


class Flattened(Dense):
    """Documents of one row, told apart by cumulative lengths alone; outputs (L, width)."""

    def forward(self, input_ids, cu_seqlens):
        lengths = cu_seqlens.diff()
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        positions = torch.cat([torch.arange(int(length)) for length in lengths])[None]
        return super().forward(input_ids[None], (owner[:, None] == owner)[None, None], positions)[0]


def flattened(documents, *, last=None):
    ends = torch.tensor([0, *map(len, documents)]).cumsum(0)
    return {
        "input_ids": torch.tensor([token for document in documents for token in document]),
        "cu_seqlens": ends if last is None else ends[[0, last]],
    }


def test_a_model_that_is_called_with_packs_only():
    """Fails where such a model is called with a batch that nobody makes; or its packing is no longer tested."""
    assert saccade.verify_stack(Flattened(), pack=flattened).ok
    report = saccade.verify_stack(Flattened(), pack=lambda documents: flattened(documents, last=-1))
    assert [finding.probe for finding in report.findings] == ["packing"]


def padded_rows(documents):
    return padded(sorted(documents, key=len, reverse=True))


class FewWords(Dense):
    """Of five tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 24), nn.Linear(24, 5)


def packed_backwards(documents):
    return packed(documents[::-1])


def test_documents_of_a_few_words_in_another_order():
    """Fails where a short document is looked for within a longer one, and the longer one is then not found."""
    report = saccade.verify_stack(FewWords(), batch=padded_rows, pack=packed_backwards)
    assert report.ok, report
    statuses = {outcome.name: outcome.status for outcome in report.outcomes}
    assert (statuses["batch"], statuses["packing"]) == ("passed", "passed")
    ids = {"input_ids": torch.tensor([[1, 2, 1, 2, 1], [2, 1, 0, 0, 0]])}
    assert [tuple(place)[:2] for place in located(ids, [[2, 1], [1, 2, 1], [2, 1]])] == [(0, 3), (0, 0), (1, 0)]
    wrong = saccade.verify_stack(FewWords(), pack=lambda documents: packed_backwards(documents)["input_ids"])
    assert [finding.probe for finding in wrong.findings] == ["packing"]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_traced_code_has_no_signature():
    """Fails where the signature is asked of code that has none."""
    report = saccade.verify_stack(torch.jit.trace(Dense(), (torch.ones(2, 5, dtype=torch.long),)))
    assert report.ok, report


class Tokenizer:
    """All that is asked of a tokenizer."""

    pad_token_id, all_special_ids, vocab_size = 0, [0, 1], 53

    def pad(self, rows, **_):
        return padded([row["input_ids"] for row in rows])


def of_decoder(documents):
    made = padded(documents)
    names = {"input_ids": "decoder_input_ids", "attention_mask": "decoder_attention_mask"}
    return {"input_ids": torch.full((len(documents), 5), 7), **{names[name]: value for name, value in made.items()}}


def with_labels(documents):
    made = padded(documents)
    return {**made, "labels": made["input_ids"]}


@pytest.mark.parametrize(
    ("given", "is_measured"),
    slow_after(1, [({"batch": of_decoder}, True), ({"tokenizer": Tokenizer()}, True), ({"batch": with_labels}, False)]),
    ids=["ids of the decoder", "tokenizer", "ids of the encoder"],
)
def test_documents_of_an_encoder_decoder_are_its_decoders(given, is_measured):
    """Fails where the encoder reads them: it is not causal, and BART's decoder then reads the same tokens."""
    sizes = dict(d_model=30, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=37, decoder_ffn_dim=37)
    heads = dict(encoder_attention_heads=3, decoder_attention_heads=3)
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=53, **sizes, **heads))
    report = saccade.verify_stack(model, **given)
    assert report.ok is is_measured and not report.findings
    measured = {outcome.name for outcome in report.outcomes if outcome.status == "passed"}
    assert {"causality", "source", "training"} <= measured if is_measured else not measured
    assert is_measured or "batch: expected decoder_input_ids" in report.outcomes[0].reason
