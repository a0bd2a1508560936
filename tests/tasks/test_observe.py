"""What models of inputs that are no text attend to: calls that can be shown, and names of their tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from saccade import tasks
from saccade.tasks._graphs import _observed
from saccade.tasks._graphs._observed import observed_graph
from tasks import pictures, sounds
from tasks.test_forecast import series, table
from tasks.test_graph import chain, small_model


def begun(task, data, folder):
    """A run whose model has learned nothing."""
    training = task.read(data)
    task = task.fitted(training)
    torch.manual_seed(3)
    return tasks.TrainedRun(folder, task, task.new_model(training))


def kept(seen):
    assert not seen.watched.unobserved
    return [seen.watched.kept[call.name] for call in seen.watched.calls]


def test_patches_of_an_image_are_its_rows_and_columns(tmp_path):
    folder = pictures.write_classes(tmp_path / "images", 6, 1)
    run = begun(tasks.ClassifyImages(width=24, layers=2, heads=2, patch=3), folder, tmp_path)
    path = folder / "flat" / "000.png"
    seen = tasks.observe(run, str(path))
    assert seen.words[:4] == ["[class]", "1,1", "1,2", "1,3"] and seen.words[-1] == "4,3"  # 13 x 11 pixels
    calls = []
    with torch.no_grad():
        values = run.model.eval()(**run.model.prepare(path), observe=lambda layer, call: calls.append(call))
    assert values.logits.shape == (1, 3) and len(calls) == 2
    for ours, theirs in zip(kept(seen), calls, strict=True):
        assert ours.query.shape[2] == len(seen.words)
        torch.testing.assert_close(ours.query, theirs.query)
        torch.testing.assert_close(ours.key, theirs.key)


def test_frames_of_a_sound_are_its_times(tmp_path):
    folder = sounds.write_classes(tmp_path / "sounds", 6, 1)
    run = begun(tasks.Speech(width=24, layers=1, heads=2), folder, tmp_path)
    seen = tasks.observe(run, next(folder.rglob("*.wav")))
    assert seen.words[:3] == ["0.00", "0.01", "0.02"]  # a frame of every 10 ms
    assert [call.query.shape[2] for call in kept(seen)] == [len(seen.words)]


def test_patches_of_a_series_are_counted_back_from_now(tmp_path):
    path = table(tmp_path / "series.csv", series(60))
    run = begun(tasks.Forecast(past=23, horizon=5, patch=4, stride=3, layers=1, width=16, heads=2), path, tmp_path)
    seen = tasks.observe(run, path)
    assert seen.words == ["-21 to -18", "-18 to -15", "-15 to -12", "-12 to -9", "-9 to -6", "-6 to -3", "-3 to 0"]
    (call,) = kept(seen)
    assert call.query.shape[0] == len(run.task.names) and call.query.shape[2] == len(seen.words)
    with pytest.raises(ValueError, match="forecast reads a file of series, .* got the text 'today'"):
        tasks.observe(run, "today")


@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_weights_of_edges_are_weights_of_pairs(kind):
    """Catches edges the wrong way round, and an edge that is there twice and counts once."""
    x, edges = chain(7)
    edges = torch.cat((edges, torch.tensor([[2], [5]]), edges[:, :2]), 1)
    model = small_model("saccade-gat", attention_type=kind, num_features=5, num_hidden_layers=1, num_output_heads=2)
    watched, words = observed_graph(model, (x, edges), [f"n{n}" for n in range(7)])
    assert words == [f"n{n}" for n in range(7)] and len(watched.calls) == 2
    name = watched.calls[-1].name
    found = watched.weights(name)[0]
    read = []
    with torch.no_grad():
        model.head.register_forward_pre_hook(lambda _, given: read.append(given))
        model.eval()(x, edges)
        weights = model.head.weights(*read[0])
    expected = np.zeros((2, 7, 7))
    for (source, end), some in zip(read[0][1].T.tolist(), weights.tolist(), strict=True):
        for head, weight in enumerate(some):
            expected[head, end, source] += weight
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_a_graph_transformer_has_a_virtual_node_first(monkeypatch):
    x, edges = chain(7)
    transformer = small_model("saccade-graphormer", node_features=5, num_hidden_layers=2, intermediate_size=7)
    watched, words = observed_graph(transformer, (x, edges), list("abcdefg"))
    assert words == ["[virtual]", *"abcdefg"]
    assert all(watched.kept[call.name].query.shape[2] == 8 for call in watched.calls)
    monkeypatch.setattr(_observed, "MOST", 6)
    with pytest.raises(ValueError, match="the graph has 7 nodes, and a matrix of all pairs is shown of 6 at most"):
        observed_graph(transformer, (x, edges), list("abcdefg"))


def test_texts_are_for_look_and_view(files, tmp_path):
    task = tasks.Classify(width=16, layers=1, heads=2, vocabulary=300)
    run = begun(task, files / "reviews.csv", tmp_path)
    with pytest.raises(ValueError, match="classify: reads text; see saccade.look and saccade.view"):
        tasks.observe(run, "a film")
