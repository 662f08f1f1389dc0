"""One sink on its own thread: order, retries, and what can never be written."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.logger.delivery.backlog import Backlog
from mfu_jax.logger.delivery.sink_worker import MANY_RECORDS, SinkWorker
from mfu_jax.logger.records.step_record import RecordError
from mfu_jax.logger.records.summary import Summary
from mfu_jax.sinks import StepRecord
from tests.support.fake_device import FakeClock
from tests.support.sinks import HangingSink, ListSink
from tests.support.work import HANG_SECONDS


def record(step: int, *, log_period: int = 1) -> StepRecord:
    return StepRecord(step=step, unix_seconds=0.0, scalars={}, log_period=log_period)


def records(*steps: int) -> list[StepRecord]:
    return [record(step) for step in steps]


class BatchSink(ListSink):
    """Takes batches; `refused` steps fail whenever they are in one, with the error given."""

    def __init__(self, refused: dict[int, BaseException]) -> None:
        super().__init__()
        self.refused = refused
        self.batches: list[int] = []

    def write(self, record: StepRecord) -> None:
        if record.step in self.refused:
            raise self.refused[record.step]
        super().write(record)

    def write_many(self, records: Sequence[StepRecord]) -> None:  # type: ignore[override]
        for one in records:
            if one.step in self.refused:
                raise self.refused[one.step]
        self.batches.append(len(records))
        self.records += records


@pytest.fixture
def make() -> Iterator[Callable[..., SinkWorker]]:
    """Makes workers, and ends their threads after the test."""
    made: list[SinkWorker] = []

    def new(sink: ListSink, **options: object) -> SinkWorker:
        made.append(SinkWorker(sink, **options))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for worker in made:
        worker.abandon()
        worker._thread.join(HANG_SECONDS)


def settle(worker: SinkWorker) -> None:
    assert worker.settle().wait(HANG_SECONDS)


def test_records_and_calls_arrive_in_order(make: Callable[..., SinkWorker]) -> None:
    sink = ListSink()
    worker = make(sink)
    worker.put(records(0, 1))
    worker.put([lambda: sink.write_text("tag", str(sink.steps))])
    worker.put(records(2))
    settle(worker)
    assert sink.steps == [0, 1, 2]
    assert sink.texts == [("tag", "[0, 1]")]


def test_only_some_sinks_get_the_steps_between_two_log_periods(
    make: Callable[..., SinkWorker],
) -> None:
    some, every = ListSink(every_step=False), ListSink()
    for sink in (some, every):
        worker = make(sink)
        worker.put([record(0), record(1, log_period=2)])
        settle(worker)
    assert (some.steps, every.steps) == ([0], [0, 1])


def test_a_batch_is_one_call(make: Callable[..., SinkWorker]) -> None:
    sink = BatchSink({})
    worker = make(sink)
    worker.put(records(*range(20)))
    settle(worker)
    assert sink.steps == list(range(20))
    assert sum(sink.batches) == 20
    assert worker.losses() == {}


def test_one_impossible_record_costs_only_itself(
    make: Callable[..., SinkWorker], caplog: pytest.LogCaptureFixture
) -> None:
    sink = BatchSink({3: RecordError("too large"), 5: RecordError("too large")})
    worker = make(sink)
    with caplog.at_level(logging.WARNING, "mfu_jax"):
        worker.put(records(*range(8)))
        settle(worker)
    assert sink.steps == [0, 1, 2, 4, 6, 7]
    assert worker.losses() == {"could not be written": 2}
    assert caplog.messages == [
        "BatchSink cannot write the record of step 3, which is dropped: RecordError: too large"
    ]


@pytest.mark.parametrize("error", [TypeError("a"), OverflowError("b"), UnicodeError("c")])
def test_mistakes_in_a_record_are_never_tried_again(
    make: Callable[..., SinkWorker], error: Exception
) -> None:
    sink = ListSink([error])
    worker = make(sink)
    worker.put(records(0, 1))
    settle(worker)
    assert sink.steps == [1]


@pytest.mark.parametrize(
    "error", [OSError("full"), UserError("no folder"), SystemExit(1), KeyboardInterrupt()]
)
def test_any_other_failure_is_tried_again(
    make: Callable[..., SinkWorker], error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListSink([error, error])
    worker = make(sink, monotonic=FakeClock().monotonic)
    for step in range(3):
        worker.put(records(step))
        settle(worker)  # every flush is one more attempt
    assert sink.steps == [0, 1, 2]
    assert caplog.text.count("failed at step 0") == 1
    assert "ListSink works again; 0 records were lost" in caplog.text


@pytest.mark.full
def test_attempts_are_further_and_further_apart(make: Callable[..., SinkWorker]) -> None:
    clock, attempts = FakeClock(), threading.Semaphore(0)

    class Failing(ListSink):
        def write(self, record: StepRecord) -> None:
            attempts.release()
            super().write(record)

    sink = Failing([OSError("full")] * 3)
    worker = make(sink, monotonic=clock.monotonic)

    def tries(*, after: float, patience: float = HANG_SECONDS) -> bool:
        clock.advance(after)
        worker.put(records(1))
        return attempts.acquire(timeout=patience)

    assert tries(after=0.0)
    assert not tries(after=0.0, patience=0.05)
    assert tries(after=1.0)  # fails again
    assert not tries(after=1.0, patience=0.05)
    assert tries(after=1.0)
    assert not tries(after=3.0, patience=0.05)
    assert tries(after=1.0)
    settle(worker)
    assert sink.steps == [1] * 7


def test_a_record_that_fails_alone_is_given_up(make: Callable[..., SinkWorker]) -> None:
    sink = BatchSink({1: OSError("this one")})
    worker = make(sink, monotonic=FakeClock().monotonic)
    worker.put(records(0, 1, 2, 3))
    for _ in range(5):
        settle(worker)
    assert sink.steps == [0, 2, 3]
    assert worker.losses() == {"could not be written": 1}


def test_at_the_end_one_record_that_fails_alone_costs_only_itself(
    make: Callable[..., SinkWorker],
) -> None:
    sink = BatchSink({1: OSError("this one")})
    worker = make(sink, monotonic=FakeClock().monotonic)
    worker.put(records(0, 1, 2, 3))
    assert worker.settle(is_last=True).wait(HANG_SECONDS)
    assert sink.steps == [0, 2, 3]


def test_a_record_that_fails_for_a_while_is_written_once(make: Callable[..., SinkWorker]) -> None:
    for failures in range(12):
        sink = ListSink([OSError("full")] * failures)
        worker = make(sink, monotonic=FakeClock().monotonic)
        worker.put(records(0))
        while not sink.steps:
            settle(worker)
        worker.put(records(1))
        settle(worker)
        assert sink.steps == [0, 1]


def test_a_sink_without_a_backlog_keeps_a_bounded_number_in_memory(
    make: Callable[..., SinkWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.delivery.sink_worker.MOST_QUEUE_RECORDS", 3)
    sink = HangingSink()
    worker = make(sink)
    worker.put(records(0))
    assert sink.begun.wait(HANG_SECONDS)
    worker.put(records(*range(1, 10)))
    assert worker.losses() == {"backlog full": 7}
    sink.release.set()
    settle(worker)
    assert sink.steps[-1] == 9


def test_a_backlog_takes_what_memory_does_not_and_gives_it_back_in_order(
    make: Callable[..., SinkWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("mfu_jax.logger.delivery.sink_worker.QUEUE_RECORDS", 5)
    written, caught_up = threading.Event(), threading.Event()

    class Sink(HangingSink):
        def write(self, record: StepRecord) -> None:
            super().write(record)
            if record.step == 300:
                caught_up.set()

    sink = Sink()
    backlog = Backlog(tmp_path / "backlog", ("test", {"path": tmp_path / "file"}))
    worker = make(sink, backlog=backlog)
    wake = backlog.on_written
    backlog.on_written = lambda: (wake(), written.set())[0]
    worker.put(records(0))
    assert sink.begun.wait(HANG_SECONDS)
    for step in range(1, 300, 3):
        worker.put(records(step, step + 1, step + 2))
    assert len(worker._queue) <= 5
    assert written.wait(HANG_SECONDS)
    assert backlog.overflow.path.exists()
    sink.release.set()
    assert caught_up.wait(HANG_SECONDS)  # by itself: nothing else happens
    assert sink.steps == list(range(301))
    worker.put(records(301))
    settle(worker)
    assert sink.steps[-1] == 301
    assert worker.losses() == {}
    assert not (tmp_path / "backlog").exists()


def test_a_hanging_sink_is_abandoned_and_its_records_are_kept(
    make: Callable[..., SinkWorker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = HangingSink()
    made_by = ("test", {"path": tmp_path / "file"})
    worker = make(sink, backlog=Backlog(tmp_path / "backlog", made_by))
    worker.put(records(0, 1, 2))
    assert sink.begun.wait(HANG_SECONDS)
    assert not worker.settle().wait(0.01)
    worker.abandon()
    worker.keep_rest(HANG_SECONDS)
    assert worker.losses() == {}
    assert "3 records wait in" in caplog.text
    left = Backlog(tmp_path / "backlog", made_by, start_step=10)
    assert [record.step for segment in left.old for record in segment.read(10)] == [0, 1, 2]
    sink.release.set()
    worker._thread.join(HANG_SECONDS)
    assert sink.steps == [0]  # what it was writing; nothing after that
    assert sink.closed


def test_the_next_run_writes_first_what_the_last_one_left(
    make: Callable[..., SinkWorker], tmp_path: Path
) -> None:
    made_by = ("test", {"path": tmp_path / "file"})
    Backlog(tmp_path / "backlog", made_by).keep(records(*range(3, 9)), HANG_SECONDS)
    sink = ListSink()
    worker = make(sink, backlog=Backlog(tmp_path / "backlog", made_by, start_step=7))
    worker.put(records(7, 8))
    settle(worker)
    assert sink.steps == [3, 4, 5, 6, 7, 8]  # 7 and 8 are those of this run
    worker.keep_rest(HANG_SECONDS)
    assert not (tmp_path / "backlog").exists()


def test_what_is_lost_at_the_end_is_counted(
    make: Callable[..., SinkWorker], caplog: pytest.LogCaptureFixture
) -> None:
    worker = make(ListSink([OSError("full")] * 100), monotonic=FakeClock().monotonic)
    worker.put(records(0, 1))
    settle(worker)
    worker.keep_rest(0.0)
    assert worker.losses() == {"not written in time": 2}
    assert "2 records could not be written" in caplog.text


def test_a_call_that_fails_is_reported_and_not_repeated(
    make: Callable[..., SinkWorker], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(ListSink):
        def write_summary(self, summary: Summary) -> None:
            raise SystemExit("no")

    sink = Broken()
    worker = make(sink)
    assert worker.finish(Summary(steps=1)).wait(HANG_SECONDS)
    assert caplog.messages == ["Broken.write_summary failed: SystemExit: no"]
    assert sink.closed
    worker._thread.join(HANG_SECONDS)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class NowAndThen(BatchSink):
    periods_per_write = 2


def test_a_sink_for_people_is_written_once_in_some_periods(
    make: Callable[..., SinkWorker],
) -> None:
    sink = NowAndThen({})
    worker = make(sink, period_seconds=HANG_SECONDS)
    worker.put(records(0))  # nothing came before it
    wait_until(lambda: sink.steps == [0] and not worker._is_asleep)
    for step in range(1, 200):
        worker.put(records(step))
    assert sink.steps == [0]
    assert worker.settle().wait(HANG_SECONDS)  # a flush does not wait for the period
    assert sink.steps == list(range(200))
    worker.put(records(*range(200, 200 + MANY_RECORDS)))
    wait_until(lambda: len(sink.steps) == 200 + MANY_RECORDS)


def test_without_a_period_every_sink_is_written_at_once(make: Callable[..., SinkWorker]) -> None:
    sink = NowAndThen({})
    worker = make(sink, period_seconds=0.0)
    for step in range(5):
        worker.put(records(step))
        wait_until(lambda: len(sink.steps) == step + 1)  # noqa: B023


def test_a_worker_that_failed_with_nothing_to_write_sleeps(
    make: Callable[..., SinkWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.delivery.sink_worker.FIRST_RETRY_SECONDS", 0.01)
    worker = make(ListSink())
    looks = []

    def fails_once() -> None:
        looks.append(1)
        if len(looks) == 1:
            worker.keep_rest(0.0)
            raise RuntimeError("a bug of ours")
        SinkWorker._work(worker)

    monkeypatch.setattr(worker, "_work", fails_once)
    worker.put(records(0))
    wait_until(lambda: len(looks) > 1)
    time.sleep(0.2)
    assert len(looks) < 10
