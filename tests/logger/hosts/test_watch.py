"""Processes that exchange how their steps go; here they are loggers with a clock of their own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.hosts.exchange import Exchange, FolderExchange, ProcessPlace, StoreExchange
from mfu_jax.logger.hosts.report import HostReport
from mfu_jax.logger.hosts.statistics import LoopStatistics
from mfu_jax.logger.hosts.watch import HostWatch
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.timing.timed_step import LoopTimes, TimedStep
from mfu_jax.sinks import StepRecord
from mfu_jax.util.failsafe import Boundary
from tests.campaigns.stragglers import PROCESSES, draw, run_job
from tests.support.fake_device import FakeClock, FakeDevice, FakeWatcher
from tests.support.paths import ROOT
from tests.support.work import HANG_SECONDS


class Store:
    """JAX's key-value store."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite
        self.values[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [item for item in list(self.values.items()) if item[0].startswith(f"{key}/")]


def timed(step: int, data: float, slack: float, seconds: float = 0.5) -> TimedStep:
    """A step whose loop took 10 ms, and so long for data."""
    made = TimedStep()
    made.step, made.metrics = step, {}
    made.seconds = seconds
    made.loop = LoopTimes(data + 0.01, data, 0.0, slack, 0.0)
    return made


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def watches(count: int, exchange: Exchange, folder: Path) -> list[HostWatch]:
    config = LoggerConfig(host_log_period=10, hosts_folder=str(folder / "metrics.jsonl.hosts"))

    def placed(process: int) -> HostWatch:
        place = ProcessPlace(process, count, exchange, False)
        return HostWatch(config, Boundary(), place=lambda _: place)

    return [placed(process) for process in range(count)]


@pytest.mark.parametrize("kind", ["store", "folder"])
def test_the_slow_process_is_in_process_0s_record_and_in_the_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = StoreExchange(Store(), "0") if kind == "store" else FolderExchange(tmp_path / "x")
    monkeypatch.chdir(tmp_path)
    processes = watches(3, exchange, Path())
    monkeypatch.chdir("/")  # the loop may change its folder
    record = StepRecord(step=30, unix_seconds=0.0, scalars={"learning/loss": 1.0}, log_period=100)
    found = []
    for step in range(31):
        for process, watch in enumerate(processes):
            slow = process == 2
            watch.add(timed(step, 0.4 if slow else 0.001, 0.0 if slow else 0.4), "step")
        if step and step % 10 == 0:
            wait_until(lambda: processes[0]._view is not None and processes[0]._view.step == step)  # noqa: B023
        found.append(processes[0].annotate(record))
    wait_until((tmp_path / "metrics.jsonl.hosts.json").exists)
    for watch in processes:
        watch.close()
    (named,) = [r for r in found if r.notes]
    assert "process 2" in named.notes[0]
    assert (
        "0.400 s of a step of 0.500 s in the wait for data; the median host 0.000 s"
        in named.notes[0]
    )
    assert named.is_logged
    assert named.scalars["learning/loss"] == 1.0
    assert named.scalars["hosts/slowest"] == 2
    assert processes[1].annotate(record) is record  # process 0 alone tells
    written = json.loads((tmp_path / "metrics.jsonl.hosts.json").read_text())
    assert [host["process"] for host in written["hosts"]] == [0, 1, 2]
    assert written["slow"][0]["cause"] == "data"
    assert written["hosts"][2]["data"] == pytest.approx(0.4)


def test_a_process_that_is_not_heard_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.hosts.watch.TIMEOUT_SECONDS", 0.1)
    first, _, third = watches(3, StoreExchange(Store(), "0"), tmp_path)
    for step in range(11):
        for watch in (first, third):
            watch.add(timed(step, 0.001, 0.4), "step")
    wait_until(lambda: first._view is not None)
    assert first._view is not None
    assert first._view.missing == (1,)
    first.close()
    third.close()


def test_a_store_that_fails_is_one_warning_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Store):
        def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
            raise RuntimeError("UNAVAILABLE: connection reset")

    first, _ = watches(2, StoreExchange(Broken(), "0"), tmp_path)
    for step in range(41):
        first.add(timed(step, 0.001, 0.4), "step")
    wait_until(lambda: len(caplog.messages) > 0)
    first.close()
    (message,) = caplog.messages
    assert message.startswith("slow and missing hosts are not named: the processes' store failed (")
    assert "UNAVAILABLE: connection reset" in message


