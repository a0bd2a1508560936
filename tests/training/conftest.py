from __future__ import annotations

import pytest

from saccade.training import EvaluationSettings, Execution, LanguageRun, LanguageSettings

WORDS = "the cat sat on the mat and the dog sat on the log while a bird sang in the tree".split()


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps device and precision for the life of the process; each test may choose its own."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def story(tmp_path):
    """A text file of 400 lines that are all alike but for their number of words."""
    path = tmp_path / "story.txt"
    path.write_text("".join(" ".join(WORDS[: 5 + n % 13]) + ".\n" for n in range(400)))
    return path


@pytest.fixture
def make_run(story, tmp_path):
    def make(steps=4, shape=None, looks=None, execution=None, **options):
        settings = LanguageSettings(
            steps=steps,
            batch=3,
            warmup=2,
            looks=EvaluationSettings(**{"every": 2, **(looks or {})}),
            execution=Execution(**{"precision": "no", **(execution or {})}),
        )
        small = {"layers": 1, "heads": 2, "width": 12, "hidden": 16, "context": 11, **(shape or {})}
        options = {"text": story, "out": tmp_path / "out", "settings": settings, "vocabulary": 283, **options}
        return LanguageRun(shape=small, **options)

    return make
