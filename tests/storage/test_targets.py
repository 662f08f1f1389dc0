"""Spools of object stores: whole files, uploaded at flushes and by a clock; local locks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.errors import UserError
from mfu_jax.storage.addresses import Address, filesystem_of
from mfu_jax.storage.targets import (
    SpooledTarget,
    check_whole,
    file_target,
    folder_target,
    write_whole,
)

fsspec = pytest.importorskip("fsspec")
_number = itertools.count()


@pytest.fixture
def address() -> Address:
    return Address(f"memory://targets/{next(_number)}/metrics.jsonl")


@pytest.fixture
def spools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path
    monkeypatch.undo()


def stored(address: Address) -> dict[str, bytes]:
    store = fsspec.filesystem("memory")
    folder = address.parent.removeprefix("memory:/")
    return {name.removeprefix(f"{folder}/"): store.cat(name) for name in store.find(folder)}


class Broken:
    """A file system that fails as long as `is_down`."""

    def __init__(self, store: Any) -> None:
        self.store, self.is_down, self.uploads = store, True, 0

    def put_file(self, *arguments: Any) -> None:
        self.uploads += 1
        if self.is_down:
            raise OSError("503 service unavailable\nwith details")
        self.store.put_file(*arguments)


def test_files_are_uploaded_at_a_flush_and_the_spool_is_removed(
    address: Address, spools: Path
) -> None:
    target = file_target(address, "metrics_file", keep=False)
    target.path.write_bytes(b"one\n")
    assert stored(address) == {}
    target.flush()
    assert stored(address) == {"metrics.jsonl": b"one\n"}
    target.path.with_name("metrics.jsonl.setup.json").write_bytes(b"{}")
    target.close()
    assert stored(address) == {"metrics.jsonl": b"one\n", "metrics.jsonl.setup.json": b"{}"}
    assert list(spools.iterdir()) == []


def test_uploads_come_by_a_clock_and_take_a_twentieth_of_it(address: Address) -> None:
    now = 0.0
    target = SpooledTarget(
        address, "metrics_file", is_folder=False, keep=False, monotonic=lambda: now
    )

    class Slow(Broken):
        def put_file(self, *arguments: Any) -> None:
            nonlocal now
            self.uploads += 1
            now += 10.0

    target._files = slow = Slow(None)
    uploads = []
    for second in range(0, 400, 10):
        now = max(now, float(second))
        target.path.write_bytes(b"x" * (second + 1))
        target.wrote()
        uploads.append(slow.uploads)
    # The first after 60 s; it took 10 s, so the second comes 190 s after it ended, at 260 s.
    assert [uploads.index(n) * 10 for n in (1, 2)] == [60, 260]
    target.abandon()


def test_what_did_not_change_is_not_uploaded_again(address: Address) -> None:
    target = SpooledTarget(address, "metrics_file", is_folder=False, keep=False)
    target._files = counted = Broken(target._files)
    counted.is_down = False
    target.path.write_bytes(b"one\n")
    target.flush()
    target.flush()
    assert counted.uploads == 1
    target.close()


def test_a_store_that_is_down_costs_a_warning_and_nothing_else(
    address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    target = SpooledTarget(
        address, "metrics_file", is_folder=False, keep=False, monotonic=lambda: now
    )
    target._files = broken = Broken(target._files)
    target.path.write_bytes(b"one\n")
    for now in (100.0, 200.0):  # noqa: B007 (the clock)
        target.wrote()
    (warning,) = caplog.records
    assert "cannot be uploaded (503 service unavailable); it is kept in" in warning.getMessage()
    broken.is_down = False
    target.close()
    assert stored(address) == {"metrics.jsonl": b"one\n"}


def test_what_could_not_be_uploaded_in_the_end_is_kept(address: Address, spools: Path) -> None:
    target = SpooledTarget(address, "metrics_file", is_folder=False, keep=False)
    target._files = Broken(target._files)
    target.path.write_bytes(b"one\n")
    with pytest.raises(OSError, match=r"(?s)kept in .*mfu_jax-spool-.*copy it from there"):
        target.close()
    (spool,) = spools.iterdir()
    assert (spool / "metrics.jsonl").read_bytes() == b"one\n"


def test_an_earlier_file_is_continued_or_set_aside(
    address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file(address, b"old\n")
    target = file_target(address, "metrics_file", keep=True)
    assert target.path.read_bytes() == b"old\n"
    target.close()
    for number in (1, 2):
        target = file_target(address, "metrics_file", keep=False)
        assert not target.path.exists()
        (warning,) = caplog.messages
        assert warning == f"{address} held an earlier run, which is now {address}.previous{number}"
        caplog.clear()
        target.path.write_bytes(b"new\n")
        target.close()
    assert stored(address) == {
        "metrics.jsonl": b"new\n",
        "metrics.jsonl.previous1": b"old\n",
        "metrics.jsonl.previous2": b"new\n",
    }


def test_a_store_that_cannot_be_written_is_refused_at_the_start(
    address: Address, spools: Path
) -> None:
    target = file_target(address, "metrics_file", keep=False)
    assert isinstance(target, SpooledTarget)
    target._files = Broken(target._files)
    with (
        pytest.raises(UserError, match=r"cannot be read or written \(503 service unavailable\)"),
        target.opening(),
    ):
        target.path.write_bytes(b"")
    assert list(spools.iterdir()) == []


def test_opening_that_fails_frees_the_lock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def open_it() -> None:
        target = folder_target(tmp_path, "tensorboard_dir", keep=True, ending="", lock="lock")
        assert not caplog.messages
        with target.opening():
            raise UserError("another problem")

    for _ in range(2):
        with pytest.raises(UserError, match="another problem"):
            open_it()
    assert list(tmp_path.iterdir()) == []
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_page_never_replaces_a_runs_records(tmp_path: Path) -> None:
    metrics, log = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.events.0.jsonl"
    for file in (metrics, log):
        file.write_text("records")
    for file in (metrics, log):
        with pytest.raises(UserError, match="holds a run's records"):
            write_whole(file, "--html", b"page")
        assert file.read_text() == "records"
    link = tmp_path / "link.jsonl"
    link.symlink_to(metrics)
    with pytest.raises(UserError, match="holds a run's records"):
        write_whole(link, "--html", b"page")
    assert metrics.read_text() == "records"
    for file in (metrics, log, link, metrics / "page.html", tmp_path):
        with pytest.raises(UserError, match=r"holds a run's records|cannot be written"):
            check_whole(file, "--html")
    for name in ("other.jsonl", "page.events.html"):
        other = tmp_path / name
        check_whole(other, "--html")
        other.write_text("no run's")
        write_whole(other, "FILE", b"new")
        assert other.read_bytes() == b"new"


def test_a_page_never_replaces_a_runs_records_in_a_store(address: Address) -> None:
    write_whole(address, "FILE", b"records")
    write_whole(address, "FILE", b"new")  # no run log lies beside it
    files, log = filesystem_of(address, "FILE")[0], f"{address}.events.0.jsonl"
    files.pipe_file(log, b"log")
    for name in (address, log):
        with pytest.raises(UserError, match="holds a run's records"):
            write_whole(name, "--html", b"page")
    assert sorted(files.cat(f.removeprefix("memory:/")) for f in (address, log)) == [b"log", b"new"]
