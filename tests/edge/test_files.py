"""Files that are the old one or the new one, never half of one."""

from __future__ import annotations

import errno
import os
import signal
import stat
from pathlib import Path

import pytest

from edge import files


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    files.write(path, b"new")

    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()

    files.write(tmp_path / "written", b"")

    assert stat.S_IMODE((tmp_path / "written").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(OSError, match="No space left"):
        files.write(path, b"new")

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_set_of_files_appears_together(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"

    with files.folder_lock(folder), files.replacing(folder, last="manifest") as scratch:
        (scratch / "model").write_text("m")
        (scratch / "manifest").write_text("x")
        assert not (folder / "model").exists()

    assert sorted(path.name for path in folder.iterdir()) == ["manifest", "model"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    stale = tmp_path / ".writing-killed"
    stale.mkdir()
    (stale / "model").write_text("half")

    with files.replacing(tmp_path, last="model") as scratch:
        (scratch / "model").write_text("whole")

    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_set_leaves_the_old_files(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "model").write_text("old")

    def interrupted() -> None:
        with files.replacing(tmp_path, last="manifest") as scratch:
            (scratch / "model").write_text("new")
            raise error

    with pytest.raises(error):
        interrupted()

    assert (tmp_path / "model").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_error_that_names_nothing_names_the_folder(tmp_path: Path) -> None:
    def fill() -> None:
        with files.replacing(tmp_path, last="a"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left on device") as caught:
        fill()

    assert caught.value.filename == str(tmp_path)


def test_a_file_that_cannot_be_replaced_leaves_every_other_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").mkdir()

    def replace_both() -> None:
        with files.replacing(tmp_path, last="a") as scratch:
            (scratch / "a").write_text("new")
            (scratch / "b").write_text("new")

    with pytest.raises(IsADirectoryError, match="b"):
        replace_both()

    assert (tmp_path / "a").read_text() == "old"


def test_the_manifest_is_moved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, target: (moved.append(path.name), replace(path, target))[1])

    with files.replacing(tmp_path, last="a-manifest") as scratch:
        for name in ("z", "a-manifest", "b"):
            (scratch / name).touch()

    assert moved == ["b", "z", "a-manifest"]


def test_ctrl_c_waits_until_all_files_are_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def interrupted_replace(path: Path, target: Path) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", interrupted_replace)

    def replace_both() -> None:
        with files.replacing(tmp_path, last="b") as scratch:
            (scratch / "a").touch()
            (scratch / "b").touch()

    with pytest.raises(KeyboardInterrupt):
        replace_both()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_second_holder_of_a_folder_is_refused(tmp_path: Path) -> None:
    def hold_again() -> None:
        with files.folder_lock(tmp_path):
            pass

    with files.folder_lock(tmp_path), pytest.raises(OSError, match="is being written by another process"):
        hold_again()
    hold_again()


def test_an_unwritable_place_is_named_by_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        files.write(tmp_path / "absent" / "a.json", b"")

    assert caught.value.filename == str(tmp_path / "absent" / "a.json")


def test_a_lock_leaves_no_empty_folder_that_was_not_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), files.folder_lock(tmp_path / "new"):
        raise RuntimeError

    assert not (tmp_path / "new").exists()


def test_a_lock_keeps_a_folder_that_was_filled(tmp_path: Path) -> None:
    with files.folder_lock(tmp_path / "new"):
        (tmp_path / "new" / "partial").touch()

    assert (tmp_path / "new" / "partial").exists()
