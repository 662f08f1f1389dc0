"""What lies beside a metrics file: run logs, and what version 0.1.0 wrote in place of events."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from mfu_jax.runs.goodput.attempts import read_attempts_of
from mfu_jax.runs.metrics.run_files import metrics_file_of, read_beside
from mfu_jax.runs.report.setup import read_setup
from mfu_jax.storage.addresses import Address
from tests.support.written_logs import WrittenLog


def begun(folder: Path) -> WrittenLog:
    """Two processes of a run, each with its set-up."""
    log = WrittenLog(folder)
    for begin, devices in ((0.0, 8), (100.0, 16)):
        log.start(begin, begin + 1)
        values = {"devices": f"{devices} × H100 (1 processes)"}
        log.line("setup", begin + 2, values=values, texts={"config": "steps=100"})
        log.steps(begin + 12.0, 0, [1_000_000] * 10)
    return log


def test_the_last_setup_counts(tmp_path: Path) -> None:
    begun(tmp_path)
    setup = read_setup(str(tmp_path / "metrics.jsonl"))
    assert (setup.devices, setup.config) == (16, {"steps": "100"})
    assert set(read_beside(str(tmp_path / "metrics.jsonl"), "setup")) == {"values", "texts"}


def test_a_torn_line_or_the_log_of_another_process_is_no_setup(tmp_path: Path) -> None:
    log = begun(tmp_path)
    WrittenLog(tmp_path, process=1).line("setup", 500.0, values={"devices": "32 × H100"}, texts={})
    with log.path.open("a") as file:
        file.write('{"e":"setup","seq":9,"t":1700000900.0,"m":900.0,"values":{"dev')
    assert read_setup(str(tmp_path / "metrics.jsonl")).devices == 16


def test_the_log_of_an_overlapping_process_counts_if_it_is_later(tmp_path: Path) -> None:
    log = begun(tmp_path)
    log.path = tmp_path / "metrics.jsonl.events.0.2.jsonl"
    log.line("setup", 50.0, values={"devices": "32 × H100"}, texts={})
    assert read_setup(str(tmp_path / "metrics.jsonl")).devices == 16
    log.line("setup", 500.0, values={"devices": "32 × H100"}, texts={})
    assert read_setup(str(tmp_path / "metrics.jsonl")).devices == 32


def test_without_an_event_the_file_of_an_old_run_is_read(tmp_path: Path) -> None:
    WrittenLog(tmp_path).start(0.0, 1.0)
    old = {"values": {"devices": "4 × A100"}, "texts": {}}
    (tmp_path / "metrics.jsonl.setup.json").write_text(json.dumps(old))
    assert read_setup(str(tmp_path / "metrics.jsonl")).devices == 4
    begun(tmp_path)
    assert read_setup(str(tmp_path / "metrics.jsonl")).devices == 16


def test_a_line_in_the_middle_of_a_large_log_is_found(tmp_path: Path) -> None:
    log = begun(tmp_path)
    with log.path.open("a") as file:
        file.write("".join(f'{{"e":"steps","first":{n}}}\n' for n in range(100_000)))
    assert read_setup(str(tmp_path / "metrics.jsonl")).devices == 16


@pytest.mark.parametrize("beside", ["events.0", "events.3.2", "journal.0"])
def test_logs_beside_a_metrics_file_are_no_metrics(tmp_path: Path, beside: str) -> None:
    (tmp_path / f"train.jsonl.{beside}.jsonl").touch()
    assert metrics_file_of(tmp_path) == tmp_path / "train.jsonl"


def test_the_logs_of_an_object_store(tmp_path: Path) -> None:
    log = begun(tmp_path)
    files = fsspec.filesystem("memory")
    files.pipe("/run_files/metrics.jsonl.events.0.jsonl", log.path.read_bytes())
    address = Address("memory://run_files/metrics.jsonl")
    attempts, notes = read_attempts_of(address)
    assert ([attempt.last_step for attempt in attempts], notes) == ([9, 9], [])
    assert read_setup(address).devices == 16
