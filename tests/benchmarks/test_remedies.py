"""The measured page on remedies: its formulas, its checks, its tables."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from looped import looped

PATH = Path(__file__).parents[2] / "benchmarks" / "remedies.py"
spec = importlib.util.spec_from_file_location("remedies", PATH)
remedies = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = remedies  # dataclasses look their module up
spec.loader.exec_module(remedies)

# Heads as wide as a 64-byte line, so that plain attention is PyTorch's kernel.
TINY = remedies.Sizes(width=48, heads=3, layers=2, vocabulary=19, context=29, window=7, batch=5, items=11)
each = looped("configuration", remedies.CONFIGURATIONS)


def arguments(sizes):
    return [text for name, value in dataclasses.asdict(sizes).items() for text in (f"--{name}", str(value))]


def rows(text, heading):
    """The cells of each row of the table under a heading, without its head."""
    table = text.partition(f"## {heading}")[2].partition("## ")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]


@pytest.mark.slow
def test_both_tables_have_every_row(tmp_path, monkeypatch, capsys):
    peaks = {one.name: (k + 1) * 2**20 for k, one in enumerate(remedies.CONFIGURATIONS)}
    measured = lambda sizes, one: remedies.Measured(peaks[one.name], (2**20, 2**20, 2**21))  # noqa: E731
    monkeypatch.setattr(remedies, "peak_in_own_process", measured)
    written = tmp_path / "page.md"
    remedies.main([*arguments(TINY), "--rounds", "1", "--out", str(written)])
    text = written.read_text()
    assert text in capsys.readouterr().out
    names = [one.name for one in remedies.CONFIGURATIONS]
    expected, came = rows(text, "What it must cost"), rows(text, "What it cost")
    assert [row[0] for row in expected] == [row[0] for row in came] == names
    assert [row[2] for row in came] == [f"{k}.00" for k in range(1, 9)]  # peak, to the plain step's
    assert came[0][5] == came[0][8] == "1.00" and all(float(row[5]) > 0 for row in came)
    assert "(1.0, 1.0, 2.0 MiB)" in text and "Medians over 1 round(s)" in text and "11 items" in text


@pytest.mark.parametrize(("slowest", "warned"), [(1.4, False), (1.6, True)])
def test_a_busy_machine_is_told(slowest, warned):
    results = [remedies.Measured(1, (4, 4, 8), [1.0, 1.1]) for _ in remedies.CONFIGURATIONS]
    results[3].seconds[1] = slowest
    text = remedies.page(TINY, 2, results)
    assert ("**The machine was busy**: rounds of the same work differ by up to a factor of 1.6." in text) is warned


@pytest.mark.slow
def test_peak_memory_is_what_the_formula_says():
    """Within 15 %: beside some 50 MiB of activations, buffers inside kernels and the allocator's pages are little."""
    sizes = remedies.Sizes(width=64, heads=4, layers=3, vocabulary=211, context=1024, batch=5, items=5)
    for configuration in (remedies.PLAIN, remedies.CHECKPOINTING):
        measured = remedies.peak_in_own_process(sizes, configuration)
        assert measured.peak == pytest.approx(remedies.step_bytes(sizes, configuration), rel=0.15)
        weights = sum(weight.numel() for weight in remedies.DecoderLM(sizes.model()).parameters())
        assert measured.state[:2] == (4 * weights, 4 * weights)
        assert 8 * weights <= measured.state[2] < 8 * weights + 1000  # AdamW's two moments, and its step counts


