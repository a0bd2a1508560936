"""Faults in models of proteins, time series and graphs."""

from __future__ import annotations

from ..fault import Fault

MODELS, FAMILIES = "src/saccade/make/models", "src/saccade/make/models/families"
ESM, PATCHTST = ("tests/models/families/test_esm.py",), ("tests/models/families/test_patchtst.py",)
GAT, GRAPHORMER = ("tests/models/families/test_gat.py",), ("tests/models/families/test_graphormer.py",)

FAULTS = (
    Fault(
        "esm-token-dropout",
        f"{FAMILIES}/esm.py",
        "kept = (real & (input_ids != self.mask))",
        "kept = (input_ids != self.mask)",
        ESM,
        "Padding counts among the tokens that are not masked.",
    ),
    Fault(
        "esm-frequencies",
        "src/saccade/operator/positions/waves.py",
        "if frequencies is not self._held or now is None or now != self._state:",
        "if frequencies is not self._held:",
        ESM,
        "Tables of old frequencies stay in use after new ones are loaded.",
    ),
    Fault(
        "contacts-correction",
        f"{MODELS}/text/contacts.py",
        "maps - explained",
        "maps",
        ESM,
        "What row and column sums explain is not taken from the maps.",
    ),
    Fault(
        "patchtst-start",
        f"{FAMILIES}/patchtst.py",
        "start = (self.steps - self.patch) % self.stride",
        "start = 0",
        PATCHTST,
        "Patches begin with the series and leave out its newest steps.",
    ),
    Fault(
        "patchtst-observed",
        f"{MODELS}/signals/series.py",
        "(values * observed).abs().sum",
        "values.abs().sum",
        PATCHTST,
        "The scale counts values that were not observed.",
    ),
    Fault(
        "gat-direction",
        f"{MODELS}/graphs/attention.py",
        "own[edges[1]] + neighbour[edges[0]]",
        "own[edges[0]] + neighbour[edges[1]]",
        GAT,
        "The scores of the two ends of an edge are swapped.",
    ),
    Fault(
        "gat-overflow",
        f"{MODELS}/graphs/attention.py",
        "logits - top[ends]",
        "logits",
        GAT,
        "Large logits overflow.",
    ),
    Fault(
        "graphormer-unreached",
        f"{FAMILIES}/graphormer.py",
        "torch.where(pairs.hops == UNREACHED, most + 1, pairs.hops.clamp(max=most))",
        "pairs.hops.clamp(min=0, max=most)",
        GRAPHORMER,
        "Pairs without a path have the bias of a node with itself.",
    ),
    Fault(
        "graphormer-path",
        f"{MODELS}/graphs/structure.py",
        "if len(levels) <= kept:",
        "if len(levels) < kept:",
        GRAPHORMER,
        "The last edge of a path that is kept does not count.",
    ),
)
