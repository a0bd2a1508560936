"""Classes of nodes: what is read, by which loss it is learned, what a node attends to, and what is wrong with input."""

from __future__ import annotations

import csv
import json
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from saccade import cli, tasks
from saccade.models import load, new_graph_model
from saccade.tasks import _examples
from saccade.tasks._graphs._baselines import GCN, propagation
from saccade.tasks._graphs._data import Graph, Nodes
from saccade.tasks._graphs._files import read_graph
from saccade.tasks._graphs._objective import GraphObjective
from saccade.tasks._graphs._picture import MOST, VIRTUAL, attended_by, chosen_nodes, neighbourhoods
from saccade.training import Settings
from tasks.test_kills import result
from training.test_killing import environment, server

__all__ = ["server"]  # a fixture
MARKED, PLAIN = 13, 89
# Two hundred steps of a GAT of some hundred weights.
SMALL = {
    "heads": 2, "width": 10, "dropout": 0.0, "attention_dropout": 0.0, "rate": 0.03, "steps": 80, "precision": "no"
}  # fmt: skip


def communities(seed: int = 3) -> dict[str, np.ndarray]:
    """Nodes of two communities, which nothing about themselves tells: only some of their neighbours are marked.

    13 marked nodes without a label, of which two features say the community; 89 nodes whose features are noise, each
    with three edges to marked nodes of its community and one to any node that is not marked.
    """
    draw = np.random.default_rng(seed)
    community = np.arange(MARKED + PLAIN) % 2
    features = draw.integers(0, 2, (MARKED + PLAIN, 5)).astype(np.float32)
    features[:, :2] = 0
    features[np.arange(MARKED), community[:MARKED]] = 1
    edges = []
    for node in range(MARKED, MARKED + PLAIN):
        near = [other for other in range(MARKED) if community[other] == community[node]]
        edges += [(node, other) for other in draw.choice(near, 3, replace=False)]
        edges.append((node, draw.integers(MARKED, MARKED + PLAIN)))
    order = draw.permutation(PLAIN) + MARKED
    labels = np.where(np.arange(MARKED + PLAIN) < MARKED, "", np.array(["left", "right"])[community])
    parts = {"train": order[:41], "validation": order[41:58], "test": order[58:]}
    return {"features": features, "edges": np.array(edges), "labels": labels, **parts}


ALL_TESTED = {"train": None, "validation": None, "test": np.arange(MARKED, MARKED + PLAIN)}


def write_npz(path, arrays, **changes):
    kept = {name: value for name, value in {**arrays, **changes}.items() if value is not None}
    np.savez(path, **kept)
    return path


def write_folder(path, nodes, edges):
    path.mkdir()
    for name, rows in (("nodes.csv", nodes), ("edges.csv", edges)):
        with (path / name).open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_npz(tmp_path_factory.mktemp("graph") / "graph.npz", communities())


@pytest.fixture(scope="session")
def learned(data):
    """A run that has learned the communities; trained once, and never written to."""
    return tasks.train("graph", data, data.parent / "learned", **SMALL)


@pytest.mark.slow
def test_learns_from_neighbours_what_no_node_tells_of_itself(learned, data):
    report = tasks.test(learned, data)
    assert len(report.tested.data) == 31
    assert report.metrics["accuracy"] == report.metrics["macro F1"] == 1.0
    plain, spread = report.baselines.values()
    assert abs(plain["accuracy"] - 0.5) < 4 * 0.5 / 31**0.5
    assert spread["accuracy"] > 0.9
    names = [f"{number}" for number in communities()["test"][:3]]
    truth = communities()["labels"][communities()["test"][:3]].tolist()
    assert [one["label"] for one in tasks.predict(learned.folder, names)] == truth


def test_a_graph_of_test_nodes_alone(learned, data):
    """There is nothing to learn from in it, and a test does not want to."""
    asked = write_npz(data.parent / "asked.npz", communities(), **ALL_TESTED)
    report = tasks.test(learned, asked)
    assert len(report.tested.data) == PLAIN and report.metrics["accuracy"] > 0.9 and len(report.baselines) == 2


