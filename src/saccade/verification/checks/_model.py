"""Promise: a whole model keeps what its attention promises. The probes of stacks test it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..findings._finding import Finding, Inapplicable, StageBegun, Unmeasured
from ..stacks._opened import stack_of
from ..stacks._runner import probed
from ..stacks.probes import OF_MODELS
from ..subject._check import Check
from ..subject._steady import vivid
from ..subject._subject import Subject

_NAME = "model"


def _run(subject: Subject) -> Iterator[Finding]:
    if subject.form != "tokens":
        raise Inapplicable("it is not a whole model of tokens")
    for done in probed(OF_MODELS, stack_of(vivid(subject))):
        if isinstance(done, StageBegun):
            continue
        if done.findings and done.outcome.name == "determinism":
            raise Unmeasured("two calls with the same tokens differ")
        for finding in done.findings:
            yield replace(finding, check=_NAME, family=_NAME, evidence={**finding.evidence, "probe": done.outcome.name})
        if done.outcome.status == "failed":  # the other probes would say the same again
            return


CHECK = Check(
    _NAME,
    _NAME,
    "A whole model keeps the promises of its attention, decoding included.",
    "Tokens are exchanged one at a time, padded, batched with others and decoded in steps, and all outputs compared.",
    "Correct layers can be combined wrongly: a mask that reaches one layer only, positions that "
    "forget the cache, a cross-attention that reads padding.",
    _run,
)
