"""Processes that exchange how their steps go; here they are loggers with a clock of their own."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mfu_jax.logger.hosts.findings import HostReport, LoopStatistics
from mfu_jax.logger.hosts.monitor import HostMonitor, JobMember
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


def monitors(
    count: int, store: Store, *, monotonic: Callable[[], float] = time.monotonic, period: int = 10
) -> tuple[list[HostMonitor], list[Mapping[str, Any]]]:
    """Those of a job's processes, and what they publish."""
    published: list[Mapping[str, Any]] = []

    def of(process: int) -> HostMonitor:
        job = JobMember(process, count, False, store, "hosts/0")
        return HostMonitor(
            period, Boundary(), published.append, find_job=lambda: job, monotonic=monotonic
        )

    return [of(process) for process in range(count)], published


def record_of(step: int, log_period: int = 1000) -> StepRecord:
    scalars = {"learning/loss": 1.0}
    return StepRecord(step=step, unix_seconds=0.0, scalars=scalars, log_period=log_period)


def test_the_slow_process_is_in_process_0s_record_and_in_the_log() -> None:
    processes, published = monitors(3, Store())
    found = []
    for step in range(32):
        for process, monitor in enumerate(processes):
            slow = process == 2
            timing = timed(step, 0.4 if slow else 0.001, 0.0 if slow else 0.4)
            found.append((process, monitor.on_record(timing, record_of(step))))
        if step and step % 10 == 0:
            wait_until(lambda: len(published) == step // 10)  # noqa: B023
    for monitor in processes:
        monitor.close()
    ((process, named),) = [(process, r) for process, r in found if r.notes]
    assert process == 0  # it alone tells
    (note,) = named.notes
    assert "process 2" in note
    assert "0.400 s of a step of 0.500 s in the wait for data; the median host 0.000 s" in note
    assert named.is_logged
    assert named.scalars["learning/loss"] == 1.0
    assert named.scalars["hosts/slowest"] == 2
    written = json.loads(json.dumps(published[-1]))
    assert [host["process"] for host in written["hosts"]] == [0, 1, 2]
    assert written["slow"][0]["cause"] == "data"
    assert written["hosts"][2]["data"] == pytest.approx(0.4)


def test_numbers_wait_for_a_record_that_goes_to_all_sinks() -> None:
    (first, second), published = monitors(2, Store())
    for step in range(11):
        for monitor in (first, second):
            monitor.on_record(timed(step, 0.001, 0.4), record_of(step))
    wait_until(lambda: bool(published))
    unlogged = record_of(11)
    assert first.on_record(timed(11, 0.001, 0.4), unlogged) is unlogged
    logged = record_of(12, log_period=1)
    told = first.on_record(timed(12, 0.001, 0.4), logged)
    assert (told.scalars["hosts/heard"], told.scalars["hosts/slow"]) == (2, 0)
    assert first.on_record(timed(13, 0.001, 0.4), logged) is logged  # once
    for monitor in (first, second):
        monitor.close()


def test_a_process_that_is_not_heard_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mfu_jax.logger.hosts.monitor.TIMEOUT_SECONDS", 0.1)
    (first, _, third), published = monitors(3, Store())
    for step in range(11):
        for monitor in (first, third):
            monitor.on_record(timed(step, 0.001, 0.4), record_of(step))
    wait_until(lambda: bool(published))
    assert published[0]["missing"] == [1]
    first.close()
    third.close()


def test_what_another_version_reports_is_as_if_it_was_not_heard() -> None:
    store = Store()
    store.values |= {"hosts/0/1": '{"process": 1, "speed": 3}', "hosts/0/2": "[]", "hosts/0/3": ""}
    (first, *_), _ = monitors(4, store)
    job = first.find_job()
    assert job is not None
    report = HostReport(process=0, host="node0", step=7, cpu=1.25, slack=0.5)
    first._put(job, report)
    (back,) = first._hear(job)
    assert dataclasses.replace(back, unix_seconds=0.0) == report
    assert back.unix_seconds == pytest.approx(time.time(), abs=HANG_SECONDS)


def test_a_store_that_fails_is_one_warning_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Store):
        def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
            raise RuntimeError("UNAVAILABLE: connection reset")

    (first, _), _ = monitors(2, Broken())
    for step in range(41):
        first.on_record(timed(step, 0.001, 0.4), record_of(step))
    wait_until(lambda: len(caplog.messages) > 0)
    first.close()
    (message,) = caplog.messages
    assert message.startswith("slow and missing hosts are not named: the processes' store failed (")
    assert "UNAVAILABLE: connection reset" in message


def test_a_hang_names_the_process_that_is_behind() -> None:
    clock = FakeClock()
    (first, second), _ = monitors(2, Store(), monotonic=clock.monotonic)

    def beat(monitor: HostMonitor, process: int, step: int) -> None:
        job = monitor.find_job()
        assert job is not None
        monitor._put(job, HostReport(process=process, step=step))
        if process == 0:
            monitor._hear(job)

    beat(second, 1, 17)
    beat(first, 0, 18)
    assert first.who_is_silent() == "process 1 has completed step 17, others step 18"
    clock.advance(60.0)
    beat(first, 0, 19)  # process 0 goes on
    assert first.who_is_silent() == (
        "process 1 is silent for 60 s; process 1 has completed step 17, others step 19"
    )
    assert second.who_is_silent() == ""  # process 0 alone reads


def test_a_sign_of_life_has_the_present_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mfu_jax.logger.hosts.monitor.HEARTBEAT_SECONDS", 0.0)
    (first, second), published = monitors(2, Store(), period=1000)
    for step in range(5):
        second.on_record(timed(step, 0.001, 0.4), record_of(step))
        first.on_record(timed(step, 0.001, 0.4), record_of(step))
    first.on_record(timed(5, 0.001, 0.4), record_of(5))
    wait_until(lambda: "process 1 has completed step 4, others step 5" in first.who_is_silent())
    first.close()
    second.close()
    assert not published


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
    seen = [step.loop and LoopTimes._make(step.loop)._replace(gc_seconds=0.0) for step in steps]
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
