"""The probe of sequences on several ranks: a model whose shards are computed as one, and faults of stacks for ranks."""

import os
import select
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import saccade
from saccade.verification.stacks._ranks import ranks

WINDOW, VOCABULARY, WIDTH = 5, 61, 24


class Model(nn.Module):
    """Two layers of causal attention within documents, with windows of WINDOW keys.

    `shared` is None, or says how ranks share a row: by the name of a fault, or "" for none.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        return torch.stack([self.row(*row) for row in zip(input_ids, position_ids, strict=True)])

    def row(self, rows, places, shared=None):
        at, documents = torch.arange(len(rows)), (places == 0).cumsum(0)
        mine = slice(None)
        if shared is not None:
            held = len(rows) // dist.get_world_size()
            mine = slice(dist.get_rank() * held, (dist.get_rank() + 1) * held)
            places = torch.arange(held).repeat(len(rows) // held) if shared == "positions" else places
        x = self.embed(rows[mine]) + self.place(places[mine])
        for layer in self.layers:
            query, key, value = layer(x).chunk(3, -1)
            if shared is not None:
                key, value = joined(key), joined(value)
            seen = at[mine, None] >= at
            if shared == "causal" and dist.get_world_size() > 1:
                seen = at[mine, None] >= at // held * held
            if shared != "window":
                seen = seen & (at[mine, None] - at < WINDOW)
            if shared != "documents":
                seen = seen & (documents[mine, None] == documents)
            if shared == "keys":
                seen = seen & (at // held == dist.get_rank())
            x = x + functional.scaled_dot_product_attention(query, key, value, seen)
        return self.head(x)


def joined(rows):
    """The rows of all ranks."""
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def packed(documents):
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    return {
        "input_ids": torch.tensor([[token for document in documents for token in document]]),
        "position_ids": positions[None],
    }


def sharing(model, fault=""):
    """The function for ranks. It is right on one rank: the fault is one of cutting."""

    def shard(documents):
        several = dist.get_world_size() > 1
        [ids], [places] = packed(documents).values()
        logits = joined(model.row(ids, places, fault if several else ""))
        parts = ids.reshape(dist.get_world_size() if fault == "labels" else 1, -1)
        labels = functional.pad(parts[:, 1:], (0, 1), value=-100).flatten()
        return {"logits": logits[None], "loss": functional.cross_entropy(logits, labels)}

    return shard


def finding_of(fault, pack=packed):
    model = Model()
    report = saccade.verify_stack(model, pack=pack, shard=sharing(model, fault), causal=True, window=None)
    return [finding for finding in report.findings if finding.probe == "shards"], report


def test_a_row_that_ranks_share_rightly_is_silent():
    findings, report = finding_of("")
    [outcome] = [outcome for outcome in report.outcomes if outcome.name == "shards"]
    assert findings == [] and outcome.status == "passed"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("documents", "document 1 attends to document 0 of its row"),
        pytest.param("window", "which the model hides from it, as a window", marks=pytest.mark.slow),
        pytest.param("causal", "which comes later", marks=pytest.mark.slow),
        pytest.param("keys", "which it sees in the model", marks=pytest.mark.slow),
        pytest.param("positions", "at other positions", marks=pytest.mark.slow),
        pytest.param("labels", "the loss is", marks=pytest.mark.slow),
    ],
)
def test_a_fault_of_sharing_is_named(fault, words):
    [finding] = finding_of(fault)[0]
    assert words in finding.message and finding.message.startswith("On 2 ranks")


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_and_is_the_finding():
    model = Model()
    right = sharing(model)

    def shard(documents):
        if dist.get_rank() == 1:
            raise ValueError("an uneven shard")
        return right(documents)

    report = saccade.verify_stack(model, pack=packed, shard=shard)
    [finding] = [finding for finding in report.findings if finding.probe == "shards"]
    assert "ValueError: an uneven shard, on rank 1 of 2" in finding.message


@pytest.mark.slow
def test_what_differs_on_one_rank_is_said_of_one_rank():
    model = Model()
    report = saccade.verify_stack(model, pack=packed, shard=lambda documents: sharing(model)(documents[::-1]))
    assert [f.where for f in report.findings if f.probe == "shards"] == ["1 rank"]


def test_ranks_end_with_the_process_that_forked_them():
    """One that is terminated closes nothing itself: each rank would wait at an end of a pipe that it has inherited."""
    source, waiting = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        os.close(source)
        with ranks(2, lambda documents: torch.zeros(1, 1, 1)) as call:
            call([[0]])
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(waiting)
    os.waitpid(child, 0)
    assert select.select([source], [], [], 20)[0] and os.read(source, 1) == b""  # the last holder has ended
    os.close(source)
