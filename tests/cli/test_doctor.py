"""`saccade doctor`: what it finds broken, what it finds missing, and the exit status that follows."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
import torch

from saccade import cli
from saccade.cli._parts import _installation
from saccade.operator._backends.native import _kernels

native = pytest.mark.skipif(_kernels.module is None, reason="this installation has no native kernels")


def doctor(capsys, *arguments):
    status = cli.main(["doctor", *arguments])
    out, err = capsys.readouterr()
    assert err == ""
    return status, out


def as_json(capsys):
    status, out = doctor(capsys, "--json")
    return status, json.loads(out)


def lines_of(out):
    return dict(line.split(maxsplit=1) for line in out.splitlines())


def test_an_installation_that_works(capsys):
    status, report = as_json(capsys)
    assert (status, report["broken"]) == (0, [])
    assert report["packages"]["torch"] == torch.__version__
    assert report["threads"] == torch.get_num_threads()
    status, out = doctor(capsys)
    assert status == 0
    assert lines_of(out)["result"] == "no problem found"


@native
def test_kernels_that_compute_something_else_are_broken(capsys, monkeypatch):
    """Nothing else compares the kernels of a user's machine with the reference."""
    run = _kernels.module.forward

    def wrong(shared, query, key, value, out, lse):
        return run(shared, query, key, key, out, lse)

    monkeypatch.setattr(_kernels.module, "forward", wrong)
    status, out = doctor(capsys)
    assert status == 1
    assert ": please report it" in lines_of(out)["broken"]


@native
def test_nan_is_broken(capsys, monkeypatch):
    monkeypatch.setattr(_installation, "self_check", lambda: float("nan"))
    assert doctor(capsys)[0] == 1


def test_kernels_that_cannot_be_loaded_are_broken_and_absent_ones_are_not(capsys, monkeypatch):
    monkeypatch.setattr(_kernels, "module", None)
    monkeypatch.setattr(_kernels, "missing", "the native build is broken: libmissing.so: cannot open")
    status, report = as_json(capsys)
    assert (status, report["broken"]) == (1, ["the native build is broken: libmissing.so: cannot open"])
    monkeypatch.setattr(_kernels, "missing", "this installation has no native build")
    status, out = doctor(capsys)
    assert status == 0
    assert lines_of(out)["kernels"].startswith("none: this installation has no native build")


REQUIREMENTS = [
    "numpy>=1.26",
    'pytest>=1.0; extra == "plot"',
    'torch>=2.9999; extra == "plot"',
    'no-such-package>=3.1; extra == "hf"',
    'saccade[hf,plot]; extra == "study"',
    'saccade[hf]; extra == "all"',
]


def test_what_extras_lack_and_the_command_that_adds_it(capsys, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIREMENTS)
    status, report = as_json(capsys)
    assert status == 0
    old = f"torch>=2.9999 (found {importlib.metadata.version('torch')})"
    missing = {name: extra["missing"] for name, extra in report["extras"].items()}
    assert missing == {
        "hf": ["no-such-package>=3.1"],
        "plot": [old],
        "study": ["no-such-package>=3.1", old],
    }
    assert report["extras"]["hf"]["command"].startswith('pip install "no-such-package>=3.1"')
    assert lines_of(doctor(capsys)[1])["[hf]"].startswith("missing no-such-package>=3.1; pip install")


def test_a_dependency_that_is_too_old_is_broken(capsys, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=99.1"])
    status, report = as_json(capsys)
    assert status == 1
    assert report["broken"] == [f"numpy>=99.1 (found {importlib.metadata.version('numpy')}) is needed"]


def test_a_lost_embedded_model_is_broken(capsys, monkeypatch):
    monkeypatch.setattr(_installation, "EMBEDDED_MODEL", ("config.json", "lost.safetensors"))
    status, report = as_json(capsys)
    assert (status, report["embedded_model"]) == (1, False)
    assert report["broken"] == ["the embedded model lacks lost.safetensors"]


@pytest.mark.parametrize(
    ("older", "newer"), [("2.9.1", "2.10"), ("2.10", "2.10.0+cpu"), ("1.26", "2.0.0rc1"), ("2", "2.0.1")]
)
def test_versions_are_compared_as_numbers(older, newer):
    assert _installation._release(older) < _installation._release(newer)


def test_every_requirement_of_the_project_is_read(capsys):
    """A form that the pattern does not know would end `saccade doctor` itself."""
    requirements = _installation._requirements()
    assert requirements is not None
    for extra in requirements:
        _installation.lacking(extra, requirements)