@pytest.mark.slow
def test_the_gcn_has_the_seed_of_the_run(learned, data, tmp_path):
    other = shutil.copytree(learned.folder, tmp_path / "other")
    told = json.loads((other / "task.json").read_text())
    (other / "task.json").write_text(json.dumps({**told, "seed": 1}))
    (plain, one), (same, two), (_, again) = (tasks.test(run, data).tested.baselines for run in (learned, other, other))
    np.testing.assert_array_equal(plain.outputs, same.outputs)
    np.testing.assert_array_equal(two.outputs, again.outputs)
    assert np.abs(np.subtract(one.outputs, two.outputs)).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gatv2", "graphormer"])
def test_other_kinds_of_models_learn_it_too(data, tmp_path, kind):
    run = tasks.train("graph", data, tmp_path / "run", **{**SMALL, "kind": kind, "rate": 0.01})
    assert tasks.test(run, data, baseline=False).metrics["accuracy"] == 1.0
    assert load(run.folder).label_names == ["left", "right"]


@pytest.mark.slow
def test_does_not_learn_what_cannot_be_learned(data, tmp_path):
    arrays = communities()
    learning = np.concatenate((arrays["train"], arrays["validation"]))
    labels = arrays["labels"].copy()
    labels[learning] = np.random.default_rng(7).permutation(labels[learning])
    run = tasks.train(
        "graph", write_npz(tmp_path / "shuffled.npz", {**arrays, "labels": labels}), tmp_path / "run", **SMALL
    )
    accuracy = tasks.test(run, data, baseline=False).metrics["accuracy"]
    assert abs(accuracy - 0.5) < 4 * 0.5 / 31**0.5


@pytest.mark.slow
def test_labels_of_test_nodes_change_nothing(learned, tmp_path):
    """Their features and edges are trained with; what they are must not reach the model, nor which weights are kept."""
    arrays = communities()
    labels = arrays["labels"].copy()
    labels[arrays["test"]] = np.where(labels[arrays["test"]] == "left", "right", "left")
    run = tasks.train(
        "graph", write_npz(tmp_path / "other.npz", {**arrays, "labels": labels}), tmp_path / "run", **SMALL
    )
    name = "model.safetensors"
    assert (run.folder / name).read_bytes() == (learned.folder / name).read_bytes()


# --- data -------------------------------------------------------------------------------------------------------------


def test_all_forms_of_a_file_give_one_graph(tmp_path):
    arrays = communities()
    nodes = len(arrays["labels"])
    expected = read_graph(write_npz(tmp_path / "dense.npz", arrays))
    codes = {"left": 3, "right": 5, "": -1}
    masks = {f"{part}_mask": np.isin(np.arange(nodes), arrays[part]) for part in ("train", "test")}
    masks["val_mask"] = np.isin(np.arange(nodes), arrays["validation"])
    counts = (arrays["features"] != 0).sum(1)
    sparse = {
        "feature_indptr": np.concatenate(([0], counts.cumsum())),
        "feature_indices": np.nonzero(arrays["features"])[1],
        "features": np.int64(5),
        "edges": arrays["edges"].T,
        "labels": np.array([codes[label] for label in arrays["labels"]]),
    }
    rows = [("id", "a", "label", "b", "c", "split", "d", "e")]
    part_of = {number: part for part in ("train", "validation", "test") for number in arrays[part]}
    for n, (a, *others) in enumerate(arrays["features"].tolist()):
        rows.append((n, a, arrays["labels"][n], *others[:2], part_of.get(n, ""), *others[2:]))
    folder = write_folder(tmp_path / "folder", rows, [("target", "source"), *arrays["edges"].tolist()])
    found = [read_graph(folder), read_graph(write_npz(tmp_path / "sparse.npz", {**sparse, **masks}))]
    for graph in found:
        np.testing.assert_array_equal(graph.features, expected.features)
        np.testing.assert_array_equal(graph.edges, expected.edges)
        assert {part: numbers.tolist() for part, numbers in graph.parts.items()} == {
            part: sorted(arrays[part].tolist()) for part in ("train", "validation", "test")
        }
        assert graph.ids == expected.ids
    assert found[0].labels == expected.labels
    assert found[1].labels == tuple(str(codes[label]) if label else None for label in arrays["labels"])


