"""Faults in what is measured of heads: importance, patching, paths."""

from __future__ import annotations

from ..fault import Fault

RUNS, IMPORTANCE, RESULT, PATCHING, PATCH_RUNS, PATHS, PATCHES = (
    f"src/saccade/see/attribution/_{name}.py"
    for name in ("runs", "importance", "importance_result", "patching", "patching_runs", "patching", "patching_result")
)
BATCHES = "src/saccade/see/attribution/_patching_batches.py"
KEYS = "src/saccade/see/intervention/_intervene.py"
OF_IMPORTANCE, OF_PATCHING, OF_PATHS = (
    f"tests/attribution/test_{name}.py" for name in ("importance", "patching", "paths")
)

FAULTS = (
    Fault(
        "gates-signs",
        IMPORTANCE,
        "parts.mean(0).abs() for parts in by_batch",
        "parts.mean(0) for parts in by_batch",
        (OF_IMPORTANCE,),
        "Batches whose gradients have other signs cancel.",
    ),
    Fault(
        "gates-by-path",
        KEYS,
        "return site.name == wanted.name",
        "return site.path == wanted.name",
        (OF_IMPORTANCE,),
        "All calls of a shared layer are edited as one.",
    ),
    Fault(
        "modes-back",
        "src/saccade/support/_restored.py",
        "            module.training = True",
        "            model.train()",
        (OF_IMPORTANCE,),
        "Modules that were in evaluation mode train afterwards.",
    ),
    Fault(
        "greedy-anew",
        IMPORTANCE,
        "            rises[:, at] = losses - now",
        "            rises[:, at] = losses - whole",
        (OF_IMPORTANCE,),
        "What a head costs beside those that have gone has their cost in it.",
    ),
    Fault(
        "greedy-one-by-one",
        IMPORTANCE,
        "[*gone, heads[at]], total)",
        "[heads[at]], total)",
        (OF_IMPORTANCE,),
        "Heads that have gone are back while others are tried.",
    ),
    Fault(
        "least-of-call",
        RESULT,
        "if spare and left[head.call] > 1:",
        "if spare:",
        (OF_IMPORTANCE,),
        "A layer loses all of its heads.",
    ),
    Fault(
        "greedy-ranked",
        RESULT,
        "(head in gone, -gone.get(head, 0), -number[head])",
        "(head in gone, gone.get(head, 0), -number[head])",
        (OF_IMPORTANCE,),
        "The head that went first counts for more than the one that went last.",
    ),
    Fault(
        "noising",
        PATCHING,
        '("corrupted", "clean") if direction == "denoising" else ("clean", "corrupted")',
        '("corrupted", "clean")',
        (OF_PATCHING,),
        "Noising is denoising.",
    ),
    Fault(
        "patching-sign",
        PATCH_RUNS,
        "return ((other - own).to(wide)",
        "return ((own - other).to(wide)",
        (OF_PATCHING,),
        "By gradient, what a head brings back is what it takes away.",
    ),
    Fault(
        "gradient-positions",
        PATCH_RUNS,
        "(tensor.index_select(2, places) for tensor in (own, other, gradient))",
        "(tensor for tensor in (own, other, gradient))",
        (OF_PATCHING,),
        "The gradient counts rows that are not patched.",
    ),
    Fault(
        "gradient-groups",
        RUNS,
        "tensor.repeat_interleave(heads // tensor.shape[1], 1)",
        "tensor.repeat(1, heads // tensor.shape[1], 1, 1)",
        (OF_PATCHING,),
        "Query heads read the key heads of others.",
    ),
    Fault(
        "ranks-of-ties",
        PATCHES,
        "(last - (counts - 1) / 2)[group]",
        "last[group]",
        (OF_PATCHING,),
        "Equal effects take the last rank of theirs.",
    ),
    Fault(
        "batch-independent",
        BATCHES,
        "if not _independent(runs, unpatched):",
        "if False:",
        (OF_PATCHING,),
        "Heads of one batch are measured together where items influence one another.",
    ),
    Fault(
        "batch-pairs",
        BATCHES,
        "out.shape == (copies * base[0], *base[1:])",
        "len(out) == copies * base[0]",
        (OF_PATCHING,),
        "Logits of all pairs of items are read across copies.",
    ),
    Fault(
        "path-frozen",
        PATHS,
        "with watching, edited(runs.model, _frozen(runs, receivers), runs.patch(call, head)):",
        "with watching, edited(runs.model, runs.patch(call, head)):",
        (OF_PATHS,),
        "What reaches the receiver by way of other heads counts, too.",
    ),
    Fault(
        "path-last",
        PATHS,
        "names[: max(names.index(receiver.call) for receiver in receivers)]",
        "names[: min(names.index(receiver.call) for receiver in receivers)]",
        (OF_PATHS,),
        "Heads between two receivers are neither held nor measured.",
    ),
    Fault(
        "path-twice",
        RUNS,
        "tensor = torch.where(own[:, None, None], tensor.detach(), tensor)",
        "tensor = torch.where(own[:, None, None], tensor, tensor)",
        (OF_PATHS,),
        "What a receiver does to the next one's queries counts twice.",
    ),
)
