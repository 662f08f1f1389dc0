"""Files under kills, full disks, and other programs that move, delete or replace them."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.storage import files
from mfu_jax.storage.files import (
    AppendOnlyFile,
    local_path,
    remove_stale,
    replace_file,
    set_aside,
)


def test_a_deleted_folder_comes_back_with_all_that_was_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run" / "metrics"
    path.parent.mkdir()
    file = AppendOnlyFile(path, "metrics_file")
    file.append(b"one\n")
    shutil.rmtree(path.parent)
    file.append(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    (warning,) = caplog.records
    assert "was deleted: it is written again, with all 4 bytes" in warning.getMessage()
    file.append(b"three\n")
    assert len(caplog.records) == 1
    file.close()


def test_a_deletion_is_noticed_by_a_flush_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = AppendOnlyFile(tmp_path / "metrics", "metrics_file")
    file.append(b"one\n")
    (tmp_path / "metrics").unlink()
    file.sync()
    assert (tmp_path / "metrics").read_bytes() == b"one\n"
    assert len(caplog.records) == 1
    file.close()


def test_a_renamed_file_is_started_anew_with_its_header(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics"
    file = AppendOnlyFile(path, "metrics_file", header=b"step\n")
    file.append(b"1\n")
    path.rename(tmp_path / "rotated")
    file.append(b"2\n")
    file.append(b"3\n")
    assert (tmp_path / "rotated").read_bytes() == b"step\n1\n"
    assert path.read_bytes() == b"step\n2\n3\n"
    (warning,) = caplog.records
    assert "was moved or replaced" in warning.getMessage()
    file.close()


def test_a_file_that_another_program_cuts_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics"
    file = AppendOnlyFile(path, "metrics_file")
    file.append(b"one\n")
    path.write_bytes(b"")
    file.append(b"two\n")
    assert path.read_bytes() == b"two\n"
    assert "was cut from 4 to 0 bytes" in caplog.text
    file.close()


def test_a_file_that_became_a_fifo_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    file = AppendOnlyFile(path, "metrics_file")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="it is a FIFO"):
        file.append(b"one\n")
    path.unlink()
    file.append(b"one\n")
    assert path.read_bytes() == b"one\n"
    file.close()


def test_a_torn_piece_that_could_not_be_taken_back_is_cut_off_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics"
    file = AppendOnlyFile(path, "metrics_file")
    file.append(b"one\n")
    real = file._file

    class BadDisk:
        def write(self, data: bytes) -> int:
            real.write(data[:2])
            raise OSError(5, "Input/output error")

        def fileno(self) -> int:
            return real.fileno()

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(file, "_file", BadDisk())
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(OSError, match="Input/output"):
            file.append(b"two\n")
    assert path.read_bytes() == b"one\ntw"
    file.append(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    file.close()


@pytest.mark.parametrize(
    ("fsync_seconds", "expected"),
    [(0.0, [0.0, 10.0, 25.0, 31.0, 61.0]), (30.0, [31.0, 61.0]), (-1.0, [])],
)
def test_how_often_the_disk_is_told_to_keep_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fsync_seconds: float,
    expected: list[float],
) -> None:
    now, synced = 0.0, []
    file = AppendOnlyFile(
        tmp_path / "metrics", "metrics_file", fsync_seconds=fsync_seconds, monotonic=lambda: now
    )
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(now))
    for now in (0.0, 10.0, 25.0, 31.0, 61.0):  # noqa: B007 (the clock)
        file.append(b"x")
    assert synced == expected
    file.close()


def test_a_disk_that_refuses_to_sync_costs_a_warning_and_no_piece_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = AppendOnlyFile(tmp_path / "metrics", "metrics_file", fsync_seconds=0.0)

    def refuse(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        file.append(b"one\n")
        file.append(b"two\n")
        with pytest.raises(OSError, match="Input/output"):
            file.sync()
    assert (tmp_path / "metrics").read_bytes() == b"one\ntwo\n"
    (warning,) = caplog.records
    assert "is written, but not on disk" in warning.getMessage()
    file.close()


def test_links_stay_and_their_targets_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, link = tmp_path / "disk" / "real", tmp_path / "link"
    target.parent.mkdir()
    target.write_bytes(b"old")
    link.symlink_to(target)
    replace_file(link, [b"new"])
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    set_aside(link)
    assert str(tmp_path / "disk" / "real.previous1") in caplog.text
    assert link.is_symlink()
    assert not target.exists()
    file = AppendOnlyFile(local_path(link, "metrics_file"), "metrics_file")  # the link dangles
    file.append(b"one\n")
    assert target.read_bytes() == b"one\n"
    file.close()


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    path.write_bytes(b"old")
    path.chmod(0o640)
    replace_file(path, [b"new"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder"])
def test_what_is_no_file_is_refused_and_left_as_it_is(tmp_path: Path, kind: str) -> None:
    path = make_special(tmp_path, kind)
    before = path.stat()
    with pytest.raises(UserError, match=f"it is a {kind}"):
        local_path(path, "metrics_file")
    with pytest.raises(OSError, match=f"it is a {kind}"):
        replace_file(path, [b"new"])
    after = path.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert not list(tmp_path.glob("*.tmp"))


def make_special(folder: Path, kind: str) -> Path:
    path = folder / "x"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))  # its name may have 108 bytes
    elif kind == "device":
        return Path("/dev/full")
    else:
        path.mkdir()
    return path


def test_names_without_room_for_the_files_beside_them_are_refused(tmp_path: Path) -> None:
    longest = tmp_path / ("é" * 115)  # 230 bytes
    replace_file(local_path(longest, "x").with_name(f"{longest.name}.summary.json"), [b""])
    with pytest.raises(UserError, match="has a name of 232 bytes; expected at most 230"):
        local_path(tmp_path / ("é" * 116), "metrics_file")


def test_a_path_beyond_the_systems_limit_is_one_short_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written") as raised:
        local_path(tmp_path / ("d/" * 3000), "metrics_file")
    assert len(str(raised.value)) < 700


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        AppendOnlyFile(local_path(tmp_path / "metrics", "x"), "x")


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    names = {
        "m.jsonl.123.tmp": False,
        "m.jsonl.summary.json.4.tmp": False,
        "m.jsonl2.5.tmp": True,
        "m.jsonl.tmp": True,
        "m.jsonl.previous1": True,
        "mine.tmp": True,
    }
    for name in names:
        (tmp_path / name).touch()
    remove_stale(tmp_path / "m.jsonl")
    assert {name: (tmp_path / name).exists() for name in names} == names


def test_file_systems_without_stable_inodes_are_not_reported_as_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files.os.path, "samestat", lambda a, b: False)
    file = AppendOnlyFile(tmp_path / "metrics", "metrics_file")
    file.append(b"one\n")
    file.append(b"two\n")
    assert (tmp_path / "metrics").read_bytes() == b"one\ntwo\n"
    assert not caplog.records
    file.close()
