"""Graphormer against its formulas, stated for one graph with dense matrices."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade import attention, attention_weights, models
from saccade.models.graphs.pair_bias import PairBias
from saccade.models.graphs.structure import check_graphs, shortest_paths
from saccade.operator._masks import Documents

SETTINGS = dict(
    node_types=17,
    edge_types=5,
    edge_width=4,
    hidden_size=21,
    num_attention_heads=3,
    num_hidden_layers=2,
    intermediate_size=23,
    max_degree=3,
    max_hops=4,
    path_length=2,
)


def model(head: str | None = "graph-classification", **changes: object) -> models.Model:
    torch.manual_seed(0)
    settings = {name: value for name, value in {**SETTINGS, **changes}.items() if value is not None}
    made = models.new_graph_model("saccade-graphormer", head=head, labels=head and 4, **settings).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def graph(nodes: int = 11, edges: int = 14, seed: int = 0) -> dict[str, Tensor]:
    """Kinds of nodes and directed edges: with a loop, an edge that is there twice, pairs without a path."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(0, nodes, (2, edges), generator=generator)
    made[:, 1] = made[:, 0]
    made[1, 2] = made[0, 2]
    return {
        "x": torch.randint(0, 17, (nodes,), generator=generator),
        "edge_index": made,
        "edge_attr": torch.randint(0, 5, (edges,), generator=generator),
    }


def tree(nodes: int, seed: int) -> dict[str, Tensor]:
    """An undirected tree, whose paths are unique."""
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(0, n, (), generator=generator)) for n in range(1, nodes)]
    down = torch.tensor([parents, list(range(1, nodes))], dtype=torch.int64).view(2, -1)
    return {
        "x": torch.randint(0, 17, (nodes,), generator=generator),
        "edge_index": torch.cat((down, down.flip(0)), 1),
        "edge_attr": torch.randint(0, 5, (2 * nodes - 2,), generator=generator),
    }


