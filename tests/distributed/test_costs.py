"""The cost of layouts: bytes as they are exchanged and kept, times against arithmetic and a simulation of events, and
`saccade plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from shared_calls import Case, chosen_by, measured_twice, messages_of

from saccade import Causal, Documents, Prefix, Window, cli
from saccade.cli._parts._mask_expression import parsed_mask
from saccade.distributed import CallSizes
from saccade.distributed._blocks import block_size, survey
from saccade.distributed._costs import RankSpeed, cheapest, layouts_of
from saccade.distributed._prediction import predicted

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from distributed_simulation import Exact, simulated

sys.path.pop()  # its tasks.py would be found in place of the folder tests/tasks

LENGTH = 211


def packed(length):
    sizes = torch.randint(7, 500, (length // 7,), generator=torch.Generator().manual_seed(3))
    return Causal() & Documents(torch.repeat_interleave(torch.arange(len(sizes)), sizes)[:length])


@pytest.mark.parametrize(
    ("size", "mask", "layout", "dtype"),
    [
        (4, Causal(), "ring", torch.float64),
        (3, None, "ring", torch.float32),
        (3, packed(LENGTH), "gathered", torch.float64),
        (4, Prefix(20), "ulysses", torch.float32),
        (4, Window(50, 0), (2, 2), torch.float64),
    ],
)
def test_bytes_are_those_that_ranks_exchange_and_keep(ranks, size, mask, layout, dtype):
    """Heads do not divide evenly: 6 query heads and 3 of keys on 4 ranks."""
    for answer, said in ranks(size).run(messages_of, Case(LENGTH, mask, layout, dtype)):
        assert answer["received"] == said["received"]
        assert answer["kept"] == pytest.approx(said["kept"], abs=64)  # of a kernel's own numbers
        assert 0.75 * said["in flight"] <= answer["in flight"] <= said["in flight"]


def test_a_ring_of_full_attention_by_hand():
    """8 ranks of 128 rows, 2 heads of width 16: 64 KiB of keys and values in each step."""
    sizes, speed = CallSizes(heads=2, width=16), RankSpeed(1e9, 5e8, 1e8, 1e-3)
    table = survey(None, 1024)
    ring, gathered = predicted(table, sizes, speed, [("ring", (1, 8)), ("gathered", (1, 8))])
    step = 2 * (16 + 16) * 128 * 128 * 2 / 1e9
    message = 1e-3 + 128 * 2 * 32 * 4 / 1e8
    assert ring.received.forward.tolist() == [7 * 128 * 2 * 32 * 4] * 8
    assert message < step
    assert ring.forward == pytest.approx(8 * step + 3e-3)  # 3: the calls are compared by log2(8) messages
    # In the backward pass keys and gradients share the link, and the gradients of the last step come after it.
    assert 2 * message < 5 * step
    assert ring.seconds - ring.forward == pytest.approx(8 * 5 * step + message)
    assert gathered.forward == pytest.approx(3e-3 + 7 * message + 8 * step)
    slow = RankSpeed(1e12, 1e12, 1e8, 1e-3)
    ring = predicted(table, sizes, slow, [("ring", (1, 8))])[0]
    assert ring.forward == pytest.approx(3e-3 + 7 * message + step / 1e3)
    disturbed = predicted(table, sizes, RankSpeed(1e9, 5e8, 1e8, 1e-3, overlap=0.0), [("ring", (1, 8))])[0]
    assert disturbed.forward == pytest.approx(3e-3 + 8 * step + 7 * message)


def test_heads_that_do_not_divide_are_the_imbalance_of_ulysses():
    """5 heads on 4 ranks: one has two, and all wait for it."""
    costs = predicted(survey(None, 1024), CallSizes(heads=5), RankSpeed(1e9, 1e9, 1e9, 0.0), [("ulysses", (4, 1))])
    assert costs[0].imbalance == pytest.approx(2 / (5 / 4) - 1)
    pairs = 1024 * 1024
    assert costs[0].compute.forward.max() == pytest.approx(2 * 2 * 128 * pairs / 1e9)


@pytest.mark.parametrize("layout", ["ring", "gathered"])
@pytest.mark.parametrize("name", ["causal", "packed"])
@pytest.mark.parametrize("bandwidth", [1e7, 1e9])
def test_times_are_those_of_a_simulation_of_events(layout, name, bandwidth):
    """13 ranks, a sequence of 4,099 rows. The prediction does not know which tiles of 64 have visible pairs, which
    tells for short documents, nor in which order messages of several steps get a link, where links are the limit."""
    length, ranks = 4099, 13
    apart = 0.03 if name == "causal" and bandwidth == 1e9 else 0.15
    mask = Causal() if name == "causal" else packed(length)
    sizes, speed = CallSizes(heads=3, width=16), RankSpeed(2e9, 1e9, bandwidth, 1e-5)
    table = survey(mask, length)
    cost = predicted(table, sizes, speed, [(layout, (1, ranks))])[0]
    first = np.zeros(length, dtype=np.int64)
    if name == "packed":
        ids = mask.parts[1].query_ids.host
        first = np.searchsorted(ids, ids)
    exact = Exact.of(table, first, ranks)
    forward, backward = simulated(exact, layout, sizes, speed)
    assert cost.forward == pytest.approx(forward, rel=apart)
    assert cost.seconds == pytest.approx(forward + backward, rel=apart)


def test_a_plan_takes_the_cheapest_layout_and_says_why(ranks):
    """Fast messages hide in the ring's steps; slow to begin, one exchange beats three; without heads no ulysses."""
    fast, late = RankSpeed(1e9, 1e9, 1e9, 1e-6), RankSpeed(1e12, 1e12, 1e9, 1e-2)
    heads = CallSizes(heads=8)
    answers = [ranks(4).run(chosen_by, speed, sizes) for speed, sizes in [(fast, None), (late, None), (late, heads)]]
    assert all(len(set(answer)) == 1 for answer in answers)
    (ring, ring_text), (gathered, gathered_text), (grid, _) = (answer[0] for answer in answers)
    assert (ring, gathered) == ("ring", "gathered") and grid in ("ulysses", "grid", "gathered")
    assert ring_text.startswith("layout ring: predicted ") and "gathered" in ring_text
    assert "(measured: 1.00 GFLOP/s, 1.00 GB/s, 1.00 us a message, " in ring_text
    assert gathered_text.startswith("layout gathered: predicted ")


