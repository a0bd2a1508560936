"""Every public name has a docstring with an example; `test_examples.py` runs them."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import griffe
import pytest
from public import PUBLIC, every_name, homes, names, old_names

import saccade

SOURCES = Path(saccade.__file__).parent


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_class_and_function_has_an_example(package):
    module = importlib.import_module(package)
    here = {name: getattr(module, name) for name in names(package) if homes()[package, name] == package}
    made = {name: value for name, value in here.items() if inspect.isclass(value) or inspect.isroutine(value)}
    lacking = [name for name, value in made.items() if ">>> " not in (value.__doc__ or "")]
    assert not lacking, f"{package}: no example in the docstring of {', '.join(lacking)}"


@pytest.mark.slow
def test_every_public_name_has_a_docstring():
    """Constants, too: the string below their assignment, which only a reader of the source sees."""
    read = griffe.load("saccade", search_paths=[SOURCES.parent], resolve_aliases=True)
    paths = [
        value.__name__ if inspect.ismodule(value) else f"{package}.{name}" for package, name, value in every_name()
    ]
    lacking = [path for path in paths if read[path.removeprefix("saccade.")].docstring is None]
    assert not lacking


@pytest.mark.parametrize("package", PUBLIC)
def test_no_name_is_public_twice_in_a_package(package):
    found = names(package)
    assert sorted(set(found)) == sorted(found)


@pytest.mark.parametrize(("package", "old", "new"), list(old_names()))
def test_an_old_name_works_and_says_the_new_one(package, old, new):
    module = importlib.import_module(package)
    with pytest.warns(DeprecationWarning, match=f"{old} is {new} now; the old name goes in"):
        assert getattr(module, old) is getattr(module, new)