def test_what_says_more_of_edges_is_not_passed_over_in_silence(tmp_path):
    arrays = communities()
    path = write_npz(tmp_path / "graph.npz", {**arrays, "edge_attr": np.ones(len(arrays["edges"]))})
    with pytest.warns(UserWarning, match="graph.npz: array 'edge_attr' not read; edges have no weights, kinds or"):
        read_graph(path)
    folder = write_folder(tmp_path / "folder", NODES, [(*row, n) for n, row in enumerate(PAIRS)])
    lines = (folder / "edges.csv").read_text().splitlines()
    (folder / "edges.csv").write_text("\n".join([lines[0].replace(",0", ",weight"), *lines[1:]]) + "\n")
    with pytest.warns(UserWarning, match="edges.csv: column 'weight' not read; edges have no weights"):
        read_graph(folder)


def test_a_compressed_graph_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(_examples, "_PART", 2**16)
    path = tmp_path / "graph.npz"
    np.savez_compressed(path, **{**communities(), "features": np.zeros((102, 5003), np.float32)})
    with pytest.raises(ValueError, match="graph.npz: unpacks to more than 200 times its size"):
        read_graph(path)
    write_npz(path, {**communities(), "feature_indptr": [0, 0], "feature_indices": [], "features": np.int64(2**60)})
    with pytest.raises(ValueError, match=r"graph.npz: features: 1 x 1,\d+,\d+.* are more than fit into memory"):
        read_graph(path)


@pytest.mark.parametrize(
    ("made", "scale"),
    [
        (lambda draw: draw.poisson(0.1, (102, 23)), "rows"),
        (lambda draw: draw.poisson(0.1, (102, 23)) * draw.random(23), "rows"),  # as of TF-IDF
        (lambda draw: draw.poisson(0.1, (102, 23)) - draw.poisson(0.1, (102, 23)), "columns"),
        (lambda draw: draw.random((102, 23)), "columns"),
        (lambda draw: np.c_[draw.random(102), draw.poisson(0.1, (102, 22))], "columns"),  # a measure beside marks
        (lambda draw: draw.poisson(0.1, (102, 5)), "columns"),
    ],
)
def test_counts_of_words_are_scaled_by_rows(tmp_path, made, scale):
    path = write_npz(tmp_path / "graph.npz", communities(), features=made(np.random.default_rng(3)))
    task = tasks.ClassifyNodes()
    assert task.fitted(task.read(path)).scale == scale


def test_edges_go_both_ways_and_are_there_once(tmp_path):
    arrays = {
        "features": np.eye(4),
        "labels": np.arange(4),
        "edges": np.array([(0, 1), (1, 0), (2, 2), (2, 3), (2, 3)]),
    }
    path = write_npz(tmp_path / "graph.npz", arrays)
    assert read_graph(path).edges.T.tolist() == [[0, 1], [1, 0], [2, 2], [2, 3], [3, 2]]
    assert read_graph(path, directed=True).edges.T.tolist() == [[0, 1], [1, 0], [2, 2], [2, 3]]


@pytest.mark.parametrize("scale", ["columns", "rows", "none"])
def test_scales_of_features(tmp_path, scale):
    arrays = communities()
    x = arrays["features"] * [1, 3, -2, 7, 0] + [0, 0, 0, 0, 11]  # the last is the same everywhere
    path = write_npz(tmp_path / "graph.npz", arrays, features=x)
    task = tasks.ClassifyNodes(scale=scale)
    nodes = task.read(path)
    found = task.fitted(nodes).tensors(nodes.graph)[0].numpy()
    if scale == "columns":
        np.testing.assert_allclose(found.mean(0), 0, atol=1e-6)
        np.testing.assert_allclose(found.std(0), [1, 1, 1, 1, 0], atol=1e-5)
    elif scale == "rows":
        np.testing.assert_allclose(found, x / np.abs(x).sum(1)[:, None], rtol=1e-6)
    else:
        np.testing.assert_array_equal(found, x.astype(np.float32))


def test_a_graph_without_a_split_is_split_by_the_seed(tmp_path):
    path = write_npz(tmp_path / "graph.npz", communities(), train=None, validation=None)
    task = tasks.ClassifyNodes()
    nodes = task.read(path)
    training, judged = task.split(nodes, 0.2, 5)
    assert sorted([*training.numbers, *judged.numbers]) == sorted(nodes.numbers) and len(nodes) == 58
    assert abs(len(judged) - 0.2 * 58) <= 1
    assert set(nodes.numbers).isdisjoint(communities()["test"]) and None not in nodes.labels
    assert not np.array_equal(judged.numbers, task.split(nodes, 0.2, 6)[1].numbers)


