"""Faults in edits of attention, and in what `saccade heads`, `saccade prune` and the viewer ask of them."""

from __future__ import annotations

from ..fault import Fault

EDITS, PATCH, CHOICE = (f"src/saccade/see/intervention/_{name}.py" for name in ("edits", "patch", "choice"))
TWO_TEXTS = "src/saccade/see/attribution/_two_texts.py"
OF_EDITS = ("tests/intervention/test_edits.py",)
OF_HEADS = ("tests/viewer/test_heads.py", "tests/cli/test_heads.py")

FAULTS = (
    Fault(
        "ablate-mean-axis",
        EDITS,
        "return own.mean(0, keepdim=True).expand_as(own)",
        "return own.mean(2, keepdim=True).expand_as(own)",
        OF_EDITS,
        "The mean is over places, not over items.",
    ),
    Fault(
        "ablate-mean-padding",
        EDITS,
        "number.clamp(min=1).to(own.dtype)",
        "counted.shape[0]",
        (*OF_EDITS, "tests/intervention/test_blocks.py"),
        "Items whose token is padding count in the mean.",
    ),
    Fault(
        "resample-itself",
        EDITS,
        "others[order] = order.roll(1)",
        "others[order] = order",
        OF_EDITS,
        "A resampled head says what it said.",
    ),
    Fault(
        "edit-of-items",
        EDITS,
        "new = torch.where(covered[:, heads], new, whole[:, heads])",
        "new = torch.where(covered[:, heads], new, new)",
        OF_EDITS,
        "An edit of some items changes all of them.",
    ),
    Fault(
        "mask-instead",
        EDITS,
        "mask=here if own is None else own & here",
        "mask=here",
        OF_EDITS,
        "Heads that shall see less see what the model hides.",
    ),
    Fault(
        "patch-next-head",
        PATCH,
        "        new = other[:, heads].to(own)\n",
        "        new = other[:, [(head + 1) % other.shape[1] for head in heads]].to(own)\n",
        (*OF_EDITS, *OF_HEADS),
        "A head gets what its neighbour said.",
    ),
    Fault(
        "patch-places",
        PATCH,
        "rows_of_source = new[:, :, places.there]",
        "rows_of_source = new[:, :, places.here]",
        ("tests/intervention/test_edits.py", "tests/intervention/test_edits_while_generating.py"),
        "With a cache the rows of other tokens are patched.",
    ),
    Fault(
        "metric-sign",
        TWO_TEXTS,
        "return log_p[0] - log_p[1:].sum()",
        "return log_p[0] + log_p[1:].sum()",
        OF_HEADS,
        "Of two words the sum is explained, not the difference.",
    ),
    Fault(
        "texts-swapped",
        TWO_TEXTS,
        "runs = _run(predictor, clean), _run(predictor, corrupted)",
        "runs = _run(predictor, corrupted), _run(predictor, clean)",
        OF_HEADS,
        "Heads of the other text are put into the text.",
    ),
    Fault(
        "patched-everywhere",
        TWO_TEXTS,
        "by=by, positions=positions, progress=progress",
        "by=by, positions=None, progress=progress",
        OF_HEADS,
        "Tokens that were not chosen are patched.",
    ),
    Fault(
        "prediction-beside",
        "src/saccade/see/viewer/server/_rereading.py",
        "rows = tuple(place - 1 for place in places)",
        "rows = places",
        OF_HEADS,
        "A word has the probability of the one after it.",
    ),
    Fault(
        "rise-of-a-gradient",
        "src/saccade/see/viewer/heads/_sentences.py",
        "HeadValues(importance.signed.calls, -importance.signed.values)",
        "HeadValues(importance.signed.calls, importance.signed.values)",
        ("tests/viewer/test_head_maps.py",),
        "Heads that the text needs are said to harm it.",
    ),
    Fault(
        "first-round-counts",
        "src/saccade/make/pruning/_timing.py",
        "statistics.median(times[1:])",
        "statistics.mean(times)",
        ("tests/pruning/test_choice.py",),
        "The first forward, which fills caches, is in the time.",
    ),
)
