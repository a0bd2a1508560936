"""A file that is written takes its place whole, or not at all."""

from __future__ import annotations

import os

import pytest

from saccade.support._whole_file import whole_file


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_it_takes_its_place_only_at_the_end(tmp_path, stop):
    path = tmp_path / "file"
    with whole_file(path) as temporary:
        temporary.write_text("first")
        assert not path.exists()
    with pytest.raises(stop), whole_file(path) as temporary:
        temporary.write_text("sec")
        raise stop
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_permissions_are_those_of_the_file_that_was_there_and_of_any_new_file(tmp_path):
    path, other = tmp_path / "file", tmp_path / "other"
    other.touch()
    for permissions in (other.stat().st_mode, 0o100600):
        with whole_file(path) as temporary:
            temporary.write_text("text")
        assert path.stat().st_mode == permissions
        path.chmod(0o600)


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    with pytest.raises(OSError, match="missing.file") as raised, whole_file(tmp_path / "missing" / "file"):
        pass
    assert raised.value.filename == str(tmp_path / "missing" / "file")