def batched(graphs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    sizes = [len(one["x"]) for one in graphs]
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return {
        "x": torch.cat([one["x"] for one in graphs]),
        "edge_index": torch.cat([one["edge_index"] + at for one, at in zip(graphs, starts, strict=True)], 1),
        "edge_attr": torch.cat([one["edge_attr"] for one in graphs]),
        "batch": torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
    }


def lengths(edge_index: Tensor, nodes: int) -> list[list[int | None]]:
    """Hops of all pairs by relaxing every edge until nothing changes."""
    far = 10**6
    table = [[0 if i == j else far for j in range(nodes)] for i in range(nodes)]
    for _ in range(nodes):
        for start, end in edge_index.t().tolist():
            for i in range(nodes):
                table[i][end] = min(table[i][end], table[i][start] + 1)
    return [[None if hops == far else hops for hops in row] for row in table]


def path(i: int, j: int, hops: list[list[int | None]], edge_index: Tensor) -> list[int]:
    """Edges of a shortest path, over nodes of least number from behind, the first of parallel edges."""
    edges: list[int] = []
    while i != j:
        ends = [
            (start, number)
            for number, (start, end) in enumerate(edge_index.t().tolist())
            if end == j and hops[i][start] == hops[i][j] - 1
        ]
        j, number = min(ends)
        edges.insert(0, number)
    return edges


def stated(model: models.Model, x: Tensor, edge_index: Tensor, edge_attr: Tensor, reach: int | None = None) -> Tensor:
    """Ying et al. (2021), sections 3.1 and 3.2: hidden states (1 + N, E), the virtual node first."""
    w = model.state_dict()
    nodes, hops = len(x), lengths(edge_index, len(x))
    into = torch.bincount(edge_index[1], minlength=nodes).clamp(max=3)
    out_of = torch.bincount(edge_index[0], minlength=nodes).clamp(max=3)
    h = w["nodes.weight"][x] + w["into.weight"][into] + w["out_of.weight"][out_of]
    h = torch.cat((w["virtual"], h))
    bias = w["virtual_bias"][0].expand(nodes + 1, nodes + 1, 3).clone()
    for i in range(nodes):
        for j in range(nodes):
            length = hops[i][j]
            bias[i + 1, j + 1] = w["hops"][5 if length is None else min(length, 4)]
            if reach is not None and (length is None or length > reach):
                bias[i + 1, j + 1] = -torch.inf
            if length:
                kept = path(i, j, hops, edge_index)[:2]
                steps = [w["edges.weight"][edge_attr[e]] @ w["steps"][n] for n, e in enumerate(kept)]
                bias[i + 1, j + 1] += sum(steps) / len(steps)
    for n in range(2):
        of = {name.removeprefix(f"encoder.blocks.{n}."): tensor for name, tensor in w.items()}

        def linear(x: Tensor, name: str, of: dict[str, Tensor] = of) -> Tensor:
            return x @ of[f"{name}.weight"].t() + of[f"{name}.bias"]

        normed = F.layer_norm(h, (21,), of["attention_norm.weight"], of["attention_norm.bias"])
        q, k, v = linear(normed, "attention.projection").view(-1, 3, 3, 7).unbind(1)
        logits = torch.einsum("ihd,jhd->ijh", q, k) / 7**0.5 + bias
        read = torch.einsum("ijh,jhd->ihd", logits.softmax(1), v)
        h = h + linear(read.flatten(1), "attention.output")
        normed = F.layer_norm(h, (21,), of["feed_forward_norm.weight"], of["feed_forward_norm.bias"])
        h = h + linear(F.gelu(linear(normed, "feed_forward.up")), "feed_forward.down")
    return F.layer_norm(h, (21,), w["encoder.norm.weight"], w["encoder.norm.bias"])


@pytest.mark.parametrize("reach", [None, 2])
def test_a_batch_is_the_formulas_of_each_graph(reach):
    graphormer = model(attention_hops=reach)
    graphs = [graph(), graph(1, 3, seed=1), tree(7, seed=2)]
    out = graphormer(**batched(graphs))
    start = 0
    for n, one in enumerate(graphs):
        expected = stated(graphormer, **one, reach=reach)
        nodes = len(one["x"])
        assert torch.allclose(out.pooler_output[n], expected[0], rtol=0, atol=1e-10)
        assert torch.allclose(out.last_hidden_state[start : start + nodes], expected[1:], rtol=0, atol=1e-10)
        assert torch.allclose(graphormer(**one).logits[0], out.logits[n], rtol=0, atol=1e-12)
        start += nodes


def test_gradients_are_those_of_the_formulas():
    """Every weight of the body, also of the biases, whose gradient goes through the pairs."""
    graphormer, one = model(None), graph()
    out = graphormer(**one)
    up = torch.randn(12, 21, dtype=torch.float64)
    got = torch.autograd.grad(
        (torch.cat((out.pooler_output, out.last_hidden_state)) * up).sum(), graphormer.parameters()
    )
    wanted = {name: tensor.detach().clone().requires_grad_() for name, tensor in graphormer.state_dict().items()}

    class Twin:
        def state_dict(self) -> dict[str, Tensor]:
            return wanted

    expected = torch.autograd.grad(
        (stated(Twin(), **one) * up).sum(), [wanted[n] for n, _ in graphormer.named_parameters()]
    )
    for (name, _), a, b in zip(graphormer.named_parameters(), expected, got, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10), name
        assert a.abs().max() > 0, name


def test_any_order_of_nodes_gives_the_same():
    graphormer, one = model("node-classification"), tree(13, seed=3)
    order = torch.randperm(13)
    swapped = {**one, "x": one["x"][order], "edge_index": order.argsort()[one["edge_index"]]}
    assert torch.allclose(graphormer(**swapped).logits, graphormer(**one).logits[order], rtol=0, atol=1e-12)


def test_paths_are_those_of_plain_search():
    one = graph(17, 40, seed=5)
    hops = lengths(one["edge_index"], 17)
    pairs = shortest_paths(check_graphs(17, one["edge_index"], None), kept=3)
    assert len(pairs.first) == 17 * 17
    for first, second, length, edges in zip(*(part.tolist() for part in pairs), strict=True):
        assert length == (-1 if hops[first][second] is None else hops[first][second])
        expected = path(first, second, hops, one["edge_index"])[:3] if length > 0 else []
        assert [e for e in edges if e >= 0] == expected
    near = shortest_paths(check_graphs(17, one["edge_index"], None), kept=0, most=2)
    assert sum(0 <= length <= 2 for length in pairs.hops.tolist()) == len(near.hops)


@pytest.mark.parametrize("length", [7, 300])  # one tile, several
def test_a_bias_of_pairs_is_a_dense_bias(length):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, length, 5, generator=generator, dtype=torch.float64)
    codes = torch.randperm(length * length, generator=generator)[: 4 * length].sort()[0]
    rows, keys = codes // length, codes % length
    scores = torch.randn(len(codes), 3, generator=generator, dtype=torch.float64).requires_grad_()
    whole = torch.zeros(3, length, length, dtype=torch.float64).index_put(
        (torch.arange(3)[:, None], rows, keys), scores.t()
    )
    mask = Documents([0] * 3 + [1] * (length - 3))
    bias = PairBias(scores, rows, keys)
    outs = [attention(q, k, v, mask, bias=given) for given in (bias, whole[None])]
    assert torch.allclose(*outs, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(out.square().sum(), scores, retain_graph=True)[0] for out in outs]
    assert torch.allclose(*grads, rtol=0, atol=1e-11)
    some = dict(rows=[length - 1, 2], heads=[2, 0])
    found = [attention_weights(q, k, mask, bias=given, **some) for given in (bias, whole[None])]
    assert torch.allclose(*found, rtol=0, atol=1e-12)


