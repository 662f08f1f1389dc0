"""One sink on its own thread: order, retries, and what can never be written."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.logger.records.step_record import RecordError
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.run_log import events
from mfu_jax.logger.run_log.follower import Follower
from mfu_jax.logger.run_log.reading import LoggedRecords, read_events
from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.sinks import JsonlSink, StepRecord
from mfu_jax.storage.files import AppendOnlyFile
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


class Ordered(ListSink):
    """Keeps the order of records and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[object] = []

    def write(self, record: StepRecord) -> None:
        self.order.append(record.step)

    def write_text(self, tag: str, text: str) -> None:
        self.order.append((tag, text))


@pytest.fixture
def make() -> Iterator[Callable[..., Follower]]:
    """Makes followers of logs in memory, and ends their threads after the test."""
    made: list[Follower] = []

    def new(sink: ListSink, **options: object) -> Follower:
        log = RunLog()
        made.append(Follower(log, sink, **options))  # type: ignore[arg-type]
        log._followers.append(made[-1])
        made[-1].start()
        return made[-1]

    yield new
    for follower in made:
        follower.abandon()
        follower._thread.join(HANG_SECONDS)


def settle(follower: Follower) -> None:
    assert follower.settle().wait(HANG_SECONDS)


def test_records_and_texts_arrive_in_order(make: Callable[..., Follower]) -> None:
    sink = Ordered()
    follower = make(sink)
    follower._log.append(records(0, 1))
    follower._log.event(events.TEXT, step=1, tag="tag", text="text")
    follower._log.append(records(2))
    settle(follower)
    assert sink.order == [0, 1, ("tag", "text"), 2]


def test_only_some_sinks_get_the_steps_between_two_log_periods(
    make: Callable[..., Follower],
) -> None:
    some, every = ListSink(every_step=False), ListSink()
    for sink in (some, every):
        follower = make(sink)
        follower._log.append([record(0), record(1, log_period=2)])
        settle(follower)
    assert (some.steps, every.steps) == ([0], [0, 1])


def test_a_batch_is_one_call(make: Callable[..., Follower]) -> None:
    sink = BatchSink({})
    follower = make(sink)
    follower._log.append(records(*range(20)))
    settle(follower)
    assert sink.steps == list(range(20))
    assert sum(sink.batches) == 20
    assert follower.lost == {}


def test_one_impossible_record_costs_only_itself(
    make: Callable[..., Follower], caplog: pytest.LogCaptureFixture
) -> None:
    sink = BatchSink({3: RecordError("too large"), 5: RecordError("too large")})
    follower = make(sink)
    with caplog.at_level(logging.WARNING, "mfu_jax"):
        follower._log.append(records(*range(8)))
        settle(follower)
    assert sink.steps == [0, 1, 2, 4, 6, 7]
    assert follower.lost == {"could not be written": 2}
    assert caplog.messages == [
        "BatchSink cannot write the record of step 3, which is skipped: RecordError: too large"
    ]


@pytest.mark.parametrize("error", [TypeError("a"), OverflowError("b"), UnicodeError("c")])
def test_mistakes_in_a_record_are_never_tried_again(
    make: Callable[..., Follower], error: Exception
) -> None:
    sink = ListSink([error])
    follower = make(sink)
    follower._log.append(records(0, 1))
    settle(follower)
    assert sink.steps == [1]


