from __future__ import annotations

import os
import stat

import pytest
from looks import make

from saccade.viewer import check_target, draw_figure, render_report, write_whole


def test_what_saccade_made_may_be_replaced_and_nothing_else(tmp_path):
    ours, theirs = tmp_path / "report.html", tmp_path / "notes.html"
    write_whole(check_target(ours), render_report(make(), "1").encode())
    theirs.write_text("<html>my notes")
    assert check_target(ours) == ours.resolve()
    with pytest.raises(ValueError, match=r"notes.html exists and was not made by Saccade; --force replaces it"):
        check_target(theirs)
    assert check_target(theirs, force=True) == theirs.resolve()
    assert theirs.read_text() == "<html>my notes"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_figures_are_recognised_as_ours(tmp_path, kind):
    pytest.importorskip("matplotlib")
    target = tmp_path / f"map.{kind}"
    write_whole(check_target(target), draw_figure(make(), kind))
    assert check_target(target) == target.resolve()


def test_folders_devices_and_missing_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        check_target(tmp_path / "no" / "report.html")
    with pytest.raises(ValueError, match="it is a folder"):
        check_target(tmp_path, force=True)
    with pytest.raises(ValueError, match="not an ordinary file"):
        check_target("/dev/null", force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="does not exist"):
        check_target(tmp_path / "file" / "report.html")


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ValueError, match="cannot write"):
            check_target(tmp_path / "report.html")
    finally:
        tmp_path.chmod(0o700)


def test_nothing_is_left_behind_and_a_link_is_followed(tmp_path):
    target, link = tmp_path / "real.html", tmp_path / "link.html"
    target.write_bytes(b'<meta name="generator" content="Saccade 0">')
    target.chmod(0o640)
    link.symlink_to(target)
    write_whole(check_target(link), b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.html", "real.html"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "report.html"
    target.write_text("old")

    def full(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(ValueError, match="No space left on device"):
        write_whole(target, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"] and target.read_text() == "old"
