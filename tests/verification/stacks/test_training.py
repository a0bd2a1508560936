"""Training: heads without a gradient, modes that differ, accumulation and checkpointing that change gradients."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
import transformers
from stacks.dense import WIDTH, Dense, packed
from stacks.layered import Attention, Layered, causal, found, probed, window
from stacks.reports.model import VOCABULARY, Model
from torch import nn
from torch.utils.checkpoint import checkpoint

import saccade


def training(model, **more):
    return probed("training", model, causal=True, **more)


def test_a_head_whose_keys_are_detached():
    class Detached(Attention):
        def split(self, x):
            query, key, value = super().split(x)
            return query, torch.cat([key[:, :2], key[:, 2:].detach()], 1), value

    [finding] = training(Layered(Attention(causal), Detached(causal)))
    assert finding.where == "layers.1.qkv.weight: layer 1"
    assert finding.evidence["rows"] == list(range(40, 48))  # keys of head 2
    assert not training(Layered(Attention(causal), Attention(causal)))


def test_another_mask_in_train_mode():
    class Modes(Attention):
        def forward(self, *inputs):
            self.pairs = self.fast = causal if self.training else window(5)
            return super().forward(*inputs)

    [finding] = training(Layered(Modes(causal)))
    assert finding.where == "train mode"


def test_outputs_of_padding_may_differ_between_the_modes():
    """Fails where outputs that nobody reads are compared: behind a triangle, padding on the right needs no mask."""

    class Unmasked(Model):
        def padding(self, call, count):
            return torch.tensor(True) if self.training else super().padding(call, count)

    report = saccade.verify_stack(Unmasked(), causal=True)
    assert report.ok, report


def test_dropout_is_no_difference_of_modes():
    class Dropped(Attention):
        def __init__(self, pairs):
            super().__init__(pairs)
            self.dropout = 0.3

        def forward(self, *inputs):
            return F.dropout(super().forward(*inputs), self.dropout, self.training)

    model = Layered(Dropped(causal))
    assert not training(model)
    assert model.layers[0].dropout == 0.3


# Accumulation


def stepped(normalise):
    """A model and its training step, which leaves the gradients of a loss over micro-batches."""
    model = Layered(Attention(causal))

    def step(batches):
        total = sum(len(document) - 1 for batch in batches for document in batch)
        for batch in batches:
            losses = [
                F.cross_entropy(model(torch.tensor([document]))[0, :-1], torch.tensor(document[1:]), reduction="sum")
                for document in batch
            ]
            own = sum(len(document) - 1 for document in batch)
            normalise(sum(losses), own, total, len(batches)).backward()
        with torch.no_grad():  # an optimizer's step, which is taken back
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

    return model, step


def test_a_step_by_all_tokens_is_silent_and_leaves_the_model_as_it_was():
    model, step = stepped(lambda loss, own, total, count: loss / total)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not training(model, step=step)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_mean_of_means():
    model, step = stepped(lambda loss, own, total, count: loss / own / count)
    [finding] = training(model, step=step)
    assert "a token of a short micro-batch weighs more" in finding.message


def test_a_sum_that_is_not_divided():
    model, step = stepped(lambda loss, own, total, count: loss / total * count)
    [finding] = training(model, step=step)
    assert "2 times as large" in finding.message


# Checkpointing


class Checkpointed(Layered):
    use_checkpoint: bool

    def __init__(self, *layers, forgets):
        super().__init__(*layers)
        self.use_checkpoint, self.forgets = False, forgets

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        if not self.use_checkpoint:
            return super().forward(input_ids, attention_mask, position_ids)
        positions = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        positions = positions * 0 if self.forgets else positions
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + checkpoint(layer, x, attention_mask, positions, use_reentrant=False)
        return self.head(x)


def test_checkpointing_that_forgets_the_positions():
    assert not training(Checkpointed(Attention(causal), forgets=False))
    [finding] = training(Checkpointed(Attention(causal), forgets=True))
    assert finding.message.startswith("With checkpointing the gradient of")


# Batch norm


class Normalised(Dense):
    def __init__(self):
        super().__init__()
        table = self.embed
        self.embed = nn.Sequential(table, Turned(), nn.BatchNorm1d(WIDTH), Turned())


class Turned(nn.Module):
    def forward(self, x):
        return x.mT


def test_batch_norm_is_said_once_and_accused_nowhere():
    """Fails where its mean over the batch is a leak of a later token, or of another document."""
    report = saccade.verify_stack(Normalised(), pack=packed, causal=True)
    [finding] = report.findings
    assert (finding.probe, finding.severity) == ("training", "note")
    assert finding.where == "embed.2 (BatchNorm1d)"


# Targets


def stepping(model, loss):
    """A step whose loss is a cross-entropy of `loss(logits, ids)`, which gives outputs and their targets."""

    def step(micro_batches):
        model.zero_grad()
        total = sum(len(document) for documents in micro_batches for document in documents)
        for documents in micro_batches:
            for document in documents:
                ids = torch.tensor([document])
                made, targets = loss(model(input_ids=ids), ids)
                F.cross_entropy(made.flatten(0, 1), targets.flatten(), reduction="sum").div(total).backward()

    return step


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda out, ids: (out, ids), "the token that it reads"),
        (lambda out, ids: (out[:, :-2], ids[:, 2:]), "the token after the next one"),
        (lambda out, ids: (out[:, 1:], ids[:, :-1]), "the token before it"),
    ],
    ids=["not shifted", "twice", "the wrong way"],
)
def test_labels_of_other_tokens_than_the_next(loss, words):
    model = Model()
    [finding] = training(model, step=stepping(model, loss))
    assert words in finding.message and finding.where == "labels of the training step"
    assert len(finding.example[0]) <= 5
    right = stepping(model, lambda out, ids: (out[:, :-1], ids[:, 1:]))
    assert not training(model, step=right)


def of_llama():
    small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=97, **small))


BART = dict(vocab_size=97, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=40)
BART |= dict(encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=40)


def of_bart():
    config = transformers.BartConfig(is_decoder=True, is_encoder_decoder=False, max_position_embeddings=200, **BART)
    return transformers.BartForCausalLM(config)


def collated(documents, labels_of):
    longest = max(map(len, documents))
    ids = torch.tensor([document + [0] * (longest - len(document)) for document in documents])
    mask = torch.tensor([[n < len(document) for n in range(longest)] for document in documents]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels_of(ids).masked_fill(mask == 0, -100)}


def moved(ids):
    return torch.cat([ids[:, 1:], torch.full((len(ids), 1), -100)], 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "wrong", "words"),
    [
        (of_llama, moved, "shifted twice"),
        pytest.param(of_bart, torch.clone, "labels are not shifted", marks=pytest.mark.slow),
    ],
    ids=["twice", "not at all"],
)
def test_labels_of_a_model_that_shifts_them_and_of_one_that_does_not(make, wrong, words):
    """The fix is run: with its labels no other targets are found. BART's own forced last token ends no check."""
    torch.manual_seed(5)
    model = make().eval()
    [finding] = training(model, batch=functools.partial(collated, labels_of=wrong))
    assert words in finding.message

    def fixed(ids):
        names = {"torch": torch, "input_ids": ids}
        exec(finding.fix, names)
        return names["labels"]

    report = saccade.verify_stack(model, causal=True, batch=functools.partial(collated, labels_of=fixed))
    assert not found(report, "training")
    assert not any("raised" in finding.evidence for finding in report.findings), report


