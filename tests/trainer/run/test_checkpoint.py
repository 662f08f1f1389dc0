"""Checkpoints that cannot be written: one line each, and the run goes on or stops as told."""

import errno
import os
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest

from mfu_jax.trainer.config.pyconfig import load
from mfu_jax.trainer.run.checkpoint import Checkpointer, CheckpointError


class Disk:
    """Instead of Orbax: a manager whose writes fail in the background while `full`."""

    full = False

    def __init__(self, folder: Path, options: Any) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._error: OSError | None = None

    def latest_step(self) -> int | None:
        return max((int(x.name) for x in self._folder.iterdir() if x.name.isdigit()), default=None)

    def save(self, step: int, args: Any) -> None:
        self.wait_until_finished()
        unfinished = self._folder / f"{step}.orbax-checkpoint-tmp"
        unfinished.mkdir()
        if Disk.full:
            self._error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            unfinished.rename(self._folder / str(step))

    def check_for_errors(self) -> None:
        if self._error:
            raise self._error

    wait_until_finished = close = check_for_errors


class Data:
    def get_state(self) -> dict[str, int]:
        return {}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> type[Disk]:
    monkeypatch.setattr(ocp, "CheckpointManager", Disk)
    monkeypatch.setattr(Disk, "full", False)
    return Disk


def checkpointer(folder: Path, *keys: str) -> Checkpointer:
    output = f"base_output_directory={folder}"
    return Checkpointer(load(["configs/base.yml", output, "enable_checkpointing=true", *keys]))


def save(checkpoints: Checkpointer, step: int) -> None:
    checkpoints.save(step, {}, Data())  # type: ignore[arg-type]


def left(folder: Path) -> set[str]:
    return {path.name for path in (folder / "default" / "checkpoints").iterdir()}


def test_training_goes_on_without_a_checkpoint_and_the_next_one_is_written(
    disk: type[Disk], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with checkpointer(tmp_path) as checkpoints:
        save(checkpoints, 10)
        disk.full = True
        save(checkpoints, 20)
        disk.full = False
        save(checkpoints, 30)
        assert left(tmp_path) == {"10", "30"}
    (line,) = caplog.messages
    for words in ("checkpoint of step 20", "No space left on device", "step 10 is kept", "goes on"):
        assert words in line


def test_a_failure_in_the_background_is_reported_at_the_next_step(
    disk: type[Disk], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk.full = True
    checkpoints = checkpointer(tmp_path)
    checkpoints.check()
    save(checkpoints, 20)
    checkpoints.check()
    checkpoints.check()
    assert len(caplog.messages) == 1
    assert "there is no earlier one" in caplog.text
    assert left(tmp_path) == set()  # it takes no space


@pytest.mark.full
def test_a_run_that_ends_without_its_last_checkpoint_is_an_error(
    disk: type[Disk], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk.full = True
    checkpoints = checkpointer(tmp_path)
    save(checkpoints, 20)
    with pytest.raises(CheckpointError, match="step 20"):
        checkpoints.close()
    assert not caplog.messages


@pytest.mark.full
def test_another_error_on_the_way_out_is_not_hidden_by_a_missing_checkpoint(
    disk: type[Disk], tmp_path: Path
) -> None:
    disk.full = True
    checkpoints = checkpointer(tmp_path)
    save(checkpoints, 20)
    with pytest.raises(KeyError), checkpoints:
        raise KeyError
    assert checkpoints.failure is not None


def test_training_stops_if_told_so(disk: type[Disk], tmp_path: Path) -> None:
    disk.full = True
    checkpoints = checkpointer(tmp_path, "on_checkpoint_error=stop")
    save(checkpoints, 20)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoints.check()


def test_one_of_several_processes_always_stops(
    disk: type[Disk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    disk.full = True
    checkpoints = checkpointer(tmp_path)
    save(checkpoints, 20)
    with pytest.raises(CheckpointError):
        checkpoints.check()


def test_what_a_killed_save_has_left_is_removed(disk: type[Disk], tmp_path: Path) -> None:
    folder = tmp_path / "default" / "checkpoints"
    (folder / "20.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (folder / "10").mkdir()
    checkpointer(tmp_path).close()
    assert left(tmp_path) == {"10"}
