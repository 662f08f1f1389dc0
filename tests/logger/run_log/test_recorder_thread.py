"""The thread that makes records: order, bounds, and how rarely it is woken."""

import math
import threading
import time
import weakref
from collections.abc import Sequence

import pytest

from mfu_jax.logger.run_log.recorder import RecorderThread
from tests.support.fake_device import FakeClock
from tests.support.work import HANG_SECONDS


class Gate:
    """A handler that notes its batches and can be held up."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun, self.release = threading.Event(), threading.Event()

    def __call__(self, batch: Sequence[int]) -> None:
        self.begun.set()
        self.release.wait(HANG_SECONDS)
        self.batches.append(list(batch))

    @property
    def seen(self) -> list[int]:
        return [number for batch in self.batches for number in batch]


def test_a_call_before_the_first_item_does_not_hold_it_up() -> None:
    gate, called = Gate(), threading.Event()
    thread = RecorderThread(gate, period_seconds=10 * HANG_SECONDS)
    thread.put(called.set)
    assert called.wait(HANG_SECONDS)
    thread.put(0)
    assert gate.begun.wait(HANG_SECONDS)
    gate.release.set()
    thread.close(HANG_SECONDS)


def test_items_are_handled_in_order_and_in_batches() -> None:
    gate = Gate()
    thread = RecorderThread(gate, size=100)
    thread.put(0)
    assert gate.begun.wait(HANG_SECONDS)
    for number in range(1, 42):
        thread.put(number)
    gate.release.set()
    assert thread.settle(HANG_SECONDS)
    assert gate.seen == list(range(42))
    assert [len(batch) for batch in gate.batches] == [1, 41]
    thread.close(HANG_SECONDS)
    assert thread.dropped == 0


def test_calls_keep_their_place_between_items() -> None:
    events: list[object] = []
    thread = RecorderThread(events.append)
    thread.put(0)
    thread.put(lambda: events.append("call"))
    thread.put(1)
    assert thread.settle(HANG_SECONDS)
    thread.close(HANG_SECONDS)
    assert events == [[0], "call", [1]]


def test_when_a_call_is_made_nothing_keeps_the_items_before_it_alive() -> None:
    """Who waits for a flush may count the arrays that are alive."""
    gate, seen = Gate(), list[bool]()
    gate.release.set()
    thread = RecorderThread(lambda batch: gate([0]))
    items = [threading.Event() for _ in range(3)]
    alive = [weakref.ref(item) for item in items]
    thread.put(items.pop(0))
    assert gate.begun.wait(HANG_SECONDS)  # the others come as one batch
    while items:
        thread.put(items.pop())
    thread.put(lambda: seen.extend(item() is not None for item in alive))
    assert thread.settle(HANG_SECONDS)
    thread.close(HANG_SECONDS)
    assert seen == [False] * 3


def test_an_item_that_comes_alone_is_handled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mfu_jax.logger.run_log.recorder.IDLE_SECONDS", HANG_SECONDS)
    handled = threading.Event()
    thread = RecorderThread(lambda batch: handled.set())
    thread.put(0)
    assert handled.wait(HANG_SECONDS / 2)
    thread.close(HANG_SECONDS)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's periods are as long as they are after a while."""
    monkeypatch.setattr("mfu_jax.logger.run_log.recorder.FIRST_PERIOD_SECONDS", math.inf)


def test_a_young_run_does_not_wait_for_a_whole_period() -> None:
    handled = threading.Semaphore(0)
    thread = RecorderThread(lambda batch: handled.release(), size=100, period_seconds=HANG_SECONDS)
    for number in range(3):
        thread.put(number)
        assert handled.acquire(timeout=HANG_SECONDS / 2)
    thread.close(HANG_SECONDS)