def test_a_memory_run_that_fails_says_why(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no memory left >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(SystemExit, match=r"^window: measuring memory failed\nno memory left"):
        remedies.peak_in_own_process(TINY, remedies.WINDOW)


def test_without_proc_it_says_what_it_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(remedies, "STATUS", tmp_path / "status")
    with pytest.raises(SystemExit, match="which only Linux has"):
        remedies.main(arguments(TINY))


def kept(sizes, configuration):
    """Bytes that autograd keeps of a step, but for weights (and their copies) and what is there once, not per token."""
    trainer = remedies.Trainer(sizes)
    trainer.model.decoder.checkpointing = configuration.checkpointing
    own = {weight.untyped_storage().data_ptr() for weight in trainer.model.parameters()}
    shapes = {tuple(weight.shape) for weight in trainer.model.parameters()}
    batch, length = sizes.batch, sizes.context
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        copy = tuple(tensor.shape) in shapes or tuple(tensor.mT.shape) in shapes if tensor.ndim == 2 else False
        per_token = tensor.is_floating_point() and tensor.numel() % (batch * length) == 0
        if storage.data_ptr() not in own and per_token and not copy:
            storages[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(0, sizes.vocabulary, (batch, length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trainer._loss(tokens, tokens, configuration, remedies.mask_of(sizes, configuration))
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.slow
@each
def test_the_formula_counts_what_autograd_keeps(configuration):
    few, more = (kept(dataclasses.replace(TINY, layers=n), configuration) for n in (1, 2))
    tokens = TINY.batch * TINY.context
    block, head = remedies.kept_bytes(TINY, configuration)
    assert more - few == tokens * (4 * TINY.width if configuration.checkpointing else block)
    # Checkpoints keep block inputs: with one layer that is the embedded tokens.
    assert few == tokens * (head + (4 * TINY.width if configuration.checkpointing else block))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_formula_counts_the_operations(checkpointing, monkeypatch):
    """Against PyTorch's count of every matrix product; the window's tiles are products, too, where PyTorch computes."""
    monkeypatch.setattr("saccade.operator._backends.native._kernels.module", None)
    monkeypatch.setattr("saccade.operator._backends.native._kernels.missing", "left out")
    sizes = dataclasses.replace(TINY, context=512, window=64, vocabulary=23)
    configuration = remedies.Configuration("both", window=True, checkpointing=checkpointing)
    trainer = remedies.Trainer(sizes)
    tokens = torch.randint(0, 23, (3, 512))
    with FlopCounterMode(display=False) as counted:
        batch = remedies.Batch(tokens, tokens)
        trainer.gradients(batch, configuration, remedies.mask_of(sizes, configuration))
    assert counted.get_total_flops() == remedies.flops(sizes, configuration, batch)


def full(rows, length):
    """A batch without padding."""
    return remedies.Batch(*2 * (torch.zeros(rows, length, dtype=torch.int64),))


def test_the_peak_is_the_larger_of_two_moments():
    """By hand, for a vocabulary that outweighs a block's backward, and for one that does not."""
    small = dataclasses.replace(TINY, vocabulary=1)
    large = dataclasses.replace(TINY, vocabulary=10_000)
    hidden = 128  # 8/3 of 48
    block = 13 * 48 + 4 * hidden + 2 * 3 + 2
    assert remedies.activation_bytes(small, remedies.PLAIN, full(2, 7)) == 4 * 14 * (2 * block + 48 + 2 * hidden)
    assert remedies.activation_bytes(large, remedies.PLAIN, full(2, 7)) == 4 * 14 * (2 * block + 3 * 48 + 1 + 30_000)
    again = remedies.activation_bytes(small, remedies.CHECKPOINTING, full(2, 7))
    assert again == 4 * 14 * (2 * 48 + block + 2 * hidden)
    assert remedies.activation_bytes(small, remedies.ACCUMULATION, full(8, 7)) * 4 == remedies.activation_bytes(
        small, remedies.PLAIN, full(8, 7)
    )
    padded = remedies.Batch(full(2, 7).tokens, full(2, 7).targets.clone().index_fill_(1, torch.tensor([5, 6]), -100))
    assert remedies.activation_bytes(small, remedies.PACKED, padded) * 7 == 5 * remedies.activation_bytes(
        small, remedies.PLAIN, padded
    )


def test_padding_and_the_masks_change_no_real_token():
    """The step's model is `DecoderLM`, and each item's loss is what it is alone."""
    trainer = remedies.Trainer(TINY)
    items = [torch.randint(0, 19, (n + 1,)) for n in (3, 11, 5)]
    batch = remedies.padded(items)
    assert batch.tokens.shape == (3, 11)
    assert ((batch.targets == remedies.IGNORED).sum(1) == torch.tensor([8, 0, 6])).all()
    loss = trainer.gradients(batch, remedies.PLAIN, remedies.Causal())
    alone = [F.cross_entropy(trainer.model(item[None, :-1])[0], item[1:], reduction="sum") for item in items]
    assert loss == pytest.approx(sum(alone).item() / 19, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("remedy", ["CHECKPOINTING", "ACCUMULATION", "WINDOW", "PACKED", "BF16", "TOGETHER"])
def test_a_remedy_that_computes_something_else_is_not_timed(monkeypatch, remedy):
    configuration = getattr(remedies, remedy)
    right = remedies.Trainer._loss

    def wrong(self, tokens, targets, used, mask):
        return right(self, tokens, targets, used, mask) * (1.01 if used == configuration else 1.0)

    remedies.check(TINY)
    monkeypatch.setattr(remedies.Trainer, "_loss", wrong)
    with pytest.raises(AssertionError, match=f"^{configuration.name}:"):
        remedies.check(TINY)


def test_gradients_are_compared_not_only_losses():
    right = (1.0, [torch.ones(3)])
    remedies.require_equal("same", (1.0, [torch.ones(3)]), right)
    with pytest.raises(AssertionError, match="other: a gradient differs"):
        remedies.require_equal("other", (1.0, [torch.tensor([1.0, 1.001, 1.0])]), right)


@pytest.mark.parametrize("grouped", [False, True])
def test_an_epoch_without_an_item_is_not_timed(monkeypatch, grouped):
    right = remedies.chosen

    def lossy(sizes, items, grouped):
        found = right(sizes, items, grouped=grouped)
        return found[1:] if grouped is lossy.where else found

    lossy.where = grouped
    monkeypatch.setattr(remedies, "chosen", lossy)
    with pytest.raises(AssertionError, match="every item once"):
        remedies.check(TINY)


def test_lengths_follow_what_the_page_states():
    sizes = dataclasses.replace(remedies.Sizes(), items=4001, vocabulary=2)
    lengths = torch.tensor([len(item) - 1 for item in remedies.drawn(sizes)], dtype=torch.float64)
    assert lengths[0] == lengths.max() == 1024 and lengths.min() >= 32
    # A log-normal's quantiles; the error of a quantile of 4,001 is below 4 % here, four times its deviation 5 %.
    deviations = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    quantiles = lengths.quantile(torch.special.ndtr(deviations))
    assert torch.allclose(quantiles, 300 * torch.exp(0.7 * deviations), rtol=0.08)
