"""What a string names: files with and without a name, packages, and what is said where there is nothing."""

from __future__ import annotations

import sys

import pytest

from saccade.verification import Undecided
from saccade.verification.subject._load import load, split

CODE = """
import dataclasses
import inspect
from torch import nn
from torch.nn import Linear

SIZE = 7

@dataclasses.dataclass
class Config:
    width: int = 5

class Head(nn.Module):
    class Inner(nn.Module):
        pass

def attend(q, k, v):
    return v

def self_attention(x):
    return x

def helper(x):
    return x

def _private(q, k, v):
    return v

made = Head()
"""


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Loading belongs into a child: here it is undone."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "theirs.py"
    path.write_text(CODE)
    return path


def test_a_function_a_class_an_instance_and_what_is_inside(file):
    assert load(f"{file}:attend").__name__ == "attend"
    assert load(f"{file}:Head").__name__ == "Head"
    assert load(f"{file}:Head.Inner").__qualname__ == "Head.Inner"
    assert type(load(f"{file}:made")).__name__ == "Head"


def test_a_missing_name_is_told_with_what_is_there(file):
    with pytest.raises(ValueError, match=r"there is no Heat in it; it holds Head, attend, self_attention, made$"):
        load(f"{file}:Heat")


def test_what_cannot_be_called_is_refused(file):
    with pytest.raises(ValueError, match="is of type int; expected a function, an nn.Module or a class"):
        load(f"{file}:SIZE")


def test_without_a_name_the_only_one_is_meant(tmp_path):
    path = tmp_path / "one.py"
    path.write_text("def rotate(x):\n    return x\n\ndef f(query, key, value, mask=None):\n    return value\n")
    assert load(str(path)).__name__ == "f"


def test_without_a_name_several_are_listed(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    with pytest.raises(Undecided) as raised:
        load(str(file))
    assert raised.value.candidates == (
        ("class", "theirs.py:Head"),
        ("function", "theirs.py:attend"),
        ("function", "theirs.py:self_attention"),
        ("instance", "theirs.py:made"),
    )


def test_without_anything_like_attention(tmp_path):
    (tmp_path / "none.py").write_text("def helper(x):\n    return x\n")
    with pytest.raises(ValueError, match="nothing in it looks like attention; name it as .*none.py:Name"):
        load(str(tmp_path / "none.py"))


def test_a_missing_file_is_told_with_its_neighbours(file):
    with pytest.raises(ValueError, match="there is no file .*their.py; the folder holds theirs.py"):
        split(str(file.with_name("their.py")) + ":attend")


@pytest.mark.parametrize("named", ["theirs", "theirs:attend", "theirs.txt:attend", ":attend", "", "models/"])
def test_what_is_no_file_of_python_is_refused(named):
    with pytest.raises(ValueError, match='expected "path/to/file.py:Name" or "hf:DIR_OR_ID"'):
        split(named)


def test_relative_imports_of_a_package_hold(tmp_path):
    package = tmp_path / "pack" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package.parent / "parts.py").write_text("WIDTH = 13\n")
    (package / "attend.py").write_text("from ..parts import WIDTH\n\ndef attend(q, k, v):\n    return WIDTH\n")
    loaded = load(f"{package / 'attend.py'}:attend")
    assert loaded(1, 2, 3) == 13
    assert loaded.__module__ == "pack.inner.attend"


def test_neighbours_are_imported_as_a_script_would(tmp_path):
    (tmp_path / "neighbour_of_it.py").write_text("WIDTH = 17\n")
    (tmp_path / "theirs.py").write_text("from neighbour_of_it import WIDTH\n\ndef attend(q, k, v):\n    return WIDTH\n")
    assert load(f"{tmp_path / 'theirs.py'}:attend")(1, 2, 3) == 17


@pytest.mark.parametrize("name", ["types", "torch", "math", "with-dash"])
def test_any_name_of_a_file_will_do(tmp_path, name):
    """A file called as a module that Python needs takes nobody's place."""
    before = sys.modules.get(name)
    (tmp_path / f"{name}.py").write_text("import types\n\nassert types.FunctionType\n\n" + CODE)
    assert load(f"{tmp_path / name}.py:Config")().width == 5
    assert sys.modules.get(name) is before or name == "with-dash"


def test_a_name_that_reads_arguments_sees_its_own_path(tmp_path):
    (tmp_path / "theirs.py").write_text(
        "import sys\n\nSEEN = list(sys.argv)\n\ndef attend(q, k, v):\n    return SEEN\n"
    )
    assert load(f"{tmp_path / 'theirs.py'}:attend")(1, 2, 3) == [str(tmp_path / "theirs.py")]
