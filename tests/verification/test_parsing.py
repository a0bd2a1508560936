"""What Python's parser gives up for no fault of the source is asked once more."""

from __future__ import annotations

import ast

import pytest

from saccade.verification.subject._source import parsed_by


class Fails:
    """A parser that fails so many times before it does its work."""

    def __init__(self, times, error=SystemError):
        self.times, self.error = times, error

    def __call__(self, text):
        if self.times:
            self.times -= 1
            raise self.error("AST constructor recursion depth mismatch (before=357, after=374)")
        return ast.parse(text)


def test_once_more_after_a_failure_of_python():
    assert ast.dump(parsed_by(Fails(1), "x = 1")) == ast.dump(ast.parse("x = 1"))


@pytest.mark.parametrize(("times", "error"), [(2, SystemError), (1, SyntaxError)])
def test_other_failures_are_told(times, error):
    with pytest.raises(error, match="recursion depth"):
        parsed_by(Fails(times, error), "x = 1")
