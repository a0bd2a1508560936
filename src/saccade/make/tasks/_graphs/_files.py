"""Graphs from files: an .npz of arrays, or a folder with nodes.csv and edges.csv.

Every error names the file, and the line or the row where there is one.

Shape legend: N nodes, M edges, F features.
"""

from __future__ import annotations

import csv
import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._examples import TooLarge, check_unpacked, read_table
from ._data import PARTS, Graph

NODES, EDGES = "nodes.csv", "edges.csv"
ID, LABEL, SPLIT = "id", "label", "split"  # columns of nodes.csv; all others are features
ENDS = ("source", "target")  # columns of edges.csv
MASKS = {  # arrays of an .npz, by part
    "train": ("train", "train_mask"),
    "validation": ("validation", "validation_mask", "val", "val_mask"),
    "test": ("test", "test_mask"),
}
_ARRAYS = {
    "features", "feature_indptr", "feature_indices", "feature_data", "edges", "ids", "labels",
    *(name for names in MASKS.values() for name in names),
}  # fmt: skip
_LISTED = 20  # names, of those that there are


def read_graph(path: Path, *, directed: bool = False, labelled: bool = True) -> Graph:
    """The graph of an .npz or of a folder.

    Args:
        directed: whether an edge leads only from its source to its target.
        labelled: whether there must be labels.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: no graph of this form; what is wrong with it, and where.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if path.is_dir():
        features, edges, ids, labels, parts = _of_folder(path, labelled)
    elif path.suffix.lower() == ".npz":
        features, edges, ids, labels, parts = _of_arrays(path, labelled)
    else:
        raise ValueError(f"{path}: expected an .npz, or a folder with {NODES} and {EDGES}")
    _check_parts(path, ids, labels, parts)
    return Graph(features, _each_once(edges, len(ids), directed), ids, labels, parts, str(path))


def graph_files(path: Path) -> list[Path]:
    """The files of a graph."""
    return [path / NODES, path / EDGES] if path.is_dir() else [path]


_Parts = dict[str, np.ndarray]
_Read = tuple[np.ndarray, np.ndarray, tuple[str, ...], tuple[str | None, ...], _Parts]


def _each_once(edges: np.ndarray, nodes: int, directed: bool) -> np.ndarray:
    """Edges (2, M) without duplicates, from (M, 2), sorted by start node; both directions unless `directed`."""
    both = edges if directed else np.concatenate((edges, edges[:, ::-1]))
    codes = np.unique(both[:, 0] * nodes + both[:, 1])
    return np.stack((codes // nodes, codes % nodes))


def _check_parts(path: Path, ids: Sequence[str], labels: Sequence[str | None], parts: _Parts) -> None:
    seen: dict[int, str] = {}
    for part, numbers in parts.items():
        for number in numbers.tolist():
            if labels[number] is None:
                raise ValueError(f"{path}: the node {ids[number]!r} is to {_aim(part)} and has no label")
            if seen.setdefault(number, part) != part:
                raise ValueError(f"{path}: the node {ids[number]!r} is in {seen[number]} and in {part}")


def _aim(part: str) -> str:
    return {"train": "train on", "validation": "validate on", "test": "test"}[part]


def _check_ids(ids: Sequence[str], places: Sequence[str]) -> dict[str, int]:
    """The number of each node by its name. ValueError for a duplicate."""
    numbers: dict[str, int] = {}
    for number, (name, place) in enumerate(zip(ids, places, strict=True)):
        if numbers.setdefault(name, number) != number:
            raise ValueError(f"{place}: the id {name!r} is there twice, first in {places[numbers[name]]}")
    return numbers


# --- folders ----------------------------------------------------------------------------------------------------------


def _of_folder(path: Path, labelled: bool) -> _Read:
    nodes = path / NODES
    names = _header(nodes)
    needed = [ID, LABEL] if labelled else [ID]
    rows = read_table(nodes, [*needed, *(name for name in names if name not in needed)])
    names = [*needed, *(name for name in names if name not in needed)]
    places = [place for place, _ in rows]
    columns = dict(zip(names, zip(*(values for _, values in rows), strict=True), strict=True))
    numbers = _check_ids(columns[ID], places)
    given = [name for name in names if name not in (ID, LABEL, SPLIT)]
    if not given:
        raise ValueError(f"{nodes}: no column of features; it has {', '.join(map(repr, names))}")
    features = _numbers([columns[name] for name in given], given, places)
    labels = tuple(label.strip() or None for label in columns.get(LABEL, [""] * len(rows)))
    parts = _parts_of(columns[SPLIT], places) if SPLIT in columns else {}
    return features, _edges_of(path, numbers), tuple(columns[ID]), labels, parts


def _header(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next(csv.reader(file), [])
    except (UnicodeDecodeError, csv.Error):
        return []  # `read_table` says what is wrong
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; expected {NODES} and {EDGES}") from None


def _numbers(columns: Sequence[Sequence[str]], names: Sequence[str], places: Sequence[str]) -> np.ndarray:
    """Features (N, F). ValueError names the first cell that is not a finite number."""
    try:
        values = np.array(columns).astype(np.float32)
    except ValueError:
        values = None
    if values is not None and np.isfinite(values).all():
        return np.ascontiguousarray(values.T)
    for row, place in enumerate(places):
        for name, column in zip(names, columns, strict=True):
            if not _is_number(column[row]):
                raise ValueError(f"{place}: {name}: expected a finite number, got {column[row]!r:.40}")
    raise AssertionError("a cell is no number, and none was found")


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(np.float32(text)))
    except ValueError:
        return False


def _parts_of(column: Sequence[str], places: Sequence[str]) -> _Parts:
    found: dict[str, list[int]] = {}
    for number, (value, place) in enumerate(zip(column, places, strict=True)):
        if value and value not in PARTS:
            raise ValueError(f"{place}: {SPLIT}: expected {', '.join(map(repr, PARTS))} or nothing, got {value!r:.40}")
        if value:
            found.setdefault(value, []).append(number)
    return {part: np.array(found[part], np.int64) for part in PARTS if part in found}


def _edges_of(path: Path, numbers: Mapping[str, int]) -> np.ndarray:
    """The edges (M, 2) in a folder's file, by the numbers of their nodes."""
    pairs = []
    for place, ends in read_table(path / EDGES, ENDS):
        for name, end in zip(ENDS, ends, strict=True):
            if end not in numbers:
                raise ValueError(f"{place}: {name}: there is no node {end!r:.40} in {NODES}")
        pairs.append([numbers[end] for end in ends])
    _warn_unread(path / EDGES, "column", [name for name in _header(path / EDGES) if name not in ENDS])
    return np.array(pairs, np.int64).reshape(-1, 2)


