"""Faults in training."""

from __future__ import annotations

from ..fault import Fault

SETTINGS, STATE, LOOP = (f"src/saccade/make/training/{name}.py" for name in ("settings", "state", "loop"))
FILES, KEEPER = (
    "src/saccade/make/training/run_folder/checkpoint_files.py",
    "src/saccade/make/training/run_folder/run_writer.py",
)
LOOPS, RESUME, RUN = (f"tests/training/test_{name}.py" for name in ("loop", "resume", "run"))
EVERY = "tests/training"

FAULTS = (
    Fault(
        "warm-up",
        SETTINGS,
        "return peak * (step + 1) / warmup",
        "return peak * step / warmup",
        (LOOPS, EVERY),
        "The first step has a rate of 0.",
    ),
    Fault(
        "cosine-end",
        SETTINGS,
        "(step - warmup) / max(steps - warmup, 1)",
        "(step - warmup) / max(steps, 1)",
        (LOOPS, EVERY),
        "The rate never reaches its floor.",
    ),
    Fault(
        "rate-of-step",
        LOOP,
        "rate = settings.rate_at(progress.step, progress.seconds)",
        "rate = settings.rate_at(progress.step + 1, progress.seconds)",
        (LOOPS + "::test_steps_are_adamw_with_clipped_gradients", EVERY),
        "Each step is made with the rate of the next.",
    ),
    Fault(
        "accumulation-share",
        LOOP,
        "share = self.objective.weight(part) / whole",
        "share = 1.0",
        (LOOPS + "::test_steps_are_adamw_with_clipped_gradients", "tests/training/test_execution.py", EVERY),
        "Accumulated gradients are sums, not means.",
    ),
    Fault(
        "decay-of-vectors",
        LOOP,
        '{"params": vectors, "weight_decay": 0.0}',
        '{"params": vectors, "weight_decay": settings.decay}',
        (LOOPS + "::test_steps_are_adamw_with_clipped_gradients", EVERY),
        "Norms and biases have weight decay.",
    ),
    Fault(
        "patience",
        LOOP,
        "self.waited >= patience",
        "self.waited > patience",
        (RESUME + "::test_patience", EVERY),
        "Training stops one look too late.",
    ),
    Fault(
        "resume-generator",
        STATE,
        'torch.set_rng_state(states["torch"])',
        "...",
        ("tests/training/test_files.py::test_random_states_come_back", RESUME, EVERY),
        "A resumed run has lost the state of PyTorch's generator.",
    ),
    Fault(
        "resume-optimizer",
        STATE,
        'if state["optimizer"].get("state"):',
        "if False:",
        (RESUME, EVERY),
        "A resumed run begins with fresh moments.",
    ),
    Fault(
        "evaluation-mode",
        "src/saccade/make/training/language/evaluation.py",
        "model.train(was_training)",
        "...",
        (LOOPS, EVERY),
        "After the first evaluation there is no dropout.",
    ),
    Fault(
        "shared-lock",
        "src/saccade/make/training/run_folder/lock.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        ("tests/training/test_lock.py",),
        "Two runs write into one folder.",
    ),
    Fault(
        "temporary-left",
        "src/saccade/support/_whole_file.py",
        "temporary.unlink(missing_ok=True)",
        "...",
        ("tests/test_whole_file.py",),
        "A failed write leaves its temporary file.",
    ),
    Fault(
        "checksum",
        FILES,
        "if hashlib.sha256(body).digest() != digest:",
        "if not body:",
        ("tests/training/test_files.py",),
        "A damaged checkpoint is read.",
    ),
    Fault(
        "prune",
        FILES,
        "*checkpoints(folder)[keep:]",
        "*checkpoints(folder)[keep + 1 :]",
        ("tests/training/test_files.py", EVERY),
        "One checkpoint too many is kept.",
    ),
    Fault(
        "best-weights",
        KEEPER,
        "best = (evaluation.judged, evaluation.loss) < (self._best, self._best_loss)",
        "best = (evaluation.judged, evaluation.loss) > (self._best, self._best_loss)",
        (RUN + "::test_the_best_weights_are_kept_and_the_last_beside_them", EVERY),
        "The worst weights are kept.",
    ),
    Fault(
        "last-window",
        "src/saccade/make/training/language/windows.py",
        "tokens.shape[0] - context + 1, size=batch",
        "tokens.shape[0] - context, size=batch",
        ("tests/training/test_data.py", EVERY),
        "The last token of a text is never learned.",
    ),
    Fault(
        "signal-handlers",
        "src/saccade/make/training/stopping.py",
        "signal.signal(number, handler)",
        "...",
        (RESUME + "::test_signals_are_handled_as_before_afterwards", EVERY),
        "After training Ctrl-C does nothing.",
    ),
    Fault(
        "rate-edge",
        "src/saccade/make/training/rising_rates.py",
        "return self.rates[max(lowest - 1, 0)]",
        "return self.rates[lowest]",
        ("tests/training/test_rising_rates.py",),
        "The suggested rate is one step too high.",
    ),
)