@pytest.mark.usefixtures("steady")
def test_slow_handling_does_not_add_to_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a kill loses the steps of a period, and of the time that handling took."""
    clock, due = FakeClock(), list[float]()
    monkeypatch.setattr("mfu_jax.logger.run_log.recorder.time.monotonic", clock.monotonic)

    def handle(batch: Sequence[int]) -> None:
        for seconds in (0.25, 1.0):
            clock.advance(seconds)
            due.append(thread._due_seconds())

    thread = RecorderThread(handle, period_seconds=1.0)
    thread.put(0)
    assert thread.settle(HANG_SECONDS)
    monkeypatch.undo()
    thread.close(HANG_SECONDS)
    assert due == [0.75, pytest.approx(0.0, abs=1e-3)]


@pytest.mark.usefixtures("steady")
def test_nobody_is_woken_while_items_come_faster_than_periods() -> None:
    seen: list[int] = []
    first = threading.Event()

    def handle(batch: Sequence[int]) -> None:
        seen.extend(batch)
        first.set()

    thread = RecorderThread(handle, size=100, period_seconds=HANG_SECONDS)
    thread.put(0)
    assert first.wait(HANG_SECONDS)
    while thread._is_asleep or not thread._wake._lock.locked():  # it goes back to its wait
        pass
    for number in range(1, 49):
        thread.put(number)
    assert thread._wake._lock.locked()
    assert seen == [0]
    thread.put(49)
    thread.put(50)  # half full: now it is worth a wake-up
    assert thread.settle(HANG_SECONDS)
    assert seen == list(range(51))
    thread.close(HANG_SECONDS)


@pytest.mark.usefixtures("steady")
def test_in_a_hurry_the_thread_is_woken_for_two_items_within_a_period() -> None:
    handled = threading.Semaphore(0)
    thread = RecorderThread(lambda batch: handled.release(), size=100, period_seconds=HANG_SECONDS)
    thread.put(0)
    assert handled.acquire(timeout=HANG_SECONDS)
    while thread._is_asleep or not thread._wake._lock.locked():  # it goes back to its wait
        pass
    thread.flush_soon()
    for number in (1, 2):
        thread.put(number)
        assert handled.acquire(timeout=HANG_SECONDS / 2)
    thread.put(3)
    assert thread._wake._lock.locked()
    thread.close(HANG_SECONDS)


def test_without_a_period_each_item_is_handled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mfu_jax.logger.run_log.recorder.IDLE_SECONDS", HANG_SECONDS)
    handled = threading.Semaphore(0)
    thread = RecorderThread(lambda batch: handled.release(), period_seconds=0.0)
    for number in range(5):
        thread.put(number)
        assert handled.acquire(timeout=HANG_SECONDS / 2)
    thread.close(HANG_SECONDS)


def test_an_error_costs_one_batch_and_not_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def handle(batch: Sequence[int]) -> None:
        if batch[0] in (1, 2):
            raise RuntimeError("a defect")
        seen.extend(batch)

    thread = RecorderThread(handle)
    for number in range(4):
        thread.put(number)
        assert thread.settle(HANG_SECONDS)
    thread.close(HANG_SECONDS)
    assert seen == [0, 3]
    assert caplog.text.count("some metrics were lost: ") == 1


def test_a_stuck_thread_lets_the_run_go_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.run_log.recorder.PATIENCE_SECONDS", 0.0)
    gate = Gate()
    thread = RecorderThread(gate, size=2)
    thread.put(0)
    assert gate.begun.wait(HANG_SECONDS)
    for number in range(1, 6):  # two fit; the oldest go
        thread.put(number)
    assert thread.dropped == 3
    assert caplog.text.count("making records is stuck") == 1
    gate.release.set()
    assert thread.settle(HANG_SECONDS)
    assert gate.seen == [0, 4, 5]
    thread.close(HANG_SECONDS)


def test_a_slow_thread_holds_up_the_run_for_a_bounded_time_in_all(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.run_log.recorder.PATIENCE_SECONDS", 0.05)
    seen: list[int] = []

    def slow(batch: Sequence[int]) -> None:
        time.sleep(0.005 * len(batch))
        seen.extend(batch)

    thread = RecorderThread(slow, size=2)
    for number in range(200):  # a second of work
        thread.put(number)
    assert thread.settle(HANG_SECONDS)
    thread.close(HANG_SECONDS)
    assert len(seen) + thread.dropped == 200
    assert thread.dropped > 0
    assert seen == sorted(seen)
    assert caplog.text.count("making records is stuck or too slow") == 1


def test_patience_comes_back_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr("mfu_jax.logger.run_log.recorder.time.monotonic", clock.monotonic)
    thread = RecorderThread(len, size=2)
    waited = []

    def never(left: float) -> bool:
        waited.append(left)
        clock.advance(left)
        return False

    monkeypatch.setattr(thread._has_moved, "wait", never)
    thread.size = -1  # always full
    for pause in (0.0, 0.0, 10.0, 1e6):
        clock.advance(pause)
        thread._make_room()
    monkeypatch.undo()
    thread.close(HANG_SECONDS)
    assert waited == pytest.approx([1.0, 0.1, 1.0])


def test_what_is_left_at_the_end_counts_as_dropped() -> None:
    gate = Gate()
    thread = RecorderThread(gate)
    thread.put(0)
    assert gate.begun.wait(HANG_SECONDS)
    thread.put(1)
    assert not thread.settle(0.0)
    thread.close(0.0)
    assert thread.dropped == 1
    gate.release.set()
