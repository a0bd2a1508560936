"""What each of two processes does in test_processes.py; run by `torchrun`. Writes what the main one has into a file.

torchrun --nproc-per-node 2 two_processes.py FILE DTYPE ACCUMULATE [CONTEXT_PARALLEL]
"""

from __future__ import annotations

import sys

import torch

from saccade.models import DecoderLM, ModelConfig
from saccade.training import (
    Corpus,
    EvaluationSettings,
    Execution,
    LanguageObjective,
    LanguageSettings,
    Monitor,
    train,
)
from saccade.training.processes import accelerator_for

CONFIG = ModelConfig(31, width=12, layers=2, heads=2, hidden=16, context=11)
TOKENS = torch.arange(211) ** 2 % 31


class Notes(Monitor):
    def __init__(self):
        self.curve, self.losses, self.gradients = [], [], {}

    def step(self, step, loss, norm, rate, tokens_per_second):
        self.losses.append([loss, norm])

    def norms(self, step, gradients, weights):
        self.gradients = gradients

    def evaluated(self, step, training_loss, evaluation, seconds, weights):
        self.curve.append([step, training_loss, evaluation.loss])


def run(dtype: torch.dtype, accumulate: int, context_parallel: int = 1) -> dict[str, object] | None:
    """Train a small model of a few steps; what the main process has, None in others."""
    settings = LanguageSettings(
        steps=7,
        batch=5,  # rows do not divide
        rate=0.01,
        warmup=2,
        clip=0.5,
        execution=Execution("no", accumulate, context_parallel=context_parallel),
        looks=EvaluationSettings(every=3, log_every=7, tensorboard=True),
    )
    accelerator, notes = accelerator_for(settings), Notes()
    torch.manual_seed(3)
    model = DecoderLM(CONFIG).to(dtype)
    objective = LanguageObjective(model, Corpus(TOKENS, TOKENS[:101]), 0, settings)
    train(objective, settings, notes, accelerator=accelerator)
    if not accelerator.is_main_process:
        return None
    return {
        "processes": accelerator.num_processes,
        "weights": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "curve": notes.curve,
        "losses": notes.losses,
        "gradients": notes.gradients,
    }


if __name__ == "__main__":
    made = run(getattr(torch, sys.argv[2]), *map(int, sys.argv[3:]))
    if made is not None:
        torch.save(made, sys.argv[1])
