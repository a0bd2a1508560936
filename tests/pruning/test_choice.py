"""Which heads go: the choice against a search, the command's numbers."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from pruning.masked import masked
from published import transformers, written, written_words
from saccade import head_importance, models, prune
from saccade.cli import main
from saccade.nn import AttentionConfig, BlockConfig, Encoder, MultiHeadAttention
from saccade.pruning import attention_flops, choose_heads, compare_pruned
from saccade.pruning._layers import attention_layers
from saccade.pruning._texts import mean_loss, text_windows
from saccade.pruning._timing import forward_times

TEXT = "The cat sat on the mat. The dog sat on the cat's mat, and the cat went away. " * 5
LONG = TEXT * 3  # more than a window


class Loss(torch.nn.Module):
    """An encoder with a loss."""

    def __init__(self, kv_heads: int = 6):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder(BlockConfig(AttentionConfig(24, 6, kv_heads=kv_heads), hidden=17), 2).double()

    def forward(self, x, wanted):
        return {"loss": ((self.encoder(x) - wanted) ** 2).mean()}


def test_a_share_of_all_heads_stays_the_strongest_first_and_one_of_each_layer():
    importance = {
        "encoder.blocks.0.attention": torch.tensor([0.1, 0.2, 0.3, 0.01, 0.02, 0.03]),
        "encoder.blocks.1.attention": torch.tensor([0.5, 0.6, 0.7, 0.8, 0.15, 0.9]),
    }
    model = Loss()
    assert choose_heads(model, importance, 0.5) == {
        "encoder.blocks.0.attention": [0, 1, 3, 4, 5],
        "encoder.blocks.1.attention": [4],
    }
    few = choose_heads(model, importance, 0.01)
    assert {path: sorted({*range(6)} - {*heads}) for path, heads in few.items()} == {
        "encoder.blocks.0.attention": [2],
        "encoder.blocks.1.attention": [5],
    }
    assert choose_heads(model, importance, 2) == few
    with pytest.raises(ValueError, match=r"keep: expected a share in .* or a number of heads from 1 to 12, got 1\.5"):
        choose_heads(model, importance, 1.5)
    importance["encoder.blocks.1.attention"] = torch.rand(4)
    with pytest.raises(ValueError, match=r"blocks.1.attention has 6 heads, got numbers of shape \(4,\)"):
        choose_heads(model, importance, 0.5)
    importance["encoder.blocks.1.attention"] = torch.tensor([1.0, math.nan, 1.0, 1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="expected finite numbers for layer encoder.blocks.1.attention, got"):
        choose_heads(model, importance, 0.5)


@pytest.mark.slow
def test_after_greedy_removal_the_heads_go_that_it_took():
    """Its rises are of different rounds: by their size other heads would go."""
    model = Loss()
    batch = {"x": torch.randn(1, 5, 24).double(), "wanted": torch.randn(1, 5, 24).double()}
    found = head_importance(model, [batch], by="greedy", keep=5)
    taken = {}
    for step in found.removed:
        taken.setdefault(step.head.call, []).append(step.head.head)
    assert len(taken) == 2 and max(map(len, taken.values())) < 6  # no layer would lose all
    assert choose_heads(model, found, 5) == {call: sorted(heads) for call, heads in taken.items()}


def test_a_loss_is_judged_without_dropout():
    model = models.load().train()
    windows = text_windows(model, TEXT, most=70)
    for block in model.model.decoder.blocks:
        block.register_forward_hook(lambda module, given, out: torch.nn.functional.dropout(out, 0.5, module.training))
    assert mean_loss(model, windows) == mean_loss(model, windows)
    assert model.training


def test_heads_and_a_share_are_not_given_together_and_one_window_cannot_rank_and_judge():
    model = models.load()
    with pytest.raises(ValueError, match="keep: selects heads to remove, but heads are given too; give heads or keep"):
        compare_pruned(model, "0.1", keep=0.25)
    with pytest.raises(ValueError, match=r"data: the text has \d+ tokens, which is one window; ranking and measuring"):
        compare_pruned(model, None, keep=0.5, text="The cat sat on the mat.")


def test_of_grouped_queries_what_stays_can_be_pruned():
    torch.manual_seed(2)
    for keep in (0.75, 0.5, 0.3):
        model = Loss(kv_heads=3)
        importance = {f"encoder.blocks.{layer}.attention": torch.rand(6) for layer in range(2)}
        chosen = choose_heads(model, importance, keep)
        prune(model, chosen)
        left = [block.attention.config.heads for block in model.encoder.blocks]
        assert max(2, round(12 * keep)) <= sum(left) <= max(2, round(12 * keep)) + 2  # a group has two heads


def test_what_counts_as_arithmetic_is_what_a_profiler_counts():
    from torch.utils.flop_counter import FlopCounterMode

    module = MultiHeadAttention(AttentionConfig(29, 6, head_width=4, value_head_width=5, kv_heads=3, gate=True))
    [layer] = attention_layers(module)
    with FlopCounterMode(display=False) as counted:
        x = torch.randn(1, 7, 29)
        q, k, v = (
            part.transpose(1, 2) for part in (torch.randn(1, 7, 6, 4), torch.randn(1, 7, 6, 4), torch.randn(1, 7, 6, 5))
        )
        for part in layer.parts:
            torch.nn.functional.linear(x if part.in_features == 29 else torch.randn(1, 7, 30), part.weight)
        (q @ k.mT).softmax(-1) @ v
    assert attention_flops([layer], 7, causal=False) == counted.get_total_flops()


def test_both_models_run_in_turn_and_their_medians_stand():
    """By a clock that the models move: rounds that are not in turn, a first round that counts, a mean or a shorter
    batch would give other numbers."""
    now, order = [0.0], []

    def model(name, seconds):
        left = iter(seconds)

        def forward(ids):
            order.append((name, ids.shape[1]))
            now[0] += next(left)

        return forward

    batches = [{"input_ids": torch.zeros(1, length, dtype=torch.long)} for length in (5, 7, 3)]
    whole, pruned = model("whole", [90, 2, 2, 2, 3, 5, 7, 80]), model("pruned", [70, 1, 1, 1, 2, 3, 5, 60])
    found = forward_times(whole, pruned, batches, clock=lambda: now[0])
    assert found == (7, 3.0, 2.0, 7)
    assert order == [("whole", 7), ("pruned", 7)] * 8


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.slow
def test_the_command_tells_what_the_model_then_is(text_file, tmp_path, capsys):
    out = tmp_path / "smaller"
    assert (
        main(["prune", "embedded", "--heads", "0.1,3.6,3.7", "--data", str(text_file), "--out", str(out), "--json"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    whole, pruned = models.load(), models.load(out)
    assert told["parameters"] == [sum(p.numel() for p in one.parameters()) for one in (whole, pruned)]
    assert [layer["heads"][1] for layer in told["layers"]] == [7, 8, 8, 6]
    assert [layer["removed"] for layer in told["layers"]] == [[1], [], [], [6, 7]]
    ids = torch.tensor([[whole.tokenizer.start, *whole.tokenizer.encode(TEXT.strip()).ids]])
    assert ids.shape[1] <= 256
    for block, heads in ((0, [1]), (3, [6, 7])):
        masked(whole.model.decoder.blocks[block].attention.output, heads, 32)
    with torch.no_grad():
        expected = [float(one(ids, labels=ids).loss) for one in (models.load(), whole)]
    assert [told["loss"]["before"], told["loss"]["after"]] == pytest.approx(expected, rel=1e-5)
    assert told["forward"]["tokens"] == ids.shape[1] and min(told["forward"]["before"], told["forward"]["after"]) > 0
    assert main(["prune", str(out), "--heads", "0.0", "--out", str(out)]) == 2
    assert "is not empty; --force writes into it" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_keeps_a_share_and_shows_a_table(capsys):
    assert main(["prune", "embedded", "--keep", ".5", "--data", LONG]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()[1:5]]
    assert sum(int(row[2]) for row in rows) == 16
    assert all(int(row[1]) - int(row[2]) == len([head for head in row[3:] if head != "-"]) for row in rows)
    moved = re.search(r"renumbered from 0: (\d)\.(\d) is now (\d)\.(\d)\.", shown)
    layer, old, same, new = map(int, moved.groups())
    gone = [int(head) for head in rows[layer][3:]]
    assert layer == same and old not in gone and new == old - sum(head < old for head in gone) < old
    assert "Attention, 256 tokens" in shown and "50.0%" in shown and "Loss (perplexity)" in shown
    before, after, share = re.search(
        r"Forward, \d+ tokens  (\S+ \w+) -> (\S+ \w+)  (\S+)x, medians of 7", shown
    ).groups()
    sizes = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    before, after = (float(time.split()[0]) * sizes[time.split()[1]] for time in (before, after))
    assert float(share) == pytest.approx(after / before, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--heads", "0.9"], "layer 0 has the heads 0 to 7, got 9"),
        ([], "give the heads, --heads 4.1,5.3, or the share to keep, --keep .5 --data FILE"),
        (["--heads", "0.1", "--keep", ".5"], "give the heads, --heads 4.1,5.3, or the share"),
        (["--keep", ".5"], "--keep ranks the heads by a text: give one with --data FILE"),
        (["--keep", "1", "--data", LONG], "keep: at 1.0 every head stays"),
        (["--keep", "0", "--data", LONG], "keep: expected a share in (0, 1]"),
        (["--heads", "0.1", "--data", "a"], "the text has 1 tokens, expected at least two"),
    ],
)
def test_what_a_user_may_get_wrong_is_one_line(arguments, told, capsys):
    assert main(["prune", "embedded", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_model_without_a_loss_is_told_the_two_ways_that_are_left(tmp_path, capsys):
    sizes = dict(vocab_size=97, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, intermediate_size=29)
    written(tmp_path, "BertModel", transformers().BertConfig(**sizes))
    written_words(tmp_path, [TEXT])
    assert main(["prune", str(tmp_path), "--keep", ".5", "--data", TEXT]) == 2
    error = capsys.readouterr().err
    assert (
        "name the heads with --heads, without --data, or rank them in Python with saccade.head_importance(..., "
        in error
    )
    assert main(["prune", str(tmp_path), "--heads", "0.1,0.3"]) == 0
    shown = capsys.readouterr().out
    assert "The remaining heads are renumbered from 0: 0.2 is now 0.1." in shown
    assert main(["prune", str(tmp_path), "--heads", "0.5"]) == 0
    assert "numbered anew" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_masked_language_model_is_judged_by_masked_words(tmp_path):
    sizes = dict(vocab_size=97, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, intermediate_size=29)
    written(tmp_path, "BertForMaskedLM", transformers().BertConfig(**sizes, max_position_embeddings=23))
    written_words(tmp_path, [TEXT])
    model = models.load(tmp_path)
    windows = text_windows(model, TEXT, most=70)
    mask = model.tokenizer.named["mask"]
    assert [window["input_ids"].shape[1] for window in windows] == [23, 23, 23, 9]
    for window in windows:
        asked = window["labels"] != -100
        assert (window["input_ids"][asked] == mask).all() and asked.sum() == max(1, round(0.15 * (asked.numel() - 2)))
    with torch.no_grad():
        expected = sum(float(model(**one).loss) * int((one["labels"] != -100).sum()) for one in windows)
    assert mean_loss(model, windows) == pytest.approx(
        expected / sum(int((one["labels"] != -100).sum()) for one in windows)
    )
    ranked = head_importance(model, windows).values.by_call()
    assert set(ranked) == {"encoder.blocks.0.attention", "encoder.blocks.1.attention"}