# --- learning ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def objective(learned, data):
    def make(batch=41, **options):
        task = tasks.ClassifyNodes(**options)
        nodes = task.read(data)
        training, judged = task.split(nodes, 0.1, 3)
        return GraphObjective(task.fitted(training), learned.model, training, judged, Settings(20, batch=batch, seed=3))

    return make


def test_parts_of_a_batch_add_up_to_the_whole(objective):
    made = objective(l2=0.01)
    batch = made.batch(0)
    parts = made.split(batch, 3)
    assert [len(part["nodes"]) for part in parts] == [14, 14, 13]
    shares = [made.weight(part) / made.weight(batch) for part in parts]
    joined = sum(share * made.loss(made.model, part) for share, part in zip(shares, parts, strict=True))
    torch.testing.assert_close(joined, made.loss(made.model, batch))


def test_the_penalty_is_half_of_l2_times_the_squares_of_matrices(objective):
    made, plain = objective(l2=0.02), objective(l2=0.0)
    squares = sum(p.detach().double().square().sum() for name, p in made.model.named_parameters() if "bias" not in name)
    extra = made.loss(made.model, made.batch(0)) - plain.loss(plain.model, plain.batch(0))
    assert extra.item() == pytest.approx(0.01 * squares.item(), rel=1e-4)
    assert made.evaluate(made.model).loss == plain.evaluate(plain.model).loss  # what is judged has no penalty


def test_an_epoch_has_each_node_once(objective):
    made = objective(batch=7)
    seen = torch.cat([made.batch(step)["nodes"] for step in range(5)])
    assert len(seen) == len(set(seen.tolist())) == 35
    later, again = made.batch(7), objective(batch=7).batch(7)
    assert all(torch.equal(later[name], again[name]) for name in later)
    assert not torch.equal(made.batch(2)["nodes"], made.batch(7)["nodes"])


# --- baselines and picture --------------------------------------------------------------------------------------------


def test_propagation_is_the_published_formula_over_dense_matrices():
    edges = torch.randint(0, 11, (2, 23), generator=torch.Generator().manual_seed(1))
    edges[:, 3] = 5  # a loop, which counts once with the one that is added
    adjacency = torch.zeros(11, 11, dtype=torch.float64)
    adjacency[edges[0], edges[1]] = adjacency[edges[1], edges[0]] = 1
    adjacency.fill_diagonal_(1)
    inverse = torch.diag(adjacency.sum(1) ** -0.5)
    spread = inverse @ adjacency @ inverse
    torch.testing.assert_close(propagation(edges, 11).to_dense(), spread.float())
    model = GCN(7, 5, 3).double().eval()
    x = torch.randn(11, 7, dtype=torch.float64)
    expected = spread @ (spread @ x @ model.first.weight.T).relu() @ model.second.weight.T
    torch.testing.assert_close(model(x, propagation(edges, 11).double()), expected, rtol=1e-6, atol=1e-6)


def small_model(kind: str, **sizes):
    torch.manual_seed(2)
    made = new_graph_model(kind, head="node-classification", labels=3, num_attention_heads=2, hidden_size=6, **sizes)
    return made.eval()