@pytest.mark.parametrize(
    "error", [OSError("full"), UserError("no folder"), SystemExit(1), KeyboardInterrupt()]
)
def test_any_other_failure_is_tried_again(
    make: Callable[..., Follower], error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListSink([error, error])
    follower = make(sink, monotonic=FakeClock().monotonic)
    for step in range(3):
        follower._log.append(records(step))
        settle(follower)  # every flush is one more attempt
    assert sink.steps == [0, 1, 2]
    assert caplog.text.count("failed at step 0") == 1
    assert "ListSink works again; 0 records lost" in caplog.text


@pytest.mark.full
def test_attempts_are_further_and_further_apart(make: Callable[..., Follower]) -> None:
    clock, attempts = FakeClock(), threading.Semaphore(0)

    class Failing(ListSink):
        def write(self, record: StepRecord) -> None:
            attempts.release()
            super().write(record)

    sink = Failing([OSError("full")] * 3)
    follower = make(sink, monotonic=clock.monotonic)

    def tries(*, after: float, patience: float = HANG_SECONDS) -> bool:
        clock.advance(after)
        follower._log.append(records(1))
        return attempts.acquire(timeout=patience)

    assert tries(after=0.0)
    assert not tries(after=0.0, patience=0.05)
    assert tries(after=1.0)  # fails again
    assert not tries(after=1.0, patience=0.05)
    assert tries(after=1.0)
    assert not tries(after=3.0, patience=0.05)
    assert tries(after=1.0)
    settle(follower)
    assert sink.steps == [1] * 7


def test_a_record_that_fails_alone_is_given_up(make: Callable[..., Follower]) -> None:
    sink = BatchSink({1: OSError("this one")})
    follower = make(sink, monotonic=FakeClock().monotonic)
    follower._log.append(records(0, 1, 2, 3))
    for _ in range(5):
        settle(follower)
    assert sink.steps == [0, 2, 3]
    assert follower.lost == {"could not be written": 1}


def test_at_the_end_one_record_that_fails_alone_costs_only_itself(
    make: Callable[..., Follower],
) -> None:
    sink = BatchSink({1: OSError("this one")})
    follower = make(sink, monotonic=FakeClock().monotonic)
    follower._log.append(records(0, 1, 2, 3))
    assert follower.settle(is_last=True).wait(HANG_SECONDS)
    assert sink.steps == [0, 2, 3]


def test_a_record_that_fails_for_a_while_is_written_once(make: Callable[..., Follower]) -> None:
    for failures in range(12):
        sink = ListSink([OSError("full")] * failures)
        follower = make(sink, monotonic=FakeClock().monotonic)
        follower._log.append(records(0))
        while not sink.steps:
            settle(follower)
        follower._log.append(records(1))
        settle(follower)
        assert sink.steps == [0, 1]


def test_a_log_in_memory_keeps_a_bounded_number(
    make: Callable[..., Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.MOST_ITEMS", 3)
    sink = HangingSink()
    follower = make(sink)
    follower._log.append(records(0))
    assert sink.begun.wait(HANG_SECONDS)
    follower._log.event(events.TEXT, step=0, tag="tag", text="early")
    follower._log.append(records(*range(1, 10)))
    sink.release.set()
    settle(follower)
    assert sink.steps == [0, 7, 8, 9]
    assert sink.texts == [("tag", "early")]
    assert follower.lost == {"too far behind": 6}


def test_a_log_in_memory_forgets_what_every_sink_has(
    make: Callable[..., Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.MOST_ITEMS", 3)
    sink = ListSink()
    follower = make(sink)
    for step in range(50):
        follower._log.append(records(step))
        settle(follower)
    assert not follower._queue
    follower._log.append(records(50))
    settle(follower)
    assert sink.steps == list(range(51))
    assert follower.lost == {}


def test_after_a_long_outage_the_log_writes_all_its_events_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.MOST_ITEMS", 5)
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.LONGEST_RETRY_SECONDS", 0.01)
    fails, works = threading.Event(), threading.Event()
    append = AppendOnlyFile.append

    def write(file: AppendOnlyFile, piece: bytes) -> None:
        if not works.is_set():
            fails.set()
            raise OSError("full")
        append(file, piece)

    monkeypatch.setattr(AppendOnlyFile, "append", write)
    log = RunLog(tmp_path / "metrics.jsonl")
    file = log.follow(JsonlSink(tmp_path / "metrics.jsonl"))
    (writer,) = log.own_followers
    assert fails.wait(HANG_SECONDS)
    for step in range(20):
        log.event(events.BACK, step=step)
    log.append(records(0, 1))
    assert writer._texts
    works.set()
    wait_until(lambda: not (writer._texts or writer._queue or writer._batch))
    log.append(records(2))
    settle(file)
    log.close()
    told = [e["step"] for e in read_events(log_file(tmp_path), events.BACK)]
    assert told == list(range(20))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    assert (writer.lost, file.lost) == ({}, {})


def test_what_a_sink_never_wanted_is_not_lost(
    make: Callable[..., Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.MOST_ITEMS", 3)
    sink = HangingSink()
    sink.keeps_every_step = False
    follower = make(sink)
    follower._log.append([record(0, log_period=5)])
    assert sink.begun.wait(HANG_SECONDS)
    follower._log.append([record(step, log_period=5) for step in range(1, 15)])
    sink.release.set()
    settle(follower)
    assert sink.steps == [0, 5, 10]
    assert follower.lost == {}


@pytest.mark.parametrize("log_period", [1, 10])
def test_what_memory_no_longer_has_comes_from_the_file_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log_period: int
) -> None:
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.MOST_ITEMS", 5)
    caught_up = threading.Event()

    class Sink(HangingSink):
        def write(self, record: StepRecord) -> None:
            super().write(record)
            if record.step == 300:
                caught_up.set()

    sink = Sink()
    sink.keeps_every_step = log_period == 1
    log = RunLog(tmp_path / "metrics.jsonl")
    log.log_period = log_period
    writer = log.follow(JsonlSink(tmp_path / "metrics.jsonl"))
    follower = log.follow(sink)
    log.append([record(0, log_period=log_period)])
    assert sink.begun.wait(HANG_SECONDS)
    for step in range(1, 301):
        log.append([record(step, log_period=log_period)])
        if step == 150:
            log.event(events.TEXT, step=150, tag="tag", text="half")
        settle(writer)
    assert (len(writer._queue), len(follower._queue)) == (0, 5)
    sink.release.set()
    assert caught_up.wait(HANG_SECONDS)  # by itself: nothing else happens
    assert sink.steps == list(range(0, 301, log_period))
    wait_until(lambda: sink.texts == [("tag", "half")])
    assert not follower._queue  # it has left out what it had from the file
    log.append([record(310, log_period=log_period)])
    settle(follower)
    assert sink.steps[-1] == 310
    assert follower.lost == {}
    settle(writer)
    log.close()
    told = [e["e"] for e in read_events(log_file(tmp_path), events.BEHIND, events.CAUGHT_UP)]
    assert told == [events.BEHIND, events.CAUGHT_UP]


def test_what_the_file_had_no_room_for_is_lost_to_a_sink_that_lacks_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both hold step 0 and wait; of 1 to 20 there is room for the last five."""
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.MOST_ITEMS", 5)
    begun, works = threading.Event(), threading.Event()
    append = JsonlSink.write_many

    def write(file: JsonlSink, records: Sequence[StepRecord]) -> None:
        begun.set()
        assert works.wait(HANG_SECONDS)
        append(file, records)

    monkeypatch.setattr(JsonlSink, "write_many", write)
    monkeypatch.setattr(JsonlSink, "write", lambda file, record: write(file, [record]))
    sink, log = HangingSink(), RunLog(tmp_path / "metrics.jsonl")
    follower = log.follow(sink)
    file = log.follow(JsonlSink(tmp_path / "metrics.jsonl"))
    log.append(records(0))
    assert sink.begun.wait(HANG_SECONDS)
    assert begun.wait(HANG_SECONDS)
    for steps in ((1, 2, 3), range(4, 21)):
        log.append(records(*steps))
    works.set()
    sink.release.set()
    for each in (file, follower):
        settle(each)
    log.close()
    assert sink.steps == [0, *range(16, 21)]
    assert file.lost == follower.lost == {"too far behind": 15}


def test_an_event_that_is_nested_too_deeply_is_skipped(tmp_path: Path) -> None:
    deep = '{"e":"logger","log_period":' + 100_000 * "["
    (tmp_path / "events").write_text(deep + '\n{"e":"logger","log_period":3}\n')
    found = read_events(tmp_path / "events", events.LOGGER)
    assert [event["log_period"] for event in found] == [3]


def test_a_sink_that_failed_within_a_batch_gets_what_came_after_it_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What memory had no room for follows the rest of the batch, before anything newer."""
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.MOST_ITEMS", 5)
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.LONGEST_RETRY_SECONDS", 0.01)
    fails, works = threading.Event(), threading.Event()

    class Sink(ListSink):
        def write(self, record: StepRecord) -> None:
            if record.step >= 2 and not works.is_set():
                fails.set()
                raise OSError("down")
            super().write(record)

    sink, log = Sink(), RunLog(tmp_path / "metrics.jsonl")
    writer = log.follow(JsonlSink(tmp_path / "metrics.jsonl"))
    follower = log.follow(sink)
    log.append(records(0, 1, 2, 3))
    assert fails.wait(HANG_SECONDS)
    for step in range(4, 41):
        log.append(records(step))
        if step in (20, 39):
            log.event(events.TEXT, step=step, tag="tag", text=str(step))
        settle(writer)
    works.set()
    wait_until(lambda: len(sink.steps) == 41 and len(sink.texts) == 2)
    assert sink.steps == list(range(41))
    assert sink.texts == [("tag", "20"), ("tag", "39")]
    assert follower.lost == {}
    log.close()


def test_a_sink_that_fails_at_what_the_file_has_gets_each_record_once(tmp_path: Path) -> None:
    file = JsonlSink(tmp_path / "metrics.jsonl")
    file.write_many(records(*range(6)))
    sink = ListSink([OSError("down")] * 3)
    follower = Follower(RunLog(), sink, monotonic=FakeClock().monotonic)
    follower.begin_behind(LoggedRecords(file.path, 1, after=0))
    follower.start()
    for _ in range(5):  # every flush is one more attempt
        assert (follower.last is None) is (sink.steps == [])
        follower.count_rest(is_on_disk=True)  # reads ahead, and passes nothing
        settle(follower)
    assert sink.steps == [1, 2, 3, 4, 5]
    assert follower.lost == {}
    assert follower.last == record(5)
    follower.abandon()
    follower._thread.join(HANG_SECONDS)
    file.close()


def log_file(folder: Path) -> Path:
    return folder / "metrics.jsonl.events.0.jsonl"


def test_the_next_process_writes_first_what_a_hanging_sink_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    log, sink = RunLog(path), HangingSink()
    writer = log.follow(JsonlSink(path))
    follower = log.follow(sink)
    log.append(records(*range(3)))
    assert sink.begun.wait(HANG_SECONDS)
    settle(writer)
    assert not follower.settle().wait(0.01)
    follower.abandon()
    follower.count_rest(is_on_disk=log.is_on_disk(follower))
    assert follower.lost == {}
    assert "HangingSink lacks 3 records, which the run log has" in caplog.text
    log.close()
    sink.release.set()
    follower._thread.join(HANG_SECONDS)
    assert sink.steps == [0]  # what it was writing; nothing after that
    assert sink.closed
    resumed, again = RunLog(path), HangingSink()
    again.release.set()
    file = resumed.follow(JsonlSink(path, resume_from_step=2), start_step=2)
    follower = resumed.follow(again, start_step=2)
    resumed.append(records(2, 3))
    settle(follower)
    settle(file)
    assert again.steps == [0, 1, 2, 3]  # 2 is that of this process
    resumed.close()


def test_what_is_lost_at_the_end_is_counted(
    make: Callable[..., Follower], caplog: pytest.LogCaptureFixture
) -> None:
    follower = make(ListSink([OSError("full")] * 100), monotonic=FakeClock().monotonic)
    follower._log.append(records(0, 1))
    settle(follower)
    follower.count_rest(is_on_disk=False)
    assert follower.lost == {"not written in time": 2}
    assert "2 records could not be written" in caplog.text


def test_what_comes_between_the_last_request_and_the_end_is_written(
    make: Callable[..., Follower],
) -> None:
    """As the last records of a slow recorder, and an alarm."""
    begun, release = threading.Event(), threading.Event()

    class SlowDisk(ListSink):
        def flush(self) -> None:
            begun.set()
            release.wait(HANG_SECONDS)

    follower = make(sink := SlowDisk())
    follower.settle(is_last=True)
    assert begun.wait(HANG_SECONDS)
    follower._log.append(records(0, 1))
    done = follower.finish(Summary(steps=2))
    release.set()
    assert done.wait(HANG_SECONDS)
    assert (sink.steps, sink.closed) == ([0, 1], True)


def test_a_call_that_fails_is_reported_and_not_repeated(
    make: Callable[..., Follower], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(ListSink):
        def write_summary(self, summary: Summary) -> None:
            raise SystemExit("no")

    sink = Broken()
    follower = make(sink)
    assert follower.finish(Summary(steps=1)).wait(HANG_SECONDS)
    assert caplog.messages == ["Broken.write_summary failed: SystemExit: no"]
    assert sink.closed
    follower._thread.join(HANG_SECONDS)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_sink_is_written_as_soon_as_records_come(make: Callable[..., Follower]) -> None:
    sink = BatchSink({})
    follower = make(sink)
    for step in range(5):
        follower._log.append(records(step))
        wait_until(lambda: len(sink.steps) == step + 1)  # noqa: B023


def test_a_follower_that_failed_with_nothing_to_write_sleeps(
    make: Callable[..., Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.FIRST_RETRY_SECONDS", 0.01)
    follower = make(ListSink())
    looks = []

    def fails_once() -> None:
        looks.append(1)
        if len(looks) == 1:
            raise RuntimeError("a bug of ours")
        Follower._work(follower)

    monkeypatch.setattr(follower, "_work", fails_once)
    follower._log.append(records(0))
    wait_until(lambda: len(looks) > 1)
    time.sleep(0.2)
    assert len(looks) < 10
