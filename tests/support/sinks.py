"""Sinks that keep what they are given, sooner or later."""

import threading
from collections.abc import Sequence

from mfu_jax.logger.records.summary import Summary
from mfu_jax.sinks import Sink, StepRecord
from tests.support.work import HANG_SECONDS


class ListSink(Sink):
    """Keeps everything; the first writes raise `failures`, one each."""

    def __init__(self, failures: Sequence[BaseException] = (), *, every_step: bool = True) -> None:
        self.records: list[StepRecord] = []
        self.texts: list[tuple[str, str]] = []
        self.summary: Summary | None = None
        self.closed = False
        self.failures = list(failures)
        self.keeps_every_step = every_step

    def write(self, record: StepRecord) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.records.append(record)

    def write_text(self, tag: str, text: str) -> None:
        self.texts.append((tag, text))

    def write_summary(self, summary: Summary) -> None:
        self.summary = summary

    def close(self) -> None:
        self.closed = True

    @property
    def steps(self) -> list[int]:
        """The steps of all records, in order."""
        return [record.step for record in self.records]

    def scalar(self, name: str) -> list[float | None]:
        """One value per record, None where the record has none."""
        return [record.scalars.get(name) for record in self.records]


class HangingSink(ListSink):
    """Hangs in its first write until `release` is set; `begun` says that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.release = threading.Event(), threading.Event()

    def write(self, record: StepRecord) -> None:
        self.begun.set()
        self.release.wait(HANG_SECONDS)
        super().write(record)
