"""`ml-goodput-measurement`, fed our events, finds our times; it needs that package installed."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.runs.goodput.ml_goodput import events
from mfu_jax.runs.goodput.wall_clock import read_attempts, read_run
from tests.support.written_logs import WrittenLog

S = 1_000_000


class Log:
    """What the package reads instead of Google's cloud."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self._entries = entries

    def read_cloud_logging_entries(self, *_: Any, **__: Any) -> tuple[list[Any], Any]:
        now = datetime.datetime.now(datetime.UTC)
        return self._entries, (now, "last")


def write_run(folder: Path) -> None:
    """Three processes of steps of 1 s, with lost steps, an eval, a checkpoint and restores."""
    log = WrittenLog(folder)
    log.start(100.0, 101.0)
    log.span("eval", 130.0, 3.0)
    log.span("checkpoint", 143.0, 2.0)
    gaps = [10 * S, *19 * [0], 3 * S, *9 * [0], 2 * S, *14 * [0]]
    log.steps(160.0, 0, [S] * 45, gap_us=gaps)
    log.stop(160.0, "SIGTERM")
    for begin, first in ((170.0, 30), (230.0, 60)):
        log.start(begin, begin + 1)
        log.span("restore", begin + 2, 1.0)
        log.line("restored", begin + 3, step=first)
        log.steps(begin + 45, first, [S] * 40)
        log.stop(begin + 45, "SIGTERM" if first == 30 else "clean")


def test_its_goodput_is_ours(tmp_path: Path) -> None:
    goodput = pytest.importorskip("ml_goodput_measurement.src.goodput")
    write_run(tmp_path)
    run = read_run(tmp_path, now=2e9)
    log = Log(events("job", read_attempts(tmp_path)))
    calculator = goodput.GoodputCalculator("job", "log", log, cache_dir=str(tmp_path / "cache"))
    percentage, _, last = calculator.get_job_goodput()
    assert (percentage, last) == (pytest.approx(100 * (run.goodput or 0.0)), 99)
    details = calculator.get_job_goodput_details()
    assert details["total_elapsed_time"] == run.wall_seconds == 175
    assert details["disruption_count"] == run.restarts == 2
    assert list(details["goodput_time"].values()) == [run.time["train"]]
    badput = {kind.name: seconds for kind, seconds in details["badput_time"].items()}
    assert badput["CUSTOM_BADPUT_EVENTS"] == {"EVAL": run.time["eval"]}
    assert badput["UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"] == run.time["checkpoint"]
    assert badput["UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME"] == run.time["restore"]
    # It counts the restore in the preparation, too.
    assert badput["TRAINING_PREP"] == run.time["startup"] + run.time["restore"]
    # It knows steps by their starts only, so the last one before a restart is recovery to it.
    wasted = badput["WASTED_PROGRESS_FROM_DISRUPTION"]
    assert wasted == run.time["lost_steps"] - 2 * 1
    recovery = badput["INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"]
    assert recovery == run.time["down"] + 2 * 1
    assert badput["OTHER"] == 0


def test_every_event_is_in_order_and_of_the_job(tmp_path: Path) -> None:
    write_run(tmp_path)
    found = events("job", read_attempts(tmp_path))
    assert {event["job_name"] for event in found} == {"job"}
    times = [
        seconds
        for event in found
        for name, seconds in event.items()
        if name.endswith("_time") and not name.startswith(("checkpointer_", "wait_", "get_"))
    ]
    assert times == sorted(times)
    (save,) = [event for event in found if event.get("event_type") == "save"]
    assert (save["step"], save["checkpoint_manager_blocking_duration_secs"]) == (29, 2.0)
    restores = [event["step"] for event in found if event.get("event_type") == "restore"]
    assert restores == [30, 60]