def chain(nodes: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and the edges of a path, in both directions."""
    first = torch.arange(nodes - 1)
    edges = torch.stack((torch.cat((first, first + 1)), torch.cat((first + 1, first))))
    return torch.randn(nodes, 5, generator=torch.Generator().manual_seed(4)), edges


def test_weights_of_a_picture_are_those_of_a_dense_softmax():
    x, edges = chain()
    model = small_model("saccade-gat", num_features=5, num_hidden_layers=1, num_output_heads=2)
    last = model.head
    with torch.no_grad():
        read = model(x, edges, hidden_states=True).hidden_states[-1]
        value = (read @ last.value.weight.T).unflatten(-1, (2, 3))
        own, other = (value * last.score).sum(-1), (value * last.score_neighbour).sum(-1)
        seen = torch.eye(11, dtype=torch.bool)
        seen[edges[1], edges[0]] = True
        logits = F.leaky_relu(own[:, None] + other[None], last.slope).masked_fill(~seen[..., None], -torch.inf)
        weights = logits.softmax(1).mean(-1)
    for node, found in zip((0, 7), attended_by(model, (x, edges), [0, 7]), strict=True):
        assert set(found.nodes.tolist()) == set(seen[node].nonzero()[:, 0].tolist())
        np.testing.assert_allclose(found.weights, weights[node, found.nodes], atol=1e-6)
        assert (np.diff(found.weights) <= 0).all()


def test_weights_of_a_transformer_reach_as_many_hops_as_it_sees():
    x, edges = chain()
    model = small_model(
        "saccade-graphormer", node_features=5, num_hidden_layers=2, intermediate_size=7, attention_hops=2
    )
    (found,) = attended_by(model, (x, edges), [4])
    assert set(found.nodes.tolist()) == {VIRTUAL, 2, 3, 4, 5, 6}
    assert found.weights.sum() == pytest.approx(1, abs=1e-6)


def test_a_picture_has_wrong_nodes_first():
    outputs = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7], [0.51, 0.49], [0.1, 0.9], [0.99, 0.01]])
    truth = np.array([0, 0, 1, 1, 1, 0, 0])
    assert chosen_nodes(outputs, truth) == [5, 1, 2, 6, 0, 3]  # of four wrong ones the surest three
    assert chosen_nodes(outputs[:3], truth[:3]) == [1, 2, 0]


@pytest.mark.slow
def test_a_picture_of_every_size(learned, data):
    report = tasks.test(learned, data, baseline=False)
    picture = learned.task.picture(report.tested, "svg").decode()
    assert picture.count("itself") == 6 and "trained on" in picture
    star = Nodes(read_graph(data), np.array([0, 1]))
    assert len(learned.task.tensors(star.graph)[1][0, star.graph.edges[1] == 0]) > MOST  # a marked node has many edges
    drawn = neighbourhoods(
        learned.model, learned.task.tensors(star.graph), Nodes(star.graph, report.tested.data.numbers[:2]),
        np.asarray(report.tested.outputs[:2]), learned.task.labels, "png",
    )  # fmt: skip
    assert drawn.startswith(b"\x89PNG")


def test_nodes_of_unknown_labels_stand_in_the_legend():
    x, edges = chain()
    model = small_model("saccade-gat", num_features=5, num_hidden_layers=1, num_output_heads=2)
    for unknown in (None, "a"):
        labels = ("a", unknown, *["a"] * 9)
        graph = Graph(x.numpy(), edges.numpy(), tuple(map(str, range(11))), labels, {}, "chain")
        outputs = np.tile([0.7, 0.3], (2, 1))
        drawn = neighbourhoods(model, (x, edges), Nodes(graph, np.array([0, 7])), outputs, ["a", "b"], "svg")
        assert (b"label unknown" in drawn) == (unknown is None)


# --- input ------------------------------------------------------------------------------------------------------------

NODES = [("id", "x", "label", "split"), ("a", "1", "p", "train"), ("b", "2", "q", "train"), ("c", "3", "p", "test")]
PAIRS = [("source", "target"), ("a", "b")]
FOLDERS = [
    (NODES, [*PAIRS, ("b", "z")], r"edges.csv: line 3: target: there is no node 'z' in nodes.csv"),
    (NODES, [("source", "to"), ("a", "b")], r"edges.csv: no column 'target' .*; it has 'source', 'to'"),
    ([row[:2] for row in NODES], PAIRS, r"nodes.csv: no column 'label' in the first line, .*; it has 'id', 'x'"),
    ([(row[0], *row[2:]) for row in NODES], PAIRS, r"nodes.csv: no column of features; it has 'id', 'label', 'split'"),
    ([*NODES, ("a", "4", "", "")], PAIRS, r"nodes.csv: line 5: the id 'a' is there twice, first in .*csv: line 2"),
    ([*NODES, ("d", "red", "", "")], PAIRS, r"nodes.csv: line 5: x: expected a finite number, got 'red'"),
    ([*NODES, ("d", "nan", "", "")], PAIRS, r"nodes.csv: line 5: x: expected a finite number, got 'nan'"),
    ([*NODES, ("d", "4", "", "dev")], PAIRS, r"split: expected 'train', 'validation', 'test' or nothing, got 'dev'"),
    ([*NODES, ("d", "4", "", "test")], PAIRS, r"the node 'd' is to test and has no label"),
    (NODES[:2], PAIRS[:1], r"edges.csv: holds no examples"),
    ([NODES[0], NODES[1], NODES[3]], [PAIRS[0], ("a", "c")], r"label: expected two classes .*, every .* node is 'p'"),
    ([NODES[0], NODES[1], ("c", "3", "p ", "test")], [PAIRS[0], ("a", "c")], r"expected two classes .* node is 'p'"),
    ([("id", "x", "x", "label"), ("a", "1", "2", "p")], PAIRS, r"nodes.csv: the column 'x' is there twice$"),
    ([*NODES, ("d", "4", "r", "validation")], PAIRS, r"'d': no training node has the label 'r'; they have 'p', 'q'$"),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "edges", "message"), FOLDERS)
def test_folders_that_are_wrong(tmp_path, nodes, edges, message):
    folder = write_folder(tmp_path / "graph", nodes, edges)
    with pytest.raises(ValueError, match=message):
        tasks.train("graph", folder, tmp_path / "out", **SMALL)
    assert not (tmp_path / "out").exists()


ARRAYS = [
    ({"edges": None}, r"graph.npz: no array 'edges'; it has 'features', 'labels', 'train', 'validation', 'test'"),
    ({"edges": [(0, 1), (1, 102)]}, r"graph.npz: edges: row 1: there is no node 102, nodes are 0 to 101"),
    ({"edges": [(0, 1, 2)]}, r"edges: expected node numbers \(edges, 2\), got int64 \(1, 3\)"),
    ({"features": [["red"]]}, r"features: expected numbers, got <U3"),
    ({"features": None, "feature_indptr": [0, 2], "feature_indices": [1]}, r"are not a CSR matrix of 2 columns"),
    ({"labels": [1.5] * 102}, r"labels: expected words or integers \(nodes,\), got float64 \(102,\)"),
    ({"labels": ["a"]}, r"labels: expected one for each of the 102 nodes, got 1"),
    ({"ids": ["a"] * 102}, r"ids: row 1: the id 'a' is there twice, first in .*graph.npz: ids: row 0"),
    ({"test": [102]}, r"test: row 0: there is no node 102"),
    ({"test": [0.5]}, r"test: expected a mask of the 102 nodes or their numbers, got float64 \(1,\)"),
    ({"test": [True]}, r"test: expected a mask of the 102 nodes or their numbers, got bool \(1,\)"),
    ({"test": [0]}, r"the node '0' is to test and has no label"),
    (ALL_TESTED, r"graph.npz: label: expected two classes or more, there is no node to learn from"),
]


@pytest.mark.parametrize(("changes", "message"), ARRAYS)
def test_arrays_that_are_wrong(tmp_path, changes, message):
    changes = {name: None if value is None else np.array(value) for name, value in changes.items()}
    path = write_npz(tmp_path / "graph.npz", communities(), **changes)
    with pytest.raises(ValueError, match=message):
        tasks.train("graph", path, tmp_path / "out", **SMALL)


def test_other_input_that_is_wrong(learned, data, tmp_path):
    arrays = communities()
    both = write_npz(tmp_path / "both.npz", arrays, test=arrays["train"][:1])
    none = write_npz(tmp_path / "none.npz", arrays, test=None)
    new = arrays["labels"].astype("<U6")
    new[arrays["test"][0]] = "middle"
    new = write_npz(tmp_path / "new.npz", arrays, labels=new)
    wide = write_npz(tmp_path / "wide.npz", arrays, features=np.ones((102, 6)))
    known = write_npz(tmp_path / "known.npz", arrays, labels=np.array(["left"] * 102))
    asked = write_npz(tmp_path / "asked.npz", arrays, **ALL_TESTED)
    (tmp_path / "text.npz").write_text("no archive")
    middle = r"node '\d+': no training node has the label 'middle'; they have 'left', 'right'"
    cases = [
        (lambda: tasks.test(learned, both), rf"the node '{arrays['train'][0]}' is in train and in test"),
        (lambda: tasks.test(learned, none), r"none.npz: no node to test; expected 'test' in the column 'split'"),
        (lambda: tasks.test(learned, new), middle),
        (
            lambda: tasks.train("graph", data, tmp_path / "out", validation=asked, **SMALL),
            r"asked.npz: no example to validate on",
        ),
        (lambda: tasks.test(learned, wide), r"wide.npz: expected the 5 features of training, got 6"),
        (
            lambda: tasks.predict(learned, "102"),
            r"node '102': is not in .*graph.npz, which has 102: '0', '1', '2', ...",
        ),
        (lambda: tasks.predict(learned, known), r"known.npz: every node has a label; name those to predict"),
        (lambda: read_graph(tmp_path / "text.npz"), r"text.npz: not an .npz of plain arrays"),
        (lambda: read_graph(data.parent / "learned" / "config.json"), r"expected an .npz, or a folder with nodes.csv"),
        (lambda: tasks.ClassifyNodes(kind="cnn"), r"kind: expected one of 'gat', 'gatv2', 'graphormer', got 'cnn'"),
        (lambda: tasks.ClassifyNodes(layers=1), r"layers: GAT has two or more, the last of which names the classes"),
        (lambda: tasks.ClassifyNodes(heads=5), r"heads: must divide the width, got heads=5 and width=64"),
        (lambda: tasks.ClassifyNodes(dropout=1.0), r"dropout: must be in \[0, 1\), got 1.0"),
        (lambda: tasks.ClassifyNodes(l2=-1.0), r"l2: must be finite and not negative, got -1.0"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(FileNotFoundError, match=r"nodes.csv: no such file; expected nodes.csv and edges.csv"):
        read_graph(tmp_path)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_test_predict(data, tmp_path, capsys):
    out = tmp_path / "run"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert cli.main(["train", "graph", str(data), "--out", str(out), *options]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("graph: GAT of ") and told[1].startswith(
        "41 examples to train on, 17 to validate; 80 steps"
    )
    assert cli.main(["test", str(out), str(data), "--picture", str(tmp_path / "seen.png")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{out} on {data}: 31 examples"
    assert lines[2].split() == ["this", "model", "1.0000", "1.0000"]
    assert lines[3].startswith("logistic regression on features alone") and lines[4].startswith("GCN")
    assert cli.main(["predict", str(out), str(data)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["node"] for one in found] == [str(n) for n in range(MARKED)]
    (tmp_path / "names.txt").write_text("13\n14\n")
    assert cli.main(["predict", str(out), str(tmp_path / "names.txt")]) == 0
    assert [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()] == ["right", "left"]


@pytest.mark.slow
def test_a_run_starts_from_another(learned, data, tmp_path):
    run = tasks.train("graph", data, tmp_path / "run", initial=learned.folder, steps=1, rate=1e-6, precision="no")
    assert tasks.test(run, data, baseline=False).metrics["accuracy"] == 1.0
    wide = write_npz(tmp_path / "wide.npz", communities(), features=np.ones((102, 6)))
    with pytest.raises(ValueError, match="reads 5 features, and the graph has 6"):
        tasks.train("graph", wide, tmp_path / "other", initial=learned.folder, steps=1)


@pytest.mark.slow
def test_six_kills(server, data, tmp_path):
    """Catches anything of the graph, the batches or the choice of weights that is not in a checkpoint."""
    options = """--heads 2 --width 6 --batch 19 --accumulate 2 --precision bf16 --steps 17 --every 5
    --checkpoint-every 3 --no-tensorboard""".split()

    def command(out, *more):
        return ["train", "graph", str(data), "--out", str(out), *options, *more]

    alone = [sys.executable, "-m", "saccade", *command(tmp_path / "whole")]
    subprocess.run(alone, check=True, stdout=subprocess.DEVNULL, env=environment())
    expected = result(tmp_path / "whole")
    assert {"task.json", "config.json", "model.safetensors", "last.safetensors"} <= expected.keys()
    status, ticks = server(command(tmp_path / "again"))
    assert status == 0 and result(tmp_path / "again") == expected
    draws, kills, runs = random.Random(7), 0, 0
    while kills < 6:
        out, runs = tmp_path / f"killed-{runs}", runs + 1
        arguments = command(out)
        tick = draws.choice([number for number, kind in enumerate(ticks, 1) if kind == "ewt"[runs % 3]])
        while True:
            status, _ = server(arguments, tick if kills < 6 else None)
            tick = draws.randrange(1, len(ticks) + 1)
            if status != -signal.SIGKILL:
                break
            kills += 1
            arguments = command(out, *(["--resume"] if out.exists() else []))
        assert status == 0
        assert result(out) == expected