def _warn_unread(path: Path, kind: str, names: Sequence[str]) -> None:
    if names:
        listed = ", ".join(map(repr, names[:_LISTED]))
        warnings.warn(
            f"{path}: {kind}{'s' if len(names) > 1 else ''} {listed} not read; edges have no weights, kinds or "
            "features in this task",
            stacklevel=2,
        )


# --- arrays -----------------------------------------------------------------------------------------------------------


def _of_arrays(path: Path, labelled: bool) -> _Read:
    arrays = _loaded(path)
    _warn_unread(path, "array", [name for name in arrays if name not in _ARRAYS])
    features = _features_of(path, arrays)
    nodes = len(features)
    ids = tuple(map(str, arrays["ids"].tolist())) if "ids" in arrays else tuple(map(str, range(nodes)))
    _check_length(path, "ids", len(ids), nodes)
    _check_ids(ids, [f"{path}: ids: row {number}" for number in range(len(ids))])
    labels: tuple[str | None, ...] = (None,) * nodes
    if labelled or "labels" in arrays:
        labels = _labels_of(path, _needed(path, arrays, "labels"), nodes)
    parts = {}
    for part, names in MASKS.items():
        for name in names:
            if name in arrays:
                parts[part] = _chosen(path, name, arrays[name], nodes)
    return features, _pairs_of(path, _needed(path, arrays, "edges"), nodes), ids, labels, parts


