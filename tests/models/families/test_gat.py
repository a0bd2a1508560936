"""GAT against its formulas over a dense matrix of edges, and against the operator with a dense bias."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import saccade
from saccade import models
from saccade.models.graphs.attention import GraphAttention
from saccade.models.graphs.heads import feature_dropout


def graph(nodes: int = 13, edges: int = 31, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features and directed edges with loops, an edge that is there twice, and a node without edges."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, 11, generator=generator, dtype=torch.float64)
    made = torch.randint(0, nodes - 1, (2, edges), generator=generator)
    made[:, 1] = made[:, 0]
    made[1, 2] = made[0, 2]
    return x, made


def dense(layer: GraphAttention, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """out (N, H, D) and logits (H, N, N) of the formulas, over all pairs."""
    nodes = len(x)
    counts = torch.zeros(nodes, nodes, dtype=x.dtype)  # [i, j]: edges from j to i
    for start, end in edges.t().tolist():
        counts[end, start] += 1
    outs, scores = [], []
    for head in range(layer.heads):
        rows = slice(head * layer.head_width, (head + 1) * layer.head_width)
        value = x @ layer.value.weight[rows].t()
        if layer.kind == "gat":
            own, other = value @ layer.score[head], value @ layer.score_neighbour[head]
            logits = F.leaky_relu(own[:, None] + other[None, :], layer.slope)
        else:
            own = x @ layer.query.weight[rows].t()
            logits = F.leaky_relu(own[:, None] + value[None], layer.slope) @ layer.score[head]
        raised = counts * logits.exp()
        outs.append(raised / raised.sum(1, keepdim=True).clamp(min=1e-300) @ value)
        scores.append(logits)
    return torch.stack(outs, 1), torch.stack(scores)


@pytest.mark.parametrize("kind", ["gat", "gatv2"])
@pytest.mark.parametrize("concat", [True, False])
def test_the_layer_is_its_formula(kind, concat):
    x, edges = graph()
    layer = GraphAttention(11, 3, 5, kind=kind, concat=concat).double()
    torch.nn.init.normal_(layer.bias)
    x.requires_grad_()
    got = layer(x, edges)
    out, _ = dense(layer, x, edges)
    expected = (out.flatten(1) if concat else out.mean(1)) + layer.bias
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)
    assert torch.equal(got[12], layer.bias)  # nothing leads there
    up = torch.randn_like(got)
    wanted = (x, *layer.parameters())
    for one, two in zip(*(torch.autograd.grad((y * up).sum(), wanted) for y in (got, expected)), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-11)
    assert torch.autograd.gradcheck(lambda x: layer(x, edges), x)


def test_weights_of_a_node_sum_to_one_and_large_logits_do_not_overflow():
    x, edges = graph()
    layer = GraphAttention(11, 3, 5).double()
    weights = layer.weights(x * 1e5, edges)
    total = torch.zeros(13, 3, dtype=torch.float64).index_add(0, edges[1], weights)
    assert torch.allclose(total[edges[1].unique()], torch.ones((), dtype=torch.float64))


def test_the_operator_gives_the_same_with_a_dense_bias():
    """Its queries and keys are zeros: additive logits are not dot products."""
    x, edges = graph()
    edges = edges.unique(dim=1)
    layer = GraphAttention(11, 3, 5).double()
    _, scores = dense(layer, x, edges)
    value = layer.value(x).unflatten(-1, (3, 5)).transpose(0, 1)[None]
    nothing = torch.zeros(1, 3, 13, 1, dtype=torch.float64)
    mask = saccade.Edges(edges[1], edges[0])
    out = saccade.attention(nothing, nothing, value, mask, bias=scores[None])
    assert torch.allclose(out[0].transpose(0, 1).flatten(1) + layer.bias, layer(x, edges), rtol=0, atol=1e-12)


SETTINGS = dict(num_features=11, hidden_size=21, num_attention_heads=3, num_hidden_layers=2, hidden_dropout_prob=0.3)


def model(head: str | None, **changes: object) -> models.Model:
    torch.manual_seed(0)
    made = models.new_graph_model("saccade-gat", head=head, labels=head and 4, **{**SETTINGS, **changes})
    return made.double().eval()


@pytest.mark.parametrize("head", ["node-classification", "graph-classification"])
def test_graphs_of_a_batch_equal_alone_and_any_order_of_nodes(head):
    gat = model(head, attention_type="gatv2", num_output_heads=2)
    graphs = [graph(nodes, edges, seed) for seed, (nodes, edges) in enumerate([(7, 9), (2, 3), (12, 30)])]
    graphs[1] = graphs[1][0], torch.zeros(2, 0, dtype=torch.int64)
    starts = [0, 7, 9]
    x = torch.cat([x for x, _ in graphs])
    edges = torch.cat([e + at for (_, e), at in zip(graphs, starts, strict=True)], 1)
    batch = torch.tensor([0] * 7 + [1] * 2 + [2] * 12)
    together = gat(x, edges, batch).logits
    alone = torch.cat([gat(*one).logits for one in graphs])
    assert torch.allclose(together, alone, rtol=0, atol=1e-12)
    order = torch.randperm(7)
    place = order.argsort()
    swapped = gat(graphs[0][0][order], place[graphs[0][1]]).logits
    first = gat(*graphs[0]).logits
    assert torch.allclose(swapped, first[order] if head == "node-classification" else first, rtol=0, atol=1e-12)


def test_loops_are_added_once():
    x, edges = graph()
    nodes = torch.arange(13)
    missing = nodes[~torch.isin(nodes, edges[0, edges[0] == edges[1]])]
    looped = torch.cat((edges, missing.expand(2, -1)), 1)
    torch.manual_seed(0)
    plain, own = model(None, self_loops=False), model(None)
    assert torch.equal(plain(x, looped).last_hidden_state, own(x, edges).last_hidden_state)
    assert len(own(x, edges, hidden_states=True).hidden_states) == 3


def test_dropout_is_for_training_and_a_round_trip_gives_equal_bits(tmp_path):
    x, edges = graph()
    gat = model("node-classification", attention_probs_dropout_prob=0.5)
    gat.save(tmp_path)
    opened = models.load(tmp_path)
    assert torch.equal(opened(x, edges).logits, gat(x, edges).logits)
    assert opened.state_dict().keys() == gat.state_dict().keys()
    other = models.load(tmp_path, head="graph-classification", labels=2)
    assert set(other.report.initialised) == {"head.out.weight", "head.out.bias"}
    gat.train()
    assert not torch.equal(gat(x, edges).logits, gat(x, edges).logits)


@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_autocast_computes_it_to_the_precision_of_bf16(kind):
    x, edges = graph()
    gat = model("node-classification", attention_type=kind).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = gat(x.float(), edges).logits
    found.float().sum().backward()
    assert gat.layers[0].value.weight.grad.isfinite().all()
    assert torch.allclose(found.float(), gat(x.float(), edges).logits, atol=0.05)


def test_dropout_of_given_features_leaves_out_zeros():
    """What is kept is scaled and drawn anew each time; where x has a gradient, zeros are drawn for, too."""
    x = torch.zeros(997, 23)
    x[::11] = 1
    dropout = torch.nn.Dropout(0.3)
    found = feature_dropout(x, dropout)
    assert torch.equal(found.unique(), torch.tensor([0, 1 / 0.7])) and not found[x == 0].any()
    assert abs((found[::11] == 0).double().mean().item() - 0.3) < 4 * (0.21 / (91 * 23)) ** 0.5
    assert not torch.equal(found, feature_dropout(x, dropout))
    computed = torch.zeros(997, 23, requires_grad=True)
    feature_dropout(computed, dropout).sum().backward()
    assert torch.equal(computed.grad.unique(), torch.tensor([0, 1 / 0.7]))
    assert torch.equal(feature_dropout(x, dropout.eval()), x)


def test_bad_input():
    gat = model("node-classification")
    x, edges = graph()
    for call, told in [
        (lambda: gat(x, edges + 7), r"edge_index: nodes must be from 0 to 12, got 1\d"),
        (lambda: gat(x, edges - 1), r"edge_index: nodes must be from 0 to 12, got -1"),
        (lambda: gat(x, edges.t()), r"edge_index: expected shape \(2, edges\), got \(31, 2\)"),
        (lambda: gat(x, edges.float()), r"edge_index: expected a tensor of node numbers .*float32"),
        (lambda: gat(x[:, :5], edges), r"x: expected shape \(n, 11\), got \(13, 5\)"),
        (lambda: gat(x[:0], edges[:, :0]), r"x: a graph without nodes"),
        (lambda: gat(x * torch.nan, edges), r"x: contains NaN"),
        (lambda: gat(x.float(), edges), r"x: .*torch.float64, got torch.float32"),
        (lambda: gat(x, edges, torch.arange(13) // 6), r"edge_index: edge \d+ leads from graph"),
        (lambda: gat(x, edges[:, :0], torch.tensor([0] * 6 + [2] * 7)), r"batch: .*at least one node"),
        (lambda: gat(x, edges, torch.zeros(5).long()), r"batch: expected ints \(13,\), .*got \(5,\)"),
        (lambda: models.new_graph_model("gat"), r"kind: expected one of 'saccade-gat', 'saccade-graphormer'"),
        (lambda: model(None, hidden_size=22), r"hidden_size: expected a multiple of the 3 heads"),
        (lambda: model(None, hidden_act="gelu"), r"hidden_act: expected one of 'elu', 'relu'"),
    ]:
        with pytest.raises((ValueError, TypeError), match=told):
            call()


TASK = """
import sys
sys.modules["transformers"] = None
import torch
from saccade import models
model = models.load(sys.argv[1])
x, edges = torch.randn(13, 11).double(), torch.randint(0, 13, (2, 31))
assert model(x, edges, labels=torch.zeros(13).long()).loss > 0
"""


@pytest.mark.slow
def test_its_task_without_transformers(tmp_path):
    model("node-classification").save(tmp_path)
    subprocess.run([sys.executable, "-c", TASK, str(tmp_path)], check=True, capture_output=True, timeout=120)
