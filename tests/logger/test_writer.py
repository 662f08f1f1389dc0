"""The writer's thread: order, bounds, and sinks that fail."""

import logging
import threading

import pytest

from mfu_jax.logger.sinks import StepRecord
from mfu_jax.logger.writer import BackgroundWriter, GuardedSink
from tests.support.fake_device import FakeClock
from tests.support.sinks import ListSink
from tests.support.work import HANG_SECONDS


def record(step: int) -> StepRecord:
    return StepRecord(step=step, unix_seconds=0.0, scalars={})


def steps(sink: ListSink) -> list[int]:
    return [record.step for record in sink.records]


def test_items_are_handled_in_order_and_all_before_close_returns() -> None:
    seen: list[int] = []
    writer = BackgroundWriter(seen.append, size=10)
    for number in range(1000):
        writer.put(number)
    assert writer.flush(HANG_SECONDS)
    assert seen == list(range(1000))
    writer.put(1000)
    assert writer.close(HANG_SECONDS)
    assert seen == list(range(1001))
    assert writer.dropped == 0


def test_an_error_costs_one_item_and_not_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def handle(number: int) -> None:
        if number == 1:
            raise RuntimeError("a defect")
        seen.append(number)

    writer = BackgroundWriter(handle)
    for number in range(3):
        writer.put(number)
    assert writer.close(HANG_SECONDS)
    assert seen == [0, 2]
    assert "a defect" in caplog.text


def test_a_stuck_writer_lets_the_run_go_on(caplog: pytest.LogCaptureFixture) -> None:
    release, begun = threading.Event(), threading.Event()
    seen: list[int] = []

    def handle(number: int) -> None:
        begun.set()
        release.wait(HANG_SECONDS)
        seen.append(number)

    writer = BackgroundWriter(handle, size=2, patience_seconds=0.0)
    writer.put(0)
    assert begun.wait(HANG_SECONDS)
    for number in range(1, 6):  # two fit, three do not
        writer.put(number)
    assert writer.dropped == 3
    assert caplog.text.count("writing metrics is stuck") == 1
    release.set()
    assert writer.flush(HANG_SECONDS)
    writer.put(6)
    assert writer.close(HANG_SECONDS)
    assert seen == [0, 1, 2, 6]


def test_a_failing_sink_gets_its_records_later_in_order(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    sink = ListSink([OSError("full"), OSError("full")])
    guarded = GuardedSink(sink, clock.monotonic)
    guarded.write(record(0))  # fails: tried again after 1 s
    guarded.write(record(1))  # not tried
    assert len(sink.failures) == 1
    clock.advance(1.0)
    guarded.write(record(2))  # fails: tried again after 2 s
    clock.advance(1.0)
    guarded.write(record(3))  # not tried
    assert steps(sink) == []
    clock.advance(1.0)
    with caplog.at_level(logging.WARNING, "mfu_jax"):
        guarded.write(record(4))
    assert steps(sink) == [0, 1, 2, 3, 4]
    assert caplog.text.count("failed at step") == 1
    assert "ListSink works again; 0 records were lost" in caplog.text


def test_what_a_sink_missed_is_tried_once_more_at_the_end() -> None:
    sink = ListSink([OSError("full")])
    guarded = GuardedSink(sink, FakeClock().monotonic)
    guarded.write(record(0))
    guarded.close()
    assert steps(sink) == [0]
    assert sink.closed


def test_a_sink_that_never_works_keeps_a_bounded_backlog(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.writer.BACKLOG_RECORDS", 3)
    guarded = GuardedSink(ListSink([OSError("full")] * 100), FakeClock().monotonic)
    for step in range(10):
        guarded.write(record(step))
    assert len(guarded._backlog) == 3
    guarded.close()
    assert "10 records could not be written" in caplog.text
