"""Each process reports how its steps are going; process 0 names the hosts that are slow or silent.

All of it happens on a separate thread, off the critical path and off the device: every
`host_log_period` steps each process writes one line to the key-value store of JAX's distributed
service, and process 0 reads them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from mfu_jax.errors import UserError, first_line
from mfu_jax.logger.alarm import Alarm
from mfu_jax.logger.hosts.findings import (
    NONE_YET,
    HostReport,
    LoopStatistics,
    ThreadStatistics,
    view_of,
)
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.run_log.monitor import Monitor, annotated
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.util.failsafe import Boundary
from mfu_jax.util.jax_internals import KeyValueStore, coordination_store

_log = logging.getLogger("mfu_jax")

HEARTBEAT_SECONDS = 10.0
# Process 0 waits this long for the others' reports of the same step.
TIMEOUT_SECONDS = 10.0
_TICK_SECONDS = 0.05
_POLL_SECONDS = 0.02  # at first, then longer and longer

_numbers = itertools.count()


class JobMember(NamedTuple):
    """A process's place among those of its job.

    Attributes:
        process: its number.
        processes: how many there are.
        is_on_cpu: the CPU is their device.
        store: the key-value store of JAX's distributed service, which lives in process 0.
        folder: the logger's keys in it, identical in each process.
    """

    process: int
    processes: int
    is_on_cpu: bool
    store: KeyValueStore
    folder: str


def _job_of_jax() -> JobMember | None:
    """That of this process; None if it is alone or has no store."""
    number = next(_numbers)  # every process makes its loggers in the same order
    count, process = jax.process_count(), jax.process_index()
    store, _ = coordination_store()
    if count > 1 and store is not None:
        is_on_cpu = jax.default_backend() == "cpu"
        return JobMember(process, count, is_on_cpu, store, f"mfu_jax/hosts/{number}")
    if count > 1 and process == 0:
        _log.warning(
            "slow and missing hosts are not named: the %d processes have no store\nhint: "
            "call jax.distributed.initialize() first",
            count,
        )
    return None


@dataclasses.dataclass(eq=False)
class HostMonitor(Monitor):
    """Compares the processes of a job; with a single process, it does nothing.

    Args:
        period: steps between two exchanges.
        boundary: where failures are reported.
        publish: called with the result of each exchange in process 0.
        find_job: finds this process's place in the job; by default asks JAX, once steps complete.
        monotonic: clock in seconds.
    """

    period: int
    boundary: Boundary
    publish: Callable[[Mapping[str, Any]], None]
    find_job: Callable[[], JobMember | None] = _job_of_jax
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._is_on = True
        self._loop = LoopStatistics()
        self._wake = Alarm()
        self._windows: deque[dict[str, Any]] = deque(maxlen=1)
        self._notes: deque[str] = deque(maxlen=100)
        self._thread: threading.Thread | None = None
        self._view = self._told = NONE_YET
        self._heard: dict[int, tuple[HostReport, float]] = {}

    def on_record(self, step: TimedStep, record: StepRecord) -> StepRecord:
        """Every `period` steps trigger an exchange; what it finds is in a later record.

        A finding sends the record to all sinks; numbers alone wait for a record that goes there.
        """
        if not self._is_on:
            return record
        last = self._loop.last_step
        self._loop.add(step, record.kind)
        if self._thread is None:
            self._start()
        elif step.step // self.period != last // self.period:
            self._windows.append(self._loop.take())
            self._wake.set()
        view = self._view
        notes = [self._notes.popleft() for _ in range(len(self._notes))]
        if not notes and (view is self._told or not record.is_logged):
            return record
        self._told = view
        return annotated(record, view.scalars(), notes)

    def who_is_silent(self) -> str:
        """For a hang report: which processes are behind; empty if that is not known."""
        now, heard = self.monotonic(), sorted(self._heard.items())
        behind = [
            f"process {process} is silent for {now - at:.0f} s"
            for process, (_, at) in heard
            if now - at > 3 * HEARTBEAT_SECONDS
        ]
        newest = max((report.step for _, (report, _) in heard), default=-1)
        behind += [
            f"process {process} has completed step {report.step}, others step {newest}"
            for process, (report, _) in heard
            if report.step < newest
        ]
        return "; ".join(behind[:5])

    def close(self) -> None:
        """Stops the thread; a hung store does not hold up the end of the run."""
        self._is_on = False
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _start(self) -> None:
        job = self.find_job()
        self._is_on = job is not None
        if job is not None:
            self._thread = self.boundary.thread(
                "mfu_jax hosts", "slow and missing hosts are not named", self._run, job
            )
            self._thread.start()

    def _run(self, job: JobMember) -> None:
        threads = ThreadStatistics()
        from_step, told_at = self._loop.last_step, self.monotonic()
        report = HostReport(process=job.process, host=socket.gethostname())
        while self._is_on:
            began = self.monotonic()
            self._wake.wait(_TICK_SECONDS)  # or until the next window, which a stop may also delay
            threads.woke_late(self.monotonic() - began - _TICK_SECONDS)
            if self._windows:
                window = self._windows.popleft()
                window |= threads.take(max(1, window["step"] - from_step))
                from_step = window["step"]
                report = HostReport(process=report.process, host=report.host, **window)
                self._compare(job, report)
            elif self.monotonic() - told_at > HEARTBEAT_SECONDS:  # a sign of life
                self._put(job, dataclasses.replace(report, step=self._loop.last_step))
                if job.process == 0:
                    self._hear(job)
            else:
                continue
            told_at = self.monotonic()

    def _compare(self, job: JobMember, report: HostReport) -> None:
        """Exchanges reports of the same step; process 0 draws the conclusions."""
        self._put(job, report)
        if job.process != 0:
            return
        deadline, pause = self.monotonic() + TIMEOUT_SECONDS, _POLL_SECONDS
        reports = self._hear(job)
        while sum(other.step >= report.step for other in reports) < job.processes:
            if not self._is_on or self.monotonic() > deadline:
                break
            time.sleep(pause)
            pause *= 2.0  # the store lives in this process, whose CPU time is compared
            reports = self._hear(job)
        self._view = view_of(
            reports,
            count=job.processes,
            period=self.period,
            compares_cpu=job.is_on_cpu,
            before=self._view,
        )
        self._notes.extend(self._view.notes)
        self.publish(self._view.to_json())

    def _put(self, job: JobMember, report: HostReport) -> None:
        """Replaces this process's report in the store."""
        text = json.dumps(dataclasses.asdict(report) | {"unix_seconds": time.time()})
        with _answering():
            job.store.key_value_set(f"{job.folder}/{job.process}", text, allow_overwrite=True)

    def _hear(self, job: JobMember) -> list[HostReport]:
        """All reports in the store; a new one is a sign of life."""
        with _answering():
            found = job.store.key_value_dir_get(job.folder)
        now = self.monotonic()
        for _, text in found:
            with contextlib.suppress(ValueError, TypeError):  # of another version
                report = HostReport(**json.loads(text))
                if self._heard.get(report.process, (None,))[0] != report:
                    self._heard[report.process] = report, now
        return [report for report, _ in self._heard.values()]


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Around a call of the store, which is a C++ client."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"the processes' store failed ({first_line(error)}); expected it to answer until "
            "the logger is closed",
            hint="usually process 0 has ended, or jax.distributed was shut down before; close "
            "the logger first, or pass host_log_period=0",
        ) from error
