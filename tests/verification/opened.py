"""Opens one tiny random model of every type of transformers with `saccade.models.load`, and compares it with
transformers: states, logits and greedy texts of batches padded on either side, once more after saving.

    python tests/verification/opened.py [TYPE ...]

Types whose models cannot be made tiny here are left out with the reason. The exit status is 1 where one differs. The
240 types of `zoo.py` take some 10 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
import zoo
from torch import Tensor, nn

import saccade

LENGTHS = torch.tensor([[11], [5], [8]])
TOLERANCE = 2e-5  # rounding of float32 in two layers, of values of size 1; transformers' own classes are equal in bits


def batch(left: bool) -> tuple[Tensor, Tensor]:
    """Token ids and mask of three texts of 11, 5 and 8 tokens; 1 is padding, 2 ends a text."""
    ids = torch.randint(3, 89, (3, 11), generator=torch.Generator().manual_seed(7))
    mask = (torch.arange(11) < LENGTHS).long()
    mask = mask.flip(1) if left else mask
    places = mask.cumsum(1) - 1
    return torch.where(mask != 0, ids.gather(1, places.clamp(min=0)), 1), mask


def given(module: nn.Module, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    names = inspect.signature(module.forward).parameters
    more = {"decoder_input_ids": ids} if "decoder_input_ids" in names else {}
    return {"input_ids": ids, "attention_mask": mask, **more}


def difference(module: Any, model: saccade.models.Model) -> float:
    """The largest difference of logits, or of states, at real tokens."""
    worst = 0.0
    own = not isinstance(model, saccade.models.TransformersModel)
    for left in (False,) if own else (False, True):  # families here give the first real token the position 0
        ids, mask = batch(left)
        inputs = given(module, ids, mask)
        with torch.no_grad():
            expected, got = module(**inputs), model(**inputs)
        expected = expected.logits if "logits" in expected else expected.last_hidden_state
        got = got.last_hidden_state if got.logits is None else got.logits
        assert got is not None
        real = mask != 0 if got.shape[:2] == mask.shape and not module.config.is_encoder_decoder else slice(None)
        worst = max(worst, (expected[real] - got[real]).abs().max().item())
    return worst


def texts(module: Any, model: Any) -> bool:
    """Whether greedy texts are equal to those of transformers, whose prompts are padded on the left."""
    ids, mask = batch(left=True)
    try:
        expected = module.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)[:, 11:]
    except (AttributeError, TypeError, ValueError):  # types that transformers itself generates nothing with
        return True
    got = [model.generate(*batch(left), max_new_tokens=6)[:, 11:] for left in (False, True)]
    return all(torch.equal(expected, new) for new in got)


def compared(kind: str, folder: Path) -> str:
    """What came: equal, left out (it cannot be made here), or what differs."""
    try:
        module: Any = zoo.tiny(kind)
        with contextlib.redirect_stderr(None):
            module.save_pretrained(folder)
        module = type(module).from_pretrained(folder).eval()  # tables of positions that are not stored are computed
        with torch.no_grad():
            module(**given(module, *batch(left=False)))
    except Exception as error:  # transformers cannot make it, read it again, or run it on token ids
        return f"left out, {' '.join(str(error).split())[:120]}"
    model = saccade.models.load(folder)
    if not (gap := difference(module, model)) <= TOLERANCE:
        return f"DIFFERS by {gap:.1e}"
    if module.can_generate() and not module.config.is_encoder_decoder and not texts(module, model):
        return "DIFFERS in its texts"
    model.save(folder / "again")
    if not difference(module, saccade.models.load(folder / "again")) <= TOLERANCE:
        return "DIFFERS when saved"
    own = not isinstance(model, saccade.models.TransformersModel)
    return f"equal, {'a family here' if own else 'equal in bits' if gap == 0 else f'to {gap:.0e}'}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    kinds = parser.parse_args().types or zoo.families()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    counts: Counter[str] = Counter()
    for kind in kinds:
        torch.manual_seed(5)
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = compared(kind, Path(folder))
            except Exception as error:
                outcome = f"not opened, {type(error).__name__} {' '.join(str(error).replace(folder, '').split())[:120]}"
        counts[outcome.partition(",")[0].partition(" by ")[0]] += 1
        print(f"{kind:24} {outcome}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    sys.exit(any(what.startswith("DIFFERS") for what in counts))


if __name__ == "__main__":
    main()