def test_a_hang_names_the_process_that_is_behind(tmp_path: Path) -> None:
    clock = FakeClock()
    first, second = watches(2, StoreExchange(Store(), "0"), tmp_path)
    first._monotonic = clock.monotonic
    place = first._find_place(first._config)
    assert place is not None
    for watch, step in ((second, 17), (first, 18)):
        watch._loop.last_step = step
        watch._last = HostReport(process=watch is second, step=step)
        watch._beat(ProcessPlace(int(watch is second), 2, place.exchange, False))
    assert first.who_is_silent() == "process 1 has completed step 17, others step 18"
    clock.advance(60.0)
    first._loop.last_step = 19  # process 0 goes on
    first._beat(place)
    assert first.who_is_silent() == (
        "process 1 is silent for 60 s; process 1 has completed step 17, others step 19"
    )
    assert second.who_is_silent() == ""  # process 0 alone reads


def test_means_are_over_measured_steps_and_lateness_only_without_lead() -> None:
    loop = LoopStatistics()
    loop.add(timed(0, 9.0, 9.0), "compile")
    loop.add(timed(1, 0.2, 0.3), "step")
    loop.add(timed(2, 0.4, 0.0), "step")
    means = loop.take()
    assert (means["steps"], means["step"]) == (2, 2)
    assert means["data"] == pytest.approx((0.2 + 0.4) / 2)
    assert means["late_data"] == pytest.approx(0.4 / 2)
    assert means["slack"] == pytest.approx(0.3 / 2)
    assert loop.take() == {"steps": 0, "step": 2}


def test_the_timer_tells_what_the_loop_did() -> None:
    clock = FakeClock()
    device = FakeDevice(clock)
    steps: list[TimedStep] = []
    with MetricLogger(
        clock=clock.wall, monotonic=clock.monotonic, watcher=FakeWatcher(clock), sinks=[]
    ) as logger:
        put = logger._pipeline.put
        logger._pipeline.put = lambda item: (  # type: ignore[func-returns-value]
            steps.append(item) if isinstance(item, TimedStep) else None,
            put(item),
        )
        for step in range(5):
            clock.advance(0.5)  # Python
            with logger.waiting("data"):
                clock.advance(0.25)
            logger.begin_call()
            clock.advance(0.125)  # dispatch
            logger.record(step, device.run(2.0))
            if step == 2:
                with logger.pause("eval"):
                    clock.advance(10.0)
    # The collector's own time is no matter here.
    seen = [step.loop and step.loop._replace(gc_seconds=0.0) for step in steps]
    # Step 0 is dispatched at 0.875 and takes 2 s; the loop comes back for it at 1.75.
    told = LoopTimes(0.875, 0.25, 0.125, 2.875 - 1.75, 0.0)
    assert seen[:4] == [told, told, None, told]  # none of step 2, which the pause has ended


@pytest.mark.full
def test_a_slow_process_is_named_in_a_job_of_real_ones() -> None:
    """A sample of `tests.campaigns.stragglers`; all its kinds are run by hand."""
    plants = [(kind, victim) for kind, victim in draw(14, 3) if kind in ("data", "before")][:2]
    assert PROCESSES == 4
    for episode in run_job(plants):
        assert episode.is_right, episode


@pytest.mark.full
def test_one_process_exchanges_nothing() -> None:
    source = (
        "import threading\n"
        "from mfu_jax import MetricLogger\n"
        "with MetricLogger(sinks=[], host_log_period=1) as logger:\n"
        "    for step in range(5): logger.record(step, {'loss': 1.0})\n"
        "    logger.flush()\n"
        "    assert not any('hosts' in t.name for t in threading.enumerate())\n"
    )
    environment: dict[str, Any] = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", source], check=True, cwd=ROOT, env=environment)