def test_a_large_graph_keeps_its_near_pairs_alone():
    graphormer, nodes = model(None, edge_types=None, attention_hops=2, num_hidden_layers=1), 500
    ring = torch.stack((torch.arange(nodes), (torch.arange(nodes) + 1) % nodes))
    calls = []
    graphormer(
        torch.zeros(nodes, dtype=torch.int64),
        torch.cat((ring, ring.flip(0)), 1),
        observe=lambda _, call: calls.append(call),
    )
    assert len(calls[0].bias.codes) == 5 * nodes + 2 * nodes + 1  # two each way and itself; with the virtual node


def test_features_in_the_place_of_kinds_and_a_round_trip(tmp_path):
    graphormer = model(node_types=None, node_features=6, edge_types=None, edge_features=2)
    x, edges = torch.randn(9, 6).double(), torch.randint(0, 9, (2, 20))
    out = graphormer(x, edges, torch.randn(20, 2).double(), hidden_states=True)
    assert [state.shape for state in out.hidden_states] == [(9, 21)] * 3
    bare = model(edge_types=None)
    bare.save(tmp_path)
    opened = models.load(tmp_path)
    one = graph()
    assert torch.equal(opened(one["x"], one["edge_index"]).logits, bare(one["x"], one["edge_index"]).logits)
    assert models.load(tmp_path, head="node-classification", labels=2).report.unused


@pytest.mark.slow
def test_training_learns_which_graphs_have_a_loop():
    torch.manual_seed(0)
    settings = {**SETTINGS, "edge_types": None, "edge_width": None, "attention_probs_dropout_prob": 0.0}
    graphormer = models.new_graph_model(
        "saccade-graphormer", head="graph-classification", labels=2, **{k: v for k, v in settings.items() if v}
    )
    graphs = [tree(6, seed) for seed in range(8)]
    for one in graphs[::2]:
        one["edge_index"] = torch.cat((one["edge_index"], torch.zeros(2, 1, dtype=torch.int64)), 1)
    inputs = batched(graphs)
    del inputs["edge_attr"]
    optimizer = torch.optim.Adam(graphormer.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = graphormer(**inputs, labels=torch.tensor([1, 0] * 4)).loss
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 < losses[0]


def test_bad_input():
    graphormer, one = model(), graph()
    for changes, told in [
        ({"x": one["x"] + 17}, r"x: kinds must be from 0 to 16, got \d\d"),
        ({"x": one["x"].float()}, r"x: expected a tensor of ints, got torch.float32"),
        (
            {"x": one["x"][:0], "edge_index": one["edge_index"][:, :0], "edge_attr": one["edge_attr"][:0]},
            r"x: a graph with",
        ),
        ({"edge_index": one["edge_index"] + 9}, r"edge_index: nodes must be from 0 to 10"),
        ({"edge_attr": one["edge_attr"][:3]}, r"edge_attr: expected shape \(14,\), got \(3,\)"),
        ({"edge_attr": None}, r"edge_attr: missing"),
        ({"batch": torch.arange(11) // 4}, r"edge_index: edge \d+ leads from graph \d to another"),
    ]:
        with pytest.raises((ValueError, TypeError), match=told):
            graphormer(**{**one, **changes})
    for changes, told in [
        ({"node_features": 3}, r"expected either node_types or node_features"),
        ({"attention_hops": 0}, r"attention_hops: expected an int from 1"),
    ]:
        with pytest.raises(ValueError, match=told):
            model(**changes)


TASK = """
import sys
sys.modules["transformers"] = None
import torch
from saccade import models
model = models.load(sys.argv[1])
x, edges = torch.randint(0, 17, (13,)), torch.randint(0, 13, (2, 31))
assert model(x, edges, torch.randint(0, 5, (31,)), labels=torch.tensor([1])).loss > 0
"""


@pytest.mark.slow
def test_its_task_without_transformers(tmp_path):
    model().save(tmp_path)
    subprocess.run([sys.executable, "-c", TASK, str(tmp_path)], check=True, capture_output=True, timeout=120)