def test_the_speed_of_a_group_is_measured_once(ranks):
    """It is the same on all ranks, and draws no random numbers."""
    first, again, draws = zip(*ranks(2).run(measured_twice), strict=True)
    assert len(set(first)) == 1 and first == again and all(draws)


def test_least_memory_of_what_is_as_fast():
    """With free messages all layouts take as long, and gathered keys take memory; 9 heads on 8 ranks take longer."""
    table, speed = survey(None, 2**14), RankSpeed(1e12, 1e12, 1e18, 0.0)
    costs = predicted(table, CallSizes(heads=9), speed, layouts_of(8, CallSizes(heads=9)))
    ring, gathered, ulysses = costs[0], costs[1], costs[-1]
    assert ring.seconds == pytest.approx(gathered.seconds) and ulysses.seconds > 1.5 * ring.seconds
    assert cheapest([gathered, ulysses, ring]) is ring and ulysses.memory.max() < ring.memory.max()


def test_blocks_are_small_enough_for_a_thousand_ranks():
    assert block_size(2**20) == block_size(2**20, 256) == 512 and block_size(2**20, 1024) == 128


# --- the command ----------------------------------------------------------------------------------------------------


def planned(capsys, *arguments):
    assert cli.main(["plan", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_says_what_the_model_predicts(capsys):
    given = "--length 4k --ranks 4 --mask window(100)&causal --heads 6 --kv-heads 3 --width 16 --dtype float32"
    found = planned(capsys, *given.split(), "--rate", "1TFLOP/s", "--link", "2GB/s", "--latency", "3us")
    sizes, speed = CallSizes(6, 3, 16), RankSpeed(1e12, 1e12, 2e9, 3e-6, 2e12)
    costs = predicted(survey(Window(99, 0) & Causal(), 4096), sizes, speed, layouts_of(4, sizes))
    assert [layout["with_backward"] for layout in found["layouts"]] == [cost.seconds for cost in costs]
    assert found["cheapest"] == cheapest(costs).name


def test_the_table_names_each_layout_and_the_reason(capsys):
    assert cli.main(["plan", "--length", "8k", "--ranks", "4", "--mask", "causal | prefix(70)"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split("  ")[0] for line in lines[1:-2]} == {"ring", "gathered", "grid 2 x 2", "ulysses"}
    assert " predicted " in lines[-1] and lines[1].split("  ")[0] in lines[-1]


def test_documents_of_a_file_are_packed_until_the_sequence_is_full(capsys, tmp_path):
    """70, 30, 70 and the first 20 of 30 tokens, in tiles of 64 or less: counted by hand."""
    (tmp_path / "lengths").write_text("70\n30\n")
    arguments = ("--length", "190", "--ranks", "1", "--heads", "1", "--width", "1", "--rate", "1FLOP/s")
    by_file = planned(capsys, *arguments, "--documents", str(tmp_path / "lengths"))
    by_list = planned(capsys, *arguments, "--mask", "causal & documents([70, 30])")
    pairs = 2 * 70 * 71 / 2 + 30 * 31 / 2 + 20 * 21 / 2
    assert by_file == by_list and by_file["layouts"][0]["compute_forward"]["most"] == 4 * pairs


def test_documents_beyond_the_sequence_take_no_memory():
    mask = parsed_mask("documents([30, 1000000000000])", 100)
    assert torch.equal(mask.dense(100, 100)[0, 0].sum(1), torch.tensor([30] * 30 + [70] * 70))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--length 1X", "--length: expected a whole number, such as 4096, 4k or 1M, got '1X'"),
        ("--length 8 --ranks 9", "--ranks: expected 1 to 8, a row for each, got 9"),
        ("--link 50", "--link: expected a number above 0 and B/s, such as 50GB/s, got '50'"),
        ("--rate 4.0.0GFLOP/s", "--rate: expected a number above 0 and FLOP/s, such as 400TFLOP/s, got '4.0.0GFLOP/s'"),
        ("--latency 0s", "--latency: expected a number above 0 and s, such as 10us, got '0s'"),
        ("--mask causal&windo(3)", "--mask: 'causal&windo(3)': windo is no mask; expected causal, chunks, "),
        ("--mask causal(", "--mask: 'causal(': it is no expression; expected causal, chunks, "),
        ("--mask window(1.5)", "--mask: 'window(1.5)': 1.5 is no whole number; expected "),
        ("--mask window()", "--mask: 'window()': window: "),
        ("--mask documents(0)", "--mask: 'documents(0)': documents: expected 1 to 131072 documents, or "),
        ("--mask __import__('os')", "is no whole number; expected "),
        ("--heads 3 --kv-heads 2", "--kv-heads: must divide heads, got 2 and 3"),
        ("--dtype int8", "--dtype: must be one of float32, bfloat16, float16, float64; got 'int8'"),
        ("--documents README", "--documents README: no such file"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, tmp_path, monkeypatch, arguments, error):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", *arguments.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("saccade: error: ") and shown.err.count("\n") == 1
    assert error in shown.err