class Moved(Model):
    """Reads the tokens before each place, as a decoder that moves its labels to the right does."""

    def forward(self, input_ids, attention_mask=None):
        return super().forward(torch.nn.functional.pad(input_ids[:, :-1], (1, 0), value=1), attention_mask)


class Later(Model):
    """Two heads: the first predicts the token after the next one."""

    def __init__(self):
        super().__init__()
        self.later = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, input_ids, attention_mask=None):
        out = super().forward(input_ids, attention_mask)
        return self.later(out), out


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (Moved, lambda out, ids: (out, ids)),
        (Later, lambda out, ids: (torch.cat([out[0][:, :-2], out[1][:, :-2]]), torch.cat([ids[:, 2:], ids[:, 1:-1]]))),
    ],
    ids=["inputs that the model moves", "a head for a later token"],
)
def test_models_whose_outputs_predict_other_tokens(make, loss):
    model = make()
    assert not training(model, step=stepping(model, loss))


def test_a_model_of_both_directions_may_predict_what_it_reads():
    """Fails where a denoising encoder is taken for a causal model whose labels are not shifted."""
    model = Layered(Attention(lambda length: torch.ones(length, length, dtype=torch.bool)))
    step = stepping(model, lambda out, ids: (out, ids))
    assert not probed("training", model, causal=False, step=step)
    assert not probed("training", model, step=step)
