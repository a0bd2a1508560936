"""`saccade.verify_stack`: faults that sit between correct parts of what people run.

A string names a stack, "path/to/stack.py:make": a function without arguments that returns what is verified.
"""

from __future__ import annotations

import ast
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._verify import Progress, received
from .report._report import Report
from .running._job import Message
from .running._stack_job import StackJob, StackOpened, messages
from .stacks._documents import Documents
from .stacks._opened import Given
from .stacks.probes import PROBES
from .subject._load import split

if TYPE_CHECKING:
    from ._verify import Progress
    from .running._child import Limits


@dataclass(frozen=True, repr=False)
class StackReport(Report):
    """The result of `saccade.verify_stack`: a `Report` whose outcomes are probes.

    Example:
        >>> import saccade, torch
        >>> report = saccade.verify_stack(torch.nn.Embedding(31, 31))
        >>> report.ok, report.findings[0].message
        (False, 'No output depends on any token but its own')
    """


def verify_stack(
    model: Any,
    *,
    batch: Callable[[Documents], Any] | None = None,
    pack: Callable[[Documents], Any] | None = None,
    decode: Callable[[list[int], Any], tuple[Any, Any]] | None = None,
    second: Any = None,
    step: Callable[[list[Documents]], Any] | None = None,
    causal: bool | None = None,
    window: int | None = None,
    trainer: Any = None,
    tokenizer: Any = None,
    shard: Callable[[Documents], Any] | None = None,
) -> StackReport:
    """Find faults that sit between correct parts: a model with its collator, packing, cache and training step.

    Documents of random tokens go through what you run, and come out next to each other, padded, packed, in steps and
    all at once; what must not change outputs is changed, and outputs are compared. The rounding of the stack is
    measured first, in float64 where it can be. Weights, buffers, modes and random state are as before afterwards.

    Args:
        model: a transformers model, an `nn.Module`, or a callable of token ids (B, L) that may take attention_mask=
            and position_ids=. It returns logits or hidden states (B, L, width), or an object that has them as
            `.logits` or `.last_hidden_state`. Or a trainer, as `trainer`. Or the http:// address of an endpoint on this
            machine that returns log probabilities of prompts, as vLLM's and llama.cpp's /v1/completions do.
        batch: a list of documents, each a list of token ids, to inputs of the model: the collator with its padding.
            Inputs are a dict of arguments, a tuple of them, or a tensor. None: padded on the right.
        pack: the same, all documents in one row; `labels` among the inputs are tested, too.
        decode: (tokens so far, state) -> (logits of the last token (V,), state); state None begins a sequence.
        second: another model that must give the same outputs, such as one with another attention implementation; the
            original of a served model, or its address.
        step: a list of micro-batches, each a list of documents -> the loss; gradients are left in the model.
        causal: whether no output may depend on a later token. None: as its configuration says, else as measured.
        window: how many keys a query sees, its own included. None: as the configuration says.
        trainer: a transformers `Trainer`, or an object with `.model` and a `.data_collator`, `.collate_fn` or
            `.train_dataloader`: its model, collator and tokenizer are used.
        tokenizer: its padding is used, and its special tokens are left out of documents.
        shard: a list of documents -> the outputs of all of them in one row, as an output of the model, with `.loss` if
            that is to be compared; called on each of 1, 2 and 3 forked processes, which are the ranks of the default
            gloo group, and share the row. Rank 0's result counts. The first call has 24 tokens.

    Returns:
        The report. Each of `report.findings` has its `probe`, `severity`, `message`, `effect`, `fix`, the smallest
        documents that show it (`example`) and `where` it begins. `report.ok` is False where one is an error.

    Raises:
        TypeError: the model is not callable; a trainer has no collator, and none is given.
        ValueError: `window` is no positive number; an address is not on this machine.

    Example:
        >>> import saccade, torch
        >>> class Model(torch.nn.Module):  # one layer of causal attention
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.qkv = torch.nn.Embedding(53, 24), torch.nn.Linear(24, 72)
        ...     def forward(self, input_ids):
        ...         q, k, v = self.qkv(self.embed(input_ids))[:, None].chunk(3, -1)
        ...         return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        >>> saccade.verify_stack(Model()).ok
        True
        >>> report = saccade.verify_stack(Model(), pack=lambda documents: torch.tensor([sum(documents, [])]))
        >>> report.findings[0].probe, len(report.findings[0].example)
        ('packing', 2)
        >>> print(report.findings[0].message)
        Document 1 attends to document 0 of its pack: output 0 of document 1 differs by ...
    """
    return report_on(Given(model, batch, pack, decode, second, step, causal, window, trainer, tokenizer, shard))


def report_on(given: Given) -> StackReport:
    """The report on a stack, verified in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return stack_report(messages(given, PROBES))


def stack_report(
    messages: Iterable[Message], named: str = "", progress: Progress | None = None, total: int = 0
) -> StackReport:
    """The report on a stack; its seconds are without loading. `named`: its title, if it is not opened."""
    call, _, findings, outcomes, printed, start = received(messages, progress, total)
    stack = call if isinstance(call, StackOpened) else StackOpened("", (), 0, named)
    findings.sort(key=lambda finding: ("error", "warning", "note").index(finding.severity))
    seconds = time.perf_counter() - start
    return StackReport(stack.name, "", stack.assumed, stack.causal, tuple(findings), tuple(outcomes), seconds, printed)


def is_factory(named: str) -> bool:
    """Whether the file's function of this name takes no arguments: it can only make a stack. The file is not run."""
    try:
        path, name = split(named)
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (ValueError, SyntaxError, OSError):  # which verifying a module reports
        return False
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return bool(functions) and not any(
        [functions[-1].args.posonlyargs, functions[-1].args.args, functions[-1].args.vararg]
    )


def verify_made(
    named: str, limits: Limits | None = None, progress: Progress | None = None, **promises: Any
) -> StackReport:
    """The report on the stack that the function of this name returns. It is made and verified in a child process."""
    from .running._child import Limits, isolated

    given = {name: value for name, value in promises.items() if value is not None}
    job = StackJob(named, given)
    return stack_report(isolated(job, limits or Limits()), named, progress, len(job.names))
