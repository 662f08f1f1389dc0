"""Each process reports how its steps are going; process 0 names the hosts that are slow or silent.

All of it happens on a separate thread, off the critical path and off the device: every
`host_log_period` steps each process writes one line to the key-value store of JAX's distributed
service, and process 0 reads them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError, first_line
from mfu_jax.logger.alarm import Alarm
from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.hosts.exchange import ProcessPlace, place_of
from mfu_jax.logger.hosts.report import HostReport
from mfu_jax.logger.hosts.statistics import LoopStatistics, ProcessStatistics
from mfu_jax.logger.hosts.view import HostsView, view_of
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.run_log.monitor import Monitor
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.storage.addresses import path_of
from mfu_jax.storage.files import replace_file
from mfu_jax.util.failsafe import Boundary

_log = logging.getLogger("mfu_jax")

HEARTBEAT_SECONDS = 10.0
# Process 0 waits this long for the others' reports of the same step.
TIMEOUT_SECONDS = 10.0
_TICK_SECONDS = 0.05
_POLL_SECONDS = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)


class HostWatch(Monitor):
    """Compares the processes of a job; with a single process, it does nothing.

    Args:
        config: provides `host_log_period` and `hosts_folder`.
        boundary: where failures are reported.
        place: finds this process's place in the job; by default asks JAX, once steps complete.
        monotonic: clock in seconds.
    """

    def __init__(
        self,
        config: LoggerConfig,
        boundary: Boundary,
        *,
        place: Callable[[LoggerConfig], ProcessPlace | None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.hosts_folder:  # the loop may change the working folder
            folder = Path(path_of(config.hosts_folder)).absolute()
            config = dataclasses.replace(config, hosts_folder=str(folder))
        self._config = config
        self._boundary = boundary
        self._find_place = place or place_of
        self._monotonic = monotonic
        self._is_on = config.host_log_period > 0
        self._loop = LoopStatistics()
        self._host = socket.gethostname()
        self._wake = Alarm()
        self._windows: deque[dict[str, Any]] = deque(maxlen=1)
        self._results: deque[HostsView] = deque(maxlen=100)
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._last = HostReport(process=0)
        self._view: HostsView | None = None
        self._reports: list[HostReport] = []
        self._heard: dict[int, tuple[str, float]] = {}

    def on_record(self, step: TimedStep, record: StepRecord) -> StepRecord:
        self.add(step, record.kind)
        return self.annotate(record)

    def add(self, step: TimedStep, kind: str) -> None:
        """Takes a step on the builder thread; every `host_log_period` steps trigger an exchange."""
        if not self._is_on:
            return
        last, period = self._loop.last_step, self._config.host_log_period
        self._loop.add(step, kind)
        if self._thread is None:
            self._start()
        elif step.step // period != last // period:
            self._windows.append(self._loop.take())
            self._wake.set()

    def annotate(self, record: StepRecord) -> StepRecord:
        """The record with what was found since the last one; usually the record unchanged.

        A finding sends the record to all sinks; numbers alone wait for a record that goes there.
        """
        if not self._results:
            return record
        views = list(self._results)
        notes = tuple(note for view in views for note in view.notes)
        if not (record.is_logged or notes):
            return record
        for _ in views:
            self._results.popleft()
        return dataclasses.replace(
            record,
            scalars={**record.scalars, **views[-1].scalars()},
            notes=(*record.notes, *notes),
        )

    def who_is_silent(self) -> str:
        """For a hang report: which processes are behind; empty if that is not known."""
        now = self._monotonic()
        behind = [
            f"process {process} is silent for {now - heard:.0f} s"
            for process, (_, heard) in sorted(self._heard.items())
            if now - heard > 3 * HEARTBEAT_SECONDS
        ]
        last = {report.process: report.step for report in self._reports}
        newest = max(last.values(), default=-1)
        behind += [
            f"process {process} has completed step {step}, others step {newest}"
            for process, step in sorted(last.items())
            if step < newest
        ]
        return "; ".join(behind[:5])

    def close(self) -> None:
        """Stops the thread; a hung store does not hold up the end of the run."""
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            self._thread = None

    def _start(self) -> None:
        place = self._find_place(self._config)
        if place is None:
            self._is_on = False
            return
        self._thread = self._boundary.thread(
            "mfu_jax hosts", "slow and missing hosts are not named", self._run, place
        )
        self._thread.start()

    def _run(self, place: ProcessPlace) -> None:
        signs = ProcessStatistics(self._monotonic)
        told_at, from_step = self._monotonic(), self._loop.last_step
        while not self._is_over:
            began = self._monotonic()
            self._wake.wait(_TICK_SECONDS)  # or until the next window, which a stop may also delay
            signs.slept(_TICK_SECONDS, began)
            if self._windows:
                window = self._windows.popleft()
                steps = max(1, window["step"] - from_step)
                window |= {k: None if v is None else v / steps for k, v in signs.take().items()}
                from_step = window["step"]
                self._last = HostReport(process=place.process, host=self._host, **window)
                self._exchange(place)
                told_at = self._monotonic()
            elif self._monotonic() - told_at > HEARTBEAT_SECONDS:
                self._beat(place)
                told_at = self._monotonic()

    def _exchange(self, place: ProcessPlace) -> None:
        """Performs one exchange; process 0 waits for the others and draws the conclusions."""
        self._tell(place, self._last.step)
        if place.process != 0:
            return
        reports = self._collect(place, self._last.step)
        view = view_of(
            reports,
            count=place.count,
            period=self._config.host_log_period,
            compares_cpu=place.compares_cpu,
            before=self._view,
        )
        self._results.append(view)
        self._view = view
        self._write(view)

    def _beat(self, place: ProcessPlace) -> None:
        """Writes a sign of life between two exchanges."""
        self._tell(place, self._loop.last_step)
        if place.process == 0:
            self._hear(place)

    def _tell(self, place: ProcessPlace, step: int) -> None:
        report = dataclasses.replace(
            self._last, process=place.process, step=step, unix_seconds=time.time()
        )
        try:
            place.exchange.put(place.process, report.to_text())
        except Exception as error:  # from a C++ client, or a disk
            raise _unreachable(error) from error

    def _collect(self, place: ProcessPlace, step: int) -> list[HostReport]:
        """The reports of all processes for `step`, or those there are after the time-out."""
        deadline = self._monotonic() + TIMEOUT_SECONDS
        attempts = 0
        while True:
            reports = self._hear(place)
            is_complete = sum(report.step >= step for report in reports) >= place.count
            if is_complete or self._is_over or self._monotonic() > deadline:
                return reports
            time.sleep(_POLL_SECONDS[min(attempts, len(_POLL_SECONDS) - 1)])
            attempts += 1

    def _hear(self, place: ProcessPlace) -> list[HostReport]:
        reports, now = [], self._monotonic()
        try:
            texts = place.exchange.get_all()
        except Exception as error:
            raise _unreachable(error) from error
        for text in texts:
            with contextlib.suppress(ValueError, TypeError):  # of another version
                report = HostReport.of_text(text)
                reports.append(report)
                if self._heard.get(report.process, ("", 0.0))[0] != text:
                    self._heard[report.process] = text, now
        self._reports = reports
        return reports

    def _write(self, view: HostsView) -> None:
        if not self._config.hosts_folder:
            return
        path = Path(f"{self._config.hosts_folder}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [json.dumps(view.to_json(), indent=1).encode(), b"\n"])


def _unreachable(error: Exception) -> UserError:
    return UserError(
        f"the processes' store failed ({first_line(error)}); expected it to answer until the "
        f"logger is closed; usually process 0 has ended, or jax.distributed was shut down before; "
        f"close the logger first, or pass host_log_period=0"
    )
