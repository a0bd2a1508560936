"""Faults in functions of scores and masks: their language, tracer, recognition and instructions."""

from __future__ import annotations

from ..fault import Fault

KERNELS = ("tests/native/test_score_programs.py",)
SCORES = ("tests/programs/test_scores.py", *KERNELS)

FAULTS = (
    Fault(
        "program-quotient",
        "src/saccade/operator/_programs/_language.py",
        'return first, b.of("neg", b.of("mul", first, y))',
        'return first, b.of("mul", first, y)',
        SCORES,
        "The derivative of a quotient by its divisor has the wrong sign.",
    ),
    Fault(
        "program-surely-less",
        "src/saccade/operator/_programs/_language.py",
        "return np.where(x[1] < y[0], 1, 0), np.where(x[0] < y[1], 1, 0)",
        "return np.where(x[1] <= y[0], 1, 0), np.where(x[0] < y[1], 1, 0)",
        ("tests/native/test_mask_programs.py", "tests/programs/test_random_programs.py"),
        "Equal ends count as surely less.",
    ),
    Fault(
        "program-slope",
        "src/saccade/operator/_backends/native/_program_writer.py",
        'if node.op in ("min", "max") and known[0] == known[1]:',
        'if node.op in ("min", "max"):',
        KERNELS,
        "The lesser of two positions counts as moving like the first.",
    ),
    Fault(
        "program-register",
        "src/saccade/operator/_backends/native/_program_writer.py",
        "last |= dict.fromkeys(self._outputs, len(self.code))",
        "last |= {}",
        KERNELS,
        "A result's register is used again before the result is read.",
    ),
    Fault(
        "program-copy",
        "src/saccade/operator/_backends/native/_program.py",
        "end += math.prod(tables[number].shape)",
        "end += 1",
        KERNELS,
        "The gradients of two tables overlap in a task's copy.",
    ),
    Fault(
        "program-flat",
        "src/saccade/operator/_backends/native/_program.py",
        'build.of("mul", index, build.const(size, "int"))',
        "index",
        KERNELS,
        "A table of several axes is read as if each had one entry.",
    ),
    Fault(
        "program-mask-stale",
        "src/saccade/operator/_scores/_binding.py",
        "if (held := known.get((batch, heads))) is None or not held.are(tables, thoroughly=True):",
        "if (held := known.get((batch, heads))) is None:",
        SCORES,
        "The mask of a score function keeps the captured tensors of the first call.",
    ),
    Fault(
        "program-mask-range",
        "src/saccade/operator/_scores/_binding.py",
        "reach[arg][0] >= 0 and reach[arg][1] < size",
        "reach[arg][0] >= 0",
        SCORES,
        "A condition that reads outside of its table at hidden pairs becomes a mask, which raises an error.",
    ),
    Fault(
        "native-program-diagonal",
        "native/program_run.h",
        "below = grain - 1 - offset;",
        "below = grain - 2 - offset;",
        KERNELS,
        "A row reads its distances one place beside.",
    ),
    Fault(
        "native-program-hidden",
        "native/backward_program.h",
        "const vf part = select(bits, load(slopes + j) * run.value(pull.factor, j, scores), vf{});",
        "const vf part = load(slopes + j) * run.value(pull.factor, j, scores);",
        KERNELS,
        "A table's gradient takes NaN from hidden pairs.",
    ),
)