def _loaded(path: Path) -> dict[str, np.ndarray]:
    try:
        stored: Any = np.load(path, allow_pickle=False)
        with stored:
            check_unpacked(path, sum(part.file_size for part in stored.zip.infolist()))
            return {name: stored[name] for name in stored.files}
    except TooLarge:
        raise
    except (ValueError, EOFError, TypeError, AttributeError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: not an .npz of plain arrays ({str(error).splitlines()[0]})") from None


def _needed(path: Path, arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        listed = ", ".join(map(repr, list(arrays)[:_LISTED])) or "none"
        raise ValueError(f"{path}: no array {name!r}; it has {listed}")
    return arrays[name]


def _check_length(path: Path, name: str, length: int, nodes: int) -> None:
    if length != nodes:
        raise ValueError(f"{path}: {name}: expected one for each of the {nodes:,} nodes, got {length:,}")


def _features_of(path: Path, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """(N, F), dense, from an array or from the parts of a CSR matrix."""
    if "feature_indptr" in arrays:
        features = _from_rows(path, arrays)
    else:
        features = _needed(path, arrays, "features")
        if features.ndim != 2 or not features.size:
            raise ValueError(f"{path}: features: expected shape (nodes, features), got {features.shape}")
    if features.dtype.kind not in "biuf":
        raise ValueError(f"{path}: features: expected numbers, got {features.dtype}")
    features = np.ascontiguousarray(features, np.float32)
    wrong = np.argwhere(~np.isfinite(features))
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ValueError(f"{path}: features: row {row}, column {column}: expected a finite number")
    return features


def _from_rows(path: Path, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """A CSR matrix: `feature_indptr` (N + 1,), `feature_indices`, `feature_data` (1 without it), `features` columns."""
    begins, columns = arrays["feature_indptr"].astype(np.int64), _needed(path, arrays, "feature_indices")
    columns = columns.astype(np.int64)
    values = arrays.get("feature_data", np.ones(len(columns), np.float32))
    most = int(columns.max(initial=-1)) + 1
    count = int(arrays["features"]) if arrays.get("features", np.ones(1)).ndim == 0 else most
    fits = len(begins) > 1 and begins[0] == 0 and begins[-1] == len(columns) == len(values)
    if not fits or (np.diff(begins) < 0).any() or columns.min(initial=0) < 0 or most > count:
        raise ValueError(f"{path}: feature_indptr, feature_indices: are not a CSR matrix of {count:,} columns")
    try:
        dense = np.zeros((len(begins) - 1, count), values.dtype)
    except (MemoryError, ValueError):
        raise ValueError(f"{path}: features: {len(begins) - 1:,} x {count:,} are more than fit into memory") from None
    dense[np.repeat(np.arange(len(dense)), np.diff(begins)), columns] = values
    return dense


def _labels_of(path: Path, given: np.ndarray, nodes: int) -> tuple[str | None, ...]:
    """Labels: words ("" for none) or integers (negative for none)."""
    if given.ndim != 1 or given.dtype.kind not in "iuU":
        raise ValueError(f"{path}: labels: expected words or integers (nodes,), got {given.dtype} {given.shape}")
    _check_length(path, "labels", len(given), nodes)
    if given.dtype.kind == "U":
        return tuple(label.strip() or None for label in given.tolist())
    return tuple(None if label < 0 else str(label) for label in given.tolist())


def _chosen(path: Path, name: str, given: np.ndarray, nodes: int) -> np.ndarray:
    """Numbers of nodes, from a mask (N,) or from numbers."""
    if given.dtype == np.bool_ and given.shape == (nodes,):
        return np.flatnonzero(given)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: {name}: expected a mask of the {nodes:,} nodes or their numbers, got {given.dtype} {given.shape}"
        )
    _check_nodes(path, name, given, nodes)
    return np.unique(given.astype(np.int64))


def _pairs_of(path: Path, edges: np.ndarray, nodes: int) -> np.ndarray:
    """(M, 2), also from (2, M)."""
    if edges.ndim != 2 or 2 not in edges.shape or edges.dtype.kind not in "iu":
        raise ValueError(f"{path}: edges: expected node numbers (edges, 2), got {edges.dtype} {edges.shape}")
    pairs = (edges if edges.shape[1] == 2 else edges.T).astype(np.int64)
    _check_nodes(path, "edges", pairs, nodes)
    return pairs


def _check_nodes(path: Path, name: str, given: np.ndarray, nodes: int) -> None:
    wrong = np.argwhere((given < 0) | (given >= nodes))
    if len(wrong):
        value = given[tuple(wrong[0])]
        raise ValueError(f"{path}: {name}: row {wrong[0][0]}: there is no node {value}, nodes are 0 to {nodes - 1}")
